"""What becomes of an engine whose start hangs, of somebody else's engine, and of one with other weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray

from slime_core.cluster import fleet as fleets
from slime_core.cluster.fleet import MAX_FAILED_STARTS, Fleet
from slime_core.cluster.placement import Seat
from slime_core.errors import EngineError, WeightsDifferError
from slime_core.testing import make_options

SEAT = Seat(0, 1.0, 0.0)
NOWHERE = {"a machine that is gone": 1}


@pytest.fixture(scope="module", autouse=True)
def some_ray() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "ACTOR_PATIENCE_S", 0.3)
    monkeypatch.setattr(fleets, "FIRST_BACKOFF_S", 0.001)


@ray.remote(num_cpus=0)
def done(value: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


@ray.remote(num_cpus=0)
class Actor:
    def check(self, paused: bool) -> None:
        """It is well."""


class Run:
    """A run as its fleet sees it: engines that start, or fail, as they are told to."""

    def __init__(self, start: Callable[[], object], weights: object = None) -> None:
        self._start, self._weights = start, weights
        self.num_starts = self.num_ended = 0

    def new_engine(self, index: int, seat: Seat) -> object:
        return Actor.remote()

    def end_engine(self, index: int, actor: object) -> None:
        self.num_ended += 1
        ray.kill(actor)

    def start_engine(self, actor: object, index: int, again: bool) -> object:
        self.num_starts += 1
        return self._start()

    def send_current_weights(self, url: str) -> object:
        return done.remote(self._weights)

    def dismiss(self, url: str) -> None:
        """There is no router."""


def poll_until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        fleet.poll()
        time.sleep(0.01)


def test_a_start_that_hangs_is_given_up_after_a_while():
    run = Run(lambda: done.options(resources=NOWHERE).remote("nobody"))
    fleet = Fleet(make_options("--engine-start-timeout-s", "2"), run, [SEAT])
    fleet.start()
    fleet.poll()
    assert run.num_ended == 0, "it has had no time"
    poll_until(fleet, lambda: run.num_starts > 1)
    assert run.num_ended == 1
    assert "has not started within" in fleet.take_messages()[0]


@pytest.mark.parametrize("words", [[], ["--external-engines", "http://127.0.0.1:9"]], ids=["own", "external"])
def test_somebody_elses_engine_may_come_back_however_long_it_is_gone(words):
    run = Run(lambda: done.remote(EngineError("nobody listens")))
    fleet = Fleet(make_options(*words), run, [SEAT])
    fleet.start()
    given_up = lambda: any("given up" in message for message in fleet.take_messages())  # noqa: E731
    if words:
        poll_until(fleet, lambda: run.num_starts > 2 * MAX_FAILED_STARTS)
        assert not given_up()
    else:
        poll_until(fleet, given_up)
        assert run.num_starts == MAX_FAILED_STARTS


def test_a_new_engine_with_other_weights_stops_the_run():
    run = Run(lambda: done.remote("http://new"), weights=WeightsDifferError("layer 3 differs"))
    fleet = Fleet(make_options(), run, [SEAT])
    fleet.start()
    with pytest.raises(WeightsDifferError, match="layer 3 differs"):
        poll_until(fleet, lambda: False)
