"""The HTTP server that agents talk to: chat under `/v1`, and tasks for programs that come by themselves."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from slime_gateway import openai_api
from slime_gateway.api import ANTHROPIC, OPENAI, Api
from slime_gateway.chat import ChatRequest, Refusal, render
from slime_gateway.exchange import Exchange
from slime_gateway.outcome import outcome_of
from slime_gateway.session import Session
from slime_gateway.trajectory import Turn

KEEP_ALIVE_S = 5.0
LARGEST_REQUEST_BYTES = 64 * 2**20
LONGEST_WAIT_S = 600.0
"""For a task; a program then asks again."""
SHUTDOWN_TIMEOUT_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves the sessions of an exchange on one address.

    A session's requests carry its key (`Authorization: Bearer` or `x-api-key`). The routes of programs that come by
    themselves carry `program_key`, where there is one.
    """

    def __init__(self, exchange: Exchange, tokenizer: Any, program_key: str | None = None) -> None:
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._program_key = program_key
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen; the address for programs of this machine, with the port that was free when `port` is 0.

        Raises:
            OSError: when the address cannot be had.
        """
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._errors(OPENAI, self._models)),
                web.post("/v1/chat/completions", self._errors(OPENAI, self._chat_with(OPENAI))),
                web.post("/v1/messages", self._errors(ANTHROPIC, self._chat_with(ANTHROPIC))),
                web.post("/v1/messages/count_tokens", self._errors(ANTHROPIC, self._count_tokens)),
                web.post("/buffer/write", self._errors(OPENAI, self._write)),
                web.post("/start_rollout", self._errors(OPENAI, self._start_rollout)),
                web.post("/get_rollout_data", self._errors(OPENAI, self._get_rollout_data)),
                web.get("/stats", self._errors(OPENAI, self._stats)),
            ]
        )
        # a handler whose agent has gone is cancelled, and its request at the engine with it
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound_host, bound_port = self._runner.addresses[0][:2]
        if ipaddress.ip_address(bound_host).is_unspecified:
            bound_host = "::1" if ":" in bound_host else "127.0.0.1"
        return f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"

    async def close(self) -> None:
        """Stop listening and close the connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    # --- chat ------------------------------------------------------------------------------------------------------
    def _chat_with(self, api: Api) -> Handler:
        async def chat(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request)
            body = await _json_object(request)
            asked = api.parse_request(body)
            turn = await session.begin(asked)
            try:
                if body.get("stream"):
                    return await self._stream(api, request, body, session, turn, asked)
                reply = await session.generate(turn, asked)
                return await _sent(request, _json_response(api.answer(body, reply, self._tokenizer)))
            except BaseException:
                session.undo(turn)  # the agent has gone, or will ask again
                raise

        return chat

    async def _stream(
        self, api: Api, request: web.Request, body: dict[str, Any], session: Session, turn: Turn, asked: ChatRequest
    ) -> web.StreamResponse:
        stream = api.stream(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(stream.opening)
        texts: asyncio.Queue[str | None] = asyncio.Queue()
        generating = asyncio.ensure_future(session.generate(turn, asked, texts.put_nowait))
        generating.add_done_callback(lambda _: texts.put_nowait(None))
        told = ""
        try:
            while (piece := await _next_text(texts)) is not None:
                await response.write(stream.text(piece, first=not told) if piece else stream.ping)
                told += piece
            for chunk in stream.closing(generating.result(), told, self._tokenizer):
                await response.write(chunk)
        except Refusal as refusal:
            await response.write(stream.error(refusal))
        finally:
            generating.cancel()
        await response.write_eof()
        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        asked = ANTHROPIC.parse_request(await _json_object(request))
        text = await asyncio.to_thread(render, self._tokenizer, session.completed(asked), {})
        return _json_response({"input_tokens": len(self._tokenizer.encode(text, add_special_tokens=False))})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        return _json_response(openai_api.models())

    # --- programs that come by themselves --------------------------------------------------------------------------
    async def _write(self, request: web.Request) -> web.StreamResponse:
        """The agent has ended: its reward, its answer to grade, or its error."""
        session = self._session_of(request)
        body = await _json_object(request)
        try:
            outcome = outcome_of(body)
        except ValueError as error:
            raise Refusal(400, "invalid_outcome", f"{error}") from None
        if session.over:
            raise Refusal(410, "session_over", "this session is over already")
        session.end(outcome)
        return _json_response({"success": True})

    async def _start_rollout(self, request: web.Request) -> web.StreamResponse:
        """The next task that waits for an agent; 204 when none comes in time."""
        self._require_program(request)
        body = await _json_object(request)
        wait_s = body.get("max_wait_s", 30)
        if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not 0 <= wait_s <= LONGEST_WAIT_S:
            raise Refusal(400, "invalid_max_wait_s", f"max_wait_s must be a number from 0 to {LONGEST_WAIT_S:g}")
        task = await self._exchange.next_task(wait_s)
        if task is None:
            return web.Response(status=204)
        try:
            # the address that the program itself has come by, perhaps from another machine
            reached = replace(task, base_url=f"{request.url.origin()}/v1")
            return await _sent(request, _json_response(reached.to_dict()))
        except BaseException:
            self._exchange.offer(task)  # the program has gone
            raise

    async def _get_rollout_data(self, request: web.Request) -> web.StreamResponse:
        """The samples of the sessions that ended since the last call, and what they are."""
        self._require_program(request)
        return _json_response(await asyncio.to_thread(self._exchange.take_finished))

    async def _stats(self, request: web.Request) -> web.StreamResponse:
        self._require_program(request)
        return _json_response(self._exchange.stats())

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    # --- who asks --------------------------------------------------------------------------------------------------
    def _session_of(self, request: web.Request) -> Session:
        session = self._exchange.session(_key_of(request))
        if session is None:
            raise Refusal(401, "no_such_session", "no session has this key; it is over, or the key is wrong")
        return session

    def _require_program(self, request: web.Request) -> None:
        if self._program_key is not None and not hmac.compare_digest(
            _key_of(request).encode(), self._program_key.encode()
        ):
            raise Refusal(401, "wrong_key", "this needs the key of --gateway-key-env as a bearer token")

    def _errors(self, api: Api, handler: Handler) -> Handler:
        async def handled(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refusal as refusal:
                return _json_response(api.error(refusal), status=refusal.status)
            except web.HTTPRequestEntityTooLarge:
                too_large = Refusal(413, "too_large", f"a request has at most {LARGEST_REQUEST_BYTES} bytes")
                return _json_response(api.error(too_large), status=413)
            except ConnectionResetError:  # nobody hears the answer any more
                return web.Response()

        return handled


async def _next_text(texts: asyncio.Queue[str | None]) -> str | None:
    """The next piece of an answer; empty when none came in time, None at the end."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return await texts.get()
    except TimeoutError:
        return ""


def _key_of(request: web.Request) -> str:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _json_object(request: web.Request) -> dict[str, Any]:
    content = await request.read()
    try:
        # not orjson: whole numbers of any size must come back as they were sent
        body = json.loads(content or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "the body must be a JSON object")
    return body


async def _sent(request: web.Request, response: web.Response) -> web.Response:
    """The response, sent here and now, so that the caller learns when it cannot be."""
    await response.prepare(request)
    await response.write_eof()
    return response


def _json_response(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")
