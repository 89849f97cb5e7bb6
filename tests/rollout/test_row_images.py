"""Images of a row: every form becomes a data URI, at its place in the prompt; what does not fit is refused at load."""

import base64

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_core import DataError
from slime_core.rollout.rows import open_prompt_file

PNG = b"\x89PNG\r\n\x1a\n" + b"one"
JPEG = b"\xff\xd8\xff" + b"two"
PNG_URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
JPEG_URI = "data:image/jpeg;base64," + base64.b64encode(JPEG).decode()


@pytest.fixture
def args(make_args):
    return make_args("--multimodal-keys", "image=images", "--apply-chat-template")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(PNG)
    (tmp_path / "two.jpg").write_bytes(JPEG)
    return tmp_path


def first(args, path):
    return open_prompt_file(args, str(path)).sample(args, 0)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(value):
    return {"type": "text", "text": value}


IMAGE = {"type": "image"}


def test_paths_and_uris_become_data_uris_in_the_order_of_their_places(args, files, write_rows):
    images = ["pictures/one.png", {"path": str(files / "two.jpg")}, JPEG_URI, "https://example.org/x.png"]
    sample = first(args, write_rows([{"prompt": "<image><image> and <image>, <image>?", "images": images}]))
    assert sample.multimodal == {"image": [PNG_URI, JPEG_URI, JPEG_URI, "https://example.org/x.png"]}
    assert sample.prompt == user(IMAGE, IMAGE, text(" and "), IMAGE, text(", "), IMAGE, text("?"))


def test_parquet_holds_images_as_bytes(args, tmp_path):
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([[{"bytes": PNG, "path": "gone.png"}], []], pa.list_(struct))
    table = pa.table({"prompt": ["what is <image>?", "no picture"], "images": images})
    pq.write_table(table, tmp_path / "p.parquet")
    file = open_prompt_file(args, str(tmp_path / "p.parquet"))
    with_image, without = (file.sample(args, row) for row in range(2))
    assert (with_image.prompt, with_image.multimodal) == (
        user(text("what is "), IMAGE, text("?")),
        {"image": [PNG_URI]},
    )
    assert (without.prompt, without.multimodal) == ("no picture", None)


def test_a_message_part_may_bring_its_own_image_among_those_of_the_field(args, files, write_rows):
    parts = [{"type": "image_url", "image_url": {"url": JPEG_URI}}, text("or <image>"), {"type": "image"}]
    sample = first(args, write_rows([{"prompt": user(*parts), "images": ["pictures/one.png", "two.jpg"]}]))
    assert sample.multimodal == {"image": [JPEG_URI, PNG_URI, JPEG_URI]}
    assert sample.prompt == user(IMAGE, text("or "), IMAGE, IMAGE)


def test_images_of_message_parts_need_no_field(make_args, write_rows):
    prompt = user({"type": "image", "image": PNG_URI}, text("what does <image> mean in HTML?"))
    sample = first(make_args(), write_rows([{"prompt": prompt}]))
    assert sample.multimodal == {"image": [PNG_URI]}
    assert sample.prompt == user(IMAGE, text("what does <image> mean in HTML?"))


def test_text_without_a_chat_template_keeps_the_models_own_marks(make_args, files, write_rows):
    args = make_args("--multimodal-keys", "image=images")
    sample = first(args, write_rows([{"prompt": "<|pad|> what?", "images": "two.jpg"}]))
    assert (sample.prompt, sample.multimodal) == ("<|pad|> what?", {"image": [JPEG_URI]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": []}, "line 1: the prompt has 1 places for images, the row 0 images"),
        ({"prompt": "<image>", "image": [PNG_URI]}, "1 places for images, the row 0 images.* --multimodal-keys"),
        ({"prompt": "x", "images": [PNG_URI]}, "0 places for images, the row 1 images"),
        ({"prompt": [{"role": "user", "content": "x"}], "images": [PNG_URI]}, "0 places for images, the row 1"),
        ({"prompt": "<image>", "images": ["gone.png"]}, r"line 1: there is no image file .*gone\.png"),
        ({"prompt": "<image>", "images": [3]}, "an image must be bytes, a path, a data or http URI"),
        ({"prompt": "<image>", "images": [{"bytes": None, "path": None}]}, "an image must be bytes"),
    ],
)
def test_images_that_do_not_fit_are_refused_at_load(args, write_rows, row, message):
    path = write_rows([row])
    with pytest.raises(DataError, match=message):
        open_prompt_file(args, str(path))


def test_bytes_that_are_no_image_are_refused(args, tmp_path):
    pq.write_table(pa.table({"prompt": ["<image>"], "images": [[b"GIF plain text"]]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"row 0: b'GIF plain te'\.\.\. is the beginning of no PNG"):
        open_prompt_file(args, str(tmp_path / "p.parquet"))


def test_an_image_that_vanished_since_is_named(args, files, write_rows):
    file = open_prompt_file(args, str(write_rows([{"prompt": "<image>", "images": ["two.jpg"]}])))
    (files / "two.jpg").unlink()
    with pytest.raises(DataError, match=r"line 1: (an image cannot be read|there is no image file).*two\.jpg"):
        file.sample(args, 0)
