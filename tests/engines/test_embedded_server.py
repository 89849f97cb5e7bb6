"""What only the embedded engine's server promises: its command line, its refusals, and its place behind the router."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines.conftest import ServerUnderTest
from slime_core.engines.checksum import model_checksums
from slime_core.engines.client import EngineClient
from slime_core.engines.process import free_port
from tiny_model import byte_tokenizer
from waiting import wait_until

Server = Any
PROMPT = [10, 50, 60, 70]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime_core.engines.embedded", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_busy_port_is_one_line_and_exit_code_2(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command("--model-path", str(model_dir), "--port", str(port))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: cannot bind 127.0.0.1:{port}") and result.stderr.count("\n") == 1


def test_a_directory_that_is_no_model_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = run_command("--model-path", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path} is not a model directory: it has no config.json\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_announces_its_port_and_stops_while_busy(
    start_server: Callable[..., Any], model_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    port_file = tmp_path / "port"
    process = start_server(model_dir, port_file)
    port = int(port_file.read_text())
    assert json.loads(process.stdout.readline()) == {"port": port}
    server = ServerUnderTest(f"http://127.0.0.1:{port}", "", "", 0, 0)
    with socket.create_connection(("127.0.0.1", port)) as client:
        body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}})
        client.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(server.num_running)
        server.post("/pause_generation", {"mode": "in_place"})  # it would never end by itself
        assert not server.idle()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    assert stderr == ""


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": [PROMPT, PROMPT], "stream": True}, "stream"),
        ({"input_ids": PROMPT, "sampling_params": {"n": 2}, "stream": True}, "stream"),
        ({"input_ids": PROMPT, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"input_ids": PROMPT, "image_data": ["data:image/png;base64,AA"]}, "image_data"),
        ({"input_ids": PROMPT, "sampling_params": {"regex": "a+"}}, "regex"),
        ({"input_ids": PROMPT, "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [5000]}}, "stop_token_ids"),
        ({"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": PROMPT, "rid": ["a", "b"]}, "rid"),
        ([], "object"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(server: Server, body: Any, named: str) -> None:
    status, answer = server.post("/generate", body)
    assert status == 400
    assert named in answer["error"]["message"]


def test_a_body_that_is_not_json_is_refused(server: Server) -> None:
    async def send() -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.post(f"{server.url}/generate", data="{") as response:
            return response.status, await response.text()

    status, text = asyncio.run(send())
    assert status == 400
    assert "not JSON" in text


def test_says_what_it_is_and_can_do(server: Server) -> None:
    info = server.get("/server_info")[1]
    assert info["engine"] == "slime-embedded"
    assert (info["dtype"], info["context_length"], info["max_running_requests"]) == ("float32", 2048, 256)
    assert info["capabilities"]["update_weights_from_distributed"] is True
    assert info["capabilities"]["update_weights_from_tensor"] is False


def test_refuses_pickled_tensors(server: Server) -> None:
    status, answer = server.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]})
    assert (status, answer["success"]) == (400, False)
    assert "unpickle" in answer["message"]


GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}


@pytest.mark.parametrize(
    ("change", "named"), [({"backend": "nccl"}, "use gloo"), ({"master_port": "1"}, "master_port must be of type int")]
)
def test_a_group_that_cannot_be_joined_is_refused(server: Server, change: dict[str, object], named: str) -> None:
    status, answer = server.post("/init_weights_update_group", GROUP | change)
    assert status == 400
    assert named in str(answer)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group_name": "none"}, "Group none is unknown"),
        ({"names": "ab"}, "lists of strings"),
        ({"names": []}, "of the same length"),
        ({"shapes": [[-1]]}, "lists of sizes"),
        ({"load_format": "delta"}, "delta"),
    ],
)
def test_a_part_that_is_not_understood_is_refused(server: Server, change: dict[str, object], named: str) -> None:
    server.post("/begin_weight_update", {})
    part = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
    status, answer = server.post("/update_weights_from_distributed", part | change)
    assert status == 400
    assert named in str(answer)
    assert server.post("/end_weight_update", {})[0] == 200


def test_checksums_equal_those_of_the_source_model(server: Server, model_dir: Path) -> None:
    answer = server.post("/weights_checker", {"action": "checksum"})[1]
    source = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert answer["ranks"][0]["checksums"] == model_checksums(source)
    assert answer["ranks"][0]["checksums"].keys() == load_file(model_dir / "model.safetensors").keys()


def test_a_corrupted_update_is_a_400_and_changes_nothing(server: Server, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes()[:-10])
    before = server.post("/weights_checker", {"action": "checksum"})
    status, answer = server.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "bad"})
    assert (status, answer["success"]) == (400, False)
    assert "cannot be read" in answer["message"]
    assert server.post("/weights_checker", {"action": "checksum"}) == before
    assert server.get("/get_weight_version")[1]["weight_version"] != "bad"


def test_seeds_reproduce(server: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 30, "sampling_seed": 7, "ignore_eos": True}}
    assert server.generate(**body)["output_ids"] == server.generate(**body)["output_ids"]


def test_text_in_logprobs(server: Server) -> None:
    params = {"max_new_tokens": 1, "temperature": 0}
    answer = server.generate(
        text="hi", sampling_params=params, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True
    )
    assert [text for _, _, text in answer["meta_info"]["input_token_logprobs"]] == ["h", "i"]


async def _hammer(url: str, clients: int) -> list[Any]:
    """Clients that generate, abort each other and hang up at random; returns the answers of those that stayed."""
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(seed: int) -> Any:
            own = random.Random(seed)
            params = {
                "max_new_tokens": own.randrange(1, 80),
                "temperature": own.choice([0, 0.8, 1]),
                "ignore_eos": True,
            }
            ids = [own.randrange(256) for _ in range(own.randrange(1, 40))]
            body = {"input_ids": ids, "sampling_params": params, "rid": f"hammer{seed}", "return_logprob": True}
            request = session.post(f"{url}/generate", json=body)
            if own.random() < 0.2:
                try:
                    return await asyncio.wait_for(request, timeout=own.random() * 0.1)
                except TimeoutError:
                    return None
            if own.random() < 0.3:
                await session.post(f"{url}/abort_request", json={"rid": f"hammer{own.randrange(clients)}"})
            async with request as response:
                assert response.status == 200
                return await response.json()

        return await asyncio.gather(*[client(seed) for seed in range(clients)])


def test_hammer_with_aborts_and_disconnects_leaves_nothing_behind(server: Server) -> None:
    answers = [answer for answer in asyncio.run(_hammer(server.url, 300)) if isinstance(answer, dict)]
    assert len(answers) > 200
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] in ("length", "abort")
        assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    wait_until(server.idle)
    load = server.get("/v1/loads")[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)


@pytest.fixture
def router_url(server: Server) -> Iterator[str]:
    """The real sglang-router before the server."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", server.url, "--host", "127.0.0.1"]
    command += ["--port", str(ports[0]), "--prometheus-port", str(ports[1])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    router = type(server)(f"http://127.0.0.1:{ports[0]}", "", "", 0, 0)

    def ready() -> bool:
        try:
            return bool(router.get("/readiness")[0] == 200)
        except OSError:
            return False

    wait_until(ready)
    yield router.url
    process.terminate()
    process.wait(timeout=120)


def test_serves_behind_the_real_router(server: Server, router_url: str) -> None:
    router = type(server)(router_url, server.model_dir, "", 0, 0)
    workers = router.get("/workers")[1]["workers"]
    assert [(worker["url"], worker["is_healthy"]) for worker in workers] == [(server.url, True)]
    params = {"max_new_tokens": 8, "temperature": 0}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    direct, routed = server.generate(**body), router.generate(**body)
    assert routed["output_ids"] == direct["output_ids"]
    assert routed["meta_info"].keys() == direct["meta_info"].keys()
    status, answer = router.post("/generate", {"input_ids": [9999]})
    assert status == 400 and "vocabulary" in answer["error"]["message"]
    assert router.get("/get_model_info")[1]["model_type"] == "qwen3"


def test_streams_pass_the_real_router_and_end_when_nobody_hears_them(server: Server, router_url: str) -> None:
    params = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    told: list[list[int]] = []

    async def leave(client: EngineClient) -> None:
        begun = asyncio.Event()
        endless = {"max_new_tokens": 1900, "ignore_eos": True}
        task = asyncio.create_task(client.generate(PROMPT, endless, on_tokens=lambda tokens: begun.set()))
        await begun.wait()
        # paused, it never ends by itself
        await asyncio.to_thread(server.post, "/pause_generation", {"mode": "in_place"})
        assert not await asyncio.to_thread(server.idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def listen() -> None:
        async with EngineClient(
            router_url, tokenizer=byte_tokenizer(), concurrency=2, timeout_s=60, worker_urls=[server.url]
        ) as client:
            generation = await client.generate(PROMPT, params, on_tokens=told.append)
            whole = await asyncio.to_thread(server.generate, input_ids=PROMPT, sampling_params=params)
            assert generation.tokens.tolist() == told[-1] == whole["output_ids"]
            await leave(client)

    try:
        asyncio.run(listen())
        wait_until(server.idle)
        assert server.idle()
    finally:
        server.post("/continue_generation", {})
    assert len(told) > 1
    assert all(told[-1][: len(tokens)] == tokens for tokens in told)
