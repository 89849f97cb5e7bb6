"""The HTTP front of the embedded engine, on aiohttp; every answer has the shape SGLang 0.5.23 gives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
from aiohttp import web

from slime_core.engines.embedded.answers import error_answer, json_body, json_object, reply
from slime_core.engines.embedded.engine import PAUSE_MODES, Engine
from slime_core.engines.embedded.protocol import GenerateCall, answer, check_request, parse_generate
from slime_core.engines.embedded.request import BadRequest, Output
from slime_core.engines.embedded.scheduler import Finished
from slime_core.engines.embedded.weight_routes import CAPABILITIES, WeightRoutes

MAX_BODY_BYTES = 256 << 20
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes of one engine. Attach it with app(); the engine must deliver through `deliver`."""

    def __init__(self, model_path: str, served_model_name: str | None = None) -> None:
        self.model_path = model_path
        self.served_model_name = served_model_name or model_path
        self.started_s = time.time()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self._weights: WeightRoutes | None = None

    @property
    def engine(self) -> Engine:
        """The engine behind the routes."""
        if self._engine is None:
            raise RuntimeError("attach an engine first")
        return self._engine

    @property
    def weights(self) -> WeightRoutes:
        """The routes to its weights."""
        if self._weights is None:
            raise RuntimeError("attach an engine first")
        return self._weights

    def attach(self, engine: Engine) -> None:
        """Serve this engine; call on the event loop that will run the app."""
        self._engine = engine
        self._weights = WeightRoutes(engine, self.model_path)
        self._loop = asyncio.get_running_loop()

    def deliver(self, finished: list[Finished]) -> None:
        """Pass finished requests to the event loop, all of a step at once; called on the engine's thread."""
        if self._loop is not None:
            # the loop is closed when the server goes down while requests still run
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_resolve, finished)

    def app(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        get, post = ("GET",), ("POST",)
        routes: list[tuple[tuple[str, ...], tuple[str, ...], Handler]] = [
            (("/generate",), post, self.generate),
            (("/abort_request",), post, self.abort_request),
            (("/pause_generation",), post, self.pause_generation),
            (("/continue_generation",), post, self.continue_generation),
            (("/flush_cache",), get + post, self.flush_cache),
            (("/update_weights_from_disk",), post, self.weights.from_disk),
            (("/update_weights_from_tensor",), post, self.weights.from_tensor),
            (("/init_weights_update_group",), post, self.weights.init_group),
            (("/destroy_weights_update_group",), post, self.weights.destroy_group),
            (("/begin_weight_update",), post, self.weights.begin),
            (("/update_weights_from_distributed",), post, self.weights.from_distributed),
            (("/end_weight_update",), post, self.weights.end),
            (("/weights_checker",), post, self.weights.checker),
            (("/get_weight_version", "/weight_version"), get, self.weights.version),
            (("/update_weight_version",), post, self.weights.rename),
            (("/health", "/health_generate", "/ready"), get, self.health),
            (("/model_info", "/get_model_info"), get, self.model_info),
            (("/server_info", "/get_server_info"), get, self.server_info),
            (("/v1/models",), get, self.models),
            (("/v1/loads", "/get_load"), get, self.loads),
        ]
        for paths, methods, handler in routes:
            for path in paths:
                for method in methods:
                    app.router.add_route(method, path, _refusing(handler))
        return app

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Generate for one prompt or a list; a client that hangs up aborts its requests."""
        call = parse_generate(await json_body(http), self.engine)
        for request in call.requests:
            check_request(request, self.engine)
        return await (self._stream(http, call) if call.stream else self._whole(call))

    async def _whole(self, call: GenerateCall) -> web.Response:
        futures: list[asyncio.Future[Output]] = []
        for request in call.requests:
            request.reply = asyncio.get_running_loop().create_future()
            futures.append(request.reply)
        self.engine.submit(call.requests)
        try:
            outputs = [await future for future in futures]
        except asyncio.CancelledError:
            for request in call.requests:
                self.engine.abort(request=request)
            raise
        if broken := next(filter(None, map(_failure, outputs)), None):
            return error_answer(500, broken)
        pairs = zip(call.requests, outputs, strict=True)
        answers = [answer(request, output, call, self.engine) for request, output in pairs]
        return reply(answers if call.as_list else answers[0])

    async def _stream(self, http: web.Request, call: GenerateCall) -> web.StreamResponse:
        """Server-sent events, each with all that is generated so far, the last with the finish reason."""
        (request,) = call.requests
        request.reply = outputs = asyncio.Queue[Output]()
        self.engine.submit(call.requests)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            output = await outputs.get()
            if broken := _failure(output):
                return error_answer(500, broken)
            await response.prepare(http)
            while True:
                while not outputs.empty():  # the newest says all
                    output = outputs.get_nowait()
                broken = _failure(output)
                event = (
                    {"error": {"message": broken, "code": 500}}
                    if broken
                    else answer(request, output, call, self.engine)
                )
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
                if output.finish_reason is not None:
                    break
                output = await outputs.get()
            await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:  # nobody listens any more
            return response
        finally:
            self.engine.abort(request=request)  # unless it has ended
        return response

    async def abort_request(self, http: web.Request) -> web.Response:
        """Abort by rid, or all; unknown names are fine."""
        body = await json_object(http)
        rid = body.get("rid")
        if not body.get("abort_all"):
            if not isinstance(rid, str):
                raise BadRequest("abort_request needs a rid, or abort_all.")
            await asyncio.wrap_future(self.engine.abort(rid=rid))
        else:
            await asyncio.wrap_future(self.engine.abort())
        return web.Response()

    async def pause_generation(self, http: web.Request) -> web.Response:
        """Pause; what runs is aborted, kept or retracted as the mode says."""
        mode = (await json_object(http)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode should be 'abort', 'retract' or 'in_place', got {mode!r}.")
        await asyncio.wrap_future(self.engine.pause(mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        """Go on after a pause."""
        await json_object(http)
        await asyncio.wrap_future(self.engine.resume())
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Forget keys and values; refused while requests need them."""
        flushed = await asyncio.wrap_future(self.engine.flush_cache())
        return web.Response(text=FLUSHED) if flushed else web.Response(text="Flush cache failed.\n", status=400)

    # -- information -----------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        """200 while the model's thread works; 503 with the reason after its forward failed."""
        if self.engine.failure is not None:
            return error_answer(503, self.engine.failure)
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        """What the model is; routers read it."""
        config = self.engine.language_model.model.config
        return reply(
            {
                "model_path": self.weights.path,
                "served_model_name": self.served_model_name,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.weight_version,
                "load_format": "auto",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        """What the engine is and can do."""
        model = self.engine.language_model
        return reply(
            {
                "engine": "slime-embedded",
                "version": package_version(),
                "model_path": self.weights.path,
                "served_model_name": self.served_model_name,
                "tokenizer_path": self.model_path,
                "weight_version": self.engine.weight_version,
                "dtype": str(model.dtype).removeprefix("torch."),
                "context_length": model.context_length,
                "vocab_size": model.vocab_size,
                "max_running_requests": self.engine.max_rows,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "load_balance_method": "round_robin",
                "disaggregation_mode": "null",
                "trust_remote_code": False,
                "device": "cpu",
                "capabilities": CAPABILITIES | {"stream": True},
            }
        )

    async def models(self, http: web.Request) -> web.Response:
        """OpenAI's list of models: the one that is served."""
        model = {
            "id": self.served_model_name,
            "object": "model",
            "created": int(self.started_s),
            "owned_by": "slime-core",
            "root": self.served_model_name,
            "parent": None,
            "max_model_len": self.engine.language_model.context_length,
        }
        return reply({"object": "list", "data": [model]})

    async def loads(self, http: web.Request) -> web.Response:
        """How many requests run and wait."""
        load = await asyncio.wrap_future(self.engine.load())
        one = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting,
            "num_used_tokens": load.running_tokens,
            "paused": load.paused,
        }
        return reply({"dp_rank_count": 1, "loads": [one]})


def _resolve(finished: list[Finished]) -> None:
    for request, output in finished:
        if request.stream:
            request.reply.put_nowait(output)
        elif not request.reply.done():  # a client that hung up has cancelled it
            request.reply.set_result(output)


def _failure(output: Output) -> str | None:
    """Why the engine could not generate; None when it could."""
    reason = output.finish_reason or {}
    return str(reason["message"]) if reason.get("status_code") == 500 else None


def _refusing(handler: Handler) -> Handler:
    """Wrap a handler so that refused requests become SGLang's 400s."""

    async def refusing(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except BadRequest as error:
            return error_answer(400, str(error))

    return refusing


def package_version() -> str:
    """The installed slime-core's version, "unknown" when run from a bare source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("slime-core")
    except PackageNotFoundError:
        return "unknown"


def write_port(port: int, path: str | None) -> None:
    """Announce the port: one JSON line on stdout, and atomically in a file when asked for."""
    if path is not None:
        partial = Path(f"{path}.partial")
        partial.write_text(f"{port}\n")
        partial.replace(path)
    print(orjson.dumps({"port": port}).decode(), flush=True)
