"""POSTing JSON to a service: retries until a deadline, a rate limit, a bound on requests under way, an auth header."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiolimiter import AsyncLimiter

from slime_core import OptionError

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses that may pass; any other but 2xx fails at once."""
SHOWN_CHARACTERS = 300


class ServiceError(Exception):
    """The service refused a request, or did not answer in time."""


@dataclass(frozen=True)
class ServiceOptions:
    """Where requests go and how hard the service may be pressed."""

    url: str
    deadline_s: float
    """Of one request, waiting and retries included."""
    concurrency: int
    rate_per_s: float | None
    headers: Mapping[str, str]


class Service:
    """One URL; connections are made when the first request comes, on the loop that it comes on."""

    def __init__(self, options: ServiceOptions) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.concurrency)
        self._limiter = limiter(options.rate_per_s)
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[None] | None = None

    async def post(self, body: Any) -> Any:
        """The service's JSON answer.

        Transport errors and the statuses of overload are retried, waiting twice as long each time or as long as the
        service asks (`Retry-After`), until the deadline.

        Raises:
            ServiceError: with the service's words, when it refuses the request, answers no JSON, or time is up.
        """
        deadline = time.monotonic() + self._options.deadline_s
        content = json.dumps(body).encode()
        backoff_s, said = FIRST_BACKOFF_S, ""
        problem = "it was too busy to take the request"
        try:
            async with asyncio.timeout(self._options.deadline_s):
                while True:
                    async with self._slots:
                        if self._limiter is not None:
                            await self._limiter.acquire()
                        problem = said or "it did not answer"
                        try:
                            return await self._post_once(content)
                        except _Passing as passing:
                            problem = said = str(passing)
                            wait_s = passing.wait_s
                    wait_s = max(wait_s, backoff_s * random.uniform(0.5, 1.0))
                    if time.monotonic() + wait_s >= deadline:
                        raise TimeoutError
                    await asyncio.sleep(wait_s)
                    backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        except TimeoutError:
            raise ServiceError(
                f"{self._options.url} gave no answer within {self._options.deadline_s:g} s: {problem}"
            ) from None

    async def _post_once(self, body: bytes) -> Any:
        session = self._open_session()
        headers = {"Content-Type": "application/json", **self._options.headers}
        try:
            # as a stream: a large body then goes out in pieces, between which the loop runs
            async with session.post(self._options.url, data=io.BytesIO(body), headers=headers) as response:
                content = await response.read()
                if response.status in RETRIED_STATUSES:
                    raise _Passing(f"HTTP {response.status}: {_shown(content)}", _retry_after_s(response))
                if not response.ok:
                    raise ServiceError(f"{self._options.url} answered HTTP {response.status}: {_shown(content)}")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _Passing(f"{type(error).__name__}: {error}", 0.0) from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ServiceError(f"{self._options.url} answered no JSON: {_shown(content)}") from None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._options.concurrency)
            # the deadline is `post`'s
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    def close(self) -> None:
        """Close the connections, on the loop's next turn where one still runs."""
        if self._session is not None:
            with contextlib.suppress(RuntimeError):  # the loop has gone, and its connections with it
                self._closing = asyncio.get_running_loop().create_task(self._session.close())


class _Passing(Exception):
    """A fault that may pass; `wait_s` is what the service asked for."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def limiter(rate_per_s: float | None) -> AsyncLimiter | None:
    """Lets through so many requests a second, evenly spaced; without a rate there is no limiter."""
    return None if rate_per_s is None else AsyncLimiter(1, 1 / rate_per_s)


def auth_headers(variable: str | None, header: str, flag: str) -> dict[str, str]:
    """The header with the secret that an environment variable holds; `Authorization` gets the scheme Bearer.

    Raises:
        OptionError: when the variable is named and not set.
    """
    if variable is None:
        return {}
    secret = os.environ.get(variable)
    if not secret:
        raise OptionError(f"{flag} names the environment variable {variable}, which is not set where rewards run.")
    return {header: f"Bearer {secret}" if header.lower() == "authorization" else secret}


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, float(response.headers.get("Retry-After", 0)))
    return 0.0


def _shown(content: bytes) -> str:
    text = content[: 4 * SHOWN_CHARACTERS].decode(errors="replace").strip()
    return text[:SHOWN_CHARACTERS] or "(nothing)"
