"""Engines and the router are killed and hung under a run, which must not notice more than a delay."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from random import Random
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pyarrow.parquet as parquet
import pytest

WATCHED = ["--engine-health-interval-s", "1"]
HANGS_TOO = [*WATCHED, "--engine-health-timeout-s", "4"]
"""For tests in which an engine that stands still is taken for dead, whether they or the machine stopped it."""


def supervisors(run, command):
    """The supervisors of a run's servers: their command lines stay, whatever the servers call themselves."""
    of_command = run.running(command)
    return [process for process in run.running("supervisor.py") if process in of_command]


def servers(run, command="slime_core.engines.embedded"):
    """The server processes of a run."""
    found = []
    for supervisor in supervisors(run, command):
        with contextlib.suppress(psutil.Error):
            found += supervisor.children()
    return found


def serving(run, command="slime_core.engines.embedded"):
    """Those of its server processes that the router knows: an engine killed five times before that is given up."""
    found = []
    with contextlib.suppress(psutil.Error, OSError):
        if not (routers := supervisors(run, "sglang_router.launch_router")):
            return []  # the run is ending
        (router,) = routers
        words = router.cmdline()
        with urlopen(f"http://127.0.0.1:{words[words.index('--port') + 1]}/workers", timeout=5) as answer:
            ports = {urlsplit(worker["url"]).port for worker in json.load(answer)["workers"] if worker["is_healthy"]}
        for server in servers(run, command):
            listening = {c.laddr.port for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            found += [server] if listening & ports else []
    return found


def kill(run, find):
    """Kill the processes that `find` sees in the run, once it sees any; returns how many."""
    found = []
    run.wait_for(lambda: found.extend(find(run)) or found)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(found)


def rounds(rows):
    """The rows of the training rounds."""
    return [row for row in rows if "train/loss" in row]


def trained_groups(directory):
    """Group indices of every round, and the weight versions of its tokens."""
    groups, versions = [], []
    for file in sorted((directory / "runs" / "run" / "samples").glob("*.parquet")):
        table = parquet.read_table(file)
        groups.append(sorted(set(table["group_index"].to_pylist())))
        versions.append({version for row in table["weight_versions"].to_pylist() for version in row})
    return groups, versions


def assert_nothing_lost_or_doubled(rows, directory):
    done = rounds(rows)
    assert [row["step"] for row in done] == list(range(len(done)))
    for row in done:
        assert row["data/drawn"] == row["data/trained"] + row["data/dropped"] + row["data/waiting"]
    groups, versions = trained_groups(directory)
    assert len(groups) == len(done)
    assert max(Counter(index for some in groups for index in some).values()) == 1, "a group was trained twice"
    assert versions == [{step} for step in range(len(done))], "an engine generated with other weights"


@pytest.mark.parametrize(
    ("most", "transport"),
    [
        (5, "disk"),
        pytest.param(1000, "disk", marks=pytest.mark.slow),
        pytest.param(1000, "broadcast", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_engines_are_killed_and_hung_all_the_time_ends_well(
    start_run, read_rows, tmp_path, most, transport
):
    random = Random(0)
    words = [
        "--num-engines",
        "2",
        "--placement",
        "disaggregated",
        "--n-samples-per-prompt",
        "8",
        "--save-samples",
        *("--weight-transport", transport),
        *HANGS_TOO,
    ]
    run = start_run("--num-rollout", "24", "--max-response-tokens", "200", *words)
    run.wait_for(lambda: rounds(read_rows()))
    started, num_kills = time.monotonic(), 0
    while run.process.poll() is None and num_kills < most:
        if time.monotonic() - started > 200:
            break  # a busy machine gets no further, and ends
        if alive := serving(run):
            with contextlib.suppress(psutil.Error):
                random.choice(alive).send_signal(signal.SIGSTOP if num_kills % 4 == 3 else signal.SIGKILL)
                num_kills += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(random.uniform(1, 5))
    code, output = run.finish()
    assert code == 0, output
    rows = read_rows()
    assert_nothing_lost_or_doubled(rows, tmp_path)
    totals = {key: sum(row[f"engines/{key}"] for row in rounds(rows)) for key in ("restarts", "retries", "down_s")}
    print(
        f"kills and hangs: {num_kills}, {totals}, whole run after the first round: {time.monotonic() - started:.0f} s"
    )
    assert num_kills >= 3 and totals["restarts"] >= 2
    run.assert_nothing_left()


def test_the_only_engine_dies_while_a_round_is_generated_ahead(start_run, read_rows):
    """The trainer has newer weights than the round began with: the engine is given those, or it would wait for ever."""
    words = ["--num-engines", "1", "--max-staleness", "1", *WATCHED, "--engine-recovery-timeout-s", "300"]
    run = start_run("--num-rollout", "8", "--max-response-tokens", "200", "--n-samples-per-prompt", "8", *words)
    run.wait_for(lambda: len(rounds(read_rows())) >= 2)
    kill(run, serving)
    code, output = run.finish()
    assert code == 0, output
    done = rounds(read_rows())
    assert len(done) == 8 and sum(row["engines/restarts"] for row in done) == 1
    run.assert_nothing_left()


def test_the_router_is_started_again(start_run, read_rows, tmp_path):
    run = start_run("--num-rollout", "20", "--max-response-tokens", "128", "--save-samples", *WATCHED)
    run.wait_for(lambda: rounds(read_rows()))
    kill(run, lambda run: servers(run, "sglang_router.launch_router"))
    code, output = run.finish()
    assert code == 0, output
    assert re.search("the router .* is started again", output)
    assert_nothing_lost_or_doubled(read_rows(), tmp_path)
    run.assert_nothing_left()


def test_without_engines_the_state_is_saved_and_the_run_resumes(start_run, read_rows, tmp_path, model_dir):
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    words = ["--model", str(model), "--num-engines", "1", *WATCHED, "--engine-recovery-timeout-s", "10"]
    run = start_run("--num-rollout", "1000", *words)
    run.wait_for(lambda: len(rounds(read_rows())) >= 2)
    (model / "config.json").rename(model / "config.away")
    kill(run, servers)
    code, output = run.finish()
    assert code == 1, output
    assert "no engine is left" in output and "is saved in" in output
    run.assert_nothing_left()
    (model / "config.away").rename(model / "config.json")
    done = len(rounds(read_rows()))
    again = start_run("--resume", "run", "--num-rollout", str(done + 2))
    code, output = again.finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert [row["step"] for row in trained] == list(range(done + 2))
    assert [row["data/drawn"] for row in trained] == [4 * (step + 1) for step in range(done + 2)]
