"""Files that carry weights: whole, verified by the engine, and gone when nobody needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime_core.engines.admin import EngineAdmin
from slime_core.engines.checksum import model_checksums
from slime_core.errors import EngineError, WeightSyncError
from slime_core.weights.disk import DiskTransport
from slime_core.weights.leftovers import PREFIX, own_prefix, remove_stale
from slime_core.weights.safetensors_file import SafetensorsFile
from slime_core.weights.source import Update
from weights.conftest import Exporter, greedy, used_checksums


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop("model.norm.weight")
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("damage", [flip_a_byte, cut, drop_a_tensor, Path.unlink])
async def test_damaged_files_are_refused_and_the_old_weights_stay(
    models: list[Path], url: str, tmp_path: Path, damage: Callable[[Path], None]
):
    before, used = await greedy(url), await used_checksums(url)
    tensors = dict(Exporter(models[1]).weights("float32"))
    update = Update(40, tensors.items, model_checksums(tensors))
    transport = DiskTransport(str(tmp_path), tmp_path)
    async with EngineAdmin([url], 30) as admin:
        with pytest.raises(EngineError, match="HTTP 400"):
            async with transport.offer(admin, update) as deliver:
                damage(next(tmp_path.rglob("model.safetensors")))
                await deliver()
    assert await used_checksums(url) == used
    assert await greedy(url) == before
    transport.close()
    assert not list(tmp_path.iterdir())


async def test_what_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / f"{own_prefix()}{os.getpid()}").write_text("in the way")
    transport = DiskTransport(str(tmp_path), tmp_path)
    async with EngineAdmin([], 30) as admin:
        with pytest.raises(WeightSyncError, match=r"version 3 cannot be written .*--weights-dir"):
            async with transport.offer(admin, Update(3, lambda: [], {})):
                pass


def test_a_file_is_rewritten_in_place_and_is_what_safetensors_reads(tmp_path: Path):
    file = SafetensorsFile(tmp_path / "model.safetensors")
    for number in range(3):
        tensors = {
            "a": torch.full((3, 5), float(number)),
            "b": torch.arange(7, dtype=torch.bfloat16) + number,
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(number),
        }
        tensors |= {"more": torch.ones(1000)} if number == 2 else {}
        file.write(list(tensors.items()), {"format": "pt", "number": str(number)})
        read = load_file(tmp_path / "model.safetensors")
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        with safe_open(tmp_path / "model.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "number": str(number)}


async def test_elsewhere_a_version_stays_until_the_next_one(tmp_path: Path):
    """SGLang answers when its first pipeline stage has read it; the others come after."""
    transport = DiskTransport(str(tmp_path), tmp_path)
    found = []
    async with EngineAdmin([], 30) as admin:
        for version in range(2):
            async with transport.offer(admin, Update(version, lambda: [("a", torch.ones(3))], {})):
                pass
            found.append([path.parent.name for path in tmp_path.rglob("model.safetensors")])
    assert found == [["v000000"], ["v000001"]]
    transport.close()
    assert not list(tmp_path.iterdir())


async def test_in_shared_memory_one_file_stays_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slime_core.weights.disk.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    transport = DiskTransport(None, tmp_path / "fallback")
    found = []
    async with EngineAdmin([], 30) as admin:
        for version in range(2):
            async with transport.offer(admin, Update(version, lambda: [("a", torch.ones(3))], {})):
                found.append(next((tmp_path / "shm").rglob("model.safetensors")).stat().st_ino)
    assert found[0] == found[1]
    transport.close()
    assert not list((tmp_path / "shm").iterdir())


def test_leftovers_of_killed_trainers_are_removed_and_those_of_living_ones_kept(tmp_path: Path):
    names = (f"{own_prefix()}999999999", f"{own_prefix()}{os.getpid()}", f"{PREFIX}elsewhere-1-999999999", "mine")
    dead, *kept = (tmp_path / name for name in names)
    for directory in (dead, *kept):
        directory.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        (unasked := tmp_path / f"{own_prefix()}{ended.pid}").mkdir()
        remove_stale(tmp_path)
    assert not unasked.exists(), "its exit code is all that is left of it"
    assert not dead.exists() and all(directory.exists() for directory in kept), "another machine's are its own"


def test_shared_memory_is_the_default_and_another_directory_the_fallback(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("slime_core.weights.disk.SHARED_MEMORY", tmp_path / "none")
    DiskTransport(None, tmp_path / "fallback")
    assert (tmp_path / "fallback").is_dir()
