"""The order of an epoch: a permutation, uniform where it fits, within windows where not; few row groups in memory."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from slime_core.options import data_file
from slime_core.rollout.rows import PromptStream, open_prompt_file
from slime_core.rollout.rows.order import Blocks, shuffled
from slime_core.rollout.rows.parquet import GroupCache

BLOCKS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20)


def blocks_of(pairs):
    rows, sizes = zip(*pairs, strict=True)
    return Blocks(np.array(rows, np.int64), np.array(sizes, np.int64))


@given(pairs=BLOCKS, seed=st.integers(0, 99), window=st.integers(1, 30))
def test_it_is_a_permutation_that_the_seed_fixes(pairs, seed, window):
    blocks = blocks_of(pairs)
    once, again = (shuffled(blocks, [seed, 1], window) for _ in range(2))
    assert sorted(once) == list(range(sum(rows for rows, _ in pairs)))
    assert once.tolist() == again.tolist()


@given(pairs=BLOCKS, seed=st.integers(0, 99), window=st.integers(1, 30))
def test_a_reader_that_holds_one_window_reads_every_block_once(pairs, seed, window):
    block_of = np.repeat(np.arange(len(pairs)), [rows for rows, _ in pairs])
    held, reads = {}, Counter()
    for row in shuffled(blocks_of(pairs), [seed], window):
        block = int(block_of[row])
        size = pairs[block][1]
        if not size or block in held:
            continue
        while held and sum(held.values()) + size > window:
            held.pop(next(iter(held)))
        held[block] = size
        reads[block] += 1
    assert set(reads.values()) <= {1}


def test_what_fits_one_window_is_shuffled_uniformly():
    blocks = Blocks(np.array([1, 2, 1]), np.array([1, 1, 1]))
    counts = Counter(tuple(shuffled(blocks, [seed], 3).tolist()) for seed in range(4800))
    assert len(counts) == 24
    expected = 4800 / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 60  # 23 degrees of freedom: p < 4e-5


def test_an_epoch_reads_every_row_group_once_and_holds_one_window(make_args, tmp_path, monkeypatch):
    files = []
    for name in ("a", "b"):
        table = pa.table({"prompt": [f"{name}{i:02}" for i in range(60)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=5, use_dictionary=False)
        files.append(data_file(str(tmp_path / f"{name}.parquet")))
    cache = GroupCache(window_bytes=int(open_prompt_file(make_args(), files[0]).rows.group_bytes.max()) * 3)
    opened = [open_prompt_file(make_args(), file, cache) for file in files]
    reads = Counter()
    read_row_group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda file, group, **options: (reads.update([(id(file), group)]), read_row_group(file, group, **options))[1],
    )
    stream = PromptStream(make_args(), opened, window_bytes=cache.window_bytes)
    drawn, most = [], 0
    for position in range(120):
        drawn.append(stream.sample(position).prompt)
        most = max(most, len(cache))
    assert sorted(drawn) == [f"{name}{i:02}" for name in "ab" for i in range(60)]
    assert (len(reads), set(reads.values()), most) == (24, {1}, 3)


def test_files_and_formats_mix_within_an_epoch():
    lines = Blocks(np.full(50, 100), np.zeros(50, np.int64))
    groups = Blocks(np.full(50, 100), np.full(50, 10))
    order = shuffled(Blocks.joined([lines, groups]), [3], 100)
    share = [(part < 5000).mean() for part in np.split(order, 5)]
    assert 0.25 < min(share) < max(share) < 0.75
