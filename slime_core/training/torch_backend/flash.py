"""Packed attention by flash-attn, where it is installed: no padding at all."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

Kernel = Callable[..., torch.Tensor]
"""flash_attn_varlen_func, or one that takes the same arguments."""


def flash_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """flash-attn's function for sequences of different lengths; None where it is not installed or cannot compute."""
    return None if device.type != "cuda" or dtype == torch.float32 else _installed_kernel()


@cache
def _installed_kernel() -> Kernel | None:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        # built for another torch or CUDA
        logger.warning("flash-attn is installed but cannot be imported, so torch's attention is used: %s", error)
        return None
    kernel: Kernel = flash_attn_varlen_func
    return kernel


def flash_attention(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    max_length: int,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention within each sequence.

    Args:
        kernel: what computes it.
        query: [1, H, T, D].
        key: [1, K, T, D], K dividing H.
        value: [1, K, T, D].
        bounds: [sequences + 1] int32, where each begins and the last ends.
        max_length: of the longest.
        scaling: of the scores; None: 1 / sqrt(D).
        window: how many tokens one sees, itself included; None: all before it.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.

    Returns:
        [1, T, H, D].
    """
    tokens: list[Any] = [states[0].transpose(0, 1) for states in (query, key, value)]
    output = kernel(
        *tokens,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=max_length,
        max_seqlen_k=max_length,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return output[None]
