"""The monitor names the plugin that holds the event loop."""

import logging

from slime_core.rollout import loop_monitor

BLOCKS = """
import time
def work():
    time.sleep(1)

@hookimpl
async def generate(sample):
    work()
    sample.append([1], logprobs=[-1.0])
    sample.status, sample.reward = Status.COMPLETED, 1.0
    return [sample]
"""


async def test_a_plugin_that_blocks_the_loop_is_named_once(make_args, open_manager, plugin_file, caplog):
    args = make_args("--generate", plugin_file("sleepy", BLOCKS))
    with caplog.at_level(logging.WARNING, "slime_core"):
        async with open_manager(args) as manager:
            metrics = (await manager.rollout(0)).metrics
    named = [r.getMessage() for r in caplog.records if "held the event loop" in r.getMessage()]
    assert len(named) == 1
    assert "plugin 'sleepy' (" in named[0] and "sleepy.py" in named[0]
    assert metrics["perf/event_loop_stall_max_s"] > 0.5


async def test_a_plugin_that_may_never_let_go_is_named_while_it_holds_the_loop(
    make_args, open_manager, plugin_file, caplog, monkeypatch
):
    monkeypatch.setattr(loop_monitor, "STUCK_S", 0.15)
    with caplog.at_level(logging.WARNING, "slime_core"):
        async with open_manager(make_args("--generate", plugin_file("sleepy", BLOCKS))) as manager:
            await manager.rollout(0)
    named = [r.getMessage() for r in caplog.records if "and goes on" in r.getMessage()]
    assert any("plugin 'sleepy' (" in message for message in named)


async def test_a_quiet_loop_is_not_reported(make_args, open_manager, plugin_file, caplog):
    quiet = BLOCKS.replace("    work()\n", "")
    with caplog.at_level(logging.WARNING, "slime_core"):
        async with open_manager(make_args("--generate", plugin_file("quick", quiet))) as manager:
            await manager.rollout(0)
    assert not [r for r in caplog.records if "held the event loop" in r.getMessage()]
