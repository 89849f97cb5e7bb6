"""The engine in this process: its tokens and log-probabilities against transformers, and its control of requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.language_model import LanguageModel
from slime_core.engines.embedded.prefill import first_of_each, prefill_groups
from slime_core.engines.embedded.request import Output, Request, SamplingParams
from slime_core.engines.embedded.scheduler import Scheduler
from waiting import wait_until

EOS = 257


def reference_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of tokens after a prompt by one plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


def submit(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Future[Output]]:
    """Queue one request a prompt, each with its own parameters."""
    futures: list[Future[Output]] = [Future() for _ in prompts]
    engine.submit(
        [
            engine.make_request(prompt, own, rid=str(index), reply=future)
            for index, (prompt, own, future) in enumerate(zip(prompts, params, futures, strict=True))
        ]
    )
    return futures


def test_logprobs_equal_a_plain_forward_with_joins_and_leaves(engine: Engine) -> None:
    """40 sequences through 16 rows: they start, end and move rows at different times."""
    prompts = prompts_of([1 + 7 * index % 60 for index in range(40)])
    params = [
        SamplingParams(max_new_tokens=1 + 5 * index % 37, temperature=[1.0, 0.7, 1.5][index % 3], ignore_eos=True)
        for index in range(40)
    ]
    outputs = [future.result() for future in submit(engine, prompts, params)]
    model = engine.language_model.model
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert len(output.output_ids) == own.max_new_tokens
        expected = reference_logprobs(model, prompt, output.output_ids, own.temperature)
        assert output.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_equals_transformers_generate(engine: Engine) -> None:
    prompts = prompts_of([1, 3, 17, 40, 41])
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=30, temperature=0.0))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = engine.language_model.model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
        assert output.output_ids == expected[0, len(prompt) :].tolist()


def test_equal_prompts_share_a_prefill_and_still_differ(engine: Engine) -> None:
    prompt = prompts_of([20])[0]
    outputs = engine.generate([prompt] * 8 + prompts_of([21]), SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert len({tuple(output.output_ids) for output in outputs}) > 4
    for output in outputs[:8]:
        expected = reference_logprobs(engine.language_model.model, prompt, output.output_ids)
        assert output.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(engine: Engine) -> None:
    prompt = prompts_of([12])[0]
    seeded = SamplingParams(max_new_tokens=20, sampling_seed=42, ignore_eos=True)
    alone = engine.generate([prompt], seeded)[0]
    crowd = prompts_of([5, 30, 12, 50, 7], seed=1)
    params = [SamplingParams(max_new_tokens=25, ignore_eos=True)] * 5 + [seeded]
    together = submit(engine, [*crowd, prompt], params)[-1].result()
    other = engine.generate([prompt], SamplingParams(max_new_tokens=20, sampling_seed=43, ignore_eos=True))[0]
    assert together.output_ids == alone.output_ids
    assert other.output_ids != alone.output_ids


def test_eos_ends_an_answer_and_ignore_eos_does_not(engine: Engine) -> None:
    prompt, bias = [5, 6, 7], {EOS: 100.0}
    ended = engine.generate([prompt], SamplingParams(max_new_tokens=9, logit_bias=bias))[0]
    assert (ended.output_ids, ended.finish_reason) == ([EOS], {"type": "stop", "matched": EOS})
    assert ended.output_logprobs == pytest.approx([0.0], abs=1e-5)
    ignored = engine.generate([prompt], SamplingParams(max_new_tokens=9, logit_bias=bias, ignore_eos=True))[0]
    assert (ignored.output_ids, ignored.finish_reason) == ([EOS] * 9, {"type": "length", "length": 9})
    delayed = engine.generate([prompt], SamplingParams(max_new_tokens=9, logit_bias=bias, min_new_tokens=4))[0]
    assert len(delayed.output_ids) == 5 and delayed.output_ids[-1] == EOS


def test_a_strong_frequency_penalty_forbids_repetition(engine: Engine) -> None:
    prompt = prompts_of([8])[0]
    bias = {token: 3.0 for token in range(10)}
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True, logit_bias=bias)
    repeated = engine.generate([prompt], params)[0]
    penalized = engine.generate(
        [prompt],
        SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True, logit_bias=bias, frequency_penalty=2.0),
    )[0]
    assert len(set(penalized.output_ids)) > len(set(repeated.output_ids))


def test_prompt_logprobs_equal_a_plain_forward(engine: Engine) -> None:
    prompts = prompts_of([2, 9, 33])
    futures: list[Future[Output]] = [Future() for _ in prompts]
    requests = [
        engine.make_request(prompt, SamplingParams(max_new_tokens=0), str(index), future, logprob_start=0)
        for index, (prompt, future) in enumerate(zip(prompts, futures, strict=True))
    ]
    engine.submit(requests)
    for request, future in zip(requests, futures, strict=True):
        output = future.result()
        assert (output.output_ids, output.finish_reason) == ([], {"type": "length", "length": 0})
        expected = reference_logprobs(engine.language_model.model, request.prompt[:1], request.prompt[1:])
        assert request.prompt_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_prompt_longer_than_a_prefill_chunk(language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.engines.embedded.scheduler.PREFILL_NUMBERS", 4000)
    engine = Engine(language_model)
    engine.start()
    prompts = prompts_of([150, 151, 90])
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=5, ignore_eos=True))
    engine.stop()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_logprobs(language_model.model, prompt, output.output_ids)
        assert output.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_memory_bounds_how_many_run_together(language_model: LanguageModel) -> None:
    scheduler = Scheduler(language_model, max_rows=16, max_kv_bytes=2 * 60 * language_model.kv_token_bytes)
    scheduler.waiting.extend(make_request(prompt, limit=50) for prompt in prompts_of([10] * 6))
    together = []
    while scheduler.has_work():
        scheduler.step()
        together.append(len(scheduler.batch))
    assert max(together) == 2
    assert [len(output.output_ids) for _, output in scheduler.take_finished()] == [50] * 6


def test_abort_returns_what_was_generated(engine: Engine) -> None:
    futures = submit(engine, prompts_of([5, 6]), [SamplingParams(max_new_tokens=2000, ignore_eos=True)] * 2)
    wait_until(lambda: engine.load().result().running_tokens > 30)
    engine.abort(rid="0")
    aborted = futures[0].result()
    assert aborted.finish_reason["type"] == "abort"
    assert 0 < len(aborted.output_ids) == len(aborted.output_logprobs) < 2000
    assert not futures[1].done()
    engine.abort()
    assert futures[1].result().finish_reason["type"] == "abort"


def test_requests_wait_while_paused_and_can_be_aborted_there(engine: Engine) -> None:
    engine.pause("in_place").result()
    waiting, aborted = submit(engine, prompts_of([5, 6]), [SamplingParams(max_new_tokens=4, ignore_eos=True)] * 2)
    engine.abort(rid="1").result()
    assert (aborted.result().output_ids, aborted.result().finish_reason["type"]) == ([], "abort")
    assert engine.load().result().waiting == 1
    engine.resume().result()
    assert len(waiting.result().output_ids) == 4


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_weights_change_in_the_middle_of_an_answer(engine: Engine, other_model_dir: Path, mode: str) -> None:
    """After a retraction the later log-probabilities are the new model's own; in place, old keys and values stay."""
    prompts = prompts_of([6, 20, 9])
    params = [SamplingParams(max_new_tokens=1500, ignore_eos=True)] * 3
    futures = submit(engine, prompts, params)
    wait_until(lambda: engine.load().result().running_tokens > 100)
    engine.pause(mode).result()
    engine.update_weights(str(other_model_dir), "new").result()
    engine.resume().result()
    new_model = AutoModelForCausalLM.from_pretrained(other_model_dir)
    for prompt, future in zip(prompts, futures, strict=True):
        output = future.result()
        (old, start, change), (new, middle, end) = output.versions
        assert (old, start, middle, new, end) == ("default", 0, change, "new", 1500)
        expected = reference_logprobs(new_model, prompt, output.output_ids)[change:]
        differences = [abs(a - b) for a, b in zip(output.output_logprobs[change:], expected, strict=True)]
        # the first token after an in-place change already comes from mixed keys and values
        assert max(differences) < 1e-4 if mode == "retract" else max(differences) > 1e-4


