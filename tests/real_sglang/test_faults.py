"""Whole runs on real SGLang whose servers are killed and hung under them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from random import Random

import psutil
import pytest

from cluster.conftest import prompts, read_rows, start_run  # noqa: F401
from cluster.test_faults import assert_nothing_lost_or_doubled, rounds, serving
from real_sglang.conftest import sglang_words

NUM_ROUNDS = 60


@pytest.fixture
def model_dir(models):
    """What `start_run` gives to --model."""
    return models[0]


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_a_run_whose_servers_are_killed_and_hung_ends_well(start_run, read_rows, tmp_path, model_dir, transport):  # noqa: F811
    """A server takes half a minute to come back, so the next one dies a few seconds after both have."""
    random = Random(0)
    words = sglang_words(model_dir, "--num-engines", "2", "--placement", "disaggregated", "--save-samples")
    words += ["--engine-health-interval-s", "1", "--engine-health-timeout-s", "10", "--n-samples-per-prompt", "8"]
    words += ["--weight-transport", transport]
    run = start_run("--num-rollout", str(NUM_ROUNDS), "--max-response-tokens", "200", *words)
    run.wait_for(lambda: rounds(read_rows()))
    started, num_kills, num_hangs = time.monotonic(), 0, 0
    while run.process.poll() is None and time.monotonic() - started < 500:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(random.uniform(2, 6))
        alive = serving(run, "sglang.launch_server")
        if len(alive) == 2:
            hang = (num_kills + num_hangs) % 3 == 2
            with contextlib.suppress(psutil.Error):
                random.choice(alive).send_signal(signal.SIGSTOP if hang else signal.SIGKILL)
                num_hangs, num_kills = num_hangs + hang, num_kills + (not hang)
    code, output = run.finish()
    assert code == 0, output
    rows = read_rows()
    assert_nothing_lost_or_doubled(rows, tmp_path)
    assert len(rounds(rows)) == NUM_ROUNDS
    totals = {key: sum(row[f"engines/{key}"] for row in rounds(rows)) for key in ("restarts", "retries", "down_s")}
    print(
        f"kills: {num_kills}, hangs: {num_hangs}, {totals}, after the first round: {time.monotonic() - started:.0f} s"
    )
    assert num_kills >= 2 and totals["restarts"] >= num_kills
    run.assert_nothing_left()
