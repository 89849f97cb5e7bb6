"""Files run through as one, epoch after epoch, each in a fresh permutation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from slime_core.options import DataFile, Options
from slime_core.rollout.rows.order import Blocks, shuffled
from slime_core.rollout.rows.prompt_file import PromptFile, is_parquet, open_prompt_file
from slime_core.types import IntArray, Sample


class PromptStream:
    """An endless sequence of samples; the k-th is a function of the files, the seed and k alone.

    `number` tells the streams of a run apart.
    """

    def __init__(self, args: Options, files: list[DataFile], number: int = 0) -> None:
        self._args = args
        self._number = number
        self._files = _open_all(args, files)
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return self._ends[-1]

    @property
    def num_bad_rows(self) -> int:
        """Left out under `--skip-bad-rows`."""
        return sum(file.num_bad_rows for file in self._files)

    def identity(self) -> list[dict[str, Any]]:
        """What a checkpoint notes of every file, to know the data again; JSON-able."""
        return [{"file": str(file.path), "rows": len(file), "checksum": file.rows.checksum} for file in self._files]

    def sample(self, position: int) -> Sample:
        """The sample at `position`, which counts on over the epochs."""
        epoch, within = divmod(position, len(self))
        row = int(self._permutation(epoch)[within])
        file = int(np.searchsorted(self._ends, row, side="right"))
        return self._files[file].sample(self._args, row - (self._ends[file - 1] if file else 0))

    def _permutation(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            self._epoch = epoch
            if self._args.shuffle:
                blocks = Blocks.joined([file.rows.blocks for file in self._files])
                self._order = shuffled(blocks, [self._args.seed, self._number, epoch])
            else:
                self._order = np.arange(len(self))
        return self._order


def _open_all(args: Options, files: list[DataFile]) -> list[PromptFile]:
    """All files, the Parquet ones with one cache, so that the memory they take does not grow with their number."""
    if not any(is_parquet(file) for file in files):
        return [open_prompt_file(args, file) for file in files]
    from slime_core.rollout.rows.parquet import GroupCache

    cache = GroupCache()
    return [open_prompt_file(args, file, cache) for file in files]
