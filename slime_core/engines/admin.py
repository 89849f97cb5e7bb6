"""Requests to the engines themselves, past the router: pause, flush, weights, checksums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson

from slime_core.engines.topology import parse_topology
from slime_core.errors import EngineError

FAILED_END_TIMEOUT_S = 60.0
"""For a server to close an update that failed; one that hangs over it never does."""

TO_NOBODY = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""A prompt for a prefilling engine that no other goes on with: SGLang's own /health asks so."""


class Refused(EngineError):
    """An engine answered with another HTTP status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineAdmin:
    """Talks to every engine at once; use it as an async context manager."""

    def __init__(self, worker_urls: Sequence[str], timeout_s: float) -> None:
        self.urls = list(worker_urls)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> EngineAdmin:
        self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def pause(self, mode: str) -> None:
        """Stop generating; what running requests do is SGLang's `mode`: abort, retract or in_place."""
        await self._all("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again."""
        await self._all("continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget cached prefixes, which the old weights made."""
        await self._all("flush_cache", {})

    async def release_memory(self, urls: Sequence[str], tags: Sequence[str]) -> None:
        """Free GPU memory, what SGLang calls by these names. A server that is busy dies of it."""
        await self._each("release_memory_occupation", {url: {"tags": list(tags)} for url in urls})

    async def resume_memory(self, urls: Sequence[str], tags: Sequence[str]) -> None:
        """Take it again; for servers that have released it."""
        await self._each("resume_memory_occupation", {url: {"tags": list(tags)} for url in urls})

    async def update_weights_from_disk(self, model_path: str, version: int) -> None:
        """Load a directory's weights. An engine that cannot keeps its old ones.

        Raises:
            EngineError: with the engine's own words.
        """
        body = {"model_path": model_path, "weight_version": str(version), "flush_cache": False}
        await self._all("update_weights_from_disk", body)

    @asynccontextmanager
    async def weight_update(self) -> AsyncIterator[None]:
        """Open an update in parts and close it, with or without success; an older SGLang (HTTP 404) needs neither.

        Raises:
            EngineError: with the engine's own words, also when it does not take the whole.
        """
        session = await self._begin()
        try:
            yield
        except BaseException:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(FAILED_END_TIMEOUT_S):
                    await self._end(session)
            raise
        await self._end(session)

    async def _begin(self) -> bool:
        try:
            await self._all("begin_weight_update", {})
        except EngineError as error:
            if isinstance(error, Refused) and error.status == 404:
                return False
            if not (isinstance(error, Refused) and error.status == 400):
                raise
            with suppress(EngineError):  # one was left open by a trainer that is gone
                await self._all("end_weight_update", {})
            await self._all("begin_weight_update", {})
        return True

    async def _end(self, session: bool) -> None:
        if session:
            await self._all("end_weight_update", {})

    async def init_weights_update_group(self, bodies: Mapping[str, dict[str, Any]]) -> None:
        """Meet in a torch.distributed group; URL -> where, and as which rank."""
        await self._each("init_weights_update_group", bodies)

    async def destroy_weights_update_group(self, urls: Sequence[str], name: str) -> None:
        """Leave a group; engines that are no members of it, or gone, do nothing."""
        with suppress(EngineError):
            await self._each("destroy_weights_update_group", {url: {"group_name": name} for url in urls})

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        """Take part in a broadcast of some weights, within `weight_update`."""
        await self._all("update_weights_from_distributed", body)

    async def update_weights_from_tensor(self, bodies: Mapping[str, dict[str, Any]]) -> None:
        """Copy some weights from memory of this machine, within `weight_update`; URL -> its handles."""
        await self._each("update_weights_from_tensor", bodies)

    async def checksums(self) -> dict[str, dict[str, str]]:
        """URL, or rank of an engine with several -> tensor name -> checksum of the weights in use."""
        answers = await self._all("weights_checker", {"action": "checksum"})
        found: dict[str, dict[str, str]] = {}
        for url, content in zip(self.urls, answers, strict=True):
            ranks = orjson.loads(content)["ranks"]
            found |= {_part_of(url, "rank", i, len(ranks)): rank["checksums"] for i, rank in enumerate(ranks)}
        return found

    async def prompt_logprobs(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """URL, or copy of an engine with several -> log-probability of every token of the prompt but the first.

        Engines that only decode are left out.
        """
        found = {url: parse_topology(info) for url, info in (await self.server_infos()).items()}
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        asked: dict[str, tuple[str, dict[str, Any]]] = {}
        for url, engine in found.items():
            for_role = body | TO_NOBODY if engine.role == "prefill" else body
            for copy in range(0 if engine.role == "decode" else engine.copies):
                for_copy = for_role | _to_copy(copy) if engine.copies > 1 else for_role
                asked[_part_of(url, "copy", copy, engine.copies)] = url, for_copy
        contents = await _all_done(self._post(url, "generate", for_copy) for url, for_copy in asked.values())
        entries = [orjson.loads(content)["meta_info"]["input_token_logprobs"][1:] for content in contents]
        return {part: [entry[0] for entry in some] for part, some in zip(asked, entries, strict=True)}

    async def server_infos(self) -> dict[str, dict[str, Any]]:
        """URL -> what the server says of itself."""

        contents = await asyncio.gather(*(self._request("GET", url, "server_info") for url in self.urls))
        return {url: orjson.loads(content) for url, content in zip(self.urls, contents, strict=True)}

    async def _all(self, endpoint: str, body: dict[str, Any]) -> list[bytes]:
        return await self._each(endpoint, dict.fromkeys(self.urls, body))

    async def _each(self, endpoint: str, bodies: Mapping[str, dict[str, Any]]) -> list[bytes]:
        return await _all_done(self._post(url, endpoint, body) for url, body in bodies.items())

    async def _post(self, url: str, endpoint: str, body: dict[str, Any]) -> bytes:
        return await self._request("POST", url, endpoint, orjson.dumps(body))

    async def _request(self, method: str, url: str, endpoint: str, data: bytes | None = None) -> bytes:
        """The answer's content; an EngineError whatever goes wrong."""
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.request(method, f"{url}/{endpoint}", data=data, headers=headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineError(f"{url}/{endpoint} did not answer: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            words = content[:500].decode(errors="replace").strip()
            raise Refused(f"{url}/{endpoint} answered HTTP {answer.status}: {words}", answer.status)
        return content


async def _all_done(posts: Iterable[Awaitable[bytes]]) -> list[bytes]:
    """Every engine is asked to the end, also when another fails; then the first failure is raised."""
    contents = []
    for answer in await asyncio.gather(*posts, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        contents.append(answer)
    return contents


def _part_of(url: str, kind: str, number: int, of: int) -> str:
    """How a rank or a copy of an engine is called; one that is alone has the engine's URL."""
    return url if of == 1 else f"{kind} {number} of {url}"


def _to_copy(number: int) -> dict[str, int]:
    """Which data-parallel copy answers, by the name that SGLang has for it now and by the one that it had."""
    return {"routed_dp_rank": number, "data_parallel_rank": number}
