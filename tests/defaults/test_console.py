import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from slime_core.defaults.console import SPARKS, Console, eval_line, round_line, sparkline, trend
from slime_core.testing import make_options
from slime_core.tracking.progress import Progress

ROUND = {
    "reward/mean": 0.731,
    "rollout/response_length_mean": 21.34,
    "train/loss": -0.0123,
    "perf/rollout_tokens_per_s": 4200.0,
    "perf/rollout_s": 1.23,
    "perf/step_s": 2.0,
}


@pytest.fixture
def tracker() -> Console:
    return Console(make_options())


def test_a_round_is_one_line(tracker, capsys):
    tracker.log_metrics(step=12, metrics=ROUND)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("step   12  reward 0.731")
    assert out.endswith("  length 21.3  loss -0.0123  tok/s  4,200  rollout 1.2s  step 2.0s\n")


def test_the_next_round_says_how_far_the_reward_moved(tracker, capsys):
    for step, reward in enumerate([0.5, 0.75, 0.25]):
        tracker.log_metrics(step=step, metrics={"reward/mean": reward})
    first, second, third = capsys.readouterr().out.splitlines()
    assert "▲" not in first
    assert "▲ 0.250" in second
    assert "▼ 0.500" in third


def test_drops_and_failures_are_told():
    line = round_line(
        0, {"rollout/dropped/zero_std_0": 3.0, "rollout/dropped/long": 0.0, "reward/failed/math": 2.0}, []
    )
    assert "dropped zero_std_0 3" in line.plain
    assert "failed math 2" in line.plain
    assert "long" not in line.plain


def test_an_evaluation_is_a_line_a_data_set(tracker, capsys):
    metrics = {
        "eval/a/mean": 0.945,
        "eval/a/pass@1": 0.945,
        "eval/a/pass@4": 0.97,
        "eval/b/mean": 0.5,
        "perf/eval_s": 1.0,
    }
    tracker.log_metrics(step=3, metrics=metrics)
    first, second = capsys.readouterr().out.splitlines()
    assert "eval a 0.945  pass@4 0.970" in first
    assert "eval b 0.500" in second


def test_failed_evaluation_samples_are_told():
    assert "failed 25.0%" in eval_line(0, "a", {"eval/a/mean": 0.5, "eval/a/failed_fraction": 0.25}).plain


def test_a_row_of_timings_alone_prints_nothing(tracker, capsys):
    tracker.log_metrics(step=0, metrics={"perf/save_s": 1.0})
    assert capsys.readouterr().out == ""


def test_training_without_rewards_has_a_line(tracker, capsys):
    tracker.log_metrics(step=0, metrics={"train/loss": 2.5})
    assert "loss  2.5000" in capsys.readouterr().out


def test_away_from_a_terminal_there_are_no_escape_codes(tracker, capsys):
    tracker.log_metrics(step=0, metrics=ROUND)
    assert "\x1b" not in capsys.readouterr().out


def test_lines_go_above_a_live_bar(tracker):
    args = make_options()
    screen = RichConsole(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Progress(args, screen) as progress, progress.phase("rollout"):
        assert sys.stdout is not sys.__stdout__
        tracker.log_metrics(step=0, metrics=ROUND)
    assert isinstance(screen.file, io.StringIO)
    assert "\x1b[2Kstep    0  reward 0.731" in screen.file.getvalue()


def test_a_first_value_has_a_blank_as_wide_as_a_trend():
    assert len(trend([0.5]).plain) == len(trend([0.5, 0.25]).plain)
    assert trend([0.5]).plain.strip() == ""


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_a_sparkline_has_a_character_a_value_and_keeps_their_order(values: list[float]):
    line = sparkline(values)
    assert len(line) == len(values)
    heights = [SPARKS.index(character) for character in line]
    pairs = sorted(zip(values, heights, strict=True))
    assert [height for _, height in pairs] == sorted(heights)
