"""An agent for scripts/gateway_tiny.sh: it asks for a sum, and once more when the answer was wrong."""

from __future__ import annotations

import re

from openai import AsyncOpenAI

from slime_gateway import Task

BOXED = re.compile(r"\\boxed\{(\d+)\}")
NUM_TRIES = 2
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the task", timeout=600)
"""Agents share its connections: to make a client takes longer than to use it. By itself it gives up a connection after
5 s, which is short where a thousand agents begin at once."""


async def agent(task: Task) -> dict[str, float]:
    """The reward is 1 for a right answer at once, 1/2 at the second try."""
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    for number in range(1, NUM_TRIES + 1):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        message = answer.choices[0].message
        if BOXED.findall(message.content or "")[-1:] == [task.label]:
            return {"reward": 1 / number, "tries": number}
        messages += [message, {"role": "user", "content": task.prompt}]
    return {"reward": 0.0, "tries": NUM_TRIES}
