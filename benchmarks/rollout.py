"""What one sample costs the rollout manager: CPU, memory, event-loop gaps, the end of a round, the way to the trainer.

The whole rollout path (source, generate, the math reward in its worker processes, the non-zero-std filter, collect,
convert) runs in this process against fast stand-in engines (benchmarks/fake_worker.py) behind the real sglang-router.
Answers have log-normal lengths of 3.2 K tokens in the mean, with the log-probability of every token; twice the groups
needed are started. CPU is this process's own, all threads; the reward workers' is given beside it.

- `cpu_ms_per_sample` at 32, 128 and 512 groups of 8 samples, and `flat`: the last over the first;
- `loop_gap_ms`: the longest time in which the event loop took no turn, while answers take 0.5 ms a token, with typical
  answers and with 1 % of them hostile to graders;
- `end_of_round_ms`: from the last needed group to the returned batch, with 4,000 requests in flight;
- `handover`: 4,096 samples of 4 K tokens converted and put into Ray's object store, and got in another process;
- `bytes_per_kept_token`: how much this process grew for every token of the round it holds.

Measured by others for upstream slime on such a machine: 24-45 ms of CPU a sample, a loop held for 25-43 s.

    python -m benchmarks.rollout [--quick]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from slime_core import Group, Sample, Status, hookimpl
from slime_core.cluster.actors import tune_garbage_collector
from slime_core.defaults.samples import convert_train_data
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.engines.router import Router
from slime_core.options import Options, parse
from slime_core.rollout.convert import split
from slime_core.rollout.manager import RolloutManager

NUM_SAMPLES = 8
NUM_WORKERS = 2
TICK_S = 0.005


@hookimpl(wrapper=True)
def dynamic_filter(args: Any, samples: Group) -> Any:
    """Note when each group was judged: the last one that a round keeps ends the collection."""
    verdict = yield
    JUDGED.append(time.monotonic())
    return verdict


@hookimpl(wrapper=True)
def generate(sample: Sample) -> Any:
    """Note what was answered and parsed: that is what the CPU went into, also where a round then needs it no more."""
    made = yield
    ANSWERED.extend(one.index for one in made if one.response_length)
    return made


JUDGED: list[float] = []
ANSWERED: list[int] = []


def main() -> None:
    """Run the benchmark and print its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as directory:
        report = measure(Path(directory), quick)
    print(json.dumps(report))


def measure(directory: Path, quick: bool) -> dict[str, Any]:
    """Every figure, by name."""
    make_model(directory)
    mean = 320 if quick else 3200
    report: dict[str, Any] = {"mean_tokens": mean}
    for batch in (4, 8, 16) if quick else (32, 128, 512):
        figures = run(directory, batch, num_rounds=2, mean_tokens=mean)
        report[f"batch_{batch}"] = figures
        print(f"{batch} groups of {NUM_SAMPLES}: {figures}", flush=True)
    batches = [value for key, value in report.items() if key.startswith("batch_")]
    report["flat"] = round(batches[-1]["cpu_ms_per_sample"] / batches[0]["cpu_ms_per_sample"], 2)
    for name, hostile in (("typical", 0.0), ("hostile", 0.01)):
        figures = run(
            directory, 8 if quick else 64, num_rounds=1, mean_tokens=mean, seconds_per_token=0.0005, hostile=hostile
        )
        report[f"loop_gap_ms_{name}"] = figures["loop_gap_ms"]
        print(f"{name} answers, 0.5 ms a token: {figures}", flush=True)
    needed, started = (8, 64) if quick else (16, 500)
    figures = run(directory, needed, num_rounds=1, mean_tokens=mean, started=started)
    report["end_of_round_ms"] = figures["end_of_round_ms"]
    print(f"{started * NUM_SAMPLES} requests in flight: {figures}", flush=True)
    report["handover"] = handover(256 if quick else 4096, 400 if quick else 4000)
    print(f"to the trainer: {report['handover']}", flush=True)
    return report


