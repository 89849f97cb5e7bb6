"""The update alone, at 5 M parameters and long-tailed lengths: slime's trainer against a plain loop of transformers.

Both train the same 64 samples with PPO's clipped loss and AdamW, one update, fp32. The plain loop pads every batch on
the right, asks the model for all logits and differentiates log_softmax; it is measured with all samples in one batch
and with batches of 8 in the order given, and its better time counts. Turns alternate, and all run in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_SAMPLES, PROMPT_TOKENS, LONGEST = 64, 24, 1000
PLAIN_BATCHES = (NUM_SAMPLES, 8)


def measure_update(directory: Path, rounds: int, threads: int, *, quick: bool = False) -> dict[str, Any]:
    """Tokens a second of both, medians of so many rounds, and their ratio.

    Args:
        directory: where the model is written.
        rounds: timed rounds of each; one more warms up.
        threads: torch's.
        quick: a far smaller model.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from slime_core.options import parse
    from slime_core.training.torch_backend.trainer import TorchTrainer
    from slime_core.types import Sample, Shard, TrainBatch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    width = 32 if quick else 256
    config = Qwen3Config(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = directory / "update_model"
    model.save_pretrained(path)

    rng = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, rng.lognormal(4.2, 1.0, NUM_SAMPLES)).astype(int) + 1
    if quick:
        lengths = np.minimum(lengths, 40)
    samples = []
    for index, length in enumerate(lengths.tolist()):
        sample = Sample(index=index, group_index=index // 8, rollout_index=index, reward=float(rng.integers(0, 2)))
        sample.tokens = rng.integers(0, 1024, PROMPT_TOKENS).astype(np.int32)
        sample.append(rng.integers(0, 1024, length), logprobs=np.full(length, -7.0))
        samples.append(sample)
    batch = TrainBatch.from_samples(samples)
    shard = Shard(batch, [NUM_SAMPLES], batch.rewards, batch.group_index)
    args = parse(["--model", str(path), "--lr", "1e-6", "--trainer-threads", str(threads)]).args
    ours = TorchTrainer(args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)

    sides: dict[str, Callable[[], None]] = {"slime": lambda: _discard(ours.train(0, shard))}
    for size in PLAIN_BATCHES:
        sides[f"plain_{size}"] = lambda size=size: _plain_update(model, optimizer, samples, size)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, update in sides.items():
            start = time.perf_counter()
            update()
            if number:
                seconds[name].append(time.perf_counter() - start)
    ours.close()

    tokens = int(batch.lengths.sum())
    speeds = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
    best = max(speed for name, speed in speeds.items() if name != "slime")
    return {
        "update_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "update_tokens": tokens,
        "update_longest": int(batch.lengths.max()),
        **{f"update_{name}_tokens_per_s": round(speed) for name, speed in speeds.items()},
        "update_ratio": round(speeds["slime"] / best, 2),
        "update_ratio_one_batch": round(speeds["slime"] / speeds[f"plain_{NUM_SAMPLES}"], 2),
    }


def _discard(metrics: dict[str, float]) -> None:
    if metrics["train/skipped_steps"]:
        raise RuntimeError("the update was skipped")


def _plain_update(model: Any, optimizer: Any, samples: list[Any], size: int) -> None:
    """One update as one writes it without a framework."""
    import torch

    rewards = torch.tensor([sample.reward for sample in samples]).view(-1, 8)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total = sum(sample.response_length for sample in samples)
    optimizer.zero_grad()
    for start in range(0, len(samples), size):
        some = samples[start : start + size]
        longest = max(len(sample.tokens) for sample in some)
        ids = torch.zeros(len(some), longest, dtype=torch.int64)
        attention, trained = torch.zeros_like(ids), torch.zeros(len(some), longest - 1)
        for row, sample in enumerate(some):
            ids[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens.astype(np.int64))
            attention[row, : len(sample.tokens)] = 1
            trained[row, sample.prompt_length - 1 : len(sample.tokens) - 1] = 1.0
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio, weight = torch.exp(logprobs - logprobs.detach()), advantages[start : start + size, None]
        losses = -torch.minimum(weight * ratio, weight * ratio.clamp(0.8, 1.2))
        ((losses * trained).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
