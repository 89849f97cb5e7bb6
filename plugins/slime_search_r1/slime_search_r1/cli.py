"""`slime-search`: build, ask and serve the local index without a training run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from slime_core import SlimeError, flag_types
from slime_search_r1 import options
from slime_search_r1.local import LocalIndex


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a user's mistake is one line and status 2."""
    parser = argparse.ArgumentParser(prog="slime-search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build the index, if it is not there yet")
    ask = commands.add_parser("ask", help="search once and print what is found")
    serve = commands.add_parser("serve", help="answer Search-R1's protocol: POST /retrieve, GET /health")
    for command in (build, ask, serve):
        command.add_argument("--backend", choices=["bm25", "dense"], default="bm25", help="by words or by embeddings")
        options.add_index_options(command, "--")
    for command in (ask, serve):
        command.add_argument(
            "--num-results", type=flag_types.positive_int, default=3, metavar="N", help="documents a query"
        )
    ask.add_argument("query", help="what to look for")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; nothing guards the service")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument(
        "--concurrency", type=flag_types.positive_int, default=8, metavar="N", help="queries searched at once"
    )
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except SlimeError as error:
        print(f"error: {error}".replace("--search-r1-", "--"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    index = _open(args)
    if args.command == "build":
        print(f"{len(index.documents)} documents")
    elif args.command == "ask":
        for number, hit in enumerate(index.search(args.query, args.num_results), 1):
            print(options.PLAIN_DOCUMENT.format(number=number, title=hit.document.title, text=hit.document.text))
    else:
        asyncio.run(_serve(args, index))
    return 0


def _open(args: argparse.Namespace) -> LocalIndex:
    """The index, by the same way and with the same errors as in a run."""
    from slime_search_r1.search import check_backend, open_local

    named = argparse.Namespace(**{f"search_r1_{name}": value for name, value in vars(args).items()})
    check_backend(named)
    return open_local(named)


async def _serve(args: argparse.Namespace, index: LocalIndex) -> None:
    from aiohttp import web

    from slime_search_r1.server import make_app

    runner = web.AppRunner(make_app(index, concurrency=args.concurrency, num_results=args.num_results))
    await runner.setup()
    try:
        site = web.TCPSite(runner, args.host, args.port)
        try:
            await site.start()
        except OSError as error:
            raise SlimeError(
                f"{args.host}:{args.port} cannot be listened on: {error}; choose another --port."
            ) from None
        host, port = runner.addresses[0][:2]
        print(f"{len(index.documents)} documents at http://{host}:{port}/retrieve", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
