"""Generators: what they may return, fan-outs, failures, and which of several a row gets."""

import asyncio
from collections import Counter

import pytest

from slime_core import DataError, PluginError, Status
from slime_core.errors import RolloutError

ECHO = """
@hookimpl
async def generate(sample):
    sample.append([1], logprobs=[-1.0], text="x")
    sample.status = Status.COMPLETED
    return [sample]
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "generate must return a list of at least one Sample, got NoneType"),
        ("return []", "got a list of 0"),
        ("return [sample, sample]", "generate returned the same Sample object twice"),
        ("raise ValueError('broken tool')", "plugin 'broken' from .*: generate raised ValueError: broken tool"),
        ("return [sample]", "generate left sample .* PENDING"),
        ("sample.status, sample.reward = Status.COMPLETED, float('nan'); return [sample]", "the reward nan"),
    ],
)
async def test_a_generator_that_breaks_its_contract_stops_the_run(make_args, open_manager, plugin_file, body, message):
    broken = plugin_file("broken", f"@hookimpl\nasync def generate(sample): {body}")
    async with open_manager(make_args("--generate", broken)) as manager:
        with pytest.raises(PluginError, match=message):
            await manager.rollout(0)
        assert len(asyncio.all_tasks()) == 1, "the other samples' tasks are gone"


async def test_a_fan_out_shares_its_rollout_and_has_indices_of_its_own(make_args, open_manager, plugin_file):
    fan_out = plugin_file(
        "fan_out",
        "@hookimpl\nasync def generate(sample):\n    made = [sample, sample.clone(), sample.clone()]\n"
        "    for one in made:\n        one.append([1], logprobs=[-1.0])\n"
        "        one.status, one.reward = Status.COMPLETED, 1.0\n    return made",
    )
    async with open_manager(make_args("--generate", fan_out)) as manager:
        one = await manager.rollout(0)
    batch = one.shards[0].batch
    assert batch.num_samples == 12 and len(set(batch.sample_index.tolist())) == 12
    assert Counter(batch.rollout_index.tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert Counter(batch.group_index.tolist()) == {0: 6, 1: 6}


GIVING_UP = """
@hookimpl
async def generate(sample):
    if sample.status is Status.PENDING:
        made = [sample, sample.clone()]
        for one in made:
            one.status = Status.ABORTED
        return made
    if {who_gives_up}:
        return []
    sample.append([1], logprobs=[-1.0])
    sample.status, sample.reward = Status.COMPLETED, 1.0
    return [sample]
"""


async def test_a_branch_that_comes_back_may_give_way_to_its_sibling(make_args, open_manager, plugin_file):
    source = GIVING_UP.format(who_gives_up="sample.index != sample.rollout_index")
    async with open_manager(make_args("--generate", plugin_file("gives_way", source))) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
    assert batch.sample_index.tolist() == batch.rollout_index.tolist() == [0, 1, 2, 3]


async def test_the_first_sample_of_a_rollout_may_not_give_way(make_args, open_manager, plugin_file):
    source = GIVING_UP.format(who_gives_up="sample.index == sample.rollout_index")
    async with open_manager(make_args("--generate", plugin_file("gives_way", source))) as manager:
        with pytest.raises(PluginError, match="got a list of 0 for sample"):
            await manager.rollout(0)


async def test_samples_that_a_generator_makes_anew_are_numbered_too(make_args, open_manager, plugin_file):
    anew = plugin_file(
        "anew",
        "@hookimpl\nasync def generate(sample):\n    made = [Sample(), Sample(index=5)]\n"
        "    for one in made:\n        one.append([1], logprobs=[-1.0])\n"
        "        one.status, one.reward = Status.COMPLETED, 1.0\n    return made",
    )
    async with open_manager(make_args("--generate", anew)) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
    assert len(set(batch.sample_index.tolist())) == 8
    assert Counter(batch.rollout_index.tolist()) == {0: 2, 1: 2, 2: 2, 3: 2}


async def test_what_a_generator_does_to_its_parameters_stays_with_its_sample(make_args, open_manager, plugin_file):
    appends = ECHO.replace("(sample)", "(sample, sampling_params)").replace(
        "    sample.append(",
        "    sampling_params['stop'].append('x')\n    n = len(sampling_params['stop'])\n    sample.append(",
    )
    appends = plugin_file("appends", appends.replace("[1]", "[n]"))
    args = make_args("--generate", appends, "--stop", "a")
    async with open_manager(args) as manager:
        assert (await manager.rollout(0)).shards[0].batch.tokens.tolist() == [2] * 4
    assert args.stop == ["a"]


async def test_samples_that_a_generator_fails_are_counted_and_stop_the_run_with_the_reason(
    make_args, open_manager, plugin_file, caplog
):
    failing = plugin_file(
        "failing",
        "@hookimpl\nasync def generate(sample):\n    sample.fail('the sandbox is gone')\n    return [sample]",
    )
    async with open_manager(make_args("--generate", failing)) as manager:
        with pytest.raises(RolloutError, match=r"more than --max-reward-failure-rate 0\.5 .*the sandbox is gone"):
            await manager.rollout(0)
        assert manager.progress().failed["generate"] > 2
    (told,) = [message for message in caplog.messages if "generate failed: the sandbox is gone" in message]
    assert "further failures are counted" in told


async def test_a_row_may_name_its_generator(make_args, write_rows, open_manager, plugin_file):
    one = plugin_file("one", ECHO)
    two = plugin_file("two", ECHO.replace("[1]", "[2]"))
    path = write_rows([{"prompt": "p", "metadata": {"by": "two"}}, {"prompt": "p"}])
    words = ["--prompt-data", path, "--no-shuffle", "--generate", one, two, "--generate-field", "by"]
    async with open_manager(make_args(*words)) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
    assert batch.tokens.reshape(4, 2)[:, 1].tolist() == [2, 2, 1, 1]


async def test_a_row_that_names_no_generator_of_the_run_stops_it(make_args, write_rows, open_manager, plugin_file):
    path = write_rows([{"prompt": "p", "metadata": {"by": "three"}}])
    words = ["--prompt-data", path, "--generate", plugin_file("one", ECHO), "single_turn", "--generate-field", "by"]
    async with open_manager(make_args(*words)) as manager:
        with pytest.raises(DataError, match=r"by='three', which is none of the generators .*: one, single_turn"):
            await manager.rollout(0)


def sampled_at(plugin_file, temperature: float) -> str:
    return plugin_file(
        "hot",
        "@hookimpl\ndef get_samples(num_prompts):\n"
        f"    own = {{'temperature': {temperature}, 'top_k': 7}}\n"
        "    return [Sample(sampling_params=dict(own)) for _ in range(num_prompts)]",
    )


async def test_a_row_keeps_its_own_sampling_parameters(make_args, open_manager, plugin_file):
    note = ECHO.replace("sample)", "sample, sampling_params)").replace(
        "[1]", "[int(sampling_params['top_k']), int(sampling_params['top_p'])]"
    )
    note = note.replace("logprobs=[-1.0]", "logprobs=[-1.0, -1.0]")
    words = ["--get-samples", sampled_at(plugin_file, 1.0), "--generate", plugin_file("note", note)]
    async with open_manager(make_args(*words)) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
    assert batch.tokens.tolist() == [7, 1] * 4


@pytest.mark.parametrize("trainers", ["0", "1"])
async def test_a_row_is_trained_at_no_other_temperature_than_it_is_sampled_at(
    trainers, make_args, open_manager, plugin_file
):
    words = ["--get-samples", sampled_at(plugin_file, 0.5), "--generate", plugin_file("one", ECHO)]
    async with open_manager(make_args(*words, "--num-trainers", trainers)) as manager:
        if trainers == "0":
            assert len((await manager.rollout(0)).shards[0].batch.tokens) == 4
        else:
            with pytest.raises(DataError, match=r"sampled at temperature 0\.5, .* --temperature 1: leave"):
                await manager.rollout(0)


async def test_a_generator_that_swallows_its_cancellation_does_not_hold_up_the_run(
    make_args, open_manager, plugin_file, monkeypatch
):
    monkeypatch.setattr("slime_core.rollout.stages.CANCEL_TIMEOUT_S", 0.2)
    stubborn = """
