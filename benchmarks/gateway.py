"""What the gateway costs: many agents of several turns, through it and without it, on an engine that costs nothing.

500 conversations of 4 turns go to a stand-in engine in this process, which takes half a second a request and says 64
tokens; at most 64 requests are under way. The same work is done three times in one run:

- `direct`: by `take_turns`, in this process;
- `plain`: by agents in the gateway's own process for them, which post with aiohttp;
- `openai`: by the same agents with the official client.

`cpu_ms_per_turn` is the CPU of this process, `agents_cpu_ms_per_turn` that of the agents'; `full_fraction` the share of
the time, until nine tenths of the requests are answered, with at least 95 % of the 64 places taken. `cpu_ratio` is that
of the gateway to `direct`.

    python -m benchmarks.gateway [--quick]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks.byte_tokenizer import byte_tokenizer
from benchmarks.multi_turn import figures
from slime_core import Generation, Sample, Status, Turn, take_turns
from slime_core.testing import make_options
from slime_gateway.plugin import Gateway

NUM_TURNS, NUM_TOKENS, NUM_PLACES = 4, 64, 64
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PLAIN = """
import aiohttp
SESSIONS = []

async def agent(task):
    if not SESSIONS:
        SESSIONS.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    messages, headers = task.messages, {"Authorization": f"Bearer {task.api_key}"}
    for _ in range(TURNS):
        async with SESSIONS[0].post(
            f"{task.base_url}/chat/completions", json={"messages": messages}, headers=headers
        ) as answer:
            messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    return 1.0
"""
OPENAI = """
from openai import AsyncOpenAI
CLIENTS = []

async def agent(task):
    if not CLIENTS:
        CLIENTS.append(AsyncOpenAI(base_url=task.base_url, api_key="-", timeout=600))
    client = CLIENTS[0].with_options(api_key=task.api_key)
    messages = task.messages
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "and then?"}]
    return 1.0
"""


class Engine:
    """Says the same to every request, after the same time, and keeps when each came and went."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seconds: float) -> None:
        self.tokenizer, self.context_tokens = tokenizer, 1 << 20
        self.changes: list[tuple[float, int]] = []
        self._seconds = seconds
        self._places = asyncio.Semaphore(NUM_PLACES)
        said = [*tokenizer.encode("x" * (NUM_TOKENS - 1)), tokenizer.eos_token_id]
        self._generation = Generation(
            tokens=np.array(said, np.int32),
            text="x" * (NUM_TOKENS - 1),
            logprobs=np.full(NUM_TOKENS, -0.5, np.float32),
            weight_versions=np.zeros(NUM_TOKENS, np.int32),
            finish_reason="stop",
        )

    async def until_stopped(self) -> None:
        """Never."""
        await asyncio.Event().wait()

    async def generate(self, tokens: Any, sampling_params: dict[str, Any], **request: Any) -> Generation:
        """The answer, after its time, when there is a place."""
        async with self._places:
            self.changes.append((time.monotonic(), 1))
            await asyncio.sleep(self._seconds)
            self.changes.append((time.monotonic(), -1))
        return self._generation


async def measure(kind: str, num_sessions: int, seconds: float) -> dict[str, float]:
    """The figures of one way to do the work."""
    tokenizer = byte_tokenizer(eos_token="<e>", additional_special_tokens=["<s>"], chat_template=CHAT_TEMPLATE)
    engine = Engine(tokenizer, seconds)
    params = {"temperature": 1.0, "max_new_tokens": 1 << 16, "stop": []}
    samples = [Sample(prompt="do it " * 30, index=i, group_index=i, rollout_index=i) for i in range(num_sessions)]
    for sample in samples:
        sample.tokens = np.array(tokenizer.encode(f"<s>user\n{sample.prompt}<e>\n<s>assistant\n"), np.int32)

    async def reply(turn: Turn) -> str:
        return "\n<s>user\nand then?<e>\n<s>assistant\n"

    async def direct(sample: Sample) -> list[Sample]:
        return [await take_turns(engine, sample, params, reply, max_turns=NUM_TURNS)]

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench_agent.py"
        path.write_text(f"TURNS = {NUM_TURNS}\n{OPENAI if kind == 'openai' else PLAIN}")
        args = make_options("--generate", "gateway", "--gateway-agent", str(path))
        plugin = Gateway(args)

        async def through(sample: Sample) -> list[Sample]:
            return await plugin.generate(
                args=args, engine=engine, sample=sample, sampling_params=params, evaluation=False
            )

        run = direct if kind == "direct" else through
        if kind != "direct":  # the process is there, its libraries imported
            await run(samples[0].clone())
        engine.changes.clear()
        children = psutil.Process().children(recursive=True)
        before = time.process_time(), sum(sum(child.cpu_times()[:2]) for child in children)
        made = await asyncio.gather(*map(run, samples))
        ours = time.process_time() - before[0]
        theirs = sum(sum(child.cpu_times()[:2]) for child in children) - before[1]
        plugin.close()
        await asyncio.sleep(0.2)
    parts = [sample for part in made for sample in part]
    if any(len(s.turn_ends) != NUM_TURNS or s.status is not Status.COMPLETED for s in parts) or len(parts) != len(made):
        raise SystemExit(f"{kind}: not every conversation had its {NUM_TURNS} turns: {parts[0].failure}")
    num_turns = num_sessions * NUM_TURNS
    return {
        **figures(engine.changes, NUM_PLACES),
        "cpu_ms_per_turn": 1000 * ours / num_turns,
        "agents_cpu_ms_per_turn": 1000 * theirs / num_turns,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the conversations")
    num_sessions = 50 if parser.parse_args().quick else 500
    results: dict[str, Any] = {}
    for kind in ("direct", "plain", "openai"):
        results[kind] = asyncio.run(measure(kind, num_sessions, 0.5))
        print(f"{kind:8}", "  ".join(f"{name} {value:.3g}" for name, value in results[kind].items()), flush=True)
    for kind in ("plain", "openai"):
        results[f"{kind}_cpu_ratio"] = results[kind]["cpu_ms_per_turn"] / results["direct"]["cpu_ms_per_turn"]
    print(json.dumps({"num_sessions": num_sessions, **results}))


if __name__ == "__main__":
    main()
