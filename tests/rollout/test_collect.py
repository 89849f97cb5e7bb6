"""Collecting a round: refill, filters, surplus, failures; every group is trained, dropped for a reason, or waiting."""

import asyncio
from collections import Counter

import pytest

from slime_core import DataError, Status
from slime_core.errors import CheckpointError, RolloutError

# The answer is the reward. A row whose metadata `slow` is set never finishes, one with `late_s` later.
SCRIPTED = """
import asyncio
@hookimpl
async def generate(sample):
    if sample.metadata.get("slow"):
        await asyncio.sleep(3600)
    await asyncio.sleep(sample.metadata.get("late_s", 0))
    values = sample.metadata["rewards"]
    sample.append([1], logprobs=[-1.0], text="x", weight_version=0)
    sample.reward, sample.status = float(values[sample.index % len(values)]), Status.COMPLETED
    return [sample]
"""
NONZERO_STD = """
@hookimpl
def dynamic_filter(samples):
    return Drop("zero_std") if len({s.reward for s in samples}) == 1 else None
"""
BY_SPREAD = """
@hookimpl
def over_sampling_filter(groups, num_groups):
    return sorted(groups, key=lambda g: -(max(s.reward for s in g) - min(s.reward for s in g)))
"""


@pytest.fixture
def collected(make_args, write_rows, open_manager, plugin_file):
    """Collect `num_rounds` rounds over these rows, in order; gives the manager, the rounds and the metrics."""

    async def run(rows, *words, num_rounds=1):
        path = write_rows([{"prompt": f"p{i}", "metadata": row} for i, row in enumerate(rows)])
        scripted = plugin_file("scripted", SCRIPTED)
        args = make_args("--prompt-data", path, "--no-shuffle", "--generate", scripted, *words)
        async with open_manager(args) as manager:
            rounds = [await manager.rollout(step) for step in range(num_rounds)]
            await manager.source.settle()
            return manager, rounds

    return run


GOOD, EQUAL, SLOW = {"rewards": [0, 1]}, {"rewards": [1]}, {"slow": True, "rewards": [0]}


def trained(collected_round):
    return sorted(set(collected_round.shards[0].round_group_index.tolist()))


def assert_conserved(manager):
    assert manager.source.num_drawn == manager.num_trained + manager.num_dropped + manager.source.num_waiting


async def test_a_plain_round_trains_the_prompts_in_order(collected):
    manager, rounds = await collected([GOOD] * 6, num_rounds=3)
    assert [trained(r) for r in rounds] == [[0, 1], [2, 3], [4, 5]]
    assert_conserved(manager)


@pytest.mark.parametrize("partial", [[], ["--partial-rollout", "--max-staleness", "1", "--abort-timeout-s", "0.2"]])
async def test_the_worked_example_of_over_sampling(collected, plugin_file, partial):
    """Six start; three have equal rewards and are dropped; six more start; at six good ones the other three stop."""
    spread = [{"rewards": [0, size]} for size in (5, 1, 4)] + [{"rewards": [0, size]} for size in (2, 6, 3)]
    rows = [EQUAL, *spread[:3], EQUAL, EQUAL, *spread[3:], SLOW, SLOW, SLOW]
    words = ["--rollout-batch-size", "4", "--over-sampling-batch-size", "6", *partial]
    words += ["--dynamic-filter", plugin_file("std", NONZERO_STD)]
    words += ["--over-sampling-filter", plugin_file("spread", BY_SPREAD)]
    manager, (one,) = await collected(rows, *words)
    assert Counter({key: value for key, value in one.metrics.items() if key.startswith("rollout/dropped")}) == {
        "rollout/dropped/zero_std": 3,
        "rollout/dropped/over_sampling_filter": 2,
    }
    assert trained(one) == [1, 3, 7, 8], "the four with the widest spread: 5, 4, 6, 3"
    assert manager.source.num_waiting == 3
    assert_conserved(manager)


async def test_what_was_stopped_waits_as_fresh_prompts(collected, make_args):
    rows = [SLOW, GOOD, GOOD, GOOD]
    manager, (one,) = await collected(rows, "--over-sampling-batch-size", "4")
    assert len(trained(one)) == 2
    waiting, _ = manager.source.waiting()
    assert len(waiting) == 2 and 0 in [group[0].group_index for group in waiting]
    assert all(sample.response == "" and sample.reward is None for group in waiting for sample in group)
    assert_conserved(manager)


async def test_filters_that_keep_nothing_stop_the_run_with_the_reasons(collected, plugin_file):
    words = ["--dynamic-filter", plugin_file("std", NONZERO_STD), "--max-refills", "3"]
    with pytest.raises(RolloutError, match=r"4 draws in a row gave no group .*zero_std: 8"):
        await collected([EQUAL] * 3, *words)


async def test_a_round_is_not_given_up_while_a_group_may_yet_be_kept(collected, plugin_file):
    rows = [{**GOOD, "late_s": 0.5}, *[EQUAL] * 7, GOOD]
    words = ["--dynamic-filter", plugin_file("std", NONZERO_STD), "--max-refills", "3"]
    _, (one,) = await collected(rows, *words)
    assert trained(one) == [0, 8]


