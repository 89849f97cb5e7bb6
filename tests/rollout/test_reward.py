"""Rewards: weights, dicts, whole groups, and graders that fail in every way, which is never a reward of 0."""

import asyncio
import contextlib
import os
import time

import psutil
import pytest

from processes import grandchildren, living
from slime_core import DataError, Sample, Status
from slime_core.rollout.tally import Tally
from waiting import until


def finished(**fields):
    sample = Sample(prompt="p", status=Status.COMPLETED, index=0, **fields)
    sample.append([1, 2], logprobs=[-1.0, -1.0], text=fields.pop("text", "hello"))
    return sample


async def score(manager, *samples):
    tally = Tally()
    for sample in samples:
        await manager._rewards.score_sample(sample, tally)
    await manager._rewards.score_group(list(samples), tally)
    return tally


@pytest.fixture
def scored(make_args, open_manager):
    async def run(*samples, words):
        async with open_manager(make_args(*words)) as manager:
            return await score(manager, *samples)

    return run


LENGTH = "@hookimpl\ndef reward(sample): return float(len(sample.response))"
DICT = "@hookimpl\nasync def reward(sample): return {'reward': 2.0, 'format': 0.5}"


async def test_rewards_are_weighted_summed_and_kept_by_name(scored, plugin_file):
    sample = finished()
    words = ["--reward", plugin_file("length", LENGTH) + "=0.1", plugin_file("style", DICT)]
    await scored(sample, words=words)
    assert sample.reward == pytest.approx(0.5 + 2.0)
    assert sample.rewards == {"length": 5.0, "style": 2.0, "style/format": 0.5}


async def test_a_plain_reward_runs_in_another_process_an_async_one_here(scored, plugin_file):
    plain = plugin_file(
        "plain", "import os\n@hookimpl\ndef reward(sample, engine): return {'reward': 1, 'pid': os.getpid()}"
    )
    here = plugin_file(
        "here", "import os\n@hookimpl\nasync def reward(sample): return {'reward': 1, 'pid': os.getpid()}"
    )
    sample = finished()
    await scored(sample, words=["--reward", plain, here])
    assert sample.rewards["here/pid"] == os.getpid() != sample.rewards["plain/pid"]


async def test_a_field_picks_one_plain_name_and_plus_names_always_add(scored, plugin_file):
    names = [plugin_file("length", LENGTH), plugin_file("style", DICT), "+" + plugin_file("always", LENGTH) + "=10"]
    sample = finished(metadata={"kind": "style"})
    await scored(sample, words=["--reward", *names, "--reward-field", "kind"])
    assert sample.reward == pytest.approx(2.0 + 50.0)
    assert "length" not in sample.rewards
    with pytest.raises(DataError, match=r"metadata kind='other', which is none of .*: length, style"):
        await scored(finished(metadata={"kind": "other"}), words=["--reward", *names, "--reward-field", "kind"])


async def test_a_reward_that_a_generator_filled_is_kept(scored, plugin_file):
    sample = finished(reward=7.0)
    await scored(sample, words=["--reward", plugin_file("length", LENGTH)])
    assert (sample.reward, sample.rewards) == (7.0, {})


async def test_a_group_reward_sees_the_whole_group(scored, plugin_file):
    rank = """
@hookimpl
def group_reward(samples):
    return [float(s.index == max(t.index for t in samples)) for s in samples]
"""
    samples = [finished() for _ in range(3)]
    for i, sample in enumerate(samples):
        sample.index = i
    await scored(*samples, words=["--reward", plugin_file("best", rank)])
    assert [s.reward for s in samples] == [0.0, 0.0, 1.0]


RANK = """
@hookimpl
def group_reward(samples):
    return [float(len(samples))] * len(samples)
"""


async def test_a_group_reward_sees_samples_whose_reward_a_generator_filled(scored, plugin_file):
    samples = [finished(), finished(reward=7.0), finished()]
    await scored(*samples, words=["--reward", plugin_file("size", RANK)])
    assert [s.reward for s in samples] == [3.0, 7.0, 3.0]


