import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_core import DataError
from slime_search_r1.bm25 import Bm25
from slime_search_r1.documents import Document, read_documents
from slime_search_r1.local import open_index

WALES = [
    {"title": "Cardiff", "text": "the capital of Wales"},
    {"title": "Swansea", "text": "a city on the coast of Wales"},
    {"title": "Tea", "text": "a hot drink"},
]


@pytest.fixture
def found(write_corpus):
    """`found(query, n, rows)` -> titles, best first."""

    def search(query, num_results=3, rows=WALES):
        index = open_index(write_corpus(rows), None, Bm25())
        return [hit.document.title for hit in index.search(query, num_results)]

    return search


def test_the_best_match_comes_first(found):
    assert found("capital of Wales") == ["Cardiff", "Swansea"]


def test_a_title_is_searched_like_the_text(found):
    assert found(" swansea ") == ["Swansea"]


@pytest.mark.parametrize("query", ["", "zebra", "???"])
def test_what_matches_nothing_finds_nothing(found, query):
    assert found(query) == []


def test_more_results_than_documents_gives_what_there_is(found):
    assert len(found("a", 10)) == 2


def test_of_equally_good_documents_the_first_come_first(found):
    rows = [{"title": str(number), "text": "same words"} for number in range(50)]
    assert found("same", 5, rows) == ["0", "1", "2", "3", "4"]


def test_words_of_one_letter_are_found(found):
    rows = [{"title": key, "text": value} for key, value in {"a": "1", "b": "2", "c": "3"}.items()]
    assert [found(key, 1, rows) for key in "abc"] == [["a"], ["b"], ["c"]]


def test_a_corpus_without_a_word_finds_nothing(found):
    assert found("anything", 3, [{"text": "..."}]) == []


def test_rows_of_every_form_are_read(write_corpus):
    rows = [{"title": "Tea", "text": "a drink"}, {"text": "alone"}, {"contents": '"Wales"\na country'}]
    read = [Document("Tea", "a drink"), Document("", "alone"), Document("Wales", "a country")]
    assert list(read_documents(write_corpus(rows))) == read


def test_parquet_is_read_like_json_lines(tmp_path):
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"id": [1, 2], "contents": ['"A"\nx', '"B"\ny']}), path)
    assert list(read_documents(path)) == [Document("A", "x"), Document("B", "y")]
    index = open_index(path, None, Bm25())
    assert [hit.document for hit in index.search("y", 3)] == [Document("B", "y")]


def test_an_index_is_built_once_and_mapped_into_memory(write_corpus):
    corpus = write_corpus(WALES)
    open_index(corpus, None, Bm25())
    directory = corpus.with_name("corpus.jsonl.bm25")
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    index = open_index(corpus, None, Bm25())
    assert index.search("tea", 1)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    assert f"{directory}/data.csc.index.npy" in mapped and f"{directory}/documents.arrow" in mapped


def test_a_changed_corpus_is_indexed_anew(write_corpus, found):
    assert found("newcomer") == []
    assert found("newcomer", rows=[*WALES, {"title": "New", "text": "newcomer"}]) == ["New"]


def test_an_index_needs_its_corpus_no_more(write_corpus):
    corpus = write_corpus(WALES)
    open_index(corpus, None, Bm25())
    os.unlink(corpus)
    index = open_index(None, corpus.with_name("corpus.jsonl.bm25"), Bm25())
    assert index.search("capital", 1)[0].document == Document("Cardiff", "the capital of Wales")


def test_nothing_half_built_is_left_by_a_bad_row(write_corpus, tmp_path):
    corpus = write_corpus([*WALES, {"title": "no text"}])
    with pytest.raises(DataError, match="row 4"):
        open_index(corpus, None, Bm25())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "corpus.jsonl.bm25.lock"]


def test_processes_that_build_at_the_same_time_all_get_an_index(write_corpus, tmp_path):
    corpus = write_corpus(WALES * 200)
    code = (
        "import sys; from pathlib import Path; from slime_search_r1.bm25 import Bm25; "
        "from slime_search_r1.local import open_index; "
        "print(open_index(Path(sys.argv[1]), None, Bm25()).search('capital', 1)[0].document.title)"
    )
    command = [sys.executable, "-c", code, str(corpus)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [builder.communicate(timeout=60)[0] for builder in builders] == ["Cardiff\n"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus.jsonl",
        "corpus.jsonl.bm25",
        "corpus.jsonl.bm25.lock",
    ]


def test_a_directory_of_something_else_is_not_overwritten(write_corpus, tmp_path):
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("work of years")
    with pytest.raises(DataError, match="not an index"):
        open_index(write_corpus(WALES), other, Bm25())
    assert (other / "thesis.txt").exists()


def test_an_index_of_another_kind_is_refused(write_corpus):
    corpus = write_corpus(WALES)
    open_index(corpus, None, Bm25())
    directory = corpus.with_name("corpus.jsonl.bm25")
    about = json.loads((directory / "about.json").read_text())
    (directory / "about.json").write_text(json.dumps(about | {"kind": "dense"}))
    with pytest.raises(DataError, match="no bm25 index"):
        open_index(None, directory, Bm25())


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"title": "no text"}', '{"title": 1, "text": "x"}'])
def test_a_bad_row_is_named(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"title": "a", "text": "b"}}\n{line}\n')
    with pytest.raises(DataError, match=r"(line|row) 2"):
        list(read_documents(path))


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_a_missing_or_empty_corpus_names_the_flag(tmp_path, content):
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="--search-r1-corpus"):
        list(read_documents(path))


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "corpus.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"corpus\.parquet"):
        list(read_documents(path))
