"""`single_turn` sends what the sample carries."""

from slime_core.defaults.single_turn import generate
from slime_core.testing import ScriptedEngine
from slime_core.types import Sample


async def test_the_images_of_a_sample_go_with_its_prompt():
    engine = ScriptedEngine(["a cat", "a dog"])
    pictures = ["data:image/png;base64,AAAA"]
    for sample in (Sample(multimodal={"image": pictures}), Sample()):
        await generate(engine=engine, sample=sample, sampling_params={"max_new_tokens": 9})
    assert engine.images == [pictures, []]
