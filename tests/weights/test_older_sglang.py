"""Updates of SGLang 0.5.9, which has no sessions of updates: an engine that answers as a real one did."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from served import served
from slime_core.weights.sync import WeightSync
from weights.conftest import ConstantTrainer

CAPTURED = Path(__file__).parents[1] / "engines" / "captures" / "update_0.5.9.json"
CALLS = ["pause_generation", "flush_cache", "UPDATE", "continue_generation"]


@pytest.fixture
async def engine() -> AsyncIterator[tuple[str, list[str], list[dict]]]:
    """Its address, what it was asked to do, and the bodies of updates; 404 for what a real one did not know."""
    captured = {one["path"]: one for one in json.loads(CAPTURED.read_text())}
    asked: list[str] = []
    updates: list[dict] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate":
            prompt = (await request.json())["input_ids"]
            return web.json_response({"meta_info": {"input_token_logprobs": [[-1.0, token, None] for token in prompt]}})
        if request.path not in captured:
            return web.Response(status=404)
        if request.method == "POST":
            asked.append(request.path.removeprefix("/"))
            updates.extend([await request.json()] if "update_weights" in request.path else [])
        one = captured[request.path]
        text = one["response"] if isinstance(one["response"], str) else json.dumps(one["response"])
        return web.Response(status=one["status"], text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url:
        yield url, asked, updates


@pytest.mark.parametrize("transport", ["disk", "tensor"])
async def test_an_engine_without_update_sessions_takes_weights(engine, options, tmp_path, transport):
    url, asked, updates = engine
    args = options("--engine", "sglang", "--sglang-dtype", "float32", "--weight-transport", transport)
    sync = WeightSync(args, [url], tmp_path)
    metrics = await sync.send(ConstantTrainer(), 3)
    sync.close()
    update = {"disk": "update_weights_from_disk", "tensor": "update_weights_from_tensor"}[transport]
    assert asked == [update if call == "UPDATE" else call for call in CALLS]
    assert [body["weight_version"] for body in updates] == ["3"]
    assert metrics["weights/logprob_abs_diff"] == 0.0
