"""Write a model's checkpoint in block-wise FP8, for `--rollout-model`: the engines hold it, the trainer does not.

    python scripts/make_fp8.py --model MODEL --out DIR

Matrices of linear layers become FP8; embeddings, norms, the output head and routers of experts stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime_core.weights.fp8 import SCALE, quantise

BLOCK = (128, 128)
STAYS = re.compile(r"(embed|norm|lm_head|\.gate\.weight$|\.router\.)")


def main() -> None:
    """Copy the directory, its weights quantised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is not a model directory: it has no config.json")
    args.out.mkdir(parents=True)
    for path in args.model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
            shutil.copy(path, args.out)
    places: dict[str, str] = {}
    for path in sorted(args.model.glob("*.safetensors")):
        tensors = quantised(load_file(path))
        save_file(tensors, args.out / path.name, {"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
    if len(set(places.values())) > 1:
        index = {"metadata": {}, "weight_map": places}
        (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads((args.model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": sorted(
            name.removesuffix(".weight") for name in places if name.endswith(".weight") and name + SCALE not in places
        ),
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2))


def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file, and the scales of those that are FP8 now."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight") or STAYS.search(name):
            made[name] = tensor
        else:
            made[name], made[f"{name}{SCALE}"] = quantise(tensor, BLOCK)
    return made


if __name__ == "__main__":
    main()
