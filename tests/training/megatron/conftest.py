"""Runs jobs on gloo ranks, tiny models of every family, and a reference that knows nothing of Megatron."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import Glm4Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from slime_core.options import parse
from slime_core.training.torch_backend.trainer import TorchTrainer
from training.conftest import TINY, make_shard, random_samples, save_model
from training.megatron import reference
from training.megatron.cases import NUM_SAMPLES, PROMPT, ROUNDS, quick_cases

WORKER = Path(__file__).with_name("rank_worker.py")

TWO_RANKS_S = 1500
"""Limit of the job of all quick cases, for one that hangs: some twenty times what it takes on two quiet cores."""


class Ranks:
    """What the cases of a job left behind."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size

    def found(self, case: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.directory / f"{case}_rank{rank}.json").read_text())

    def weights(self, case: str, rank: int = 0) -> Path:
        return self.directory / f"{case}_rank{rank}.safetensors"


def run_ranks(directory: Path, size: int, cases: Sequence[dict[str, Any]], timeout_s: float) -> Ranks:
    """Run the cases on `size` ranks, as processes of their own; all end when the first fails."""
    directory.mkdir(parents=True)
    path = directory / "job.json"
    path.write_text(json.dumps({"size": size, "cases": list(cases)}))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = []
    for rank in range(size):
        with (directory / f"rank{rank}.log").open("w") as log:
            words = [sys.executable, str(WORKER), str(path), str(rank)]
            processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
    with ThreadPoolExecutor(size) as pool:
        ends = [pool.submit(succeed, process) for process in processes]
        try:
            done, running = wait(ends, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        finally:
            for process in processes:
                process.kill()
    failed = any(end.exception() for end in done)
    if failed or running:
        what = "a rank failed" if failed else f"not done after {timeout_s:g} s"
        pytest.fail("\n".join([f"{what}:", *(account(directory, rank, cases) for rank in range(size))]))
    return Ranks(directory, size)


def succeed(process: subprocess.Popen) -> None:
    """Wait for the process to end, as it should."""
    if process.wait():
        raise RuntimeError(f"exit code {process.returncode}")


def account(directory: Path, rank: int, cases: Sequence[dict[str, Any]]) -> str:
    """Where a rank is or was in its cases, its error, and the end of its log."""
    for case in cases:
        alone = case.get("alone")
        out = directory / f"{case['name']}_rank{rank if alone is None else 0}.json"
        found = json.loads(out.read_text()) if out.is_file() else {}
        if alone in (None, rank) and (not out.is_file() or ("error" in found and not case.get("fails"))):
            log = (directory / f"rank{rank}.log").read_text()[-2000:]
            return f"rank {rank} in case {case['name']}: {found.get('traceback', '')}\n{log}"
    return f"rank {rank} has done all cases"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every family. Its 259 tokens are no multiple of two ranks."""
    tiny = {**TINY, "vocab_size": 259, "attention_bias": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    stretched = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    stretched |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    without_head_dim = {key: value for key, value in tiny.items() if key not in ("head_dim", "attention_bias")}
    configs = {
        "qwen2": Qwen2Config(**without_head_dim, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**tiny, tie_word_embeddings=True),
        "one_kv_head": Qwen3Config(**{**tiny, "num_key_value_heads": 1}, tie_word_embeddings=True),
        "qwen3_moe": Qwen3MoeConfig(**tiny, **experts, tie_word_embeddings=False),
        "dense_first": Qwen3MoeConfig(**tiny, **experts, mlp_only_layers=[0], tie_word_embeddings=False),
        "llama": LlamaConfig(**tiny, tie_word_embeddings=False, rope_parameters=stretched),
        "glm4": Glm4Config(**{**tiny, "attention_bias": True}, tie_word_embeddings=False),
    }
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in configs.items()}


@pytest.fixture(scope="session")
def expected(models: dict[str, Path]) -> Callable[[str], reference.Trained]:
    """The reference's training of a family's model, once each."""

    @functools.cache
    def trained(family: str) -> reference.Trained:
        rounds = [random_samples(NUM_SAMPLES, seed=step) for step in range(ROUNDS)]
        return reference.train(models[family], rounds, PROMPT)

    return trained


def by_torch(
    model: Path, flags: Sequence[str], *, steps: int, rounds: int = ROUNDS
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of the rounds and the weights of the torch backend, on one rank."""
    args = parse(["--model", str(model), *flags]).args
    trainer = TorchTrainer(args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu")
    ends = [NUM_SAMPLES * (step + 1) // steps for step in range(steps)]
    shards = [make_shard(random_samples(NUM_SAMPLES, seed=number), step_ends=ends) for number in range(rounds)]
    metrics = [trainer.train(number, shard) for number, shard in enumerate(shards)]
    weights = {name: tensor.clone() for name, tensor in trainer.weights("float32")}
    trainer.close()
    return metrics, weights


def check_same(
    ranks: Ranks, name: str, wanted: tuple[list[dict[str, float]], dict[str, torch.Tensor]], rank: int = 0
) -> None:
    """What a rank trained is what the torch backend did."""
    for mine, theirs in zip(ranks.found(name, rank)["metrics"], wanted[0], strict=True):
        names = [key for key in theirs if key.startswith("train/")]
        assert {k: mine[k] for k in names} == pytest.approx({k: theirs[k] for k in names}, rel=1e-3, abs=1e-5)
    weights = load_file(ranks.weights(name, rank))
    for key, value in wanted[1].items():
        assert_close(weights[key], value, rtol=0, atol=1e-4)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all of pytest's processes know."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Path:
    """Where the case `saved` writes."""
    return shared / "two_ranks_checkpoints" / "saved"


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, Path], checkpoint: Path, shared: Path) -> Ranks:
    """What the quick cases left behind; whichever process is the first to ask runs them for all."""
    directory, done = shared / "two_ranks", shared / "two_ranks_done"
    with FileLock(shared / "two_ranks_lock"):
        if done.exists():
            return Ranks(directory, 2)
        for left in (directory, checkpoint.parent):  # by a process that failed
            shutil.rmtree(left, ignore_errors=True)
        checkpoint.parent.mkdir()
        ranks = run_ranks(directory, 2, quick_cases(models, checkpoint), timeout_s=TWO_RANKS_S)
        done.touch()
    return ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test is the first to ask for `two_ranks` waits for all of its cases."""
    for item in items:
        if "two_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(TWO_RANKS_S + 60))
