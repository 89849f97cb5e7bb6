"""The run files in scripts/ go with the models they are for: `slime train --dry-run` takes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}


def dry_run(file, model, directory):
    (directory / "config.json").write_text(json.dumps(model))
    (directory / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    words = ["--config", str(SCRIPTS / file), "--model", str(directory), "--dry-run"]
    words += ["--prompt-data", str(directory / "prompts.jsonl")]
    code = "from slime_core.cli import main; raise SystemExit(main())"
    return subprocess.run([sys.executable, "-c", code, "train", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("file", "model"), [("qwen3_4b_8gpus.toml", QWEN3_4B), ("qwen3_30b_a3b_4nodes.toml", QWEN3_30B_A3B)]
)
def test_a_run_file_fits_its_model(file, model, tmp_path):
    done = dry_run(file, model, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train-backend" in done.stdout


def test_a_run_file_does_not_fit_another_model(tmp_path):
    done = dry_run("qwen3_30b_a3b_4nodes.toml", QWEN3_4B, tmp_path)
    assert done.returncode == 1
    assert "--expert-model-parallel-size is for models with experts" in done.stderr
