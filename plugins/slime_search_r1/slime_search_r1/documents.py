"""Documents: rows of a JSONL or Parquet corpus, kept in an Arrow file that is mapped into memory, not read into it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from slime_core import DataError

T = TypeVar("T")

SCHEMA = pa.schema({"title": pa.string(), "text": pa.string()})
ROWS_AT_A_TIME = 4096


class Document(NamedTuple):
    """What a search shows."""

    title: str
    text: str

    @classmethod
    def of_contents(cls, contents: str) -> Document:
        """Search-R1's form: the title, in quotes, is the first line."""
        first, line_break, rest = contents.partition("\n")
        return cls(first.strip().strip('"'), rest) if line_break else cls("", contents)


def read_documents(path: Path) -> Iterator[Document]:
    """The rows of a corpus, `{"title", "text"}`, `{"text"}` or Search-R1's `{"contents"}`; one at a time.

    Raises:
        DataError: when the file cannot be read, has no row, or a row is not such an object.
    """
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield _document(path, number, row)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"the corpus {path} cannot be read: {error}; check --search-r1-corpus.") from None
    if number == 0:
        raise DataError(f"the corpus {path} has no rows; --search-r1-corpus needs at least one document.")


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number} is not JSON: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        names = [name for name in ("title", "text", "contents") if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=names):
            yield from batch.to_pylist()


def _document(path: Path, number: int, row: Any) -> Document:
    match row:
        case {"title": str(title), "text": str(text)}:
            return Document(title, text)
        case {"contents": str(contents)}:
            return Document.of_contents(contents)
        case {"text": str(text)} if "title" not in row:
            return Document("", text)
    raise DataError(f'{path}, row {number} must have "text" and maybe "title", or "contents", all of them texts.')


def write_documents(path: Path, documents: Iterable[Document]) -> Iterator[Document]:
    """Write the documents to an Arrow file as they pass by."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for rows in in_batches(documents, ROWS_AT_A_TIME):
            writer.write_batch(pa.RecordBatch.from_pylist([row._asdict() for row in rows], SCHEMA))
            yield from rows


def in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in order, `size` at a time."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class DocumentFile:
    """The documents of such a file, by position."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._titles, self._texts = table["title"], table["text"]

    def __len__(self) -> int:
        return len(self._titles)

    def __getitem__(self, position: int) -> Document:
        return Document(self._titles[position].as_py(), self._texts[position].as_py())
