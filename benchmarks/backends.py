"""Tokens a second of the torch and the Megatron backend and of plain transformers, on the same batch in one run.

One process, one rank, fp32 on the CPU: a model of 5 million parameters takes one supervised step on 64 sequences of 32
to 256 tokens, half of them prompt. The plain side is what one writes by hand: right-padded rows with an attention mask
in micro-batches of the same sequences, logits everywhere, cross entropy, `torch.optim.AdamW`. The sides take turns, so
that a slow minute of the machine hits all; the first steps warm up. Ratios are medians over the steps; more is better.

    python -m benchmarks.backends [--quick]

Megatron comes with `pip install slime-core[megatron]`. The last line of the output is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slime_core.options import Options, parse
from slime_core.training.batch import micro_batches
from slime_core.training.megatron.device import prepare_megatron
from slime_core.types import Sample, Shard, TrainBatch

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
MAX_TOKENS = 4096
"""Of a micro-batch."""


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(directory)
        samples = make_samples(args.num_samples)
        sides = make_sides(Path(directory), samples)
        seconds = take_turns(sides, args.warmup, args.steps)
    num_tokens = sum(len(sample.tokens) for sample in samples)
    report = figures(seconds, num_tokens)
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps on a quarter of the batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every side (default: 1)")
    args = parser.parse_args()
    args.num_samples, args.warmup, args.steps = (16, 1, 3) if args.quick else (64, 2, 9)
    return args


def make_samples(count: int) -> list[Sample]:
    """Random sequences, half prompt and half answer."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        length = int(rng.integers(32, 257))
        tokens = rng.integers(0, MODEL["vocab_size"], length)
        sample = Sample(index=index, group_index=index, rollout_index=index)
        sample.tokens = tokens[: length // 2].astype(np.int32)
        sample.append(tokens[length // 2 :])
        made.append(sample)
    return made


def make_sides(model: Path, samples: list[Sample]) -> dict[str, Callable[[], None]]:
    """One training step of each side, by name."""
    prepare_megatron("cpu")
    from slime_core.training.megatron.trainer import MegatronTrainer
    from slime_core.training.torch_backend.trainer import TorchTrainer

    batch = TrainBatch.from_samples(samples)
    shard = Shard(batch, [len(samples)], batch.rewards, batch.group_index)
    sides: dict[str, Callable[[], None]] = {"transformers": plain_step(model, samples)}
    for backend, trainer_class in {"torch": TorchTrainer, "megatron": MegatronTrainer}.items():
        trainer = trainer_class(
            options(model, backend), rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu"
        )
        sides[backend] = lambda trainer=trainer: trainer.train(0, shard)  # type: ignore[misc]
    return sides


def options(model: Path, backend: str) -> Options:
    """The same for both backends."""
    words = ["--model", str(model), "--train-backend", backend, "--policy-loss", "sft", "--lr", "1e-4"]
    return parse([*words, "--max-tokens-per-gpu", str(MAX_TOKENS)]).args


def plain_step(directory: Path, samples: list[Sample]) -> Callable[[], None]:
    """A step on padded rows."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = np.array([len(sample.tokens) for sample in samples])
    total = sum(sample.response_length for sample in samples)

    def step() -> None:
        optimizer.zero_grad()
        for rows in micro_batches(lengths, np.arange(len(samples)), MAX_TOKENS):
            longest = int(lengths[rows].max())
            tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
            mask = torch.zeros(len(rows), longest, dtype=torch.int64)
            labels = torch.full((len(rows), longest), -100)
            for place, row in enumerate(rows):
                ids = torch.from_numpy(samples[row].tokens.astype(np.int64))
                tokens[place, : len(ids)] = ids
                mask[place, : len(ids)] = 1
                labels[place, samples[row].prompt_length : len(ids)] = ids[samples[row].prompt_length :]
            logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def take_turns(sides: dict[str, Callable[[], None]], warmup: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step of every side; who begins changes."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(warmup + steps):
        for name in order:
            began = time.perf_counter()
            sides[name]()
            took = time.perf_counter() - began
            if number >= warmup:
                seconds[name].append(took)
                print(f"{name:>12} {took:7.3f} s", flush=True)
        order.append(order.pop(0))
    return seconds


def figures(seconds: dict[str, list[float]], num_tokens: int) -> dict[str, float]:
    """Tokens a second, and ratios of the steps that stood side by side."""
    report = {f"{name}_tokens_per_s": round(num_tokens / statistics.median(took)) for name, took in seconds.items()}
    pairs = {"megatron_to_transformers": "transformers", "megatron_to_torch": "torch"}
    ratios = {
        name: statistics.median(other / own for own, other in zip(seconds["megatron"], seconds[side], strict=True))
        for name, side in pairs.items()
    }
    return report | {name: round(ratio, 3) for name, ratio in ratios.items()}


if __name__ == "__main__":
    main()
