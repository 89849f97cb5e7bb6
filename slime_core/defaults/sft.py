"""`--generate sft --policy-loss sft`: demonstrations from the data set become samples, without any engine call."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core import DataError, Sample, Status, hookimpl

if TYPE_CHECKING:
    import torch

Messages = list[dict[str, Any]]
Span = tuple[int, int]


@hookimpl
async def generate(args: argparse.Namespace, engine: Any, sample: Sample) -> list[Sample]:
    """The sample with its demonstration as the response, cut at the token limits.

    A prompt of messages with assistant turns trains every one of them; any other prompt trains the row's label, as the
    answer to it. What follows the last trained token is left out.
    """
    tokenizer = engine.tokenizer
    messages = demonstration_messages(args, sample)
    if messages is None:
        prompt, response = sample.tokens, [*_encode(tokenizer, _label(sample)), *_end_of_text(tokenizer)]
        if not len(prompt):
            prompt = np.array(_encode(tokenizer, str(sample.prompt)), np.int32)
        # what nothing precedes cannot be predicted
        mask = [bool(len(prompt)) or i > 0 for i in range(len(response))]
    else:
        tokens, trained = conversation_tokens(tokenizer, messages, _template_arguments(args, sample), _where(sample))
        first, after = trained.index(True), len(trained) - trained[::-1].index(True)
        prompt, response, mask = np.array(tokens[:first], np.int32), tokens[first:after], trained[first:after]
    room = max(0, min(args.max_response_tokens, engine.context_tokens - len(prompt)))
    sample.tokens = prompt
    for part, trainable in _runs(response[:room], mask[:room]):
        text = tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        sample.append(part, text=text, trainable=trainable)
    sample.status = Status.TRUNCATED if len(response) > room else Status.COMPLETED
    return [sample]


@hookimpl
def policy_loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The negative log-likelihood of each token."""
    return -logprobs, {}


def demonstration_messages(args: argparse.Namespace, sample: Sample) -> Messages | None:
    """The whole conversation, its demonstration included; None for a prompt of plain text.

    Raises:
        DataError: when there is neither an assistant turn nor a label.
    """
    if isinstance(sample.prompt, str):
        if not args.apply_chat_template:
            return None
        asked: Messages = [{"role": "user", "content": sample.prompt}]
    else:
        asked = sample.prompt
    if any(message["role"] == "assistant" for message in asked):
        return asked
    return [*asked, {"role": "assistant", "content": _label(sample)}]


def conversation_tokens(
    tokenizer: Any, messages: Messages, arguments: dict[str, Any], where: str
) -> tuple[list[int], list[bool]]:
    """A conversation as the chat template renders it, once, and which tokens are trained.

    The template's `{% generation %}` marks decide where it has them. Otherwise the text of each assistant turn is
    located in the rendered string and mapped to tokens by their offsets, with the turn-end token that follows it.

    Args:
        tokenizer: a fast tokenizer of transformers, with a chat template.
        messages: the conversation, with at least one assistant turn.
        arguments: further arguments of `apply_chat_template`, such as tools.
        where: names the row in errors.

    Returns:
        Token ids and, for each, whether it is trained; at least one is.

    Raises:
        DataError: when the template does not render an assistant turn as it stands.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"{where} is a conversation, but the tokenizer of --model has no chat template.")
    if "generation" in _statements(tokenizer.get_chat_template(tools=arguments.get("tools"))):
        marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        out = _apply(tokenizer, messages, {**arguments, **marked}, where)
        tokens, trained = list(out["input_ids"]), [bool(x) for x in out["assistant_masks"]]
    else:
        rendered = _apply(tokenizer, messages, {**arguments, "tokenize": False}, where)
        spans = turn_spans(tokenizer, messages, arguments, rendered, where)
        tokens, trained = _mark(tokenizer, rendered, spans, where)
    if not any(trained):
        raise DataError(f"{where} has no assistant token to train; are its assistant turns empty?")
    return tokens, trained


def turn_spans(tokenizer: Any, messages: Messages, arguments: dict[str, Any], rendered: str, where: str) -> list[Span]:
    """Where the text of each assistant turn lies in the rendered conversation, in characters.

    The same conversation with a marker for each assistant text tells the literal text around the turns, so that an
    answer "4" is not taken for the 4 of the question. Where a template treats the marker differently, a text is
    searched for, and must occur no more often than the turns that say it.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts: list[str] = []
    for number, turn in enumerate(turns):
        content = messages[turn].get("content")
        if not isinstance(content, str):
            raise DataError(
                f"assistant turn {number} of {where} has no plain text; "
                "use a chat template with {% generation %} marks for tool calls and content in parts."
            )
        texts.append(content)
    markers = {turn: f"slimemark{number}q" for number, turn in enumerate(turns)}
    marked = [{**m, "content": markers.get(i, m.get("content"))} for i, m in enumerate(messages)]
    with_markers = _apply(tokenizer, marked, {**arguments, "tokenize": False}, where)
    around = _split(with_markers, list(markers.values()))
    spans = _between(rendered, around, texts) if around else None
    return spans if spans is not None else _search(rendered, texts, where)


