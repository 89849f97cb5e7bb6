"""`--generate single_turn`: the prompt goes to the engine once, and its answer is the response."""

from typing import Any

from slime_core import DataError, Sample, Status, hookimpl
from slime_core.multi_turn import cut_at_stop


@hookimpl
async def generate(engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The sample with one generation; a resumed one goes on from the tokens it has."""
    if not sample.prompt and not len(sample.tokens):
        raise DataError(
            "a sample has no prompt for --generate single_turn: name prompts with --prompt-data, or a generator that "
            "brings its own with --generate."
        )
    room = sampling_params["max_new_tokens"] - sample.response_length
    room = min(room, engine.context_tokens - len(sample.tokens))
    if room <= 0:
        sample.status = Status.TRUNCATED
        return [sample]
    begun = sample.tokens[sample.prompt_length :]
    images = (sample.multimodal or {}).get("image")
    generation = await engine.generate(
        sample.tokens,
        {**sampling_params, "max_new_tokens": room},
        session_id=sample.session_id,
        **({"image_data": images} if images else {}),
    )
    # a stop string may lie across two requests
    sample.append_generation(cut_at_stop(engine, begun, generation, sampling_params))
    return [sample]
