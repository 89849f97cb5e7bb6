"""The command line: quick to start, one sentence for a mistake."""

import os
import resource
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())"]


def cpu_s(*command: str) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", [["--help"], ["new-plugin", "--help"], ["plugins", "check", "--help"]])
def test_help_takes_little_cpu(words):
    """Less than half a second, or six times what Python itself takes where the machine is slow for the moment."""
    for _ in range(5):
        bare = cpu_s(sys.executable, "-c", "import argparse, asyncio, json")
        taken = cpu_s(*COMMAND, *words)
        if taken < max(0.5, 6 * bare):
            break
    assert taken < max(0.5, 6 * bare)


def test_help_names_every_command():
    shown = subprocess.check_output([*COMMAND, "--help"], text=True)
    for command in ("train", "score", "plugins", "new-plugin", "hooks", "flags"):
        assert f"\n    {command}" in shown


def test_a_dry_run_prints_the_command_of_every_server(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = [*COMMAND, "train", "--dry-run", "--model", str(tmp_path), "--engine", "sglang", "--num-engines", "2"]
    words += ["--num-gpus-per-engine", "16"]
    shown = subprocess.check_output([*words, "--num-nodes-per-engine", "2"], text=True)
    lines = [line for line in shown.splitlines() if "sglang.launch_server" in line]
    assert [line.split(":")[0] for line in lines] == [
        f"engine {index}, machine {rank} (16 GPUs)" for index in range(2) for rank in range(2)
    ]
    assert "--tp-size 16 --nnodes 2 --node-rank 1 --dist-init-addr HOST:PORT" in lines[1]
    shown = subprocess.check_output([*words, "--frozen-model", f"judge={tmp_path}"], text=True)
    assert "judge 0 (16 GPUs): " in shown
    refused = subprocess.run([*words, "--sglang-tp-size", "8"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "--num-gpus-per-engine 16 does not go with" in refused.stderr


@pytest.mark.parametrize("given", ["flag", "file", "variable"])
def test_a_dry_run_shows_no_secret(tmp_path, given):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text("""engine-env = ["A=hunter2", "B=it's hunter2 'too'", "AA=hunter2-hunter"]""")
    words = [*COMMAND, "train", "--dry-run", "--model", str(tmp_path)]
    more = {
        "flag": ["--engine-env", "A=hunter2", "B=it's hunter2 'too'", "AA=hunter2-hunter"],
        "file": ["--config", str(tmp_path / "run.toml")],
        "variable": [],
    }
    environment = {"SLIME_ENGINE_ENV": "[A=hunter2, AA=hunter2-hunter]"} if given == "variable" else {}
    shown = subprocess.check_output([*words, *more[given]], text=True, env={**os.environ, **environment})
    assert "A=***" in shown and "AA=***" in shown and "hunter" not in shown
