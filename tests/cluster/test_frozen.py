"""A judge beside the policy: asked by rewards, killed under the run, and never given weights."""

from __future__ import annotations

from cluster.test_faults import WATCHED, kill, rounds, servers

JUDGED = """
from slime_core import hookimpl

@hookimpl
async def reward(args, sample, engine):
    judge = engine.frozen["judge"]
    verdict = await judge.generate([1, 2, 3], {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})
    policy = await engine.generate([1, 2, 3], {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})
    logprobs = await judge.prompt_logprobs(sample.tokens)
    return {
        "reward": sum(t % 2 == 0 for t in sample.tokens) / len(sample.tokens),
        "verdict": float(sum(verdict.tokens)),
        "judge_version": float(max(verdict.weight_versions)),
        "policy_version": float(max(policy.weight_versions)),
        "told": float(len(logprobs)) - len(sample.tokens),
    }
"""


def judges(run):
    """The judge's server process."""
    of_judge = run.running("judge_0.port")
    return [process for process in servers(run) if process in of_judge]


def test_a_frozen_model_answers_the_same_all_along_and_is_started_again(start_run, read_rows, tmp_path, model_dir):
    (tmp_path / "judged.py").write_text(JUDGED)
    words = ["--frozen-model", f"judge={model_dir}", "--reward", "./judged.py", "--reward-timeout-s", "600", *WATCHED]
    run = start_run("--num-rollout", "12", *words)
    run.wait_for(lambda: len(rounds(read_rows())) >= 2)
    assert kill(run, judges) == 1
    code, output = run.finish()
    assert code == 0, output
    done = rounds(read_rows())
    assert len({row["reward/judged/verdict/mean"] for row in done}) == 1
    assert {row["reward/judged/judge_version/mean"] for row in done} == {0.0}
    assert [row["reward/judged/policy_version/mean"] for row in done] == list(range(12)), "the policy went on learning"
    assert {row["reward/judged/told/mean"] for row in done} == {-1.0}
    assert sum(row["engines/judge/restarts"] for row in done) == 1
    assert sum(row["engines/restarts"] for row in done) == 0, "the policy's engine was left alone"
    assert "judge 0 serves again" in output
    run.assert_nothing_left()


def test_a_frozen_model_that_does_not_load_ends_the_run_with_its_log(start_run, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3"}')
    run = start_run("--frozen-model", f"judge={broken}")
    code, output = run.finish()
    assert code == 1, output
    assert "judge 0 exited with code" in output and "judge_0.log" in output
    run.assert_nothing_left()
