"""Speed of the embedded engine against `transformers` generate, as ratios measured in one run.

Three ways of generating the same numbers of tokens from the same prompts with the same model, with the log-probability
of every sampled token, at 64 and at 256 sequences together:

- transformers: `generate` with output_scores, then a log-softmax at the sampled tokens;
- in_process: the engine's thread in this process, no HTTP;
- http: one request a prompt through the real sglang-router to an engine server, each in a process of its own.

A run named `even` has as many prompts as sequences and answers of equal length, which suits `generate` best. One named
`uneven` has twice as many prompts and answers of 1/8 to 8/8 of that length, as in RL; `generate` then works through
batches, each as long as its longest answer, and only the tokens asked for count.

The ways take turns over several rounds, and the median of each counts, so that a slow minute of the machine hits all of
them. Rates are tokens per second of wall time and per CPU-second (for http: of client, router and server together).
The model is the CPU quickstart's: 117 K parameters, fp32, byte-level vocabulary of 288.

    python -m benchmarks.engine [--quick]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.language_model import LanguageModel, load_language_model
from slime_core.engines.embedded.request import Output, SamplingParams

VOCAB_SIZE = 288
CpuClock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """What to generate: prompts as token ids, the length of each one's answer, and how many to run together."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    concurrency: int


Way = Callable[[Work], int]  # generates and returns the number of tokens


