"""Whole runs: they train, log, save, resume; however they end, no process is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from urllib.request import urlopen

import pytest

from slime_core.engines.process import free_port
from slime_core.engines.server import EngineServer
from slime_core.rollout.sample_file import read_groups
from slime_core.testing import make_options


def rounds(rows):
    return [row for row in rows if "train/loss" in row]


def test_a_disaggregated_run_on_two_engines_and_two_ranks(start_run, read_rows, tmp_path, prompts):
    run = start_run(
        "--num-engines", "2", "--num-trainers", "2", "--placement", "disaggregated", "--save-interval", "1",
        "--eval-data", f"heldout={prompts}", "--evens-bonus", "0.25",
    )  # fmt: skip
    code, output = run.finish()
    assert code == 0, output
    run.assert_nothing_left()
    trained = rounds(read_rows())
    assert [row["step"] for row in trained] == [0, 1, 2]
    for name in ("reward/mean", "rollout/response_length_mean", "train/loss", "train/grad_norm", "perf/step_s"):
        assert all(name in row for row in trained)
    assert trained[0]["train/logprob_abs_diff"] < 1e-4
    assert all(row["reward/min"] >= 0.25 for row in trained), "the plugin's own flag reached its worker"
    assert all(row["data/drawn"] == row["data/trained"] + row["data/dropped"] + row["data/waiting"] for row in trained)
    assert [row["step"] for row in read_rows() if "eval/heldout/mean" in row] == [0, 3]
    run_dir = tmp_path / "runs" / "latest"
    assert (run_dir / "reward.png").stat().st_size > 1000
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert saved == ["latest", "step_000002", "step_000003"]
    assert (run_dir / "checkpoints" / "latest" / "model" / "config.json").is_file()


def test_a_killed_run_leaves_nothing_and_resumes_where_it_was(start_run, read_rows):
    run = start_run("--num-rollout", "1000", "--save-interval", "2")
    run.wait_for(lambda: len(rounds(read_rows())) >= 3)
    [weights] = run.weights()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.assert_nothing_left()
    assert not weights.exists()
    done = len(rounds(read_rows()))
    again = start_run("--resume", "run", "--num-rollout", str(done + 2))
    code, output = again.finish()
    assert code == 0, output
    again.assert_nothing_left()
    trained = rounds(read_rows())
    assert [row["step"] for row in trained] == list(range(done + 2)), "every round once"
    assert [row["data/drawn"] for row in trained] == [4 * (step + 1) for step in range(done + 2)]


def test_a_run_that_is_killed_before_its_first_checkpoint_is_resumed_from_the_start(start_run, read_rows, prompts):
    run = start_run("--num-rollout", "1000", "--eval-data", f"heldout={prompts}")
    run.wait_for(lambda: len(rounds(read_rows())) >= 1)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.assert_nothing_left()
    code, output = start_run("--resume", "run", "--num-rollout", "2").finish()
    assert code == 0, output
    assert [row["step"] for row in rounds(read_rows())] == [0, 1]
    assert [row["step"] for row in read_rows() if "eval/heldout/mean" in row] == [0, 2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_again_and_again_trains_every_round_once(start_run, read_rows, tmp_path):
    """The short version is the test above; here the kills come at any point, in the middle of saves too."""
    random = Random(0)
    words = ["--num-rollout", "30", "--save-interval", "1"]
    for attempt in range(8):
        run = start_run(*words, *(["--resume", "run"] if attempt else []))
        run.wait_for((tmp_path / "runs" / "run" / "checkpoints" / "latest").exists)
        deadline = time.monotonic() + random.uniform(0.0, 8.0)
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.01)
        run.process.kill()
        run.process.wait()
        run.assert_nothing_left()
    code, output = start_run(*words, "--resume", "run").finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert [row["step"] for row in trained] == list(range(30))
    assert [row["data/drawn"] for row in trained] == [4 * (step + 1) for step in range(30)]


def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(start_run, read_rows, tmp_path):
    def finish(*words: str) -> tuple[bytes, list[float]]:
        run = start_run(*words)
        code, output = run.finish()
        assert code == 0, output
        run_dir = tmp_path / "runs" / "run"
        weights = (run_dir / "checkpoints" / "latest" / "model" / "model.safetensors").read_bytes()
        rewards = [row["reward/mean"] for row in rounds(read_rows())]
        return weights, rewards

    unbroken = finish("--num-rollout", "4")
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "unbroken")
    finish("--num-rollout", "2")
    resumed = finish("--resume", "run", "--num-rollout", "4")
    assert resumed == unbroken
    assert len(set(resumed[1])) > 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_cleans_up(start_run, read_rows, number):
    run = start_run("--num-rollout", "1000")
    run.wait_for(lambda: len(rounds(read_rows())) >= 1)
    run.process.send_signal(number)
    code, output = run.finish()
    assert code == 130, output
    assert "Traceback" not in output and output.rstrip().endswith("interrupted")
    run.assert_nothing_left()


def test_an_interrupt_while_starting_cleans_up(start_run):
    run = start_run()
    run.wait_for(lambda: run.running("supervisor"))
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    run.assert_nothing_left()


VICTIMS = {
    "trainer": ("ray::TrainerActor", "a process of the run died"),
    "rollout manager": ("ray::RolloutActor", "a process of the run died"),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_part_that_dies_stops_the_run_with_one_clear_error(start_run, read_rows, victim):
    command, message = VICTIMS[victim]
    run = start_run("--num-rollout", "1000")
    run.wait_for(lambda: len(rounds(read_rows())) >= 1)
    [found] = run.running(command)
    [weights] = run.weights()
    found.kill()
    code, output = run.finish()
    assert code == 1, output
    assert message in output
    assert "Traceback" not in output
    run.assert_nothing_left()
    assert not weights.exists()


BROKEN = {
    "raises": ("def reward(sample): raise KeyError('gold')", "KeyError: 'gold'"),
    "none": ("def reward(sample): return None", "returned None where a finite number is needed"),
    "hangs": ("def reward(sample):\n    while True: pass", "took longer than 1 s and was killed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reward_stops_the_run_with_one_clear_error(start_run, tmp_path, name):
    source, reason = BROKEN[name]
    (tmp_path / "broken.py").write_text(f"from slime_core import hookimpl\n\n@hookimpl\n{source}\n")
    run = start_run("--reward", "./broken.py", "--reward-timeout-s", "1")
    code, output = run.finish()
    assert code == 1, output
    assert "Traceback" not in output
    assert "error: " in output and reason in output and "--max-reward-failure-rate 0.5" in output
    run.assert_nothing_left()


def test_a_busy_router_port_is_one_clear_error(start_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start_run("--router-port", str(port))
        code, output = run.finish()
    assert code == 1 and f"error: port {port} on 127.0.0.1 is in use" in output, output
    assert "Traceback" not in output
    run.assert_nothing_left()


def test_an_engine_that_cannot_load_the_model_shows_its_log(start_run, tmp_path, model_dir):
    broken = tmp_path / "broken_model"
    broken.mkdir()
    for path in model_dir.iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[:-50] if path.suffix == ".safetensors" else content)
    run = start_run("--model", str(broken))
    code, output = run.finish()
    assert code == 1, output
    assert "error: " in output and "Traceback (most recent call last)" not in output.split("error: ")[0]
    run.assert_nothing_left()


def test_a_malformed_row_stops_the_run_with_its_line(start_run, prompts):
    with prompts.open("a") as file:
        file.write('{"prompt": \n')
    run = start_run()
    code, output = run.finish()
    assert code == 1 and "prompts.jsonl, line 21: not valid JSON" in output, output
    assert "Traceback" not in output
    run.assert_nothing_left()


PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "slime-rm-evens"
version = "0.1"

[project.entry-points.slime]
evens_installed = "evens_installed"

[tool.setuptools]
py-modules = ["evens_installed"]
"""


