"""Weights for engines that hold a block-wise FP8 checkpoint, quantised on the way from the trainer.

The format is DeepSeek-V3's (arXiv:2412.19437, section 3.3.2; also Qwen's FP8 releases): a matrix `W` [n, k] is stored
as float8_e4m3fn beside `W_scale_inv`, float32 [ceil(n / a), ceil(k / b)] for blocks of a x b. Every block is divided by
its scale, max |block| / 448, so that `W` is about its FP8 values times the scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from slime_core.errors import WeightSyncError
from slime_core.weights.source import NamedTensors

SCALE = "_scale_inv"
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_AMAX = 1e-12
"""A block of zeros needs a scale too."""


@dataclass(frozen=True)
class Fp8Checkpoint:
    """Which tensors of a checkpoint are FP8, and in which blocks."""

    quantised: frozenset[str]
    block: tuple[int, int]

    def cast(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The trainer's tensors as the checkpoint has them.

        Raises:
            WeightSyncError: when a tensor of the checkpoint is not among them.
        """
        missing = set(self.quantised)
        for name, tensor in tensors:
            if name not in self.quantised:
                yield name, tensor
                continue
            missing.remove(name)
            values, scales = quantise(tensor, self.block)
            yield name, values
            yield f"{name}{SCALE}", scales
        if missing:
            raise WeightSyncError(
                f"the --rollout-model has {min(missing)} in FP8, and the trainer's model has no such tensor; is it the "
                "same model?"
            )


def quantise(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [n, k] of any floating dtype in blocks of FP8.

    Returns:
        float8_e4m3fn [n, k] and float32 [ceil(n / block[0]), ceil(k / block[1])], what each block is to be multiplied
        with.
    """
    (num_rows, num_columns), (height, width) = matrix.shape, block
    padding = (0, -num_columns % width, 0, -num_rows % height)
    padded = torch.nn.functional.pad(matrix.float(), padding)
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=SMALLEST_AMAX) / LARGEST
    scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    values = scaled.view(padded.shape)[:num_rows, :num_columns].contiguous()
    return values, scales


def read_fp8(directory: str) -> Fp8Checkpoint | None:
    """How a checkpoint is quantised; None for one that is not.

    Raises:
        WeightSyncError: for another format than block-wise FP8.
    """
    config = json.loads((Path(directory) / "config.json").read_text()).get("quantization_config")
    if config is None:
        return None
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method != "fp8" or not block or config.get("activation_scheme", "dynamic") != "dynamic":
        raise WeightSyncError(
            f"--rollout-model {directory} is quantised by '{method}'; the trainer's weights can be cast to block-wise "
            "FP8 only (quant_method fp8 with weight_block_size and dynamic activations; scripts/make_fp8.py makes it)."
        )
    names: set[str] = set()
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    quantised = frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))
    return Fp8Checkpoint(quantised, (int(block[0]), int(block[1])))
