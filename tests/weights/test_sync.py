"""Weights from a trainer to a running engine: verified on both sides, refused when they are not whole."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.checksum import model_checksums
from slime_core.errors import EngineError, OptionError, WeightSyncError
from slime_core.weights.checksum import compare
from slime_core.weights.fusion import comparable, fused_checksums
from slime_core.weights.leftovers import PREFIX
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter, Tensors, greedy, used_checksums


def checksums_of(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    tensors = load_file(model / "model.safetensors")
    return model_checksums({name: tensor.to(dtype) for name, tensor in tensors.items()})


@pytest.fixture(params=["disk", "broadcast"])
def transport(request) -> str:
    return request.param


@pytest.fixture
def sync(transport, options, url, tmp_path):
    made = WeightSync(options("--weight-transport", transport), [url], tmp_path)
    yield made
    made.close()


async def test_after_an_update_the_engine_uses_exactly_the_trainers_weights(sync, options, models, url):
    seen = {}
    for version, model in ((1, models[1]), (2, models[0])):
        metrics = await sync.send(Exporter(model), version)
        assert await used_checksums(url) == checksums_of(model)
        tokens, versions = await greedy(url)
        assert versions == [version] * 8
        seen[version] = tokens
        assert metrics["perf/engines_paused_s"] <= metrics["perf/weights_s"]
        assert metrics["weights/bytes"] == sum(t.nbytes for t in load_file(model / "model.safetensors").values())
        assert metrics.get("weights/logprob_abs_diff", 0.0) < 1e-5
    assert seen[1] != seen[2]
    sync.close()
    assert not list(Path(options().weights_dir).glob(f"{PREFIX}*")), "no files are left"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_running_requests_end_or_go_on_as_the_mode_says(transport, options, models, url, tmp_path, mode):
    words = ("--weight-transport", transport, "--pause-mode", mode)
    sync = WeightSync(options(*words), [url], tmp_path)
    async with EngineAdmin([url], 30) as admin:
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        running = asyncio.create_task(admin._post(url, "generate", body))
        await sync.send(Exporter(models[0]), 3)
        while not running.done():
            await sync.send(Exporter(models[1]), 4)
    meta = orjson.loads(await running)["meta_info"]
    assert meta["finish_reason"]["type"] in ({"abort", "length"} if mode == "abort" else {"length"})
    sync.close()


async def test_two_engines_get_the_same_weights(transport, options, start, url, models, tmp_path):
    other = start()
    sync = WeightSync(options("--weight-transport", transport), [url, other.url], tmp_path)
    await sync.send(Exporter(models[1]), 5)
    assert await used_checksums(url) == await used_checksums(other.url) == checksums_of(models[1])
    sync.close()


async def test_a_restarted_engine_gets_them_alone_and_then_with_the_others(
    transport, options, start, url, models, tmp_path
):
    first = start()
    sync = WeightSync(options("--weight-transport", transport), [url, first.url], tmp_path)
    await sync.send(Exporter(models[0]), 6)
    first.stop()
    second = start()
    sync.set_engines([url, second.url])
    metrics = await sync.send(Exporter(models[1]), 7, [second.url])
    assert "weights/logprob_abs_diff" in metrics, "a new engine is checked"
    assert await used_checksums(second.url) == checksums_of(models[1])
    assert (await greedy(url))[1] == [6] * 8, "the others were left alone"
    await sync.send(Exporter(models[1]), 8)
    assert (await greedy(url))[1] == (await greedy(second.url))[1] == [8] * 8
    sync.close()


async def test_engines_leave_the_group_they_were_in_before(options, start, url, models, tmp_path):
    sync = WeightSync(options("--weight-transport", "broadcast"), [url], tmp_path)
    await sync.send(Exporter(models[0]), 8)
    name, other = sync.transport._name, start()
    sync.set_engines([url, other.url])
    await sync.send(Exporter(models[0]), 8, [other.url])
    await sync.send(Exporter(models[1]), 9)
    async with EngineAdmin([url], 30) as admin:
        with pytest.raises(EngineError, match="group to be destroyed does not exist"):
            await admin._post(url, "destroy_weights_update_group", {"group_name": name})
    sync.close()
    other.stop()


async def test_an_engine_that_died_is_named_and_the_others_go_on(transport, options, start, url, models, tmp_path):
    doomed = start()
    sync = WeightSync(options("--weight-transport", transport), [url, doomed.url], tmp_path)
    await sync.send(Exporter(models[0]), 9)
    doomed.stop()
    with pytest.raises(WeightSyncError, match=doomed.url):
        await sync.send(Exporter(models[1]), 10)
    sync.set_engines([url])
    await sync.send(Exporter(models[1]), 11)
    assert await used_checksums(url) == checksums_of(models[1])
    sync.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_are_cast_to_the_engines_dtype(transport, options, start, models, tmp_path, dtype):
    words = ("--engine-dtype", "bfloat16", "--weight-transport", transport)
    engine = start(*words)
    source = Exporter(models[1])
    source.dtype = dtype
    metrics = await WeightSync(options(*words), [engine.url], tmp_path).send(source, 1)
    assert await used_checksums(engine.url) == checksums_of(models[1], torch.bfloat16)
    assert metrics["weights/logprob_abs_diff"] < 0.1
    engine.stop()


def drop_a_tensor(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}


def rename_a_tensor(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}


def cut_a_tensor(tensors: Tensors) -> Tensors:
    return tensors | {"model.norm.weight": tensors["model.norm.weight"][:-1]}


@pytest.mark.parametrize("change", [drop_a_tensor, rename_a_tensor, cut_a_tensor])
async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(sync, models, url, change):
    await sync.send(Exporter(models[0]), 12)
    before = await greedy(url)
    with pytest.raises(WeightSyncError, match=r"the weights of version 13 were not taken: .* HTTP 400: .*tensor"):
        await sync.send(Exporter(models[1], change), 13)
    assert await used_checksums(url) == checksums_of(models[0])
    assert await greedy(url) == before
    await sync.send(Exporter(models[1]), 14)
    assert (await greedy(url))[1] == [14] * 8


async def test_a_source_that_breaks_off_leaves_the_old_weights(sync, models, url):
    class Broken(Exporter):
        count = 0

        def weights(self, dtype: str):
            self.count += 1
            for number, pair in enumerate(super().weights(dtype)):
                if self.count > 1 and number == 5:
                    raise MemoryError("no more")
                yield pair

    await sync.send(Exporter(models[0]), 15)
    with pytest.raises(MemoryError):
        await sync.send(Broken(models[1]), 16)
    assert await used_checksums(url) == checksums_of(models[0])
    assert (await greedy(url))[1] == [15] * 8


async def test_an_engine_with_other_weights_than_were_sent_is_found_out(sync, models):
    class Liar(Exporter):
        count = 0

        def weights(self, dtype: str):
            self.count += 1
            return super().weights(dtype) if self.count > 1 else Exporter(models[0]).weights(dtype)

    with pytest.raises(WeightSyncError):
        await sync.send(Liar(models[1]), 20)


async def test_an_engine_that_computes_other_numbers_is_found_out(sync, models):
    class Other(Exporter):
        def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
            return super().prompt_logprobs(tokens) + np.float32(0.01)

    with pytest.raises(WeightSyncError, match=r"disagree on a prompt's log-probabilities .* \|difference\| 0\.01"):
        await sync.send(Other(models[1]), 21)


async def test_a_prompt_is_compared_first_and_at_intervals(options, models, url, tmp_path):
    sync = WeightSync(options("--weights-check-interval", "3"), [url], tmp_path)
    compared = [await sync.send(Exporter(models[0]), 30 + number) for number in range(4)]
    assert ["weights/logprob_abs_diff" in metrics for metrics in compared] == [True, False, False, True]
    assert compared[0]["weights/logprob_abs_diff"] < 1e-5


async def test_without_engines_nothing_is_written(options, models, tmp_path):
    assert await WeightSync(options(), [], tmp_path).send(Exporter(models[0]), 1) == {}


def test_the_embedded_engine_takes_no_pickles(options):
    with pytest.raises(OptionError, match="which the embedded engine does not read"):
        options("--weight-transport", "tensor")


def test_compare_names_what_differs():
    compare({"a": "1"}, {"a": "1"}, "engine")
    with pytest.raises(WeightSyncError, match=r"engine does not use .*: b, c, d and 1 more differ"):
        compare(dict.fromkeys("abcde", "1"), {"a": "1"}, "engine")


def test_checksums_see_every_bit():
    tensor = torch.zeros(5)
    changed = tensor.clone()
    changed[3] = -0.0
    assert model_checksums([("w", tensor)]) != model_checksums([("w", changed)])


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_are_stacked_by_number_and_hashed(parts):
    gate, up, down = torch.arange(12 * 3 * 6.0).reshape(3, 12, 2, 3).unbind()
    named = [
        (f"l.experts.{e}.{part}.weight", t[e])
        for part, t in zip(parts, (gate, up, down), strict=True)
        for e in range(12)
    ]
    expected = {"l.experts.w13_weight": digest(torch.cat([gate, up], 1)), "l.experts.w2_weight": digest(down)}
    assert fused_checksums(reversed(named)) == expected
    compare(*comparable(fused_checksums(named), expected), "engine")
    with pytest.raises(WeightSyncError, match=r"l\.experts\.w2_weight differ"):
        compare(*comparable(fused_checksums(named), expected | {"l.experts.w2_weight": "1234"}), "engine")


def test_experts_that_a_server_stacks_in_another_way_are_left_to_the_prompt():
    sent = [("norm.weight", torch.ones(2)), ("mlp.experts.0.gate_proj.weight", torch.ones(2, 2))]
    used = {**fused_checksums(sent[:1]), "mlp.experts.packed": "1234"}
    compare(*comparable(fused_checksums(sent), used), "engine")
    with pytest.raises(WeightSyncError, match=r"norm\.weight"):
        compare(*comparable(fused_checksums(sent), {**used, "norm.weight": "5678"}), "engine")
