"""The worker processes of plain rewards: what hangs, crashes or fills the memory costs its own sample only."""

import asyncio
import gc
import os
import subprocess
import sys
import time

import psutil
import pytest

from processes import grandchildren, running
from slime_core.rollout.reward_pool import STUCK_S, RewardFailure, RewardPool
from slime_core.testing import make_sample
from waiting import until

BY_ANSWER = """
import ctypes, os, pickle, subprocess, sys, time

class Own: pass

class Grade(float): pass

@hookimpl
def reward(sample):
    match sample.response:
        case "hang":
            while True: pass
        case "bignum": return float(9 ** 9 ** 9 % 7)
        case "segfault": ctypes.string_at(0)
        case "exit": os._exit(7)
        case "memory": return float(len(bytearray(8 << 30)))
        case "recursion": return reward_again(0)
        case "object": return Own()
        case "own number": return {"reward": Grade(0.5)}
        case "long reason": raise ValueError("x" * 1_000_000)
        case "child":
            subprocess.Popen(["sleep", "271828OWN"])
            time.sleep(1000)
        case "orphan":
            subprocess.Popen(["sleep", "314159OWN"])
            os._exit(7)
        case text: return float(len(text))

def reward_again(depth): return reward_again(depth + 1) + 1
""".replace("OWN", str(os.getpid()))


@pytest.fixture
def grader(plugin_file):
    return plugin_file("by_answer", BY_ANSWER)


@pytest.fixture
async def open_pool(make_args, grader):
    pools = []

    def open_one(*words):
        args = make_args("--reward", grader, "--reward-timeout-s", "2", "--reward-memory-gib", "2", *words)
        pools.append(RewardPool(args, [grader]))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


@pytest.fixture
def grade(grader):
    async def run(pool, text):
        try:
            return await pool.grade("reward", grader, {"sample": make_sample(text)})
        except RewardFailure as failure:
            return str(failure)

    return run


HOSTILE = {
    "hang": "took longer than 2 s and was killed",
    "bignum": "took longer than 2 s and was killed",
    "segfault": "was killed by SIGSEGV",
    "exit": "died with exit code 7",
    "memory": "MemoryError",
    "recursion": "RecursionError",
    "object": "TypeError: returned Own",
    "long reason": "ValueError: xxx",
}


@pytest.mark.parametrize("num_workers", ["1", "3"])
async def test_hostile_samples_fail_with_a_reason_and_the_others_keep_their_rewards(open_pool, grade, num_workers):
    pool = open_pool("--reward-workers", num_workers)
    kinds = list(HOSTILE)
    texts = [kinds[i // 20] if i % 20 == 0 else "a" * (i % 13) for i in range(20 * len(kinds))]
    results = await asyncio.gather(*(grade(pool, text) for text in texts))
    for text, result in zip(texts, results, strict=True):
        if text in HOSTILE:
            assert HOSTILE[text] in result
            assert len(result) < 1000
        else:
            assert result == len(text)


async def test_the_loop_goes_on_while_graders_hang_and_die(open_pool, grade):
    pool = open_pool("--reward-workers", "2")
    await grade(pool, "warm")

    async def watch(gaps):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)

    async def longest_gap():
        watcher = asyncio.create_task(watch(gaps := []))
        await asyncio.gather(*(grade(pool, text) for text in ["hang", "segfault", *(["x" * 1000] * 300), "memory"]))
        watcher.cancel()
        return max(gaps)

    # a busy machine may stop the loop too, but not each time
    for _ in range(3):
        if (longest := await longest_gap()) < 0.5:
            break
    assert longest < 0.5, "starting, killing and replacing workers happens off the loop"


async def test_cheap_samples_travel_together(open_pool, grade, monkeypatch):
    pool = open_pool("--reward-workers", "1")
    await asyncio.gather(*(grade(pool, "warm") for _ in range(50)))
    (worker,) = pool._workers
    sent = []
    send = worker.send
    monkeypatch.setattr(worker, "send", lambda jobs: (sent.append(len(jobs)), send(jobs)))
    for _ in range(3):  # a call that the machine holds up makes the next messages small
        sent.clear()
        assert await asyncio.gather(*(grade(pool, "abc") for _ in range(256))) == [3.0] * 256
        assert sum(sent) == 256
        if len(sent) <= 16:
            break
    assert len(sent) <= 16


async def test_what_waits_behind_a_slow_grader_goes_to_another_worker(open_pool, grade):
    pool = open_pool("--reward-workers", "2", "--reward-timeout-s", "60")
    await asyncio.gather(*(grade(pool, "warm") for _ in range(50)))
    hanging = asyncio.create_task(grade(pool, "hang"))
    results = await asyncio.wait_for(asyncio.gather(*(grade(pool, "abc") for _ in range(40))), timeout=120)
    assert results == [3.0] * 40
    assert not hanging.done()
    hanging.cancel()


async def test_several_slow_graders_do_not_spread_over_the_workers(open_pool, grade):
    pool = open_pool("--reward-workers", "4", "--reward-timeout-s", "60")
    await asyncio.gather(*(grade(pool, "warm") for _ in range(50)))
    hanging = [asyncio.create_task(grade(pool, "hang")) for _ in range(2)]
    others = asyncio.gather(*(grade(pool, "abc") for _ in range(20)))
    assert await asyncio.wait_for(others, timeout=120) == [3.0] * 20
    await asyncio.sleep(4 * STUCK_S)
    assert await asyncio.wait_for(grade(pool, "four"), timeout=120) == 4.0
    assert sum(bool(worker.jobs) for worker in pool._workers) == 2
    for task in hanging:
        task.cancel()


async def test_what_a_hanging_worker_holds_fails_with_a_broken_pool(make_args, plugin_file, tmp_path, grade):
    broken = tmp_path / "broken"
    source = f"import os\nif os.path.exists({str(broken)!r}): raise ValueError('half edited')\n"
    reference = plugin_file("by_answer", source + BY_ANSWER)
    pool = RewardPool(make_args("--reward", reference, "--reward-timeout-s", "2", "--reward-workers", "2"), [reference])
    try:
        await asyncio.gather(*(grade(pool, "warm") for _ in range(50)))
        await until(lambda: sum(worker.idle for worker in pool._workers) == 2)
        broken.touch()
        texts = ["hang", "a", "b", "c", "d", "exit"]
        results = await asyncio.wait_for(asyncio.gather(*(grade(pool, text) for text in texts)), timeout=120)
    finally:
        pool.close()
    assert "took longer than 2 s" in results[0]
    assert "half edited" in str(results)


async def test_a_dead_worker_is_replaced(open_pool, grade):
    pool = open_pool("--reward-workers", "1")
    for _ in range(3):
        assert "exit code 7" in await grade(pool, "exit")
        assert await grade(pool, "four") == 4.0


async def test_what_a_killed_grader_started_is_killed_with_it(open_pool, grade):
    pool = open_pool("--reward-workers", "1")
    assert "took longer" in await grade(pool, "child")
    await until(lambda: not running("sleep", f"271828{os.getpid()}"))


async def test_what_a_dead_grader_started_is_killed(open_pool, grade):
    pool = open_pool("--reward-workers", "1")
    await grade(pool, "warm")
    grading = asyncio.create_task(grade(pool, "orphan"))
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # the loop is held: the process has been reaped when it looks
    assert "exit code 7" in await grading
    await until(lambda: not running("sleep", f"314159{os.getpid()}"))


OWNER = """
import asyncio, sys
from slime_core.options import parse
from slime_core.rollout.reward_pool import RewardPool
from slime_core.testing import make_sample

async def main():
    pool = RewardPool(parse(sys.argv[2:]).args, [sys.argv[1]])
    await pool.grade("reward", sys.argv[1], {"sample": make_sample("warm")})
    print("warm", flush=True)
    await pool.grade("reward", sys.argv[1], {"sample": make_sample("hang")})

asyncio.run(main())
"""


async def test_a_hanging_grader_does_not_outlive_a_killed_owner(grader, model_dir):
    words = ["--model", str(model_dir), "--reward", grader]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, grader, *words], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "warm\n"
    workers = psutil.Process(owner.pid).children(recursive=True)
    await asyncio.sleep(0.2)
    owner.kill()
    owner.communicate()
    assert workers and not psutil.wait_procs(workers, timeout=120)[1]


