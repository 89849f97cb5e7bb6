"""Engines of two ranks on real SGLang: weights reach both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from real_sglang.conftest import ENVIRONMENT, sglang_words
from slime_core.engines.server import EngineServer
from slime_core.options import parse
from slime_core.weights.sync import WeightSync
from weights.conftest import Exporter, greedy

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


@pytest.mark.parametrize("transport", ["disk", "broadcast", "tensor"])
async def test_weights_reach_both_ranks(transport, two_ranks, models, tmp_path):
    words = ("--sglang-tp-size", "2", "--weights-dir", str(tmp_path), "--weight-transport", transport)
    args = parse([*sglang_words(models[0], *words), "--weights-check-interval", "1", *BOUND]).args
    sync = WeightSync(args, [two_ranks], tmp_path)
    seen = []
    for version, model in ((1, models[1]), (2, models[0])):
        metrics = await sync.send(Exporter(model), version)
        assert metrics["weights/logprob_abs_diff"] < 1e-4
        tokens, versions = await greedy(two_ranks)
        assert versions == [version] * 8
        seen.append(tokens)
    assert seen[0] != seen[1]
    sync.close()
