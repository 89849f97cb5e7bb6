"""Runs jobs on gloo ranks, tiny models of every family, and a reference that knows nothing of Megatron."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from training.conftest import TINY, random_samples, save_model
from training.megatron import reference
from training.megatron.cases import NUM_SAMPLES, PROMPT, ROUNDS, quick_cases

WORKER = Path(__file__).with_name("rank_worker.py")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Ranks:
    """What the cases of a job left behind."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size

    def found(self, case: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.directory / f"{case}_rank{rank}.json").read_text())

    def weights(self, case: str, rank: int = 0) -> Path:
        return self.directory / f"{case}_rank{rank}.safetensors"


def run_ranks(directory: Path, size: int, cases: Sequence[dict[str, Any]], timeout_s: float = 150) -> Ranks:
    """Run the cases on `size` ranks, as processes of their own."""
    directory.mkdir(parents=True)
    path = directory / "job.json"
    path.write_text(json.dumps({"size": size, "cases": list(cases), "ports": free_ports(len(cases))}))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    logs = [(directory / f"rank{rank}.log").open("w") for rank in range(size)]
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(path), str(rank)], env=env, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    if any(codes):
        ends = [(directory / f"rank{rank}.log").read_text()[-1500:] for rank in range(size)]
        errors = [file.read_text() for file in directory.glob("*.json") if '"error"' in file.read_text()]
        pytest.fail("\n".join([*(json.loads(e).get("traceback", e) for e in errors), *ends]))
    return Ranks(directory, size)


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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the case `saved` writes."""
    return tmp_path_factory.mktemp("checkpoints") / "saved"


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, Path], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the quick cases left behind."""
    return run_ranks(tmp_path_factory.mktemp("two") / "job", 2, quick_cases(models, checkpoint), timeout_s=170)
