"""`--tracker console`: a line a round and a line an evaluation, on stdout."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from slime_core import hookimpl

SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 8
"""Rounds that the sparkline looks back."""

ROUND_TOPICS = ("reward/", "rollout/", "train/")
"""A row with a metric of these is a round's."""


class Console:
    """Remembers the last rewards, for the sparkline and the arrow."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._rewards: deque[float] = deque(maxlen=NUM_SPARKS)

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Print what the row has: its round, its evaluations, or nothing."""
        if any(name.startswith(ROUND_TOPICS) for name in metrics):
            if (reward := metrics.get("reward/mean")) is not None:
                self._rewards.append(reward)
            show(round_line(step, metrics, list(self._rewards)))
        for dataset in [name.split("/", 1)[1].removesuffix("/mean") for name in metrics if _is_eval_mean(name)]:
            show(eval_line(step, dataset, metrics))


def show(line: Text) -> None:
    """Print a line, coloured on a terminal.

    Through `print`, not rich, so that a live bar that redirects stdout puts the line above itself.
    """
    console = RichConsole()
    with console.capture() as captured:
        console.print(line, soft_wrap=True)
    print(captured.get(), end="", flush=True)


def round_line(step: int, metrics: dict[str, Any], rewards: Sequence[float]) -> Text:
    """`step 12  reward 0.731 ▲ 0.042 ▂▃▅▆▇  length 21.3  loss 0.0123 ...`; what a row lacks is left out.

    `rewards` are those of the last rounds, this one included.
    """
    line = Text().append(f"step {step:>4}", "bold")
    if "reward/mean" in metrics:
        _add(line, "reward", f"{metrics['reward/mean']:.3f}", "bold")
        line.append_text(trend(rewards)).append(f" {sparkline(rewards):<{NUM_SPARKS}}", "cyan")
    for label, name, form in (
        ("length", "rollout/response_length_mean", "{:.1f}"),
        ("loss", "train/loss", "{: .4f}"),
        ("tok/s", "perf/rollout_tokens_per_s", "{:>6,.0f}"),
    ):
        if metrics.get(name) is not None:
            _add(line, label, form.format(metrics[name]))
    for phase in ("rollout", "train", "weights", "step"):
        if (seconds := metrics.get(f"perf/{phase}_s")) is not None:
            _add(line, phase, f"{seconds:.1f}s", "dim")
    for label, topic, style in (("dropped", "rollout/dropped/", "yellow"), ("failed", "reward/failed/", "red")):
        for name, count in metrics.items():
            if name.startswith(topic) and count:
                _add(line, f"{label} {name.removeprefix(topic)}", f"{count:.0f}", style)
    return line


def eval_line(step: int, dataset: str, metrics: dict[str, Any]) -> Text:
    """`step 12  eval heldout 0.945  pass@4 0.970  length 21.3`."""
    prefix = f"eval/{dataset}/"
    line = Text().append(f"step {step:>4}", "bold")
    _add(line, f"eval {dataset}", f"{metrics[f'{prefix}mean']:.3f}", "bold magenta")
    for name in metrics:
        if name.startswith(f"{prefix}pass@") and not name.endswith("@1"):
            _add(line, name.removeprefix(prefix), f"{metrics[name]:.3f}")
    if (length := metrics.get(f"{prefix}response_length_mean")) is not None:
        _add(line, "length", f"{length:.1f}")
    if failed := metrics.get(f"{prefix}failed_fraction"):
        _add(line, "failed", f"{failed:.1%}", "red")
    return line


def trend(values: Sequence[float]) -> Text:
    """An arrow and how far the last value is from the one before; blank of the same width for a first value."""
    if len(values) < 2:
        return Text(" " * 8)
    change = values[-1] - values[-2]
    arrow, style = ("▲", "green") if change > 0 else ("▼", "red") if change < 0 else ("=", "dim")
    return Text(f" {arrow} {abs(change):.3f}", style=style)


def sparkline(values: Sequence[float]) -> str:
    """A character a value, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    if high == low:
        return SPARKS[len(SPARKS) // 2] * len(values)
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values)


def _is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/mean")


def _add(line: Text, label: str, value: str, style: str = "") -> None:
    line.append(f"  {label} ", "dim").append(value, style)
