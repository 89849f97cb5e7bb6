"""Documents of a JSONL file, found by title or by BM25."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slime_core import DataError

WORD = re.compile(r"\w+")


class Document(NamedTuple):
    """One row: what names it, and what a search shows of it."""

    key: str
    shown: str


class Corpus:
    """A searchable set of documents."""

    def __init__(self, documents: list[Document]) -> None:
        import bm25s

        self._documents = documents
        self._position = {document.key.casefold(): i for i, document in reversed(list(enumerate(documents)))}
        self._index = bm25s.BM25()
        self._index.index([words(f"{d.key} {d.shown}") or [""] for d in documents], show_progress=False)

    def search(self, query: str, num_results: int) -> list[str]:
        """The texts of at most `num_results` documents, best first: one whose key is the query, then by BM25."""
        ranked = self._ranked(words(query), num_results + 1)
        exact = self._position.get(query.strip().casefold())
        if exact is not None:
            ranked = [exact, *(i for i in ranked if i != exact)]
        return [self._documents[i].shown for i in ranked[:num_results]]

    def _ranked(self, query: list[str], num_results: int) -> list[int]:
        """Positions of the documents that share a word with the query, best first."""
        if not query:
            return []
        scores: Any = self._index.get_scores(query)
        return [int(i) for i in np.argsort(-scores, kind="stable")[:num_results] if scores[i] > 0]


def words(text: str) -> list[str]:
    """Lower-case words, single letters and digits included: keys may be as short."""
    return WORD.findall(text.casefold())


def read_corpus(path: Path) -> Corpus:
    """Index the documents of a JSONL file, rows `{"title" or "key": ..., "text": ...}`.

    Raises:
        DataError: when the file cannot be read, is empty, or a row is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the corpus {path} cannot be read: {error}; check --search-r1-corpus.") from None
    documents = [_document(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not documents:
        raise DataError(f"the corpus {path} has no rows; --search-r1-corpus needs at least one document.")
    return Corpus(documents)


def _document(path: Path, number: int, line: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON: {error}.") from None
    match row:
        case {"title": str(title), "text": str(text)}:
            return Document(title, f"{title}: {text}")
        case {"key": str(key), "text": str(text)}:
            return Document(key, text)
    raise DataError(f'{path}, line {number} must be an object with "text" and "title" or "key", all texts.')
