"""`--get-samples dataset`: prompts from --prompt-data, a fresh permutation every epoch; blank ones without a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime_core import Sample, hookimpl
from slime_core.options import Options
from slime_core.rollout.rows import open_prompt_file
from slime_core.types import IntArray


class Dataset:
    """Reads the file once and keeps the permutation of the current epoch; the cursor is in `state`."""

    def __init__(self, args: Options) -> None:
        self._file = open_prompt_file(args, args.prompt_data) if args.prompt_data else None
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int64)

    @hookimpl
    def get_samples(self, args: Options, state: dict[str, Any], num_prompts: int) -> list[Sample]:
        """The next rows, wrapping as often as needed."""
        if self._file is None:
            return [Sample() for _ in range(num_prompts)]
        state.setdefault("epoch", 0)
        state.setdefault("position", 0)
        samples = []
        while len(samples) < num_prompts:
            if state["position"] == len(self._file):
                state["epoch"], state["position"] = state["epoch"] + 1, 0
            order = self._permutation(args, state["epoch"])
            samples.append(self._file.sample(args, int(order[state["position"]])))
            state["position"] += 1
        return samples

    def _permutation(self, args: Options, epoch: int) -> IntArray:
        """Row order of an epoch, a function of the seed and the epoch alone."""
        if epoch != self._epoch and self._file is not None:
            self._epoch = epoch
            self._order = np.arange(len(self._file))
            if args.shuffle:
                np.random.default_rng([args.seed, epoch]).shuffle(self._order)
        return self._order
