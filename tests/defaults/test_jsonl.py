import argparse
import json

import numpy as np
import pytest

from slime_core.defaults.jsonl import Jsonl
from slime_core.testing import make_options
from slime_core.tracking.report import read_metrics


@pytest.fixture
def args(tmp_path) -> argparse.Namespace:
    return make_options("--runs-dir", str(tmp_path), "--run-name", "first")


def test_every_call_is_a_row_with_its_step_first(args, tmp_path):
    tracker = Jsonl(args)
    tracker.log_metrics(step=0, metrics={"reward/mean": 0.5})
    tracker.log_metrics(step=0, metrics={"eval/heldout/mean": 0.25})
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step":0,"reward/mean":0.5}', '{"step":0,"eval/heldout/mean":0.25}']


def test_numbers_that_are_not_finite_become_null(args, tmp_path):
    Jsonl(args).log_metrics(step=1, metrics={"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1})
    row = json.loads((tmp_path / "first" / "metrics.jsonl").read_text())
    assert row == {"step": 1, "a": None, "b": None, "c": None, "d": 1}


def test_numpy_numbers_are_numbers(args, tmp_path):
    Jsonl(args).log_metrics(step=0, metrics={"a": np.float32(0.5), "b": np.int64(3)})
    assert read_metrics(tmp_path / "first") == [{"step": 0, "a": 0.5, "b": 3}]


def test_a_resumed_run_appends(args, tmp_path):
    Jsonl(args).log_metrics(step=0, metrics={"a": 1})
    Jsonl(args).log_metrics(step=1, metrics={"a": 2})
    assert [row["step"] for row in read_metrics(tmp_path / "first")] == [0, 1]


def test_building_the_tracker_writes_nothing(args, tmp_path):
    Jsonl(args)
    assert list(tmp_path.iterdir()) == []
