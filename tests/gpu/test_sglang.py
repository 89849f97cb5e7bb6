"""Real SGLang on CUDA: weights by every transport, memory that is freed and taken back, FP8.

SLIME_SGLANG_PYTHON names the Python that has SGLang for CUDA (default: the one that runs the tests).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.server import EngineServer
from slime_core.options import Options, parse
from slime_core.training.together import free_cache
from slime_core.weights.sync import WeightSync
from tiny_model import VOCAB_SIZE, byte_tokenizer
from weights.conftest import answer_under, greedy

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SLIME_SGLANG_PYTHON", sys.executable)
FP8_SINCE = (8, 9)
"""Compute capability from which a GPU multiplies in FP8."""


@pytest.fixture(scope="module", autouse=True)
def needs_sglang() -> None:
    """Skip without SGLang, and say which Python was asked."""
    if subprocess.run([PYTHON, "-c", "import sglang"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{PYTHON} has no SGLang; SLIME_SGLANG_PYTHON names one that has")


def write_model(directory: Path, seed: int) -> Path:
    """A Qwen3 in bfloat16 whose heads are of a size that kernels for GPUs take."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=512,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights."""
    return [write_model(tmp_path_factory.mktemp(f"model_{seed}"), seed) for seed in range(2)]


class OnGpu:
    """What a trainer on the first GPU would send and compute."""

    vocab_size, dtype = VOCAB_SIZE, "bfloat16"

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda:0")

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.state_dict().items():
            if name != "lm_head.weight":
                yield name, tensor.to(getattr(torch, dtype)).contiguous()

    def free_cache(self) -> None:
        free_cache()

    def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = self._model(torch.tensor([list(tokens)], device="cuda:0")).logits[0].float()
        targets = torch.tensor(list(tokens), device="cuda:0")[1:, None]
        return logits.log_softmax(-1)[:-1].gather(-1, targets)[:, 0].cpu().numpy()


Start = Callable[..., tuple[str, Options]]


@pytest.fixture
def start(models: list[Path], tmp_path: Path) -> Iterator[Start]:
    """`start("1", "--flag", ...)`: URL and options of a server on that GPU."""
    servers: list[EngineServer] = []

    def start_one(gpu: str, *words: str) -> tuple[str, Options]:
        common = ["--model", str(models[0]), "--engine", "sglang", "--engine-python", PYTHON]
        common += ["--sglang-mem-fraction-static", "0.3", "--sglang-disable-cuda-graph", "--engine-max-requests", "16"]
        args = parse(
            [*common, "--weights-dir", str(tmp_path / "weights"), "--weights-check-interval", "1", *words]
        ).args
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        physical = visible[int(gpu)] if visible != [""] else gpu
        servers.append(EngineServer(args, 0, tmp_path / "logs", threads=4, gpus=[physical]))
        return servers[-1].start(), args

    yield start_one
    for server in servers:
        server.stop()


@pytest.mark.parametrize(("transport", "gpu"), [("disk", "0"), ("tensor", "0"), ("broadcast", "1")])
async def test_a_server_uses_the_weights_it_was_sent(transport, gpu, start, models, tmp_path):
    if int(gpu) >= torch.cuda.device_count():
        pytest.skip("NCCL needs two CUDA devices")
    url, args = start(gpu, "--weight-transport", transport, "--placement", "disaggregated")
    sync = WeightSync(args, [url], tmp_path)
    first = await answer_under(sync, url, OnGpu(models[1]), 1, 0.1)
    assert first != await answer_under(sync, url, OnGpu(models[0]), 2, 0.1)
    sync.close()


async def test_memory_is_free_for_the_trainer_until_the_next_update(start, models, tmp_path):
    url, args = start("0", "--offload-engines", "--weight-transport", "tensor")
    sync = WeightSync(args, [url], tmp_path)
    source = OnGpu(models[0])
    await sync.send(source, 1)
    before, _ = await greedy(url)
    held, total = torch.cuda.mem_get_info(0)
    await sync.release()
    freed = torch.cuda.mem_get_info(0)[0] - held
    assert freed > 0.2 * total, "the cache alone took nearly 0.3 of it"
    await sync.send(source, 2)
    after, versions = await greedy(url)
    assert after == before and versions == [2] * 8
    assert torch.cuda.mem_get_info(0)[0] < held + 0.1 * total, "it has its memory again"
    sync.close()


async def test_a_busy_server_survives_a_release(start, models, tmp_path):
    url, args = start("0", "--offload-engines")
    sync = WeightSync(args, [url], tmp_path)
    await sync.send(OnGpu(models[0]), 1)
    async with EngineAdmin([url], 60) as admin:
        params = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}
        bodies = [{"input_ids": [number], "sampling_params": params} for number in range(8)]
        running = [asyncio.create_task(admin._post(url, "generate", body)) for body in bodies]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in running)
        await sync.release()
        await sync.send(OnGpu(models[1]), 2)
        finishes = [orjson.loads(await task)["meta_info"]["finish_reason"]["type"] for task in running]
    assert finishes == ["abort"] * 8
    assert (await greedy(url))[1] == [2] * 8
    sync.close()


async def test_fp8_engines_take_the_trainers_bfloat16(start, models, tmp_path):
    if torch.cuda.get_device_capability(0) < FP8_SINCE:
        pytest.skip(f"FP8 needs compute capability {FP8_SINCE[0]}.{FP8_SINCE[1]}")
    fp8 = tmp_path / "fp8"
    script = [sys.executable, str(ROOT / "scripts" / "make_fp8.py"), "--model", str(models[0]), "--out", str(fp8)]
    subprocess.run(script, check=True)
    url, args = start("0", "--rollout-model", str(fp8))
    sync = WeightSync(args, [url], tmp_path)
    metrics = await sync.send(OnGpu(models[1]), 1)
    assert metrics["weights/logprob_abs_diff"] < 0.5
    assert (await greedy(url))[1] == [1] * 8
    sync.close()
