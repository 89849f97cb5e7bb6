"""What a person sees while a run goes on: a live bar on a terminal, nothing but the trackers' lines elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from slime_core.tracking.timing import Timer


class Progress:
    """Shows the phase under way and times every phase.

        with Progress(args) as progress:
            for step in range(args.num_rollout):
                with progress.phase("rollout", total=args.rollout_batch_size):
                    ...  # progress.update(num_groups, reward=0.41) now and then
                metrics |= perf_metrics(progress.lap())

    On a terminal one bar stands below whatever is printed: `print` and the trackers write above it, because the bar
    takes over stdout and stderr while it is shown. Elsewhere only `note` writes. Of nested phases the inner one is
    shown.
    """

    def __init__(self, args: argparse.Namespace, console: Console | None = None) -> None:
        self._console = console or Console()
        self._num_rounds = args.num_rollout
        self._timer = Timer()
        self._live = _bars(self._console) if self._console.is_terminal and not self._console.is_dumb_terminal else None
        self._shown: list[bars.TaskID] = []

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def phase(self, name: str, total: float | None = None, step: int | None = None) -> Iterator[None]:
        """Show and time a phase; without a `total` the bar only moves. `step` is the round it belongs to."""
        with self._timer.phase(name):
            if self._live is None:
                yield
                return
            label = name if step is None else f"round {step + 1}/{self._num_rounds} {name}"
            task = self._open(self._live, label, total)
            try:
                yield
            finally:
                self._close(self._live, task)

    def update(self, completed: float, **fields: float | str) -> None:
        """Say how far the innermost phase is, and what else to show behind its bar, for example `reward=0.41`."""
        if self._live is not None and self._shown:
            self._live.update(self._shown[-1], completed=completed, fields=_fields(fields))

    def note(self, message: str) -> None:
        """Print one line, terminal or not."""
        self._console.print(Text(message), soft_wrap=True)

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap, and `step`, all of the time since then; see `Timer.lap`."""
        return self._timer.lap()

    def _open(self, live: bars.Progress, label: str, total: float | None) -> bars.TaskID:
        self._show_last(live, visible=False)
        self._shown.append(live.add_task(label, total=total, fields=""))
        return self._shown[-1]

    def _close(self, live: bars.Progress, task: bars.TaskID) -> None:
        self._shown.remove(task)
        live.remove_task(task)
        self._show_last(live, visible=True)
        live.refresh()

    def _show_last(self, live: bars.Progress, visible: bool) -> None:
        if self._shown:
            live.update(self._shown[-1], visible=visible)


def _bars(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=24),
        bars.TaskProgressColumn(text_format="{task.completed:.0f}/{task.total:.0f}", text_format_no_percentage=""),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[fields]}", style="dim", markup=False),
        console=console,
        transient=True,
    )


def _fields(values: dict[str, float | str]) -> str:
    return "  ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) else f"{value:.3f}"
