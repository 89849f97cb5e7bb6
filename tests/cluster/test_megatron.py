"""Whole runs whose trainer is cut over several ranks."""

from __future__ import annotations

import pytest

MEGATRON = ["--train-backend", "megatron", "--weights-check-interval", "1"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]


def rounds(rows):
    return [row for row in rows if "train/loss" in row]


def check_agreement(rows):
    """Engine and trainer compute the same, before the first round and after every update."""
    for row in rounds(rows):
        assert row["train/logprob_abs_diff_max"] < 1e-4
        assert row["weights/logprob_abs_diff"] < 1e-4


def test_a_run_with_a_critic_at_tp2_is_resumed_at_pp2(start_run, read_rows):
    words = [*MEGATRON, *TP2, "--num-trainers", "2", "--num-rollout", "2", "--advantage-estimator", "ppo", "--critic"]
    code, output = start_run(*words).finish()
    assert code == 0, output
    again = start_run("--resume", "run", "--num-rollout", "4", "--tensor-model-parallel-size", "1", *PP2)
    code, output = again.finish()
    assert code == 0, output
    again.assert_nothing_left()
    assert [row["step"] for row in rounds(read_rows()) if "train/value_loss" in row] == [0, 1, 2, 3]
    check_agreement(read_rows())


def test_a_layout_that_does_not_fit_starts_nothing(start_run, tmp_path):
    run = start_run(*MEGATRON, "--tensor-model-parallel-size", "3", "--num-trainers", "3")
    code, output = run.finish()
    assert code == 1
    assert "--tensor-model-parallel-size 3 does not divide" in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_engines_compute_what_four_ranks_do(transport, start_run, read_rows):
    words = [
        *MEGATRON,
        *TP2,
        *PP2,
        "--sequence-parallel",
        "--num-trainers",
        "4",
        "--weight-transport",
        transport,
    ]
    code, output = start_run(*words, "--num-engines", "2").finish()
    assert code == 0, output
    assert len(rounds(read_rows())) == 3
    check_agreement(read_rows())
