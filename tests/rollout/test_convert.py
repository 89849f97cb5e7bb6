"""TrainBatches: sorted, complete, split over steps and ranks by tokens."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core import PluginError, Sample, TrainBatch
from slime_core.plugins import Plugins
from slime_core.rollout.convert import convert, split


def batch_of(lengths):
    samples = []
    for i, length in enumerate(lengths):
        sample = Sample(index=i, group_index=i // 2, rollout_index=i, tokens=np.arange(2), reward=float(i))
        sample.append(range(length), logprobs=[0.0] * length)
        samples.append(sample)
    return TrainBatch.from_samples(samples)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 3))
def test_a_split_loses_and_doubles_nothing(lengths, num_ranks, num_steps):
    batch = batch_of(lengths)
    shards = split(batch, num_ranks, num_steps)
    assert len(shards) == num_ranks
    assert sorted(i for shard in shards for i in shard.batch.sample_index) == list(range(len(lengths)))
    for shard in shards:
        assert len(shard.step_ends) == num_steps and shard.step_ends[-1] == shard.batch.num_samples
        assert shard.round_rewards.tolist() == batch.rewards.tolist()
    expected = np.array_split(np.arange(len(lengths)), num_steps)
    for step in range(num_steps):
        got = []
        for shard in shards:
            start = shard.step_ends[step - 1] if step else 0
            got += shard.batch.sample_index[start : shard.step_ends[step]].tolist()
        assert sorted(got) == expected[step].tolist()


@given(st.lists(st.integers(1, 100), min_size=8, max_size=40))
def test_ranks_carry_about_the_same_number_of_tokens(lengths):
    batch = batch_of(lengths)
    loads = [int(shard.batch.lengths.sum()) for shard in split(batch, 2, 1)]
    assert abs(loads[0] - loads[1]) <= max(batch.lengths)


@given(st.lists(st.integers(1, 100), min_size=8, max_size=40), st.integers(2, 4))
def test_ranks_carry_about_the_same_cost(lengths, num_ranks):
    batch = batch_of(lengths)
    costs = batch.lengths.astype(np.float64) ** 2
    loads = [costs[shard.batch.sample_index].sum() for shard in split(batch, num_ranks, 1, costs)]
    assert max(loads) - min(loads) <= costs.max()


@pytest.mark.parametrize(("balance", "beside_the_longest"), [("tokens", 1), ("flops", 0)])
async def test_flops_weigh_a_long_sample_more_than_its_tokens(
    balance, beside_the_longest, make_args, open_manager, plugin_file, model_dir, tmp_path
):
    # one sample of 20 tokens and five of 9; nearly all of the model is attention, whose cost is the length's square
    model = shutil.copytree(model_dir, tmp_path / "narrow")
    sizes = {"hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1000, "vocab_size": 1}
    (model / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 1, "max_position_embeddings": 64}))
    body = "n = 9 if sample.index else 20\n    sample.append([1] * n, logprobs=[-1.0] * n)\n"
    end = "    sample.status = Status.COMPLETED\n    return [sample]"
    uneven = plugin_file("uneven", f"@hookimpl\nasync def generate(sample):\n    {body}{end}")
    words = ["--model", model, "--generate", uneven, "--balance-by", balance, "--rollout-batch-size", "3"]
    async with open_manager(make_args(*words), num_ranks=2) as manager:
        shards = (await manager.rollout(0)).shards
    (longest,) = [shard.batch for shard in shards if 0 in shard.batch.sample_index]
    assert longest.num_samples == 1 + beside_the_longest


async def test_samples_are_sorted_by_group_and_index(make_args, plugin_file):
    reverse = plugin_file(
        "reverse",
        "from slime_core import TrainBatch\n@hookimpl\ndef convert_train_data(groups):\n"
        "    return TrainBatch.from_samples([s for g in groups for s in g][::-1])",
    )
    groups = [[Sample(index=i, group_index=g) for i in (2 * g, 2 * g + 1)] for g in (1, 0)]
    batch = convert(make_args(), Plugins().bind("convert_train_data", reverse), groups)
    assert batch.sample_index.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {}", "must return a TrainBatch, got dict"),
        (
            "batch = TrainBatch.from_samples([s for g in groups for s in g])\n"
            "    batch.per_sample['x'] = [1]\n    return batch",
            r"per_sample\['x'\] has 1 rows where 2 are needed",
        ),
    ],
)
async def test_a_converter_that_breaks_its_contract_is_named(make_args, plugin_file, body, message):
    source = f"from slime_core import TrainBatch\n@hookimpl\ndef convert_train_data(groups):\n    {body}"
    bound = Plugins().bind("convert_train_data", plugin_file("broken", source))
    with pytest.raises(PluginError, match=f"plugin 'broken': .*{message}"):
        convert(make_args(), bound, [[Sample(), Sample()]])
