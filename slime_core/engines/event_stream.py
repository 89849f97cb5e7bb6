"""An engine's answer as a stream of server-sent events, each of which tells all that is generated so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson

from slime_core.errors import EngineError

DATA, END = b"data: ", b"\n\n"
BROKEN_OFF = {"type": "abort", "message": "the stream broke off"}

OnTokens = Callable[[list[int]], None]
"""Is told the tokens (ids) that a request has generated so far, as they come, and all of them in the end."""


async def read_stream(response: aiohttp.ClientResponse, on_tokens: OnTokens) -> bytes:
    """The last event, which is the whole answer.

    Of a stream that breaks off behind its first tokens it is what has come, as an aborted request would have answered:
    they are known to somebody, and the request cannot begin again.

    Raises:
        aiohttp.ClientError, ConnectionError: when the stream breaks off before.
        EngineError: when the engine refuses the request, or its events do not tell all that is generated.
    """
    answer: dict[str, Any] = {}
    try:
        async for event in _newest_events(response):
            if "error" in event:
                raise _error(event["error"])
            answer = event
            tokens = [entry[1] for entry in event["meta_info"].get("output_token_logprobs") or []]
            _check_whole(tokens, event["meta_info"])
            on_tokens(tokens)
        if not answer or answer["meta_info"].get("finish_reason") is None:
            raise aiohttp.ClientPayloadError("the stream ended before the answer")
    except (aiohttp.ClientError, ConnectionError):
        if not answer.get("meta_info", {}).get("completion_tokens"):
            raise
        if answer["meta_info"]["finish_reason"] is None:
            answer["meta_info"]["finish_reason"] = BROKEN_OFF
    return orjson.dumps(answer)


def _error(error: dict[str, Any]) -> Exception:
    """A failure of the engine, which has a code; SGLang refuses a request without one, when the stream has begun."""
    message = str(error.get("message", error))
    if int(error.get("code") or 400) >= 500:
        return aiohttp.ClientPayloadError(message)
    return EngineError(f"the engine refused a request ({message})")


async def _newest_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Events as they come; of several that have come at once the last alone, as it tells the others' content too."""
    begun = b""
    async for chunk in response.content.iter_any():
        *whole, begun = (begun + chunk).split(END)
        events = [event.removeprefix(DATA) for event in whole if event.startswith(DATA + b"{")]
        if events:
            yield orjson.loads(events[-1])


def _check_whole(tokens: list[int], meta: dict[str, Any]) -> None:
    if len(tokens) < meta["completion_tokens"]:
        raise EngineError(
            f"an event of the engine's stream tells {len(tokens)} of {meta['completion_tokens']} tokens; start SGLang "
            "without --incremental-streaming-output."
        )
