"""`--generate echo`: every row's label is the response, without an engine; to try rewards, filters and losses."""

from typing import Any

from slime_core import Sample, Status, hookimpl


@hookimpl
async def generate(engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The sample with its label (its prompt, where it has none) as the response, cut at `max_new_tokens`."""
    text = str(sample.prompt if sample.label is None else sample.label)
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    room = max(0, min(sampling_params["max_new_tokens"], engine.context_tokens - len(sample.tokens)))
    if len(tokens) > room:
        tokens = tokens[:room]
        text = engine.tokenizer.decode(tokens)
        sample.status = Status.TRUNCATED
    else:
        sample.status = Status.COMPLETED
    sample.append(tokens, text=text)
    return [sample]