def main() -> None:
    """Run the benchmark and print its report."""
    args = parse_arguments()
    torch.set_num_threads(args.num_threads)
    with tempfile.TemporaryDirectory() as directory:
        make_quickstart_model(Path(directory))
        report = measure(Path(directory), args)
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 32 tokens: does it run, not how fast")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens a response (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way (default: %(default)s)")
    parser.add_argument("--num-threads", type=int, default=1, help="torch's threads everywhere (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256], help="default: 64 256")
    args = parser.parse_args()
    if args.quick:
        args.new_tokens, args.rounds = 32, 1
    return args


def make_quickstart_model(directory: Path) -> None:
    """Write the quickstart's model, with random weights, to a directory."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=192,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def measure(directory: Path, args: argparse.Namespace) -> dict[str, object]:
    """Time the three ways in turns; returns the report."""
    language_model = load_language_model(directory, torch.float32)
    engine = Engine(language_model)
    engine.start()
    rates: dict[str, list[tuple[float, float]]] = {}
    with servers(directory, args.num_threads) as (url, server_clock):
        ways: dict[str, tuple[Way, CpuClock]] = {
            "transformers": (partial(transformers_run, language_model), time.process_time),
            "in_process": (partial(engine_run, engine), time.process_time),
            "http": (partial(http_run, url), server_clock),
        }
        for turn in range(args.rounds + 1):
            for work in works(args.concurrency, args.new_tokens):
                for way, (run, clock) in ways.items():
                    rate = timed(run, work, clock)
                    if turn > 0:  # the first turn warms up
                        rates.setdefault(f"{way}_{work.name}", []).append(rate)
    engine.stop()
    return make_report(rates, args)


def works(concurrencies: list[int], new_tokens: int) -> list[Work]:
    """Even work at each concurrency, and uneven work at the largest."""
    largest = max(concurrencies)
    generator = random.Random(0)
    lengths = [generator.randint(max(1, new_tokens // 8), new_tokens) for _ in range(2 * largest)]
    even = [Work(f"even_{count}", make_prompts(count), [new_tokens] * count, count) for count in concurrencies]
    return [*even, Work(f"uneven_{largest}", make_prompts(2 * largest), lengths, largest)]


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of 16 to 31 random byte tokens."""
    generator = random.Random(count)
    return [[generator.randrange(256) for _ in range(16 + index % 16)] for index in range(count)]


def timed(run: Way, work: Work, cpu_clock: CpuClock) -> tuple[float, float]:
    """Tokens per second of wall time and per CPU-second of one run."""
    wall, cpu = time.perf_counter(), cpu_clock()
    tokens = run(work)
    return tokens / (time.perf_counter() - wall), tokens / max(cpu_clock() - cpu, 1e-9)


def transformers_run(language_model: LanguageModel, work: Work) -> int:
    """`generate` with the log-probability of each sampled token, batch by batch."""
    for begin in range(0, len(work.prompts), work.concurrency):
        batch = slice(begin, begin + work.concurrency)
        generate_batch(language_model.model, work.prompts[batch], max(work.lengths[batch]))
    return sum(work.lengths)


@torch.inference_mode()
def generate_batch(model: Any, prompts: list[list[int]], new_tokens: int) -> torch.Tensor:
    """Log-probabilities [prompts, new_tokens] of sampled tokens."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sampled = output.sequences[:, longest:]
    return torch.stack(output.scores, dim=1).log_softmax(-1).gather(-1, sampled[..., None]).squeeze(-1)


def engine_run(engine: Engine, work: Work) -> int:
    """The engine without HTTP."""
    futures: list[Future[Output]] = [Future() for _ in work.prompts]
    requests = [
        engine.make_request(prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), str(index), future)
        for index, (prompt, length, future) in enumerate(zip(work.prompts, work.lengths, futures, strict=True))
    ]
    engine.submit(requests)
    return sum(len(future.result().output_logprobs) for future in futures)


def http_run(url: str, work: Work) -> int:
    """One request a prompt, all at once, through the router."""
    return asyncio.run(post_all(url, work))


async def post_all(url: str, work: Work) -> int:
    """Send every prompt and count the tokens that come back."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: list[int], length: int) -> int:
            params = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                answer = orjson.loads(await response.read())
            return len(answer["meta_info"]["output_token_logprobs"])

        return sum(await asyncio.gather(*map(one, work.prompts, work.lengths)))


@contextmanager
def servers(directory: Path, num_threads: int) -> Iterator[tuple[str, CpuClock]]:
    """An engine server and a router before it; yields the router's URL and a clock of all CPU time spent."""
    port_file = directory / "port"
    engine_command = [sys.executable, "-m", "slime_core.engines.embedded", "--model-path", str(directory)]
    engine_command += ["--num-threads", str(num_threads), "--port-file", str(port_file)]
    engine = subprocess.Popen(engine_command, stdout=subprocess.DEVNULL)
    processes = [engine]
    try:
        wait_until(port_file.exists, engine)
        router_port, metrics_port = free_port(), free_port()
        router_command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        router_command += ["--port", str(router_port), "--prometheus-port", str(metrics_port), "--log-level", "error"]
        router_command += ["--worker-urls", f"http://127.0.0.1:{port_file.read_text().strip()}"]
        router = subprocess.Popen(router_command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        processes.append(router)
        url = f"http://127.0.0.1:{router_port}"
        wait_until(lambda: answers(f"{url}/readiness"), router)
        yield url, lambda: time.process_time() + sum(cpu_seconds(process.pid) for process in processes)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)


def cpu_seconds(pid: int) -> float:
    """CPU time a process and its children have spent so far."""
    process = psutil.Process(pid)
    spent = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in spent))


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    """Poll until ready; raises if the process ends or time runs out."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not become ready")
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether a GET of the URL gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port that was free a moment ago (the router cannot choose one itself)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_report(rates: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> dict[str, object]:
    """Medians of the rates and their ratios to transformers; prints them as a table on the way."""
    report: dict[str, object] = {
        "benchmark": "engine",
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "num_threads": args.num_threads,
        "cpus": os.cpu_count(),
    }
    medians = {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in rates.items()}
    print(f"{'':>24} {'tok/s wall':>12} {'x':>6} {'tok/CPU-s':>12} {'x':>6}")
    for name, (wall, cpu) in medians.items():
        way = next(way for way in ("transformers", "in_process", "http") if name.startswith(way))
        base_wall, base_cpu = medians[name.replace(way, "transformers", 1)]
        print(f"{name:>24} {wall:12.0f} {wall / base_wall:6.1f} {cpu:12.0f} {cpu / base_cpu:6.1f}")
        report[f"{name}_tokens_per_s"], report[f"{name}_tokens_per_cpu_s"] = round(wall), round(cpu)
        if way != "transformers":
            report[f"{name}_wall_ratio"] = round(wall / base_wall, 2)
            report[f"{name}_cpu_ratio"] = round(cpu / base_cpu, 2)
    return report


if __name__ == "__main__":
    main()
