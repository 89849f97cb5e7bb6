"""Find, load and bind plugins by name: entry points of the group `slime`, local files (`./my_reward.py`), modules."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import importlib_metadata
import pluggy
from pluggy import HookImpl, PluginManager

from slime_core import hookspecs
from slime_core.bound import Bound
from slime_core.errors import PluginError, SlimeError
from slime_core.hookspecs import EITHER_COLOUR, PROJECT

HOOKS: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(hookspecs).items() if getattr(value, f"{PROJECT}_spec", None) is not None
}
"""Hook name -> its specification, in the order of the data path."""


@dataclass(frozen=True)
class Found:
    """An installed plugin, known from metadata alone."""

    name: str
    package: str
    version: str
    entry_point: importlib_metadata.EntryPoint

    def origin(self) -> str:
        """How errors and lists name the plugin's package."""
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Loaded:
    """A plugin imported in this process."""

    name: str
    origin: str
    reference: str
    """What the flag said."""
    plugin: Any
    """The module, or the class that `start` builds."""


def installed() -> list[Found]:
    """Every entry point of the group `slime`, imported by nobody, sorted by name and package."""
    found: dict[tuple[str, str], Found] = {}
    for dist in importlib_metadata.distributions():
        entry_points = dist.entry_points.select(group=PROJECT)
        if not entry_points:
            continue
        package, version = dist.name, dist.version  # each parses the whole metadata
        for ep in entry_points:
            found.setdefault((ep.name, _normalized(package)), Found(ep.name, package, version, ep))
    return [found[key] for key in sorted(found)]


