"""One plugin's implementation of a hook, ready to be called inside the wrappers that other plugins put around it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pluggy import HookImpl

from slime_core.errors import PluginError, SlimeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bound:
    """One plugin's implementation of a hook inside every loaded wrapper of that hook; called by keyword."""

    hook: str
    name: str
    origin: str
    impl: HookImpl
    wrappers: tuple[HookImpl, ...]
    """Outermost first."""

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        return inspect.iscoroutinefunction(self.impl.function)

    def __call__(self, **kwargs: Any) -> Any:
        """The hook's result; for an `async def` implementation, its coroutine."""
        if self.is_async:
            return self._call_async(kwargs)
        entered = self._enter(kwargs)
        try:
            outcome: Any = _call(self.impl, kwargs)
        except BaseException as error:
            return _leave(entered, None, error)
        return _leave(entered, outcome, None)

    async def _call_async(self, kwargs: dict[str, Any]) -> Any:
        entered = self._enter(kwargs)
        try:
            outcome = await _call(self.impl, kwargs)
        except BaseException as error:
            return _leave(entered, None, error)
        return _leave(entered, outcome, None)

    def _enter(self, kwargs: dict[str, Any]) -> list[Generator[None, Any, Any]]:
        entered = []
        try:
            for wrapper in self.wrappers:
                generator = _call(wrapper, kwargs)
                next(generator)
                entered.append(generator)
        except BaseException as error:
            _leave(entered, None, error)
            raise
        return entered


@contextmanager
def blamed(bound: Bound) -> Iterator[None]:
    """Turn what a plugin raises into an error that names it; the traceback goes to the process's log.

    Raises:
        PluginError: for any Exception that was not written for the user.
    """
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        logger.exception("plugin '%s': %s raised", bound.name, bound.hook)
        raise PluginError(
            f"plugin '{bound.name}' from {bound.origin}: {bound.hook} raised {type(error).__name__}: {error} "
            "(the traceback is in the run's logs)"
        ) from error


def _call(impl: HookImpl, kwargs: dict[str, Any]) -> Any:
    return impl.function(*[kwargs[name] for name in impl.argnames])


def _leave(entered: list[Generator[None, Any, Any]], result: Any, error: BaseException | None) -> Any:
    """Resume the wrappers, innermost first, each with the result or the error of what it wraps."""
    for generator in reversed(entered):
        try:
            if error is None:
                generator.send(result)
            else:
                generator.throw(error)
        except StopIteration as stop:
            result, error = stop.value, None
        except BaseException as raised:
            error = raised
        else:
            error = RuntimeError("a wrapper must yield exactly once")
            generator.close()
    if error is not None:
        raise error
    return result
