"""Whether engines stay busy while tools run: many conversations of several turns whose tools are slow.

500 sessions of 4 turns go through `take_turns` and the engine client, over HTTP, to a stand-in engine that takes half a
second a request; between turns a tool takes 0.2 to 5 s. At most 64 requests are sent at a time. The same work is done
twice in one run:

- `ours`: as the core does it, only requests hold one of the 64 places;
- `held`: a conversation holds its place through its tool calls too, as upstream slime's semaphore does.

`engine_concurrency_mean` is the mean over time of the requests under way at the engine, until nine tenths of them are
answered; `full_fraction` the share of that time with at least 95 % of the places taken; `cpu_ms_per_turn` the CPU of
this process, stand-in engine and HTTP included.

    python -m benchmarks.multi_turn [--quick]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from typing import Any

import numpy as np
import orjson
import uvloop
from aiohttp import web

from slime_core import Sample, Turn, call_tools, take_turns
from slime_core.engines.client import EngineClient, SampleEngine
from slime_core.engines.process import LOOPBACK
from slime_core.engines.requests import Requests
from slime_core.testing import CharacterTokenizer

NUM_TURNS, NUM_TOKENS = 4, 64
PROMPT_TOKENS = 200


class Engine:
    """Answers every request after the same time, and keeps when each came and went."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.changes: list[tuple[float, int]] = []
        meta = {
            "finish_reason": {"type": "stop", "matched": None},
            "output_token_logprobs": [[-0.5, ord("x"), None]] * NUM_TOKENS,
            "weight_version": "0",
            "prompt_tokens": 0,
        }
        self._body = orjson.dumps({"text": "x" * NUM_TOKENS, "meta_info": meta})

    async def generate(self, request: web.Request) -> web.Response:
        """The answer, after its time."""
        await request.read()
        self.changes.append((time.monotonic(), 1))
        await asyncio.sleep(self._seconds)
        self.changes.append((time.monotonic(), -1))
        return web.Response(body=self._body, content_type="application/json")


def figures(changes: list[tuple[float, int]], places: int) -> dict[str, float]:
    """Concurrency of the engine from the times at which requests came (+1) and went (-1)."""
    num_needed = 0.9 * len(changes) / 2
    area = full = num_gone = running = 0.0
    before = changes[0][0]
    for now, change in changes:
        area += running * (now - before)
        full += (now - before) * (running >= 0.95 * places)
        before, running = now, running + change
        num_gone += change < 0
        if num_gone >= num_needed:
            break
    span = before - changes[0][0]
    return {
        "engine_concurrency_mean": round(area / span, 1),
        "full_fraction": round(full / span, 3),
        "wall_s": round(changes[-1][0] - changes[0][0], 2),
    }


async def run(
    num_sessions: int, places: int, engine_s: float, tool_s: tuple[float, float], held: bool
) -> dict[str, Any]:
    """All sessions at once; `held`: each keeps a place from its first turn to its last."""
    engine = Engine(engine_s)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/generate", engine.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    held_places = asyncio.Semaphore(places) if held else contextlib.nullcontext()
    cpu = time.process_time()
    async with EngineClient(url, tokenizer=CharacterTokenizer(), concurrency=places, timeout_s=600) as client:

        async def session(number: int) -> Sample:
            chance = random.Random(number)
            sample = Sample(index=number, tokens=np.full(PROMPT_TOKENS, ord("p"), np.int32))

            async def tool() -> str:
                await asyncio.sleep(chance.uniform(*tool_s))
                return "found"

            async def reply(turn: Turn) -> str:
                (result,) = await call_tools(turn.sample, [tool()], timeout_s=60)
                return result.text

            async with held_places:
                seen = SampleEngine(client, Requests(), 0, sample)
                return await take_turns(seen, sample, {"max_new_tokens": 4096}, reply, max_turns=NUM_TURNS)

        samples = await asyncio.gather(*(session(number) for number in range(num_sessions)))
    await runner.cleanup()
    wrong = [s.index for s in samples if s.loss_mask.sum() != NUM_TURNS * NUM_TOKENS or len(s.turn_ends) != NUM_TURNS]
    if wrong:
        raise RuntimeError(f"sessions {wrong[:5]} did not get all their turns")
    cpu_ms = 1000 * (time.process_time() - cpu) / (num_sessions * NUM_TURNS)
    return {**figures(engine.changes, places), "cpu_ms_per_turn": round(cpu_ms, 2)}


def main() -> None:
    """Run the benchmark and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sessions and times, to see that it runs")
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--places", type=int, default=64, help="requests at a time")
    parser.add_argument("--engine-s", type=float, default=0.5, help="seconds a request")
    parser.add_argument("--tool-s", type=float, nargs=2, default=(0.2, 5.0), metavar=("FROM", "TO"))
    args = parser.parse_args()
    shrink = 10 if args.quick else 1
    sessions, places = args.sessions // shrink, max(1, args.places // shrink)
    engine_s, tool_s = args.engine_s / shrink, (args.tool_s[0] / shrink, args.tool_s[1] / shrink)
    report: dict[str, Any] = {"sessions": sessions, "turns": NUM_TURNS, "places": places}
    for name, held in (("ours", False), ("held", True)):
        report[name] = uvloop.run(run(sessions, places, engine_s, tool_s, held))
        print(f"{name}: {report[name]}", flush=True)
    report["held_wall_over_ours"] = round(report["held"]["wall_s"] / report["ours"]["wall_s"], 2)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
