"""The local index: built once from a corpus into a directory, and mapped into memory from then on."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock

from slime_core import DataError
from slime_search_r1.documents import Document, DocumentFile, read_documents, write_documents

logger = logging.getLogger(__name__)

FORMAT = 1
DOCUMENTS, ABOUT = "documents.arrow", "about.json"


class Hit(NamedTuple):
    """A document that was found, and how well it fits; the higher the better."""

    document: Document
    score: float


class Ranking(Protocol):
    """How an index finds positions: BM25 or embeddings."""

    kind: str

    def settings(self) -> dict[str, Any]:
        """What else an index depends on besides its corpus."""

    def build(self, directory: Path, documents: Iterable[Document]) -> None:
        """Write the index of these documents into the directory."""

    def open(self, directory: Path) -> None:
        """Map the index into memory."""

    def best(self, query: str, num_results: int) -> list[tuple[int, float]]:
        """Positions and scores of at most `num_results` documents, best first."""


class LocalIndex:
    """Searches the documents of a directory; calls may come from several threads."""

    def __init__(self, directory: Path, ranking: Ranking) -> None:
        self.documents = DocumentFile(directory / DOCUMENTS)
        self._ranking = ranking
        ranking.open(directory)

    def search(self, query: str, num_results: int) -> list[Hit]:
        """At most `num_results` documents, best first; none where nothing fits."""
        found = self._ranking.best(query, min(num_results, len(self.documents)))
        return [Hit(self.documents[position], score) for position, score in found]


def open_index(corpus: Path | None, directory: Path | None, ranking: Ranking) -> LocalIndex:
    """The index of a corpus; built first where there is none, or one of another state of the corpus.

    Args:
        corpus: a JSONL or Parquet file; None takes the directory as it is.
        directory: where the index is or will be; by default beside the corpus, `<corpus>.<kind>`.

    Raises:
        DataError: when the corpus or the directory cannot be used.
    """
    if directory is None:
        if corpus is None:
            raise DataError("a local index needs a corpus or the directory of an index.")
        directory = corpus.with_name(f"{corpus.name}.{ranking.kind}")
    try:
        if corpus is not None and _about(directory) != _wanted(corpus, ranking):
            directory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{directory}.lock"):  # whoever comes second waits, and finds the index
                if _about(directory) != _wanted(corpus, ranking):
                    _build(corpus, directory, ranking)
        elif corpus is None:
            _require(directory, {"kind": ranking.kind, **ranking.settings()})
        return LocalIndex(directory, ranking)
    except OSError as error:
        raise DataError(
            f"the index {directory} cannot be used: {error}; check --search-r1-corpus and --search-r1-index."
        ) from None


def _wanted(corpus: Path, ranking: Ranking) -> dict[str, Any]:
    state = corpus.stat()
    corpus_is = {"size_bytes": state.st_size, "modified_ns": state.st_mtime_ns}
    return {"format": FORMAT, "kind": ranking.kind, **corpus_is, **ranking.settings()}


def _require(directory: Path, wanted: dict[str, Any]) -> None:
    about = _about(directory) or {}
    if about.get("kind") != wanted["kind"]:
        raise DataError(f"{directory} holds no {wanted['kind']} index; name its corpus too, to build one there.")
    for name, value in wanted.items():
        if about.get(name) != value:
            raise DataError(
                f"the index {directory} was made with {name} {about.get(name)!r}, not {value!r}; give the flags it was "
                "made with, or name its corpus to build it anew."
            )


def _about(directory: Path) -> Any:
    """What the directory's index was made of; None where there is no finished index."""
    try:
        return json.loads((directory / ABOUT).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _build(corpus: Path, directory: Path, ranking: Ranking) -> None:
    """Build beside the directory, then take its place: what is half done is never opened."""
    if directory.exists() and _about(directory) is None and any(directory.iterdir()):
        raise DataError(f"{directory} is not an index and not empty; --search-r1-index needs a directory of its own.")
    wanted = _wanted(corpus, ranking)
    logger.warning("building the %s index of %s in %s", ranking.kind, corpus, directory)
    fresh = directory.with_name(f"{directory.name}.building")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        ranking.build(fresh, write_documents(fresh / DOCUMENTS, read_documents(corpus)))
        (fresh / ABOUT).write_text(json.dumps(wanted))
        if directory.exists():
            shutil.rmtree(directory)
        fresh.rename(directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
