"""The real embedded engine behind the gateway, and whole runs of `slime train` with an agent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slime_core import Sample
from slime_core.engines.client import EngineClient, SampleEngine
from slime_core.engines.requests import Requests
from slime_core.testing import make_options
from slime_gateway.plugin import Gateway

AGENT = """
from openai import AsyncOpenAI

async def agent(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = task.messages
    for turn in range(3):
        stream = await client.chat.completions.create(model="m", messages=messages, max_tokens=8, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    return sum(character.isupper() for character in text) / 10
"""


@pytest.fixture(scope="module")
def model_dir(tokenizer, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine_url(model_dir, tmp_path_factory):
    port_file = tmp_path_factory.mktemp("engine") / "port"
    command = [sys.executable, "-m", "slime_core.engines.embedded", "--model-path", str(model_dir)]
    with subprocess.Popen([*command, "--port", "0", "--port-file", str(port_file)]) as engine:
        try:
            deadline = time.monotonic() + 120
            while not port_file.exists() and engine.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        finally:
            engine.terminate()


@pytest.fixture
def agent_file(tmp_path) -> Path:
    path = tmp_path / "agent_under_test.py"
    path.write_text(AGENT)
    return path


def logprobs_of(model_dir: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [len(tokens)]: what transformers says of each token behind those before it; the first is NaN."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[np.nan], chosen.numpy()])


async def test_agents_on_the_embedded_engine_are_recorded_token_by_token(engine_url, model_dir, agent_file, tokenizer):
    args = make_options("--model", str(model_dir), "--generate", "gateway", "--gateway-agent", str(agent_file))
    plugin = Gateway(args)
    client = EngineClient(engine_url, tokenizer=tokenizer, concurrency=64, timeout_s=60, context_tokens=1024)
    prompts = [Sample(prompt=f"task {i}", index=i, group_index=i, rollout_index=i) for i in range(6)]
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 512, "stop": []}
    async with client:
        parts = await asyncio.gather(
            *(
                plugin.generate(
                    args=args,
                    engine=SampleEngine(client, Requests(), 1, prompt),
                    sample=prompt,
                    sampling_params=params,
                    evaluation=False,
                )
                for prompt in prompts
            )
        )
        plugin.close()
    samples = [sample for part in parts for sample in part]
    assert sum(sample.metadata["round_number"] for sample in samples) == 18
    for sample in samples:
        own = sample.loss_mask > 0
        recorded = sample.logprobs[own]
        expected = logprobs_of(model_dir, sample.tokens)[sample.prompt_length :][own]
        np.testing.assert_allclose(recorded, expected, atol=2e-4)
        assert np.isnan(sample.logprobs[~own]).all()
    assert len({tuple(sample.tokens.tolist()) for sample in samples}) == len(samples)


@pytest.fixture
def run_slime(tmp_path, model_dir, agent_file):
    """`run_slime("--num-rollout", "3")`: a run with the agent, which does not outlive the test."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}", "label": str(i)}) + "\n" for i in range(20)))
    runs = []

    def start(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "slime_core.cli", "train"]
        command += ["--model", str(model_dir), "--prompt-data", str(prompts)]
        command += ["--generate", "gateway", "--gateway-agent", agent_file.name, "--apply-chat-template"]
        command += ["--rollout-batch-size", "3", "--n-samples-per-prompt", "2", "--max-response-tokens", "200"]
        command += ["--partial-rollout", "--max-staleness", "1", "--over-sampling-batch-size", "5"]
        command += ["--num-rollout", "3", "--run-name", "run", "--lr", "1e-3", *words]
        with (tmp_path / "output.log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            runs.append(
                subprocess.Popen(
                    command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            )
        return runs[-1]

    yield start
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def rows(directory: Path) -> list[dict]:
    path = directory / "runs" / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    return [row for row in found if "train/loss" in row]


def agent_processes(agent_file: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(agent_file) in (p.info["cmdline"] or [])]


def test_a_run_trains_an_agent_and_its_tokens_are_those_the_trainer_sees(tmp_path, run_slime, agent_file):
    code = run_slime("--save-samples").wait(600)
    assert code == 0, (tmp_path / "output.log").read_text()
    trained = rows(tmp_path)
    assert [row["step"] for row in trained] == [0, 1, 2]
    assert trained[0]["train/logprob_abs_diff"] < 1e-4
    assert all(row["data/drawn"] == row["data/trained"] + row["data/dropped"] + row["data/waiting"] for row in trained)
    assert all("reward/gateway/mean" in row for row in trained)
    assert not agent_processes(agent_file)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_run_leaves_no_agent_behind_and_resumes(tmp_path, run_slime, agent_file):
    run = run_slime("--num-rollout", "1000", "--save-interval", "1")
    deadline = time.monotonic() + 600
    while len(rows(tmp_path)) < 3:
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output.log").read_text()
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while left := agent_processes(agent_file):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    last = len(rows(tmp_path)) + 2
    again = run_slime("--resume", "run", "--num-rollout", str(last), "--save-interval", "1")
    assert again.wait(600) == 0, (tmp_path / "output.log").read_text()
    assert [row["step"] for row in rows(tmp_path)][-1] == last - 1
