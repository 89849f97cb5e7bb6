"""A plugin's reward, called as training calls it, on ordinary and on hostile samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_core.contract.finding import Finding, ok, problem, unchecked
from slime_core.hostile import hostile_samples
from slime_core.options import Options
from slime_core.plugins import Plugins, plugin_name
from slime_core.rollout.reward import Rewards
from slime_core.rollout.tally import Tally
from slime_core.score.grading import NoEngine
from slime_core.types import Group, Sample, Status

ENDED_BY_CORE = ("took longer than", "its worker process", "MemoryError")
"""Parts of a failure by which the worker pool, not the plugin, gave up."""
SHOWN_CHARACTERS = 60


def ordinary_samples() -> list[Sample]:
    """A right answer whose label and metadata suit rewards of many kinds."""
    metadata = {
        "choices": ["3", "4", "5", "6"],
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    sample = Sample(prompt="What is 2+2?", label="4", metadata=metadata, index=0, group_index=0)
    sample.append([0] * 8, text=r"It is \boxed{4}", logprobs=[-1.0] * 8, weight_version=0)
    sample.status = Status.COMPLETED
    return [sample]


async def check_rewards(
    plugins: Plugins, reference: str, args: Options, samples: Sequence[Sample], own_samples: bool
) -> list[Finding]:
    """Whether ordinary samples get a number, and hostile ones a number or at least FAILED in time."""
    name = plugin_name(reference)
    hook = next((hook for hook in ("reward", "group_reward") if plugins.implements(hook, name)), None)
    if hook is None:
        return []
    rewards = Rewards(args, plugins, NoEngine())  # type: ignore[arg-type]
    try:
        first = [sample.clone() for sample in samples]
        await _score(rewards, hook, first)
        failed = [sample for sample in first if sample.status is Status.FAILED]
        if failed:
            text = f"the response {_shown(failed[0].response)} with label {failed[0].label!r}: {failed[0].failure}"
            hint = "give rows that it can grade (--rows FILE, or samples=)"
            return [problem(hook, text) if own_samples else unchecked(hook, f"{text}; {hint}")]
        graded = ", ".join(f"{sample.reward:g}" for sample in first[:3] if sample.reward is not None)
        hostile = hostile_samples(samples[0])
        await _score(rewards, hook, hostile)
    finally:
        rewards.close()
    return [ok(hook, f"an ordinary sample gets {graded}"), *_hostile_findings(hostile)]


async def _score(rewards: Rewards, hook: str, samples: Group) -> None:
    tally = Tally(first_failure="found by a check")
    if hook == "reward":
        await asyncio.gather(*(rewards.score_sample(sample, tally) for sample in samples))
        await asyncio.gather(*(rewards.score_group([sample], tally) for sample in samples))
        return
    pairs = [samples[start : start + 2] for start in range(0, len(samples), 2)]
    await asyncio.gather(*(rewards.score_group(pair, tally) for pair in pairs))


def _hostile_findings(samples: Group) -> list[Finding]:
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    ended = [sample for sample in failed if any(part in str(sample.failure) for part in ENDED_BY_CORE)]
    raised = [sample for sample in failed if sample not in ended]
    what = "survives hostile samples"
    if raised:
        one = raised[0]
        return [
            problem(
                what,
                f"{len(raised)} of {len(samples)} responses make it fail on a row that it can grade, so a model can "
                f"escape a low reward; for example {_shown(one.response)}: {one.failure}",
            )
        ]
    text = f"{len(samples)} of them"
    if ended:
        text += f"; {len(ended)} were FAILED by the time or memory limit, for example {_shown(ended[0].response)}"
    return [ok(what, text)]


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
