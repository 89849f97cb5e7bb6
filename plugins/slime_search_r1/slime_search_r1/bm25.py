"""BM25 over the words of title and text, through the package bm25s."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from slime_search_r1.documents import Document

WORD = re.compile(r"\w+")


class Bm25:
    """Lucene's variant of BM25 (Robertson and Zaragoza 2009); no stop words, no stemming."""

    kind = "bm25"

    def __init__(self) -> None:
        self._index: Any = None

    def settings(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def build(self, directory: Path, documents: Iterable[Document]) -> None:
        """Index the documents; the words of all of them are in memory meanwhile, a number each."""
        import bm25s

        vocabulary: dict[str, int] = {}
        ids = [
            # a document without a word has the empty one, which no query asks for
            [
                vocabulary.setdefault(word, len(vocabulary))
                for word in words(f"{document.title} {document.text}") or [""]
            ]
            for document in documents
        ]
        index = bm25s.BM25()
        index.index((ids, vocabulary), show_progress=False)
        index.save(directory, show_progress=False)

    def open(self, directory: Path) -> None:
        """Map the scores into memory; the vocabulary is read."""
        import bm25s

        self._index = bm25s.BM25.load(directory, mmap=True, show_progress=False)

    def best(self, query: str, num_results: int) -> list[tuple[int, float]]:
        """Documents that share a word with the query; of equal ones the first in the corpus."""
        if not (asked := words(query)):
            return []
        scores: Any = self._index.get_scores(asked)
        lowest = np.partition(scores, -num_results)[-num_results]
        able = np.flatnonzero((scores >= lowest) & (scores > 0))
        order = able[np.argsort(-scores[able], kind="stable")][:num_results]
        return [(int(position), float(scores[position])) for position in order]


def words(text: str) -> list[str]:
    """Lower-case words, single letters and digits included."""
    return WORD.findall(text.casefold())
