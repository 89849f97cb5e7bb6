"""The nouns of the embedded engine: sampling parameters, a request on its way, and its output."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INT64_MAX = 2**63 - 1
NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})


class BadRequest(ValueError):
    """A request the engine refuses; the message goes to the client with status 400."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request; names, meanings and defaults are SGLang's."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    @classmethod
    def parse(cls, raw: Any) -> SamplingParams:
        """Check a JSON object of sampling parameters; raises BadRequest naming the parameter."""
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise BadRequest(f"sampling_params must be an object, got {type(raw).__name__}.")
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name in _PARSERS:
                # null means "the default" except for max_new_tokens, where it means "as long as the context allows"
                if value is not None or name == "max_new_tokens":
                    values[name] = _PARSERS[name](name, value)
            elif value not in NEUTRAL:
                raise BadRequest(f"sampling parameter {name!r} is not supported by the embedded engine.")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Temperature 0 (or so small that only the largest logit counts), or a choice of one."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p restricts the choice."""
        return not self.greedy and (self.top_k > 1 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def adjusted(self) -> bool:
        """Whether the logits themselves are changed before sampling, token by token."""
        penalized = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0
        return penalized or bool(self.logit_bias) or self.min_new_tokens > 0


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def _between(low: float, high: float, open_low: bool = False) -> Any:
    def check(name: str, value: Any) -> float:
        number = _number(name, value)
        if number > high or number < low or (open_low and number == low):
            raise BadRequest(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value!r}.")
        return number

    return check


def _temperature(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise BadRequest(f"{name} must be a non-negative finite number, got {value!r}.")
    return float(value)


def _integer(low: int, high: int = INT64_MAX) -> Any:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{name} must be an integer of at least {low}, got {value!r}.")
        return value

    return check


def _max_new_tokens(name: str, value: Any) -> int | None:
    return None if value is None else _integer(0)(name, value)


def _top_k(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise BadRequest(f"{name} must be -1 (disable) or at least 1, got {value!r}.")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {value!r}.")
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest(f"{name} must be a non-empty string or a list of them, got {value!r}.")
    return tuple(stops)


def _token_ids(name: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        raise BadRequest(f"{name} must be a list of token ids, got {value!r}.")
    return frozenset(value)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
        raise BadRequest(f"{name} must be an object of token id: number, got {value!r}.")
    return {int(token): _number(name, bias) for token, bias in value.items()}


_PARSERS: dict[str, Any] = {
    "max_new_tokens": _max_new_tokens,
    "min_new_tokens": _integer(0),
    "temperature": _temperature,
    "top_p": _between(0.0, 1.0, open_low=True),
    "top_k": _top_k,
    "min_p": _between(0.0, 1.0),
    "frequency_penalty": _between(-2.0, 2.0),
    "presence_penalty": _between(-2.0, 2.0),
    "repetition_penalty": _between(0.0, 2.0, open_low=True),
    "logit_bias": _logit_bias,
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "sampling_seed": _integer(-INT64_MAX - 1),
    "n": _integer(1),
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
}


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way through the engine.

    rid: its name in answers; parent_rid: the name its client gave to it and its siblings (n > 1). limit: the most
    tokens it may generate. logprob_start: first prompt position whose log-probability is wanted, None for none.
    reply: the caller's own handle, given back with the output. stream: whether the output so far is wanted, too.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    seed: int
    parent_rid: str = ""
    logprob_start: int | None = None
    reply: Any = None
    stream: bool = False
    received_s: float = field(default_factory=time.time)
    admitted_s: float | None = None
    retractions: int = 0
    aborted: bool = False
    # what a retracted request has generated so far; empty while it runs
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    version_starts: list[tuple[str, int]] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt still has to be scored."""
        return self.logprob_start is not None and self.prompt_logprobs is None

    def mark_version(self, version: str, count: int) -> None:
        """Note that tokens from number `count` on come from this weight version."""
        if self.version_starts and self.version_starts[-1][1] == count:
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, count))


@dataclass(frozen=True, slots=True)
class Output:
    """The end of a request: its tokens, their log-probabilities and why it stopped. Or, of a stream, how far it is.

    finish_reason: {"type": "stop", "matched": id or string}, {"type": "length", "length": N} or {"type": "abort", ...};
    None of one that goes on.
    versions: (weight version, first token, one past the last) spans that cover the output.
    """

    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: dict[str, Any] | None
    weight_version: str
    versions: list[tuple[str, int, int]]
    finished_s: float
