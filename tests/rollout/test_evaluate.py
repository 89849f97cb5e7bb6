"""Evaluation: every row, n samples each, nothing shared with training; failures count as wrong."""

import pytest

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
