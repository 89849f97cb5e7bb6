"""Weights from a trainer's export to a running engine: verified on both sides, refused when they are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.checksum import model_checksums
from slime_core.engines.client import EngineClient
from slime_core.engines.server import EngineServer
from slime_core.errors import WeightSyncError
from slime_core.options import Options, parse
from slime_core.weights.checksum import compare
from slime_core.weights.disk import PREFIX, DiskTransport, remove_stale
from slime_core.weights.sync import WeightSync
from tiny_model import VOCAB_SIZE, byte_tokenizer, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def args(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Options:
    weights = tmp_path_factory.mktemp("weights")
    return parse(["--model", str(models[0]), "--weights-dir", str(weights), "--request-timeout-s", "30"]).args


@pytest.fixture(scope="module")
def url(args: Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EngineServer(args, 0, tmp_path_factory.mktemp("logs"), threads=1)
    yield server.start()
    server.stop()


class Exporter:
    """What a trainer with this model's weights would write and compute."""

    vocab_size, dtype = VOCAB_SIZE, "float32"

    def __init__(self, model: Path, damage: Callable[[Path], None] = lambda path: None) -> None:
        self._model, self._damage = model, damage

    def export_weights(self, directory: Path) -> dict[str, str]:
        tensors = load_file(self._model / "model.safetensors")
        checksums = model_checksums(tensors.items())
        path = directory / "model.safetensors"
        save_file(tensors, path, {"format": "pt", "slime_checksums": json.dumps(checksums)})
        self._damage(path)
        return checksums

    def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(self._model)
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


async def used_checksums(url: str) -> dict[str, str]:
    async with EngineAdmin([url], 30) as admin:
        return (await admin.checksums())[url]


async def greedy(url: str) -> tuple[list[int], list[int]]:
    """Tokens and weight versions of a greedy generation."""
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=1, timeout_s=30) as client:
        generation = await client.generate([1, 2, 3], {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    return generation.tokens.tolist(), generation.weight_versions.tolist()


async def test_after_an_update_the_engine_uses_exactly_the_trainers_weights(args, models, url, tmp_path):
    sync = WeightSync(args, tmp_path)
    seen = {}
    for version, model in ((1, models[1]), (2, models[0])):
        metrics = await sync.send(Exporter(model), version, [url])
        tensors = load_file(model / "model.safetensors")
        assert await used_checksums(url) == model_checksums(tensors.items())
        tokens, versions = await greedy(url)
        assert versions == [version] * 8
        seen[version] = tokens
        assert metrics["perf/engines_paused_s"] <= metrics["perf/weights_s"]
    assert seen[1] != seen[2]
    assert not list(Path(args.weights_dir).glob(f"{PREFIX}*")), "the files are gone after the update"


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("damage", [flip_a_byte, cut, drop_a_tensor, Path.unlink])
async def test_damaged_weights_are_refused_and_the_old_ones_stay_in_use(args, models, url, tmp_path, damage):
    sync = WeightSync(args, tmp_path)
    await sync.send(Exporter(models[0]), 10, [url])
    before = await greedy(url)
    with pytest.raises(WeightSyncError, match=r"the weights of version 11 were not taken: .* HTTP 400"):
        await sync.send(Exporter(models[1], damage), 11, [url])
    assert await used_checksums(url) == model_checksums(load_file(models[0] / "model.safetensors").items())
    assert await greedy(url) == before


async def test_an_engine_with_other_weights_than_were_sent_is_found_out(args, models, url, tmp_path):
    class Liar(Exporter):
        def export_weights(self, directory: Path) -> dict[str, str]:
            super().export_weights(directory)
            return model_checksums(load_file(models[0] / "model.safetensors").items())

    with pytest.raises(WeightSyncError, match="does not use the weights the trainer sent"):
        await WeightSync(args, tmp_path).send(Liar(models[1]), 20, [url])


async def test_an_engine_that_computes_other_numbers_is_found_out(args, models, url, tmp_path):
    class Other(Exporter):
        def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
            return super().prompt_logprobs(tokens) + np.float32(0.01)

    with pytest.raises(WeightSyncError, match=r"disagree on a prompt's log-probabilities .* \|difference\| 0\.01"):
        await WeightSync(args, tmp_path).send(Other(models[1]), 21, [url])


async def test_a_prompt_is_compared_first_and_at_intervals(models, url, tmp_path):
    words = ["--model", str(models[0]), "--weights-dir", str(tmp_path), "--weights-check-interval", "3"]
    sync = WeightSync(parse(words).args, tmp_path)
    compared = [await sync.send(Exporter(models[0]), 30 + number, [url]) for number in range(4)]
    assert ["weights/logprob_abs_diff" in metrics for metrics in compared] == [True, False, False, True]
    assert compared[0]["weights/logprob_abs_diff"] < 1e-5


async def test_without_engines_nothing_is_written(args, models, tmp_path):
    assert await WeightSync(args, tmp_path).send(Exporter(models[0]), 1, []) == {}


def test_compare_names_what_differs():
    compare({"a": "1"}, {"a": "1"}, "engine")
    with pytest.raises(WeightSyncError, match=r"engine does not use .*: b, c, d and 1 more differ"):
        compare(dict.fromkeys("abcde", "1"), {"a": "1"}, "engine")


def test_leftovers_of_killed_trainers_are_removed_and_those_of_living_ones_kept(tmp_path):
    import os

    dead, living, other = (tmp_path / name for name in (f"{PREFIX}999999999", f"{PREFIX}{os.getpid()}", "mine"))
    for directory in (dead, living, other):
        directory.mkdir()
    remove_stale(tmp_path)
    assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)


def test_shared_memory_is_the_default_and_another_directory_the_fallback(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_core.weights.disk.SHARED_MEMORY", tmp_path / "none")
    DiskTransport(None, tmp_path / "fallback")
    assert (tmp_path / "fallback").is_dir()


def test_checksums_see_every_bit():
    tensor = torch.zeros(5)
    changed = tensor.clone()
    changed[3] = -0.0
    assert model_checksums([("w", tensor)]) != model_checksums([("w", changed)])
