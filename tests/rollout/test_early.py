"""Log-probabilities of finished groups, computed by the trainers while others of the round still generate."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import OptionError
from slime_core.rollout.early import Early
from slime_core.testing import make_options, make_sample
from slime_core.types import TrainBatch


def answer_of(batch: TrainBatch, offset: float = 0.0) -> dict:
    """What a rank would find: here each token's own id, so that a test sees where a value landed."""
    ends = np.cumsum(batch.lengths)
    parts = [batch.tokens[end - count : end] for end, count in zip(ends, batch.response_lengths, strict=True)]
    values = np.concatenate(parts).astype(np.float32) + offset
    return {
        "sample_index": batch.sample_index,
        "response_lengths": batch.response_lengths,
        "old_logprobs": values,
        "ref_logprobs": -values,
    }


@given(
    st.lists(st.tuples(st.text("abc", max_size=3), st.text("xyz", max_size=5), st.booleans()), min_size=1), st.randoms()
)
def test_every_value_lands_on_its_own_token_and_the_rest_is_unknown(texts, random):
    samples = [make_sample(answer, prompt=prompt, index=7 * i) for i, (prompt, answer, _) in enumerate(texts)]
    early = Early()
    for sample, (_, _, handed) in zip(samples, texts, strict=True):
        if handed:
            early.keep([sample])
            early.note([answer_of(early.take())])
    random.shuffle(samples)
    whole = TrainBatch.from_samples(samples)
    batch, fraction = early.fill(whole)
    handed = {7 * i for i, (_, _, one) in enumerate(texts) if one}
    known = np.repeat(np.isin(whole.sample_index, list(handed)), whole.response_lengths)
    expected = answer_of(whole)
    for name in ("old_logprobs", "ref_logprobs") if handed else ():
        np.testing.assert_array_equal(batch.per_token[name], np.where(known, expected[name], np.nan))
    assert fraction == known.sum() / max(1, len(known))


def test_tokens_that_a_converter_changed_are_unknown():
    sample = make_sample("yes", prompt="a", index=3)
    early = Early()
    early.keep([sample])
    early.note([answer_of(early.take())])
    sample.tokens[-1] += 1  # the very sample that was handed out
    filled, fraction = early.fill(TrainBatch.from_samples([sample]))
    assert np.isnan(filled.per_token["old_logprobs"]).all() and fraction == 0.0


async def test_a_round_waits_for_what_it_handed_out_and_hands_out_nothing_more():
    early = Early()
    early.keep([make_sample("yes", index=0)])
    batch = early.take()
    assert early.take() is None
    closing = asyncio.create_task(early.close())
    early.keep([make_sample("no", index=1)])
    await asyncio.sleep(0)
    assert not closing.done() and early.take() is None
    early.note([answer_of(batch)])
    await closing


HELD = """
import asyncio
go_on = asyncio.Event()

@hookimpl
async def generate(sample):
    if sample.group_index % 2:
        await go_on.wait()
    sample.append([65, 66 + sample.index], text="AB", logprobs=[-1.0, -1.0], weight_version=0)
    sample.status = Status.COMPLETED
    return [sample]
"""


async def test_finished_groups_reach_the_trainers_while_others_generate(make_args, open_manager, plugin_file):
    flags = ["--overlap-logprobs", "--num-steps-per-rollout", "2"]
    async with open_manager(make_args("--generate", plugin_file("held", HELD), *flags), num_ranks=2) as manager:
        rounds = asyncio.create_task(manager.rollout(0))
        while (shards := await manager.take_early()) is None:
            assert not rounds.done()
            await asyncio.sleep(0.01)
        assert sorted(int(i) for shard in shards for i in shard.batch.sample_index) == [0, 1]
        manager._stages.generators.by_name["held"].impl.function.__globals__["go_on"].set()
        await asyncio.sleep(0.05)
        assert not rounds.done(), "the trainers still compute"
        manager.note_early([answer_of(shard.batch) for shard in shards])
        finished = await rounds
    by_index = {}
    for batch in (shard.batch for shard in finished.shards):
        values = batch.per_token["old_logprobs"].reshape(-1, 2)
        by_index |= {int(index): values[row].tolist() for row, index in enumerate(batch.sample_index)}
    assert by_index[0] == [65.0, 66.0] and by_index[1] == [65.0, 67.0]
    assert np.isnan([by_index[2], by_index[3]]).all()
    assert finished.metrics["perf/early_logprob_fraction"] == 0.5


async def test_groups_that_a_filter_will_still_rank_are_not_handed_out(make_args, open_manager, plugin_file):
    ranking = plugin_file("ranking", "@hookimpl\ndef over_sampling_filter(groups): return groups")
    flags = ["--over-sampling-filter", ranking, "--over-sampling-batch-size", "4", "--generate", "echo"]
    async with open_manager(make_args(*flags, "--overlap-logprobs", "--num-steps-per-rollout", "2")) as manager:
        finished = await manager.rollout(0)
        assert finished.metrics["perf/early_logprob_fraction"] == 0.0
        assert manager._stages.early.take() is None and not manager._stages.early._taken


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "has nothing to compute"),
        (["--num-steps-per-rollout", "2", "--max-staleness", "1"], "a round that is generated ahead"),
        (["--num-steps-per-rollout", "2", "--use-rollout-logprobs"], "has nothing to compute"),
        (["--num-steps-per-rollout", "2", "--num-trainers", "0"], "needs engines and trainers"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(flags, message):
    with pytest.raises(OptionError, match=message):
        make_options("--overlap-logprobs", *flags)
