"""Several turns in one response: the model writes, its environment answers. For authors of generators.

    @hookimpl
    async def generate(args, engine, sample, sampling_params):
        async def reply(turn):
            query = between(turn.text, "<search>", "</search>")
            if query is None:
                return None
            (result,) = await call_tools(sample, [search(query)], timeout_s=10)
            return f"<result>{result.text}</result>"

        return [await take_turns(engine, sample, sampling_params, reply, max_turns=4, stop=["</search>"])]

Requests alone count towards the engines' concurrency: while a tool runs, another sample has the engine. All that a
sample needs to go on after an abort stands in the sample itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from slime_core.errors import DataError, PluginError, SlimeError
from slime_core.types import NO_VERSION, Generation, IntArray, Sample, Status

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """A turn that the model has finished, as its environment sees it."""

    sample: Sample
    number: int
    """From 0."""
    text: str
    """What the model wrote, the stop string that ended it included."""
    tokens: IntArray
    """[n] the same, as the engine sampled it."""


Reply: TypeAlias = str | Sequence[int] | IntArray | None
"""What an environment answers: a text, which is encoded; token ids, taken as they are; or None, the sample ends."""


async def take_turns(
    engine: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    reply: Callable[[Turn], Coroutine[Any, Any, Reply]],
    *,
    max_turns: int,
    stop: Sequence[str] = (),
    max_turn_tokens: int | None = None,
) -> Sample:
    """Let the model and its environment take turns until `reply` gives None, `max_turns` are over, or there is no room.

    The model's tokens are trained and have log-probabilities; those of the environment have loss mask 0 and none. The
    sample ends COMPLETED, or TRUNCATED when its tokens run out or a reply leaves none for a further turn; such a reply
    is not appended. When the round is stopped, a tool that runs is cancelled and the sample comes back ABORTED; given
    again, it goes on in the same turn. So `reply` may be called twice for a turn, but one answer at most is appended.

    Args:
        engine: as `generate` gets it.
        sampling_params: `max_new_tokens` bounds the whole response, replies included.
        reply: what the environment says to a finished turn; called after every turn but the last.
        max_turns: turns of the model.
        stop: strings that end a turn, besides those of `sampling_params`.
        max_turn_tokens: bounds each turn of the model.

    Raises:
        PluginError: when a reply is empty or not a reply.
        DataError: when the sample has no prompt.
    """
    if not len(sample.tokens):
        raise DataError("a sample has no prompt to take turns on: name prompts with --prompt-data.")
    stops = [*_listed(sampling_params.get("stop")), *stop]
    params = {**sampling_params, "stop": stops, "no_stop_trim": True}
    decode = _decoder(engine, sampling_params)
    if not sample.response_length:
        _count_calls(sample, 0, 0, afresh=True)
    while True:
        if not _awaits_reply(sample) and not await _write(engine, sample, params, stops, decode, max_turn_tokens):
            break
        turn = _turn(sample, len(sample.turn_ends) - 1, decode)
        at_limit = len(turn.tokens) == max_turn_tokens and not any(stop in turn.text for stop in stops)
        cut_short = at_limit and sample.status is not Status.COMPLETED
        said = None
        if len(sample.turn_ends) < max_turns:
            said = await _unless_stopped(engine, reply(turn))
        if said is STOPPED:
            sample.status = Status.ABORTED
            break
        if said is None:
            sample.status = Status.TRUNCATED if cut_short else Status.COMPLETED
            break
        tokens = _encoded(engine, said)
        if len(tokens) >= _room(engine, sample, params):
            sample.status = Status.TRUNCATED
            break
        sample.append(tokens, text=said if isinstance(said, str) else decode(tokens), trainable=False)
    sample.metadata["round_number"] = len(sample.turn_ends)
    return sample


def turns_of(engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Turn]:
    """The finished turns of a sample, oldest first: for an environment that must be brought to where it was."""
    decode = _decoder(engine, sampling_params)
    return [_turn(sample, number, decode) for number in range(len(sample.turn_ends))]


def split_turns(sample: Sample) -> list[Sample]:
    """One sample a turn, so that each is trained as a response of its own: all that came before is its prompt.

    All have the reward of the whole, which counts once in its group (`shares_reward`), and each its own turn's reward.
    The texts of the parts stay empty. A sample without turns is its own only part.
    """
    parts = []
    for number, end in enumerate(sample.turn_ends):
        start, part = _turn_start(sample, end), sample.clone()
        part.tokens = sample.tokens[: sample.prompt_length + end]
        for name in ("loss_mask", "logprobs", "weight_versions"):
            setattr(part, name, getattr(sample, name)[start:end])
        part.response, part.turn_ends = "", [end - start]
        part.turn_rewards = sample.turn_rewards[number : number + 1]
        part.metadata["round_number"] = number
        part.shares_reward = sample.shares_reward or number + 1 < len(sample.turn_ends)
        parts.append(part)
    return parts or [sample]


# --- tools ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ToolResult:
    """What a tool gave, or why it failed."""

    text: str
    failed: bool = False


async def call_tools(sample: Sample, calls: Sequence[Awaitable[str]], *, timeout_s: float | None) -> list[ToolResult]:
    """Run a turn's tool calls at the same time; results in the order of the calls.

    A call that raises, or takes longer than `timeout_s`, fails by itself: its text tells the model why. Calls and
    failed calls are counted in the sample's metadata `tool_calls` and `failed_tool_calls`, and in the round's metrics.
    A SlimeError is for the user, not for the model, and ends the run.
    """
    running = [asyncio.ensure_future(_call(call, timeout_s)) for call in calls]
    try:
        results = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    _count_calls(sample, len(results), sum(result.failed for result in results))
    return results


async def _call(call: Awaitable[str], timeout_s: float | None) -> ToolResult:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return ToolResult(await call)
    except SlimeError:
        raise
    except Exception as error:
        if limit.expired():
            return ToolResult(f"no result within {timeout_s:g} s", failed=True)
        return ToolResult(str(error) or type(error).__name__, failed=True)


def _count_calls(sample: Sample, num_calls: int, num_failed: int, afresh: bool = False) -> None:
    for key, count in (("tool_calls", num_calls), ("failed_tool_calls", num_failed)):
        sample.metadata[key] = count + (0 if afresh else sample.metadata.get(key, 0))


# --- the model's turn -------------------------------------------------------------------------------------------------
async def _write(
    engine: Any,
    sample: Sample,
    params: dict[str, Any],
    stops: list[str],
    decode: Callable[[IntArray], str],
    max_turn_tokens: int | None,
) -> bool:
    """Let the model write its turn to the end and note where that is; False when it was interrupted or truncated."""
    begun = sample.tokens[sample.prompt_length :][_turn_start(sample, sample.response_length) :]
    if _stop_end(begun, stops, decode) is not None or len(begun) == max_turn_tokens:
        sample.turn_ends.append(sample.response_length)
        return True
    room = _room(engine, sample, params)
    if room <= 0:
        sample.status = Status.TRUNCATED
        return False
    if max_turn_tokens is not None:
        room = min(room, max_turn_tokens - len(begun))
    images = (sample.multimodal or {}).get("image")
    generation: Generation = await engine.generate(
        sample.tokens,
        {**params, "max_new_tokens": room},
        session_id=sample.session_id,
        **({"image_data": images} if images else {}),
    )
    sample.append_generation(cut_at_stop(engine, begun, generation, params))
    if sample.status is Status.ABORTED:
        return False
    sample.turn_ends.append(sample.response_length)
    at_turn_limit = len(begun) + len(generation.tokens) == max_turn_tokens and _room(engine, sample, params) > 0
    return sample.status is Status.COMPLETED or at_turn_limit


def cut_at_stop(engine: Any, begun: IntArray, generation: Generation, sampling_params: dict[str, Any]) -> Generation:
    """The generation up to where it completes a stop string that an aborted request began.

    Engines look for stop strings in what one request made, and so miss a string that two requests made together.

    Args:
        engine: as `generate` gets it.
        begun: [n] what earlier requests made of the same text; where it is empty the generation stays as it is.
        sampling_params: with the strings under `stop`.
    """
    decode = _decoder(engine, sampling_params)
    stops = _listed(sampling_params.get("stop"))
    end = _stop_end(np.concatenate([begun, generation.tokens]), stops, decode) if len(begun) and stops else None
    if end is None:
        return generation
    kept = end - len(begun)
    return replace(
        generation,
        tokens=generation.tokens[:kept],
        text=generation.text if kept == len(generation.tokens) else decode(generation.tokens[:kept]),
        logprobs=generation.logprobs[:kept],
        weight_versions=generation.weight_versions[:kept],
        finish_reason="stop",
    )


def _stop_end(tokens: IntArray, stops: list[str], decode: Callable[[IntArray], str]) -> int | None:
    """How many of the tokens it takes to complete a stop string; None when they hold none."""

    def holds(count: int) -> bool:
        text = decode(tokens[:count])
        return any(stop in text for stop in stops)

    if not len(tokens) or not holds(len(tokens)):
        return None
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# --- where a sample is ------------------------------------------------------------------------------------------------
def _awaits_reply(sample: Sample) -> bool:
    """Whether the model's turn is over and nothing was said to it yet."""
    return bool(sample.turn_ends) and sample.turn_ends[-1] == sample.response_length


