"""JSON in and out of the embedded engine's routes."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from slime_core.engines.embedded.request import BadRequest


async def json_body(http: web.Request) -> Any:
    """The body; raises BadRequest when it is not JSON."""
    try:
        return orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def json_object(http: web.Request) -> dict[str, Any]:
    """The body, which must be an object; raises BadRequest."""
    body = await json_body(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object, at least {}.")
    return body


def reply(data: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def error_answer(status: int, message: str) -> web.Response:
    """A refusal in the form SGLang gives it."""
    return reply({"error": {"message": message}}, status)
