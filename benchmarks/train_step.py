"""A whole GRPO round of slime-core against a step of TRL's GRPOTrainer, as ratios measured in one run.

Both sides train the CPU quickstart's model (117 K parameters, fp32) on the same prompts in the same order, 32 x 8
samples a round, with the math reward, AdamW, one update a batch and no KL:

- slime: `slime train`, that is Ray, the sglang-router, HTTP, the embedded engine, reward worker processes, the trainer
  and the verified weight sync;
- trl: `GRPOTrainer.train` with transformers' generate, in one process.

Two cases of whole rounds, and one of the update alone:

- quickstart: the quickstart's warmed-up model, answers of about 15 tokens and at most 48;
- long_tail: a model built so that sampling from it gives answers of about 100 tokens with a long tail, at most 1,000.
  A response's first token decides between 1/50 and 1/400 as the chance of ending at every token;
- update: the trainer alone, at 5 M parameters, against a plain padded loop of transformers (update_alone.py).

In the first two both sides sample to the end-of-text token with the same limit, and the learning rate is so small that
the model stays what it is: lengths are equal in distribution. Each side is a process tree of its own that stops after
every round until it is its turn, so that a slow minute of the machine hits both. A round is timed from the word "go" to
the report of the next round's end, so all that a training loop does between counts. The first rounds warm up.

Both have all cores and OMP_WAIT_POLICY=PASSIVE. slime runs as the quickstart does. TRL's flags leave out what costs
time (logging, bf16, gradient checkpointing) and take micro-batches of 64 long answers; its key-value cache is the
default one, which was no slower than the static one.

    python -m benchmarks.train_step [--quick] [--trl-python PATH]

TRL comes with `pip install slime-core[bench]`; another interpreter needs trl, slime-core and slime-rm-math too.
The last line of the output is one line of JSON with every figure; ratios are TRL's over slime's, so more is better.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.long_tail_model import make_long_tail_model
from benchmarks.trl_side import NUM_PROMPTS, NUM_SAMPLES, Case, wait_for_turn
from benchmarks.update_alone import measure_update
from slime_core import hookimpl

REPOSITORY = Path(__file__).resolve().parents[1]
CASES = ("quickstart", "long_tail", "update")


@dataclass(frozen=True)
class Turn:
    """One timed round: seconds, CPU seconds by whom, and what the side told about it."""

    wall: float
    cpu: float
    waiting_cpu: float
    """Of the side whose turn it was not."""
    foreign_cpu: float
    """Of whatever else runs on the machine."""
    facts: dict[str, float]


# --- the gate: a training loop that stops after every round -----------------------------------------------------------
class Gate:
    """The tracker that makes `slime train` wait; it runs in the driver, where rounds are logged."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._connection = Connection(args.train_step_gate)

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """Where to wait."""
        parser.add_argument("--train-step-gate", type=int, required=True, metavar="FD", help="a pipe's descriptor")

    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Tell that the round is over, and wait."""
        facts = {name: value for name, value in metrics.items() if name.startswith("perf/")}
        facts |= {
            "length_mean": metrics["rollout/response_length_mean"],
            "length_max": metrics["rollout/response_length_max"],
            "reward": metrics["reward/mean"],
        }
        wait_for_turn(self._connection, facts)


# --- both sides, in turns ---------------------------------------------------------------------------------------------
class Side:
    """A training loop in a process tree of its own, which goes on for one round at a time."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection, log: Path) -> None:
        self._process, self._connection, self._log = process, connection, log

    def await_round(self) -> dict[str, float]:
        """What the loop tells when its round is over.

        Raises:
            RuntimeError: when it ended instead.
        """
        try:
            facts: dict[str, float] = self._connection.recv()
        except EOFError:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{self._process.args!r} ended early:\n{tail}") from None
        return facts

    def go(self) -> None:
        """Let it do the next round, or end after the last."""
        self._connection.send(None)

    def cpu_seconds(self) -> float:
        """CPU time that the living processes of the tree have spent so far."""
        root = psutil.Process(self._process.pid)
        return sum(map(cpu_seconds, [root, *root.children(recursive=True)]))


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of one process; 0 once it is gone."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def machine_cpu_seconds() -> float:
    """CPU time that the whole machine has spent so far, for whomever."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


@contextmanager
def running(command: Sequence[str], log: Path, threads: int) -> Iterator[Side]:
    """Start a side; the descriptor of its end of the gate is added to the command."""
    ours, theirs = Pipe()
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    theirs.close()
    try:
        yield Side(process, ours, log)
        process.wait(timeout=60)
    finally:
        ours.close()
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


def compare(case: Case, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The figures of one case."""
    slime_command = slime_train(case, directory, args.threads)
    trl_command = [args.trl_python, "-m", "benchmarks.trl_side", json.dumps(asdict(case))]
    with (
        running(slime_command, directory / f"{case.name}-slime.log", args.threads) as slime,
        running(trl_command, directory / f"{case.name}-trl.log", args.trl_threads) as trl,
    ):
        sides = {"slime": slime, "trl": trl}
        for side in sides.values():
            side.await_round()
        turns = take_turns(sides, case)
        for side in sides.values():
            side.go()
    return figures(case.name, turns)


