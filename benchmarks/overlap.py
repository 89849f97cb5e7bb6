"""What --overlap-logprobs saves: rounds of `slime train` with and without it, in turns, as ratios.

    python -m benchmarks.overlap [--quick] [--rounds N] [--token-ms X]

A generator stands in for engines on devices of their own: it answers with random tokens of long-tailed lengths after so
many milliseconds a token, and costs no CPU. Everything else is real: Ray, the rollout manager, the trainer (5 M
parameters, a reference, four optimiser steps a round), the weight sync. The trainer has nothing to do until the last
answer is in; with the flag it computes reference and old log-probabilities of finished groups meanwhile. The last line
of the output is one line of JSON; ratios are without over with, so more is better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from slime_core import Sample, Status, hookimpl

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY, LONGEST = 288, 400


# --- the plugins that stand in ----------------------------------------------------------------------------------------
@hookimpl
def add_options(parser: argparse._ArgumentGroup) -> None:
    """How slow the engines are."""
    parser.add_argument("--overlap-token-ms", type=float, default=5.0, help="milliseconds a token")


@hookimpl
async def generate(args: argparse.Namespace, sample: Sample) -> list[Sample]:
    """Random tokens behind a prompt of eight, after the time that an engine would take."""
    rng = np.random.default_rng(sample.index)
    sample.tokens = rng.integers(0, VOCABULARY - 2, 8).astype(np.int32)
    count = int(min(LONGEST, rng.lognormal(4.0, 1.0))) + 1
    await asyncio.sleep(count * args.overlap_token_ms / 1000)
    sample.append(rng.integers(0, VOCABULARY - 2, count), logprobs=np.full(count, -5.6), weight_version=0)
    sample.status = Status.COMPLETED
    return [sample]


@hookimpl
def reward(sample: Sample) -> float:
    """Something with differences within groups."""
    return float(sample.index % 2)


# --- the comparison ---------------------------------------------------------------------------------------------------
def main() -> None:
    """Run both kinds in turns and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it run, not how fast")
    parser.add_argument("--rounds", type=int, default=8, help="rounds a run; the first is left out (default: 8)")
    parser.add_argument("--token-ms", type=float, default=12.0, help="what a token takes (default: %(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.token_ms = 2, 2.0
    rows: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write_model(directory / "model", width=32 if args.quick else 256)
        for turn in range(1 if args.quick else 2):
            for kind in rows:
                rows[kind] += _run(args, directory, f"{kind}_{turn}", kind == "with")[1:]
    print(json.dumps(report(rows)))


def report(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of both kinds and what the flag gains."""
    figures: dict[str, Any] = {"benchmark": "overlap"}
    for name in ("perf/step_s", "perf/rollout_s", "perf/train_s"):
        medians = {kind: statistics.median(row[name] for row in some) for kind, some in rows.items()}
        short = name.removeprefix("perf/").removesuffix("_s")
        figures |= {f"{short}_{kind}_s": round(value, 3) for kind, value in medians.items()}
        figures[f"{short}_ratio"] = round(medians["without"] / medians["with"], 3)
    figures["early_fraction"] = round(statistics.median(row["perf/early_logprob_fraction"] for row in rows["with"]), 3)
    return figures


def _run(args: argparse.Namespace, directory: Path, name: str, overlap: bool) -> list[dict[str, float]]:
    """The rows of one run."""
    words = ["--model", str(directory / "model"), "--generate", "benchmarks.overlap", "--reward", "benchmarks.overlap"]
    words += ["--overlap-token-ms", str(args.token_ms), "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"]
    words += ["--num-steps-per-rollout", "4", "--kl-loss-coef", "0.01", "--num-rollout", str(args.rounds), "--no-save"]
    words += ["--runs-dir", str(directory / "runs"), "--run-name", name, *["--overlap-logprobs"] * overlap]
    done = subprocess.run(
        [sys.executable, "-m", "slime_core.cli", "train", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"slime train failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def _write_model(directory: Path, width: int) -> None:
    """A Qwen3 of 5 M parameters at width 256, and a tokenizer of one token a byte."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.byte_tokenizer import byte_tokenizer

    byte_tokenizer(eos_token="<eos>", pad_token="<pad>").save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=256, bos_token_id=None, pad_token_id=257,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
