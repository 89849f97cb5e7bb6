"""Two sets of weights of one architecture, an engine to send them to, and what stands in for a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.client import EngineClient
from slime_core.engines.server import EngineServer
from slime_core.options import Options, parse
from slime_core.weights.source import WeightSource
from slime_core.weights.sync import WeightSync
from tiny_model import VOCAB_SIZE, byte_tokenizer, write_model

Tensors = dict[str, torch.Tensor]


class Exporter:
    """What a trainer with this model's weights would send and compute."""

    vocab_size, dtype = VOCAB_SIZE, "float32"

    def __init__(self, model: Path, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> None:
        self._model, self._change = model, change

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._change(load_file(self._model / "model.safetensors"))
        for name, tensor in tensors.items():
            yield name, tensor.to(getattr(torch, dtype)).contiguous()

    def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(self._model)
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


class ConstantTrainer:
    """One of a model whose every log-probability is -1."""

    vocab_size, dtype = 100, "float32"

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)

    def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        return np.full(len(tokens) - 1, -1.0, np.float32)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def options(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Options]:
    """`options("--flag", "value")`: of a run with the first model."""
    weights = tmp_path_factory.mktemp("weights")
    words = ["--model", str(models[0]), "--weights-dir", str(weights), "--request-timeout-s", "30"]
    return lambda *more: parse([*words, *more]).args


@pytest.fixture(scope="module")
def start(options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineServer]]:
    """`start("--flag", ...)`: a running engine; its `url` says where."""
    servers = []

    def start_one(*words: str) -> EngineServer:
        server = EngineServer(options(*words), len(servers), tmp_path_factory.mktemp("logs"), threads=1)
        servers.append(server)
        server.url = server.start()
        return server

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def url(start) -> str:
    return start().url


async def used_checksums(url: str) -> dict[str, str]:
    async with EngineAdmin([url], 30) as admin:
        return (await admin.checksums())[url]


async def greedy(url: str) -> tuple[list[int], list[int]]:
    """Tokens and weight versions of a greedy generation."""
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=1, timeout_s=60) as client:
        generation = await client.generate([1, 2, 3], {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    return generation.tokens.tolist(), generation.weight_versions.tolist()


async def answer_under(
    sync: WeightSync, url: str, source: WeightSource, version: int, largest_difference: float
) -> list[int]:
    """Send weights; the tokens of a greedy generation under them, checked to be of this version."""
    metrics = await sync.send(source, version)
    assert metrics["weights/logprob_abs_diff"] < largest_difference
    tokens, versions = await greedy(url)
    assert versions == [version] * 8
    return tokens
