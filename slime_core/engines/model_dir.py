"""What a run reads of a model directory besides the weights: tokenizer, context length, rendered prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

UNKNOWN_CONTEXT = 1 << 20
"""Tokens assumed of a model whose config states no limit."""


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        OptionError: when the directory holds none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"--model {model} has no tokenizer that loads: {error}") from None


def load_processor(model: str) -> ProcessorMixin | None:
    """What turns images into the model's inputs; None where the model takes none.

    Raises:
        OptionError: when the directory has one that does not load.
    """
    from transformers import AutoProcessor

    if not any((Path(model) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        return AutoProcessor.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = " ".join(str(error).split())
        raise OptionError(f"the processor of --model {model} for images does not load: {why}") from None


def context_length(model: str) -> int:
    """Most tokens, prompt and response together, that the model's config allows."""
    config = json.loads((Path(model) / "config.json").read_text())
    config = config.get("text_config", config)
    for key in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return UNKNOWN_CONTEXT


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    *,
    apply_chat_template: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt: text as it stands, chat messages (and text, if asked) through the chat template.

    Raises:
        DataError: when the chat template refuses the messages.
    """
    text = render_prompt(
        tokenizer, prompt, apply_chat_template=apply_chat_template, tools=tools, template_kwargs=template_kwargs
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def render_prompt(
    template: PreTrainedTokenizerBase | ProcessorMixin,
    prompt: str | list[dict[str, Any]],
    *,
    apply_chat_template: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The text that is encoded: `encode_prompt` without the encoding.

    Raises:
        DataError: when the chat template refuses the messages.
    """
    if isinstance(prompt, str) and not apply_chat_template:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = template.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **(template_kwargs or {})
        )
    except Exception as error:  # jinja2 and the template's own raise_exception raise many kinds
        raise DataError(f"the chat template refused a prompt: {type(error).__name__}: {error}") from None
    return str(text)
