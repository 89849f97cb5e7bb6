"""The command line: quick to start, one sentence for a mistake."""

import resource
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())"]


def cpu_s(*words: str) -> float:
    """CPU seconds of one command, its best of three: the machine may be busy."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, *words], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


@pytest.mark.parametrize("words", [["--help"], ["new-plugin", "--help"], ["plugins", "check", "--help"]])
def test_help_takes_less_than_half_a_second_of_cpu(words):
    assert cpu_s(*words) < 0.5


def test_help_names_every_command():
    shown = subprocess.check_output([*COMMAND, "--help"], text=True)
    for command in ("train", "score", "plugins", "new-plugin", "hooks", "flags"):
        assert f"\n    {command}" in shown
