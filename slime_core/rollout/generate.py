"""The generate stage: one sample to the plugin, its samples back, checked and numbered."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_core.bound import Bound, blamed
from slime_core.engines.client import EngineClient, SampleEngine
from slime_core.engines.requests import Requests
from slime_core.errors import DataError, PluginError
from slime_core.options import Options
from slime_core.types import Sample, Status


def sampling_params(args: Options) -> dict[str, Any]:
    """The run's sampling parameters in SGLang's words."""
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "max_new_tokens": args.max_response_tokens,
        "stop": args.stop,
        "stop_token_ids": args.stop_token_ids,
    }


@dataclass(frozen=True)
class Generators:
    """The generators that --generate names; a row's metadata field `field` (--generate-field) picks one of them."""

    field: str | None
    by_name: dict[str, Bound]

    def of(self, sample: Sample) -> Bound:
        """The one that the sample's row names, or the first.

        Raises:
            DataError: when the row names one that --generate does not.
        """
        wanted = None if self.field is None else sample.metadata.get(self.field)
        if wanted is None:
            return next(iter(self.by_name.values()))
        if wanted not in self.by_name:
            raise DataError(
                f"a row of data set '{sample.dataset}' has metadata {self.field}={wanted!r}, which is none of the "
                f"generators that --generate names: {', '.join(self.by_name)}."
            )
        return self.by_name[wanted]


async def generate_samples(
    args: Options,
    generate: Bound,
    engine: EngineClient,
    requests: Requests,
    sample: Sample,
    params: dict[str, Any],
    *,
    evaluation: bool,
    take_index: Callable[[], int],
) -> list[Sample]:
    """What the plugin makes of `sample`; samples of a fan-out share its rollout index and have indices of their own.

    A plugin that takes longer than `--generate-timeout-s` is cancelled, and the sample FAILED. An ABORTED branch of a
    fan-out that came back may give none: a sibling has taken over, and its rollout's first sample, whose index is the
    rollout's, gives at least one.

    Args:
        requests: those of the round; once they are stopped the engine answers every request as aborted.

    Raises:
        DataError: when the row is to be trained, and sampled at another temperature than it is trained at.
        PluginError: when the plugin raises, or returns anything but a list of at least one finished sample.
    """
    own_temperature = sample.sampling_params.get("temperature", args.temperature)
    if not evaluation and args.num_trainers and own_temperature != args.temperature:
        raise DataError(
            f"{sample.origin or f'a row of data set {sample.dataset!r}'}: it is sampled at temperature "
            f"{own_temperature}, but the trainer computes at --temperature {args.temperature:g}: leave the temperature "
            "out of rows that are trained."
        )
    may_vanish = sample.status is Status.ABORTED and sample.index != sample.rollout_index
    seen = SampleEngine(engine, requests, args.seed, sample)
    own = {key: list(value) if isinstance(value, list) else value for key, value in params.items()}
    try:
        async with asyncio.timeout(args.generate_timeout_s):
            with blamed(generate):
                made = await generate(
                    args=args,
                    engine=seen,
                    sample=sample,
                    sampling_params={**own, **sample.sampling_params},
                    evaluation=evaluation,
                )
    except TimeoutError:  # the plugin's own would be a PluginError
        sample.fail(f"'{generate.name}' took longer than --generate-timeout-s {args.generate_timeout_s:g}")
        return [sample]
    if not isinstance(made, list) or not (made or may_vanish) or not all(isinstance(s, Sample) for s in made):
        what = f"a list of {len(made)}" if isinstance(made, list) else type(made).__name__
        raise PluginError(
            f"plugin '{generate.name}': generate must return a list of at least one Sample, got {what} "
            f"for sample {sample.index}."
        )
    if len({id(one) for one in made}) < len(made):
        raise PluginError(
            f"plugin '{generate.name}': generate returned the same Sample object twice for sample {sample.index}; each "
            "must be an object of its own, see Sample.clone."
        )
    index = sample.index
    for position, one in enumerate(made):
        if one.status is Status.PENDING:
            raise PluginError(
                f"plugin '{generate.name}': generate left sample {sample.index} PENDING; `append_generation` sets the "
                "status, or set it to Status.COMPLETED."
            )
        if one.reward is not None and not math.isfinite(one.reward):
            raise PluginError(f"plugin '{generate.name}': generate gave sample {sample.index} the reward {one.reward}.")
        one.group_index, one.rollout_index = sample.group_index, sample.rollout_index
        one.index = take_index() if position else index
    return made
