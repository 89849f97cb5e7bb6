"""The pytest plugin: a test for every plugin named in a flag or in the configuration."""

import subprocess
import sys

GOOD = "from slime_core import hookimpl\n@hookimpl\ndef reward(sample): return 1.0\n"
BAD = (
    "from slime_core import hookimpl\n@hookimpl\ndef reward(sample): return float(sample.response.split()[0] == '4')\n"
)


def run(tmp_path, *words):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_flag_adds_a_test_that_tells_every_finding(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    done = run(tmp_path, "--slime-check", "./good.py", "--slime-check", "./bad.py --reward-timeout-s 5")
    assert "1 failed, 1 passed" in done.stdout
    assert "PROBLEM survives hostile samples" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_configuration_adds_a_test_that_can_be_deselected(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "pytest.ini").write_text("[pytest]\nslime_check = ./good.py\n")
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    assert "2 passed" in run(tmp_path).stdout
    assert "1 passed, 1 deselected" in run(tmp_path, "-k", "own").stdout


def test_without_either_nothing_of_slime_is_loaded(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import sys\ndef test_own(): assert not {'slime_core.options', 'torch', 'configargparse'} & set(sys.modules)\n"
    )
    assert "1 passed" in run(tmp_path).stdout
