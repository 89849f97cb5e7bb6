"""`single_turn` sends what the sample carries."""

import pytest

from slime_core import DataError
from slime_core.defaults.single_turn import generate
from slime_core.testing import ScriptedEngine
from slime_core.types import Sample, Status


async def test_the_images_of_a_sample_go_with_its_prompt():
    engine = ScriptedEngine(["a cat", "a dog"])
    pictures = ["data:image/png;base64,AAAA"]
    for sample in (Sample(tokens=[1], multimodal={"image": pictures}), Sample(tokens=[1])):
        await generate(engine=engine, sample=sample, sampling_params={"max_new_tokens": 9})
    assert engine.images == [pictures, []]


async def test_a_blank_sample_tells_what_is_missing():
    with pytest.raises(DataError, match="no prompt for --generate single_turn: name prompts with --prompt-data"):
        await generate(engine=ScriptedEngine(["x"]), sample=Sample(), sampling_params={"max_new_tokens": 9})


async def test_a_stop_string_that_an_abort_cut_in_two_ends_the_response():
    sample = Sample(prompt="p", tokens=[1])
    sample.append([ord(c) for c in "so 4</ans"], text="so 4</ans", logprobs=[-1.0] * 9)
    engine = ScriptedEngine(["wer> and on"])
    (made,) = await generate(
        engine=engine, sample=sample, sampling_params={"max_new_tokens": 99, "stop": ["</answer>"]}
    )
    assert made.status is Status.COMPLETED
    assert made.response == "so 4</answer>" and made.response_length == len("so 4</answer>")
