"""The one way to an inference engine: requests to the router, aborts to the engines themselves."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson

from slime_core.engines.model_dir import UNKNOWN_CONTEXT
from slime_core.errors import EngineError
from slime_core.types import FINISH_STATUS, Generation, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0


class EngineClient:
    """What generators and async rewards receive as `engine`.

    At most `concurrency` requests are under way at once; tool calls and graders do not count. Transport errors and
    HTTP 5xx are retried until `timeout_s`; an HTTP 4xx fails at once with the server's message.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        concurrency: int,
        timeout_s: float,
        worker_urls: Sequence[str] = (),
        context_tokens: int = UNKNOWN_CONTEXT,
    ) -> None:
        self.url = url
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.num_tokens_generated = 0
        self._worker_urls = list(worker_urls)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        tokens: Sequence[int] | IntArray,
        sampling_params: dict[str, Any],
        *,
        session_id: str | None = None,
        image_data: Sequence[str] | None = None,
    ) -> Generation:
        """Continue `tokens` (ids) under SGLang's sampling parameters.

        Raises:
            EngineError: when the engine refuses the request, or none answers in time.
        """
        body: dict[str, Any] = {
            "input_ids": np.asarray(tokens).tolist(),
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        if image_data is not None:
            body["image_data"] = list(image_data)
        headers = {"X-SMG-Routing-Key": session_id} if session_id else {}
        async with self._slots:
            answer = await self._post_until(f"{self.url}/generate", body, headers)
        generation = parse_generation(answer)
        self.num_tokens_generated += len(generation.tokens)
        return generation

    async def abort_all(self) -> None:
        """Abort every request on every engine; the requests answer with what they have."""
        calls = [self._post(f"{url}/abort_request", {"abort_all": True}, {}) for url in self._worker_urls]
        await asyncio.gather(*calls)

    async def _post_until(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """POST with retries until the deadline."""
        deadline, backoff = time.monotonic() + self._timeout_s, FIRST_BACKOFF_S
        while True:
            body["rid"] = uuid.uuid4().hex
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    status, content = await self._post(url, body, headers)
                if status == 200:
                    return orjson.loads(content)
                problem = f"HTTP {status}: {_message(content)}"
                if 400 <= status < 500:
                    raise EngineError(f"the engine refused a request ({problem})")
            except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            if time.monotonic() + backoff > deadline:
                raise EngineError(
                    f"no answer from {url} within {self._timeout_s:.0f} s; the last problem was {problem}"
                )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    async def _post(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            # The deadline is ours; proxies of the environment are not for a cluster's own servers.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        data = orjson.dumps(body)
        async with self._session.post(
            url, data=data, headers={"Content-Type": "application/json", **headers}
        ) as answer:
            return answer.status, await answer.read()


SEED_STRIDE, REQUEST_STRIDE = 1_000_003, 7_919
"""Primes that keep the seeds of neighbouring runs, samples and requests apart."""


class SampleEngine:
    """The engine as the generator of one sample sees it: the sample's k-th request has a seed of its own.

    So what a sample says depends neither on its neighbours nor on whether the run was resumed, and the branches of a
    fan-out differ. A `sampling_seed` that the caller gives stays.
    """

    def __init__(self, client: EngineClient, run_seed: int, sample_index: int) -> None:
        self._client = client
        self._seed = run_seed * SEED_STRIDE + sample_index
        self._num_requests = 0
        self.tokenizer = client.tokenizer
        self.context_tokens = client.context_tokens

    async def generate(
        self,
        tokens: Sequence[int] | IntArray,
        sampling_params: dict[str, Any],
        *,
        session_id: str | None = None,
        image_data: Sequence[str] | None = None,
    ) -> Generation:
        """Continue `tokens`; see `EngineClient.generate`."""
        seed = (self._seed * REQUEST_STRIDE + self._num_requests) % 2**31
        self._num_requests += 1
        params = {"sampling_seed": seed, **sampling_params}
        return await self._client.generate(tokens, params, session_id=session_id, image_data=image_data)


def parse_generation(answer: dict[str, Any]) -> Generation:
    """An engine's answer to /generate as a Generation; tokens come from the log-probs, never from the text.

    Raises:
        EngineError: when the answer is not what the protocol promises.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        entries = meta.get("output_token_logprobs") or []
        tokens = np.array([entry[1] for entry in entries], np.int32)
        logprobs = np.array([entry[0] for entry in entries], np.float32)
        return Generation(
            tokens=tokens,
            text=answer["text"],
            logprobs=logprobs,
            weight_versions=_versions(meta, len(tokens)),
            finish_reason=finish if finish in FINISH_STATUS else "abort",
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"the engine's answer is not SGLang's: {type(error).__name__}: {error}") from None


def _versions(meta: dict[str, Any], count: int) -> IntArray:
    """One weight version a token; engines that report no spans made all of them with the last."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = np.zeros(count, np.int32)
    for span in spans:
        versions[span["start"] : span["end"]] = _version_number(span["version"])
    return versions


def _version_number(version: str | None) -> int:
    """Our versions are numbers; what an engine was started with ('default') counts as 0."""
    return int(version) if version is not None and version.isdigit() else 0


def _message(content: bytes) -> str:
    """The server's own words out of an error answer."""
    try:
        error = orjson.loads(content).get("error", {})
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, AttributeError):
        return content[:300].decode(errors="replace").strip()
