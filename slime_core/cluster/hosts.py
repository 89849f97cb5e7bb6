"""What the fleet of one model asks of the run: actors for its engines, the router's attention, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core.cluster.actors import EngineActor
from slime_core.cluster.placement import Seat
from slime_core.options import Options

CurrentWeights = Callable[[str], Any | None]


class EngineHost:
    """A `fleet.Host` on Ray."""

    def __init__(
        self,
        args: Options,
        name: str,
        run_dir: Path,
        threads: int,
        group: Any,
        manager: Any,
        send_current_weights: CurrentWeights,
        gpus: Sequence[Sequence[str]] = (),
        followers: Sequence[Sequence[Seat]] = (),
    ) -> None:
        """`args` and `name` are those of the model.

        Args:
            gpus: those that trainers lend to each engine.
            followers: where each has parts on further machines.
        """
        self._args, self._name, self._run_dir, self._threads = args, name, run_dir, threads
        self._group, self._manager, self._gpus = group, manager, gpus
        self._followers = followers
        self._crews: dict[int, list[Any]] = {}
        """The actors on further machines; they end with the one that leads them."""
        self.send_current_weights = send_current_weights

    def new_engine(self, index: int, seat: Seat) -> Any:
        """An actor in the seat, and others where the engine has parts."""
        seats = self._followers[index] if self._followers else ()
        self._crews[index] = [in_seat(EngineActor, self._group, follower) for follower in seats]
        return in_seat(EngineActor, self._group, seat)

    def end_engine(self, index: int, actor: Any) -> None:
        """End its actors, and with them its servers."""
        for one in [actor, *self._crews.pop(index, [])]:
            with contextlib.suppress(Exception):  # most likely it is gone already
                ray.kill(one)

    def start_engine(self, actor: Any, index: int, again: bool) -> Any:
        """Start the actor's server."""
        gpus = self._gpus[index] if self._gpus else ()
        crew = self._crews[index]
        return actor.start.remote(self._args, self._name, index, self._run_dir, self._threads, gpus, crew, again)

    def admit(self, url: str) -> Any:
        """Let the router send requests to an engine."""
        return self._manager.admit.remote(self._name, url)

    def dismiss(self, url: str) -> None:
        """Let it send none."""
        self._manager.dismiss.remote(self._name, url)


def no_weights(url: str) -> Any:
    """A frozen model's engine has what it was started with."""
    return ray.put(None)


def in_seat(actor_class: Any, group: Any, seat: Seat) -> Any:
    """A new actor in a bundle of the placement group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=seat.bundle)
    return actor_class.options(num_cpus=seat.num_cpus, num_gpus=seat.num_gpus, scheduling_strategy=strategy).remote()
