"""Models from a directory: a causal LM, or with its vision tower where the model takes images."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel


def from_pretrained(directory: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model, as `dtype`, on the CPU.

    Raises:
        OSError, ValueError: when the directory holds none that transformers loads.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    kind = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(directory, config=config, dtype=dtype, trust_remote_code=False)
    return model


def takes_images(config: object) -> bool:
    """Whether a model of this config has a vision tower."""
    return hasattr(config, "vision_config")
