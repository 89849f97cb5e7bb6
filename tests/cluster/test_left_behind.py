"""What a run leaves on its machine: no weights in memory, and no secrets that others may read."""

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
    code, output = run.finish()
    assert code == 130, output
    run.assert_nothing_left()
    assert not weights.exists()


SEEN = """
import json
from pathlib import Path

from slime_core import hookimpl

class Seen:
    def __init__(self, args):
        self.at_start = str(vars(args))

    @hookimpl
    def log_metrics(self, args, step, metrics):
        Path("seen").write_text(self.at_start + str(vars(args)))
"""


def test_secrets_of_the_engines_reach_no_tracker_and_no_file_that_others_read(start_run, tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    words = ("--num-trainers", "0", "--num-rollout", "1", "--tracker", "jsonl", "console", "./seen.py:Seen")
    run = start_run(*words, "--engine-env", "TOKEN=s3cret=1", "OTHER=s3cret")
    code, output = run.finish()
    assert code == 0, output
    seen = (tmp_path / "seen").read_text()
    assert seen.count("['TOKEN=***', 'OTHER=***']") == 2
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    options = tmp_path / "runs" / "run" / "options.toml"
    assert holders == [options], "a resumed run needs them"
    assert options.stat().st_mode & 0o077 == 0
    code, output = start_run("--resume", "run", "--dry-run").finish()
    assert code == 0 and "TOKEN=***" in output and "s3cret" not in output, output
