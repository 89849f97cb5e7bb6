"""Frozen models: what the engines of a judge or a reference are started with."""

from __future__ import annotations

from typing import Any

from slime_core.engines.parallel import SIZES
from slime_core.options import FrozenModel, Options


def options_of(args: Options, model: FrozenModel) -> Options:
    """The run's options as they are for the engines and the router of this model."""
    sglang = dict(args.sglang)
    for name, values in model.sglang:
        if values is None:
            sglang.pop(name, None)
        else:
            sglang[name] = list(values)
    # sizes of its own say how many GPUs it takes
    num_gpus = None if any(name in SIZES for name, _ in model.sglang) else args.num_gpus_per_engine
    own: dict[str, Any] = {
        "model": model.path,
        "rollout_model": None,
        "num_engines": model.num_engines,
        "num_gpus_per_engine": model.num_gpus_per_engine or num_gpus,
        "num_nodes_per_engine": 1,
        "num_prefill_engines": 0,
        "max_context_tokens": model.max_context_tokens,
        "external_engines": [],
        "router_port": 0,
        "offload_engines": False,
        "sglang": sglang,
    }
    return Options(**{**vars(args), **own})