def run(directory: Path, batch: int, num_rounds: int, mean_tokens: int, **options: Any) -> dict[str, float]:
    """Rounds of `batch` groups in a process of their own, so that each starts with a clean memory."""
    words = [str(directory), str(batch), str(num_rounds), str(mean_tokens), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.rollout import child; child()", *words],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def child() -> None:
    """What `run` starts."""
    directory, batch, num_rounds, mean_tokens, options = sys.argv[1:]
    figures = uvloop.run(  # as in a Ray actor
        measure_rounds(Path(directory), int(batch), int(num_rounds), int(mean_tokens), **json.loads(options))
    )
    print(json.dumps(figures))


async def measure_rounds(
    directory: Path,
    batch: int,
    num_rounds: int,
    mean_tokens: int,
    seconds_per_token: float = 0.0,
    hostile: float = 0.0,
    started: int = 0,
) -> dict[str, float]:
    """CPU, growth, gap and end of the rounds; of CPU the cheapest round counts, of the others the worst."""
    words = [
        "--mean-tokens",
        str(mean_tokens),
        "--seconds-per-token",
        str(seconds_per_token),
        "--hostile",
        str(hostile),
    ]
    if started:
        # a spare group for the filter; the others hang until they are aborted
        words += ["--num-prompt", str((2 * batch) * NUM_SAMPLES // NUM_WORKERS)]
    with workers(words) as urls:
        args = options(directory, batch, started or 2 * batch)
        router = await asyncio.to_thread(Router, args, urls, directory)
        try:
            return await timed(args, router.url, urls, num_rounds)
        finally:
            await asyncio.to_thread(router.stop)


async def timed(args: Options, url: str, urls: list[str], num_rounds: int) -> dict[str, float]:
    """Run the rounds and measure them."""
    manager = RolloutManager(args, url, urls, 1)
    tune_garbage_collector()
    await manager.rollout(0)  # plugins, connections and reward workers are warm then
    await manager.source.settle()
    process = psutil.Process()
    cpus, grader_cpus, gaps, ends, growths, num_samples = [], [], [], [], [], []
    for step in range(1, 1 + num_rounds):
        gc.collect()
        before, graders_before = process.memory_info().rss, children_cpu(process)
        JUDGED.clear()
        ANSWERED.clear()
        cpu = time.process_time()
        ticking = asyncio.create_task(note_longest_gap(gaps))
        one = await manager.rollout(step)
        ends.append(time.monotonic() - JUDGED[-1])
        await manager.source.settle()
        cpu = time.process_time() - cpu
        ticking.cancel()
        num_samples.append(len(ANSWERED))
        cpus.append(1000 * cpu / num_samples[-1])
        grader_cpus.append(1000 * (children_cpu(process) - graders_before) / num_samples[-1])
        growths.append((process.memory_info().rss - before) / len(one.shards[0].batch.tokens))
        del one
    await manager.close()
    return {
        "samples": max(num_samples),
        "cpu_ms_per_sample": round(min(cpus), 2),
        "grader_cpu_ms_per_sample": round(min(grader_cpus), 2),
        "loop_gap_ms": round(1000 * max(gaps), 1),
        "end_of_round_ms": round(1000 * max(ends), 1),
        "bytes_per_kept_token": round(max(growths), 1),
    }


async def note_longest_gap(gaps: list[float]) -> None:
    """Append the longest time between two turns of the loop, kept up to date until cancelled."""
    position = len(gaps)
    gaps.append(0.0)
    last = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        gaps[position] = max(gaps[position], now - last - TICK_S)
        last = now


def children_cpu(process: psutil.Process) -> float:
    """CPU seconds of the reward workers so far."""
    total = 0.0
    for child_process in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing" in " ".join(child_process.cmdline()):
                total += sum(child_process.cpu_times()[:2])
    return total


# --- the surroundings -------------------------------------------------------------------------------------------------
def make_model(directory: Path) -> None:
    """A tokenizer and a config; no weights are needed."""
    from benchmarks.engine import make_quickstart_model

    make_quickstart_model(directory)
    rows = [{"prompt": f"What is {i} + 1?", "label": "4"} for i in range(1000)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def options(directory: Path, batch: int, started: int) -> Options:
    """The flags of a run that starts `started` groups to train `batch`."""
    words = ["--model", directory, "--prompt-data", directory / "prompts.jsonl", "--reward", "math"]
    words += ["--dynamic-filter", "nonzero_std", "--plugin", "benchmarks.rollout", "--rollout-batch-size", batch]
    words += ["--over-sampling-batch-size", started, "--n-samples-per-prompt", NUM_SAMPLES]
    words += ["--engine-max-requests", 8192, "--max-context-tokens", 65536, "--max-response-tokens", 65000]
    words += ["--runs-dir", directory / "runs", "--reward-timeout-s", 5]
    return parse([str(word) for word in words]).args


@contextmanager
def workers(words: list[str]) -> Iterator[list[str]]:
    """Two stand-in engines."""
    ports = [free_port() for _ in range(NUM_WORKERS)]
    command = [sys.executable, "-m", "benchmarks.fake_worker", *words, "--port"]
    processes = [subprocess.Popen([*command, str(port)]) for port in ports]
    try:
        yield [f"http://{LOOPBACK}:{port}" for port in ports]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- to the trainer ---------------------------------------------------------------------------------------------------
def handover(num_samples: int, length: int) -> dict[str, Any]:
    """CPU of converting a round and putting it into Ray's store, and of getting it in another process."""
    import ray

    groups = [[make_sample(g * NUM_SAMPLES + i, g, length) for i in range(NUM_SAMPLES)]
              for g in range(num_samples // NUM_SAMPLES)]  # fmt: skip
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=2**30, _node_ip_address=LOOPBACK)  # fmt: skip

    @ray.remote
    class Reader:
        def get(self, references: list[Any]) -> dict[str, Any]:
            cpu, before = time.process_time(), psutil.Process().memory_info().rss
            shard = ray.get(references[0])
            return {
                "get_cpu_s": round(time.process_time() - cpu, 4),
                "copied": bool(shard.batch.tokens.flags.owndata or shard.batch.tokens.flags.writeable),
                "get_growth_mb": round((psutil.Process().memory_info().rss - before) / 2**20, 1),
                "tokens": len(shard.batch.tokens),
            }

    try:
        reader = Reader.remote()
        ray.get(reader.get.remote([ray.put(split(convert_train_data(groups[:1]), 1, 1)[0])]))
        rounds = []
        for _ in range(4):  # later ones find memory that the machine has handed out before, as in a run
            cpu = time.process_time()
            (shard,) = split(sorted_batch(groups), 1, 1)
            converted = time.process_time()
            reference = ray.put(shard)
            put = time.process_time()
            figures = {"convert_cpu_s": round(converted - cpu, 3), "put_cpu_s": round(put - converted, 3)}
            rounds.append(figures | ray.get(reader.get.remote([reference])))
            del shard, reference
            time.sleep(1)  # the store frees what nobody refers to a little later
        fastest = min(rounds[1:], key=lambda one: one["convert_cpu_s"] + one["put_cpu_s"])
        return fastest | {"first": rounds[0]}
    finally:
        ray.shutdown()


def sorted_batch(groups: list[Group]) -> Any:
    """The convert stage with the built-in converter."""
    from slime_core.plugins import Plugins
    from slime_core.rollout.convert import convert

    plugins = Plugins()
    plugins.load("samples")
    return convert(Options(), plugins.bind("convert_train_data", "samples"), groups)


def make_sample(index: int, group_index: int, length: int) -> Sample:
    """A finished sample of `length` tokens."""
    sample = Sample(index=index, group_index=group_index, rollout_index=index, tokens=np.arange(8, dtype=np.int32))
    count = length - 8
    sample.append(np.arange(count), logprobs=np.full(count, -0.5, np.float32), weight_version=0)
    sample.reward, sample.status = float(index % 2), Status.COMPLETED
    return sample


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
