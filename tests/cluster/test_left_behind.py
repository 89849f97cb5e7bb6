"""What a run leaves on its machine: no weights in memory."""

from __future__ import annotations

import signal

STUCK = """
from pathlib import Path
from threading import Event

from slime_core import hookimpl

@hookimpl
def policy_loss(args, batch, logprobs, entropy):
    Path(__file__).with_name("stuck").touch()
    Event().wait()
"""


def test_a_run_interrupted_in_a_step_that_does_not_end_leaves_no_weights(start_run, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    run = start_run("--policy-loss", str(tmp_path / "stuck.py"))
    run.wait_for((tmp_path / "stuck").exists)
    [weights] = run.weights()
    run.process.send_signal(signal.SIGINT)
    code, output = run.finish(60)
    assert code == 130, output
    run.assert_nothing_left()
    assert not weights.exists()
