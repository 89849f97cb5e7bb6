"""Small samples and groups of every kind that a hook may meet."""

from __future__ import annotations

from slime_core.testing import make_group, make_sample
from slime_core.types import Group, Sample, Status


def prompt_sample() -> Sample:
    """A prompt that waits for its generation."""
    return make_sample(prompt="What is 2+2?", label="4", status=Status.PENDING, index=0, group_index=0, rollout_index=0)


def groups() -> list[Group]:
    """Scored groups: of one and of several samples, equal and different rewards, truncated, empty, fanned out."""
    made = [
        make_group([0.0, 1.0], 0),
        make_group([1.0, 1.0, 1.0], 1),
        make_group([0.0, 0.0], 2),
        make_group([0.5], 3),
        make_group([-1.0, 0.25, 2.5, 0.0, 1.0], 4),
    ]
    truncated = [make_sample("cut", status=Status.TRUNCATED, reward=0.0), make_sample("", reward=1.0)]
    fanned = [make_sample("turn", reward=1.0) for _ in range(3)]
    for number, group in enumerate((truncated, fanned), start=len(made)):
        for position, sample in enumerate(group):
            sample.group_index, sample.index = number, 100 * number + position
            sample.rollout_index = sample.index if group is truncated else 100 * number
        made.append(group)
    return made


def waiting_groups() -> list[Group]:
    """Groups as the buffer holds them: fresh, aborted with some tokens, partly scored, finished."""
    fresh, aborted = prompt_sample(), make_sample("half an ans", prompt="What?", status=Status.ABORTED)
    old = make_sample("old", reward=0.5)
    old.append([1, 2], text="er", logprobs=[-1.0, -1.0], weight_version=3)
    tools = make_sample("call")
    tools.append([5], text="!", trainable=False)
    tools.status = Status.ABORTED
    made = [[fresh], [aborted, make_sample("done", reward=1.0)], [old], [tools, prompt_sample()], [prompt_sample()]]
    for number, group in enumerate(made):
        for sample in group:
            sample.group_index = number
    return made
