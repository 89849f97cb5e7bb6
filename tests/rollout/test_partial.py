"""Partial rollout: what a round did not need comes back with its tokens, is masked or grown too old by its versions."""

import asyncio

import numpy as np
import pytest
from aiohttp import web

from served import served
from slime_core import Sample, Status
from slime_core.errors import OptionError
from slime_core.options import Options
from slime_core.rollout.manager import RolloutManager
from slime_core.rollout.staleness import mask_older, oldest_version

LONG = 20
"""Tokens of a prompt that the engine is slow to answer."""


class WordEngine:
    """Answers at once with all tokens asked for, but while its version is 0 it has one token for a long prompt and
    waits to be aborted. Others wait until `num_slow` of those have come."""

    def __init__(self) -> None:
        self.version = self.num_slow = 0
        self.finish_slow, self.may_abort = False, asyncio.Event()
        self.may_abort.set()
        self.running: dict[str, asyncio.Event] = {}
        self.asked: list[dict] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        wanted = body["sampling_params"]["max_new_tokens"]
        slow = len(body["input_ids"]) >= LONG and not self.finish_slow
        count, finish = (1, "abort") if slow and self.version == 0 else (wanted, "length")
        if finish == "abort":
            await self.running.setdefault(body["rid"], asyncio.Event()).wait()
        while len(self.running) < self.num_slow:
            await asyncio.sleep(0.005)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": finish, "length": count},
            "output_token_logprobs": [[-0.5 - self.version, 7, None]] * count,
            "weight_version": str(self.version),
            "prompt_tokens": len(body["input_ids"]),
        }
        return web.json_response({"text": "x" * count, "output_ids": [7] * count, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        await self.may_abort.wait()
        for event in self.running.values():
            event.set()
        return web.Response()


@pytest.fixture
async def engine():
    words = WordEngine()
    app = web.Application()
    app.router.add_post("/generate", words.generate)
    app.router.add_post("/abort_request", words.abort)
    async with served(app) as words.url:
        yield words


@pytest.fixture
def start(engine, make_args, write_rows, plugin_file):
    """`start(prompts, *words)` -> a manager on the engine; groups of 2, rounds of 2, 4 tokens a response."""
    managers = []

    def make(prompts, *words, num_ranks=1) -> RolloutManager:
        rows = write_rows([{"prompt": prompt} for prompt in prompts])
        grader = plugin_file("by_index", "@hookimpl\nasync def reward(sample): return float(sample.index % 2)")
        args: Options = make_args(
            "--prompt-data", rows, "--no-shuffle", "--max-response-tokens", "4", "--over-sampling-batch-size", "4",
            "--reward", grader, *words,
        )  # fmt: skip
        engine.num_slow = 2 * sum(len(prompt) >= LONG for prompt in prompts)
        managers.append(RolloutManager(args, engine.url, [engine.url], num_ranks))
        return managers[-1]

    yield make


PARTIAL = ("--partial-rollout", "--max-staleness", "1")
PROMPTS = ["slow 0" + "!" * LONG, "fast 1", "slow 2" + "!" * LONG, "fast 3", "fast 4", "fast 5", "fast 6", "fast 7"]


async def waiting_groups(manager):
    await manager.source.settle()
    return manager.source.waiting()[0]


async def test_an_aborted_group_waits_with_its_tokens_and_is_continued(engine, start):
    manager = start(PROMPTS, *PARTIAL)
    first = await manager.rollout(0)
    assert sorted(set(first.shards[0].batch.group_index.tolist())) == [1, 3]
    partial = await waiting_groups(manager)
    assert [group[0].group_index for group in partial] == [0, 2]
    assert {s.status for group in partial for s in group} == {Status.ABORTED}
    assert [s.weight_versions.tolist() for group in partial for s in group] == [[0]] * 4

    engine.version = 1
    second = await manager.rollout(1)
    batch = second.shards[0].batch
    assert sorted(set(batch.group_index.tolist())) == [0, 2], "those that waited come first"
    assert batch.weight_versions.reshape(4, 4).tolist() == [[0, 1, 1, 1]] * 4
    assert batch.rollout_logprobs.reshape(4, 4).tolist() == [[-0.5, -1.5, -1.5, -1.5]] * 4
    assert batch.loss_mask.all()
    continued = [body for body in engine.asked if body["sampling_params"]["max_new_tokens"] == 3]
    assert len(continued) == 4 and all(body["input_ids"][-1] == 7 for body in continued)
    await manager.close()


async def test_new_weights_wait_for_requests_that_are_not_needed(engine, start):
    """Tokens that a request makes while it is being aborted would be of both weights."""
    engine.may_abort.clear()
    manager = start(PROMPTS, *PARTIAL)
    await manager.rollout(0)
    freeing = asyncio.create_task(manager.engines_free())
    await asyncio.sleep(0.1)
    assert not freeing.done() and any(not event.is_set() for event in engine.running.values())
    engine.may_abort.set()
    await freeing
    assert all(event.is_set() for event in engine.running.values())
    await manager.close()


async def test_older_tokens_are_masked_when_asked(engine, start):
    manager = start(PROMPTS, "--partial-rollout", "--mask-offpolicy-in-partial-rollout")
    await manager.rollout(0)
    await manager.source.settle()
    engine.version = 1
    batch = (await manager.rollout(1)).shards[0].batch
    assert batch.loss_mask.reshape(4, 4).tolist() == [[0, 1, 1, 1]] * 4
    assert batch.weight_versions.reshape(4, 4).tolist() == [[0, 1, 1, 1]] * 4
    await manager.close()


async def test_without_trainers_no_token_is_of_earlier_weights(engine, start):
    manager = start(PROMPTS, "--partial-rollout", "--mask-offpolicy-in-partial-rollout", num_ranks=0)
    await manager.rollout(0, version=0)
    await manager.source.settle()
    engine.num_slow = 0
    engine.finish_slow = True
    batch = (await manager.rollout(1, version=1)).shards[0].batch
    assert batch.loss_mask.all()
    await manager.close()


async def test_a_group_grown_too_old_becomes_a_fresh_prompt(engine, start):
    manager = start(PROMPTS, *PARTIAL)
    await manager.rollout(0)
    await manager.source.settle()
    engine.version = 2
    batch = (await manager.rollout(2)).shards[0].batch
    assert sorted(set(batch.group_index.tolist())) == [0, 2]
    assert set(batch.weight_versions.tolist()) == {2}
    assert manager.source.num_restarted == 2
    await manager.close()


async def test_without_partial_rollout_only_the_prompts_come_back(engine, start):
    manager = start(PROMPTS)
    await manager.rollout(0)
    fresh = await waiting_groups(manager)
    assert [s.status for group in fresh for s in group] == [Status.PENDING] * 4
    assert all(s.response_length == 0 and s.reward is None for group in fresh for s in group)
    await manager.close()


SLOW_TO_JUDGE = """
import time
judged = {2, 3, 4, 5, 6, 7}
@hookimpl
def dynamic_filter(samples):
    if samples[0].group_index not in judged:
        judged.add(samples[0].group_index)
        time.sleep(0.3)
"""
"""For the first two groups, the first time."""


async def test_a_finished_group_that_was_not_needed_keeps_rewards_and_is_trained_without_another_request(
    engine, start, plugin_file
):
    """Two groups are scored and not judged yet when the batch is full."""
    judge = plugin_file("slow_to_judge", SLOW_TO_JUDGE)
    manager = start(["fast 0", "fast 1", "fast 2", "fast 3", "fast 4"], *PARTIAL, "--dynamic-filter", judge)
    await manager.rollout(0)
    surplus = await waiting_groups(manager)
    assert len(surplus) == 2
    finished = [group for group in surplus if all(s.status is Status.TRUNCATED for s in group)]
    assert finished and all(s.reward is not None for group in finished for s in group)
    asked = len(engine.asked)
    second = (await manager.rollout(1)).shards[0].batch
    new_groups = manager.source.num_drawn - 4
    assert len(engine.asked) - asked == 2 * (2 - len(finished) + new_groups), "nothing that was finished is asked again"
    assert {group[0].group_index for group in finished} <= set(second.group_index.tolist())
    await manager.close()


async def test_partial_groups_survive_a_checkpoint(engine, start, tmp_path):
    manager = start(PROMPTS, *PARTIAL)
    await manager.rollout(0)
    await manager.save(tmp_path, 1)
    before = await waiting_groups(manager)
    await manager.close()
    resumed = start(PROMPTS, *PARTIAL)
    resumed.load(tmp_path)
    after = await waiting_groups(resumed)
    assert [[s.to_dict() for s in group] for group in after] == [[s.to_dict() for s in group] for group in before]
    engine.version = 5
    await resumed.rollout(5)
    assert resumed.source.num_restarted == 2, "the pristine prompts were saved as well"
    await resumed.close()


async def test_a_round_collected_ahead_is_saved_as_waiting(engine, start, tmp_path):
    manager = start(["fast 0", "fast 1", "fast 2"], "--max-staleness", "1", "--over-sampling-batch-size", "2")
    await manager.rollout(0)
    await manager.rollout(1, version=0)
    await manager.save(tmp_path, 1)
    await manager.close()
    resumed = start(["fast 0", "fast 1", "fast 2"], "--max-staleness", "1", "--over-sampling-batch-size", "2")
    resumed.load(tmp_path)
    assert (resumed.num_trained, resumed.source.num_waiting, resumed.source.num_drawn) == (2, 2, 4)
    asked = len(engine.asked)
    batch = (await resumed.rollout(1)).shards[0].batch
    assert sorted(set(batch.group_index.tolist())) == [2, 3]
    assert len(engine.asked) == asked, "they are finished already"
    await resumed.close()


BRANCHING = """
@hookimpl
async def generate(engine, sample, sampling_params):
    if sample.status is Status.PENDING:
        branches = [sample, sample.clone(), sample.clone()]
    else:
        branches = [sample]
    for branch in branches:
        room = {**sampling_params, "max_new_tokens": 4 - branch.response_length}
        branch.append_generation(await engine.generate(branch.tokens, room))
    return branches
"""


async def test_branches_of_a_fan_out_are_continued_each_by_itself(engine, start, plugin_file):
    manager = start(PROMPTS, *PARTIAL, "--generate", plugin_file("branching", BRANCHING))
    engine.num_slow = 4  # the other branches wait for the first one's answer
    await manager.rollout(0)
    partial = await waiting_groups(manager)
    assert [len(group) for group in partial] == [6, 6]
    indices = [[(s.index, s.rollout_index) for s in group] for group in partial]
    engine.version = 1
    batch = (await manager.rollout(1)).shards[0].batch
    assert batch.num_samples == 12
    expected = sorted(pair for group in indices for pair in group)
    assert sorted(zip(batch.sample_index.tolist(), batch.rollout_index.tolist(), strict=True)) == expected
    await manager.close()


async def test_a_slow_judge_is_cancelled_and_asked_again_later(engine, start, plugin_file):
    judge = plugin_file(
        "judge",
        "import asyncio\ncalls = []\n@hookimpl\nasync def reward(sample):\n    calls.append(sample.index)\n"
        "    if sample.group_index in (0, 1) and calls.count(sample.index) == 1:\n        await asyncio.sleep(3600)\n"
        "    return float(sample.index % 2)",
    )
    manager = start(["fast"] * 6, *PARTIAL, "--reward", judge)
    await asyncio.wait_for(manager.rollout(0), 20)
    groups = await asyncio.wait_for(waiting_groups(manager), 20)
    assert [group[0].group_index for group in groups] == [0, 1]
    assert all(s.status is Status.TRUNCATED and s.reward is None and not s.rewards for group in groups for s in group)
    asked = len(engine.asked)
    second = await asyncio.wait_for(manager.rollout(1), 20)
    assert sorted(set(second.shards[0].batch.group_index.tolist())) == [0, 1]
    assert second.shards[0].batch.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert all(len(body["input_ids"]) == 4 for body in engine.asked[asked:]), "fresh prompts only, nothing continued"
    await manager.close()


async def test_a_generator_that_does_not_let_go_starts_over(engine, start, plugin_file):
    stuck = plugin_file(
        "stuck",
        "import asyncio\n@hookimpl\nasync def generate(engine, sample, sampling_params):\n"
        "    sample.append_generation(await engine.generate(sample.tokens, sampling_params))\n"
        "    if sample.group_index == 0: await asyncio.sleep(3600)\n    return [sample]",
    )
    manager = start(["fast"] * 6, *PARTIAL, "--generate", stuck, "--abort-timeout-s", "0.2")
    await manager.rollout(0)
    groups = await asyncio.wait_for(waiting_groups(manager), 10)
    (held,) = [group for group in groups if group[0].group_index == 0]
    assert all(s.status is Status.PENDING and s.response_length == 0 for s in held)
    await manager.close()


async def test_a_generation_that_is_aborted_unasked_is_continued_at_once(make_args, open_manager, plugin_file):
    flaky = plugin_file(
        "flaky",
        "@hookimpl\nasync def generate(sample):\n    sample.append([1], logprobs=[-1.0])\n    sample.reward = 1.0\n"
        "    done = sample.response_length > 2\n"
        "    sample.status = Status.COMPLETED if done else Status.ABORTED\n    return [sample]",
    )
    async with open_manager(make_args("--generate", flaky)) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
    assert batch.response_lengths.tolist() == [3] * 4


@pytest.mark.parametrize("words", [["--partial-rollout"], ["--mask-offpolicy-in-partial-rollout"]])
def test_flags_that_do_not_go_together_are_refused(make_args, words):
    with pytest.raises(OptionError, match="--partial-rollout"):
        make_args(*words)


def sample_of(versions, mask=None):
    sample = Sample(tokens=np.array([1], np.int32))
    for version, trained in zip(versions, mask or [1] * len(versions), strict=True):
        sample.append([5], logprobs=[-1.0], trainable=bool(trained), weight_version=version)
    return sample


def test_tool_tokens_and_masked_ones_have_no_age():
    assert oldest_version([sample_of([3, -1, 4], [1, 0, 1]), sample_of([1], [0])]) == 3
    assert oldest_version([sample_of([-1, -1], [0, 0])]) is None


def test_masking_leaves_the_rest_as_it_is():
    sample = sample_of([0, 1, -1, 2], [1, 1, 0, 1])
    mask_older([sample], 2)
    assert sample.loss_mask.tolist() == [0, 0, 0, 1]
    assert sample.weight_versions.tolist() == [0, 1, -1, 2]


TAKES_TURNS = """
import asyncio, pathlib
from slime_core import take_turns

@hookimpl
async def generate(engine, sample, sampling_params):
    async def reply(turn):
        if "tool" in turn.sample.prompt and not pathlib.Path({gate!r}).exists():
            await asyncio.Event().wait()
        return "ok"

    return [await take_turns(engine, sample, sampling_params, reply, max_turns=2, max_turn_tokens=1)]
"""
"""Two turns of a token; between them a tool that does not answer prompts with `tool` before the gate is open."""


async def test_a_sample_that_waits_for_its_tool_comes_back_at_once_and_goes_on_in_its_turn(
    engine, start, plugin_file, tmp_path
):
    gate = tmp_path / "gate"
    generator = plugin_file("takes_turns", TAKES_TURNS.format(gate=str(gate)))
    prompts = ["tool 0", "fast 1", "tool 2", "fast 3", "fast 4", "fast 5", "fast 6", "fast 7"]
    manager = start(prompts, *PARTIAL, "--generate", generator)
    first = await manager.rollout(0)
    assert sorted(set(first.shards[0].batch.group_index.tolist())) == [1, 3]
    waiting = [sample for group in await waiting_groups(manager) for sample in group]
    assert [(s.group_index, s.status, s.turn_ends) for s in waiting] == [(g, Status.ABORTED, [1]) for g in (0, 0, 2, 2)]

    gate.touch()
    engine.version = 1
    batch = (await manager.rollout(1)).shards[0].batch
    assert sorted(set(batch.group_index.tolist())) == [0, 2]
    assert batch.weight_versions.reshape(4, 4).tolist() == [[0, -1, -1, 1]] * 4
    assert batch.loss_mask.reshape(4, 4).tolist() == [[1, 0, 0, 1]] * 4
    await manager.close()
