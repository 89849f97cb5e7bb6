"""docs/writing_a_plugin.md, run from top to bottom: its files are written, its commands run, its output compared."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from test_scaffold import install

PAGE = Path(__file__).parents[1] / "docs" / "writing_a_plugin.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("python -m build", "twine upload")
"""Publishing needs the network."""


def steps():
    """(what, content) of every block, in order; a file's block begins with its name."""
    for kind, body in BLOCK.findall(PAGE.read_text()):
        first, _, rest = body.partition("\n")
        if kind == "console":
            for command in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, expected = command.partition("\n")
                yield line, expected
        elif first.startswith("# "):
            yield f"file {first.removeprefix('# ')}", rest if kind == "json" else body
        else:
            yield f"part {kind}", body


def matches(expected: str, output: str) -> bool:
    """Whether the output is what the page shows; `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.", expected.strip()))
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def test_the_page_does_what_it_says(tmp_path):
    programs = {"slime": [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())"],
                "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]}  # fmt: skip
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "120"}
    num_run = 0
    for step, content in steps():
        if step.startswith("file "):
            path = tmp_path / step.removeprefix("file ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        elif step.startswith("part "):
            assert content in "".join(p.read_text() for p in tmp_path.rglob("pyproject.toml"))
        elif step.startswith("pip install -e "):
            package = tmp_path / step.removeprefix("pip install -e ")
            install(package, site)
            environment["PYTHONPATH"] = os.pathsep.join([str(site), str(package)])
        elif not step.startswith(NOT_RUN):
            program, *words = shlex.split(step)
            done = subprocess.run(
                [*programs[program], *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"$ {step}\n{done.stdout}{done.stderr}"
            assert matches(content, done.stdout), f"$ {step}\nshows:\n{content}\ngives:\n{done.stdout}"
            num_run += 1
    assert num_run >= 8
