import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import long_tail_model, multi_turn, train_step, trl_side  # noqa: E402


@pytest.fixture
def turns():
    def turn(wall, cpu, waiting_cpu):
        facts = {"length_mean": 10.0, "length_max": 20.0, "reward": 0.5, "perf/train_s": wall / 2}
        return train_step.Turn(wall, cpu, waiting_cpu, 0.0, facts)

    return {
        "slime": [turn(0.1, 0.2, 0.0), turn(0.2, 0.3, 0.0), turn(0.9, 0.4, 0.0)],
        "trl": [turn(0.4, 0.6, 0.04), turn(0.4, 0.6, 0.04), turn(0.4, 0.6, 0.04)],
    }


@pytest.mark.parametrize(
    "module",
    [
        "benchmarks.train_step",
        "benchmarks.grading",
        "benchmarks.weights",
        "benchmarks.multi_turn",
        "benchmarks.gateway",
        "benchmarks.overlap",
        "benchmarks.loss_memory",
        "benchmarks.backends",
    ],
)
def test_help_is_shown(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--quick" in done.stdout


def test_ratios_are_medians_of_trl_over_slime(turns):
    report = train_step.figures("case", turns)
    assert report["case_slime_s"] == 0.2
    assert report["case_wall_ratio"] == 2.0
    assert report["case_cpu_ratio"] == 2.0
    assert report["case_slime_phases"] == {"train_s": 0.1}


def test_a_waiting_side_is_charged_for_what_it_uses(turns):
    report = train_step.figures("case", turns)
    assert report["case_slime_waiting_cpus"] == pytest.approx(0.1)
    assert report["case_trl_waiting_cpus"] == 0.0


def test_the_long_tail_model_ends_answers_at_its_two_rates():
    states = long_tail_model.token_states(vocab_size=20, special=[0, 1, 2])
    table = [[math.exp(logprob) for logprob in row] for row in long_tail_model.next_token_logprobs(states, end=0)]
    assert Counter(states)[2] == 3
    assert [row[0] for row in table[:2]] == pytest.approx([1 / 50, 1 / 400])
    for row in table:
        assert sum(row) == pytest.approx(1.0)
    long = sum(chance for chance, state in zip(table[2], states, strict=True) if state == 1)
    assert long == pytest.approx(0.15)


def test_both_sides_get_the_same_algorithm(tmp_path):
    args = train_step.parse_arguments(["--lr", "0.5"])
    for case in train_step.make_cases(args, "prompts", "model", "long"):
        settings = trl_side.trl_settings(case)
        words = train_step.slime_train(case, tmp_path, threads=2)
        slime = dict(pairwise(words))
        assert settings["max_steps"] == int(slime["--num-rollout"])
        assert settings["max_completion_length"] == int(slime["--max-response-tokens"])
        assert settings["learning_rate"] == float(slime["--lr"]) == 0.5
        assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 256


def test_engine_concurrency_is_weighted_by_time():
    """Two requests for 1 s, one of them for 4 s more."""
    changes = [(0.0, 1), (0.0, 1), (1.0, -1), (5.0, -1)]
    assert multi_turn.figures(changes, 2) == {"engine_concurrency_mean": 1.2, "full_fraction": 0.2, "wall_s": 5.0}
