"""Engines that free their memory while trainers train; on CPU nothing is freed, but the server follows all the same."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from cluster.conftest import prompts, read_rows, start_run  # noqa: F401
from cluster.test_faults import rounds
from real_sglang.conftest import sglang_words
from slime_core.engines.admin import EngineAdmin
from slime_core.options import parse
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter, greedy


async def test_a_busy_server_survives_a_release_and_takes_weights_afterwards(url, models, tmp_path):
    words = ("--weights-dir", str(tmp_path), "--weights-check-interval", "1")
    sync = WeightSync(parse(sglang_words(models[0], *words)).args, [url], tmp_path)
    await sync.send(Exporter(models[0]), 20)
    before, _ = await greedy(url)
    async with EngineAdmin([url], 60) as admin:
        params = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
        running = asyncio.create_task(admin._post(url, "generate", {"input_ids": [1, 2, 3], "sampling_params": params}))
        await asyncio.sleep(0.3)
        assert not running.done()
        await sync.release()
        assert orjson.loads(await running)["meta_info"]["finish_reason"]["type"] == "abort"
        waiting = asyncio.create_task(greedy(url))
        metrics = await sync.send(Exporter(models[1]), 21)
    assert metrics["weights/logprob_abs_diff"] < 1e-4
    tokens, versions = await waiting
    assert versions == [21] * 8 and tokens != before, "a request that came meanwhile waited for the new weights"
    sync.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_engines_make_room_for_the_trainer(start_run, read_rows, models, tmp_path):  # noqa: F811
    words = sglang_words(models[0], "--offload-engines", "--engine-health-interval-s", "1")
    run = start_run("--num-rollout", "4", "--max-response-tokens", "64", *words)
    code, output = run.finish(400)
    assert code == 0, output
    done = rounds(read_rows())
    assert [row["step"] for row in done] == [0, 1, 2, 3]
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in done), "every round had the weights of before it"
    assert sum(row["engines/restarts"] for row in done) == 0
    log = (tmp_path / "runs" / "run" / "logs" / "engine_0.log").read_text()
    assert log.count('POST /release_memory_occupation HTTP/1.1" 200') == 4
    assert log.count('POST /resume_memory_occupation HTTP/1.1" 200') == 8
    run.assert_nothing_left()