def test_an_update_waits_for_running_requests_and_holds_new_ones_back(engine: Engine, other_model_dir: Path) -> None:
    running = submit(engine, prompts_of([5]), [SamplingParams(max_new_tokens=1500, ignore_eos=True)])[0]
    wait_until(lambda: engine.load().result().running == 1)
    update = engine.update_weights(str(other_model_dir), "new")
    later = submit(engine, prompts_of([5]), [SamplingParams(max_new_tokens=5, ignore_eos=True)])[0]
    update.result()
    assert running.done()
    assert running.result().versions == [("default", 0, 1500)]
    assert later.result().versions == [("new", 0, 5)]


def test_a_model_of_nan_answers_with_an_error(language_model: LanguageModel) -> None:
    language_model.model.model.norm.weight.fill_(float("nan"))
    engine = Engine(language_model)
    engine.start()
    output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))[0]
    engine.stop()
    assert output.finish_reason["type"] == "abort"
    assert output.finish_reason["status_code"] == 500
    assert "not finite" in output.finish_reason["message"]


def test_a_forward_that_breaks_answers_everybody_and_shows_in_the_health(language_model: LanguageModel) -> None:
    language_model.model.model.norm.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    engine = Engine(language_model, max_rows=4)
    engine.start()
    outputs = engine.generate(prompts_of([3, 90, 5, 6, 7, 8]), SamplingParams(max_new_tokens=4))
    engine.stop()
    assert {output.finish_reason["status_code"] for output in outputs} == {500}
    assert engine.failure is not None and "RuntimeError" in engine.failure


