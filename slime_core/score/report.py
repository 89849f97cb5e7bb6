"""The report of `slime score`: rewards, failures, disagreements, speed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

from slime_core.options import Options
from slime_core.score.rows import Row
from slime_core.types import Sample, Status

SHOWN_CHARACTERS = 70
WARM_UP = 20
"""Samples that the speed leaves out: they wait for the worker processes to start."""


@dataclass(frozen=True)
class Disagreement:
    """A sample whose reward is not the one given."""

    row: int
    given: float
    reward: float
    label: str
    response: str


@dataclass
class Failure:
    """A reason for which samples failed."""

    count: int = 0
    rows: list[int] = field(default_factory=list)


class Report:
    """Collects graded rows."""

    def __init__(self, args: Options, compare: str | None, tolerance: float, show: int) -> None:
        self._weights = {choice.name: choice.weight for choice in args.reward}
        self._workers = args.reward_workers
        self._compare = compare
        self._tolerance = tolerance
        self._show = max(0, show)
        self._values: dict[str, list[float]] = {name: [] for name in self._weights}
        self._totals: list[float] = []
        self._failures: dict[str, Failure] = {}
        self._failed: Counter[str] = Counter()
        self._disagreements: list[Disagreement] = []
        self._warm: tuple[int, float] | None = None
        self._last = 0.0
        self.num_rows = self.num_bad_rows = self.num_samples = 0
        self.num_compared = self.num_disagreements = 0
        self.longest_stall_s = self.wall_s = 0.0

    @property
    def num_graded(self) -> int:
        """Samples with a reward."""
        return len(self._totals)

    def note_bad_row(self) -> None:
        """Count a row that cannot be read."""
        self.num_bad_rows += 1

    def add(self, row: Row) -> None:
        """Count a graded row."""
        self.num_rows += 1
        for sample, given in zip(row.samples, row.given, strict=True):
            self.num_samples += 1
            for name, value in sample.rewards.items():
                self._values.setdefault(name, []).append(value)
            if sample.reward is None:
                self._note_failure(row.number, sample)
                continue
            self._totals.append(sample.reward)
            if given is not None:
                self._compare_with(row.number, sample, given)
        self._last = time.monotonic()
        if self._warm is None and self.num_samples >= WARM_UP:
            self._warm = self.num_samples, self._last

    def samples_per_s(self) -> float:
        """Once the workers are up, or over all for a short file."""
        if self._warm is not None and self.num_samples > self._warm[0] and self._last > self._warm[1]:
            return (self.num_samples - self._warm[0]) / (self._last - self._warm[1])
        return self.num_samples / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "rows": self.num_rows,
            "bad_rows": self.num_bad_rows,
            "samples": self.num_samples,
            "graded": self.num_graded,
            "rewards": {name: _summary(values) for name, values in self._all_values().items() if values},
            "failures": {reason: asdict(failure) for reason, failure in self._failures.items()},
            "compared": self.num_compared,
            "disagreements": self.num_disagreements,
            "shown_disagreements": [asdict(one) for one in self._disagreements],
            "samples_per_s": self.samples_per_s(),
            "wall_s": self.wall_s,
            "longest_stall_s": self.longest_stall_s,
        }

    def as_text(self, path: str) -> str:
        """The report for a terminal."""
        bad = f", {self.num_bad_rows} bad rows left out" if self.num_bad_rows else ""
        lines = [f"{path}: {self.num_samples:,} samples in {self.num_rows:,} rows{bad}", ""]
        lines += self._table()
        held = f"{self.longest_stall_s:.1f} s" if self.longest_stall_s else "less than 100 ms"
        workers = "1 reward worker" if self._workers == 1 else f"{self._workers} reward workers"
        lines += ["", f"{self.samples_per_s():,.0f} samples a second, {workers}; the event loop was held for {held}"]
        return "\n".join(lines + self._failure_lines() + self._disagreement_lines())

    def _all_values(self) -> dict[str, list[float]]:
        several = len(self._weights) > 1 or any(weight != 1 for weight in self._weights.values())
        return {**self._values, **({"(weighted sum)": self._totals} if several else {})}

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("reward", "weight", "samples", "failed", "mean", "std", "min", "max", "zero", "one")
        ]
        for name, values in self._all_values().items():
            weight = f"{self._weights[name]:g}" if name in self._weights else ""
            failed = f"{self._failed[name]:,}" if name in self._weights else ""
            if not values:
                rows.append((name, weight, "0", failed, *[""] * 6))
                continue
            s = _summary(values)
            shares = [f"{100 * s[key]:.1f} %" for key in ("zero", "one")]
            figures = [f"{s[key]:.4g}" for key in ("mean", "std", "min", "max")]
            rows.append((name, weight, f"{len(values):,}", failed, *figures, *shares))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]

    def _failure_lines(self) -> list[str]:
        if not self._failures:
            return []
        num_failed = self.num_samples - self.num_graded
        lines = ["", f"{num_failed:,} of {self.num_samples:,} samples have no reward (FAILED):"]
        ordered = sorted(self._failures.items(), key=lambda item: -item[1].count)
        for reason, failure in ordered[: self._show]:
            rows = ", ".join(map(str, failure.rows)) + (", ..." if failure.count > len(failure.rows) else "")
            lines.append(f"  {failure.count:,} x {_short(reason, 2 * SHOWN_CHARACTERS)}  (line {rows})")
        if len(ordered) > self._show:
            lines.append(f"  and for {len(ordered) - self._show} other reasons")
        return lines

    def _disagreement_lines(self) -> list[str]:
        if self._compare is None:
            return []
        if not self.num_compared:
            return ["", f"no row gives a number under '{self._compare}' to compare with"]
        share = 100 * (1 - self.num_disagreements / self.num_compared)
        lines = [
            "",
            f"{share:.2f} % agree with '{self._compare}' ({self.num_disagreements:,} of {self.num_compared:,} do not)",
        ]
        for one in self._disagreements:
            lines.append(
                f"  line {one.row}: given {one.given:g}, here {one.reward:g}; label {one.label}; {one.response}"
            )
        return lines

    def _note_failure(self, number: int, sample: Sample) -> None:
        reason = sample.failure or f"no reward; its status is {sample.status}"
        failure = self._failures.setdefault(reason, Failure())
        failure.count += 1
        if len(failure.rows) < max(1, self._show) and number not in failure.rows:
            failure.rows.append(number)
        name = reason.split("'")[1] if sample.status is Status.FAILED and reason.startswith("reward '") else ""
        self._failed[name] += 1

    def _compare_with(self, number: int, sample: Sample, given: float) -> None:
        reward = sample.reward
        if reward is None:
            return
        self.num_compared += 1
        if abs(reward - given) > self._tolerance:
            self.num_disagreements += 1
            if len(self._disagreements) < self._show:
                end = sample.response[-2 * SHOWN_CHARACTERS :]
                label = _short(repr(sample.label), SHOWN_CHARACTERS)
                self._disagreements.append(Disagreement(number, given, reward, label, f"...{_tail(repr(end))}"))


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "samples": len(values),
        "mean": fmean(values),
        "std": pstdev(values),
        "min": min(values),
        "max": max(values),
        "zero": values.count(0.0) / len(values),
        "one": values.count(1.0) / len(values),
    }


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _tail(text: str) -> str:
    return text[-SHOWN_CHARACTERS:]
