"""One search for the whole process: whatever back end is behind it, limited, timed out, and asked once a query."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Protocol

from async_lru import alru_cache

from slime_core import OptionError
from slime_search_r1.http import RetrievalServer, SearchError, WebSearch
from slime_search_r1.local import Hit, LocalIndex, Ranking, open_index

WEB_KEY = "SERPER_API_KEY"
WEB_URL = "https://google.serper.dev/search"


class Backend(Protocol):
    """What finds documents."""

    async def open(self) -> None:
        """Make ready what takes long."""

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """At most `num_results` documents, best first."""

    def close(self) -> None:
        """Let go of connections."""


class Local:
    """A local index, searched on threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._index: LocalIndex

    async def open(self) -> None:
        """Build the index where there is none yet, and map it into memory."""
        self._index = await asyncio.to_thread(open_local, self._args)

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """What the index finds."""
        return await asyncio.to_thread(self._index.search, query, num_results)

    def close(self) -> None:
        """Nothing to let go of."""


def open_local(args: argparse.Namespace) -> LocalIndex:
    """The local index that the flags name, built if need be.

    Raises:
        OptionError, DataError: when it cannot be.
    """
    ranking: Ranking
    if args.search_r1_backend == "dense":
        from slime_search_r1.dense import Dense

        prefixes = args.search_r1_query_prefix, args.search_r1_document_prefix
        ranking = Dense(args.search_r1_embedding_model, *prefixes)
    else:
        from slime_search_r1.bm25 import Bm25

        ranking = Bm25()
    corpus, index = (None if name is None else Path(name) for name in (args.search_r1_corpus, args.search_r1_index))
    return open_index(corpus, index, ranking)


def make_backend(args: argparse.Namespace) -> Backend:
    """The back end that `--search-r1-backend` names, not opened yet."""
    check_backend(args)
    match args.search_r1_backend:
        case "http":
            return RetrievalServer(args.search_r1_url, {}, trust_env=False)
        case "web":
            key = os.environ.get(WEB_KEY, "")
            return WebSearch(args.search_r1_url or WEB_URL, {"X-API-KEY": key}, trust_env=True)
    return Local(args)


def check_backend(args: argparse.Namespace) -> None:
    """Refuse flags that name no usable back end, before anything is started.

    Raises:
        OptionError: telling which flag is missing or wrong.
    """
    backend = args.search_r1_backend
    if backend in ("bm25", "dense"):
        if args.search_r1_corpus is None and args.search_r1_index is None:
            raise OptionError(
                f"--search-r1-backend {backend} needs documents to search: --search-r1-corpus FILE, or "
                "--search-r1-index DIR with a finished index."
            )
        for flag in ("corpus", "index"):
            name = getattr(args, f"search_r1_{flag}")
            if name is not None and (flag == "corpus" or args.search_r1_corpus is None) and not Path(name).exists():
                raise OptionError(f"--search-r1-{flag} {name}: there is no such {flag}.")
        if backend == "dense" and args.search_r1_embedding_model is None:
            raise OptionError("--search-r1-backend dense needs --search-r1-embedding-model NAME.")
    elif backend == "http" and args.search_r1_url is None:
        raise OptionError("--search-r1-backend http needs --search-r1-url http://HOST:PORT/retrieve.")
    elif backend == "web" and not os.environ.get(WEB_KEY):
        raise OptionError(f"--search-r1-backend web needs the service's key in the environment variable {WEB_KEY}.")


class Search:
    """At most `concurrency` searches at once, each within `timeout_s`; equal queries share one, which is kept."""

    def __init__(
        self, backend: Backend, *, num_results: int, concurrency: int, timeout_s: float, cache_size: int
    ) -> None:
        self._backend, self._num_results, self._timeout_s = backend, num_results, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._kept = alru_cache(maxsize=cache_size)(self._search)

    async def open(self) -> None:
        """Make the back end ready; nothing limits how long that takes."""
        await self._backend.open()

    async def __call__(self, query: str) -> list[Hit]:
        """What is found; failures are not kept.

        Raises:
            SearchError: when the search fails or takes longer than `timeout_s`.
        """
        return await self._kept(query)

    async def _search(self, query: str) -> list[Hit]:
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._backend.search(query, self._num_results)
            except TimeoutError:
                raise SearchError(f"no result within {self._timeout_s:g} s") from None

    def close(self) -> None:
        """Let go of the back end."""
        self._backend.close()
