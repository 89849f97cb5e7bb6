"""How an agent ended, out of what it returned or posted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A reward or an answer to grade where the agent gave one, or why it failed."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Further numbers to log."""
    response: str | None = None
    """What the reward plugins grade, instead of what the model wrote."""
    error: str | None = None


def outcome_of(result: Any) -> Outcome:
    """What an agent gave, read.

    None lets the reward plugins grade what the model wrote, a text lets them grade that, a number is the reward. An
    object has any of `reward`, `response` and `error`, and other numbers to log.

    Raises:
        ValueError: for anything else, or a reward that is not finite.
    """
    match result:
        case None:
            return Outcome()
        case str():
            return Outcome(response=result)
        case bool() | int() | float():
            return Outcome(reward=_finite("its reward", result))
        case dict():
            return _of_object(result)
    raise ValueError(f"an agent returns None, a text, a number or an object, not {type(result).__name__}")


def _of_object(result: dict[str, Any]) -> Outcome:
    given = dict(result)
    reward, response, error = given.pop("reward", None), given.pop("response", None), given.pop("error", None)
    for name, text in (("response", response), ("error", error)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"its {name} must be a text, not {type(text).__name__}")
    return Outcome(
        reward=None if reward is None else _finite("its reward", reward),
        rewards={str(name): _finite(f"its '{name}'", value) for name, value in given.items()},
        response=response,
        error=error,
    )


def _finite(what: str, value: Any) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value!r:.80}")
    return float(value)
