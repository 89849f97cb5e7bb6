"""What two gloo ranks do in the quick tier, all in one job: starting processes costs more than the cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.megatron import reference

ROUNDS, NUM_SAMPLES, PROMPT = 4, 12, list(range(1, 12))
"""Of every case; the worker's prompt is the same."""

TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
ETP2 = ["--expert-tensor-parallel-size", "2"]
SP = ["--sequence-parallel"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
RECOMPUTE = ["--recompute-num-layers", "1"]

PARITY = {
    "tp2": ("qwen3", TP2),
    "tp2_sp_recompute": ("llama", [*TP2, *SP, *RECOMPUTE]),
    "tp2_sp_one_kv_head": ("one_kv_head", [*TP2, *SP]),
    "pp2_tied": ("qwen2", PP2),
    "cp2": ("qwen3", CP2),
    "dp2_overlap": ("qwen3", OVERLAP),
    "ep2": ("qwen3_moe", EP2),
    "whole_experts_tp2_sp": ("qwen3_moe", [*TP2, *SP]),
    "etp2": ("qwen3_moe", ETP2),
    "glm4_tp2_sp": ("glm4", [*TP2, *SP]),
    "uneven": ("qwen3_moe", EP2),
}
"""Case -> family and layout; all samples of `uneven` are on one rank."""

ALONE = ["qwen3", "qwen3_moe", "qwen2", "glm4", "llama", "one_kv_head"]
"""Families that one rank trains by itself; the two ranks share them out."""

PPO = ["--advantage-estimator", "ppo", "--critic", "--critic-lr", "1e-3", "--ppo-gamma", "0.9", "--ppo-lambda", "0.8"]
TORCH_TOO = ["--lr", "1e-3", "--adam-eps", "1e-4", "--num-steps-per-rollout", "2", "--temperature", "0.7"]
CORRECTED = ["--importance-correction", "tis", "--importance-normalize"]
OBJECTIVES = {
    "grpo_kl": (TP2, ["--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--loss-aggregation", "sequence"]),
    "entropy": (TP2, ["--entropy-coef", "0.01", "--policy-loss", "cispo"]),
    "corrected": (PP2, ["--kl-coef", "0.1", *CORRECTED, "--advantage-estimator", "rloo"]),
    "gspo": (CP2, ["--policy-loss", "gspo", "--use-rollout-logprobs", "--loss-aggregation", "rollout"]),
    "ppo": ([*TP2, *SP], PPO),
    "ppo_pp2": (PP2, [*PPO, "--critic-model", "LLAMA"]),
    "ppo_cp2": (CP2, PPO),
    "distilled": (PP2, ["--advantage-estimator", "opd", "--teacher-model", "LLAMA", "--whiten-advantages"]),
}
"""Case -> layout, and flags that the torch backend gets too."""

ROUTED = ["--routing-replay", "--lr", "3e-2", "--adam-eps", "1e-2", "--num-steps-per-rollout", "3"]
CROWDED = ["--max-tokens-per-gpu", "25"]
"""Several micro-batches a step, which are not those of the pass before."""
REPLAYED = {
    "routing_tp2_sp": ([*TP2, *SP, *ETP2, *RECOMPUTE], []),
    "routing_pp2": ([*PP2, *RECOMPUTE], ["--kl-loss-coef", "0.1", "--ref-update-interval", "1"]),
    "routing_cp2": (CP2, PPO),
    "routing_ep2": ([*EP2, *RECOMPUTE], []),
}
"""Case -> layout, and flags beside `ROUTED` that the torch backend gets too."""

RENEWED = ["--kl-loss-coef", "0.1", "--ref-update-interval", "2", *PPO]
"""Of the run that is saved: what it trains and renews is all in the checkpoint."""
RESUMED = {"resumed_tp2": TP2, "resumed_pp2": PP2, "resumed_dp2": OVERLAP}

EXPERTS_RESUMED = {"experts_tp2": [*TP2, *SP], "experts_pp2": PP2}
"""Of a model whose first layer has no experts, saved at `PP2`: its first stage has none."""

BF16 = ["--dtype", "bfloat16"]

VOCAB, LOGIT_ROWS = 11, 7
"""Of the case `vocab_loss`: two ranks with six columns each, the last of them padding."""


def quick_cases(models: dict[str, Path], checkpoint: Path) -> list[dict[str, Any]]:
    """All of them, in order."""
    kept = {"checkpoint": str(checkpoint), "steps": 2}
    fresh = {"checkpoint": f"{checkpoint}_fresh"}
    experts = {"checkpoint": f"{checkpoint}_experts", "steps": 2}
    updates = {"steps": 3, "rounds": 1}
    refused = {"do": "load", "fails": True, "size": 1}
    return [
        case(models, "vocab_loss", "qwen3", *TP2, do="vocab_loss", vocab=VOCAB, num_rows=LOGIT_ROWS),
        *(case(models, f"alone_{name}", name, size=1, alone=n % 2) for n, name in enumerate(ALONE)),
        *(case(models, name, family, *flags) for name, (family, flags) in PARITY.items() if name != "uneven"),
        case(models, "uneven", *flat(PARITY["uneven"]), only_first_has_samples=True),
        *(
            case(models, name, "qwen3", *layout, objective=objective_flags(models, name), steps=2)
            for name, (layout, _) in OBJECTIVES.items()
        ),
        *(
            case(
                models, f"routing_{name}", "qwen3_moe", size=1, objective=flags, do="watch_experts", alone=n, **updates
            )
            for n, (name, flags) in enumerate({"free": ROUTED[1:], "kept": ROUTED}.items())
        ),
        *(replayed(models, name, *of_case) for name, of_case in REPLAYED.items()),
        case(models, "saved", "qwen3", *TP2, *RENEWED, do="train_and_save", **kept),
        *(
            case(models, name, "qwen3", *flags, *RENEWED, do="load_and_train", **kept)
            for name, flags in RESUMED.items()
        ),
        case(models, "experts_saved", "dense_first", *PP2, do="train_and_save", **experts),
        *(
            case(models, name, "dense_first", *flags, do="load_and_train", **experts)
            for name, flags in EXPERTS_RESUMED.items()
        ),
        case(models, "fresh", "qwen3", *TP2, do="save_load_train", **fresh),
        case(models, "other_model", "llama", alone=0, **kept, **refused),
        case(models, "other_critic", "qwen3", *PPO, "--critic-model", str(models["llama"]), alone=1, **kept, **refused),
        case(models, "no_critic", "qwen3", *PPO, alone=0, **fresh, **refused),
        case(models, "bfloat16", "qwen3", *PPO, *BF16, do="go_back", size=1, alone=1, checkpoint=f"{checkpoint}_bf16"),
    ]


def flat(chosen: tuple[str, list[str]]) -> list[str]:
    """Family and flags in one list."""
    return [chosen[0], *chosen[1]]


def replayed(models: dict[str, Path], name: str, layout: list[str], flags: list[str], **more: Any) -> dict[str, Any]:
    """A case of --routing-replay: rounds of three steps at a rate at which tokens would go elsewhere after each."""
    given = {"objective": [*ROUTED, *flags], "steps": 3, "rounds": 2, **more}
    return case(models, name, "qwen3_moe", *layout, *CROWDED, **given)


def objective_flags(models: dict[str, Path], name: str) -> list[str]:
    """What both backends get."""
    return [*TORCH_TOO, *(str(models["llama"]) if word == "LLAMA" else word for word in OBJECTIVES[name][1])]


def case(
    models: dict[str, Path],
    name: str,
    family: str,
    *flags: str,
    size: int = 2,
    objective: list[str] = reference.FLAGS,
    **more: Any,
) -> dict[str, Any]:
    """A case of a job: a model, flags, and what else the worker should know."""
    words = ["--model", str(models[family]), "--train-backend", "megatron", "--num-trainers", str(size)]
    words += ["--max-tokens-per-gpu", "60", *objective, *flags]
    return {"name": name, "flags": words, "rounds": ROUNDS, "num_samples": NUM_SAMPLES} | more