async def test_a_group_reward_that_was_given_is_not_asked_for_again(scored, plugin_file):
    first, other = plugin_file("size", RANK), plugin_file("other", RANK.replace("float(len(samples))", "0.5"))
    samples = [finished(rewards={"size": 10.0}) for _ in range(2)]
    await scored(*samples, words=["--reward", first, other])
    assert [s.reward for s in samples] == [10.5, 10.5]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def reward(sample): raise KeyError('x')", "KeyError: 'x'"),
        ("def reward(sample): return None", "returned None where a finite number is needed"),
        ("def reward(sample): return float('nan')", "returned nan where"),
        ("def reward(sample): return 'good'", "returned 'good' where"),
        ("def reward(sample): return {'score': 1}", "a dict without the key 'reward'"),
        ("def reward(sample): import sys; sys.exit(3)", "SystemExit: 3"),
        ("def reward(sample): import os; os._exit(3)", "worker process died with exit code 3"),
        ("def reward(sample):\n    while True: pass", "took longer than 1 s and was killed"),
        ("def reward(sample): return float(len(bytearray(8 << 30)))", "MemoryError"),
        ("def group_reward(samples): return [1.0]", "returned 1 rewards for a group of 2 samples"),
        ("async def reward(sample): raise RuntimeError('down')", "RuntimeError: down"),
        ("async def reward(sample): raise TimeoutError('the judge is slow')", "TimeoutError: the judge is slow"),
        (
            "async def reward(sample):\n    import asyncio; await asyncio.sleep(60)",
            "took longer than 1 s and was cancelled",
        ),
    ],
)
async def test_a_failed_reward_is_failed_with_its_reason(scored, plugin_file, body, reason):
    broken = plugin_file("broken", f"@hookimpl\n{body}")
    samples = [finished(), finished()]
    timeout_s = "1" if "longer than 1 s" in reason else "60"
    words = ["--reward", broken, "--reward-timeout-s", timeout_s, "--reward-memory-gib", "2"]
    tally = await scored(*samples, words=words)
    assert [s.status for s in samples] == [Status.FAILED] * 2
    assert all(s.reward is None and reason in s.failure for s in samples)
    assert tally.failed == {"broken": 2}
    assert reason in tally.first_failure


async def test_a_wrapper_in_any_loaded_plugin_reaches_the_workers(scored, plugin_file):
    filters = plugin_file(
        "filters",
        "@hookimpl\ndef dynamic_filter(samples): return None\n"
        "@hookimpl(wrapper=True)\ndef reward(sample):\n    result = yield\n    return result + 1000",
    )
    sample = finished()
    await scored(sample, words=["--reward", plugin_file("length", LENGTH), "--dynamic-filter", filters])
    assert sample.reward == 1005.0


async def test_a_hanging_grader_does_not_stop_the_others_or_the_loop(make_args, open_manager, plugin_file):
    sometimes = plugin_file(
        "sometimes", "@hookimpl\ndef reward(sample):\n    while sample.metadata['hang']: pass\n    return 1.0"
    )
    args = make_args("--reward", sometimes, "--reward-timeout-s", "4", "--reward-workers", "2")

    async def watch(gaps):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    async with open_manager(args) as manager:
        await score(manager, finished(metadata={"hang": False}))  # the workers are up
        for _ in range(3):  # a busy machine may stop the loop too, but not each time
            samples, tally = [finished(metadata={"hang": i % 4 == 0}) for i in range(8)], Tally()
            watcher = asyncio.create_task(watch(gaps := []))
            await asyncio.gather(*(manager._rewards.score_sample(s, tally) for s in samples))
            watcher.cancel()
            assert [s.status is Status.FAILED for s in samples] == [i % 4 == 0 for i in range(8)]
            assert [s.rewards.get("sometimes") for s in samples if s.status is not Status.FAILED] == [1.0] * 6
            if max(gaps) < 2.0:
                break
    assert max(gaps) < 2.0, "the event loop waited for a grader"


async def test_cancelling_kills_the_grader_and_closing_leaves_no_process(make_args, open_manager, plugin_file):
    hang = plugin_file("hang", "@hookimpl\ndef reward(sample):\n    while True: pass")
    before = grandchildren()
    async with open_manager(make_args("--reward", hang, "--reward-timeout-s", "60")) as manager:
        task = asyncio.create_task(manager._rewards.score_sample(finished(), Tally()))
        busy = await until(lambda: {process for process in grandchildren() - before if is_busy(process)})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not living(busy))
        assert task.cancelled()
    # the fork server, their parent, stays with this process, idle, and ends with it
    await until(lambda: grandchildren() <= before)


def is_busy(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cpu_times().user > 0.5
    return False
