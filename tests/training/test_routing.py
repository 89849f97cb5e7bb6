"""Under --routing-replay the updates of a round send every token to the experts of before the first of them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from slime_core.errors import OptionError

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
WITH_EXPERTS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
        n_group=4, topk_group=2, first_k_dense_replace=0, kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def moe_dirs(model_dir, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    for name, config in WITH_EXPERTS.items():
        torch.manual_seed(0)
        shutil.copytree(model_dir, root / name)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {name: root / name for name in WITH_EXPERTS}


@pytest.fixture(params=WITH_EXPERTS)
def moe_dir(request, moe_dirs) -> Path:
    return moe_dirs[request.param]


class Seen:
    """The experts that every token went to, without gradient (before the updates) and with one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.before, self.updates = Counter(), Counter()
        experts = [module for module in model.modules() if "Experts" in type(module).__name__]
        for number, module in enumerate(experts):
            module.register_forward_pre_hook(lambda _, args, number=number: self._note(number, args[1]))

    def _note(self, number: int, experts: torch.Tensor) -> None:
        counted = self.updates if torch.is_grad_enabled() else self.before
        counted.update((number, *sorted(row)) for row in experts.tolist())


def trained(make_trainer, shard_of, samples, directory: Path, *flags: str) -> Seen:
    # a rate at which a step changes everything, and micro-batches that are not those of the pass before
    common = ("--model", str(directory), "--lr", "0.3", "--num-steps-per-rollout", "3")
    trainer = make_trainer(*common, *flags)
    seen = Seen(trainer._policy.model)
    made = samples(12)
    for sample in made:
        sample.tokens %= 250
    trainer.train(0, shard_of(made, step_ends=[3, 7, 12]))
    return seen


def test_tokens_keep_their_experts_in_all_steps(moe_dir, make_trainer, shard_of, samples):
    free = trained(make_trainer, shard_of, samples, moe_dir)
    assert free.before.total() == free.updates.total() > 0
    assert free.before != free.updates, "the case tests nothing"
    kept = trained(make_trainer, shard_of, samples, moe_dir, "--routing-replay")
    assert kept.before == free.before
    assert kept.updates == kept.before


def test_recomputed_layers_replay_too(moe_dir, make_trainer, shard_of, samples):
    flags = ("--routing-replay", "--recompute-activations")
    kept = trained(make_trainer, shard_of, samples, moe_dir, *flags)
    assert kept.updates.keys() == kept.before.keys()
    assert kept.updates.total() > kept.before.total(), "nothing was computed again"


def test_one_step_is_the_same_with_and_without(moe_dir, make_trainer, shard_of, samples):
    made = samples(8)
    one, other = (
        make_trainer("--model", str(moe_dir), *flags).train(0, shard_of(made)) for flags in ([], ["--routing-replay"])
    )
    assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
    assert other["train/first_step_drift"] < 1e-5


def test_a_model_without_experts_is_refused(make_trainer):
    with pytest.raises(OptionError, match=r"--routing-replay: a .* has no experts"):
        make_trainer("--routing-replay")


@pytest.mark.parametrize("flag", ["--use-rollout-logprobs", "--overlap-logprobs"])
def test_a_round_without_a_pass_before_its_updates_is_refused(flag, make_args):
    with pytest.raises(OptionError, match=f"which {flag} leaves out"):
        make_args("--routing-replay", flag, "--num-steps-per-rollout", "2")


def test_two_ranks_with_whole_and_with_cut_up_models_keep_the_same_experts(moe_dirs, run_ranks, tmp_path):
    free = ["--model", str(moe_dirs["qwen3_moe"]), "--lr", "3e-2", "--num-steps-per-rollout", "2"]
    flags = [*free, "--routing-replay"]
    shares = [[[[0, 2], [7, 8, 11]], [[5, 1, 3, 4], [6, 9, 10]]], [[[5], [6, 7, 8, 9, 10, 11]], [[0, 1, 2, 3, 4], []]]]
    job = {"num_samples": 12, "shares": shares}
    replicated = run_ranks({"flags": flags, **job}, tmp_path / "replicated")
    sharded = run_ranks({"flags": [*flags, "--data-parallel", "fsdp2"], **job}, tmp_path / "sharded")
    unbound = run_ranks({"flags": free, **job}, tmp_path / "unbound")[0]["metrics"][0]
    assert unbound["train/ppo_kl"] != pytest.approx(replicated[0]["metrics"][0]["train/ppo_kl"], rel=1e-2)
    for one, other in zip(replicated[0]["metrics"], sharded[0]["metrics"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/ppo_kl"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
