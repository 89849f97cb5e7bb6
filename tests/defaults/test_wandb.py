import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.testing import make_options

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def args(tmp_path) -> argparse.Namespace:
    return make_options("--tracker", "wandb", "--runs-dir", str(tmp_path), "--run-name", "first", "--wandb-group", "g")


@pytest.fixture
def offline(monkeypatch, tmp_path_factory) -> None:
    """A machine where nobody ever logged in to wandb."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))


def run_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("wandb/offline-run-*/*.wandb"))


def track(args: argparse.Namespace, step: int) -> None:
    from slime_core.defaults.wandb import Wandb

    tracker = Wandb(args)
    tracker.log_metrics(step=step, metrics={"reward/mean": 0.625})
    tracker.log_metrics(step=step, metrics={"eval/heldout/mean": 0.5})
    tracker.close()


def test_without_a_key_the_run_is_kept_offline_in_its_directory(args, offline, tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    track(args, step=0)
    (file,) = run_files(tmp_path / "first")
    content = file.read_bytes()
    assert b"reward/mean" in content
    assert b"eval/heldout/mean" in content


def test_the_command_line_with_its_secrets_is_not_sent(args, offline, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    secret = "s3cret-of-an-engine"
    monkeypatch.setattr(sys, "argv", ["slime", "train", "--engine-env", f"HF_TOKEN={secret}"])
    track(args, step=0)
    written = [file for file in (tmp_path / "first").rglob("*") if file.is_file()]
    assert run_files(tmp_path / "first")[0] in written
    assert [file for file in written if secret.encode() in file.read_bytes()] == []


def test_a_resumed_run_keeps_its_id(args, offline, tmp_path):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    track(args, step=0)
    run_id = (tmp_path / "first" / "wandb_id").read_text()
    for file in run_files(tmp_path / "first"):
        file.unlink()
    track(args, step=1)
    (file,) = run_files(tmp_path / "first")
    assert file.name == f"run-{run_id}.wandb"


def test_the_key_is_written_nowhere(args, offline, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(args, step=0)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert run_files(tmp_path / "first")
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_naming_the_tracker_does_not_import_wandb():
    script = (
        "import sys; from slime_core.testing import make_options; make_options('--tracker', 'wandb'); "
        "sys.exit('wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_missing_package_says_what_to_install(args, monkeypatch):
    from slime_core.defaults.wandb import Wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PluginError, match=r"pip install 'slime-core\[wandb\]'"):
        Wandb(args)
