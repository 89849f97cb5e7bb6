"""A file imports from lower floors only, and light modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "slime_core"
FLOORS = {
    "types": 0,
    "hookspecs": 0,
    "errors": 0,
    "hostile": 0,
    "flag_types": 0,
    "multi_turn": 0,
    "extra_keys": 0,
    "bound": 1,
    "plugins": 1,
    "options": 1,
    "engines": 2,
    "tracking": 2,
    "algorithms": 2,
    "rollout": 3,
    "training": 3,
    "weights": 3,
    "cluster": 4,
    "score": 5,
    "contract": 5,
    "scaffold": 5,
    "cli": 5,
    "train": 5,
    "engine_work": 5,
    "schedule": 5,
    "saving": 5,
}
APART = {"rollout": {"training", "weights"}, "training": {"rollout", "weights"}, "engines": {"tracking", "algorithms"}}
"""Neighbours on a floor that do not import each other."""
DEFAULTS_MAY = 3
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in FLOORS)


def imported_parts(path: Path) -> set[str]:
    """First names below slime_core that a file imports, `if TYPE_CHECKING` included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "slime_core":
            parts = node.module.split(".")[1:] or [alias.name for alias in node.names]
            names.add(parts[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("slime_core.")}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_from_lower_floors_only(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    floor = DEFAULTS_MAY if part == "defaults" else FLOORS.get(part)
    if floor is None:
        pytest.skip("for plugin authors, on no floor")
    for name in imported_parts(path) - {part}:
        assert name != "defaults", f"{path} imports a built-in plugin; entry points load those"
        if name in FLOORS:
            assert FLOORS[name] <= floor, f"{path} (floor {floor}) imports {name} (floor {FLOORS[name]})"
            assert name not in APART.get(part, set()), f"{path} imports its neighbour {name}"


def test_every_part_has_a_floor():
    parts = {
        p.stem
        for p in ROOT.iterdir()
        if (p.is_dir() or p.suffix == ".py") and p.stem not in ("__init__", "__pycache__")
    }
    assert parts - set(FLOORS) == {"defaults", "testing", "pytest_plugin"}


@pytest.mark.parametrize(
    "statement", ["import slime_core", "import slime_core.cli, slime_core.options, slime_core.plugins"]
)
def test_importing_the_core_loads_neither_torch_nor_ray(statement):
    code = f"{statement}; import sys; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_files_are_short_and_named_for_what_they_do():
    too_long = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if len(p.read_text().splitlines()) > 400}
    assert too_long <= {"options.py"}
    vague = {"utils", "misc", "base", "common", "hub", "helpers"}
    assert not [p for p in ROOT.rglob("*.py") if p.stem in vague]
