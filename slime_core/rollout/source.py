"""Where a round's groups come from: the buffer first, then the `get_samples` plugin; where surplus groups go back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np

from slime_core.bound import Bound, blamed
from slime_core.engines.client import EngineClient
from slime_core.engines.model_dir import encode_prompt
from slime_core.errors import DataError, PluginError
from slime_core.options import Options
from slime_core.types import Group, Sample

logger = logging.getLogger(__name__)

MAX_TOO_LONG_DRAWS = 16
"""Draws in a row of which every prompt was too long, before the run stops."""


class Source:
    """Draws prompts, clones each to a group, numbers everything, and keeps the groups that wait.

    Conservation: `num_drawn` = groups trained + dropped + waiting, at every moment between rounds.
    """

    def __init__(self, args: Options, get_samples: Bound, buffer_filter: Bound, engine: EngineClient) -> None:
        self._args = args
        self._get_samples = get_samples
        self._buffer_filter = buffer_filter
        self._engine = engine
        self._state: dict[str, Any] = {}
        self._buffer: list[Group] = []
        self.num_drawn = 0
        self.num_too_long = 0
        self._next_index = 0

    @property
    def num_waiting(self) -> int:
        """Groups in the buffer."""
        return len(self._buffer)

    async def get_groups(self, num_groups: int) -> list[Group]:
        """Exactly `num_groups` groups: those the buffer filter takes, and new prompts for the rest."""
        groups = await self._take_waiting(num_groups)
        for sample in await self._draw(num_groups - len(groups)):
            groups.append(self._new_group(sample))
        return groups

    def add_groups(self, groups: list[Group]) -> None:
        """Let groups wait for a later round."""
        self._buffer.extend(groups)

    def take_index(self) -> int:
        """A fresh sample index, for samples that a generator adds."""
        self._next_index += 1
        return self._next_index - 1

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, JSON-able."""
        return {
            "plugin_state": self._state,
            "num_drawn": self.num_drawn,
            "num_too_long": self.num_too_long,
            "next_index": self._next_index,
            "buffer": [[sample.to_dict() for sample in group] for group in self._buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._state = state["plugin_state"]
        self.num_drawn = state["num_drawn"]
        self.num_too_long = state["num_too_long"]
        self._next_index = state["next_index"]
        self._buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]

    async def _take_waiting(self, num_groups: int) -> list[Group]:
        if not self._buffer:
            return []
        with blamed(self._buffer_filter):
            chosen = await asyncio.to_thread(
                self._buffer_filter, args=self._args, groups=list(self._buffer), num_groups=num_groups
            )
        waiting = {id(group) for group in self._buffer}
        taken = {id(group) for group in chosen}
        if len(chosen) > num_groups or len(taken) != len(chosen) or not taken <= waiting:
            raise PluginError(
                f"plugin '{self._buffer_filter.name}': buffer_filter must return at most {num_groups} of the groups "
                f"it was given, each once; it returned {len(chosen)}."
            )
        self._buffer = [group for group in self._buffer if id(group) not in taken]
        return list(chosen)

    async def _draw(self, num_prompts: int) -> list[Sample]:
        """New prompts with their tokens; too long ones are counted and others drawn instead."""
        samples: list[Sample] = []
        limit, fruitless = longest_prompt(self._args, self._engine), 0
        while len(samples) < num_prompts:
            good = await asyncio.to_thread(self._draw_once, num_prompts - len(samples))
            samples += good
            fruitless = 0 if good else fruitless + 1
            if fruitless == MAX_TOO_LONG_DRAWS:
                raise DataError(
                    f"{MAX_TOO_LONG_DRAWS} draws in a row gave only prompts longer than {limit} "
                    "tokens; raise --max-prompt-tokens (or the model's context) or shorten the data."
                )
        return samples

    def _draw_once(self, count: int) -> list[Sample]:
        with blamed(self._get_samples):
            drawn = self._get_samples(args=self._args, state=self._state, num_prompts=count)
        if not isinstance(drawn, list) or len(drawn) != count or not all(isinstance(s, Sample) for s in drawn):
            got = f"{len(drawn)} of them" if isinstance(drawn, list) else type(drawn).__name__
            raise PluginError(
                f"plugin '{self._get_samples.name}': get_samples must return a list of {count} samples, got {got}."
            )
        for sample in drawn:
            tokenize(self._args, self._engine, sample)
        limit = longest_prompt(self._args, self._engine)
        good = [sample for sample in drawn if len(sample.tokens) <= limit]
        if len(good) < count and not self.num_too_long:
            logger.warning("left out a prompt longer than %d tokens; data/too_long counts them", limit)
        self.num_too_long += count - len(good)
        return good

    def _new_group(self, prompt: Sample) -> Group:
        group = []
        for _ in range(self._args.n_samples_per_prompt):
            sample = prompt.clone()
            sample.group_index = self.num_drawn
            sample.index = sample.rollout_index = self.take_index()
            group.append(sample)
        self.num_drawn += 1
        return group


def tokenize(args: Options, engine: EngineClient, sample: Sample) -> None:
    """Give the sample its prompt's tokens, if it has a prompt and no tokens yet."""
    if not sample.prompt or len(sample.tokens):
        return
    tokens = encode_prompt(
        engine.tokenizer,
        sample.prompt,
        apply_chat_template=args.apply_chat_template,
        tools=sample.metadata.get("tools"),
        template_kwargs=args.chat_template_kwargs,
    )
    sample.tokens = np.asarray(tokens, np.int32)


def longest_prompt(args: Options, engine: EngineClient) -> int:
    """Most tokens a prompt may have: the flag, and room for one response token in the context."""
    limit = engine.context_tokens - 1
    return min(limit, args.max_prompt_tokens or limit)
