"""Evaluation: every row, n samples each, nothing shared with training; failures count as wrong."""

import asyncio
import threading

import pytest

from slime_core import PluginError

GENERATE = """
@hookimpl
async def generate(sample, sampling_params, evaluation):
    sample.metadata["evaluation"] = evaluation
    text = str(sample.label) if sample.index % 2 == 0 else "wrong"
    sample.append([1], logprobs=[-1.0], text=text)
    sample.metadata["temperature"] = sampling_params["temperature"]
    sample.status = Status.COMPLETED
    return [sample]
"""
GRADE = """
@hookimpl
async def reward(sample):
    if sample.prompt == "broken":
        raise ValueError("no")
    return {"reward": float(sample.response == str(sample.label)), "temperature": sample.metadata["temperature"],
            "evaluation": sample.metadata["evaluation"]}
"""


@pytest.fixture
def args_for(make_args, write_rows, plugin_file):
    def make(rows, *words):
        heldout = write_rows(rows, "heldout.jsonl")
        train = write_rows([{"prompt": "t", "label": 1}], "train.jsonl")
        return make_args(
            "--prompt-data", train, "--eval-data", f"heldout={heldout}", "--generate", plugin_file("half", GENERATE),
            "--reward", plugin_file("equal", GRADE), "--eval-n-samples-per-prompt", "4", *words,
        )  # fmt: skip

    return make


async def test_every_row_is_sampled_n_times(args_for, open_manager):
    async with open_manager(args_for([{"prompt": f"p{i}", "label": i} for i in range(3)])) as manager:
        metrics = await manager.evaluate()
    assert metrics["eval/heldout/mean"] == 0.5
    assert metrics["eval/heldout/pass@1"] == 0.5
    assert metrics["eval/heldout/pass@4"] == 1.0
    assert metrics["eval/heldout/failed_fraction"] == 0.0


async def test_a_failed_sample_counts_as_wrong_and_is_reported(args_for, open_manager):
    async with open_manager(args_for([{"prompt": "broken", "label": 1}, {"prompt": "fine", "label": 1}])) as manager:
        metrics = await manager.evaluate()
    assert metrics["eval/heldout/mean"] == 0.25
    assert metrics["eval/heldout/failed_fraction"] == 0.5


async def test_evaluation_shares_no_state_with_training(args_for, open_manager):
    args = args_for([{"prompt": "p", "label": 1}])
    async with open_manager(args) as plain:
        expected = (await plain.rollout(0)).shards[0].batch.sample_index.tolist()
    async with open_manager(args) as evaluated:
        before = evaluated.source.state_dict()
        await evaluated.evaluate()
        assert evaluated.source.state_dict() == before
        assert (await evaluated.rollout(0)).shards[0].batch.sample_index.tolist() == expected


async def test_too_long_prompts_are_left_out_and_counted(args_for, open_manager):
    rows = [{"prompt": "x" * 50, "label": 1}, {"prompt": "short", "label": 1}]
    async with open_manager(args_for(rows, "--max-prompt-tokens", "20")) as manager:
        metrics = await manager.evaluate()
    assert metrics["eval/heldout/too_long"] == 1.0


OWN = """
@hookimpl
async def generate(sample, sampling_params):
    sample.append([1], logprobs=[-1.0], text="own")
    sample.metadata["temperature"] = sampling_params["temperature"]
    sample.metadata["evaluation"] = True
    sample.status = Status.COMPLETED
    return [sample]
"""
ALWAYS = "@hookimpl\nasync def reward(sample): return {'reward': 0.75, 'temperature': sample.metadata['temperature']}"


async def test_a_data_set_may_have_settings_of_its_own(args_for, open_manager, write_rows, plugin_file):
    other = write_rows([{"prompt": f"q{i}"} for i in range(2)], "other.jsonl")
    own = f'other={{path = "{other}", n-samples-per-prompt = 3, temperature = 0.25'
    own += f', reward = "{plugin_file("always", ALWAYS)}", generate = "{plugin_file("own", OWN)}"}}'
    args = args_for([{"prompt": "p", "label": 1}])
    words = ["--eval-data", *[str(entry) for entry in args.eval_data], own]
    async with open_manager(args_for([{"prompt": "p", "label": 1}], *words)) as manager:
        metrics = await manager.evaluate()
    assert metrics["eval/heldout/mean"] == 0.5, "the flags' own reward and generator"
    assert metrics["eval/other/mean"] == 0.75
    assert {name for name in metrics if name.startswith("eval/other/pass")} == {
        "eval/other/pass@1",
        "eval/other/pass@2",
    }


