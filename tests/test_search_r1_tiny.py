"""The miniature of scripts/search_r1_tiny.sh: a tiny model learns to search, and is right more often."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
SLIME = [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reward_and_searching_climb(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "make_search_r1_tiny.py", "--out", tmp_path, "--seed", "7"], check=True)

    def train(name, *flags):
        command = [*SLIME, "train", "--runs-dir", tmp_path / "runs", "--run-name", name, "--seed", "7", *flags]
        subprocess.run([str(word) for word in command], check=True)
        rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row) for row in rows]

    train(
        *("warmup", "--config", SCRIPTS / "search_r1_tiny_warmup.toml", "--model", tmp_path / "model"),
        *("--prompt-data", tmp_path / "demonstrations.jsonl"),
    )
    rows = train(
        *("search", "--config", SCRIPTS / "search_r1_tiny.toml"),
        *("--model", tmp_path / "runs" / "warmup" / "checkpoints" / "latest" / "model"),
        *("--search-r1-corpus", tmp_path / "corpus.jsonl", "--prompt-data", tmp_path / "train.jsonl"),
        *("--eval-data", f"heldout={tmp_path / 'heldout.jsonl'}"),
    )
    rounds = [row for row in rows if "reward/mean" in row]
    for metric in ("reward/mean", "rollout/tool_use_fraction"):
        first, last = (fmean(row[metric] for row in part) for part in (rounds[:5], rounds[-5:]))
        assert first < 0.55 and last > 0.85, metric
    held_out = [row["eval/heldout/mean"] for row in rows if "eval/heldout/mean" in row]
    assert held_out[0] < 0.55 and held_out[-1] > 0.8
    assert all(row["rollout/failed_tool_calls"] == 0 for row in rounds)
