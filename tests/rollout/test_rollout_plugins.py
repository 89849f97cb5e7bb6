"""Rounds from elsewhere: plugins that replace the collection, and groups that they push."""

import pytest

from slime_core import PluginError, Sample, Status

ECHO = """
@hookimpl
async def generate(sample):
    sample.append([1], logprobs=[-1.0], text="x")
    sample.status = Status.COMPLETED
    return [sample]
"""


def assert_conserved(manager):
    assert manager.source.num_drawn == manager.num_trained + manager.num_dropped + manager.source.num_waiting


async def test_a_rollout_plugin_replaces_the_collection(make_args, open_manager, plugin_file):
    own = plugin_file(
        "own",
        ECHO + "\n@hookimpl\nasync def rollout(args, step, source, stages):\n"
        "    return [await stages.run_group(group) for group in await source.get_groups(3)]",
    )
    async with open_manager(make_args("--generate", own, "--rollout", own)) as manager:
        assert (await manager.rollout(0)).metrics["rollout/num_groups"] == 3


async def test_groups_that_a_rollout_plugin_makes_itself_are_numbered_and_counted(make_args, open_manager, plugin_file):
    own = plugin_file(
        "own",
        "@hookimpl\nasync def rollout(source):\n    groups = []\n    for i in range(2):\n"
        "        groups.append([Sample(status=Status.COMPLETED, reward=float(i)) for _ in range(2)])\n"
        "        for sample in groups[-1]: sample.append([1], logprobs=[-1.0])\n    return groups",
    )
    async with open_manager(make_args("--rollout", own)) as manager:
        batch = (await manager.rollout(0)).shards[0].batch
        assert_conserved(manager)
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.sample_index.tolist() == [0, 1, 2, 3]


async def test_failed_samples_of_a_rollout_plugin_leave_their_groups(make_args, open_manager, plugin_file):
    own = plugin_file(
        "own",
        "@hookimpl\nasync def generate(sample):\n    sample.append([1], logprobs=[-1.0])\n"
        "    sample.status, sample.reward = Status.COMPLETED, 1.0\n"
        "    if sample.index in (0, 3, 4, 5): sample.fail('no')\n    return [sample]\n"
        "@hookimpl\nasync def rollout(source, stages):\n"
        "    return [await stages.run_group(group) for group in await source.get_groups(3)]",
    )
    words = ["--rollout", own, "--generate", own, "--n-samples-per-prompt", "3", "--max-reward-failure-rate", "1"]
    async with open_manager(make_args(*words)) as manager:
        one = await manager.rollout(0)
        assert_conserved(manager)
    assert one.shards[0].batch.sample_index.tolist() == [1, 2, 6, 7, 8]
    assert one.metrics["rollout/dropped/failed"] == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "must return a non-empty list of groups"),
        ("[]", "must return a non-empty list of groups"),
        ("[[]]", "must return a non-empty list of groups"),
        ("[['text']]", "must return a non-empty list of groups"),
        ("2 * await source.get_groups(1)", "returned a Sample twice"),
        ("await source.get_groups(1)", "returned sample 0 PENDING"),
    ],
)
async def test_a_rollout_plugin_that_breaks_its_contract_is_named(
    make_args, open_manager, plugin_file, returned, message
):
    own = plugin_file("own", f"@hookimpl\nasync def rollout(source): return {returned}")
    async with open_manager(make_args("--rollout", own)) as manager:
        with pytest.raises(PluginError, match=f"plugin 'own': rollout {message}"):
            await manager.rollout(0)


async def test_external_groups_are_numbered_and_trained_as_they_are(make_args, open_manager, plugin_file):
    def finished(reward):
        sample = Sample(prompt="from elsewhere", status=Status.COMPLETED, reward=reward)
        sample.append([5, 6], logprobs=[-1.0, -1.0])
        return sample

    fan = [finished(1.0), finished(0.0)]
    fan[0].rollout_index = fan[1].rollout_index = 7
    async with open_manager(make_args("--generate", plugin_file("echo", ECHO))) as manager:
        manager.source.add_groups([[finished(1.0), finished(0.0), finished(0.5)], fan])
        batch = (await manager.rollout(0)).shards[0].batch
        assert_conserved(manager)
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]
    assert batch.group_index.tolist() == [0, 0, 0, 1, 1]
    assert batch.rollout_index.tolist() == [0, 1, 2, 3, 3]
    assert batch.sample_index.tolist() == [0, 1, 2, 3, 4]
