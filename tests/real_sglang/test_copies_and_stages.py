"""Engines of two data-parallel copies and of two pipeline stages on real SGLang: both halves follow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import psutil
import pytest

from cluster.conftest import prompts, read_rows, start_run  # noqa: F401
from cluster.test_faults import rounds
from real_sglang.conftest import ENVIRONMENT, sglang_words
from slime_core.engines.admin import EngineAdmin
from slime_core.engines.client import EngineClient
from slime_core.engines.requests import Requests
from slime_core.engines.server import EngineServer
from slime_core.errors import WeightSyncError
from slime_core.options import parse
from slime_core.types import Generation
from slime_core.weights.disk import DiskTransport
from slime_core.weights.source import Update
from slime_core.weights.sync import WeightSync
from tiny_model import byte_tokenizer
from weights.conftest import Exporter, greedy

BOUND = ["--engine-env", *ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND=0|1", "GLOO_SOCKET_IFNAME=lo"]
SECOND = {"copies": "sglang::scheduler_DP1", "stages": "sglang::scheduler_PP1"}
SIZES = {"copies": ["--sglang-dp-size", "2"], "stages": ["--sglang-pp-size", "2"]}
LENGTH = {"copies": 1500, "stages": 400}
"""Tokens of an answer that takes several seconds: two stages on a CPU make 25 a second."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]


