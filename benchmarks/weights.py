"""Speed of the ways that weights take from a trainer to an engine, as ratios to a plain copy measured in one run.

A model of random weights (0.63 GB unless told otherwise) is sent again and again, by one transport after the other, to
an engine server on this machine: the embedded engine and, with `--sglang-python`, real SGLang, the only one that takes
tensors. Two things are timed:

- the transport alone (`X_ratio`): from the trainer's tensors to the engine's, as a run does it but for the checksums;
- the whole update as a run pays for it (`X_update_ratio`): checksums on both sides, pausing, flushing, moving.
  `X_paused_s` is the time in which the engine stands still. SGLang is asked for checksums at intervals only: not here.

Both as bytes per second over those of `copy`: `copy_` of the same tensors, by as many threads, into tensors of this
process that exist already. (`clone_gb_per_s`, a copy into new memory, is slower by what the kernel takes for it.) Of
every number the best of the rounds counts, on both sides: what other programs take is no transport's.

    python -m benchmarks.weights [--quick]
        [--sglang-python .venv-sglang/bin/python --sglang-env PYTHONPATH=$PWD/tests/real_sglang/shim]

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

from benchmarks.byte_tokenizer import byte_tokenizer
from slime_core.engines.admin import EngineAdmin
from slime_core.engines.server import EngineServer
from slime_core.options import Options, parse
from slime_core.weights.source import Update
from slime_core.weights.sync import WeightSync

VOCAB_SIZE = 32_000
GIGABYTE = 1e9
TIMEOUT_S = 600.0
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
    """A Qwen3 with random weights, and a tokenizer, which SGLang wants for the prompt that it warms up with."""
    byte_tokenizer(eos_token="<e>").save_pretrained(directory)
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
        words.append("--sglang-sleep-on-idle")  # else it takes a whole core while it waits
        environment = ["SGLANG_USE_CPU_ENGINE=1", *args.sglang_env]
        cases.append(("sglang_", ["disk", "broadcast", "tensor"], ["--engine-env", *environment, *words]))
    for prefix, transports, words in cases:
        common = ["--model", str(model), "--weights-check-interval", "1000000", "--engine-max-requests", "64", *words]
        logs = directory / f"{prefix}logs"
        server = EngineServer(options(common, transports[0]), 0, logs, args.threads)
        try:
            url = server.start()
            syncs = {name: WeightSync(options(common, name), [url], directory) for name in transports}
            report |= {
                prefix + key: value for key, value in asyncio.run(rounds(syncs, url, source, args.rounds)).items()
            }
        finally:
            server.stop()
    return report


def options(words: list[str], transport: str) -> Options:
    """Of a run with this transport."""
    return parse([*words, "--weight-transport", transport]).args


async def rounds(syncs: dict[str, WeightSync], url: str, source: Source, num_rounds: int) -> dict[str, float]:
    """Updates in turns, copies between them; the first two of each transport, which set things up, do not count."""
    times: dict[str, list[float]] = {}
    existing = [tensor.clone() for tensor in source.tensors.values()]
    # one way after the other: a file that changes its size is written anew
    for whole in (True, False):
        for turn in range(num_rounds + 2):
            for name, sync in syncs.items():
                found = {"copy_s": seconds(lambda: copy_over(source, existing))}
                if whole:
                    metrics = await sync.send(source, turn)
                    found[f"{name}_update_s"] = metrics["perf/weights_s"]
                    found[f"{name}_paused_s"] = metrics["perf/engines_paused_s"]
                else:
                    found[f"{name}_s"] = await alone(sync, url, source, turn)
                    found["clone_s"] = seconds(lambda: [tensor.clone() for tensor in source.tensors.values()])
                for key, value in found.items() if turn > 1 else ():
                    times.setdefault(key, []).append(value)
    for sync in syncs.values():
        sync.close()
    best = {key: min(values) for key, values in times.items()}
    size, copy = source.num_bytes / GIGABYTE, best["copy_s"]
    report = {"copy_gb_per_s": size / copy, "clone_gb_per_s": size / best["clone_s"]}
    for name in syncs:
        report |= {
            f"{name}_gb_per_s": size / best[f"{name}_s"],
            f"{name}_ratio": copy / best[f"{name}_s"],
            f"{name}_update_ratio": copy / best[f"{name}_update_s"],
            f"{name}_update_s": best[f"{name}_update_s"],
            f"{name}_paused_s": best[f"{name}_paused_s"],
        }
    print({key: round(value, 3) for key, value in report.items()}, file=sys.stderr)
    return report


async def alone(sync: WeightSync, url: str, source: Source, version: int) -> float:
    """Seconds of the transport by itself, from the first byte it writes to the last that the engine uses.

    As in a run the engine pauses only when all is prepared: an SGLang that is paused never sleeps.
    """
    update = Update(version, lambda: source.weights(source.dtype), {})
    async with EngineAdmin([url], TIMEOUT_S) as admin:
        started = time.perf_counter()
        async with sync.transport.offer(admin, update) as deliver:
            prepared = time.perf_counter()
            await admin.pause("retract")
            paused = time.perf_counter()
            await deliver()
        taken = time.perf_counter() - paused + prepared - started
        await admin.resume()
    return taken


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
