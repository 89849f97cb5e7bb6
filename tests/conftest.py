"""Fixtures for every test: installed packages made on the spot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

InstallPackage = Callable[..., Path]


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallPackage:
    """`install_package("slime-x", {"x": "mod_x"}, mod_x="source")`: as pip leaves it, until the test ends."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def install(package: str, entry_points: dict[str, str], version: str = "1.0", **modules: str) -> Path:
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in entry_points.items()]
        (info / "entry_points.txt").write_text("[slime]\n" + "\n".join(lines) + "\n")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        return site

    yield install
    for name in set(sys.modules) - before:
        module_file = getattr(sys.modules[name], "__file__", None) or ""
        if module_file.startswith(str(site)):
            del sys.modules[name]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that passes for a model where nothing loads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    return directory
