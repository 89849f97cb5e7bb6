"""Images in a batch: log-probabilities are those of every sample alone, whatever lies beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from slime_core.errors import SlimeError
from slime_core.multi_turn import split_turns
from slime_core.rollout.prompts import Prompts
from slime_core.training.batch import TensorBatch
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.load import load_policy
from slime_core.types import Sample, TrainBatch
from tiny_vision_model import picture, save_vision_model

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, grouped=False)
VISION_START, IMAGE_PAD, VISION_END = 5, 6, 7


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def qwen_vl(tmp_path_factory):
    """Rotary positions in three axes, pictures of any size; its processor needs torchvision, so it has none here."""
    directory = tmp_path_factory.mktemp("qwen_vl")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2_5_VLConfig(
        text_config={**size, "vocab_size": 64, "num_key_value_heads": 2, "rope_parameters": rope, "pad_token_id": 0},
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14},
        image_token_id=IMAGE_PAD, video_token_id=8, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


def llava_samples(args):
    """With two images, with none, with one."""
    prompts = Prompts(args, AutoProcessor.from_pretrained(args.model).tokenizer)
    rng = np.random.default_rng(0)
    samples = []
    for index, colors in enumerate((["red", "black"], [], ["blue"])):
        parts = [{"type": "image"} for _ in colors] + [{"type": "text", "text": "what is it?" * (index + 1)}]
        sample = Sample(index=index, prompt=[{"role": "user", "content": parts}])
        sample.multimodal = {"image": [picture(color) for color in colors]} if colors else None
        prompts.tokenize(sample)
        sample.append(rng.integers(4, 200, 5 + index), logprobs=[-1.0] * (5 + index))
        samples.append(sample)
    return samples


def qwen_vl_samples():
    """Grids of patches as Qwen's processor lays them out: 14 x 14 x 3 x 2 numbers a patch, four patches a token."""
    rng = np.random.default_rng(0)
    samples = []
    for index, grids in enumerate(([(1, 4, 4)], [], [(1, 2, 6), (1, 4, 2)])):
        tokens, types = [11, 12], [0, 0]
        for grid in grids:
            count = int(np.prod(grid)) // 4
            tokens += [VISION_START, *[IMAGE_PAD] * count, VISION_END]
            types += [0, *[1] * count, 0]
        sample = Sample(index=index, tokens=np.array([*tokens, 13], np.int32))
        if grids:
            patches = sum(int(np.prod(grid)) for grid in grids)
            sample.processed = {
                "pixel_values": rng.normal(size=(patches, 1176)).astype(np.float32),
                "image_grid_thw": np.array(grids),
                "mm_token_type_ids": np.array([[*types, 0]]),
            }
        sample.append(rng.integers(10, 60, 4 + index), logprobs=[-1.0] * (4 + index))
        samples.append(sample)
    return samples


def alone(model, sample):
    """Log-probabilities of the response from one unpadded forward."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    given = {name: torch.from_numpy(array) for name, array in (sample.processed or {}).items()}
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, sample.response_length))
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).logits[0]
    chosen = torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[0, 1:, None])[:, 0]
    return chosen[-sample.response_length :]


@pytest.mark.parametrize("family", ["llava", "qwen_vl"])
def test_logprobs_and_gradients_in_a_batch_are_those_of_each_sample_alone(family, make_args, request):
    args = make_args(
        "--multimodal-keys", "image=images", "--apply-chat-template", model=request.getfixturevalue(family)
    )
    samples = llava_samples(args) if family == "llava" else qwen_vl_samples()
    policy = load_policy(args, ALONE)
    logprobs, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples(samples), CPU))
    logprobs.sum().backward()
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).eval()
    expected = torch.cat([alone(model, sample) for sample in samples])
    expected.sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-4)
    own = dict(policy.model.named_parameters())
    seen = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("vi" in name and grad.abs().sum() > 0 for name, grad in seen.items()), "the vision tower learns"
    for name, grad in seen.items():
        torch.testing.assert_close(own[name].grad, grad, atol=1e-4, rtol=1e-3, msg=name)


def test_images_change_what_the_model_says(make_args, llava):
    args = make_args("--multimodal-keys", "image=images", "--apply-chat-template", model=llava)
    policy, samples = load_policy(args, ALONE), llava_samples(args)
    before, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples(samples), CPU))
    samples[2].processed = {name: array + 1.0 for name, array in samples[2].processed.items()}
    after, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples(samples), CPU))
    last = samples[2].response_length
    torch.testing.assert_close(before[:-last], after[:-last])
    assert (before[-last:] - after[-last:]).abs().max() > 1e-3


def test_a_model_that_takes_no_images_refuses_them(make_args, llava):
    samples = llava_samples(make_args("--multimodal-keys", "image=images", "--apply-chat-template", model=llava))
    with pytest.raises(SlimeError, match="samples have images, but a Qwen3ForCausalLM takes none"):
        load_policy(make_args(), ALONE).logprobs(TensorBatch.of(TrainBatch.from_samples(samples), CPU))


def test_a_round_with_images_trains_the_whole_model_and_is_saved_whole(
    make_args, make_trainer, shard_of, llava, tmp_path
):
    flags = ["--multimodal-keys", "image=images", "--apply-chat-template", "--max-tokens-per-gpu", "40"]
    samples = llava_samples(make_args(*flags, model=llava))
    for sample, reward in zip(samples, (1.0, 0.0, 0.5), strict=True):
        sample.group_index, sample.reward = 0, reward
    trainer = make_trainer(*flags, model=llava)
    before = {name: tensor.clone() for name, tensor in trainer.weights("float32")}
    metrics = trainer.train(0, shard_of(samples))
    assert metrics["train/num_tokens"] == 18 and metrics["train/grad_norm"] > 0
    after = dict(trainer.weights("float32"))
    changed = {name.split(".")[1] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {"vision_tower", "multi_modal_projector", "language_model"} <= changed
    trainer.save(tmp_path)
    trainer.export(tmp_path / "model")
    assert AutoProcessor.from_pretrained(tmp_path / "model").image_token == "<image>"
    other = make_trainer(*flags, model=llava)
    other.load(tmp_path)
    for name, tensor in other.weights("float32"):
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=0)


def test_token_types_belong_to_the_prompt_that_was_processed_also_in_a_later_turn(make_args, qwen_vl):
    sample = qwen_vl_samples()[0]
    sample.append([12, 13], trainable=False)
    sample.append([14, 15], logprobs=[-1.0, -1.0])
    sample.turn_ends = [4, 8]
    sample.weight_versions[:4] = sample.weight_versions[6:] = 0
    parts = split_turns(sample)
    policy = load_policy(make_args(model=qwen_vl), ALONE)
    logprobs, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples(parts), CPU))
    whole, _ = policy.logprobs(TensorBatch.of(TrainBatch.from_samples([sample]), CPU))
    torch.testing.assert_close(logprobs, torch.cat([whole[:4], whole[6:]]), atol=1e-5, rtol=1e-4)
