"""For the tests of plugins: finished samples, groups, parsed options, a scripted engine, and the contract's own check.

from slime_core.testing import make_options, make_sample

def test_a_boxed_answer_earns_the_bonus():
    args = make_options("--reward", "my_reward", "--my-reward-bonus", "0.5")
    assert my_reward.reward(args, make_sample(r"\\boxed{4}", label="4")) == 1.5
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.errors import EngineError
from slime_core.hostile import hostile_answers as hostile_answers
from slime_core.hostile import hostile_responses as hostile_responses
from slime_core.options import Options, parse
from slime_core.types import FloatArray, Generation, Group, IntArray, Sample, Status


class CharacterTokenizer:
    """A token a character, its id the character's code point: a test can read what it compares."""

    all_special_tokens: tuple[str, ...] = ()
    """There are none."""

    def get_added_vocab(self) -> dict[str, int]:
        """None."""
        return {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; there are no special tokens."""
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int] | IntArray, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return "".join(chr(token) for token in tokens)


def make_sample(
    response: str = "", label: Any = None, prompt: str | list[dict[str, Any]] = "", **fields: Any
) -> Sample:
    """A COMPLETED sample, a token a character, each response token sampled by weight version 0 at log-prob -1.

    `fields` are further fields of `Sample`, such as `reward=1.0` or `metadata={...}`; the arrays follow from the texts.

    Raises:
        TypeError: for a field that no sample has, or one that follows from the texts.
    """
    if derived := {"tokens", "loss_mask", "logprobs", "weight_versions"} & set(fields):
        raise TypeError(f"{min(derived)} follows from prompt and response; use sample.append to add tokens")
    tokenizer = CharacterTokenizer()
    status = fields.pop("status", Status.COMPLETED)
    sample = Sample(prompt=prompt, label=label, tokens=np.array(tokenizer.encode(_text(prompt)), np.int32), **fields)
    tokens = tokenizer.encode(response)
    sample.append(tokens, text=response, logprobs=[-1.0] * len(tokens), weight_version=0)
    sample.status = status
    return sample


def _text(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def make_group(rewards: Sequence[float | None], group_index: int = 0) -> Group:
    """A finished group with these rewards; a reward of None makes a FAILED sample."""
    first = group_index * len(rewards)
    group = [
        make_sample(f"answer {position}", group_index=group_index, index=index, rollout_index=index, reward=reward)
        for position, (index, reward) in enumerate(enumerate(rewards, first))
    ]
    for sample in group:
        if sample.reward is None:
            sample.fail("no reward")
    return group


def make_options(*argv: str) -> Options:
    """The options that `slime train` would have with these flags, the named plugins' own included.

    Without `--model` a model directory with an empty config.json stands in while the flags are checked; it is gone when
    the function returns.

    Raises:
        OptionError, PluginError: as `slime train` would.
    """
    if any(word == "--model" or word.startswith("--model=") for word in argv):
        return parse(argv).args
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text("{}")
        return parse(["--model", directory, *argv]).args


def check_plugin(reference: str, *flags: str, samples: Sequence[Sample] = ()) -> None:
    """Check a plugin against the whole contract, as `slime plugins check` does.

    Args:
        reference: the plugin's name, file or module.
        flags: flags of `slime train` that it needs.
        samples: finished samples that its reward must be able to grade.

    Raises:
        AssertionError: telling every way in which the plugin breaks the contract.
    """
    from slime_core.contract import check

    problems = [finding for finding in check(reference, flags, samples) if finding.is_problem]
    if problems:
        raise AssertionError("\n".join([f"plugin '{reference}' breaks the contract:", *map(str, problems)]))


def cpu_seconds(call: Callable[[], Any], tries: int = 3) -> float:
    """CPU seconds that a call takes of this thread, the least of `tries`: other threads and busy machines do not count.

    For tests that a grader's time grows no faster than the response. One try for a call whose second reads a cache.
    """
    taken = []
    for _ in range(tries):
        before = time.thread_time()
        call()
        taken.append(time.thread_time() - before)
    return min(taken)


class ScriptedEngine:
    """An engine for tests of generators: it answers with the given texts in order, whatever is asked.

    `answers` may also be a function from the text so far to the answer, for concurrent requests. An answer longer than
    `max_new_tokens` is cut and finishes for length. After `stop()` every request is answered at once with nothing, as
    aborted. `requests` keeps what was asked: tokens and sampling parameters; `images` the images of each request.
    `frozen` names the engines of frozen models.
    """

    def __init__(
        self,
        answers: Sequence[str] | Callable[[str], str],
        context_tokens: int = 2**31 - 1,
        frozen: Mapping[str, ScriptedEngine] | None = None,
    ) -> None:
        self.tokenizer = CharacterTokenizer()
        self.frozen = dict(frozen or {})
        self.context_tokens = context_tokens
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.images: list[list[str]] = []
        self._answers = answers
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End the round: nothing more is generated."""
        self._stopped.set()

    async def until_stopped(self) -> None:
        """Return once `stop` was called."""
        await self._stopped.wait()

    async def generate(
        self,
        tokens: Sequence[int] | IntArray,
        sampling_params: dict[str, Any],
        *,
        session_id: str | None = None,
        image_data: Sequence[str] | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """The next answer, a token a character, each at log-prob -1 and weight version 0; told at once.

        Raises:
            EngineError: when more is asked than there are answers.
        """
        ids = [int(token) for token in tokens]
        self.requests.append((ids, sampling_params))
        self.images.append(list(image_data or []))
        text = "" if self._stopped.is_set() else self._next_answer(ids)
        limit = int(sampling_params.get("max_new_tokens", len(text)))
        kept = text[:limit]
        if on_tokens is not None:
            on_tokens(self.tokenizer.encode(kept))
        return Generation(
            tokens=np.array(self.tokenizer.encode(kept), np.int32),
            text=kept,
            logprobs=np.full(len(kept), -1.0, np.float32),
            weight_versions=np.zeros(len(kept), np.int32),
            finish_reason="abort" if self._stopped.is_set() else "length" if len(text) > limit else "stop",
            prompt_tokens=len(ids),
        )

    async def prompt_logprobs(self, tokens: Sequence[int] | IntArray) -> FloatArray:
        """-1 for every token but the first; not noted in `requests`."""
        return np.full(max(0, len(tokens) - 1), -1.0, np.float32)

    def _next_answer(self, tokens: list[int]) -> str:
        if callable(self._answers):
            return self._answers(self.tokenizer.decode(tokens))
        if len(self.requests) > len(self._answers):
            raise EngineError(
                f"ScriptedEngine has {len(self._answers)} answers and was asked {len(self.requests)} times; "
                "script one more, or check why the generator goes on."
            )
        return self._answers[len(self.requests) - 1]
