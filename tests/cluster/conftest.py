"""Whole runs of `slime train` in processes of their own, on a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_core.weights.leftovers import SHARED_MEMORY, own_prefix
from tiny_model import write_model

LONGEST_S = 600
"""A run that takes longer hangs: some thirty times what most take on two quiet cores."""
MARKER = "SLIME_TEST_RUN"
"""An environment variable by which every process of a run is found again."""

REWARD = """
from slime_core import hookimpl

@hookimpl
def add_options(parser):
    parser.add_argument("--evens-bonus", type=float, default=0.0, help="added to every reward")

@hookimpl
def reward(args, sample):
    return sum(t % 2 == 0 for t in sample.tokens) / len(sample.tokens) + args.evens_bonus
"""


UNEVEN = """
from slime_core import hookimpl

@hookimpl
async def generate(engine, sample, sampling_params):
    limit = 200 if sample.group_index % 2 else 4
    room = limit - sample.response_length
    params = {**sampling_params, "max_new_tokens": room, "ignore_eos": True}
    sample.append_generation(await engine.generate(sample.tokens, params))
    return [sample]
"""
"""A generator whose every second group is fifty times as long."""


class Run:
    """A `slime train` process with its output in a file."""

    def __init__(self, words: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.log = directory / "output.log"
        self.marker = f"{os.getpid()}-{time.monotonic_ns()}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slime_core.cli", "train", *words],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment, MARKER: self.marker},
                start_new_session=True,
            )

    def finish(self, timeout_s: float = LONGEST_S) -> tuple[int, str]:
        """The exit code and everything printed."""
        return self.process.wait(timeout_s), self.log.read_text()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = LONGEST_S) -> None:
        """Until the condition holds, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run but the driver."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(MARKER) == self.marker and process.pid != self.process.pid
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):  # it has just ended, or is not ours
                continue
        return found

    def running(self, words: str) -> list[psutil.Process]:
        """Those of `processes` whose command line has these words."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error, OSError):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def weights(self) -> list[Path]:
        """Where trainers of the run keep weights in shared memory."""
        paths = [SHARED_MEMORY / f"{own_prefix()}{process.pid}" for process in self.processes()]
        return [path for path in paths if path.exists()]

    def assert_nothing_left(self, timeout_s: float = 60) -> None:
        """No process of the run survives it."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs, several of them in some tests: the limit is there for what hangs."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3 * LONGEST_S))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}", "label": str(i)}) + "\n" for i in range(20)))
    return path


@pytest.fixture
def start_run(tmp_path: Path, model_dir: Path, prompts: Path) -> Iterator[Callable[..., Run]]:
    """`start_run("--num-rollout", "3")`: a small run with the reward ./evens.py; ended when the test ends."""
    (tmp_path / "evens.py").write_text(REWARD)
    (tmp_path / "uneven.py").write_text(UNEVEN)
    runs: list[Run] = []

    def start(*words: str, **environment: str) -> Run:
        defaults = ["--model", str(model_dir), "--prompt-data", str(prompts), "--reward", "./evens.py"]
        defaults += ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--max-response-tokens", "8"]
        defaults += ["--num-rollout", "3", "--run-name", "run", "--lr", "1e-3", "--reward-workers", "1"]
        runs.append(Run([*defaults, *words], tmp_path, environment))
        return runs[-1]

    yield start
    for run in runs:
        for process in [run.process, *run.processes()]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.fixture
def read_rows(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """The rows of the run's metrics.jsonl."""

    def read() -> list[dict[str, Any]]:
        path = tmp_path / "runs" / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written

    return read
