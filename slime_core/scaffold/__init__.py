"""`slime new-plugin NAME --hook HOOK`: a package with one plugin, its tests, and all that publishing needs."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib import resources
from pathlib import Path

from slime_core import __version__
from slime_core.errors import OptionError
from slime_core.options import HOOK_FLAGS
from slime_core.plugins import installed

ASYNC = ("reward",)
"""Hooks of either colour that have an example as `async def` too."""


def run_new_plugin(args: argparse.Namespace) -> int:
    """Write the package and say what to do with it."""
    directory = new_plugin(args.name, args.hook, Path(args.directory), use_async=args.use_async)
    name = directory.name.removeprefix("slime-").replace("-", "_")
    print(f"made {directory}:")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(directory)}")
    print(f"next:\n  pip install -e {directory}\n  pytest {directory}\n  slime plugins check {name}")
    print(f"  slime train {HOOK_FLAGS[args.hook]} {name} ...")
    return 0


def new_plugin(name: str, hook: str, parent: Path, use_async: bool = False) -> Path:
    """Write `parent/slime-<name>`, a package whose entry point `name` implements the hook.

    Raises:
        OptionError: when there is no such hook, or the name cannot be one or is taken.
    """
    name = _plain_name(name)
    # named as the package on an index: called as its module, the folder would hide it from Python started beside it
    directory = parent / f"slime-{name.replace('_', '-')}"
    if directory.exists():
        raise OptionError(f"{directory} exists already; choose another name, or another place with --directory.")
    if taken := next((found for found in installed() if found.name == name), None):
        raise OptionError(f"a plugin '{name}' is installed already, from {taken.package}; choose another name.")
    if use_async and hook not in ASYNC:
        raise OptionError(f"--async is for {', '.join(ASYNC)}; the other examples have the one colour that fits them.")
    example = f"async_{hook}" if use_async else hook
    code = _template(f"{example}/plugin.py.txt")
    words = {
        "NAME": name,
        "DASHED": name.replace("_", "-"),
        "HOOK": hook,
        "FLAG": HOOK_FLAGS[hook],
        "CLASS": ":Plugin" if "class Plugin:" in code else "",
        "SUMMARY": code.partition("`: ")[2].partition('."""')[0],
        "CORE_VERSION": ".".join(__version__.split(".")[:2]),
    }
    files = {
        "pyproject.toml": _template("package/pyproject.toml.txt"),
        "README.md": _template("package/README.md.txt"),
        ".gitignore": _template("package/gitignore.txt"),
        f"slime_{name}/__init__.py": code,
        f"slime_{name}/py.typed": "",
        f"tests/test_{name}.py": _template(f"{example}/test.py.txt"),
    }
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r"@([A-Z_]+)@", lambda match: words[match[1]], text))
    return directory


def _template(path: str) -> str:
    return (resources.files("slime_core") / "scaffold" / "templates" / path).read_text(encoding="utf-8")


def _plain_name(name: str) -> str:
    plain = name.strip().lower().replace("-", "_").removeprefix("slime_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plain) or keyword.iskeyword(plain):
        raise OptionError(f"'{name}' cannot be a plugin's name; use letters, digits and dashes, a letter first.")
    return plain
