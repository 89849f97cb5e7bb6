"""Peak memory of log-probabilities and entropy over a large vocabulary, beyond their inputs and these' gradients.

    python -m benchmarks.loss_memory [--tokens N] [--vocab N] [--hidden N] [--max-logits N] [--quick]

A process of its own makes hidden states [tokens, hidden] and an output layer [vocab, hidden], both with gradients that
exist already, then runs `head_logprobs` forward and backward. What its resident set grew by at the peak is compared
with what the logits alone would take (Linux). The last line of the output is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from slime_core.training.head_logprobs import head_logprobs
from slime_core.training.logprobs import MAX_LOGITS

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure in a fresh process, or be that process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="response tokens (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (default: %(default)s)")
    parser.add_argument("--max-logits", type=int, default=MAX_LOGITS, help="numbers of a chunk (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few tokens: does it run")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.tokens = 2048
    if args.measure:
        print(json.dumps(measure(args.tokens, args.vocab, args.hidden, args.max_logits)))
        return
    given = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden, "max-logits": args.max_logits}
    sizes = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "benchmarks.loss_memory", *sizes, "--measure"]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def measure(tokens: int, vocab: int, hidden: int, max_logits: int) -> dict[str, float]:
    """Bytes at the peak beyond inputs and gradients, and seconds."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    states.grad, head.weight.grad = torch.ones_like(states), torch.ones_like(head.weight)
    # threads and buffers of the matrix library are there before the peak is measured
    sum(head_logprobs(states[:64], head, targets[:64], 1.0, vocab_size=vocab)).sum().backward()  # type: ignore[union-attr]
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    logprobs, entropy = head_logprobs(states, head, targets, 1.0, vocab_size=vocab, max_logits=max_logits)
    (logprobs.mean() + 0.01 * entropy.mean()).backward()
    elapsed = time.perf_counter() - start
    peak = peak_bytes()
    return {
        "tokens": tokens,
        "vocab": vocab,
        "hidden": hidden,
        "peak_gb": round((peak - before) / 1e9, 3),
        "full_logits_gb": round(4e-9 * tokens * vocab, 2),
        "ratio": round((peak - before) / (4 * tokens * vocab), 4),
        "seconds": round(elapsed, 1),
    }


def peak_bytes() -> int:
    """Largest resident set of this process; `ru_maxrss` would count that of the process it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


if __name__ == "__main__":
    main()
