"""Images from a row to the engine and, as the model's processor made them, to the trainer."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from transformers import AutoProcessor

from served import served
from slime_core.defaults.dataset import Dataset
from slime_core.errors import DataError, OptionError
from slime_core.rollout.early import Early
from slime_core.rollout.manager import RolloutManager
from slime_core.rollout.prompts import Prompts
from slime_core.rollout.sample_file import read_groups, write_groups
from slime_core.rollout.stages import Stages
from slime_core.types import Sample
from tiny_vision_model import IMAGE_TOKEN, TOKENS_AN_IMAGE, picture, save_vision_model

FLAGS = ["--multimodal-keys", "image=images", "--apply-chat-template"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture
async def engine():
    """Stands in for a server that takes images, which the embedded engine does not; `requests` keeps what it got."""
    requests = []

    async def generate(request: web.Request) -> web.Response:
        requests.append(await request.json())
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 70, None], [-0.25, 2, None]]}
        return web.json_response({"text": "B", "meta_info": {**meta, "weight_version": "0"}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with served(app) as url:
        yield url, requests


async def test_a_round_with_images_gives_engines_placeholders_and_trainers_what_the_model_sees(
    make_args, write_rows, engine, plugin_file, model_dir
):
    url, requests = engine
    colors = ["red", "blue"]
    rows = [
        {"prompt": "<image> or <image>?", "images": [picture(color), picture("white", (90, 40))]} for color in colors
    ]
    reward = plugin_file("reward", "@hookimpl\ndef reward(sample):\n    return 1.0")
    args = make_args("--prompt-data", write_rows(rows), "--reward", reward, "--no-shuffle", *FLAGS)
    manager = RolloutManager(args, url, [], 1)
    try:
        batch = (await manager.rollout(0)).shards[0].batch
    finally:
        await manager.close()
    processor = AutoProcessor.from_pretrained(model_dir)
    for request in requests:
        assert request["input_ids"].count(IMAGE_TOKEN) == len(request["image_data"]) == 2
    ends = np.cumsum(batch.lengths)
    for row in range(4):
        tokens = batch.tokens[ends[row] - batch.lengths[row] : ends[row]]
        text = "<s>user\n<image> or <image>?</s>\n<s>assistant\n"
        images = [picture(colors[row // 2]), picture("white", (90, 40))]
        expected = processor(text=[text], images=processor.image_processor.fetch_images(images), return_tensors="np")
        assert tokens.tolist() == [*expected["input_ids"][0].tolist(), 70, 2]
        assert (tokens == IMAGE_TOKEN).sum() == 2 * TOKENS_AN_IMAGE
        assert batch.multimodal[row]["image"] == images
        np.testing.assert_array_equal(batch.multimodal[row]["processed"]["pixel_values"], expected["pixel_values"])
    first, second = (batch.multimodal[row]["processed"]["pixel_values"] for row in (0, 1))
    assert first is second, "the samples of a prompt share one array"


def prompts_and_sample(args, **fields):
    sample = Sample(
        prompt=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
        multimodal={"image": [picture("green")]},
        **fields,
    )
    prompts = Prompts(args, AutoProcessor.from_pretrained(args.model).tokenizer)
    prompts.tokenize(sample)
    return prompts, sample


async def test_a_continued_sample_keeps_its_own_tokens_behind_the_placeholders(make_args, engine):
    url, requests = engine
    args = make_args(*FLAGS)
    _, sample = prompts_and_sample(args)
    sample.append([80, 81], logprobs=[-1.0, -1.0])
    manager = RolloutManager(args, url, [], 1)
    try:
        await manager._stages.run_group([sample])
    finally:
        await manager.close()
    assert requests[0]["input_ids"] == [*sample.unexpanded_prompt, 80, 81]


def test_files_keep_images_and_not_their_arrays_which_are_made_again(make_args, tmp_path):
    prompts, sample = prompts_and_sample(make_args(*FLAGS))
    sample.append([70], logprobs=[-1.0])
    write_groups(tmp_path / "groups.parquet", [[sample, sample.clone()]])
    group = read_groups(tmp_path / "groups.parquet")[0]
    assert [one.processed for one in group] == [None, None]
    prompts.restore(group)
    np.testing.assert_array_equal(group[1].processed["pixel_values"], sample.processed["pixel_values"])
    assert group[0].processed is group[1].processed
    assert Sample.from_dict(sample.to_dict()).processed is None


def test_images_that_give_other_tokens_than_before_stop_the_run(make_args):
    prompts, sample = prompts_and_sample(make_args(*FLAGS), index=7)
    sample.processed, sample.prompt = None, [*sample.prompt, {"role": "user", "content": "more"}]
    with pytest.raises(DataError, match="images of sample 7 do not give the tokens that they gave before"):
        prompts.restore([sample])


def test_more_images_than_places_are_refused(make_args):
    args = make_args("--multimodal-keys", "image=images")
    prompts = Prompts(args, AutoProcessor.from_pretrained(args.model).tokenizer)
    with pytest.raises(DataError, match=r"refused a prompt with 2 images: .*1 <image> tokens and 2 images"):
        prompts.tokenize(Sample(prompt="<image>", multimodal={"image": [picture("red"), picture("red")]}))


def test_a_picture_that_cannot_be_decoded_is_an_error_about_data(make_args):
    prompts = Prompts(make_args(*FLAGS), None)
    sample = Sample(prompt="<image>", multimodal={"image": ["data:image/png;base64,AAAA"]})
    with pytest.raises(DataError, match="the prompt '<image>' of data set 'train': an image cannot be read: "):
        prompts.tokenize(sample)


def test_a_truncated_picture_stops_the_run_with_its_file_and_line(make_args, write_rows):
    rows = [
        {"prompt": "<image>?", "images": [picture("red")]},
        {"prompt": "<image>?", "images": [picture("red")[:-60]]},
    ]
    path = write_rows(rows)
    args = make_args("--prompt-data", path, "--no-shuffle", *FLAGS)
    drawn = Dataset(args).get_samples({}, 2)
    prompts = Prompts(args, AutoProcessor.from_pretrained(args.model).tokenizer)
    prompts.tokenize(drawn[0])
    with pytest.raises(DataError, match=rf"{path}.*line 2: an image cannot be read: .*--skip-bad-rows"):
        prompts.tokenize(drawn[1])


def test_a_processor_that_does_not_load_is_named(make_args, tmp_path, model_dir):
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_text((model_dir / "config.json").read_text())
    (directory / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    prompts = Prompts(make_args("--model", directory, *FLAGS), None)
    with pytest.raises(OptionError, match=r"the processor of --model .*broken for images does not load"):
        prompts.tokenize(Sample(prompt="<image>", multimodal={"image": [picture("red")]}))


async def test_pictures_that_cannot_be_decoded_are_left_out_where_bad_rows_are(
    make_args, write_rows, engine, plugin_file, caplog
):
    url, _ = engine
    rows = [{"prompt": "<image>?", "images": [picture("red") if good else "data:image/png;base64,AAAA"]}
            for good in (True, False, True)]  # fmt: skip
    reward = plugin_file(
        "reward", "@hookimpl\ndef reward(sample):\n    assert sample.processed is None\n    return 1.0"
    )
    flags = ["--reward", reward, "--no-shuffle", "--skip-bad-rows", *FLAGS]
    manager = RolloutManager(make_args("--prompt-data", write_rows(rows), *flags), url, [], 1)
    try:
        batch = (await manager.rollout(0)).shards[0].batch
    finally:
        await manager.close()
    assert batch.num_samples == 4
    assert [entry["image"] for entry in batch.multimodal] == [[picture("red")]] * 4
    assert "line 2: an image cannot be read" in caplog.text


def test_an_orientation_tag_is_not_followed_as_engines_do_not(make_args):
    file = io.BytesIO()
    image, tags = Image.new("RGB", (40, 30), "red"), Image.Exif()
    image.paste("blue", (0, 0, 20, 30))
    tags[0x0112] = 6
    image.save(file, "PNG", exif=tags)
    plain = io.BytesIO()
    image.save(plain, "PNG")
    arrays = []
    for content in (file, plain):
        args = make_args(*FLAGS)
        sample = Sample(prompt=[{"role": "user", "content": [{"type": "image"}]}])
        sample.multimodal = {"image": ["data:image/png;base64," + base64.b64encode(content.getvalue()).decode()]}
        Prompts(args, AutoProcessor.from_pretrained(args.model).tokenizer).tokenize(sample)
        arrays.append(sample.processed["pixel_values"])
    np.testing.assert_array_equal(arrays[0], arrays[1])


def test_groups_that_lost_their_arrays_are_not_handed_out_early(make_args):
    _, sample = prompts_and_sample(make_args(*FLAGS))
    sample.append([70], logprobs=[-1.0])
    early = Early()
    holder = SimpleNamespace(over_sampling_filters=[], early=early)
    Stages.keep(holder, [replace(sample, processed=None)])
    assert early.take() is None
    Stages.keep(holder, [sample])
    assert early.take().num_samples == 1