def test_hammer_of_threads_and_aborts_leaves_nothing_behind(engine: Engine) -> None:
    generator = random.Random(1)
    results: list[Output] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        own = random.Random(seed)
        for turn in range(12):
            prompt = [own.randrange(256) for _ in range(own.randrange(1, 30))]
            future: Future[Output] = Future()
            params = SamplingParams(max_new_tokens=own.randrange(0, 60), temperature=own.choice([0.0, 1.0]))
            request = engine.make_request(prompt, params, f"{seed}-{turn}", future)
            engine.submit([request])
            if own.random() < 0.4:
                engine.abort(rid=request.rid)
            with lock:
                results.append(future.result(timeout=60))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        engine.pause(generator.choice(["in_place", "retract"])).result()
        engine.resume().result()
    for thread in threads:
        thread.join()
    assert len(results) == 24 * 12
    assert all(len(output.output_ids) == len(output.output_logprobs) for output in results)
    load = engine.load().result()
    assert (load.running, load.waiting, load.running_tokens) == (0, 0, 0)
    assert engine.failure is None
    assert engine.flush_cache().result() is True


def make_request(prompt: list[int], limit: int = 10, logprob_start: int | None = None) -> Request:
    return Request("", prompt, SamplingParams(ignore_eos=True), limit, 0, logprob_start=logprob_start)


def test_prefill_groups_hold_similar_lengths_of_one_kind() -> None:
    requests = [make_request([0] * length) for length in (5, 500, 8, 510, 6)]
    requests += [make_request([0] * 6, logprob_start=0), make_request([0] * 6, limit=0, logprob_start=0)]
    groups = [[len(request.prompt) for request in group] for group in prefill_groups(requests)]
    assert groups == [[5, 6, 8], [500, 510], [6], [6]]


def test_doubles_come_after_the_first_of_their_kind() -> None:
    group = [make_request(prompt) for prompt in ([1], [2], [1], [1], [3], [2])]
    ordered, sources = first_of_each(group)
    assert [request.prompt for request in ordered] == [[1], [2], [3], [1], [1], [2]]
    assert sources.tolist() == [0, 1, 2, 0, 0, 1]
