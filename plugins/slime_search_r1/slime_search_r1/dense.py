"""Sentence embeddings compared by inner product: sentence-transformers and FAISS, the extra `dense`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime_core import OptionError
from slime_search_r1.documents import Document, in_batches

INDEX = "embeddings.faiss"
DOCUMENTS_AT_A_TIME = 1024


class Dense:
    """Normalised embeddings in a flat index: exact, a scan of all documents a query."""

    kind = "dense"

    def __init__(self, model: str, query_prefix: str, document_prefix: str) -> None:
        import faiss
        from sentence_transformers import SentenceTransformer

        self._faiss: Any = faiss
        self._name, self._query_prefix, self._document_prefix = model, query_prefix, document_prefix
        try:
            # safetensors alone: other weight files are pickles
            self._model: Any = SentenceTransformer(model, model_kwargs={"use_safetensors": True})
        except (OSError, ValueError) as error:
            raise OptionError(f"--search-r1-embedding-model {model} cannot be loaded: {error}") from None
        self._index: Any = None
        self._one_at_a_time = threading.Lock()

    def settings(self) -> dict[str, Any]:
        """The model, and what is written before each document."""
        return {"model": self._name, "document_prefix": self._document_prefix}

    def build(self, directory: Path, documents: Iterable[Document]) -> None:
        """Embed the documents, a batch at a time; the embeddings are in memory meanwhile."""
        index: Any = None
        for rows in in_batches(documents, DOCUMENTS_AT_A_TIME):
            vectors = self._embed([f"{self._document_prefix}{row.title}\n{row.text}".strip() for row in rows])
            index = self._faiss.IndexFlatIP(vectors.shape[1]) if index is None else index
            index.add(vectors)
        self._faiss.write_index(index, str(directory / INDEX))

    def open(self, directory: Path) -> None:
        """Map the embeddings into memory."""
        self._index = self._faiss.read_index(str(directory / INDEX), self._faiss.IO_FLAG_MMAP_IFC)

    def best(self, query: str, num_results: int) -> list[tuple[int, float]]:
        """The documents whose embeddings are nearest to the query's."""
        scores, positions = self._index.search(self._embed([self._query_prefix + query]), num_results)
        return [(int(p), float(score)) for p, score in zip(positions[0], scores[0], strict=True) if p >= 0]

    def _embed(self, texts: list[str]) -> Any:
        """float32 [len(texts), width], each of length 1."""
        with self._one_at_a_time:  # a fast tokenizer may be used by one thread only
            return self._model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)