async def test_a_spare_group_is_used_when_too_few_remain(collected, plugin_file):
    spare = NONZERO_STD.replace('Drop("zero_std")', 'Drop("zero_std", spare=True)')
    manager, (one,) = await collected([EQUAL] * 4, "--dynamic-filter", plugin_file("std", spare))
    assert len(trained(one)) == 2
    assert manager.source.num_drawn == 2


FAILS = "@hookimpl\ndef reward(sample):\n    if {condition}: raise ValueError('no')\n    return 1.0"
ECHO = """
@hookimpl
async def generate(sample):
    sample.append([1], logprobs=[-1.0], text="x")
    sample.status = Status.COMPLETED
    return [sample]
"""


@pytest.fixture
def graded(make_args, write_rows, open_manager, plugin_file):
    async def run(condition, *words):
        path = write_rows([{"prompt": "p"}])
        args = make_args(
            "--prompt-data", path, "--generate", plugin_file("echo", ECHO), "--n-samples-per-prompt", "4",
            "--reward", plugin_file("grader", FAILS.format(condition=condition)), *words,
        )  # fmt: skip
        async with open_manager(args) as manager:
            return manager, await manager.rollout(0)

    return run


async def test_failed_samples_leave_their_group(graded):
    manager, one = await graded("sample.index == 1")
    assert one.shards[0].batch.sample_index.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert one.metrics["reward/failed/grader"] == 1
    assert_conserved(manager)


async def test_a_group_with_fewer_than_two_scored_samples_is_replaced(graded):
    manager, one = await graded("sample.index in (0, 1, 2)")
    assert trained(one) == [1, 2]
    assert one.metrics["rollout/dropped/failed"] == 1
    assert_conserved(manager)


async def test_failures_are_a_share_of_all_samples_however_many_groups_are_dropped(graded, plugin_file):
    """10 of 40 samples fail, more than the half of the 8 that are trained."""
    fifth = "@hookimpl\ndef dynamic_filter(samples): return None if samples[0].group_index % 5 == 4 else Drop('no')"
    manager, one = await graded("sample.index % 4 == 0", "--dynamic-filter", plugin_file("fifth", fifth))
    assert trained(one) == [4, 9]
    assert one.metrics["reward/failed/grader"] == 10
    assert_conserved(manager)


async def test_too_many_failures_stop_the_run_with_the_first_reason(graded):
    with pytest.raises(RolloutError, match=r"more than --max-reward-failure-rate 0\.25 allows.*ValueError: no"):
        await graded("True", "--max-reward-failure-rate", "0.25")


async def test_a_saved_manager_goes_on_with_the_same_prompts(
    make_args, write_rows, open_manager, plugin_file, tmp_path
):
    path = write_rows([{"prompt": f"p{i}", "metadata": GOOD} for i in range(5)])
    args = make_args(
        "--prompt-data", path, "--generate", plugin_file("scripted", SCRIPTED), "--over-sampling-batch-size", "3"
    )
    async with open_manager(args) as first:
        for step in range(2):
            await first.rollout(step)
        await first.save(tmp_path, 2)
        expected = [await first.source.get_groups(4)]
    async with open_manager(args) as second:
        second.load(tmp_path)
        assert_conserved(second)
        resumed = [await second.source.get_groups(4)]
    prompts = [[[s.to_dict() for s in group] for group in groups] for groups in (expected[0], resumed[0])]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("words", [[], ["--partial-rollout", "--max-staleness", "1", "--abort-timeout-s", "0.2"]])
async def test_many_groups_that_are_not_needed_come_back_once_each(collected, words):
    rows = [SLOW if i % 3 else GOOD for i in range(120)]
    manager, (one,) = await collected(rows, "--rollout-batch-size", "40", "--over-sampling-batch-size", "120", *words)
    waiting, prompts = manager.source.waiting()
    assert sorted([*trained(one), *(group[0].group_index for group in waiting)]) == list(range(120))
    assert sorted(prompt.group_index for prompt in prompts) == sorted(group[0].group_index for group in waiting)
    assert_conserved(manager)


async def test_echo_and_saved_samples_replay(make_args, write_rows, open_manager, tmp_path):
    path = write_rows([{"prompt": "p", "label": f"answer {i}"} for i in range(8)])
    words = ["--prompt-data", path, "--generate", "echo", "--save-samples", "--run-name", "first"]
    async with open_manager(make_args(*words)) as manager:
        rounds = [(await manager.rollout(step)).shards[0].batch for step in range(2)]
    samples = tmp_path / "runs" / "first" / "samples"
    words = ["--prompt-data", path, "--rollout", "replay", "--replay-samples", samples]
    async with open_manager(make_args(*words)) as manager:
        again = [(await manager.rollout(step)).shards[0].batch for step in range(2)]
        assert_conserved(manager)
        with pytest.raises(DataError, match="no samples of round 2 to replay"):
            await manager.rollout(2)
    assert [batch.tokens.tolist() for batch in again] == [batch.tokens.tolist() for batch in rounds]
    async with open_manager(make_args(*words, "--replay-fraction", "0.5")) as manager:
        (half,) = {(await manager.rollout(0)).metrics["rollout/num_groups"]}
    assert half == 1