async def test_a_data_set_with_a_generator_of_its_own_needs_no_field(args_for, open_manager, write_rows, plugin_file):
    rows = [{"prompt": "q", "metadata": {"by": "half"}}]
    other = write_rows(rows, "other.jsonl")
    own = plugin_file("own", OWN)
    words = [
        "--eval-data",
        f'other={{path = "{other}", generate = "{own}", reward = "{plugin_file("always", ALWAYS)}"}}',
    ]
    words += ["--generate", plugin_file("half", GENERATE), own, "--generate-field", "by"]
    async with open_manager(args_for(rows, *words)) as manager:
        assert (await manager.evaluate())["eval/other/mean"] == 0.75


async def test_an_evaluation_beside_a_round_disturbs_neither(args_for, open_manager):
    args = args_for([{"prompt": f"p{i}", "label": i} for i in range(20)])
    async with open_manager(args) as alone:
        expected = (await alone.rollout(0)).shards[0].batch
    async with open_manager(args) as manager:
        metrics, one = await asyncio.gather(manager.evaluate(), manager.rollout(0))
    assert metrics["eval/heldout/mean"] == 0.5
    assert one.shards[0].batch.tokens.tolist() == expected.tokens.tolist()


async def test_an_own_collection_replaces_the_evaluations_too(args_for, open_manager, plugin_file):
    some = plugin_file(
        "some",
        "@hookimpl\nasync def rollout(source, stages, evaluation):\n    assert evaluation\n"
        "    return [await stages.run_group(source.groups[0])]",
    )
    args = args_for([{"prompt": "p", "label": 1}, {"prompt": "broken", "label": 1}], "--eval-rollout", some)
    async with open_manager(args) as manager:
        assert (await manager.evaluate())["eval/heldout/failed_fraction"] == 0.0


async def test_progress_tells_of_an_evaluation_and_of_a_round_where_there_is_one(args_for, open_manager, plugin_file):
    held_source = "import asyncio\n" + GENERATE.replace("    text =", "    await asyncio.sleep(0.5)\n    text =")
    held = plugin_file("held", held_source)
    args = args_for([{"prompt": f"p{i}", "label": i} for i in range(5)], "--generate", held)
    async with open_manager(args) as manager, asyncio.timeout(30):
        evaluation = asyncio.create_task(manager.evaluate())
        while manager.progress().num_wanted != 5:
            await asyncio.sleep(0.01)
        one = asyncio.create_task(manager.rollout(0))
        while manager.progress().num_wanted != 2:
            await asyncio.sleep(0.01)
        await asyncio.gather(evaluation, one)
        assert manager.progress().num_wanted == 2


async def test_a_collection_that_returns_no_groups_is_named(args_for, open_manager, plugin_file):
    nothing = plugin_file("nothing", "@hookimpl\nasync def rollout(): return None")
    async with open_manager(args_for([{"prompt": "p", "label": 1}], "--eval-rollout", nothing)) as manager:
        with pytest.raises(PluginError, match="plugin 'nothing': rollout must return"):
            await manager.evaluate()


class NotingThreads:
    """A tokenizer that notes from which threads it was used."""

    def __init__(self, tokenizer):
        self.tokenizer, self.threads = tokenizer, set()

    def __getattr__(self, name):
        self.threads.add(threading.get_ident())
        return getattr(self.tokenizer, name)


async def test_prompts_of_an_evaluation_are_tokenised_off_the_event_loop(args_for, open_manager):
    async with open_manager(args_for([{"prompt": f"p{i}", "label": i} for i in range(3)])) as manager:
        manager._prompts._tokenizer = noting = NotingThreads(manager.engine.tokenizer)
        await manager.evaluate()
    assert noting.threads and threading.get_ident() not in noting.threads


async def test_a_large_evaluation_is_started_bit_by_bit(args_for, open_manager):
    """Other tasks, such as those of a round beside it, get their turns meanwhile."""
    async with open_manager(args_for([{"prompt": f"p{i}", "label": i} for i in range(40)])) as manager:
        most, started, stop = 0, 0, False

        async def watch():
            nonlocal most, started
            while not stop:
                now = len(asyncio.all_tasks())
                most, started = max(most, now - started), now
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        await manager.evaluate()
        stop = True
        await watcher
    assert 4 <= most < 40, "tasks that came between two turns of the loop"
