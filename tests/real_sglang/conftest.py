"""Real SGLang on CPU, from .venv-sglang (scripts/install_sglang_cpu.sh); without it these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.conftest import CONTEXT, VOCAB_SIZE, ServerUnderTest, write_model
from slime_core.engines.server import EngineServer
from slime_core.options import Options, parse

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
SHIM = Path(__file__).with_name("shim")
ENVIRONMENT = [f"PYTHONPATH={SHIM}", "SGLANG_USE_CPU_ENGINE=1"]
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": "0.5",
    "max-total-tokens": "20000",
}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--sglang-{name}", value)] + ["--sglang-sleep-on-idle"]
"""Without the last an idle server takes a whole core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder without the environment."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not PYTHON.exists():
            item.add_marker(pytest.mark.skip(reason="no .venv-sglang; scripts/install_sglang_cpu.sh makes it"))


def sglang_words(model: Path, *words: str) -> list[str]:
    """Flags of a run on real SGLang."""
    start = ["--model", str(model), "--engine", "sglang", "--engine-python", str(PYTHON), "--engine-max-requests", "64"]
    return [*start, "--engine-env", *ENVIRONMENT, *FLAGS, *words]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights."""
    return [write_model(tmp_path_factory.mktemp(f"model_{seed}"), seed) for seed in range(2)]


@pytest.fixture(scope="session")
def args(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Options:
    weights = tmp_path_factory.mktemp("weights")
    return parse(sglang_words(models[0], "--weights-dir", str(weights), "--request-timeout-s", "60")).args


@pytest.fixture(scope="session")
def url(args: Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server."""
    server = EngineServer(args, 0, tmp_path_factory.mktemp("logs"), threads=1)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(url: str, models: list[Path]) -> ServerUnderTest:
    """What the contract of all engines is checked against."""
    return ServerUnderTest(url, str(models[0]), str(models[1]), CONTEXT, VOCAB_SIZE, real=True)
