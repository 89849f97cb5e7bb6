"""Files run through as one, epoch after epoch, each in a fresh permutation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from slime_core.options import Options
from slime_core.rollout.rows.order import WINDOW_BYTES, Blocks, shuffled
from slime_core.rollout.rows.prompt_file import PromptFile
from slime_core.types import IntArray, Sample


class PromptStream:
    """An endless sequence of samples; the k-th is a function of the files, the seed and k alone.

    `number` tells the streams of a run apart; `window_bytes` of row groups are shuffled at a time.
    """

    def __init__(
        self, args: Options, files: list[PromptFile], number: int = 0, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._args = args
        self._number = number
        self._window_bytes = window_bytes
        self._files = files
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
                self._order = shuffled(blocks, [self._args.seed, self._number, epoch], self._window_bytes)
            else:
                self._order = np.arange(len(self))
        return self._order
