"""Peak memory of log-probabilities and entropy over a large vocabulary, beyond their inputs and these' gradients.

    python -m benchmarks.loss_memory [--tokens N] [--vocab N] [--hidden N] [--quick]

A process of its own makes hidden states [tokens, hidden] and an output layer [vocab, hidden], both with gradients that
exist already, then runs `head_logprobs` forward and backward. What its resident set grew by at the peak is compared
with what the logits alone would take. The last line of the output is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure in a fresh process, or be that process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="response tokens (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few tokens: does it run")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.tokens = 2048
    if args.measure:
        print(json.dumps(measure(args.tokens, args.vocab, args.hidden)))
        return
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocab", "hidden")]
    command = [sys.executable, "-m", "benchmarks.loss_memory", *sizes, "--measure"]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def measure(tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Bytes at the peak beyond inputs and gradients, and seconds."""
    import torch

    from slime_core.training.logprobs import head_logprobs

    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    states.grad, head.weight.grad = torch.ones_like(states), torch.ones_like(head.weight)
    # threads and buffers of the matrix library are there before the peak is measured
    sum(head_logprobs(states[:64], head, targets[:64], 1.0, vocab_size=vocab)).sum().backward()  # type: ignore[union-attr]
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    logprobs, entropy = head_logprobs(states, head, targets, 1.0, vocab_size=vocab)
    (logprobs.mean() + 0.01 * entropy.mean()).backward()
    elapsed = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "tokens": tokens,
        "vocab": vocab,
        "hidden": hidden,
        "peak_gb": round((peak - before) / 1e9, 3),
        "full_logits_gb": round(4e-9 * tokens * vocab, 2),
        "ratio": round((peak - before) / (4 * tokens * vocab), 4),
        "seconds": round(elapsed, 1),
    }


if __name__ == "__main__":
    main()