def slime_train(case: Case, directory: Path, threads: int) -> list[str]:
    """The quickstart's command, with the gate as its second tracker."""
    flags = {
        "model": case.model,
        "prompt-data": case.prompts,
        "runs-dir": str(directory / "runs"),
        "run-name": case.name,
        "reward": "math",
        "num-rollout": str(1 + case.warmup_rounds + case.rounds),
        "rollout-batch-size": str(NUM_PROMPTS),
        "n-samples-per-prompt": str(NUM_SAMPLES),
        "max-response-tokens": str(case.max_tokens),
        "lr": str(case.lr),
        "trainer-threads": str(threads),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    switches = ["--apply-chat-template", "--no-shuffle", "--no-save"]
    trackers = ["--tracker", "jsonl", "benchmarks.train_step:Gate", "--train-step-gate"]
    return [sys.executable, "-m", "slime_core.cli", "train", *words, *switches, *trackers]


def take_turns(sides: dict[str, Side], case: Case) -> dict[str, list[Turn]]:
    """Let the sides do their rounds in turn; who begins changes, too."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(case.warmup_rounds + case.rounds):
        for name in order:
            turn = take_turn(name, sides)
            if number >= case.warmup_rounds:
                turns[name].append(turn)
                print(f"{case.name:>12} {name:>6} {describe(turn)}", flush=True)
        order.reverse()
    return turns


def take_turn(name: str, sides: dict[str, Side]) -> Turn:
    """One round of one side while the other waits."""
    before, machine = {one: side.cpu_seconds() for one, side in sides.items()}, machine_cpu_seconds()
    start = time.perf_counter()
    sides[name].go()
    facts = sides[name].await_round()
    wall = time.perf_counter() - start
    everyone = machine_cpu_seconds() - machine
    spent = {one: side.cpu_seconds() - before[one] for one, side in sides.items()}
    total = sum(spent.values())
    return Turn(wall, spent[name], total - spent[name], max(0.0, everyone - total), facts)


def describe(turn: Turn) -> str:
    """One turn as text."""
    facts = turn.facts
    lengths = f"{facts['length_mean']:6.1f} tokens in the mean, {facts['length_max']:4.0f} at most"
    return f"{turn.wall:7.3f} s {turn.cpu:7.2f} CPU-s  {lengths}, reward {facts['reward']:.2f}"


def figures(case: str, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians of both sides, and TRL's over slime's."""
    everyone = [turn for taken in turns.values() for turn in taken]
    foreign = sum(turn.foreign_cpu for turn in everyone) / sum(turn.wall for turn in everyone)
    report: dict[str, Any] = {f"{case}_rounds": len(turns["slime"]), f"{case}_cpus_of_others": round(foreign, 2)}
    for name, taken in turns.items():
        report |= {
            f"{case}_{name}_s": median(turn.wall for turn in taken),
            f"{case}_{name}_cpu_s": median(turn.cpu for turn in taken),
            f"{case}_{name}_fastest_s": round(min(turn.wall for turn in taken), 4),
            f"{case}_{name}_waiting_cpus": waiting_cpus(name, turns),
            f"{case}_{name}_tokens": median(turn.facts["length_mean"] for turn in taken),
            f"{case}_{name}_longest_tokens": median(turn.facts["length_max"] for turn in taken),
            f"{case}_{name}_reward": median(turn.facts["reward"] for turn in taken),
        }
    for what in ("", "cpu_", "fastest_"):
        ratio = report[f"{case}_trl_{what}s"] / report[f"{case}_slime_{what}s"]
        report[f"{case}_{what or 'wall_'}ratio"] = round(ratio, 2)
    names = {name for turn in turns["slime"] for name in turn.facts if name.startswith("perf/")}
    phases = sorted(name for name in names if not name.endswith("_per_s"))
    report[f"{case}_slime_phases"] = {
        name.removeprefix("perf/"): median(turn.facts.get(name, 0.0) for turn in turns["slime"]) for name in phases
    }
    return report


def waiting_cpus(name: str, turns: dict[str, list[Turn]]) -> float:
    """How many cores a side kept busy while it was not its turn."""
    others = [turn for other, taken in turns.items() if other != name for turn in taken]
    return round(sum(turn.waiting_cpu for turn in others) / sum(turn.wall for turn in others), 3)


def median(values: Iterator[float]) -> float:
    """The median to four places."""
    return round(statistics.median(values), 4)


# --- what is trained --------------------------------------------------------------------------------------------------
def make_task(directory: Path, warmup_rounds: int) -> tuple[Path, Path]:
    """The quickstart's prompts, and its model after so many rounds of the supervised warm-up."""
    run([sys.executable, "scripts/make_arithmetic.py", "--out", str(directory)])
    flags = {
        "config": "scripts/quickstart_warmup.toml",
        "model": str(directory / "model"),
        "prompt-data": str(directory / "demonstrations.jsonl"),
        "runs-dir": str(directory / "runs"),
        "run-name": "warmup",
        "num-rollout": str(warmup_rounds),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    run([sys.executable, "-m", "slime_core.cli", "train", *words])
    return directory / "train.jsonl", directory / "runs" / "warmup" / "checkpoints" / "latest" / "model"


def run(command: Sequence[str]) -> None:
    """Run a command in the repository; its output is shown only when it fails."""
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command!r} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


# --- the command line -------------------------------------------------------------------------------------------------
def main() -> None:
    """Run the benchmark and print its report."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        report = measure(args, Path(directory))
    print(json.dumps(report))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="two rounds of short answers: does it run, not how fast")
    add("--rounds", type=int, default=20, help="timed rounds of the quickstart's case (default: %(default)s)")
    add("--long-rounds", type=int, default=3, help="timed rounds of the long-tailed case (default: %(default)s)")
    add("--cases", nargs="+", default=list(CASES), choices=CASES)
    add("--update-rounds", type=int, default=5, help="timed rounds of the update alone (default: %(default)s)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--threads", type=int, default=cores, help="torch's threads in slime's trainer (default: all cores)")
    add("--trl-threads", type=int, default=cores, help="torch's threads in TRL (default: all cores)")
    add("--trl-python", default=sys.executable, metavar="PATH", help="interpreter with trl (default: this one)")
    add("--lr", type=float, default=1e-6, help="on both sides (default: %(default)s)")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Every case, one after the other."""
    report: dict[str, Any] = {
        "benchmark": "train_step",
        "cpus": os.cpu_count(),
        "threads": args.threads,
        "trl_threads": args.trl_threads,
        "versions": versions(args.trl_python),
    }
    if "update" in args.cases:
        rounds = 1 if args.quick else args.update_rounds
        report |= measure_update(directory, rounds, args.threads, quick=args.quick)
    if args.cases == ["update"]:
        return report
    prompts, model = make_task(directory, warmup_rounds=10 if args.quick else 350)
    long_tail_model = directory / "long_tail_model"
    make_long_tail_model(model, long_tail_model)
    for case in make_cases(args, str(prompts), str(model), str(long_tail_model)):
        report |= compare(case, args, directory)
    return report


def make_cases(args: argparse.Namespace, prompts: str, model: str, long_tail_model: str) -> list[Case]:
    """Those of `--cases`; TRL trains short answers fastest all at once."""
    samples = NUM_PROMPTS * NUM_SAMPLES
    cases = [
        Case("quickstart", model, prompts, 48, 4, args.rounds, args.lr, samples),
        Case("long_tail", long_tail_model, prompts, 1000, 0, args.long_rounds, args.lr, samples // 4),
    ]
    if args.quick:
        cases = [replace(case, max_tokens=min(96, case.max_tokens), warmup_rounds=0, rounds=2) for case in cases]
    return [case for case in cases if case.name in args.cases]


def versions(trl_python: str) -> dict[str, str]:
    """Versions of what TRL's interpreter runs.

    Raises:
        SystemExit: when it has no trl.
    """
    names = ("trl", "transformers", "torch", "accelerate", "datasets")
    script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([trl_python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: {trl_python} has no trl; pip install 'slime-core[bench]', or name another --trl-python."
        )
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
