"""`--get-samples dataset`: prompts from --prompt-data, a fresh permutation every epoch; blank ones without a file."""

from __future__ import annotations

import logging
from typing import Any

from slime_core import DataError, Sample, hookimpl
from slime_core.options import Options
from slime_core.rollout.rows import PromptStream, open_prompt_files

logger = logging.getLogger(__name__)


class Dataset:
    """Opens the files once. The cursor is in `state`: how many samples each stream gave.

    Without weights all files are one stream; with weights each is its own, and the next sample comes from the stream
    that is furthest behind its share.
    """

    def __init__(self, args: Options) -> None:
        weighted = any(file.weight is not None for file in args.prompt_data)
        parts = [[file] for file in args.prompt_data] if weighted else [args.prompt_data] if args.prompt_data else []
        self._streams = [
            PromptStream(args, open_prompt_files(args, files), number) for number, files in enumerate(parts)
        ]
        self._weights = [1.0 if files[0].weight is None else files[0].weight for files in parts]
        self._num_rows = sum(len(stream) for stream in self._streams)
        if 0 < self._num_rows < args.rollout_batch_size:
            logger.warning(
                "--prompt-data has %d rows, fewer than --rollout-batch-size; a round draws them more than once",
                self._num_rows,
            )
        self._identity = {
            "seed": args.seed,
            "shuffle": args.shuffle,
            "weights": self._weights if weighted else [],
            "files": [entry for stream in self._streams for entry in stream.identity()],
        }

    @hookimpl
    def get_samples(self, state: dict[str, Any], num_prompts: int) -> list[Sample]:
        """The next samples, wrapping as often as needed.

        `state["epoch"]` counts the epochs that are over, `state["position"]` the samples drawn since; an epoch is as
        many samples as all files have rows, `state["num_rows"]`.
        """
        if not self._streams and not state:
            return [Sample() for _ in range(num_prompts)]
        drawn = self._drawn(state)
        samples = []
        for _ in range(num_prompts):
            # Webster's method: stream i gives its k-th sample (from 0) at time (k + 1/2) / weight
            next_up = min(range(len(drawn)), key=lambda i: ((drawn[i] + 0.5) / self._weights[i], i))
            samples.append(self._streams[next_up].sample(drawn[next_up]))
            drawn[next_up] += 1
        epoch, position = divmod(sum(drawn), self._num_rows)
        state |= {"drawn": drawn, "epoch": epoch, "position": position, "num_rows": self._num_rows}
        return samples

    def _drawn(self, state: dict[str, Any]) -> list[int]:
        """How many samples each stream gave, by a state that fits the data."""
        if not state:
            state["data"] = self._identity
            return [0] * len(self._streams)
        if problem := _difference(state.get("data"), self._identity):
            raise DataError(f"{problem} Give the run what it had, or start a new run without --resume.")
        return list(state["drawn"])


def _difference(saved: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """What would make a resumed run draw other prompts than an unbroken one; where a file lies does not."""
    if saved is None:
        return "the checkpoint's data state is not that of --get-samples dataset."
    if len(saved["files"]) != len(now["files"]):
        return f"--prompt-data names {len(now['files'])} files, at the checkpoint it was {len(saved['files'])}."
    for before, file in zip(saved["files"], now["files"], strict=True):
        if before["rows"] != file["rows"]:
            return f"{file['file']} has {file['rows']} usable rows, at the checkpoint it had {before['rows']}."
        if before["checksum"] != file["checksum"]:
            return f"the rows of {file['file']} are not those it had at the checkpoint."
    for name in ("weights", "seed", "shuffle"):
        if saved[name] != now[name]:
            return f"the order of the prompts depends on {name}, which was {saved[name]} and now is {now[name]}."
    return ""
