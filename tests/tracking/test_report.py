import argparse
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError, OptionError
from slime_core.tracking.chart import collect, smooth
from slime_core.tracking.report import create_run_dir, draw_chart, read_metrics, run_dir, truncate_metrics


def make_args(runs: Path, name: str, resume: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(runs_dir=str(runs), run_name=name, resume=resume)


def write_rows(directory: Path, *rows: dict, tail: str = "") -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_a_new_run_has_its_directory_and_latest_names_it(tmp_path):
    directory = create_run_dir(make_args(tmp_path / "runs", "first"))
    assert directory == run_dir(make_args(tmp_path / "runs", "first"))
    assert directory.is_dir()
    assert (tmp_path / "runs" / "latest").resolve() == directory


def test_latest_moves_to_the_newest_run(tmp_path):
    create_run_dir(make_args(tmp_path, "first"))
    create_run_dir(make_args(tmp_path, "second"))
    assert (tmp_path / "latest").resolve().name == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest", "second"]


def test_latest_can_always_be_followed(tmp_path):
    create_run_dir(make_args(tmp_path, "run"))
    done, broken = threading.Event(), []

    def follow() -> None:
        while not done.is_set():
            if not (tmp_path / "latest").is_dir():
                broken.append(1)

    reader = threading.Thread(target=follow)
    reader.start()
    for number in range(100):
        create_run_dir(make_args(tmp_path, f"run-{number}"))
    done.set()
    reader.join()
    assert not broken


def test_a_second_run_of_the_same_name_says_what_to_do(tmp_path):
    create_run_dir(make_args(tmp_path, "first"))
    with pytest.raises(OptionError, match=r"--resume first .* or another --run-name"):
        create_run_dir(make_args(tmp_path, "first"))


def test_resuming_takes_the_directory_there_is(tmp_path):
    directory = create_run_dir(make_args(tmp_path, "first"))
    (directory / "kept").touch()
    create_run_dir(make_args(tmp_path, "second"))
    assert create_run_dir(make_args(tmp_path, "first", resume="first")) == directory
    assert (directory / "kept").exists()
    assert (tmp_path / "latest").resolve() == directory


def test_a_directory_that_cannot_be_made_names_the_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="--runs-dir"):
        create_run_dir(make_args(tmp_path / "file", "first"))


def test_rows_come_back_in_order_without_a_cut_off_line(tmp_path):
    write_rows(tmp_path, {"step": 0, "a": 1.5}, {"step": 1, "a": None}, tail='{"step": 2, "a"')
    assert read_metrics(tmp_path) == [{"step": 0, "a": 1.5}, {"step": 1, "a": None}]


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", '{"step": 1.5}'])
def test_a_bad_line_is_named(tmp_path, line):
    write_rows(tmp_path, {"step": 0}, tail=f"{line}\n")
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)


def test_missing_metrics_name_the_tracker_that_writes_them(tmp_path):
    with pytest.raises(DataError, match="--tracker jsonl"):
        read_metrics(tmp_path)


@given(steps=st.lists(st.integers(0, 9), max_size=12), cut=st.integers(0, 10))
def test_truncating_keeps_exactly_the_earlier_rounds(tmp_path_factory, steps: list[int], cut: int):
    directory = tmp_path_factory.mktemp("run")
    rows = [{"step": step, "row": number} for number, step in enumerate(steps)]
    write_rows(directory, *rows, tail='{"step": 0, "cut')
    truncate_metrics(directory, cut)
    assert read_metrics(directory) == [row for row in rows if row["step"] < cut]
    assert [p.name for p in directory.iterdir()] == ["metrics.jsonl"]


def test_truncating_keeps_the_evaluation_of_the_weights_that_the_run_goes_on_from(tmp_path):
    evaluations = [{"step": step, "eval/heldout/mean": 0.5} for step in (0, 2, 4)]
    rounds = [{"step": step, "reward/mean": 0.5} for step in range(4)]
    write_rows(tmp_path, *rounds, *evaluations)
    truncate_metrics(tmp_path, 2)
    assert read_metrics(tmp_path) == [*rounds[:2], *evaluations[:2]]


def test_truncating_without_a_file_does_nothing(tmp_path):
    truncate_metrics(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_the_chart_is_a_png_of_the_run(tmp_path):
    rounds = [{"step": s, "reward/mean": s / 10, "rollout/response_length_mean": 20.0 + s} for s in range(10)]
    write_rows(tmp_path, *rounds, {"step": 9, "eval/heldout/mean": 0.9})
    path = draw_chart(tmp_path)
    assert path == tmp_path / "reward.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [None, [], [{"step": 0, "train/loss": 1.0}], [{"step": 0, "reward/mean": None}]])
def test_without_a_reward_there_is_no_chart(tmp_path, rows):
    if rows is not None:
        write_rows(tmp_path, *rows)
    assert draw_chart(tmp_path) is None
    assert not (tmp_path / "reward.png").exists()


def test_a_chart_of_one_round_without_lengths_is_drawn(tmp_path):
    write_rows(tmp_path, {"step": 0, "reward/mean": 0.5})
    assert draw_chart(tmp_path) is not None


def test_curves_are_collected_by_name():
    curves = collect(
        [
            {"step": 0, "eval/a/mean": 0.1, "eval/a/pass@1": 0.2, "eval/b/c/mean": 0.3},
            {"step": 0, "reward/mean": 0.4, "reward/math/mean": 0.5, "rollout/response_length_mean": 6.0},
            {"step": 1, "reward/mean": None, "eval/a/mean": 0.7},
        ]
    )
    assert curves.reward == [(0, 0.4)]
    assert curves.length == [(0, 6.0)]
    assert curves.evals == {"a": [(0, 0.1), (1, 0.7)], "b/c": [(0, 0.3)]}


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=80))
def test_smoothing_keeps_length_ends_and_range(values: list[float]):
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert (smoothed[0], smoothed[-1]) == (values[0], values[-1])
    assert min(values) - 1e-9 <= min(smoothed) <= max(smoothed) <= max(values) + 1e-9


def test_smoothing_leaves_a_straight_line():
    assert smooth([float(i) for i in range(30)]) == pytest.approx(list(range(30)))
