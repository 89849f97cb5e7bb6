"""Weights to real SGLang: sent, verified, refused; and what makes its start fail."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from real_sglang.conftest import sglang_words
from slime_core.engines import sglang
from slime_core.engines.client import EngineClient
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.engines.server import EngineServer
from slime_core.errors import EngineError, OptionError, WeightSyncError
from slime_core.options import Options, parse
from slime_core.weights.sync import WeightSync
from tiny_model import byte_tokenizer
from weights.conftest import Exporter, Tensors, greedy

LONG = 800
"""Tokens of an answer under which an update comes: a few seconds."""
TRANSPORTS = ["disk", "broadcast", "tensor"]


@pytest.fixture(params=TRANSPORTS)
def sync(request, models, url, tmp_path):
    words = ("--weights-dir", str(tmp_path), "--request-timeout-s", "60", "--weight-transport", request.param)
    made = WeightSync(parse(sglang_words(models[0], *words)).args, [url], tmp_path)
    yield made
    made.close()


async def test_weights_are_sent_and_verified_by_checksum_and_by_a_prompt(sync, url, models):
    first = await sync.send(Exporter(models[1]), 1)
    assert first["weights/logprob_abs_diff"] < 1e-4
    tokens, versions = await greedy(url)
    assert versions == [1] * 8
    await sync.send(Exporter(models[0]), 2)
    others, versions = await greedy(url)
    assert others != tokens
    assert versions == [2] * 8


async def test_buckets_of_any_size_bring_the_same_weights(sync, url, models):
    sync.transport._bucket_bytes = 10_000
    metrics = await sync.send(Exporter(models[1]), 3)
    assert metrics["weights/logprob_abs_diff"] < 1e-4


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_running_requests_end_or_go_on_as_the_mode_says(transport, mode, url, models, tmp_path):
    words = ("--weights-dir", str(tmp_path), "--weight-transport", transport, "--pause-mode", mode)
    sync = WeightSync(parse(sglang_words(models[0], *words)).args, [url], tmp_path)
    await sync.send(Exporter(models[0]), 4)
    begun = asyncio.Event()
    params = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=1, timeout_s=60) as client:
        running = asyncio.create_task(client.generate([1, 2, 3], params, on_tokens=lambda tokens: begun.set()))
        await begun.wait()
        await sync.send(Exporter(models[1]), 5)
        answer = await running
    sync.close()
    if mode == "abort":
        assert answer.finish_reason == "abort"
        return
    assert len(answer.tokens) == LONG
    assert list(dict.fromkeys(answer.weight_versions.tolist())) == [4, 5]


async def test_an_unknown_weight_name_is_found_out(sync, url, models):
    """SGLang takes it silently and keeps its old weights."""

    def rename(tensors: Tensors) -> Tensors:
        return {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}

    with pytest.raises(WeightSyncError):
        await sync.send(Exporter(models[1], rename), 6)
    await sync.send(Exporter(models[0]), 7)


async def test_other_weights_than_the_trainers_are_found_out_by_the_prompt(sync, models):
    class Liar(Exporter):
        def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
            return Exporter(models[0]).weights(dtype)

    with pytest.raises(WeightSyncError, match="disagree on a prompt's log-probabilities"):
        await sync.send(Liar(models[1]), 8)


async def test_a_source_that_breaks_off_stops_the_update_and_the_next_one_goes_through(sync, url, models):
    class Broken(Exporter):
        def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(super().weights(dtype)):
                if number == 5:
                    raise MemoryError("no more")
                yield pair

    sync.transport._bucket_bytes = 10_000
    await sync.send(Exporter(models[0]), 9)
    with pytest.raises(MemoryError):
        await sync.send(Broken(models[1]), 10)
    await sync.send(Exporter(models[1]), 11)
    assert (await greedy(url))[1] == [11] * 8


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


def test_a_port_that_another_process_took_meanwhile_is_no_end(args, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(
            "slime_core.engines.server.free_port", lambda host: ports.pop() if ports else free_port(host)
        )
        server = EngineServer(args, 2, tmp_path / "logs", 1)
        try:
            assert server.start(again=True) != f"http://{LOOPBACK}:{taken.getsockname()[1]}"
            assert not ports
        finally:
            server.stop()