async def test_a_sample_that_cannot_be_sent_fails_alone(open_pool, grader):
    pool = open_pool("--reward-workers", "1")
    unsendable = make_sample("abc", metadata={"generator": (x for x in ())})
    with pytest.raises(RewardFailure, match=r"cannot be sent the sample: .*generator"):
        await pool.grade("reward", grader, {"sample": unsendable})
    assert await pool.grade("reward", grader, {"sample": make_sample("abc")}) == 3.0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nif os.getpid() != {pid}: raise ValueError('no such index')", "no such index"),
        ("import os\nif os.getpid() != {pid}: os._exit(5)", "workers cannot start: .*exit code 5"),
    ],
)
async def test_a_plugin_that_only_fails_in_the_workers_is_named_for_every_sample(
    make_args, plugin_file, source, reason
):
    broken = plugin_file("broken", f"{source.format(pid=os.getpid())}\n@hookimpl\ndef reward(sample): return 1.0")
    pool = RewardPool(make_args("--reward", broken), [broken])
    try:
        for _ in range(2):
            with pytest.raises(RewardFailure, match=reason):
                await pool.grade("reward", broken, {"sample": make_sample("abc")})
    finally:
        pool.close()


async def test_closing_cancels_what_waits_and_leaves_no_worker(open_pool, grade):
    before = grandchildren()
    pool = open_pool("--reward-workers", "2")
    await grade(pool, "warm")
    tasks = [asyncio.create_task(grade(pool, "hang")) for _ in range(8)]
    await asyncio.sleep(0)
    pool.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    await until(lambda: grandchildren() <= before)


async def test_closing_while_workers_are_being_started_leaves_none(open_pool, caplog):
    before = grandchildren()
    pool = open_pool("--reward-workers", "4")
    await until(lambda: pool._unadopted or pool._workers)
    pool.close()
    assert grandchildren() <= before, "without a turn of the loop"
    await asyncio.sleep(0)
    gc.collect()  # what nobody has looked at is complained of when it goes
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_number_of_the_plugins_own_type_is_a_number(open_pool, grade):
    # its type exists in the worker only
    assert await grade(open_pool(), "own number") == {"reward": 0.5}


UNGUARDED = """
import asyncio
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.testing import make_options, make_sample

async def run():
    pool = RewardPool(make_options("--reward", GRADER), [GRADER])
    try:
        print(await pool.grade("reward", GRADER, {"sample": make_sample("four")}))
    except RewardFailure as failure:
        print(failure)
    pool.close()

asyncio.run(run())
"""


def test_processes_that_cannot_be_started_end_the_waiting(grader, tmp_path):
    """A script without `if __name__ == "__main__"` starts its workers while its own workers are being started."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.replace("GRADER", repr(grader)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert "no worker process could be started: RuntimeError" in done.stdout
