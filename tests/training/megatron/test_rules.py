"""The layouts cut and join without loss, whatever the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import OptionError
from slime_core.training.megatron.families.registry import find_family
from slime_core.training.megatron.rules import (
    Dimensions,
    Family,
    GateUp,
    Qkv,
    Replicated,
    Split,
    Vocabulary,
    padded_vocab,
)

FAMILIES = ("glm4", "llama", "qwen2", "qwen3", "qwen3_moe")


@given(size=st.sampled_from([1, 2, 4]), groups=st.integers(1, 5), per_group=st.integers(1, 3), data=st.data())
def test_what_is_cut_is_joined_again(size, groups, per_group, data):
    vocab = data.draw(st.integers(size, 40))
    dims = Dimensions(size * groups * per_group, groups, 8, vocab)
    hidden, ffn = 8 * size, 4 * size
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    shapes = {
        Replicated(): [(hidden,)],
        Split(0): [(ffn, hidden)],
        Split(1): [(hidden, ffn)],
        Vocabulary(): [(vocab, hidden)],
        GateUp(): [(ffn, hidden), (ffn, hidden)],
        GateUp(fused=True): [(2 * ffn, hidden)],
        Qkv(): data.draw(st.sampled_from([[(queries, 8), (keys, 8), (keys, 8)], [(queries,), (keys,), (keys,)]])),
    }
    for layout, wanted in shapes.items():
        tensors = [torch.randn(shape) for shape in wanted]
        shards = [layout.shard(tensors, rank, size, dims) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1, "every rank has a part of the same shape"
        joined = layout.whole(shards, dims)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(joined, tensors, strict=True))


def test_a_rank_has_whole_groups_of_heads():
    # two ranks, two groups of two query heads: rank 1 must have heads 2 and 3 with key and value 1
    dims = Dimensions(num_heads=4, num_kv_heads=2, head_dim=1, vocab_size=8)
    tensors = [torch.arange(4.0), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])]
    assert Qkv().shard(tensors, 1, 2, dims).tolist() == [2.0, 3.0, 11.0, 21.0]


def test_each_rank_has_its_gate_over_its_up():
    tensors = [torch.tensor([1.0, 2.0])[:, None], torch.tensor([3.0, 4.0])[:, None]]
    dims = Dimensions(1, 1, 1, 1)
    assert GateUp().shard(tensors, 1, 2, dims).flatten().tolist() == [2.0, 4.0]


@given(vocab=st.integers(1, 200_000), size=st.integers(1, 64))
def test_the_padded_vocabulary_is_the_least_that_divides(vocab, size):
    padded = padded_vocab(vocab, size)
    assert padded % size == 0
    assert vocab <= padded < vocab + size


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_of_a_family_has_one_rule(name):
    rules = find_family(name).rules
    for rule in rules:
        example = rule.megatron.format(layer=3, expert=5)
        assert [other for other in rules if other.match(example) is not None] == [rule]
    assert len({names for rule in rules for names in rule.hugging_face}) == sum(len(r.hugging_face) for r in rules)


def test_a_family_without_rules_is_named_with_those_there_are():
    with pytest.raises(OptionError, match="no rules for models of type 'mamba'; there are glm4, llama, qwen2"):
        find_family("mamba")


def test_the_family_of_the_documentation_is_one():
    page = (Path(__file__).resolve().parents[3] / "docs" / "megatron.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(compile(example, "docs/megatron.md", "exec"), names)
    family = names["family"]
    assert isinstance(family, Family)
    name = "decoder.layers.7.self_attention.q_layernorm.weight"
    assert [rule.hugging_face for rule in family.rules if rule.match(name)] == [
        ("model.layers.{layer}.self_attn.q_norm.weight",)
    ]
