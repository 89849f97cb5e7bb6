import argparse
import io
import sys

import pytest
from rich.console import Console

from slime_core.tracking.progress import Progress

ARGS = argparse.Namespace(num_rollout=3)


def make_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_away_from_a_terminal_phases_write_nothing():
    console = make_console(terminal=False)
    with Progress(ARGS, console) as progress, progress.phase("rollout", total=4):
        progress.update(2, reward=0.5)
    assert written(console) == ""


def test_a_note_is_a_line_anywhere():
    console = make_console(terminal=False)
    with Progress(ARGS, console) as progress:
        progress.note("[engine] 2 engines are ready")
    assert written(console) == "[engine] 2 engines are ready\n"


def test_on_a_terminal_the_bar_shows_phase_round_count_and_fields():
    console = make_console(terminal=True)
    with Progress(ARGS, console) as progress, progress.phase("rollout", total=4, step=0):
        progress.update(2, reward=0.51234, dropped="1 group")
    shown = written(console)
    assert "round 1/3 rollout" in shown


def test_update_outside_a_phase_does_nothing():
    console = make_console(terminal=True)
    with Progress(ARGS, console) as progress:
        progress.update(1)
        assert progress.lap().keys() == {"step"}


def test_of_nested_phases_the_inner_one_is_updated_and_both_are_timed():
    console = make_console(terminal=True)
    with Progress(ARGS, console) as progress, progress.phase("train", total=2):
        with progress.phase("save"):
            progress.update(1)
        progress.update(2)
        durations = progress.lap()
    assert durations.keys() == {"save", "step"}
    assert progress.lap().keys() == {"train", "step"}


def test_a_phase_that_raises_leaves_no_bar_behind():
    console = make_console(terminal=True)
    with Progress(ARGS, console) as progress:
        with pytest.raises(RuntimeError), progress.phase("rollout"):
            raise RuntimeError
        with progress.phase("train"):
            progress.update(1)
    frames = written(console).split("\x1b[2K")
    trained = [frame for frame in frames if "train" in frame]
    assert trained
    assert not any("rollout" in frame for frame in trained)
    assert "train" not in frames[-1]


def test_printing_goes_above_a_live_bar(monkeypatch):
    console = make_console(terminal=True)
    with Progress(ARGS, console) as progress, progress.phase("rollout", total=4):
        assert sys.stdout is not sys.__stdout__
        print("step 0  reward 0.5")
    assert "step 0  reward 0.5\n" in written(console)