def _turn_start(sample: Sample, end: int) -> int:
    """Where in the response the turn that ends at `end`, or is being written there, begins: behind the last reply."""
    replies = np.flatnonzero(sample.weight_versions[:end] == NO_VERSION)
    return int(replies[-1]) + 1 if len(replies) else 0


def _turn(sample: Sample, number: int, decode: Callable[[IntArray], str]) -> Turn:
    end = sample.turn_ends[number]
    tokens = sample.tokens[sample.prompt_length :][_turn_start(sample, end) : end]
    return Turn(sample, number, decode(tokens), tokens)


def _room(engine: Any, sample: Sample, params: dict[str, Any]) -> int:
    """Tokens that the response may still grow by."""
    budget: int = params["max_new_tokens"] - sample.response_length
    context: int = engine.context_tokens - len(sample.tokens)
    return max(0, min(budget, context))


# --- waiting, texts and tokens ----------------------------------------------------------------------------------------
STOPPED = object()
"""What `_unless_stopped` gives when the round was stopped."""


async def _unless_stopped(engine: Any, work: Coroutine[Any, Any, T]) -> T | object:
    """The result, or STOPPED as soon as the round needs nothing more; the work is then cancelled."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(engine.until_stopped())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else STOPPED
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


def _decoder(engine: Any, sampling_params: dict[str, Any]) -> Callable[[IntArray], str]:
    """Tokens to text as the engine does it."""
    skip = sampling_params.get("skip_special_tokens", True)
    return lambda tokens: str(engine.tokenizer.decode(tokens.tolist(), skip_special_tokens=skip))


def _encoded(engine: Any, said: Any) -> IntArray:
    ids = engine.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise PluginError(
            f"a reply must be a text or token ids, and not be empty, or None to end the sample; got {said!r}."
        )
    return tokens.astype(np.int32)


def _listed(stop: str | Sequence[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())
