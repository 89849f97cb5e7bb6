"""Tiny models and rounds, made on the spot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from slime_core.options import Options, parse
from slime_core.training.torch_backend.trainer import TorchTrainer
from slime_core.types import Sample, Shard, TrainBatch

WORKER = Path(__file__).with_name("rank_worker.py")
VOCAB = 258
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_model(config: Any, directory: Path, seed: int = 0) -> Path:
    """Write a freshly initialised model and the byte tokenizer."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings."""
    return save_model(Qwen3Config(**TINY, tie_word_embeddings=True), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary with other weights."""
    return save_model(Qwen3Config(**TINY, tie_word_embeddings=True), tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def make_args(model_dir: Path) -> Callable[..., Options]:
    """Options of a run, from flags."""

    def make(*flags: str, model: Path = model_dir) -> Options:
        return parse(["--model", str(model), "--lr", "1e-3", *flags]).args

    return make


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """Random samples in groups, with masked tokens, rewards and engine log-probabilities."""
    return random_samples


def random_samples(num: int, *, seed: int = 0, group: int = 4, longest: int = 12) -> list[Sample]:
    """`num` samples of uneven lengths; the first response token of each is a tool's."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(num):
        sample = Sample(index=index, group_index=index // group, rollout_index=index)
        sample.tokens = rng.integers(0, 250, rng.integers(1, 7)).astype(np.int32)
        sample.append(rng.integers(0, 250, 1), trainable=False)
        count = int(rng.integers(1, longest))
        sample.append(rng.integers(0, 250, count), logprobs=-rng.random(count) * 6)
        sample.reward = float(rng.integers(0, 3))
        made.append(sample)
    return made


@pytest.fixture
def shard_of() -> Callable[..., Shard]:
    """One rank's share of a round."""
    return make_shard


def make_shard(
    mine: list[Sample], round_samples: list[Sample] | None = None, step_ends: list[int] | None = None
) -> Shard:
    """A shard of `mine`; the round is all of `round_samples`, by default the same."""
    whole = TrainBatch.from_samples(mine if round_samples is None else round_samples)
    return Shard(
        batch=TrainBatch.from_samples(mine),
        step_ends=[len(mine)] if step_ends is None else step_ends,
        round_rewards=whole.rewards,
        round_group_index=whole.group_index,
    )


@pytest.fixture
def make_trainer(make_args: Callable[..., Options]) -> Iterator[Callable[..., TorchTrainer]]:
    """A trainer on one rank, from flags; closed after the test."""
    made: list[TorchTrainer] = []

    def make(*flags: str, model: Path | None = None) -> TorchTrainer:
        args = make_args(*flags) if model is None else make_args(*flags, model=model)
        made.append(TorchTrainer(args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu"))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[dict]]:
    """Run the ranks of a job as processes of their own; what each wrote."""
    return start_ranks


def start_ranks(job: dict, directory: Path) -> list[dict]:
    """Run every rank of a job and return what each wrote."""
    directory.mkdir()
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    size = len(job["shares"][0])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, str(WORKER), str(path), str(rank)], env=env) for rank in range(size)]
    try:
        assert [process.wait(timeout=600) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(size)]
