"""SGLang's JSON, read into requests and written from outputs (captured from SGLang 0.5.23)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from slime_core.engines.embedded.detokenize import response_text
from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.request import NEUTRAL, BadRequest, Output, Request, SamplingParams

# what an answer needs nothing for, or what is read below
KNOWN_FIELDS = frozenset(
    (
        "text",
        "input_ids",
        "sampling_params",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "return_text_in_logprobs",
        "stream",
    )
)
IGNORED_FIELDS = frozenset(("log_metrics", "model", "priority"))


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed /generate body: its requests, in order, and the shape of the answer."""

    requests: list[Request]
    as_list: bool
    stream: bool
    return_logprob: bool
    text_in_logprobs: bool


def parse_generate(body: Any, engine: Engine) -> GenerateCall:
    """Check a /generate body and build its requests, n for each prompt; raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object.")
    _refuse_unsupported(body)
    prompts, batched = _prompts(body, engine)
    params = _params(body.get("sampling_params"), len(prompts), batched)
    names = _names(body.get("rid"), len(prompts), batched)
    return_logprob = _flag(body, "return_logprob")
    start = _logprob_start(body.get("logprob_start_len"), prompts) if return_logprob else None
    requests = [
        engine.make_request(
            prompt,
            own,
            rid=name if own.n == 1 else f"{name}_{copy}",
            reply=None,
            copy=copy,
            parent_rid=name,
            logprob_start=start,
        )
        for prompt, own, name in zip(prompts, params, names, strict=True)
        for copy in range(own.n)
    ]
    as_list, stream = batched or len(requests) > 1, _flag(body, "stream")
    if stream and as_list:
        raise BadRequest("stream is for one prompt and n = 1 in the embedded engine.")
    for request in requests:
        request.stream = stream
    return GenerateCall(requests, as_list, stream, return_logprob, _flag(body, "return_text_in_logprobs"))


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name not in KNOWN_FIELDS and name not in IGNORED_FIELDS and value not in NEUTRAL:
            raise BadRequest(f"{name!r} is not supported by the embedded engine.")


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise BadRequest(f"{name} must be true or false, got {value!r}.")
    return bool(value)


def _prompts(body: dict[str, Any], engine: Engine) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether the body holds a list of prompts."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and text is not None:
        raise BadRequest("Only one of text and input_ids should be provided.")
    if ids is None:
        ids = _encode(text, engine)
    batched = isinstance(ids, list) and len(ids) > 0 and isinstance(ids[0], list)
    prompts = ids if batched else [ids]
    for prompt in prompts:
        _check_prompt(prompt, engine)
    return prompts, batched


def _encode(text: Any, engine: Engine) -> Any:
    tokenizer = engine.language_model.tokenizer
    if tokenizer is None:
        raise BadRequest("this engine's model directory has no tokenizer; send input_ids.")
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(item, str) for item in texts):
        raise BadRequest("text must be a string or a list of strings.")
    encoded = [list(tokenizer(item)["input_ids"]) for item in texts]
    return encoded if isinstance(text, list) else encoded[0]


def _check_prompt(prompt: Any, engine: Engine) -> None:
    model = engine.language_model
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadRequest("input_ids must be a list of token ids or a list of such lists.")
    if not prompt:
        raise BadRequest("The input is empty.")
    if len(prompt) >= model.context_length:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({model.context_length} tokens)."
        )
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise BadRequest(f"The input_ids contain {wrong}, outside the vocabulary of {model.vocab_size} tokens.")


def check_request(request: Request, engine: Engine) -> None:
    """Check what depends on both prompt and parameters; raises BadRequest."""
    model, params, prompt = engine.language_model, request.params, len(request.prompt)
    if prompt + request.limit > model.context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {model.context_length} tokens. "
            f"You requested a total of {prompt + request.limit} tokens: {prompt} tokens from the input messages and "
            f"{request.limit} tokens for the completion. Please reduce the number of tokens in the input messages or "
            "the completion to fit within the limit."
        )
    if params.stop and model.tokenizer is None:
        raise BadRequest("stop strings need a tokenizer, which this engine's model directory lacks.")
    for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if any(not 0 <= token < model.vocab_size for token in tokens):
            raise BadRequest(f"{name} has a token id outside the vocabulary of {model.vocab_size} tokens.")


def _params(raw: Any, count: int, batched: bool) -> list[SamplingParams]:
    if isinstance(raw, list):
        if not batched or len(raw) != count:
            raise BadRequest(f"sampling_params is a list of {len(raw)}, but there are {count} prompts.")
        return [SamplingParams.parse(item) for item in raw]
    return [SamplingParams.parse(raw)] * count


def _names(rid: Any, count: int, batched: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(count)] if batched else [rid]
    if not isinstance(rid, list) or len(rid) != count or not all(isinstance(name, str) for name in rid):
        raise BadRequest(f"rid must be a string, or a list of {count} strings.")
    return rid


def _logprob_start(value: Any, prompts: list[list[int]]) -> int | None:
    if value is None or value == -1:
        return None
    if type(value) is not int or not 0 <= value < min(len(prompt) for prompt in prompts):
        raise BadRequest(f"logprob_start_len must be -1 or a position in the prompt, got {value!r}.")
    return value


def answer(request: Request, output: Output, call: GenerateCall, engine: Engine) -> dict[str, Any]:
    """One request's answer: text, output_ids and meta_info; of a stream, what there is so far."""
    reason = output.finish_reason
    tokenizer = engine.language_model.tokenizer
    text = response_text(tokenizer, output.output_ids, (reason or {}).get("matched"), request.params)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt),
        "weight_version": output.weight_version,
        "num_retractions": request.retractions,
    }
    if call.return_logprob:
        meta |= _logprobs(request, output, call, engine)
    count, elapsed_s = len(output.output_ids), output.finished_s - request.received_s
    meta |= {
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in output.versions],
        "queue_time": (request.admitted_s or output.finished_s) - request.received_s,
        "e2e_latency": elapsed_s,
        "request_received_ts": request.received_s,
        "request_finished_ts": output.finished_s,
        "decode_throughput": count / elapsed_s if elapsed_s > 0 else 0.0,
    }
    return {"text": text, "output_ids": output.output_ids, "meta_info": meta}


def _logprobs(request: Request, output: Output, call: GenerateCall, engine: Engine) -> dict[str, Any]:
    inputs: list[list[Any]] = []
    if request.logprob_start is not None and request.prompt_logprobs is not None:
        # the first has no log-probability, wherever it starts: SGLang does the same
        values = [None, *request.prompt_logprobs]
        inputs = _triples(values, request.prompt[request.logprob_start :], call, engine)
    return {
        "input_token_logprobs": inputs,
        "output_token_logprobs": _triples(output.output_logprobs, output.output_ids, call, engine),
        "output_token_logprobs_length": len(output.output_ids),
    }


def _triples(values: list[Any], ids: list[int], call: GenerateCall, engine: Engine) -> list[list[Any]]:
    """[[log-probability, token id, the token's text or null], ...]."""
    tokenizer = engine.language_model.tokenizer
    if not call.text_in_logprobs or tokenizer is None:
        return [[value, token, None] for value, token in zip(values, ids, strict=True)]
    return [[value, token, str(tokenizer.decode([token]))] for value, token in zip(values, ids, strict=True)]
