"""Checkpoints of whole runs: sharded, written beside the training, killed half-way; models in the HF format."""

from __future__ import annotations

from pathlib import Path

import psutil
from transformers import AutoModelForCausalLM

from waiting import wait_until

SHARDED = ("--num-trainers", "2", "--data-parallel", "fsdp2", "--async-save", "--save-interval", "1", "--save-hf", "2")


def unfinished(run_dir: Path) -> list[Path]:
    """Checkpoints under way of which something is written already, after two that are complete."""
    found = (run_dir / "checkpoints").glob(".step_*/trainer/*.safetensors")
    return [path.parents[1] for path in found] if len(complete(run_dir)) >= 2 else []


def complete(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def test_a_sharded_run_that_is_killed_while_it_saves_resumes_from_the_last_checkpoint(start_run, read_rows, tmp_path):
    run_dir = tmp_path / "runs" / "run"
    run = start_run("--num-rollout", "1000", *SHARDED)
    driver = psutil.Process(run.process.pid)

    def stands_still_while_it_saves() -> bool:
        if unfinished(run_dir):
            driver.suspend()
            wait_until(lambda: driver.status() == psutil.STATUS_STOPPED)
            if unfinished(run_dir):
                return True
            driver.resume()  # it was quicker
        return False

    run.wait_for(stands_still_while_it_saves)
    driver.kill()
    run.process.wait()
    run.assert_nothing_left()
    left = complete(run_dir)
    assert unfinished(run_dir)
    assert (run_dir / "checkpoints" / "latest").resolve().name == left[-1]
    done = int(left[-1].removeprefix("step_"))
    again = start_run("--resume", "run", "--num-rollout", str(done + 2))
    code, output = again.finish()
    assert code == 0, output
    again.assert_nothing_left()
    trained = [row for row in read_rows() if "reward/mean" in row]
    assert [row["step"] for row in trained] == list(range(done + 2)), "every round once"
    assert [row["data/drawn"] for row in trained] == [4 * (step + 1) for step in range(done + 2)]
    assert complete(run_dir) == [f"step_{step:06d}" for step in (done + 1, done + 2)]
    assert not list((run_dir / "checkpoints").glob(".step_*"))
    assert not list((run_dir / "checkpoints").glob("*/model"))
    exported = sorted(path.name for path in (run_dir / "hf").iterdir())
    assert {"step_000002", f"step_{done + 2:06d}"} <= set(exported)
    assert AutoModelForCausalLM.from_pretrained(run_dir / "hf" / exported[-1]).num_parameters() > 0