def test_a_pip_installed_reward_from_outside_is_chosen_by_name(start_run, read_rows, tmp_path):
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "pyproject.toml").write_text(PYPROJECT)
    source = (tmp_path / "evens.py").read_text().replace("evens", "evens_installed").replace("--evens_", "--evens-")
    (package / "evens_installed.py").write_text(source.replace("--evens-installed_bonus", "--evens-installed-bonus"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            site,
            package,
        ],
        check=True,
        capture_output=True,
    )
    run = start_run("--reward", "evens_installed=2", "--num-rollout", "2", PYTHONPATH=str(site))
    code, output = run.finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert len(trained) == 2
    assert trained[0]["reward/mean"] == pytest.approx(2 * trained[0]["reward/evens_installed/mean"])


def test_dry_run_prints_options_and_plugins_and_starts_nothing(start_run, tmp_path):
    run = start_run("--dry-run")
    code, output = run.finish()
    assert code == 0
    assert "rollout-batch-size" in output and "evens  (" in output and "def reward(args, sample)" in output
    assert not Path(tmp_path / "runs").exists()


def test_a_round_is_generated_while_the_last_one_trains(start_run, read_rows, tmp_path, prompts):
    words = ["--max-staleness", "1", "--save-interval", "3", "--eval-interval", "1", "--num-rollout", "4"]
    run = start_run(*words, "--eval-data", f"heldout={prompts}")
    code, output = run.finish()
    assert code == 0, output
    run.assert_nothing_left()
    trained = rounds(read_rows())
    assert [row["rollout/staleness_max"] for row in trained] == [0, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in trained] == [0, 1, 1, 1]
    assert [row["step"] for row in read_rows() if "eval/heldout/mean" in row] == [0, 1, 2, 3, 4]
    again = start_run("--resume", "run", "--num-rollout", "6")
    code, output = again.finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert [row["step"] for row in trained] == list(range(6))
    assert [row["data/trained"] for row in trained] == [4 * (step + 1) for step in range(6)]
    assert all(row["data/drawn"] == row["data/trained"] + row["data/waiting"] for row in trained)
    evaluated = [row["step"] for row in read_rows() if "eval/heldout/mean" in row]
    assert evaluated == list(range(7)), "the weights that it resumed from are not evaluated again"


