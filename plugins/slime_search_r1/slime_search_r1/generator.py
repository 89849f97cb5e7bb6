"""The turns: the model writes, the plugin answers its searches, until there is an answer or no room."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np

from slime_core import OptionError, Sample, Status, hookimpl
from slime_search_r1.corpus import read_corpus

QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
STOP = ["</search>", "</answer>"]
INFORMATION_END = "</information>"
NOTHING = "nothing found"
NO_ENGINE = -1
"""The weight version of a token that no engine sampled."""


class SearchR1:
    """Holds the corpus; `generate` keeps nothing between samples."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.search_r1_corpus is None:
            raise OptionError("--generate search_r1 needs documents to search: --search-r1-corpus FILE.jsonl.")
        self._corpus = read_corpus(Path(args.search_r1_corpus))
        self._max_turns: int = args.search_r1_max_turns
        self._num_results: int = args.search_r1_num_results

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The generator's flags."""
        parser.add_argument("--search-r1-corpus", metavar="FILE", help="JSONL rows {title or key, text} to search")
        parser.add_argument("--search-r1-max-turns", type=_count, default=2, metavar="N", help="turns of the model")
        parser.add_argument(
            "--search-r1-num-results", type=_count, default=3, metavar="N", help="documents shown for a query"
        )

    @hookimpl
    async def generate(self, engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        """The sample after all its turns; one that was aborted goes on in the turn it was in."""
        while True:
            query = open_query(sample.response)
            if query is not None:
                if num_informations(sample) + 1 >= self._max_turns:
                    sample.status = Status.COMPLETED
                    break
                if not await self._inform(engine, sample, query, sampling_params):
                    break
            await take_turn(engine, sample, sampling_params)
            if sample.status is not Status.COMPLETED or open_query(sample.response) is None:
                break
        return [sample]

    async def _inform(self, engine: Any, sample: Sample, query: str, sampling_params: dict[str, Any]) -> bool:
        """Append what the search found, untrained; where it leaves no room for an answer the sample is TRUNCATED."""
        found = await asyncio.to_thread(self._corpus.search, query, self._num_results)
        text = f"<information>{chr(10).join(found) or NOTHING}{INFORMATION_END}"
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= room(engine, sample, sampling_params):
            sample.status = Status.TRUNCATED
            return False
        sample.append(tokens, text=text, trainable=False)
        return True


async def take_turn(engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """Let the model write up to the end of a search or an answer."""
    left = room(engine, sample, sampling_params)
    if left <= 0:
        sample.status = Status.TRUNCATED
        return
    stop = [*sampling_params.get("stop", []), *STOP]
    params = {**sampling_params, "max_new_tokens": left, "stop": stop, "no_stop_trim": True}
    sample.append_generation(await engine.generate(sample.tokens, params, session_id=sample.session_id))


def room(engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    """Tokens the response may still grow by: `max_new_tokens` counts all turns and their information."""
    budget: int = sampling_params["max_new_tokens"] - sample.response_length
    context: int = engine.context_tokens - len(sample.tokens)
    return min(budget, context)


def open_query(response: str) -> str | None:
    """The search that the response ends in and that has no information yet; None when there is none."""
    turn = response.rpartition(INFORMATION_END)[2]
    match = QUERY.search(turn)
    return match[1].strip() if match else None


def num_informations(sample: Sample) -> int:
    """How many runs of tokens in the response no engine made."""
    foreign = sample.weight_versions == NO_ENGINE
    return int(np.count_nonzero(foreign[1:] & ~foreign[:-1])) + int(foreign[:1].sum())


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)
