"""The plugin: turns of thinking and searching, and the reward of what came of them."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from slime_core import Sample, ToolResult, Turn, call_tools, hookimpl, take_turns
from slime_search_r1 import options, reward

if TYPE_CHECKING:
    from slime_search_r1.local import Hit
    from slime_search_r1.search import Search

NAME = "search_r1"
SEARCH, SEARCH_END, ANSWER_END = "<search>", "</search>", "</answer>"
TAG = re.compile(r"</?(?:think|search|information|answer)>")
NOTHING = "Nothing was found."
NO_QUERY = (
    "That was no search. Write what to look for between <search> and </search>, or the final answer between <answer> "
    "and </answer>."
)
LONGEST_QUERY, LONGEST_REASON = 1000, 300
"""Characters."""


class SearchR1:
    """Holds the search, which is opened by the first query: processes that only grade never open it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._opening: asyncio.Task[Search] | None = None

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The flags of the generator, its search and the reward."""
        options.add_options(parser)

    @staticmethod
    @hookimpl
    def configure(args: argparse.Namespace) -> None:
        """Refuse a generator without a usable back end, before anything is started."""
        if NAME in [*args.generate, *(entry.generate for entry in args.eval_data)]:
            from slime_search_r1.search import check_backend

            check_backend(args)

    @hookimpl
    async def generate(self, engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        """The sample after all its turns."""
        if not sample.response_length:
            sample.metadata["malformed_searches"] = 0
        if self._opening is None:
            self._opening = asyncio.create_task(self._opened())
        search = await asyncio.shield(self._opening)
        reply = partial(self._reply, engine, search)
        stop, max_turns = [SEARCH_END, ANSWER_END], self._args.search_r1_max_turns
        return [await take_turns(engine, sample, sampling_params, reply, max_turns=max_turns, stop=stop)]

    @hookimpl
    def reward(self, sample: Sample) -> dict[str, float]:
        """Exact match, F1 and format by their weights; each part, and malformed searches, logged."""
        parts = reward.parts(sample.response, sample.label)
        weighted = sum(getattr(self._args, f"search_r1_{part}_weight") * value for part, value in parts.items())
        return {"reward": weighted, **parts, "malformed_searches": sample.metadata.get("malformed_searches", 0)}

    def close(self) -> None:
        """Let go of the search."""
        opening = self._opening
        if opening is not None and opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    async def _reply(self, engine: Any, search: Search, turn: Turn) -> list[int] | None:
        """What the search says to a turn; None to an answer, or where the model ended without either."""
        written = turn.text[: turn.text.rfind(SEARCH_END)] if SEARCH_END in turn.text else None
        if written is None or ANSWER_END in turn.text:
            return None
        query = written[written.rfind(SEARCH) + len(SEARCH) :].strip() if SEARCH in written else ""
        if not query or len(query) > LONGEST_QUERY:
            turn.sample.metadata["malformed_searches"] = turn.sample.metadata.get("malformed_searches", 0) + 1
            return self._information(engine, NO_QUERY)
        (result,) = await call_tools(turn.sample, [self._find(search, query)], timeout_s=None)
        return self._information(engine, harmless(_message(result), _control_tokens(engine.tokenizer)))

    async def _find(self, search: Search, query: str) -> str:
        hits = await search(query)
        return "\n".join(self._shown(number, hit) for number, hit in enumerate(hits, 1)) or NOTHING

    def _shown(self, number: int, hit: Hit) -> str:
        template: str = self._args.search_r1_document_format
        return template.format(number=number, title=hit.document.title, text=hit.document.text)

    async def _opened(self) -> Search:
        from slime_search_r1.search import Search, make_backend

        search = Search(
            make_backend(self._args),
            num_results=self._args.search_r1_num_results,
            concurrency=self._args.search_r1_concurrency,
            timeout_s=self._args.search_r1_timeout_s,
            cache_size=self._args.search_r1_cache_size,
        )
        await search.open()
        return search

    def _information(self, engine: Any, text: str) -> list[int]:
        """Token ids of what is shown, cut to its budget."""
        encode = partial(engine.tokenizer.encode, add_special_tokens=False)
        shown = encode(text)[: self._args.search_r1_max_information_tokens]
        return [*encode("\n\n<information>"), *shown, *encode("</information>\n\n")]


def _control_tokens(tokenizer: Any) -> list[str]:
    """Tokens that no plain text becomes, those without a name among them, longest first."""
    return sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True)


def harmless(text: str, special_tokens: Iterable[str]) -> str:
    """What a search found, unable to speak in the model's voice: no tag of ours, no special token of the tokenizer.

    Something is put in the place of each, since what is left around a piece that is taken out may be one itself.
    """
    for special in special_tokens:
        text = text.replace(special, " ")
    return TAG.sub(lambda tag: f"({tag[0][1:-1]})", text)


def _message(result: ToolResult) -> str:
    """A failed search as the model reads it."""
    return f"The search failed: {result.text[:LONGEST_REASON]}." if result.failed else result.text
