"""Samples in a file: nothing is lost, nothing is unpickled."""

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core import DataError, Sample, Status
from slime_core.rollout.sample_file import read_groups, write_groups

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(string.printable, max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(string.ascii_letters, max_size=4), inner),
    max_leaves=4,
)


@st.composite
def samples(draw):
    sample = Sample(
        prompt=draw(st.text(max_size=5)),
        label=draw(JSON),
        index=draw(st.integers(-1, 2**40)),
        group_index=draw(st.integers(0, 5)),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=3)), np.int32),
        metadata=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        train_metadata=draw(st.none() | st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        status=draw(st.sampled_from(list(Status))),
        session_id=draw(st.none() | st.text(max_size=3)),
    )
    for _ in range(draw(st.integers(0, 3))):
        tokens = draw(st.lists(st.integers(0, 1000), max_size=4))
        logprobs = draw(st.none() | st.just([-0.25] * len(tokens)))
        sample.append(tokens, text="x", logprobs=logprobs, trainable=draw(st.booleans()), weight_version=3)
    return sample


@settings(max_examples=50)
@given(groups=st.lists(st.lists(samples(), min_size=1, max_size=3), max_size=3))
def test_what_is_written_is_read_back(tmp_path_factory, groups):
    path = tmp_path_factory.mktemp("samples") / "groups.parquet"
    write_groups(path, groups)
    again = read_groups(path)
    assert [[s.to_dict() for s in group] for group in again] == [[s.to_dict() for s in group] for group in groups]
    assert all(s.tokens.dtype == np.int32 and s.logprobs.dtype == np.float32 for group in again for s in group)


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError):
        write_groups(tmp_path / "x.parquet", [[Sample(metadata={"file": object()})]])


@pytest.mark.parametrize("content", [b"", b"not parquet", b"PAR1broken"])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet is not a file of samples"):
        read_groups(path)
