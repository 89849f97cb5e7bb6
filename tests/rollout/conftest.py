"""A rollout side without servers: prompts from files, generators and rewards written by the test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_core.options import Options, parse
from slime_core.rollout.manager import RolloutManager
from tiny_model import CONTEXT, byte_tokenizer

ECHO = """
from slime_core import Status, hookimpl

@hookimpl
async def generate(sample):
    text = str(sample.metadata.get("answer", "ok"))
    sample.append([ord(c) for c in text], text=text, logprobs=[-1.0] * len(text), weight_version=0)
    sample.status = Status.COMPLETED
    return [sample]
"""
"""A generator that answers with the row's metadata `answer`."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a config; no weights, as nothing here loads any."""
    directory = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT}))
    return directory


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """`write_rows([{...}, ...])` -> a JSONL file."""

    def write(rows: Iterable[dict[str, Any]], name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def plugin_file(tmp_path: Path) -> Callable[[str, str], str]:
    """`plugin_file("mine", source)` -> what a flag names."""

    def write(name: str, source: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(f"from slime_core import Drop, Group, Sample, Status, hookimpl\n{source}\n")
        return str(path)

    return write


@pytest.fixture
def make_args(model_dir: Path, tmp_path: Path) -> Callable[..., Options]:
    """Options as a command line gives them; small numbers by default."""

    def make(*words: str | Path) -> Options:
        defaults = ["--model", model_dir, "--runs-dir", tmp_path / "runs", "--n-samples-per-prompt", "2"]
        defaults += ["--rollout-batch-size", "2", "--reward-workers", "1"]
        return parse([str(word) for word in [*defaults, *words]]).args

    return make


@pytest.fixture
def open_manager() -> Callable[..., Any]:
    """`async with open_manager(args) as manager`: closed whatever happens."""

    @asynccontextmanager
    async def opened(args: Options, num_ranks: int = 1) -> AsyncIterator[RolloutManager]:
        manager = RolloutManager(args, "http://127.0.0.1:1", [], num_ranks)
        try:
            yield manager
        finally:
            await manager.close()

    return opened
