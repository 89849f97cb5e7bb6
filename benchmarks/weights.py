"""Speed of the ways that weights take from a trainer to an engine, as ratios to a plain copy measured in one run.

A model of random weights (0.63 GB unless told otherwise) is sent again and again, by one transport after the other, to
an engine server on this machine: the embedded engine and, with `--sglang-python`, real SGLang, the only one that takes
tensors. What counts is the whole update as a run pays for it: preparing, pausing, moving, swapping in, comparing
checksums, going on. Between two updates the same tensors are copied within this process:

- copy: `clone()` of every tensor, a copy of the model in new memory;
- copy_over: `copy_` into tensors that exist, which leaves out what the kernel takes for new memory.

Of every number the best of the rounds counts, on both sides: what other programs take is no transport's. `X_ratio` is
the transport's bytes per second over the copy's, `X_ratio_over` over copy_over's, `X_paused_s` the time in which the
engine stands still. SGLang's checksums are left out: it is asked for them at intervals only.

    python -m benchmarks.weights [--quick] [--sglang-python .venv-sglang/bin/python]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slime_core.engines.server import EngineServer
from slime_core.options import Options, parse
from slime_core.weights.sync import WeightSync

VOCAB_SIZE = 32_000
GIGABYTE = 1e9
SGLANG_CPU = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": "0.3",
    "max-total-tokens": "20000",
}


class Source:
    """A trainer that does nothing but have weights."""

    vocab_size = VOCAB_SIZE

    def __init__(self, directory: Path, dtype: str) -> None:
        self.dtype = dtype
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        state = self._model.state_dict()
        self.tensors = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def weights(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, cast if need be."""
        for name, tensor in self.tensors.items():
            yield name, tensor.to(getattr(torch, dtype))

    def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Of a prompt's tokens but the first."""
        with torch.no_grad():
            logits = self._model(torch.tensor([list(tokens)])).logits[0].float()
        targets = torch.tensor(list(tokens))[1:, None]
        found: np.ndarray = logits.log_softmax(-1)[:-1].gather(-1, targets)[:, 0].numpy()
        return found


def main() -> None:
    """Run the benchmark and print its report."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", args)
        report = measure(args, model, Path(directory))
    print(json.dumps(report))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, two rounds: does it run, not how fast")
    add("--layers", type=int, default=8, help="each of 51 MB in float32, beside 131 MB of vocabulary (default: 8)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights (default: %(default)s)")
    add("--rounds", type=int, default=7, help="updates of each transport (default: %(default)s)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add("--threads", type=int, default=cores, help="torch's threads on both sides (default: all cores)")
    add("--sglang-python", metavar="PATH", help="Python of an environment with SGLang for CPU")
    add("--sglang-env", nargs="*", default=[], metavar="NAME=VALUE", help="set for SGLang")
    args = parser.parse_args(argv)
    if args.quick:
        args.layers, args.rounds = 1, 2
    return args


def write_model(directory: Path, args: argparse.Namespace) -> Path:
    """A Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(directory)
    return directory


def measure(args: argparse.Namespace, model: Path, directory: Path) -> dict[str, object]:
    """Every engine with every transport that it takes."""
    source = Source(model, args.dtype)
    report: dict[str, object] = {
        "benchmark": "weights",
        "cpus": os.cpu_count(),
        "threads": args.threads,
        "dtype": args.dtype,
        "model_gb": source.num_bytes / GIGABYTE,
        "rounds": args.rounds,
    }
    cases: list[tuple[str, list[str], list[str]]] = [
        ("", ["disk", "broadcast"], ["--engine-dtype", args.dtype]),
    ]
    if args.sglang_python:
        words = ["--engine", "sglang", "--engine-python", args.sglang_python, "--sglang-dtype", args.dtype]
        words += [word for name, value in SGLANG_CPU.items() for word in (f"--sglang-{name}", value)]
        environment = ["SGLANG_USE_CPU_ENGINE=1", *args.sglang_env]
        cases.append(("sglang_", ["disk", "broadcast", "tensor"], ["--engine-env", *environment, *words]))
    for prefix, transports, words in cases:
        common = ["--model", str(model), "--weights-check-interval", "1000000", "--max-context-tokens", "512", *words]
        logs = directory / f"{prefix}logs"
        server = EngineServer(options(common, transports[0]), 0, logs, args.threads)
        try:
            url = server.start()
            syncs = {name: WeightSync(options(common, name), [url], directory) for name in transports}
            report |= {prefix + key: value for key, value in asyncio.run(rounds(syncs, source, args.rounds)).items()}
        finally:
            server.stop()
    return report


def options(words: list[str], transport: str) -> Options:
    """Of a run with this transport."""
    return parse([*words, "--weight-transport", transport]).args


async def rounds(syncs: dict[str, WeightSync], source: Source, num_rounds: int) -> dict[str, float]:
    """Updates in turns, copies between them; the first of each transport, which sets things up, does not count."""
    copy_s: list[float] = []
    over_s: list[float] = []
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in syncs}
    existing = [tensor.clone() for tensor in source.tensors.values()]
    for turn in range(num_rounds + 1):
        for name, sync in syncs.items():
            metrics = await sync.send(source, turn)
            taken[name] += [metrics] if turn else []
            over_s.append(seconds(lambda: copy_over(source, existing)))
            copy_s.append(seconds(lambda: [tensor.clone() for tensor in source.tensors.values()]))
    for sync in syncs.values():
        sync.close()
    size, copy, over = source.num_bytes / GIGABYTE, min(copy_s), min(over_s)
    report = {"copy_gb_per_s": size / copy, "copy_over_gb_per_s": size / over}
    for name, metrics_of in taken.items():
        whole = min(metrics["perf/weights_s"] for metrics in metrics_of)
        paused = min(metrics["perf/engines_paused_s"] for metrics in metrics_of)
        report |= {
            f"{name}_gb_per_s": size / whole,
            f"{name}_ratio": copy / whole,
            f"{name}_ratio_over": over / whole,
            f"{name}_paused_s": paused,
            f"{name}_update_s": whole,
        }
    print({key: round(value, 3) for key, value in report.items()}, file=sys.stderr)
    return report


def copy_over(source: Source, existing: list[torch.Tensor]) -> None:
    """Copy every tensor into one that exists."""
    for target, tensor in zip(existing, source.tensors.values(), strict=True):
        target.copy_(tensor)


def seconds(act: Callable[[], object]) -> float:
    """What a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
