"""What any engine server that speaks SGLang's protocol must do; the `server` fixture tells how to aim it elsewhere."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from waiting import wait_until

PROMPT = [10, 50, 60, 70, 80, 90, 100]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 1.0, "max_new_tokens": 1000, "ignore_eos": True}

Server = Any


@pytest.fixture(autouse=True)
def clean(server: Server) -> Iterator[None]:
    """Leave the server unpaused, idle and with its first weights."""
    yield
    server.post("/abort_request", {"abort_all": True})
    server.post("/continue_generation", {})


def generating(server: Server, **body: Any) -> Any:
    """Start a long request on another thread and return its future once it runs."""
    future = server.later("/generate", {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True} | body)
    wait_until(lambda: future.done() or server.num_running())
    return future


def test_answer_has_text_ids_and_meta_info(server: Server) -> None:
    answer = server.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    meta = answer["meta_info"]
    assert isinstance(answer["text"], str)
    assert len(answer["output_ids"]) == 8
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (7, 8)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 8}]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob < 0 and text is None for logprob, _, text in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert isinstance(meta["id"], str) and meta["e2e_latency"] > 0


def test_without_return_logprob_none_are_sent(server: Server) -> None:
    answer = server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert "output_token_logprobs" not in answer["meta_info"]


def test_text_and_its_ids_give_the_same(server: Server) -> None:
    by_text = server.generate(text="hello", sampling_params=GREEDY)
    by_ids = server.generate(input_ids=list(b"hello"), sampling_params=GREEDY)
    if by_text["meta_info"]["prompt_tokens"] == 5:  # a byte-level tokenizer
        assert by_text["output_ids"] == by_ids["output_ids"]


def test_batch_answers_in_order_with_own_parameters_and_names(server: Server) -> None:
    params = [GREEDY, GREEDY | {"max_new_tokens": 12}]
    answers = server.generate(input_ids=[PROMPT, [20, 30, 40]], sampling_params=params, rid=["ra", "rb"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["ra", "rb"]
    assert [len(answer["output_ids"]) for answer in answers] == [8, 12]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [7, 3]


def test_n_answers_a_list_of_different_samples(server: Server) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 6, "n": 3, "ignore_eos": True}
    answers = server.generate(input_ids=PROMPT, sampling_params=params)
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


def test_max_new_tokens_defaults_to_128(server: Server) -> None:
    answer = server.generate(input_ids=PROMPT, sampling_params={"ignore_eos": True})
    assert len(answer["output_ids"]) == 128


def test_input_logprobs_start_with_null_and_carry_the_prompt(server: Server) -> None:
    answer = server.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
    triples = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in triples] == PROMPT
    assert triples[0][0] is None
    assert all(logprob < 0 for logprob, _, _ in triples[1:])


def test_input_logprobs_from_a_later_position(server: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    whole = server.generate(**body, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    tail = server.generate(**body, logprob_start_len=4)["meta_info"]["input_token_logprobs"]
    assert tail[0] == [None, PROMPT[4], None]
    assert [logprob for logprob, _, _ in tail[1:]] == pytest.approx([logprob for logprob, _, _ in whole[5:]], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": GREEDY}, "Either text, input_ids or input_embeds should be provided."),
        (
            {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
            "temperature must be a non-negative finite number, got -1.",
        ),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": PROMPT, "sampling_params": {"min_p": 2}}, "min_p"),
        ({"input_ids": PROMPT, "sampling_params": {"top_k": -5}}, "top_k"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ],
)
def test_bad_request_is_refused_with_the_parameter_named(server: Server, body: Any, message: str) -> None:
    status, answer = server.post("/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_token_outside_the_vocabulary_is_refused(server: Server) -> None:
    status, _ = server.post("/generate", {"input_ids": [1, server.vocab_size], "sampling_params": GREEDY})
    assert status == (200 if server.real else 400)  # SGLang reads whatever lies behind its table


def test_too_long_prompt_is_refused_in_sglangs_words(server: Server) -> None:
    tokens = server.context_length + 10
    status, answer = server.post("/generate", {"input_ids": [5] * tokens, "sampling_params": GREEDY})
    assert status == 400
    assert answer["error"]["message"] == (
        f"The input ({tokens} tokens) is longer than the model's context length ({server.context_length} tokens)."
    )


def test_too_long_answer_is_refused(server: Server) -> None:
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100000}})
    assert status == 400
    assert "You requested a total of 100007 tokens" in answer["error"]["message"]


def test_stop_string_is_cut_from_text_but_not_from_ids(server: Server) -> None:
    free = server.generate(text="hello", sampling_params=GREEDY)
    stop = next((char for char in free["text"] if char.isascii() and char.isprintable()), None)
    if stop is None:
        pytest.skip("this model wrote no ASCII")
    stopped = server.generate(text="hello", sampling_params=GREEDY | {"stop": stop})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert stopped["output_ids"] == free["output_ids"][: len(stopped["output_ids"])]
    kept = server.generate(text="hello", sampling_params=GREEDY | {"stop": [stop], "no_stop_trim": True})
    assert kept["text"].endswith(stop)


def test_stop_token_ends_the_answer_and_stays_in_ids(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 8}
    free = server.generate(input_ids=PROMPT, sampling_params=params | {"ignore_eos": True})
    token = free["output_ids"][3]
    stopped = server.generate(input_ids=PROMPT, sampling_params=params | {"stop_token_ids": [token]})
    end = free["output_ids"].index(token) + 1
    assert stopped["output_ids"] == free["output_ids"][:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_abort_by_name_answers_with_the_partial_tokens(server: Server) -> None:
    future = generating(server, rid="mine")
    assert server.post("/abort_request", {"rid": "mine"}) == (200, "")
    status, answer = future.result()
    meta = answer["meta_info"]
    assert status == 200
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(answer["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"]) < 1000


def test_abort_of_an_unknown_name_is_fine_and_hits_nobody(server: Server) -> None:
    future = generating(server, rid="mine_too")
    assert server.post("/abort_request", {"rid": "mine"}) == (200, "")
    assert future.result()[1]["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_all(server: Server) -> None:
    futures = [generating(server) for _ in range(3)]
    server.post("/abort_request", {"abort_all": True})
    ended = {future.result()[1]["meta_info"]["finish_reason"]["type"] for future in futures}
    assert "abort" in ended and ended <= {"abort", "length"}
    wait_until(server.idle)


def stream_of(server: Server, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Ask for a stream; the connection, and what comes."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    body = {"input_ids": PROMPT, "return_logprob": True, "stream": True} | body
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def events_of(answer: http.client.HTTPResponse) -> list[str]:
    lines = [line.decode().rstrip("\n") for line in answer]
    assert all(line.startswith("data: ") for line in lines if line)
    return [line.removeprefix("data: ") for line in lines if line]


def test_a_stream_tells_all_so_far_in_every_event_and_the_whole_answer_in_the_last(server: Server) -> None:
    params = {**GREEDY, "max_new_tokens": 100}  # what comes at once is told at once
    whole = server.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True)
    connection, answer = stream_of(server, sampling_params=params)
    *events, done = events_of(answer)
    connection.close()
    assert (answer.status, done) == (200, "[DONE]")
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")
    steps = [json.loads(event) for event in events]
    assert len(steps) > 1
    for step in steps:
        meta = step["meta_info"]
        tokens = [token for _, token, _ in meta["output_token_logprobs"]]
        assert tokens == whole["output_ids"][: meta["completion_tokens"]]
        assert (meta["finish_reason"] is None) == (step is not steps[-1])
    last = steps[-1]
    assert (last["text"], last["meta_info"]["finish_reason"]) == (whole["text"], whole["meta_info"]["finish_reason"])
    expected = [logprob for logprob, _, _ in whole["meta_info"]["output_token_logprobs"]]
    assert [logprob for logprob, _, _ in last["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected, abs=1e-4
    )
    assert last["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]


def test_an_aborted_stream_ends_with_what_it_has(server: Server) -> None:
    connection, answer = stream_of(server, sampling_params=LONG, rid="streaming")
    assert answer.readline().startswith(b"data: ")
    assert server.post("/abort_request", {"rid": "streaming"}) == (200, "")
    *_, last, done = events_of(answer)
    connection.close()
    meta = json.loads(last)["meta_info"]
    assert (meta["finish_reason"]["type"], done) == ("abort", "[DONE]")
    assert 0 < len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 1000


def test_a_bad_request_for_a_stream_is_refused(server: Server) -> None:
    connection, answer = stream_of(server, sampling_params={"top_p": 0})
    if answer.status == 200:  # SGLang has begun the stream before it looks
        refusal, *_ = events_of(answer)
    else:
        assert answer.status == 400
        refusal = answer.read().decode()
    assert "top_p" in json.loads(refusal)["error"]["message"]
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(server: Server, stream: bool) -> None:
    if server.real:
        pytest.skip("SGLang ends a paused request only when it goes on, where it might have ended by itself")
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    body = json.dumps({"input_ids": PROMPT, "sampling_params": LONG, "rid": "gone", "stream": stream})
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    wait_until(lambda: not server.idle())
    # paused, it never ends by itself
    server.post("/pause_generation", {"mode": "in_place"})
    assert not server.idle()
    connection.close()
    wait_until(server.idle)
    assert server.idle()


def test_pause_abort_ends_what_runs_and_queues_what_comes(server: Server) -> None:
    running = generating(server)
    status, answer = server.post("/pause_generation", {})
    assert (status, answer) == (200, {"message": "Generation paused successfully.", "status": "ok"})
    assert running.result()[1]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    queued = server.later("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    assert server.get("/health")[0] == (503 if server.real else 200)
    assert not queued.done()
    assert server.post("/continue_generation", {})[1] == {
        "message": "Generation continued successfully.",
        "status": "ok",
    }
    assert len(queued.result()[1]["output_ids"]) == 8


def test_unknown_pause_mode_is_refused(server: Server) -> None:
    status, answer = server.post("/pause_generation", {"mode": "foo"})
    assert status == 400
    assert "in_place" in json.dumps(answer)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_update_while_paused_gives_one_answer_with_two_versions(server: Server, mode: str) -> None:
    server.post("/update_weight_version", {"new_version": "before", "abort_all_requests": False})
    future = generating(server)
    server.post("/pause_generation", {"mode": mode})
    update = {"model_path": server.other_model_dir, "weight_version": "after", "flush_cache": mode == "retract"}
    status, answer = server.post("/update_weights_from_disk", update)
    assert (status, answer["success"]) == (200, True)
    server.post("/continue_generation", {})
    status, answer = future.result()
    meta = answer["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["before", "after"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 1000
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert meta["finish_reason"] == {"type": "length", "length": 1000}
    assert (
        server.post("/update_weights_from_disk", {"model_path": server.model_dir, "weight_version": "default"})[0]
        == 200
    )


def test_flush_is_refused_while_busy(server: Server) -> None:
    generating(server)
    server.post("/pause_generation", {"mode": "in_place"})
    assert server.post("/flush_cache", {}) == (400, "Flush cache failed.\n")


def test_update_from_disk_changes_the_model_and_its_version(server: Server) -> None:
    before = server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    update = {"model_path": server.other_model_dir, "weight_version": "v1"}
    assert server.post("/update_weights_from_disk", update) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to v1.",
            "num_paused_requests": 0,
        },
    )
    after = server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert after["meta_info"]["weight_version"] == "v1"
    assert after["output_ids"] != before["output_ids"]
    server.post("/update_weights_from_disk", {"model_path": server.model_dir, "weight_version": "default"})
    again = server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert again["output_ids"] == before["output_ids"]


def test_update_from_a_missing_directory_fails_and_changes_nothing(server: Server) -> None:
    before = server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    status, answer = server.post("/update_weights_from_disk", {"model_path": "/models/nope"})
    assert status == 400
    assert answer["success"] is False and answer["message"]
    assert server.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"] == before["output_ids"]


def test_an_update_in_parts_happens_within_a_session(server: Server) -> None:
    part: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "group_name": "none"}
    outside = "must run between begin_weight_update() and end_weight_update()"
    for name, body in (("distributed", part), ("tensor", {"serialized_named_tensors": ["gASV"]})):
        status, answer = server.post(f"/update_weights_from_{name}", body)
        assert (status, answer["success"]) == (400, False)
        assert outside in answer["message"] or (name == "tensor" and not server.real)
    assert server.post("/end_weight_update", {})[0] == 400
    assert server.post("/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    status, answer = server.post("/begin_weight_update", {})
    assert (status, "already open" in answer["message"]) == (400, True)
    assert server.post("/end_weight_update", {}) == (200, {"success": True, "message": "Success"})


def test_a_group_that_does_not_exist_cannot_be_destroyed(server: Server) -> None:
    assert server.post("/destroy_weights_update_group", {"group_name": "none"}) == (
        400,
        {"success": False, "message": "The group to be destroyed does not exist."},
    )


def test_weight_version_can_be_renamed(server: Server) -> None:
    status, answer = server.post("/update_weight_version", {"new_version": "v1b", "abort_all_requests": False})
    assert (status, answer["success"], answer["new_version"]) == (200, True, "v1b")
    assert server.get("/get_model_info")[1]["weight_version"] == "v1b"


def test_weights_checker_gives_a_checksum_a_tensor(server: Server) -> None:
    status, answer = server.post("/weights_checker", {"action": "checksum"})
    assert (status, answer["success"]) == (200, True)
    checksums = answer["ranks"][0]["checksums"]
    assert "model.embed_tokens.weight" in checksums
    assert all(set(checksum) <= set("0123456789abcdef") for checksum in checksums.values())


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
def test_health(server: Server, path: str) -> None:
    assert server.get(path) == (200, "")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(server: Server, path: str) -> None:
    info = server.get(path)[1]
    assert info["is_generation"] is True
    assert info["model_type"] == "qwen3"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(server: Server, path: str) -> None:
    info = server.get(path)[1]
    assert info["max_running_requests"] > 0
    assert {"version", "dtype", "context_length", "tp_size", "dp_size"} <= info.keys()


def test_models(server: Server) -> None:
    models = server.get("/v1/models")[1]["data"]
    assert [model["max_model_len"] for model in models] == [server.context_length]
