"""One rank of test_ranks.py and its neighbours, run as a process of its own: `rank_worker.py JOB RANK`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meeting import meet
from safetensors.torch import save_file

from conftest import make_shard, random_samples
from slime_core.engines.checksum import model_checksums
from slime_core.options import parse
from slime_core.training.together import follow, leading
from slime_core.training.torch_backend.trainer import TorchTrainer

PROBE = list(range(60, 80))


def main() -> None:
    """Train this rank's share of every round and write its metrics and checksums."""
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    out = Path(sys.argv[1]).parent
    trainer = TorchTrainer(
        parse(job["flags"]).args,
        rank=rank,
        world_size=len(job["shares"][0]),
        master_address="127.0.0.1",
        master_port=meet(out / "port", rank),
        device="cpu",
    )
    metrics = []
    try:
        if "load" in job:
            trainer.load(Path(job["load"]))
        first = job.get("first", 0)
        for step, shares in enumerate(job["shares"], first):
            made = random_samples(job["num_samples"], seed=step)
            for sample in made:
                sample.rollout_index //= job.get("fan_out", 1)
            parts = shares[rank]
            mine = [made[row] for part in parts for row in part]
            ends = [sum(map(len, parts[: k + 1])) for k in range(len(parts))]
            metrics.append(trainer.train(step, make_shard(mine, made, ends)))
        trainer.save(out / "checkpoint")
        trainer.saved(wait=True)
        trainer.export(out / "model")
        tensors = {name: tensor.clone() for name, tensor in trainer.weights("float32")}
        save_file(tensors, out / f"weights_{rank}.safetensors")
        if rank:
            follow(trainer)
        else:
            with leading(trainer) as source:
                next(source.weights("float32"))  # and leave the others in the middle
                source.free_cache()
                told = {"dtype": source.dtype, "probe": source.prompt_logprobs(PROBE).tolist()}
            (out / "told.json").write_text(json.dumps(told))
        (out / f"rank_{rank}.json").write_text(json.dumps({"metrics": metrics, "checksums": model_checksums(tensors)}))
    except Exception as error:
        (out / f"rank_{rank}.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
