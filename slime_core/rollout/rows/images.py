"""Images of a row: where they come from, where they stand in the prompt, and their form for the engine, data URIs."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from slime_core.errors import DataError

ImageSource: TypeAlias = bytes | Path | str
"""The encoded image, a file that holds it, or a URI."""

IMAGE_MARK = "<image>"
"""Stands in a prompt's text where an image goes."""

_IMAGE_PARTS = {"image", "image_url", "input_image"}
"""Types of a message's parts that are images."""

_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"BM"), "image/bmp"),
    (re.compile(rb"II\*\x00|MM\x00\*"), "image/tiff"),
)
"""How an encoded image begins, and its media type."""


def image_source(value: Any, folder: Path, where: str) -> ImageSource:
    """Where an image comes from: bytes, a path (relative to `folder`), a data or http URI, or an object with one.

    Raises:
        DataError: when the value is none of these, or no file lies at the path.
    """
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "url", "path") if value.get(key)), None)
    if isinstance(value, bytes) and value:
        _media_type(value, where)
        return value
    if isinstance(value, str) and value:
        if value.startswith(("data:image/", "http://", "https://")):
            return value
        path = folder / value.removeprefix("file://")
        if not path.is_file():
            raise DataError(f"{where}: there is no image file {path}.")
        return path
    raise DataError(
        f"{where}: an image must be bytes, a path, a data or http URI, or an object with 'bytes', 'url' or 'path'."
    )


def data_uri(source: ImageSource, where: str) -> str:
    """The image as a data URI; an http address stays one, for the engine to fetch.

    Raises:
        DataError: when its file cannot be read or is no image.
    """
    if isinstance(source, str):
        return source
    try:
        content = source.read_bytes() if isinstance(source, Path) else source
    except OSError as error:
        raise DataError(f"{where}: an image cannot be read: {error}") from None
    return f"data:{_media_type(content, where)};base64,{base64.b64encode(content).decode()}"


def _media_type(content: bytes, where: str) -> str:
    for signature, media_type in _SIGNATURES:
        if signature.match(content):
            return media_type
    raise DataError(f"{where}: {content[:12]!r}... is the beginning of no PNG, JPEG, GIF, WebP, BMP or TIFF image.")


def place_images(
    prompt: str | list[dict[str, Any]],
    images: list[ImageSource],
    *,
    folder: Path,
    as_messages: bool,
    split_text: bool,
    where: str,
) -> tuple[str | list[dict[str, Any]], list[ImageSource]]:
    """The prompt with a part `{"type": "image"}` at every image's place, and the images in that order.

    Places are image parts and, with `split_text`, every `<image>` in a text; an image part that brings its own image
    keeps it, the others take `images` one after the other. A text prompt becomes a user message where `as_messages`
    says that a chat template will render it; without one it marks its places in the model's own way and stays.

    Raises:
        DataError: when places and images are not as many.
    """
    if isinstance(prompt, str):
        if not as_messages:
            return prompt, images
        if not images and not (split_text and IMAGE_MARK in prompt):
            return prompt, images
        prompt = [{"role": "user", "content": prompt}]
    waiting, placed, num_places = iter(images), [], 0
    messages = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            if not split_text or IMAGE_MARK not in content:
                messages.append(message)
                continue
            content = [{"type": "text", "text": content}]
        parts = []
        for part in _split(content or [], split_text):
            if part.get("type") in _IMAGE_PARTS:
                num_places += 1
                own = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key)), None)
                image = next(waiting, None) if own is None else image_source(own, folder, where)
                placed += [] if image is None else [image]
                part = {"type": "image"}
            parts.append(part)
        messages.append({**message, "content": parts} if content else message)
    left = len(list(waiting))
    if len(placed) != num_places or left:
        raise DataError(
            f"{where}: the prompt has {num_places} places for images, the row {len(placed) + left} images; mark each "
            f"place with {IMAGE_MARK} or an image part, and name the field with --multimodal-keys image=FIELD."
        )
    return messages, placed


def _split(parts: list[dict[str, Any]], split_text: bool) -> Iterator[dict[str, Any]]:
    """The parts, with every `<image>` in a text as a part of its own."""
    for part in parts:
        text = part.get("text")
        if not split_text or part.get("type") != "text" or not isinstance(text, str) or IMAGE_MARK not in text:
            yield part
            continue
        for piece in re.split(f"({IMAGE_MARK})", text):
            if piece:
                yield {"type": "image"} if piece == IMAGE_MARK else {"type": "text", "text": piece}
