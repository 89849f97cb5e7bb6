"""One rank of the tests in this directory, run as a process of its own: `rank_worker.py JOB RANK`.

A job lists cases, which run one after the other in the same processes; what a case does is its `do`, a function here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from slime_core.options import parse
from slime_core.training.megatron.device import prepare_megatron

prepare_megatron("cpu")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from meeting import meet  # noqa: E402

from conftest import make_shard, random_samples  # noqa: E402
from slime_core.training.megatron.loss import vocab_parallel_logprobs  # noqa: E402
from slime_core.training.megatron.trainer import MegatronTrainer  # noqa: E402


def main() -> None:
    """Run every case and write what it found, or its error, to `CASE_rankR.json`.

    A case that one rank does alone, while the other does the next, is of a world of its own.
    """
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    for case in job["cases"]:
        alone = case.get("alone")
        if alone not in (None, rank):
            continue
        began = time.monotonic()
        out = path.parent / f"{case['name']}_rank{rank if alone is None else 0}"
        where = (0, 1, 0)
        if alone is None:
            where = (rank, job["size"], meet(path.parent / f"{case['name']}.port", rank))
        found = run_case(case, *where, out)
        out.with_suffix(".json").write_text(json.dumps(found))
        print(f"{case['name']}: {time.monotonic() - began:.1f} s", flush=True)
        if "error" in found and not case.get("fails"):
            os._exit(1)  # not sys.exit, in which gloo may wait for the other rank


def run_case(case: dict[str, Any], rank: int, size: int, port: int, out: Path) -> dict[str, Any]:
    """Make the trainer of a case and do what it says; what it found, or its error."""
    trainer = None
    try:
        trainer = MegatronTrainer(
            parse(case["flags"]).args,
            rank=rank,
            world_size=size,
            master_address="127.0.0.1",
            master_port=port,
            device="cpu",
        )
        found = ACTIONS[case.get("do", "train")](trainer, case, out)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        if not case.get("fails"):
            return found
    if trainer is not None:
        trainer.close()
    return found


def train(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train rounds; write metrics, weights and a prompt's log-probabilities."""
    metrics = rounds(trainer, case)
    keep_weights(trainer, out)
    return {"metrics": metrics, "prompt": trainer.prompt_logprobs(list(range(1, 12))).tolist()}


def rounds(trainer: MegatronTrainer, case: dict[str, Any], first: int = 0) -> list[dict[str, float]]:
    """The metrics of `rounds` rounds, whose samples are dealt out to the data-parallel ranks."""
    metrics = []
    for step in range(first, first + case["rounds"]):
        made = random_samples(case["num_samples"], seed=step)
        size = len(made) // case.get("steps", 1)
        parts = [mine(made[start : start + size], case) for start in range(0, len(made), size)]
        ends = [sum(map(len, parts[: k + 1])) for k in range(len(parts))]
        metrics.append(trainer.train(step, make_shard([s for part in parts for s in part], made, ends)))
    return metrics


def mine(samples: list[Any], case: dict[str, Any]) -> list[Any]:
    """This rank's share of a step."""
    share, of = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if case.get("only_first_has_samples"):
        return [] if share else samples
    return samples[share::of]


def keep_weights(trainer: MegatronTrainer, out: Path) -> None:
    """Write the whole model, as this rank sees it."""
    save_file({name: tensor.clone() for name, tensor in trainer.weights("float32")}, out.with_suffix(".safetensors"))


def watch_experts(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train; how many tokens went to each set of experts of a layer, without gradient (before the updates) and with."""
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    routers = [module for module in trainer._policy.bare.modules() if isinstance(module, TopKRouter)]
    for number, router in enumerate(routers):

        def note(module: Any, given: Any, chosen: Any, number: int = number) -> None:
            maps = chosen[1].tolist()
            seen[torch.is_grad_enabled()].update(
                f"{number}: {[n for n, sent in enumerate(row) if sent]}" for row in maps
            )

        router.register_forward_hook(note)
    rounds(trainer, case)
    return {"before": seen[False], "updates": seen[True]}


def train_and_save(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train, save, note the weights, and go on for a round."""
    rounds(trainer, case)
    trainer.save(Path(case["checkpoint"]))
    trainer.export(Path(case["checkpoint"]) / "model")
    return go_on(trainer, case, out)


def save_load_train(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Save before the first update, load that, train."""
    trainer.save(Path(case["checkpoint"]))
    trainer.load(Path(case["checkpoint"]))
    return {"metrics": rounds(trainer, case)}


def load_and_train(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Resume from a checkpoint, note the weights, and go on for a round."""
    trainer.load(Path(case["checkpoint"]))
    return go_on(trainer, case, out)


def go_back(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train, save, go on for two rounds; resume and go on for the same rounds."""
    rounds(trainer, case)
    trainer.save(Path(case["checkpoint"]))
    two = {**case, "rounds": 2}
    unbroken = rounds(trainer, two, first=case["rounds"])
    trainer.load(Path(case["checkpoint"]))
    return {"unbroken": unbroken, "resumed": rounds(trainer, two, first=case["rounds"])}


def load(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Resume from a checkpoint, and nothing more."""
    trainer.load(Path(case["checkpoint"]))
    return {}


def go_on(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """One more round; the weights before and after it, and how many updates each parameter counts."""
    keep_weights(trainer, out.with_name(f"{out.name}_before"))
    metrics = rounds(trainer, {**case, "rounds": 1}, first=case["rounds"])
    keep_weights(trainer, out)
    counted = {
        moments["step"].item()
        for part in trainer.optimizer.megatron.chained_optimizers
        for moments in part.optimizer.state.values()
    }
    return {"metrics": metrics, "optimizer_steps": sorted(counted)}


def vocab_loss(trainer: MegatronTrainer, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Log-probabilities, entropy and their gradient for this rank's half of random logits."""
    vocab, count = case["vocab"], case["num_rows"]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(count, vocab, generator=generator, dtype=torch.float64).mul(5).float()
    targets = torch.randint(0, vocab, (count,), generator=generator)
    group = parallel_state.get_tensor_model_parallel_group()
    padded = torch.cat([whole, torch.full((count, -vocab % 2), 9.0)], 1)
    logits = padded.chunk(2, 1)[group.rank()].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, 0.7, group, vocab)
    weights = torch.linspace(-1, 2, count)
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()
    return {
        "logprobs": logprobs.tolist(),
        "entropy": entropy.tolist(),
        "gradient": logits.grad.tolist(),
        "unchanged": torch.equal(logits.detach(), padded.chunk(2, 1)[group.rank()]),
    }


ACTIONS = {
    "train": train,
    "watch_experts": watch_experts,
    "train_and_save": train_and_save,
    "load_and_train": load_and_train,
    "go_back": go_back,
    "load": load,
    "save_load_train": save_load_train,
    "vocab_loss": vocab_loss,
}


if __name__ == "__main__":
    main()
