"""Tiny random models, engines in this process and engine servers for the tests of the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.language_model import LanguageModel, load_language_model
from waiting import wait_until

PAD, EOS, VOCAB_SIZE, CONTEXT = 256, 257, 288, 2048


def write_model(directory: Path, seed: int) -> Path:
    """A Qwen3 of two layers with random weights, and a tokenizer of one token a byte."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=192,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,  # wide enough for tokens of clearly different probability
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return write_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture
def language_model(model_dir: Path) -> LanguageModel:
    torch.set_num_threads(1)
    return load_language_model(model_dir, torch.float32)


@pytest.fixture
def engine(language_model: LanguageModel) -> Iterator[Engine]:
    engine = Engine(language_model, max_rows=16, seed=0)
    engine.start()
    yield engine
    engine.stop()


@dataclass
class ServerUnderTest:
    """An engine server and the model it serves; calls return (status, JSON or text)."""

    url: str
    model_dir: str
    other_model_dir: str
    context_length: int
    vocab_size: int
    real: bool = False
    """Whether it is SGLang itself, where ours is stricter in two places."""
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return self._call(urllib.request.Request(self.url + path, json.dumps(body).encode(), method="POST"))

    def get(self, path: str) -> tuple[int, Any]:
        return self._call(urllib.request.Request(self.url + path))

    def later(self, path: str, body: Any) -> Future[tuple[int, Any]]:
        """Post from another thread."""
        return self.pool.submit(self.post, path, body)

    def generate(self, **body: Any) -> Any:
        """Post to /generate and expect success."""
        status, answer = self.post("/generate", body)
        assert status == 200, answer
        return answer

    def idle(self) -> bool:
        """Whether nothing runs or waits (both kinds of engine flush only then)."""
        return self.post("/flush_cache", {})[0] == 200

    def num_running(self) -> int:
        """Requests that have left the queue."""
        return sum(load["num_running_reqs"] for load in self.get("/v1/loads")[1]["loads"])

    @staticmethod
    def _call(request: urllib.request.Request) -> tuple[int, Any]:
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except json.JSONDecodeError:
            return status, text


def start_server(model_dir: Path, port_file: Path, *more: str) -> subprocess.Popen[str]:
    """Start an embedded engine server and wait until it answers."""
    command = [sys.executable, "-m", "slime_core.engines.embedded", "--model-path", str(model_dir)]
    command += ["--port-file", str(port_file), "--num-threads", "1", "--seed", "0", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: port_file.exists() or process.poll() is not None, timeout_s=120)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    return process


def stop_server(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture(name="start_server")
def start_server_fixture() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """start_server whose processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(model_dir: Path, port_file: Path, *more: str) -> subprocess.Popen[str]:
        started.append(start_server(model_dir, port_file, *more))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            stop_server(process)


@pytest.fixture(scope="session")
def server(
    model_dir: Path, other_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    """The server that the contract is checked against.

    By default an embedded engine. SLIME_CONTRACT_URL names a running server instead, for example a real SGLang; then
    SLIME_CONTRACT_MODEL and SLIME_CONTRACT_OTHER_MODEL name its model directory and one with other weights.
    """
    if url := os.environ.get("SLIME_CONTRACT_URL"):
        served, other = os.environ["SLIME_CONTRACT_MODEL"], os.environ["SLIME_CONTRACT_OTHER_MODEL"]
        config = json.loads((Path(served) / "config.json").read_text())
        yield ServerUnderTest(url, served, other, config["max_position_embeddings"], config["vocab_size"])
        return
    port_file = tmp_path_factory.mktemp("server") / "port"
    process = start_server(model_dir, port_file)
    url = f"http://127.0.0.1:{port_file.read_text().strip()}"
    yield ServerUnderTest(url, str(model_dir), str(other_model_dir), CONTEXT, VOCAB_SIZE)
    stop_server(process)
