"""A tiny LLaVA with its processor, whose images are four tokens each, and pictures for it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
IMAGE_TOKEN, TOKENS_AN_IMAGE = 3, 4
TEMPLATE = """{% for message in messages %}<s>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] -%}
{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{%- endfor %}{% endif %}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""


def save_vision_model(directory: Path) -> Path:
    """Write a freshly initialised model, its tokenizer and its processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(SPECIAL + alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
        chat_template=TEMPLATE,
    )
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlavaConfig(
        text_config={"model_type": "llama", **size, **text, "initializer_range": 0.2},
        vision_config={"model_type": "clip_vision_model", **size, "image_size": 28, "patch_size": 14},
        image_token_id=IMAGE_TOKEN,
        image_seq_length=TOKENS_AN_IMAGE,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    return directory


def picture(color: str, size: tuple[int, int] = (40, 30)) -> str:
    """A picture of one color as a data URI."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
