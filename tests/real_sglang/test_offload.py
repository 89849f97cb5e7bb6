"""Engines that free their memory while trainers train; on CPU nothing is freed, but the server follows all the same."""

from __future__ import annotations

import asyncio

import pytest

from cluster.conftest import prompts, read_rows, start_run  # noqa: F401
from cluster.test_faults import rounds
from real_sglang.conftest import sglang_words
from slime_core.engines.client import EngineClient
from slime_core.options import parse
from slime_core.weights.sync import WeightSync
from tiny_model import byte_tokenizer
from weights.conftest import Exporter, greedy


async def test_a_busy_server_survives_a_release_and_takes_weights_afterwards(url, models, tmp_path):
    words = ("--weights-dir", str(tmp_path), "--weights-check-interval", "1")
    sync = WeightSync(parse(sglang_words(models[0], *words)).args, [url], tmp_path)
    await sync.send(Exporter(models[0]), 20)
    before, _ = await greedy(url)
    begun = asyncio.Event()
    params = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=1, timeout_s=60) as client:
        running = asyncio.create_task(client.generate([1, 2, 3], params, on_tokens=lambda tokens: begun.set()))
        await begun.wait()
        await sync.release()
        assert (await running).finish_reason == "abort"
        waiting = asyncio.create_task(greedy(url))
        metrics = await sync.send(Exporter(models[1]), 21)
    assert metrics["weights/logprob_abs_diff"] < 1e-4
    tokens, versions = await waiting
    assert versions == [21] * 8 and tokens != before, "a request that came meanwhile waited for the new weights"
    sync.close()


@pytest.mark.slow
def test_a_run_whose_engines_make_room_for_the_trainer(start_run, read_rows, models, tmp_path):  # noqa: F811
    words = sglang_words(models[0], "--offload-engines", "--engine-health-interval-s", "1")
    run = start_run("--num-rollout", "4", "--max-response-tokens", "64", *words)
    code, output = run.finish()
    assert code == 0, output
    done = rounds(read_rows())
    assert [row["step"] for row in done] == [0, 1, 2, 3]
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in done), "every round had the weights of before it"
    assert sum(row["engines/restarts"] for row in done) == 0
    log = (tmp_path / "runs" / "run" / "logs" / "engine_0.log").read_text()
    assert log.count('POST /release_memory_occupation HTTP/1.1" 200') == 4
    assert log.count('POST /resume_memory_occupation HTTP/1.1" 200') == 8
    run.assert_nothing_left()
