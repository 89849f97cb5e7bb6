"""A stand-in for an engine that costs next to nothing: it answers /generate with answers made beforehand.

Run as a process of its own by benchmarks.rollout:

    python -m benchmarks.fake_worker --port 30000 --mean-tokens 3200 --seconds-per-token 0

Answers have log-normal lengths and end in a boxed number, right (4) or wrong (5). An abort releases requests that wait.
"""

from __future__ import annotations

import argparse
import asyncio
import random

import orjson
from aiohttp import web

NUM_ANSWERS = 128
HOSTILE = ("9**9**9", "10^{10^{10}}", "(10^7)!", "(x+1)^{9999}", "3^{3^{3^{3}}}", "2^{2^{40}}")
"""Answers that hold a careless grader for ever."""


class Worker:
    """Answers in turn from a fixed list; `held` requests wait for an abort."""

    def __init__(self, args: argparse.Namespace) -> None:
        chance = random.Random(args.seed)
        self._answers = [make_answer(chance, args) for _ in range(NUM_ANSWERS)]
        self._seconds_per_token = args.seconds_per_token
        self._chance = chance
        self._aborted = asyncio.Event()
        self._num_served, self._num_prompt = 0, args.num_prompt
        self._given = 0

    async def generate(self, request: web.Request) -> web.Response:
        """The next answer, at once, after its time, or (beyond the first `--num-prompt` requests) when aborted."""
        await request.read()
        self._given += 1
        length, body = self._answers[self._chance.randrange(NUM_ANSWERS)]
        if self._num_prompt and self._given > self._num_prompt:
            await self._aborted.wait()
        elif self._seconds_per_token:
            await asyncio.sleep(length * self._seconds_per_token)
        return web.Response(body=body, content_type="application/json")

    async def abort(self, request: web.Request) -> web.Response:
        """Let go of those that wait, and begin anew."""
        self._given = 0
        self._aborted.set()
        self._aborted = asyncio.Event()
        return web.Response()

    async def anything(self, request: web.Request) -> web.Response:
        """What a router asks before it sends requests."""
        return web.json_response({"model_path": "fake", "is_generation": True, "status": "ok"})


def make_answer(chance: random.Random, args: argparse.Namespace) -> tuple[int, bytes]:
    """Tokens and body of one answer, as SGLang would send it."""
    sigma = 0.6
    mean = args.mean_tokens
    length = max(8, int(chance.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma**2 / 2)))
    answer = chance.choice(HOSTILE) if chance.random() < args.hostile else chance.choice("45")
    text = "Let me think about it step by step. " * (length // 9) + f"So the answer is \\boxed{{{answer}}}."
    logprobs = [[-chance.expovariate(2.0), chance.randrange(5, 250), None] for _ in range(length)]
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 8,
        "completion_tokens": length,
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": length}],
        "output_token_logprobs": logprobs,
        "e2e_latency": 1.0,
    }
    return length, orjson.dumps({"text": text, "output_ids": [entry[1] for entry in logprobs], "meta_info": meta})


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mean-tokens", type=int, default=3200)
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--hostile", type=float, default=0.0, help="part of the answers that hold a careless grader")
    parser.add_argument("--num-prompt", type=int, default=0, help="answer so many at once, the others when aborted")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    async def app() -> web.Application:
        worker = Worker(args)
        served = web.Application()
        served.router.add_post("/generate", worker.generate)
        served.router.add_post("/abort_request", worker.abort)
        served.router.add_route("*", "/{path:.*}", worker.anything)
        return served

    web.run_app(app(), host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
