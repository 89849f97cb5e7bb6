"""The picture of a run: reward over the rounds, smoothed, with evaluations, above the response length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve: TypeAlias = list[tuple[int, float]]
"""(step, value) in the order of the steps."""

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
REWARD, LENGTH = "#2563eb", "#0d9488"
EVALS = ("#ea580c", "#9333ea", "#be123c", "#4d7c0f")
MAX_MARKERS = 40
"""More evaluations are drawn as a line without markers."""


@dataclass
class Curves:
    """What is drawn."""

    reward: Curve = field(default_factory=list)
    length: Curve = field(default_factory=list)
    evals: dict[str, Curve] = field(default_factory=dict)
    """Data set -> mean reward of each evaluation."""


def collect(rows: Iterable[dict[str, Any]]) -> Curves:
    """The curves in the rows of a metrics.jsonl."""
    curves = Curves()
    for row in rows:
        for key, value in row.items():
            if value is None:
                continue
            topic, _, rest = key.partition("/")
            if key == "reward/mean":
                curves.reward.append((row["step"], value))
            elif key == "rollout/response_length_mean":
                curves.length.append((row["step"], value))
            elif topic == "eval" and rest.endswith("/mean"):
                curves.evals.setdefault(rest.removesuffix("/mean"), []).append((row["step"], value))
    return curves


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the values, narrower towards both ends."""
    reach = max(1, len(values) // 20)
    windows = [(min(reach, i, len(values) - 1 - i), i) for i in range(len(values))]
    return [sum(values[i - r : i + r + 1]) / (2 * r + 1) for r, i in windows]


def draw(curves: Curves, *, title: str, path: Path) -> Path:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1], gridspec_kw={"hspace": 0.12})
    _draw_reward(top, curves)
    _draw_length(bottom, curves.length)
    for axes in (top, bottom):
        _style(axes)
    top.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    bottom.set_xlabel("round", color=MUTED)
    figure.align_ylabels([top, bottom])
    figure.savefig(path, bbox_inches="tight", pad_inches=0.2)
    return path


def _draw_reward(axes: Axes, curves: Curves) -> None:
    steps, values = zip(*curves.reward, strict=True)
    axes.plot(steps, values, color=REWARD, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values), color=REWARD, linewidth=2.2, label="training")
    for (name, curve), color in zip(curves.evals.items(), _cycle(EVALS, len(curves.evals)), strict=True):
        marker = "o" if len(curve) <= MAX_MARKERS else None
        steps, values = zip(*curve, strict=True)
        axes.plot(steps, values, color=color, marker=marker, markersize=5, linewidth=1.2, label=f"eval {name}")
    axes.set_ylabel("reward", color=MUTED)
    axes.legend(
        # above the panel, beside the title, where no curve can be
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.4,
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _draw_length(axes: Axes, length: Curve) -> None:
    if length:
        steps, values = zip(*length, strict=True)
        axes.plot(steps, values, color=LENGTH, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(values), color=LENGTH, linewidth=2)
    axes.set_ylabel("response tokens", color=MUTED)


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=MUTED, length=0, labelsize=9)
    axes.margins(x=0.02)


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[i % len(colors)] for i in range(count)]
