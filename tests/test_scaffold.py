"""`slime new-plugin`: what it writes works, is typed and keeps the contract, for every hook."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slime_core.cli import main
from slime_core.errors import OptionError
from slime_core.hookspecs import HOOKS_WITH_EXAMPLES
from slime_core.options import HOOK_FLAGS
from slime_core.scaffold import ASYNC, new_plugin

KINDS = [*((hook, False) for hook in HOOKS_WITH_EXAMPLES), *((hook, True) for hook in ASYNC)]


def name_of(hook: str, use_async: bool) -> str:
    return f"my_{'async_' if use_async else ''}{hook}"


def install(package: Path, site: Path) -> None:
    """What `pip install -e` leaves: metadata with the entry points, and the package's place on the path."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text(
        "[slime]\n" + "".join(f"{n} = {t}\n" for n, t in project["entry-points"]["slime"].items())
    )


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A package for every hook, and the environment in which they are installed."""
    root = tmp_path_factory.mktemp("packages")
    made = [new_plugin(name_of(hook, use_async), hook, root, use_async) for hook, use_async in KINDS]
    for package in made:
        install(package, root / "site")
    path = os.pathsep.join([str(root / "site"), *map(str, made)])
    return made, {**os.environ, "PYTHONPATH": path}


def test_every_package_passes_its_own_tests(packages, tmp_path):
    made, environment = packages
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        *map(str, made),
    ]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    num_functions = sum(f.read_text().count("\ndef test_") for package in made for f in package.glob("tests/*.py"))
    assert int(done.stdout.splitlines()[-1].partition(" passed")[0]) >= num_functions > 2 * len(made)


def test_every_package_is_formatted_and_linted(packages):
    made, environment = packages
    common = ["--isolated", "--no-cache", "--line-length", "120", "--target-version", "py311"]
    for command in (["check", "--select", "E,F,UP,B,SIM,RUF"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, *common, *map(str, made)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_every_hook_but_the_set_up_has_an_example():
    assert set(HOOKS_WITH_EXAMPLES) == set(HOOK_FLAGS)


@pytest.mark.parametrize("name", ["", "2fast", "a b", "../x", "class"])
def test_a_name_that_cannot_be_one_is_refused(name, tmp_path):
    with pytest.raises(OptionError, match="cannot be a plugin's name"):
        new_plugin(name, "reward", tmp_path)


@pytest.mark.parametrize("name", ["my-thing", "My_Thing", "slime-my-thing"])
def test_a_name_may_be_spelt_as_package_or_plugin(name, tmp_path):
    assert new_plugin(name, "reward", tmp_path).name == "slime-my-thing"


def test_a_taken_name_or_place_is_refused(tmp_path):
    with pytest.raises(OptionError, match="'grpo' is installed already, from slime-core"):
        new_plugin("grpo", "reward", tmp_path)
    new_plugin("mine", "reward", tmp_path)
    with pytest.raises(OptionError, match="exists already"):
        new_plugin("mine", "reward", tmp_path)


def test_only_an_example_that_there_is_can_be_async(tmp_path):
    with pytest.raises(OptionError, match="--async is for reward"):
        new_plugin("mine", "dynamic_filter", tmp_path, use_async=True)


def test_the_command_says_what_to_do_next(tmp_path, capsys):
    assert main(["new-plugin", "mine", "--hook", "dynamic_filter", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"pip install -e {tmp_path}/slime-mine" in out
    assert "slime train --dynamic-filter mine ..." in out
    assert "@" not in "".join(f.read_text() for f in (tmp_path / "slime-mine").glob("*.*"))


def test_python_started_beside_the_folder_finds_the_package(tmp_path):
    package = new_plugin("my_thing", "reward", tmp_path)
    # as an editable install does, the package comes last on the path
    script = f"import sys; sys.path.append({str(package)!r}); from slime_my_thing import reward"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
