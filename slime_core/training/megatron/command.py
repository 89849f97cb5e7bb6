"""`slime convert`: a model between Hugging Face's format and Megatron's torch_dist, by one process on the CPU."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch

from slime_core.errors import OptionError
from slime_core.options import Options, parse
from slime_core.training.megatron.config import check_backend
from slime_core.training.megatron.device import prepare_megatron
from slime_core.training.model_files import TRAINER


def convert(source: Path, target: Path, to: str) -> None:
    """Write the model of `source` to `target`, in the dtype that its config.json names.

    Both have config.json and the tokenizer's files beside the weights; of a run's checkpoint, `trainer/` has them.

    Raises:
        OptionError: when the source is not of the other format, or the target exists.
        CheckpointError: when the source's tensors do not fit its configuration.
    """
    if to == "hf" and (source / TRAINER).is_dir():
        source = source / TRAINER
    if not (source / "config.json").is_file():
        form = "a model directory" if to == "torch_dist" else "a checkpoint of a Megatron run"
        raise OptionError(f"{source} is not {form}: it has no config.json.")
    if target.exists():
        raise OptionError(f"{target} exists; name a new directory.")
    args = _options(source)
    check_backend(args)
    warnings.simplefilter("ignore")  # of Megatron, at every load and save
    prepare_megatron("cpu")
    from slime_core.training.megatron import checkpoint
    from slime_core.training.megatron.convert import load_weights, named_weights, weight_map
    from slime_core.training.megatron.hugging_face import save_hugging_face
    from slime_core.training.megatron.model import build_model
    from slime_core.training.megatron.ranks import MegatronRanks

    ranks = MegatronRanks.join(args, 0, 1, address="127.0.0.1", port=0, device=torch.device("cpu"))
    try:
        model = build_model(args, str(source), torch.device("cpu"))
        if to == "torch_dist":
            load_weights(model, source)
            checkpoint.save(checkpoint.State(model), ranks.world, source, target)
        else:
            checkpoint.load(checkpoint.State(model), source)
            weights = named_weights(model, weight_map(model, ranks.world), model.config.params_dtype)
            save_hugging_face(weights, source, target, writes=True)
    finally:
        ranks.leave()


def _options(directory: Path) -> Options:
    config = json.loads((directory / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return parse(["--model", str(directory), "--train-backend", "megatron", "--dtype", dtype]).args