def test_partial_rollout_trains_tokens_of_two_versions(start_run, read_rows, tmp_path):
    """The engine runs 4 requests at once, 16 are asked for: each round leaves some in the middle of their tokens."""
    run = start_run(
        "--partial-rollout", "--max-staleness", "1", "--over-sampling-batch-size", "8", "--engine-max-requests", "16",
        "--max-response-tokens", "200", "--num-rollout", "5", "--save-samples", "--evens-bonus", "1",
        "--generate", "./uneven.py",
    )  # fmt: skip
    code, output = run.finish()
    assert code == 0, output
    run.assert_nothing_left()
    trained = rounds(read_rows())
    assert max(row["rollout/staleness_max"] for row in trained) == 1
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in trained if row["rollout/staleness_max"] == 0)
    assert all(row["data/drawn"] == row["data/trained"] + row["data/waiting"] for row in trained)
    versions = [
        set(sample.weight_versions.tolist())
        for path in sorted((tmp_path / "runs" / "run" / "samples").glob("*.parquet"))
        for group in read_groups(path)
        for sample in group
    ]
    assert any(len(made_by) == 2 for made_by in versions), "a response that two versions of the weights wrote"


SLOW_TOOL = """
import asyncio
from slime_core import hookimpl

@hookimpl
async def generate(engine, sample, sampling_params):
    sample.append_generation(await engine.generate(sample.tokens, sampling_params))
    await asyncio.sleep(5.0 * (sample.group_index % 4 == 0))
    return [sample]
"""


def test_trainers_look_at_finished_groups_while_others_generate(start_run, read_rows, tmp_path):
    (tmp_path / "slow_tool.py").write_text(SLOW_TOOL)
    run = start_run(
        "--generate", "./slow_tool.py", "--overlap-logprobs", "--kl-loss-coef", "0.1",
        "--num-steps-per-rollout", "2", "--num-trainers", "2",
    )  # fmt: skip
    code, output = run.finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert len(trained) == 3 and max(row["perf/early_logprob_fraction"] for row in trained) > 0.5
    assert all(abs(row["train/ppo_kl"]) < 1e-2 and row["train/logprob_abs_diff"] < 1e-4 for row in trained)


def test_rollouts_alone_and_then_training_alone(start_run, read_rows, tmp_path):
    only_rollouts = start_run("--num-trainers", "0", "--save-samples", "--num-rollout", "2")
    code, output = only_rollouts.finish()
    assert code == 0, output
    rows = read_rows()
    assert [row["step"] for row in rows if "reward/mean" in row] == [0, 1]
    assert not rounds(rows)
    samples = tmp_path / "runs" / "run" / "samples"
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "rollouts")
    samples = tmp_path / "runs" / "rollouts" / "samples"
    only_training = start_run(
        "--num-engines", "0", "--rollout", "replay", "--replay-samples", str(samples), "--num-rollout", "2"
    )
    code, output = only_training.finish()
    assert code == 0, output
    trained = rounds(read_rows())
    assert [row["reward/mean"] for row in trained] == [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert trained[0]["train/logprob_abs_diff"] < 1e-4


def test_an_async_plugin_that_never_awaits_is_named_and_the_run_ends(start_run, tmp_path):
    (tmp_path / "spins.py").write_text(
        "from slime_core import hookimpl\n@hookimpl\nasync def generate(sample):\n    while True: pass\n"
    )
    run = start_run("--generate", "./spins.py", "--stall-timeout-s", "15")
    code, output = run.finish()
    assert code == 1 and "Traceback" not in output
    assert "the rollout manager has not answered for" in output and "plugin 'spins'" in output
    run.assert_nothing_left()


def test_epochs_are_counted_in_rounds(start_run, read_rows):
    run = start_run("--num-epoch", "2", "--rollout-batch-size", "8", "--max-response-tokens", "2")
    code, output = run.finish()
    assert code == 0, output
    assert len(rounds(read_rows())) == 5, "2 passes over 20 prompts, 8 a round"


def test_an_external_engine_is_used_and_left_alone(start_run, read_rows, tmp_path, model_dir):
    args = make_options("--model", str(model_dir))
    server = EngineServer(args, 0, tmp_path / "engine", threads=1)
    try:
        url = server.start()
        run = start_run("--external-engines", url)
        code, output = run.finish()
        assert code == 0, output
        assert len(rounds(read_rows())) == 3
        run.assert_nothing_left()
        with urlopen(f"{url}/server_info") as answer:
            assert json.load(answer)["weight_version"] == "3"
    finally:
        server.stop()


def test_an_external_engine_that_is_not_there_is_one_clear_error(start_run):
    run = start_run("--external-engines", f"http://127.0.0.1:{free_port()}", "--engine-start-timeout-s", "2")
    code, output = run.finish()
    assert code == 1
    assert "was not healthy within 2 s" in output
    run.assert_nothing_left()
