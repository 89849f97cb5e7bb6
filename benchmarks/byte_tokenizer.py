"""The tokenizer of models that benchmarks make: one token a byte."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """256 tokens for the bytes, then `eos_token` and whatever other special tokens the options name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=words, **options)
    return tokenizer
