"""What a transformer computes for a sequence, counted from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.errors import OptionError

SIZES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
}
"""What must be known, and its names in a config.json."""


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a forward and a backward pass, without what is recomputed."""

    parameters: int
    """Those that a token is multiplied with: of experts the active ones, no embeddings but an output layer."""
    attention: int
    """Numbers of a query, summed over layers."""

    @classmethod
    def of(cls, directory: str) -> ModelFlops:
        """An estimate for a model directory, as of a decoder with gated MLPs and attention in every layer.

        Raises:
            OptionError: when its config.json does not tell the sizes.
        """
        config = json.loads((Path(directory) / "config.json").read_text())
        config = config.get("text_config", config)
        sizes = {what: _first(config, names) for what, names in SIZES.items()}
        if unknown := [SIZES[what][0] for what, size in sizes.items() if not size]:
            raise OptionError(f"the config.json of {directory} does not tell {', '.join(unknown)}.")
        hidden, heads = sizes["hidden_size"], sizes["heads"]
        query = heads * (config.get("head_dim") or hidden // heads)
        key = query * (config.get("num_key_value_heads") or heads) // heads
        layer = 2 * hidden * (query + key) + _mlp(config, hidden)
        return cls(sizes["layers"] * layer + hidden * sizes["vocab_size"], sizes["layers"] * query)

    def of_sequences(self, lengths: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """[S] operations for sequences of these lengths [S], each attending to itself alone.

        Two a parameter and token forward and four backward; scores and their use take 2 n^2 times the size of a query
        forward, half of which a causal mask spares, and twice that backward (Narayanan et al., arXiv
        2104.04473, appendix).
        """
        n = lengths.astype(np.float64)
        return 6.0 * n * (self.parameters + self.attention * n)


def _mlp(config: dict[str, Any], hidden: int) -> int:
    """Parameters of a layer's MLP that a token meets: three matrices, or those of its experts and of the router."""
    experts = _first(config, ("num_experts", "num_local_experts", "n_routed_experts"))
    dense = _first(config, ("intermediate_size", "n_inner")) or 4 * hidden
    if not experts:
        return 3 * hidden * dense
    width = _first(config, ("moe_intermediate_size",)) or dense
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    return 3 * hidden * (width * (_first(config, ("num_experts_per_tok",)) or 1) + shared) + hidden * experts


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int:
    """The first of these that is set, 0 if none is; of one for each layer, such as Gemma 3n's, the mean."""
    found = next((config[name] for name in names if config.get(name)), 0)
    return round(fmean(found)) if isinstance(found, list) else int(found)
