"""The one way to an inference engine: requests to the router, aborts to the engines themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import numpy as np
import orjson

from slime_core.engines.event_stream import OnTokens, read_stream
from slime_core.engines.model_dir import UNKNOWN_CONTEXT
from slime_core.engines.requests import Requests
from slime_core.errors import EngineError
from slime_core.types import FINISH_STATUS, FloatArray, Generation, IntArray, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
FIRST_ABORT_PAUSE_S, LONGEST_ABORT_PAUSE_S = 0.02, 0.5
ABORT_TIMEOUT_S = 5.0
ABORTS_AT_A_TIME = 64
NOTHING_GENERATED = Generation(
    tokens=np.empty(0, np.int32),
    text="",
    logprobs=np.empty(0, np.float32),
    weight_versions=np.empty(0, np.int32),
    finish_reason="abort",
)
"""The answer to a request that was stopped before it was sent."""


class FrozenModels(dict[str, "EngineClient"]):
    """Name -> client, for each --frozen-model."""

    def __missing__(self, name: str) -> EngineClient:
        there = f"there are {', '.join(self)}" if self else "there is none"
        raise EngineError(f"no frozen model is called '{name}': {there}; --frozen-model {name}=DIR starts one.")


class EngineClient:
    """What async rewards and `rollout` receive as `engine`; a generator gets a `SampleEngine`.

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
        frozen: Mapping[str, EngineClient] | None = None,
    ) -> None:
        self.url = url
        self.frozen = FrozenModels(frozen or {})
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._worker_urls = list(worker_urls)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._num_running = self._num_retries = 0
        self._aborting: set[Requests] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._parsing = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    def add_worker(self, url: str) -> None:
        """Send aborts to this engine too."""
        self._worker_urls.append(url)

    def remove_worker(self, url: str) -> None:
        """Send an engine that is gone no more aborts."""
        if url in self._worker_urls:
            self._worker_urls.remove(url)

    def take_num_retries(self) -> int:
        """Requests that were sent again since the last call."""
        taken, self._num_retries = self._num_retries, 0
        return taken

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, those to frozen models too."""
        for client in self.frozen.values():
            await client.close()
        if self._leaving:
            await asyncio.wait(self._leaving)
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
        requests: Requests | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Continue `tokens` (ids) under SGLang's sampling parameters.

        Args:
            session_id: requests of one session go to the same engine, where the router can (`--router-policy manual`).
            image_data: data URIs or addresses of the prompt's images.
            requests: those that `abort` will stop together with this one; it answers with the tokens it has by then.
            on_tokens: is told all tokens (ids) so far, as they come; the Generation goes on from them. When the engine
                is lost meanwhile, the answer is what has come, as aborted.

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
        requests = requests or Requests()
        async with self._slots:
            url = f"{self.url}/generate"
            answer = await self._post_until(url, body, headers, requests, parse_generation, on_tokens)
        generation = NOTHING_GENERATED if answer is None else answer
        requests.num_tokens += len(generation.tokens)
        return generation

    async def prompt_logprobs(self, tokens: Sequence[int] | IntArray) -> FloatArray:
        """What the model gives to tokens (ids) that are there already, such as another model's response.

        Returns:
            float32 [n - 1]: the log-probability, at temperature 1, of every token but the first.

        Raises:
            EngineError: when the engine refuses the request, or none answers in time.
        """
        body: dict[str, Any] = {
            "input_ids": np.asarray(tokens).tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with self._slots:
            logprobs = await self._post_until(f"{self.url}/generate", body, {}, Requests(), parse_prompt_logprobs)
        return np.empty(0, np.float32) if logprobs is None else logprobs

    async def abort(self, requests: Requests, timeout_s: float) -> None:
        """Stop these requests, wherever they are; return when all have answered, or after `timeout_s`.

        An engine is told again until then: a request may still have been on its way.
        """
        requests.stop()
        self._aborting.add(requests)
        try:
            await self._abort_until(requests, time.monotonic() + timeout_s)
        finally:
            self._aborting.discard(requests)

    async def aborted(self) -> None:
        """Return when no `abort` is under way."""
        while self._aborting:
            await asyncio.sleep(FIRST_ABORT_PAUSE_S)

    async def _abort_until(self, requests: Requests, deadline: float) -> None:
        pause = FIRST_ABORT_PAUSE_S
        while requests.running and time.monotonic() < deadline:
            alone = len(requests.running) == self._num_running
            bodies = [{"abort_all": True}] if alone else [{"rid": rid} for rid in requests.running]
            for start in range(0, len(bodies), ABORTS_AT_A_TIME):
                await asyncio.gather(
                    *(self._abort(url, body) for url in self._worker_urls for body in bodies[start:][:ABORTS_AT_A_TIME])
                )
            if requests.running:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_ABORT_PAUSE_S)

    async def _abort(self, url: str, body: dict[str, Any]) -> None:
        """An engine that does not take the abort is asked again later, or its requests are cancelled."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._post(f"{url}/abort_request", body, {})

    def _leave(self, rid: str) -> None:
        """End a stream that nobody reads any more: the router does not tell the engine before its next token."""
        for url in self._worker_urls:
            task = asyncio.create_task(self._abort(url, {"rid": rid}))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _post_until(
        self,
        url: str,
        body: dict[str, Any],
        headers: dict[str, str],
        requests: Requests,
        parse: Callable[[dict[str, Any]], T],
        on_tokens: OnTokens | None = None,
    ) -> T | None:
        """POST with retries until the deadline; None when the requests were stopped before, or nobody wants them.

        The time that a lost attempt took is given back, in all at most as much as there was at first.
        """
        deadline, backoff, spare_s = time.monotonic() + self._timeout_s, FIRST_BACKOFF_S, self._timeout_s
        problem = ""
        while not requests.stopped:
            asked = time.monotonic()
            body["rid"] = rid = uuid.uuid4().hex
            requests.running.add(rid)
            self._num_running += 1
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    status, content = await self._post(url, body, headers, on_tokens)
                if status == 200:
                    return await self._parsed(content, requests, parse)
                problem = f"HTTP {status}: {_message(content)}"
                if 400 <= status < 500:
                    raise EngineError(f"the engine refused a request ({problem})")
            except asyncio.CancelledError:
                if on_tokens is not None:
                    self._leave(rid)
                raise
            except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError) as error:
                # our own deadline tells less than what an engine has said
                if type(error) is not TimeoutError or not problem:
                    problem = f"{type(error).__name__}: {error}".rstrip(": ")
            finally:
                requests.running.discard(rid)
                self._num_running -= 1
            if time.monotonic() < deadline:
                given_back = min(time.monotonic() - asked, spare_s)
                deadline, spare_s = deadline + given_back, spare_s - given_back
            if time.monotonic() + backoff > deadline:
                raise EngineError(
                    f"no answer from {url} within {self._timeout_s:.0f} s; the last problem was {problem}"
                )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_S)
            self._num_retries += 1
        return None

    async def _parsed(self, content: bytes, requests: Requests, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """The answer, parsed one at a turn of the event loop, however many have come at once."""
        async with self._parsing:
            await asyncio.sleep(0)
            return None if requests.discarded else parse(orjson.loads(content))

    async def _post(
        self, url: str, body: dict[str, Any], headers: dict[str, str], on_tokens: OnTokens | None = None
    ) -> tuple[int, bytes]:
        """Status and content; of a stream, which `on_tokens` asks for, its last event."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            # The deadline is ours; proxies of the environment are not for a cluster's own servers.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        data = orjson.dumps(body if on_tokens is None else {**body, "stream": True})
        async with self._session.post(
            url, data=data, headers={"Content-Type": "application/json", **headers}
        ) as answer:
            if on_tokens is not None and answer.status == 200:
                return 200, await read_stream(answer, on_tokens)
            return answer.status, await answer.read()


SEED_STRIDE, CONTINUATION_STRIDE, REQUEST_STRIDE = 1_000_003, 65_537, 7_919
"""Primes that keep the seeds of neighbouring runs, samples, continuations and requests apart."""


class SampleEngine:
    """The engine as the generator of one sample sees it: the sample's k-th request has a seed of its own.

    So what a sample says depends neither on its neighbours nor on whether the run was resumed, and the branches of a
    fan-out differ. A `sampling_seed` that the caller gives stays.
    """

    def __init__(self, client: EngineClient, requests: Requests, run_seed: int, sample: Sample) -> None:
        self._client = client
        self._requests = requests
        # a continued sample must not draw again what its first tokens were drawn with
        self._seed = (run_seed * SEED_STRIDE + sample.index) * CONTINUATION_STRIDE + sample.response_length
        self._num_requests = 0
        self.frozen = client.frozen
        self._prompt, self._unexpanded = sample.tokens[: sample.prompt_length], sample.unexpanded_prompt
        self.tokenizer = client.tokenizer
        self.context_tokens = client.context_tokens

    async def generate(
        self, tokens: Sequence[int] | IntArray, sampling_params: dict[str, Any], **request: Any
    ) -> Generation:
        """Continue `tokens`; see `EngineClient.generate` for what else a request may have.

        With `image_data` the prompt goes out with one placeholder an image, which the engine expands as the model's
        processor did.
        """
        seed = (self._seed * REQUEST_STRIDE + self._num_requests) % 2**31
        self._num_requests += 1
        params = {"sampling_seed": seed, **sampling_params}
        if request.get("image_data") and self._unexpanded is not None:
            ids, length = np.asarray(tokens), len(self._prompt)
            if np.array_equal(ids[:length], self._prompt):
                tokens = np.concatenate([np.asarray(self._unexpanded, ids.dtype), ids[length:]])
        return await self._client.generate(tokens, params, requests=self._requests, **request)

    async def prompt_logprobs(self, tokens: Sequence[int] | IntArray) -> FloatArray:
        """What the model gives to tokens that are there already; see `EngineClient.prompt_logprobs`."""
        return await self._client.prompt_logprobs(tokens)

    async def until_stopped(self) -> None:
        """Return once the round needs nothing more; requests then answer at once, as aborted."""
        await self._requests.until_stopped()


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


def parse_prompt_logprobs(answer: dict[str, Any]) -> FloatArray:
    """The log-probabilities of an answer's prompt, float32 [n - 1].

    Raises:
        EngineError: when the answer is not what the protocol promises.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        return np.array([entry[0] for entry in entries], np.float32)
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
