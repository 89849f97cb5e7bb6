"""Searches of other machines: a retrieval server that speaks Search-R1's protocol, and a web search service."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

from slime_search_r1.documents import Document
from slime_search_r1.local import Hit

ATTEMPTS, FIRST_BACKOFF_S = 3, 0.2
TOO_MANY_REQUESTS = 429
LARGEST_ANSWER_BYTES = 4 << 20


class SearchError(Exception):
    """A search failed; the message is one that the model may read."""


class HttpSearch:
    """POSTs JSON and gets JSON; transport errors, HTTP 5xx and 429 are tried again, other 4xx fail at once."""

    def __init__(self, url: str, headers: dict[str, str], *, trust_env: bool) -> None:
        self._url, self._headers, self._trust_env = url, headers, trust_env
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[None] | None = None

    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer's JSON; how long to wait is the caller's to say.

        Raises:
            SearchError: when the service refuses, or does not answer after several attempts.
        """
        backoff = FIRST_BACKOFF_S
        for attempt in range(ATTEMPTS):
            try:
                status, content = await self._post(body)
                if status == 200:
                    return json.loads(content)
                problem = f"the search service answered HTTP {status}"
                if 400 <= status < 500 and status != TOO_MANY_REQUESTS:
                    raise SearchError(f"{problem}: {content[:200].decode(errors='replace')}")
            except (aiohttp.ClientError, ConnectionError) as error:
                problem = f"the search service cannot be reached ({type(error).__name__})"
            except ValueError:
                raise SearchError("the search service did not answer with JSON") from None
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(backoff)
                backoff *= 4
        raise SearchError(problem)

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            # how long to wait is the caller's to say
            no_limit = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=no_limit,
                trust_env=self._trust_env,
                connector=aiohttp.TCPConnector(limit=0),
            )
        # the key is for this service alone, not for one it may point to
        async with self._session.post(self._url, json=body, allow_redirects=False) as answer:
            content = await answer.content.read(LARGEST_ANSWER_BYTES + 1)
            while len(content) <= LARGEST_ANSWER_BYTES and (more := await answer.content.readany()):
                content += more
            if len(content) > LARGEST_ANSWER_BYTES:
                raise SearchError("the search service answered with more than 4 MiB")
            return answer.status, content

    async def open(self) -> None:
        """The first request connects."""

    async def wait_turn(self) -> None:
        """Services take requests at any time."""

    def close(self) -> None:
        """Close the connections, on the loop's next turn where one still runs."""
        if self._session is not None:
            with contextlib.suppress(RuntimeError):  # the loop has gone, and its connections with it
                self._closing = asyncio.get_running_loop().create_task(self._session.close())


class RetrievalServer(HttpSearch):
    """Search-R1's retrieval server: `{"queries": [...], "topk": k, "return_scores": true}`."""

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """What the server found.

        Raises:
            SearchError: when it fails or answers in another form.
        """
        answer = await self.ask({"queries": [query], "topk": num_results, "return_scores": True})
        match answer:
            case {"result": [list(found)]}:
                return [_hit(entry) for entry in found[:num_results]]
        raise SearchError('the retrieval server\'s answer has no "result" for the query')


def _hit(entry: Any) -> Hit:
    match entry:
        case {"document": dict(document)}:
            score = entry.get("score", 0.0)
        case dict(document):
            score = 0.0
        case _:
            raise SearchError("the retrieval server's answer has a result without a document")
    match document:
        case {"title": str(title), "text": str(text)}:
            return Hit(Document(title, text), float(score))
        case {"contents": str(contents)}:
            return Hit(Document.of_contents(contents), float(score))
    raise SearchError("the retrieval server's answer has a document without contents")


class WebSearch(HttpSearch):
    """A web search service that answers as Serper does (`https://google.serper.dev/search`)."""

    async def search(self, query: str, num_results: int) -> list[Hit]:
        """The first pages found: titles and snippets.

        Raises:
            SearchError: when the service fails or answers in another form.
        """
        answer = await self.ask({"q": query, "num": num_results})
        pages = answer.get("organic", []) if isinstance(answer, dict) else None
        if not isinstance(pages, list):
            raise SearchError("the web search's answer has no list of pages")
        documents = [
            Document(str(page.get("title", "")), str(page.get("snippet", "")))
            for page in pages
            if isinstance(page, dict)
        ]
        return [Hit(document, -float(rank)) for rank, document in enumerate(documents[:num_results])]
