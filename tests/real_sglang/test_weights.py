"""Weights to real SGLang: sent, verified, refused; and what makes its start fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from real_sglang.conftest import sglang_words
from slime_core.engines import sglang
from slime_core.engines.client import EngineClient
from slime_core.engines.server import EngineServer
from slime_core.errors import EngineError, OptionError, WeightSyncError
from slime_core.options import Options, parse
from slime_core.weights.sync import WeightSync
from tiny_model import byte_tokenizer
from weights.test_sync import Exporter


async def greedy(url: str) -> tuple[list[int], list[int]]:
    """Tokens and weight versions of a greedy generation."""
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=1, timeout_s=60) as client:
        generation = await client.generate([1, 2, 3], {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
    return generation.tokens.tolist(), generation.weight_versions.tolist()


async def test_weights_are_sent_and_verified_by_checksum_and_by_a_prompt(args, url, models, tmp_path):
    sync = WeightSync(args, tmp_path)
    first = await sync.send(Exporter(models[1]), 1, [url])
    assert first["weights/logprob_abs_diff"] < 1e-4
    tokens, versions = await greedy(url)
    assert versions == [1] * 8
    await sync.send(Exporter(models[0]), 2, [url])
    assert (await greedy(url))[0] != tokens


async def test_an_unknown_weight_name_is_found_out(args, url, models, tmp_path):
    """SGLang takes it silently and keeps its old weights."""

    def rename(path: Path) -> None:
        tensors = {name.replace("layers.0", "layers.7"): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})

    with pytest.raises(WeightSyncError):
        await WeightSync(args, tmp_path).send(Exporter(models[1], rename), 3, [url])
    await WeightSync(args, tmp_path).send(Exporter(models[0]), 4, [url])


async def test_other_weights_than_the_trainers_are_found_out_by_the_prompt(args, url, models, tmp_path):
    class Liar(Exporter):
        def export_weights(self, directory: Path) -> dict[str, str]:
            return Exporter(models[0]).export_weights(directory)

    with pytest.raises(WeightSyncError, match="disagree on a prompt's log-probabilities"):
        await WeightSync(args, tmp_path).send(Liar(models[1]), 5, [url])


def environment(server: EngineServer) -> dict[str, str]:
    return server._environment


def test_flags_are_checked_by_asking_that_sglang(args, tmp_path):
    found = sglang.inspect(args.engine_python, environment(EngineServer(args, 0, tmp_path, 1)))
    assert found.version == "0.5.23"
    sglang.check(args, found)
    wrong = parse(sglang_words(Path(args.model), "--sglang-atention-backend", "triton")).args
    with pytest.raises(
        OptionError, match=r"has no flag --atention-backend .*; did you mean --sglang-attention-backend\?"
    ):
        sglang.check(wrong, found)
    with pytest.raises(EngineError, match=r"SGLang 0\.4\.10 is too old"):
        sglang.check(args, dataclasses.replace(found, version="0.4.10"))


def test_a_model_that_does_not_load_shows_the_end_of_the_log(args, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    options = Options(**{**vars(args), "model": str(broken)})
    server = EngineServer(options, 1, tmp_path / "logs", 1)
    try:
        with pytest.raises(EngineError, match=r"engine 1 exited with code .*\n.*last lines of .*engine_1\.log"):
            server.start()
    finally:
        server.stop()
