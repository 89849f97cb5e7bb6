"""One search for the whole process: whatever back end is behind it, limited, timed out, and asked once a query."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from async_lru import alru_cache

from slime_core import OptionError
from slime_search_r1.documents import read_documents
from slime_search_r1.http import RetrievalServer, SearchError, WebSearch
from slime_search_r1.local import Hit, LocalIndex, Ranking, open_index

DENSE_PACKAGES = ("faiss", "sentence_transformers")
WEB_KEY = "SERPER_API_KEY"
WEB_URL = "https://google.serper.dev/search"


class Backend(Protocol):
    """What finds documents."""

    async def open(self) -> None:
        """Make ready what takes long."""

    async def wait_turn(self) -> None:
        """Return when a search can begin at once; `search` follows."""

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """At most `num_results` documents, best first."""

    def close(self) -> None:
        """Let go of connections."""


class Local:
    """A local index, searched on threads of its own, one a core."""

    def __init__(self, args: argparse.Namespace, num_threads: int = os.cpu_count() or 1) -> None:
        self._args = args
        self._index: LocalIndex
        self._threads = ThreadPoolExecutor(num_threads, "search")
        self._free = asyncio.Semaphore(num_threads)

    async def open(self) -> None:
        """Build the index where there is none yet, and map it into memory."""
        self._index = await asyncio.to_thread(open_local, self._args)

    async def wait_turn(self) -> None:
        """Take a thread."""
        await self._free.acquire()

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """What the index finds; the thread is free again when it has, even if nobody waits for it any more."""
        loop = asyncio.get_running_loop()

        def free(_: Future[list[Hit]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has gone
                loop.call_soon_threadsafe(self._free.release)

        searching = self._threads.submit(self._index.search, query, num_results)
        searching.add_done_callback(free)
        return await asyncio.wrap_future(searching)

    def close(self) -> None:
        """End the threads, each after the search that it is in."""
        self._threads.shutdown(wait=False, cancel_futures=True)


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
        DataError: when the corpus does not begin with a document.
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
        if backend == "dense" and (missing := [name for name in DENSE_PACKAGES if find_spec(name) is None]):
            raise OptionError(
                f"--search-r1-backend dense needs the package {missing[0]}: pip install 'slime-search-r1[dense]'."
            )
        if args.search_r1_corpus is not None:
            next(read_documents(Path(args.search_r1_corpus)))
    elif backend == "http" and args.search_r1_url is None:
        raise OptionError("--search-r1-backend http needs --search-r1-url http://HOST:PORT/retrieve.")
    elif backend == "web" and not os.environ.get(WEB_KEY):
        raise OptionError(f"--search-r1-backend web needs the service's key in the environment variable {WEB_KEY}.")
    url = args.search_r1_url if backend in ("http", "web") else None
    if url is not None and not url.startswith(("http://", "https://")):
        raise OptionError(f"--search-r1-url must begin with http:// or https://, got {url!r}.")


class Search:
    """At most `concurrency` searches at once; equal queries share one, which is kept.

    A search may take `timeout_s` once it has begun: waiting for others does not count.
    """

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
            await self._backend.wait_turn()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._backend.search(query, self._num_results)
            except TimeoutError:
                raise SearchError(f"no result within {self._timeout_s:g} s") from None

    def close(self) -> None:
        """Let go of the back end."""
        self._backend.close()