def find(name: str) -> Found:
    """The one installed plugin of that name.

    Raises:
        PluginError: when no package provides it, or two do.
    """
    everyone = installed()
    matches = [f for f in everyone if f.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        packages = " and ".join(f.package for f in matches)
        raise PluginError(f"{packages} both provide '{name}'; uninstall one.")
    raise PluginError(f"no plugin named '{name}' is installed{_did_you_mean(name, [f.name for f in everyone])}")


def plugin_name(reference: str) -> str:
    """The plain name of what a flag named: `math` is its own, `./my_reward.py` and `pkg.my_reward` give my_reward."""
    path, _, _ = _split_reference(reference)
    if _is_file(reference):
        return Path(path).stem
    return path.rsplit(".", 1)[-1]


def absolute_reference(reference: str) -> str:
    """The same reference, good in processes with another working directory."""
    path, colon, attribute = _split_reference(reference)
    return f"{Path(path).expanduser().resolve()}{colon}{attribute}" if _is_file(reference) else reference


@dataclass
class Plugins:
    """The plugins that one process has loaded."""

    manager: PluginManager = field(default_factory=lambda: _new_manager())
    loaded: dict[str, Loaded] = field(default_factory=dict)

    def load(self, reference: str) -> str:
        """Import a plugin, check it against the contract, and return its plain name. Loading twice does nothing.

        Raises:
            PluginError: when it is not installed, does not import, or breaks the contract.
        """
        name = plugin_name(reference)
        if name in self.loaded:
            self._refuse_other(name, reference)
            return name
        plugin, origin = _import(reference)
        self.loaded[name] = Loaded(name, origin, reference, plugin)
        try:
            self._register(name, plugin)
        except PluginError:
            del self.loaded[name]
            raise
        return name

    def add_options(self, parser: argparse.ArgumentParser, only: str | None = None) -> None:
        """Ask the loaded plugins (or only one) for their flags, each plugin in an argument group of its own.

        Raises:
            PluginError: when a flag does not start with `--<plugin>-`.
        """
        for loaded in [self.loaded[only]] if only else self.loaded.values():
            impl = next(
                (i for i in self.manager.hook.add_options.get_hookimpls() if i.plugin_name == loaded.name), None
            )
            if impl is None:
                continue
            group = parser.add_argument_group(f"plugin {loaded.name}", f"from {loaded.origin}")
            impl.function(*[group for _ in impl.argnames])
            prefix = f"--{loaded.name.replace('_', '-')}-"
            allowed = (prefix, f"--no-{prefix[2:]}")
            for action in group._group_actions:
                if wrong := [flag for flag in action.option_strings if not flag.startswith(allowed)]:
                    raise PluginError(
                        f"plugin '{loaded.name}' from {loaded.origin} adds the flag {wrong[0]}; "
                        f"a plugin's flags must start with {prefix}"
                    )

    def check_options(self, args: argparse.Namespace) -> None:
        """Call every `configure` that needs no built plugin: functions of modules, static methods of classes.

        Raises:
            PluginError: when one raises anything but an error for the user.
        """
        for impl in self.manager.hook.configure.get_hookimpls():
            of_instances = inspect.isclass(impl.plugin) and not isinstance(
                inspect.getattr_static(impl.plugin, "configure"), staticmethod
            )
            if impl.wrapper or of_instances:
                continue
            try:
                impl.function(*[args for _ in impl.argnames])
            except SlimeError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plugin '{impl.plugin_name}': configure raised {type(error).__name__}: {error}; for a wrong "
                    "option it should raise OptionError."
                ) from error

    def start(self, args: argparse.Namespace) -> None:
        """Build the class plugins and call every `configure`."""
        for loaded in self.loaded.values():
            if inspect.isclass(loaded.plugin):
                build: Callable[[argparse.Namespace], Any] = loaded.plugin
                self.manager.unregister(name=loaded.name)
                self.manager.register(build(args), name=loaded.name)
        self.manager.hook.configure(args=args)

    def close(self) -> None:
        """Call `close()` of every class plugin that has one."""
        for loaded in self.loaded.values():
            instance = self.manager.get_plugin(loaded.name)
            close = getattr(instance, "close", None)
            if inspect.isclass(loaded.plugin) and not inspect.isclass(instance) and close is not None:
                close()

    def wrapping(self, hooks: Iterable[str]) -> list[str]:
        """References of the loaded plugins that wrap one of these hooks, in the order they were loaded."""
        names = {impl.plugin_name for hook in hooks for impl in self._impls(hook) if impl.wrapper}
        return [loaded.reference for loaded in self.loaded.values() if loaded.name in names]

    def implements(self, hook: str, name: str) -> bool:
        """Whether a loaded plugin has an implementation (not only a wrapper) of the hook."""
        return any(i.plugin_name == name and not i.wrapper for i in self._impls(hook))

    def hooks_of(self, name: str) -> dict[str, HookImpl]:
        """Hook name -> the plugin's implementation or wrapper, in data-path order."""
        return {hook: impl for hook in HOOKS for impl in self._impls(hook) if impl.plugin_name == name}

    def bind(self, hook: str, reference: str) -> Bound:
        """The implementation that `reference` names, inside the loaded wrappers of the hook.

        Raises:
            PluginError: when the plugin does not implement the hook.
        """
        name = self.load(reference)
        impls = self._impls(hook)
        for impl in impls:
            if impl.plugin_name == name and not impl.wrapper:
                wrappers = tuple(i for i in reversed(impls) if i.wrapper)
                return Bound(hook, name, self.loaded[name].origin, impl, wrappers)
        has = ", ".join(f"'{hook}'" for hook in HOOKS if self.implements(hook, name)) or "no hook"
        raise PluginError(
            f"plugin '{name}' from {self.loaded[name].origin} does not implement '{hook}'; it implements {has}."
        )

    def _impls(self, hook: str) -> list[HookImpl]:
        return list(getattr(self.manager.hook, hook).get_hookimpls())

    def _refuse_other(self, name: str, reference: str) -> None:
        known = self.loaded[name].reference
        if absolute_reference(known) != absolute_reference(reference):
            raise PluginError(f"'{known}' and '{reference}' are both called '{name}'; rename one.")

    def _register(self, name: str, plugin: Any) -> None:
        origin = f"plugin '{name}' from {self.loaded[name].origin}"
        try:
            self.manager.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            self.manager.unregister(name=name)
            raise PluginError(f"{origin} breaks the hook contract: {_argument_error(error)}") from None
        impls = self.manager.get_hookcallers(plugin) or []
        if not impls:
            self.manager.unregister(name=name)
            raise PluginError(f"{origin} implements no hook; mark its functions with @hookimpl (from slime_core).")
        for caller in impls:
            problem = None
            if caller.name not in HOOKS:
                problem = f"there is no hook '{caller.name}'{_did_you_mean(caller.name, list(HOOKS))}"
            else:
                own = [i for i in caller.get_hookimpls() if i.plugin_name == name]
                problem = next((p for p in (_colour_error(i, caller.name) for i in own) if p), None)
            if problem:
                self.manager.unregister(name=name)
                raise PluginError(f"{origin} breaks the hook contract: {problem}")


