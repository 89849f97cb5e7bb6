"""Sample keeps its arrays together; TrainBatch packs and selects samples."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core import Generation, Sample, Status, TrainBatch

TURN = st.tuples(st.lists(st.integers(0, 99), max_size=5), st.booleans())


def make(prompt: list[int], turns: list[tuple[list[int], bool]], **fields: object) -> Sample:
    sample = Sample(prompt="p", tokens=np.array(prompt, np.int32), **fields)
    for tokens, sampled in turns:
        logprobs = [-0.5 * t for t in tokens] if sampled else None
        sample.append(tokens, logprobs=logprobs, trainable=sampled, weight_version=3 if sampled else -1, text="x")
    return sample


@given(st.lists(st.integers(0, 99), max_size=4), st.lists(TURN, max_size=4))
def test_append_keeps_every_array_as_long_as_the_response(prompt, turns):
    sample = make(prompt, turns)
    expected = sum(len(tokens) for tokens, _ in turns)
    assert sample.response_length == len(sample.logprobs) == len(sample.weight_versions) == expected
    assert sample.tokens.tolist() == prompt + [t for tokens, _ in turns for t in tokens]
    assert sample.loss_mask.tolist() == [int(sampled) for tokens, sampled in turns for _ in tokens]
    assert sample.response == "x" * len(turns)


@given(st.lists(st.integers(0, 99), max_size=4), st.lists(TURN, max_size=4))
def test_a_sample_survives_json(prompt, turns):
    sample = make(prompt, turns, label={"a": [1]}, metadata={"k": None}, status=Status.TRUNCATED, reward=0.5)
    twin = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert twin.to_dict() == sample.to_dict()
    assert twin.status is Status.TRUNCATED
    assert twin.logprobs.dtype == np.float32 and twin.tokens.dtype == np.int32


def test_append_refuses_logprobs_of_another_length():
    sample = make([1], [])
    with pytest.raises(ValueError, match="2 tokens came with 1 logprobs"):
        sample.append([5, 6], logprobs=[-1.0])
    assert sample.response_length == 0


def test_from_dict_refuses_unknown_fields_and_uneven_arrays():
    data = make([1], [([2, 3], True)]).to_dict()
    with pytest.raises(ValueError, match="no field 'colour'"):
        Sample.from_dict({**data, "colour": 1})
    with pytest.raises(ValueError, match="one entry a response token"):
        Sample.from_dict({**data, "loss_mask": [1]})


def test_append_generation_takes_tokens_versions_and_status():
    sample = make([1, 2], [])
    sample.append_generation(
        Generation(
            tokens=np.array([7, 8]),
            text="ab",
            logprobs=np.array([-1.0, -2.0]),
            weight_versions=np.array([4, 5]),
            finish_reason="length",
        )
    )
    assert (sample.response, sample.status) == ("ab", Status.TRUNCATED)
    assert sample.weight_versions.tolist() == [4, 5]


def test_restart_makes_a_fresh_prompt():
    sample = make([1, 2], [([7], True)])
    sample.reward, sample.rewards = 1.0, {"math": 1.0}
    sample.restart()
    assert sample.tokens.tolist() == [1, 2]
    assert (sample.response, sample.response_length, sample.status) == ("", 0, Status.PENDING)
    assert sample.reward is None and sample.rewards == {}


def test_a_clone_shares_no_mutable_state():
    sample = make([1], [])
    sample.metadata["list"] = [1]
    twin = sample.clone()
    twin.metadata["list"].append(2)
    twin.turn_ends.append(1)
    twin.turn_rewards.append(0.5)
    twin.append([9], logprobs=[-1.0])
    assert (sample.metadata, sample.turn_ends, sample.turn_rewards) == ({"list": [1]}, [], [])
    assert sample.response_length == 0


def batch_of(lengths: list[tuple[int, int]]) -> TrainBatch:
    samples = []
    for i, (prompt, response) in enumerate(lengths):
        sample = make([100 * i] * prompt, [([100 * i + j for j in range(response)], True)], index=i, group_index=i // 2)
        sample.reward = float(i) if i % 3 else None
        samples.append(sample)
    batch = TrainBatch.from_samples(samples)
    batch.per_sample["twice"] = 2 * batch.sample_index
    batch.per_token["copy"] = batch.weight_versions.copy()
    return batch


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6), st.randoms())
def test_select_gives_the_samples_in_the_asked_order(lengths, random):
    batch = batch_of(lengths)
    batch.check()
    order = random.choices(range(len(lengths)), k=len(lengths))
    picked = batch.select(order)
    picked.check()
    token_rows = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    logprob_rows = np.split(batch.rollout_logprobs, np.cumsum(batch.response_lengths)[:-1])
    assert picked.tokens.tolist() == [t for i in order for t in token_rows[i].tolist()]
    assert picked.rollout_logprobs.tolist() == [x for i in order for x in logprob_rows[i].tolist()]
    assert picked.per_sample["twice"].tolist() == [2 * i for i in order]
    assert picked.num_samples == len(order)


def test_check_names_the_field_that_does_not_fit():
    batch = batch_of([(1, 2), (1, 1)])
    batch.loss_mask = batch.loss_mask[:-1]
    with pytest.raises(ValueError, match=r"TrainBatch\.loss_mask has 2 entries where 3 are needed"):
        batch.check()


def test_check_covers_extra_keys():
    batch = batch_of([(1, 2), (1, 1)])
    batch.per_token["copy"] = np.zeros(2)
    with pytest.raises(ValueError, match=r"per_token\['copy'\] has 2 rows where 3 are needed"):
        batch.check()


def test_missing_rewards_and_logprobs_are_nan_for_those_samples_alone():
    plain = make([1], [([2], False)], index=0)
    scored = make([1], [([2], True)], index=1)
    scored.reward = 0.0
    batch = TrainBatch.from_samples([plain, scored])
    assert np.isnan(batch.rewards).tolist() == [True, False]
    assert np.isnan(batch.rollout_logprobs).tolist() == [True, False]
