"""Optimiser steps against TRL's GRPOTrainer: it generates and trains, and we train on the very samples it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core.types import Sample

trl = pytest.importorskip("trl", reason="comes with pip install slime-core[bench]")
datasets = pytest.importorskip("datasets")

LR, ADAM_EPS = 3e-3, 1e-4
"""An epsilon that keeps gradients of rounding noise from becoming whole steps."""

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 4, 4, 12

CONSTANT = f"--loss-aggregation constant --loss-constant {MAX_TOKENS}"
CASES = {
    "grpo": ({"loss_type": "grpo", "scale_rewards": "group"}, "--advantage-estimator grpo --loss-aggregation sequence"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, f"--advantage-estimator dr_grpo {CONSTANT}"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "--advantage-estimator dr_grpo --policy-loss gspo --loss-aggregation sequence",
    ),
    "ppo_clip": (
        {"loss_type": "bnpo", "epsilon": 0.01, "epsilon_high": 0.02},
        "--advantage-estimator dr_grpo --ppo-clip-eps 0.01 --ppo-clip-eps-high 0.02",
    ),
    "kl": (
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": True},
        "--advantage-estimator dr_grpo --loss-aggregation sequence --kl-loss-coef 0.2 --kl-loss-unbiased",
    ),
}
"""TRL's settings and our flags for the same step."""

REWARD_UNIT = {"grpo": 1000.0}
"""What rewards are counted in, by default 1: TRL adds 1e-4 to a group's standard deviation, we 1e-6."""


@dataclass
class Record:
    """What TRL did."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_with_trl(model_dir: Path, output: Path, num_steps: int, settings: dict[str, Any], unit: float) -> Record:
    """One generation of TRL, trained in `num_steps` optimiser steps."""
    record = Record()

    class Recording(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            record.inputs.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
            loss = super()._compute_loss(model, inputs)
            record.losses.append(loss.item())
            return loss

    def reward(completion_ids, prompts, **kwargs):
        return [unit * (sum(ids) % 5) for ids in completion_ids]

    batch = NUM_PROMPTS * NUM_SAMPLES // num_steps
    config = trl.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=batch,
        steps_per_generation=num_steps,
        gradient_accumulation_steps=1,
        max_steps=num_steps,
        num_generations=NUM_SAMPLES,
        max_completion_length=MAX_TOKENS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_epsilon=ADAM_EPS,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"beta": 0.0, "scale_rewards": "none", **settings},
    )
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{number} and"} for number in range(NUM_PROMPTS)]),
        processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
    )
    trainer.train()
    record.norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    record.weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return record


def samples_of(record: Record, unit: float) -> list[Sample]:
    """The samples in the order in which TRL trained them."""
    made: list[Sample] = []
    groups: dict[tuple[int, ...], int] = {}
    for inputs in record.inputs:
        for row in range(len(inputs["completion_ids"])):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
            response = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
            group = groups.setdefault(tuple(prompt.tolist()), len(groups))
            sample = Sample(index=len(made), group_index=group, rollout_index=len(made))
            sample.tokens = prompt.int().numpy()
            sample.append(response.numpy(), logprobs=[0.0] * len(response))
            sample.reward = unit * (sum(response.tolist()) % 5)
            made.append(sample)
    return made


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_trl(case, num_steps, make_trainer: Callable[..., Any], model_dir, shard_of, tmp_path):
    settings, flags = CASES[case]
    unit = REWARD_UNIT.get(case, 1.0)
    theirs = train_with_trl(model_dir, tmp_path / "trl", num_steps, settings, unit)
    made = samples_of(theirs, unit)
    assert len({sample.reward for sample in made}) > 1, "the case tests nothing"
    ends = [len(made) * (step + 1) // num_steps for step in range(num_steps)]
    trainer = make_trainer(*flags.split(), "--lr", str(LR), "--adam-eps", str(ADAM_EPS))
    metrics = trainer.train(0, shard_of(made, step_ends=ends))
    assert metrics["train/loss"] == pytest.approx(sum(theirs.losses) / num_steps, rel=1e-5, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(sum(theirs.norms) / num_steps, rel=1e-5)
    for name, value in trainer.weights("float32"):
        assert_close(value, theirs.weights[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    if case in ("gspo", "ppo_clip"):
        assert (metrics["train/clip_fraction"] > 0) == (num_steps > 1)
