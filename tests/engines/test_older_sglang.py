"""What SGLang 0.5.9 answers, which a real one was asked for once: the contract as far as that version keeps it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from served import served
from slime_core.engines.admin import EngineAdmin, Refused
from slime_core.engines.client import EngineClient, parse_generation, parse_prompt_logprobs
from slime_core.errors import EngineError
from slime_core.types import Status
from tiny_model import byte_tokenizer

ANSWERS = json.loads((Path(__file__).parent / "captures" / "answers_0.5.9.json").read_text())


@asynccontextmanager
async def replaying(*names: str) -> AsyncIterator[tuple[str, list[tuple[str, str]]]]:
    """Its address, and the paths and bodies it was sent; it gives these answers one after the other."""
    asked: list[tuple[str, str]] = []
    left = [ANSWERS[name] for name in names]

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, await request.text()))
        one = left.pop(0)
        words = one["response"]
        return web.Response(status=one["status"], text=words if isinstance(words, str) else json.dumps(words))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url:
        yield url, asked


def client_of(url: str) -> EngineClient:
    return EngineClient(url, tokenizer=byte_tokenizer(), concurrency=4, timeout_s=20, worker_urls=[url])


@pytest.mark.parametrize(
    ("name", "status", "length"),
    [
        ("gen_eos", Status.COMPLETED, 1),
        ("generate_logprob_start0_top2", Status.TRUNCATED, 3),
        ("p_abort", Status.ABORTED, 85),
    ],
)
def test_a_generation_has_its_tokens_logprobs_and_end(name, status, length):
    answer = ANSWERS[name]["response"]
    generation = parse_generation(answer)
    assert generation.status is status
    assert generation.tokens.tolist() == answer["output_ids"] and len(generation.tokens) == length
    assert len(generation.logprobs) == length and (generation.logprobs <= 0).all()
    assert generation.weight_versions.tolist() == [0] * length, "it tells one version, that of the end"


def test_the_text_ends_before_a_stop_string_and_the_ids_do_not():
    answer = ANSWERS["generate_stop_str"]["response"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "909"}
    assert not answer["text"].endswith("909") and len(answer["output_ids"]) == 3


def test_a_prompt_has_log_probabilities_from_its_second_token_on():
    answer = ANSWERS["generate_logprob_start0_top2"]["response"]
    logprobs = parse_prompt_logprobs(answer)
    assert len(logprobs) == answer["meta_info"]["prompt_tokens"] - 1 and (logprobs < 0).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generate_bad_param", "temperature must be non-negative, got -1"),
        ("generate_too_long", r"The input \(5000 tokens\) is longer than the model's context length \(4096 tokens\)"),
    ],
)
async def test_a_refusal_is_passed_on_in_its_words_and_not_tried_again(name, words):
    async with replaying(name) as (url, asked), client_of(url) as client:
        with pytest.raises(EngineError, match=words):
            await client.generate([1], {})
    assert len(asked) == 1


async def test_an_abort_by_name_is_taken():
    async with replaying("abort_request_rid") as (url, asked), client_of(url) as client:
        await client._abort(url, {"rid": "x1"})
    assert asked == [("/abort_request", '{"rid":"x1"}')]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_every_pause_mode_is_taken(mode):
    names = (f"pause_generation_{mode}", "continue_generation_retract")
    async with replaying(*names) as (url, asked), EngineAdmin([url], 20) as admin:
        await admin.pause(mode)
        await admin.resume()
    assert asked == [("/pause_generation", f'{{"mode":"{mode}"}}'), ("/continue_generation", "{}")]


REFUSALS: dict[str, tuple[Callable[[EngineAdmin], object], str]] = {
    "pause_badmode": (lambda admin: admin.pause("foo"), "Input should be 'abort', 'retract' or 'in_place'"),
    "flush_cache_busy": (lambda admin: admin.flush_cache(), "the operation will not be performed"),
    "update_weights_from_disk_missing": (
        lambda admin: admin.update_weights_from_disk("/models/nope", 3),
        "Failed to get weights iterator",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_what_it_refuses_is_an_error_with_its_words(name):
    act, words = REFUSALS[name]
    async with replaying(name) as (url, _), EngineAdmin([url], 20) as admin:
        with pytest.raises(Refused, match=words) as caught:
            await act(admin)
    assert caught.value.status == 400


async def test_an_idle_cache_is_flushed():
    async with replaying("flush_cache_idle") as (url, asked), EngineAdmin([url], 20) as admin:
        await admin.flush_cache()
    assert [path for path, _ in asked] == ["/flush_cache"]