@pytest.mark.parametrize("kept", ["metadata['x'] = {1, 2}", "metadata['x'] = 2**70", "session_id = 3"])
async def test_what_a_file_of_samples_cannot_hold_is_told(make_args, open_manager, plugin_file, tmp_path, kept):
    odd = plugin_file("odd", ECHO.replace("    return", f"    sample.{kept}\n    return"))
    args = make_args("--generate", odd, "--save-samples", "--partial-rollout", "--max-staleness", "1")
    async with open_manager(args) as manager:
        with pytest.raises(DataError, match=r"--save-samples cannot write round 0: .*must be JSON-able"):
            await manager.rollout(0)
        groups = [await manager._stages.run_group(group) for group in await manager.source.get_groups(1)]
        manager.source.add_groups(groups)
        with pytest.raises(CheckpointError, match=r"the rollout side cannot be saved: .*must be JSON-able"):
            await manager.save(tmp_path, 0)


async def test_round_numbers_and_images_travel_with_their_samples(make_args, open_manager, plugin_file):
    turns = plugin_file(
        "turns",
        ECHO.replace("    return", "    if sample.index == 2: sample.metadata['round_number'] = 3\n"
                     "    if sample.index == 1: sample.multimodal = {'images': ['data:']}\n    return"),
    )  # fmt: skip
    async with open_manager(make_args("--generate", turns), num_ranks=2) as manager:
        shards = (await manager.rollout(0)).shards
    by_index = {int(i): (b.per_sample["round_number"][k], b.multimodal[k])
                for b in (shard.batch for shard in shards) for k, i in enumerate(b.sample_index)}  # fmt: skip
    assert by_index == {0: (-1, None), 1: (-1, {"images": ["data:"]}), 2: (3, None), 3: (-1, None)}


PARTIAL = ["--partial-rollout", "--max-staleness", "1"]


async def test_a_group_that_waits_keeps_its_failed_samples(make_args, open_manager, plugin_file):
    """Its filter is still at work when the round is full: a later round judges all of it again."""
    one_fails = plugin_file("grader", FAILS.format(condition="sample.index == 6").replace("def", "async def"))
    slow = plugin_file(
        "slow",
        "import time\n@hookimpl\ndef dynamic_filter(samples):\n    time.sleep(samples[0].group_index == 2)",
    )
    words = ["--n-samples-per-prompt", "3", "--over-sampling-batch-size", "3", "--reward", one_fails, *PARTIAL]
    args = make_args("--generate", plugin_file("echo", ECHO), "--dynamic-filter", slow, *words)
    async with open_manager(args) as manager:
        assert trained(await manager.rollout(0)) == [0, 1]
        await manager.source.settle()
        [waiting], _ = manager.source.waiting()
        assert [sample.status for sample in waiting] == [Status.FAILED, Status.COMPLETED, Status.COMPLETED]
        assert_conserved(manager)


async def test_closing_while_groups_are_called_back_leaves_no_task(make_args, write_rows, open_manager, plugin_file):
    path = write_rows([{"prompt": "p", "metadata": row} for row in (GOOD, GOOD, SLOW, SLOW)])
    words = ["--prompt-data", path, "--no-shuffle", "--over-sampling-batch-size", "4", *PARTIAL]
    async with open_manager(make_args("--generate", plugin_file("scripted", SCRIPTED), *words)) as manager:
        await manager.rollout(0)
        assert len(asyncio.all_tasks()) > 1, "groups are being called back"
    assert len(asyncio.all_tasks()) == 1


HOLDING = """
import threading
started, go_on = threading.Event(), threading.Event()

@hookimpl
def over_sampling_filter(groups):
    started.set()
    go_on.wait(30)
    return groups
"""


async def test_a_round_that_is_given_up_while_its_groups_are_ranked_loses_none(
    make_args, write_rows, open_manager, plugin_file
):
    rows = write_rows([{"prompt": f"p{i}"} for i in range(6)])
    flags = ["--prompt-data", rows, "--generate", plugin_file("echoing", ECHO), "--over-sampling-batch-size", "4"]
    args = make_args(*flags, "--over-sampling-filter", plugin_file("holding", HOLDING))
    async with open_manager(args) as manager:
        plugin = manager._stages.over_sampling_filters[0].impl.function.__globals__
        collecting = asyncio.create_task(manager.rollout(0))
        await asyncio.to_thread(plugin["started"].wait, 30)
        await manager.abandon()
        plugin["go_on"].set()
        await asyncio.gather(collecting, return_exceptions=True)
        assert (manager.source.num_drawn, manager.source.num_waiting) == (4, 4)
