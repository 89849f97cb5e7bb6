"""The model behind the embedded engine: loading, its forward over a slot cache, and a self-check of the two together.

Any causal LM of transformers whose attention uses the standard Cache interface works. Positions and masks are given
explicitly, so sequences of different lengths share a forward. A family that needs more (recurrent states, position
biases made from a 2-D mask, chunked attention) is refused at load time, by name or by the self-check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from slime_core.engines.embedded.slot_cache import SlotCache

FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN = float("-inf")


class ModelLoadError(ValueError):
    """A model directory that cannot be served; the message says why in one line."""


class LanguageModel:
    """A causal LM and what the engine must know about it.

    vocab_size, context_length: in tokens. eos_ids: every id that ends a text, from the generation config, the config
    and the tokenizer. tokenizer: None when the directory has none (then only token ids are accepted).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, context_length: int | None):
        self.model = model.requires_grad_(False).train(False)
        self.dtype: torch.dtype = model.dtype  # kept, as the model's property walks over its parameters
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(self.config.vocab_size)
        self.context_length = _context_length(self.config, context_length)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.layer_types = _layer_types(self.config)
        self.window = getattr(self.config, "sliding_window", None)
        self.kv_token_bytes = 0  # keys and values of one token over all layers, measured by self_check

    @torch.inference_mode()
    def forward(
        self, cache: SlotCache, start: int, tokens: torch.Tensor, positions: torch.Tensor, width: int, keep_all: bool
    ) -> torch.Tensor:
        """Run new tokens of the cache's rows start, start+1, ... and store their keys and values.

        tokens, positions: [rows, queries] int64; a position of -1 marks left padding. width: how many positions
        attention covers, at least the largest position + 1. Returns logits [rows, queries, V], or [rows, 1, V] of the
        last query unless keep_all.
        """
        padded = positions < 0
        rows, queries = tokens.shape
        write_at = positions
        if queries > 1:
            write_at = positions.masked_fill(padded, cache.padding_position)
            positions = positions.masked_fill(padded, 0)
        cache.select(start, start + rows, write_at, width)
        output = self.model(
            input_ids=tokens,
            attention_mask=self._masks(positions, width),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=0 if keep_all else 1,
        )
        logits: torch.Tensor = output.logits
        return logits if keep_all else logits[:, -1:]

    def _masks(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [rows, 1, queries, width]; one a kind of layer where the model mixes kinds."""
        distance = positions[:, None, :, None] - torch.arange(width)
        masks = {kind: self._mask(distance, kind) for kind in self.layer_types}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, distance: torch.Tensor, kind: str) -> torch.Tensor:
        visible = distance >= 0
        if kind == SLIDING and self.window is not None:
            visible &= distance < self.window
        zero = torch.zeros((), dtype=self.dtype)
        return torch.where(visible, zero, torch.full_like(zero, HIDDEN))

    @torch.inference_mode()
    def self_check(self) -> None:
        """Compare the slot cache with a plain forward on random tokens; raise ModelLoadError where they differ."""
        longest = 24 if self.window is None or self.window > 256 else self.window + 8
        length = min(longest, self.context_length)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (2, length), generator=generator)
        try:
            expected = self.model(input_ids=tokens, use_cache=False).logits.float()
            got = self._stepwise_logits(tokens)
        except Exception as error:  # a family's own code may fail in any way on an unknown cache
            raise ModelLoadError(f"{self._name()} does not run over the engine's slot cache: {error!r}") from error
        difference = (got - expected[:, -2:]).abs().max().item()
        allowed = 1e-3 if self.dtype == torch.float32 else 0.1
        if not difference <= allowed * max(1.0, expected.abs().max().item()):
            raise ModelLoadError(
                f"{self._name()} gives other logits over the engine's slot cache (difference {difference:.3g}); "
                "this family cannot be served by the embedded engine"
            )

    def _stepwise_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the last two positions: rows of unequal start prefilled in two chunks, then one decode step."""
        rows, length = tokens.shape
        cache = SlotCache()
        cache.reserve(rows, length)
        positions = torch.arange(length).repeat(rows, 1)
        # the second row enters left-padded by one and is completed in the second chunk
        middle = max(length // 2, 1)
        first = torch.stack([tokens[0, :middle], tokens[1, :middle].roll(1)])
        first_positions = torch.stack([positions[0, :middle], torch.arange(middle) - 1])
        self.forward(cache, 0, first, first_positions, middle, keep_all=False)
        self.forward(cache, 1, tokens[1:, middle - 1 : middle], positions[1:, middle - 1 : middle], middle, False)
        chunk = slice(middle, length - 1)
        before = self.forward(cache, 0, tokens[:, chunk], positions[:, chunk], length - 1, keep_all=False)
        last = self.forward(cache, 0, tokens[:, -1:], positions[:, -1:], length, keep_all=False)
        self.kv_token_bytes = cache.bytes_per_token()
        return torch.cat([before, last], dim=1).float()

    def _name(self) -> str:
        return f"model type {self.config.model_type!r}"


def load_language_model(path: str | Path, dtype: torch.dtype, context_length: int | None = None) -> LanguageModel:
    """Load a Hugging Face model directory for serving, checked; raises ModelLoadError with one line."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{path} is not a model directory: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            # sdpa knows no soft-capped attention scores
            attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa",
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be loaded: {_first_line(error)}") from error
    language_model = LanguageModel(model, _load_tokenizer(directory), context_length)
    language_model.self_check()
    return language_model


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((directory / name).is_file() for name in names):
        return None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelLoadError(f"the tokenizer in {directory} cannot be loaded: {_first_line(error)}") from error
    return tokenizer  # type: ignore[no-any-return]


def _context_length(config: Any, wanted: int | None) -> int:
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if wanted is None:
        if longest is None:
            raise ModelLoadError("the model's config does not say its context length; pass --context-length")
        return int(longest)
    if longest is not None and wanted > longest:
        raise ModelLoadError(f"--context-length {wanted} exceeds the model's own {longest} positions")
    return wanted


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    sources = [getattr(model.generation_config, "eos_token_id", None), getattr(model.config, "eos_token_id", None)]
    sources.append(getattr(tokenizer, "eos_token_id", None))
    ids: set[int] = set()
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return frozenset(ids)


def _layer_types(config: Any) -> tuple[str, ...]:
    listed = getattr(config, "layer_types", None)
    kinds = set(listed) if listed else {SLIDING if getattr(config, "sliding_window", None) else FULL}
    if unknown := sorted(kinds - {FULL, SLIDING}):
        raise ModelLoadError(
            f"model type {config.model_type!r} has {', '.join(unknown)} layers; the embedded engine serves "
            "full and sliding-window attention only"
        )
    return tuple(sorted(kinds))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