def _split(text: str, markers: list[str]) -> list[str] | None:
    """What lies around the markers; None unless each occurs once, in order."""
    parts = []
    for marker in markers:
        before, found, text = text.partition(marker)
        if not found:
            return None
        parts.append(before)
    return None if any(marker in part for part in (*parts, text) for marker in markers) else [*parts, text]


def _between(rendered: str, around: list[str], texts: list[str]) -> list[Span] | None:
    """Spans of the texts when the rendered string is around[0] + text + around[1] + ..., texts perhaps stripped."""
    if not rendered.startswith(around[0]):
        return None
    spans: list[Span] = []
    start = len(around[0])
    for text, after in zip(texts, around[1:], strict=True):
        forms = (text, text.strip(), text.lstrip(), text.rstrip())
        form = next((f for f in forms if rendered.startswith(f + after, start)), None)
        if form is None:
            return None
        spans.append((start, start + len(form)))
        start += len(form) + len(after)
    return spans if start == len(rendered) else None


def _search(rendered: str, texts: list[str], where: str) -> list[Span]:
    """Spans of the texts, found in order; ambiguous ones are refused."""
    spans: list[Span] = []
    cursor = 0
    stripped = [text.strip() for text in texts]
    for number, text in enumerate(stripped):
        start = rendered.find(text, cursor) if text else -1
        if start < 0 or rendered.count(text) != sum(other.count(text) for other in stripped):
            raise DataError(
                f"the chat template does not render assistant turn {number} of {where} as it stands in the row "
                f"({text[:40]!r}); use a template with {{% generation %}} marks, or drop the row."
            )
        cursor = start + len(text)
        spans.append((start, cursor))
    return spans


def _mark(tokenizer: Any, rendered: str, spans: list[Span], where: str) -> tuple[list[int], list[bool]]:
    """Tokens of the rendered string, and which lie in a span or end its turn."""
    encoded = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    trained = [False] * len(tokens)
    at = 0
    for start, end in spans:
        while at < len(tokens) and offsets[at][1] <= start:
            at += 1
        first = at
        while at < len(tokens) and offsets[at][0] < end:
            at += 1
        _check_text(tokenizer, tokens[first:at], rendered[start:end], where)
        after = _turn_end(tokenizer, rendered, tokens, offsets, at, end)
        trained[first:after] = [True] * (after - first)
    if spans and at == len(tokens):
        # the template ends with the answer itself: without an end token the model would never learn to stop
        ending = _end_of_text(tokenizer)
        return tokens + ending, trained + [True] * len(ending)
    return tokens, trained


def _turn_end(tokenizer: Any, rendered: str, tokens: list[int], offsets: list[Span], at: int, end: int) -> int:
    """One past the special token that ends the turn, white space before it included; `at` where none follows."""
    for i in range(at, len(tokens)):
        added = tokenizer.added_tokens_decoder.get(tokens[i])
        if added is not None and added.special:
            return i + 1
        if rendered[max(end, offsets[i][0]) : offsets[i][1]].strip():
            break
    return at


def _check_text(tokenizer: Any, tokens: list[int], text: str, where: str) -> None:
    decoded = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if text.strip() not in decoded:
        raise DataError(
            f"the tokenizer of --model does not give back an assistant turn of {where}: {text[:40]!r} became "
            f"{decoded[:40]!r}; its normalisation loses text."
        )


def _apply(tokenizer: Any, messages: Messages, arguments: dict[str, Any], where: str) -> Any:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template refuses {where}: {error}") from None


def _statements(template: str) -> set[str]:
    """First words of the template's `{% ... %}` statements."""
    inside = (part.split("%}")[0].strip("-+ \n") for part in template.split("{%")[1:])
    return {words.split()[0] for words in inside if words}


def _template_arguments(args: argparse.Namespace, sample: Sample) -> dict[str, Any]:
    tools = sample.metadata.get("tools")
    return {**args.chat_template_kwargs, **({"tools": tools} if tools else {})}


def _runs(tokens: list[int], mask: list[bool]) -> Iterable[tuple[list[int], bool]]:
    """Consecutive tokens that are all trained, or all not."""
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or mask[end] != mask[start]:
            yield tokens[start:end], mask[start]
            start = end


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _end_of_text(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _label(sample: Sample) -> str:
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"{_where(sample)} has no demonstration; give it an assistant message, or a text under --label-key."
        )
    return sample.label


def _where(sample: Sample) -> str:
    return f"sample {sample.index} of data set '{sample.dataset}'"
