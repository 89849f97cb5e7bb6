"""The nouns of a run: Sample, Group, Generation, Drop, TrainBatch, Shard. Only numpy, so that plugins import fast."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.extra_keys import round_numbers, shared_rewards, turn_rewards

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]

NO_VERSION = -1
"""The weight version of a token that no engine sampled (tool output, demonstrations)."""


class Status(StrEnum):
    """How far a sample has come."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


FINISH_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Engine finish reason -> sample status."""


@dataclass
class Sample:
    """One response to one prompt, from the prompt to what is trained.

    `tokens` holds the prompt and the response (int32). The four arrays of the response, `loss_mask` (uint8), `logprobs`
    (float32, NaN where no engine sampled the token) and `weight_versions` (int32, -1 likewise), always have
    `response_length` elements, because `append` is the only way to grow a sample.
    """

    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    index: int = -1
    """Number of the sample in the run, unique."""
    group_index: int = -1
    """Number of its prompt's draw in the run; the samples of a group share it."""
    rollout_index: int = -1
    """Samples that one generate call fanned out share it; by default the sample's own index."""
    dataset: str = "train"
    tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    response: str = ""
    loss_mask: IntArray = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    weight_versions: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    status: Status = Status.PENDING
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """What each reward plugin gave, before weighting, and the extra keys of a dict reward."""
    failure: str | None = None
    """Why the status is FAILED."""
    sampling_params: dict[str, Any] = field(default_factory=dict)
    """This sample's own sampling parameters, over those of the run."""
    origin: str = ""
    """The file and line that the prompt is from, for errors to name."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """From the data set's row, and what plugins note."""
    train_metadata: dict[str, Any] | None = None
    """Travels to the loss with the sample."""
    multimodal: dict[str, Any] | None = None
    """By kind: `{"image": [...]}`, data URIs in the order of their places in the prompt."""
    unexpanded_prompt: list[int] | None = None
    """The prompt's ids with one placeholder an image, as engines take it; None where `tokens` begins with these."""
    processed: dict[str, npt.NDArray[Any]] | None = None
    """What the model's processor made of the images beside tokens; shared by the samples of a prompt, not saved."""
    session_id: str | None = None
    """Turns of one session go to the same engine where the router can."""
    turn_ends: list[int] = field(default_factory=list)
    """Of a sample of several turns: how many response tokens there were when each of the model's turns ended."""
    turn_rewards: list[float] = field(default_factory=list)
    """One a turn, where a generator or reward gives them; they reach the loss beside `reward` and are no part of it."""
    shares_reward: bool = False
    """One trajectory made several samples: this one is not graded but has the reward of the one that is."""

    @property
    def response_length(self) -> int:
        """Number of response tokens."""
        return len(self.loss_mask)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - len(self.loss_mask)

    def append(
        self,
        tokens: Sequence[int] | IntArray,
        *,
        text: str = "",
        logprobs: Sequence[float] | FloatArray | None = None,
        trainable: bool = True,
        weight_version: int | IntArray = NO_VERSION,
    ) -> None:
        """Add response tokens: sampled ones with their logprobs, or others (tool output) with `trainable=False`.

        Args:
            tokens: [n] token ids, never made by encoding generated text again.
            text: what to add to `response`.
            logprobs: [n] log-probabilities under the engine's policy; None where no engine sampled them.
            trainable: whether the tokens get loss mask 1.
            weight_version: the version that made them, one for all or [n].

        Raises:
            ValueError: when lengths differ.
        """
        added = np.asarray(tokens, np.int32)
        if added.ndim != 1:
            raise ValueError(f"tokens must be a flat sequence of ids, got shape {added.shape}")
        count = len(added)
        logp = np.full(count, np.nan, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
        versions = np.broadcast_to(np.asarray(weight_version, np.int32), (count,)) if count else np.empty(0, np.int32)
        if logp.shape != (count,):
            raise ValueError(f"{count} tokens came with {logp.size} logprobs")
        self.tokens = np.concatenate([self.tokens, added])
        self.loss_mask = np.concatenate([self.loss_mask, np.full(count, int(trainable), np.uint8)])
        self.logprobs = np.concatenate([self.logprobs, logp])
        self.weight_versions = np.concatenate([self.weight_versions, versions])
        self.response += text

    def append_generation(self, generation: Generation) -> None:
        """Add what an engine generated, and take its finish reason as the sample's status."""
        self.append(
            generation.tokens,
            text=generation.text,
            logprobs=generation.logprobs,
            weight_version=generation.weight_versions,
        )
        self.status = generation.status

    def fail(self, reason: str) -> None:
        """Mark the sample FAILED: it has no reward, leaves its group, and is counted under `reason`."""
        self.status, self.reward, self.failure = Status.FAILED, None, reason

    def restart(self) -> None:
        """Make it a fresh prompt again: the response and everything that came of it is forgotten."""
        self.tokens = self.tokens[: self.prompt_length]
        self.response = ""
        self.loss_mask, self.logprobs = np.empty(0, np.uint8), np.empty(0, np.float32)
        self.weight_versions = np.empty(0, np.int32)
        self.status, self.reward, self.rewards, self.failure = Status.PENDING, None, {}, None
        self.turn_ends, self.turn_rewards, self.shares_reward = [], [], False

    def clone(self) -> Sample:
        """A copy that shares no mutable state with this sample; the arrays are shared, as `append` makes new ones."""
        twin = copy.copy(self)
        for name in ("prompt", "label", "rewards", "sampling_params", "metadata", "train_metadata", "multimodal"):
            setattr(twin, name, copy.deepcopy(getattr(self, name)))
        twin.turn_ends, twin.turn_rewards = list(self.turn_ends), list(self.turn_rewards)
        return twin

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` gives the sample back, without `processed`. NaN logprobs become null."""
        out: dict[str, Any] = {}
        for f in fields(self):
            if f.name == "processed":
                continue
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            out[f.name] = copy.deepcopy(value)
        out["logprobs"] = [None if x != x else x for x in out["logprobs"]]
        out["status"] = self.status.value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The sample that `to_dict` wrote.

        Raises:
            ValueError: on a key that no sample has, or arrays that do not fit together.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"a sample has no field {', '.join(map(repr, unknown))}")
        sample = cls(**copy.deepcopy(data))
        sample.tokens = np.asarray(sample.tokens, np.int32)
        sample.loss_mask = np.asarray(sample.loss_mask, np.uint8)
        sample.logprobs = np.asarray([np.nan if x is None else x for x in sample.logprobs], np.float32)
        sample.weight_versions = np.asarray(sample.weight_versions, np.int32)
        sample.status = Status(sample.status)
        sample.check()
        return sample

    def check(self) -> None:
        """Refuse arrays that do not fit together.

        Raises:
            ValueError: naming what is wrong.
        """
        n = self.response_length
        if not (len(self.logprobs) == len(self.weight_versions) == n <= len(self.tokens)):
            raise ValueError("loss_mask, logprobs and weight_versions of a sample must have one entry a response token")


Group: TypeAlias = list[Sample]
"""The samples of one prompt; told by `group_index`, of any size (fan-out)."""


@dataclass(frozen=True)
class Generation:
    """What an engine answered to one request.

    `tokens` int32 [n], `logprobs` float32 [n] at the sampling temperature, `weight_versions` int32 [n].
    """

    tokens: IntArray
    text: str
    logprobs: FloatArray
    weight_versions: IntArray
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def status(self) -> Status:
        """The finish reason as a sample's status."""
        return FINISH_STATUS[self.finish_reason]


@dataclass(frozen=True)
class Drop:
    """A dynamic filter's objection to a group. `spare=True` lets the group be used when too few remain."""

    reason: str
    spare: bool = False


@dataclass
class TrainBatch:
    """The samples of a round, or one rank's share, as flat arrays; Ray passes it on without copying them.

    With S samples, T tokens and R response tokens in all:
    """

    tokens: IntArray
    """[T] int32, prompt and response of sample after sample."""
    lengths: IntArray
    """[S] int32, tokens of each sample."""
    response_lengths: IntArray
    """[S] int32, response tokens of each sample (the last ones)."""
    loss_mask: IntArray
    """[R] uint8, 1 where the token is trained."""
    rollout_logprobs: FloatArray
    """[R] float32, the engine's log-probabilities; NaN where no engine sampled the token."""
    weight_versions: IntArray
    """[R] int32, the version that made each token, -1 where no engine did."""
    rewards: FloatArray
    """[S] float64, raw; NaN where a sample has none."""
    sample_index: IntArray
    """[S] int64."""
    group_index: IntArray
    """[S] int64."""
    rollout_index: IntArray
    """[S] int64, shared by samples of one fan-out."""
    truncated: npt.NDArray[np.bool_]
    """[S] bool, the response ended for length."""
    metadata: list[dict[str, Any] | None]
    """[S] `train_metadata` of each sample."""
    multimodal: list[dict[str, Any] | None]
    """[S] images and the like; under `processed` what the model's processor made of them, for the model's forward."""
    per_sample: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """A converter's extra keys with one row a sample."""
    per_token: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """A converter's extra keys with one row a response token."""

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.lengths)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> TrainBatch:
        """Pack samples in the given order."""

        def flat(parts: Iterable[npt.NDArray[Any]], dtype: Any) -> Any:
            return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

        return cls(
            tokens=flat((s.tokens for s in samples), np.int32),
            lengths=np.array([len(s.tokens) for s in samples], np.int32),
            response_lengths=np.array([s.response_length for s in samples], np.int32),
            loss_mask=flat((s.loss_mask for s in samples), np.uint8),
            rollout_logprobs=flat((s.logprobs for s in samples), np.float32),
            weight_versions=flat((s.weight_versions for s in samples), np.int32),
            rewards=np.array([np.nan if s.reward is None else s.reward for s in samples], np.float64),
            sample_index=np.array([s.index for s in samples], np.int64),
            group_index=np.array([s.group_index for s in samples], np.int64),
            rollout_index=np.array([s.rollout_index for s in samples], np.int64),
            truncated=np.array([s.status is Status.TRUNCATED for s in samples], np.bool_),
            metadata=[s.train_metadata for s in samples],
            multimodal=[_with_processed(s) for s in samples],
            per_sample=round_numbers(samples) | shared_rewards(samples),
            per_token=turn_rewards(samples),
        )

    def select(self, positions: Sequence[int] | IntArray) -> TrainBatch:
        """The samples at these positions, in this order, with every extra key; the batch itself, if that is all."""
        rows = np.asarray(positions, np.int64)
        if np.array_equal(rows, np.arange(self.num_samples)):
            return self
        per_response = _Pieces(self.response_lengths, rows)
        return TrainBatch(
            tokens=_Pieces(self.lengths, rows).of(self.tokens),
            lengths=self.lengths[rows],
            response_lengths=self.response_lengths[rows],
            loss_mask=per_response.of(self.loss_mask),
            rollout_logprobs=per_response.of(self.rollout_logprobs),
            weight_versions=per_response.of(self.weight_versions),
            rewards=self.rewards[rows],
            sample_index=self.sample_index[rows],
            group_index=self.group_index[rows],
            rollout_index=self.rollout_index[rows],
            truncated=self.truncated[rows],
            metadata=[self.metadata[i] for i in rows],
            multimodal=[self.multimodal[i] for i in rows],
            per_sample={key: value[rows] for key, value in self.per_sample.items()},
            per_token={key: per_response.of(value) for key, value in self.per_token.items()},
        )

    def check(self) -> None:
        """Refuse a batch whose arrays do not fit together.

        Raises:
            ValueError: naming the field.
        """
        sizes = {"tokens": int(self.lengths.sum())}
        per_response = int(self.response_lengths.sum())
        sizes |= dict.fromkeys(("loss_mask", "rollout_logprobs", "weight_versions"), per_response)
        per_sample = ("response_lengths", "rewards", "sample_index", "group_index", "rollout_index", "truncated")
        sizes |= dict.fromkeys((*per_sample, "metadata", "multimodal"), self.num_samples)
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                raise ValueError(f"TrainBatch.{name} has {len(getattr(self, name))} entries where {size} are needed")
        if (self.response_lengths > self.lengths).any():
            raise ValueError("TrainBatch.response_lengths has a response longer than its sample")
        for kind, extras, size in (
            ("per_sample", self.per_sample, self.num_samples),
            ("per_token", self.per_token, per_response),
        ):
            for key, value in extras.items():
                if len(value) != size:
                    raise ValueError(f"TrainBatch.{kind}[{key!r}] has {len(value)} rows where {size} are needed")


class _Pieces:
    """Where the elements of the given rows are in a flat array whose row i holds `lengths[i]` of them."""

    def __init__(self, lengths: IntArray, rows: IntArray) -> None:
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = (ends - lengths)[rows].tolist()
        self._slices = [slice(start, end) for start, end in zip(starts, ends[rows].tolist(), strict=True)]

    def of(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows' elements, row after row; copied piece by piece, many times faster than by an index of elements."""
        return np.concatenate([flat[:0], *(flat[piece] for piece in self._slices)])


def _with_processed(sample: Sample) -> dict[str, Any] | None:
    """The sample's images with what the processor made of them."""
    if sample.processed is None:
        return sample.multimodal
    return {**(sample.multimodal or {}), "processed": sample.processed}


def spans(lengths: IntArray, rows: IntArray) -> IntArray:
    """Flat positions of the given rows' elements, where row i holds `lengths[i]` consecutive elements."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    counts = lengths[rows].astype(np.int64)
    within = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    positions: IntArray = np.repeat(starts[rows], counts) + within
    return positions


@dataclass
class Shard:
    """One rank's share of a round, and what it must know of the whole."""

    batch: TrainBatch
    step_ends: list[int]
    """Optimiser step k trains the samples from `step_ends[k - 1]` (or 0) up to `step_ends[k]`."""
    round_rewards: FloatArray
    """float64, the raw reward of every sample of the round, NaN where it has none."""
    round_group_index: IntArray
    """int64, likewise."""