def load_plugins(args: argparse.Namespace, references: Iterable[str]) -> Plugins:
    """Load and start these plugins, and those of `--plugin`, in this process."""
    plugins = Plugins()
    for reference in [*references, *args.plugin]:
        plugins.load(reference)
    plugins.start(args)
    return plugins


def _new_manager() -> PluginManager:
    manager = PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _split_reference(reference: str) -> tuple[str, str, str]:
    """`path.py:Attribute` -> (path.py, ':', Attribute)."""
    head, colon, attribute = reference.rpartition(":")
    return (head, colon, attribute) if colon and attribute.isidentifier() else (reference, "", "")


def _is_file(reference: str) -> bool:
    path = _split_reference(reference)[0]
    return path.endswith(".py") or "/" in path


def _import(reference: str) -> tuple[Any, str]:
    """The module or class that a reference names, and where it comes from."""
    path, _, attribute = _split_reference(reference)
    if _is_file(reference):
        module, origin = _import_file(Path(path).expanduser().resolve()), path
    elif "." in path or attribute:
        module, origin = _import_module(path), f"module {path}"
    else:
        found = find(reference)
        try:
            return found.entry_point.load(), found.origin()
        except (Exception, SystemExit) as error:
            raise _not_loaded(reference, found.origin(), error) from error
    if not attribute:
        return module, origin
    if not hasattr(module, attribute):
        raise PluginError(f"{origin} has no '{attribute}', which '{reference}' names.")
    return getattr(module, attribute), origin


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"there is no plugin file {path}; check the path, or drop it to name an installed plugin.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin file {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{PROJECT}_file_{path.stem}"] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _not_loaded(path.stem, str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    """Import as `python -m` would, with the current directory in the path."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_loaded(name, f"module {name}", error) from error


def _not_loaded(name: str, origin: str, error: BaseException) -> PluginError:
    return PluginError(f"plugin '{name}' from {origin} could not be loaded: {type(error).__name__}: {error}")


def _argument_error(error: pluggy.PluginValidationError) -> str:
    """pluggy's message of many lines, as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[1:]) or str(error)


def _colour_error(impl: HookImpl, hook: str) -> str | None:
    """Why the implementation's `def` or `async def` does not fit its hook; None when it does."""
    if impl.hookwrapper:
        return f"'{hook}' is wrapped in pluggy's old style; use @hookimpl(wrapper=True) and `result = yield`."
    is_async = inspect.iscoroutinefunction(impl.function)
    if impl.wrapper:
        return None if inspect.isgeneratorfunction(impl.function) else f"the wrapper of '{hook}' must `yield` once."
    if hook in EITHER_COLOUR or is_async == inspect.iscoroutinefunction(HOOKS[hook]):
        return None
    return f"'{hook}' must be a plain `def`." if is_async else f"'{hook}' must be `async def`."


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _did_you_mean(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return "; `slime plugins` lists those that are." if candidates else "."