import asyncio
go_on = asyncio.Event()
@hookimpl
async def generate(sample):
    while sample.group_index == 0 and not go_on.is_set():
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            pass
    sample.append([1], logprobs=[-1.0])
    sample.reward, sample.status = 1.0, Status.COMPLETED
    return [sample]
"""
    words = ["--over-sampling-batch-size", "3", "--generate", plugin_file("stubborn", stubborn)]
    async with open_manager(make_args(*words)) as manager:
        assert set((await manager.rollout(0)).shards[0].round_group_index.tolist()) == {1, 2}
        async with asyncio.timeout(120):
            await manager.source.settle()
        [waiting], _ = manager.source.waiting()
        assert waiting[0].group_index == 0 and waiting[0].status is Status.PENDING
        let_go(manager)


async def test_an_error_does_not_wait_for_a_sibling_that_swallows_its_cancellation(
    make_args, open_manager, plugin_file, monkeypatch
):
    monkeypatch.setattr("slime_core.rollout.stages.CANCEL_TIMEOUT_S", 0.2)
    stubborn = """
import asyncio
go_on = asyncio.Event()
@hookimpl
async def generate(sample):
    if sample.index == 0:
        await asyncio.sleep(0.1)
        raise ValueError("broken tool")
    while not go_on.is_set():
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            pass
    sample.append([1], logprobs=[-1.0])
    sample.status = Status.COMPLETED
    return [sample]
"""
    async with open_manager(make_args("--generate", plugin_file("stubborn", stubborn))) as manager:
        with pytest.raises(PluginError, match="broken tool"):
            async with asyncio.timeout(120):
                await manager.rollout(0)
        let_go(manager)


def let_go(manager) -> None:
    """Let the generator `stubborn` end."""
    manager._stages.generators.by_name["stubborn"].impl.function.__globals__["go_on"].set()


async def test_a_generator_that_never_answers_fails_its_sample(make_args, open_manager, plugin_file):
    endless = """
import asyncio
@hookimpl
async def generate(sample):
    if sample.index == 0:
        await asyncio.Event().wait()
    sample.append([1], logprobs=[-1.0])
    sample.reward, sample.status = 1.0, Status.COMPLETED
    return [sample]
"""
    words = ["--generate-timeout-s", "0.3", "--n-samples-per-prompt", "3", "--max-reward-failure-rate", "0.5"]
    async with open_manager(make_args("--generate", plugin_file("endless", endless), *words)) as manager:
        taken = await manager.rollout(0)
    assert sorted(taken.shards[0].batch.sample_index.tolist()) == [1, 2, 3, 4, 5]
    assert taken.metrics["reward/failed/generate"] == 1
