"""Drawing: epochs, numbering, the buffer, prompts that are too long, saving."""

import asyncio
import json
from collections import Counter

import pytest

from slime_core import DataError, PluginError


@pytest.fixture
def rows(write_rows):
    return write_rows([{"prompt": f"p{i}"} for i in range(5)])


async def draw(manager, *counts):
    return [[group[0].prompt for group in await manager.source.get_groups(n)] for n in counts]


async def test_every_epoch_is_a_fresh_permutation_and_draws_wrap_as_often_as_needed(make_args, rows, open_manager):
    async with open_manager(make_args("--prompt-data", rows)) as manager:
        (drawn,) = await draw(manager, 17)
    epochs = [drawn[:5], drawn[5:10], drawn[10:15]]
    assert all(sorted(epoch) == [f"p{i}" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


async def test_the_order_depends_on_the_seed_alone_and_not_on_how_much_is_drawn_at_a_time(
    make_args, rows, open_manager
):
    async with open_manager(make_args("--prompt-data", rows, "--seed", "7")) as one:
        at_once = await draw(one, 12)
    async with open_manager(make_args("--prompt-data", rows, "--seed", "7")) as two:
        bit_by_bit = await draw(two, 1, 4, 7)
    assert at_once[0] == [prompt for part in bit_by_bit for prompt in part]


async def test_groups_and_samples_are_numbered_once_and_tokenised(make_args, rows, open_manager):
    async with open_manager(make_args("--prompt-data", rows)) as manager:
        groups = await manager.source.get_groups(2) + await manager.source.get_groups(1)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [{s.group_index for s in group} for group in groups] == [{0}, {1}, {2}]
    assert all(len(s.tokens) == 2 for group in groups for s in group)


async def test_without_a_data_set_samples_are_blank(make_args, open_manager):
    async with open_manager(make_args()) as manager:
        groups = await manager.source.get_groups(3)
    assert [s.prompt for group in groups for s in group] == [""] * 6


async def test_waiting_groups_come_first_and_keep_their_numbers(make_args, rows, open_manager):
    async with open_manager(make_args("--prompt-data", rows)) as manager:
        first = await manager.source.get_groups(3)
        manager.source.add_groups(first[1:])
        again = await manager.source.get_groups(3)
        assert [g[0].group_index for g in again] == [1, 2, 3]
        assert (manager.source.num_drawn, manager.source.num_waiting) == (4, 0)


async def test_a_buffer_filter_chooses_and_may_not_invent(make_args, rows, open_manager, plugin_file):
    newest = plugin_file("newest", "@hookimpl\ndef buffer_filter(groups, num_groups): return groups[::-1][:num_groups]")
    async with open_manager(make_args("--prompt-data", rows, "--buffer-filter", newest)) as manager:
        manager.source.add_groups(await manager.source.get_groups(3))
        assert [g[0].group_index for g in await manager.source.get_groups(2)] == [2, 1]
    inventor = plugin_file("inventor", "@hookimpl\ndef buffer_filter(groups): return [[Sample()]]")
    async with open_manager(make_args("--prompt-data", rows, "--buffer-filter", inventor)) as manager:
        manager.source.add_groups(await manager.source.get_groups(1))
        with pytest.raises(PluginError, match="plugin 'inventor': buffer_filter must return a list of at most 1 of"):
            await manager.source.get_groups(1)


async def test_too_long_prompts_are_counted_and_replaced(make_args, write_rows, open_manager):
    path = write_rows([{"prompt": "x" * 9}, {"prompt": "short"}])
    async with open_manager(make_args("--prompt-data", path, "--max-prompt-tokens", "5")) as manager:
        drawn = await draw(manager, 4)
        assert drawn == [["short"] * 4]
        assert manager.source.num_too_long >= 3


async def test_only_too_long_prompts_stop_the_run(make_args, write_rows, open_manager):
    path = write_rows([{"prompt": "x" * 9}])
    async with open_manager(make_args("--prompt-data", path, "--max-prompt-tokens", "5")) as manager:
        with pytest.raises(DataError, match="4096 prompts in a row are longer than 5 tokens, or cannot be read"):
            await manager.source.get_groups(1)


async def test_many_long_prompts_in_a_row_do_not_stop_the_run(make_args, write_rows, open_manager):
    path = write_rows([*[{"prompt": "x" * 9}] * 100, {"prompt": "short"}])
    async with open_manager(make_args("--prompt-data", path, "--no-shuffle", "--max-prompt-tokens", "5")) as manager:
        assert await draw(manager, 1, 1) == [["short"], ["short"]]
        assert manager.source.num_too_long == 200


async def test_concurrent_draws_take_turns(make_args, rows, open_manager, plugin_file):
    slow = plugin_file(
        "slow",
        "import time\n@hookimpl\ndef get_samples(state, num_prompts):\n    at = state.get('at', 0)\n"
        "    time.sleep(0.05)\n    state['at'] = at + num_prompts\n"
        "    return [Sample(prompt=f'p{at + i}') for i in range(num_prompts)]",
    )
    async with open_manager(make_args("--get-samples", slow)) as manager:
        manager.source.add_groups(await manager.source.get_groups(3))
        drawn = await asyncio.gather(*(manager.source.get_groups(2) for _ in range(4)))
    assert sorted(group[0].prompt for groups in drawn for group in groups) == [f"p{i}" for i in range(8)]


async def test_a_cancelled_draw_loses_nothing(make_args, rows, open_manager, plugin_file):
    held = plugin_file(
        "held",
        "import threading\nstarted, go_on = threading.Event(), threading.Event()\n@hookimpl\n"
        "def get_samples(state, num_prompts):\n    state['n'] = state.get('n', 0) + num_prompts\n"
        "    if state['n'] > 2:\n        started.set()\n        go_on.wait(30)\n"
        "    return [Sample(prompt=str(state['n'] - k)) for k in range(num_prompts)]",
    )  # fmt: skip
    async with open_manager(make_args("--get-samples", held)) as manager:
        source = manager.source
        source.add_groups(await source.get_groups(2))
        plugin = source._get_samples.impl.function.__globals__
        drawing = asyncio.create_task(source.get_groups(5))
        await asyncio.to_thread(plugin["started"].wait, 30)
        drawing.cancel()
        await asyncio.sleep(0)
        plugin["go_on"].set()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        assert (source.num_drawn, source.num_waiting) == (5, 5)
        assert sorted(g[0].prompt for g in await source.get_groups(5)) == ["1", "2", "3", "4", "5"]


async def test_a_plugin_that_returns_too_few_samples_is_named(make_args, open_manager, plugin_file):
    lazy = plugin_file("lazy", "@hookimpl\ndef get_samples(num_prompts): return [Sample()]")
    async with open_manager(make_args("--get-samples", lazy)) as manager:
        with pytest.raises(
            PluginError, match="plugin 'lazy': get_samples must return a list of 3 samples, got 1 of them"
        ):
            await manager.source.get_groups(3)


async def test_a_saved_source_goes_on_where_it_was(make_args, rows, open_manager):
    args = make_args("--prompt-data", rows)
    async with open_manager(args) as unbroken:
        expected = await draw(unbroken, 4, 4, 4)
    async with open_manager(args) as first:
        groups = await first.source.get_groups(4)
        first.source.add_groups(groups[2:])
        state = json.loads(json.dumps(first.source.state_dict()))
        waiting = first.source.waiting()
    async with open_manager(args) as second:
        second.source.load_state_dict(state, *waiting)
        resumed = await draw(second, 2, 8)
        assert second.source.num_drawn == 12
    assert resumed[0] == expected[0][2:]
    assert Counter(resumed[1]) == Counter(expected[1] + expected[2])
