"""Tokens of prompts, and what the model's own processor makes of their images."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np

from slime_core.engines.model_dir import encode_prompt, load_processor, render_prompt
from slime_core.errors import DataError
from slime_core.options import Options
from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

IMAGE_TIMEOUT_S = 30.0
"""For an image behind an http address."""


class Prompts:
    """Gives samples their prompt's tokens, the way that the options ask for; for worker threads."""

    def __init__(self, args: Options, tokenizer: PreTrainedTokenizerBase) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._processing = threading.Lock()

    def tokenize(self, sample: Sample) -> None:
        """Give the sample its prompt's tokens, if it has a prompt and no tokens yet.

        Where it has images and the model a processor, its tokens are those that the model sees, every image as many
        as it takes, and `sample.processed` the arrays that go with them.

        Raises:
            DataError: when the prompt cannot be rendered, or an image not be read.
        """
        if not sample.prompt or len(sample.tokens):
            return
        images = (sample.multimodal or {}).get("image")
        with _naming_the_row_of(sample):
            if images and self._processor is not None:
                tokens = self._process(sample, images)
            else:
                tokens = encode_prompt(self._tokenizer, sample.prompt, **self._template(sample))
        sample.tokens = np.asarray(tokens, np.int32)

    def readable(self, sample: Sample) -> bool:
        """`tokenize`, or False where that fails and `--skip-bad-rows` leaves such rows out."""
        try:
            self.tokenize(sample)
        except DataError as error:
            if not self._args.skip_bad_rows:
                raise
            logger.warning("left out a row: %s", error)
            return False
        return True

    def restore(self, group: Group) -> None:
        """Make the arrays of a group's images again where they are missing, as no file keeps them.

        Raises:
            DataError: when the processor gives other tokens than those a sample has.
        """
        known: dict[str, dict[str, Any]] = {}
        for sample in group:
            if sample.unexpanded_prompt is None:
                continue
            images = (sample.multimodal or {}).get("image") or []
            key = repr((sample.unexpanded_prompt, images))
            if sample.processed is None and key not in known:
                self._process_again(sample, images)
            known.setdefault(key, sample.processed or {})
            sample.processed = known[key]

    def _process_again(self, sample: Sample, images: list[str]) -> None:
        before = sample.tokens[: sample.prompt_length].tolist()
        with _naming_the_row_of(sample):
            now = self._process(sample, images) if self._processor is not None else []
        if now != before:
            raise DataError(
                f"the images of sample {sample.index} do not give the tokens that they gave before: the model's "
                "processor, or an image behind an address, has changed. Resume with the files that the run had."
            )

    @cached_property
    def _processor(self) -> ProcessorMixin | None:
        return load_processor(self._args.model)

    def _template(self, sample: Sample) -> dict[str, Any]:
        return {
            "apply_chat_template": self._args.apply_chat_template,
            "tools": sample.metadata.get("tools"),
            "template_kwargs": self._args.chat_template_kwargs,
        }

    def _process(self, sample: Sample, images: list[str]) -> list[int]:
        """The prompt's tokens with its images; sets `processed` and the prompt that engines get."""
        try:
            pictures = [_picture(image) for image in images]
        except Exception as error:  # Pillow, base64 and the HTTP client raise many kinds
            raise DataError(
                f"an image cannot be read: {type(error).__name__}: {error}. Mend it, or leave such rows out with "
                "--skip-bad-rows."
            ) from None
        text = render_prompt(self._processor, sample.prompt, **self._template(sample))
        with self._processing:  # tokenizers keep state while they encode
            short = list(self._tokenizer.encode(text, add_special_tokens=False))
            try:
                made = self._processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
            except (ValueError, IndexError, TypeError) as error:
                raise DataError(f"the model's processor refused a prompt with {len(images)} images: {error}") from None
        sample.processed = {
            name: np.asarray(value) for name, value in made.items() if name not in ("input_ids", "attention_mask")
        }
        sample.unexpanded_prompt = short
        tokens: list[int] = made["input_ids"][0].tolist()
        return tokens


@contextlib.contextmanager
def _naming_the_row_of(sample: Sample) -> Iterator[None]:
    """What goes wrong names the sample's row, or its prompt where a plugin made it."""
    try:
        yield
    except DataError as error:
        row = sample.origin or f"the prompt {str(sample.prompt)[:200]!r} of data set '{sample.dataset}'"
        raise DataError(f"{row}: {error}") from None


def _picture(image: str) -> Image.Image:
    """The image as engines decode it: its orientation tag is not followed, so that both see the same."""
    from PIL import Image

    if image.startswith("data:"):
        content = base64.b64decode(image.partition(",")[2])
    else:
        with urlopen(image, timeout=IMAGE_TIMEOUT_S) as answer:
            content = answer.read()
    return Image.open(io.BytesIO(content)).convert("RGB")
