import itertools

import pytest

from slime_core.tracking.timing import Timer


def make_timer(*ticks: float) -> Timer:
    return Timer(clock=iter(ticks).__next__)


def test_a_lap_has_each_phase_and_the_whole_step():
    timer = make_timer(0.0, 1.0, 3.0, 10.0)
    with timer.phase("rollout"):
        pass
    assert timer.lap() == {"rollout": 2.0, "step": 10.0}


def test_a_phase_entered_twice_adds_up():
    timer = make_timer(0.0, 1.0, 2.0, 5.0, 8.0, 9.0)
    for _ in range(2):
        with timer.phase("train"):
            pass
    assert timer.lap() == {"train": 4.0, "step": 9.0}


def test_a_lap_starts_anew():
    timer = make_timer(0.0, 1.0, 2.0, 3.0, 7.0)
    with timer.phase("train"):
        pass
    timer.lap()
    assert timer.lap() == {"step": 4.0}


def test_a_phase_that_raises_is_timed_too():
    timer = Timer(clock=map(float, itertools.count()).__next__)
    with pytest.raises(RuntimeError), timer.phase("train"):
        raise RuntimeError
    assert timer.lap()["train"] == 1.0