@pytest.fixture(scope="module", params=SIZES)
def halves(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(halves, models, tmp_path_factory) -> Iterator[EngineServer]:
    args = parse([*sglang_words(models[0], *SIZES[halves]), *BOUND]).args
    server = EngineServer(args, 0, tmp_path_factory.mktemp("logs"), threads=1)
    try:
        server.url = server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def make_sync(halves, engine, models, tmp_path) -> Iterator[Callable[..., WeightSync]]:
    made: list[WeightSync] = []

    def make(*words: str) -> WeightSync:
        given = sglang_words(models[0], "--weights-dir", str(tmp_path), *words, *SIZES[halves])
        made.append(WeightSync(parse([*given, *BOUND]).args, [engine.url], tmp_path))
        return made[-1]

    yield make
    for sync in made:
        sync.close()


async def generate_long(
    url: str, length: int, started: asyncio.Event, requests: Requests | None = None
) -> list[Generation]:
    """Four answers of that many tokens; `started` is set once all have begun."""
    begun: set[int] = set()

    def on_tokens(index: int, tokens: list[int]) -> None:
        begun.add(index)
        if len(begun) == 4:
            started.set()

    params = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
    async with EngineClient(url, tokenizer=byte_tokenizer(), concurrency=4, timeout_s=60) as client:
        answers = [
            client.generate([1, 2, 3 + i], params, requests=requests, on_tokens=lambda t, i=i: on_tokens(i, t))
            for i in range(4)
        ]
        return await asyncio.gather(*answers)


async def test_weights_reach_both_halves(make_sync, halves, engine, models):
    sync, seen = make_sync("--weights-check-interval", "1"), []
    for version, model in ((1, models[1]), (2, models[0])):
        metrics = await sync.send(Exporter(model), version)
        assert metrics["weights/logprob_abs_diff"] < 1e-4
        answers = [await greedy(engine.url) for _ in range(4)]
        assert all(answer == answers[0] for answer in answers), "each copy has its turn"
        assert answers[0][1] == [version] * 8
        seen.append(answers[0][0])
    assert seen[0] != seen[1]
    async with EngineAdmin([engine.url], 60) as admin:
        assert len(await admin.prompt_logprobs([1, 2, 3])) == (2 if halves == "copies" else 1)


async def test_other_weights_than_the_trainers_are_found_out(make_sync, models):
    class Liar(Exporter):
        def prompt_logprobs(self, tokens):
            return Exporter(models[0]).prompt_logprobs(tokens)

    with pytest.raises(WeightSyncError, match="disagree on a prompt's log-probabilities"):
        await make_sync().send(Liar(models[1]), 3)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_running_requests_end_or_go_on_as_the_mode_says(mode, make_sync, halves, engine, models):
    if (halves, mode) == ("stages", "retract"):
        pytest.skip("refused before the start: SGLang takes back the requests of one stage's batch alone")
    sync, started = make_sync("--pause-mode", mode), asyncio.Event()
    await sync.send(Exporter(models[0]), 4)
    running = asyncio.create_task(generate_long(engine.url, LENGTH[halves], started))
    await started.wait()
    await sync.send(Exporter(models[1]), 5)
    for answer in await running:
        if mode == "abort":
            assert answer.finish_reason == "abort" and set(answer.weight_versions.tolist()) == {4}
        else:
            assert len(answer.tokens) == LENGTH[halves] and set(answer.weight_versions.tolist()) == {4, 5}


async def test_requests_that_are_aborted_answer_with_what_they_have(halves, engine):
    requests, started = Requests(), asyncio.Event()
    running = asyncio.create_task(generate_long(engine.url, LENGTH[halves], started, requests))
    await started.wait()
    tokenizer, urls = byte_tokenizer(), [engine.url]
    async with EngineClient(engine.url, tokenizer=tokenizer, concurrency=1, timeout_s=60, worker_urls=urls) as client:
        await client.abort(requests, timeout_s=30)
    answers = await running
    assert all(answer.finish_reason == "abort" and 0 < len(answer.tokens) < LENGTH[halves] for answer in answers)


@pytest.mark.parametrize("transport", ["broadcast", "tensor"])
async def test_weights_in_parts_are_refused(transport, make_sync, models):
    with pytest.raises(WeightSyncError, match=r"pipeline or data parallelism, .* use --weight-transport disk"):
        await make_sync("--weight-transport", transport).send(Exporter(models[1]), 6)


def title(process):
    """What a process calls itself; nothing when it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


async def test_a_file_stays_until_the_slower_half_has_read_it(halves, engine, models, tmp_path):
    """Of two stages the first answers alone, mostly while the other stands still."""
    server = psutil.Process(engine.process._process.pid)
    (slow,) = (child for child in server.children(recursive=True) if title(child).startswith(SECOND[halves]))
    tensors = dict(Exporter(models[1]).weights("float32"))
    transport = DiskTransport(str(tmp_path), tmp_path)
    async with EngineAdmin([engine.url], 60) as admin:
        await admin.pause("retract")
        await admin.flush_cache()
        async with transport.offer(admin, Update(8, tensors.items, {})) as deliver:
            slow.suspend()
            delivering = asyncio.create_task(deliver())
            await asyncio.wait([delivering], timeout=2)
            if not delivering.done():
                slow.resume()
            await delivering
        slow.resume()
        await admin.resume()
        given = await admin.prompt_logprobs([1, 2, 3, 4])
    own = Exporter(models[1]).prompt_logprobs([1, 2, 3, 4])
    assert all(values == pytest.approx(own.tolist(), abs=1e-4) for values in given.values())
    transport.close()


@pytest.mark.parametrize(("parallel", "mode"), [("copies", "retract"), ("stages", "in_place")])
def test_a_run_that_generates_while_it_trains(parallel, mode, start_run, read_rows, models):  # noqa: F811
    words = sglang_words(models[0], *SIZES[parallel], "--max-staleness", "1", "--pause-mode", mode)
    run = start_run("--num-rollout", "4", "--max-response-tokens", "64", *words, *BOUND)
    code, output = run.finish()
    assert code == 0, output
    done = rounds(read_rows())
    assert [row["step"] for row in done] == [0, 1, 2, 3]
    assert all(row["weights/logprob_abs_diff"] < 1e-4 for row in done if "weights/logprob_abs_diff" in row)
    assert sum(row["engines/restarts"] for row in done) == 0
    run.assert_nothing_left()
