"""Start an embedded engine: python -m slime_core.engines.embedded --model-path DIR."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.engines.embedded.language_model import LanguageModel

# below this many parameters a step's operations are too small to share: two threads are slower than one
TINY_PARAMETERS = 20_000_000


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_core.engines.embedded",
        description="A continuous-batching CPU inference server that speaks SGLang's HTTP protocol.",
    )
    add = parser.add_argument
    add("--model-path", required=True, help="a Hugging Face model directory")
    add("--served-model-name", help="the name in /v1/models (default: the model path)")
    add("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    add("--port", type=int, default=0, help="port to bind; 0 lets the kernel choose (default: %(default)s)")
    add("--port-file", help="write the port here, atomically, once the server answers")
    add("--max-running-requests", type=int, default=256, help="most sequences at once (default: %(default)s)")
    add("--context-length", type=int, help="most tokens of prompt and answer (default: the model's)")
    add("--kv-memory-gb", type=float, default=4.0, help="most memory for keys and values (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="default: %(default)s")
    add("--num-threads", type=int, default=0, help="torch's threads; 0: one for a tiny model, else all cores")
    add("--seed", type=int, help="makes the seeds of requests without one reproducible")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Bind, load, serve until SIGTERM or SIGINT; returns the exit code, 2 for a user's mistake."""
    args = build_parser().parse_args(argv)
    try:
        # bound and listening before the model loads: from here on nobody else can take the port
        listener = socket.create_server((args.host, args.port), backlog=4096, reuse_port=False)
    except (OSError, OverflowError) as error:
        return _fail(f"cannot bind {args.host}:{args.port}: {error}")
    with listener:
        return _load_and_serve(args, listener)


def _load_and_serve(args: argparse.Namespace, listener: socket.socket) -> int:
    # threads that wait by spinning bring a shared machine to a halt; torch reads this when it is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # imported late: a wrong command line or a busy port is told at once, not after seconds of importing torch
    import torch
    from transformers.utils import logging as transformers_logging

    from slime_core.engines.embedded.language_model import ModelLoadError, load_language_model

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        language_model = load_language_model(args.model_path, getattr(torch, args.dtype), args.context_length)
    except ModelLoadError as error:
        return _fail(str(error))
    torch.set_num_threads(args.num_threads if args.num_threads > 0 else _fitting_threads(language_model))
    _event_loop_runner()(_serve(args, listener, language_model))
    return 0


def _fitting_threads(language_model: LanguageModel) -> int:
    if language_model.model.num_parameters() < TINY_PARAMETERS:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _event_loop_runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run
    return uvloop.run


async def _serve(args: argparse.Namespace, listener: socket.socket, language_model: LanguageModel) -> None:
    from aiohttp import web

    from slime_core.engines.embedded.engine import Engine
    from slime_core.engines.embedded.server import Server, write_port

    server = Server(args.model_path, args.served_model_name)
    kv_bytes = int(args.kv_memory_gb * 2**30)
    engine = Engine(language_model, args.max_running_requests, kv_bytes, args.seed, server.deliver)
    server.attach(engine)
    logging.getLogger("aiohttp.server").addFilter(_is_no_protocol_error)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    engine.start()
    await web.SockSite(runner, listener).start()
    write_port(listener.getsockname()[1], args.port_file)
    await stop.wait()
    # the engine first: what runs is answered with what it has before connections close
    await asyncio.to_thread(engine.stop)
    await runner.cleanup()


def _is_no_protocol_error(record: logging.LogRecord) -> bool:
    """Keep the log to what matters: the router asks every new worker whether it speaks HTTP/2, and is refused."""
    from aiohttp.http_exceptions import BadHttpMessage

    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
