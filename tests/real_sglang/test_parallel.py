"""Engines of two ranks on real SGLang, in one part and in two: weights reach both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from real_sglang.conftest import ENVIRONMENT, sglang_words
from slime_core.engines.parallel import Node
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.engines.server import EngineServer
from slime_core.options import parse
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter, answer_under, greedy

BOUND = ["--engine-env", *ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND=0|1"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory) -> Iterator[str]:
    """A server whose model is cut in two."""
    args = parse([*sglang_words(models[0], "--sglang-tp-size", "2"), *BOUND]).args
    server = EngineServer(args, 0, tmp_path_factory.mktemp("logs"), threads=1)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def two_parts(models, tmp_path_factory) -> Iterator[str]:
    """A server in two parts, as on two machines."""
    words = ("--num-nodes-per-engine", "2", "--sglang-tp-size", "2")
    args = parse([*sglang_words(models[0], *words), *BOUND, "GLOO_SOCKET_IFNAME=lo"]).args
    first = Node(LOOPBACK, 0, 2, f"{LOOPBACK}:{free_port()}")
    logs = tmp_path_factory.mktemp("logs")
    serving, other = (EngineServer(args, 0, logs, 1, node=replace(first, rank=rank)) for rank in range(2))
    try:
        other.start_part()
        yield serving.start(check_others=other.check_process)
    finally:
        serving.stop()
        other.stop()


async def test_an_engine_in_two_parts_serves_and_takes_weights(two_parts, models, tmp_path):
    words = ("--sglang-tp-size", "2", "--weights-dir", str(tmp_path), "--weights-check-interval", "1")
    sync = WeightSync(parse([*sglang_words(models[0], *words), *BOUND]).args, [two_parts], tmp_path)
    before, _ = await greedy(two_parts)
    metrics = await sync.send(Exporter(models[1]), 1)
    assert metrics["weights/logprob_abs_diff"] < 1e-4
    after, versions = await greedy(two_parts)
    assert versions == [1] * 8 and after != before
    sync.close()


@pytest.mark.parametrize("transport", ["disk", "broadcast", "tensor"])
async def test_weights_reach_both_ranks(transport, two_ranks, models, tmp_path):
    words = ("--sglang-tp-size", "2", "--weights-dir", str(tmp_path), "--weight-transport", transport)
    args = parse([*sglang_words(models[0], *words), "--weights-check-interval", "1", *BOUND]).args
    sync = WeightSync(args, [two_ranks], tmp_path)
    first = await answer_under(sync, two_ranks, Exporter(models[1]), 1, 1e-4)
    assert first != await answer_under(sync, two_ranks, Exporter(models[0]), 2, 1e-4)
    sync.close()
