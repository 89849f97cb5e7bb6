import json

import pytest

from slime_core import DataError
from slime_search_r1.corpus import Corpus, Document, read_corpus


@pytest.fixture
def corpus() -> Corpus:
    texts = {"Cardiff": "the capital of Wales", "Swansea": "a city on the coast of Wales", "Tea": "a hot drink"}
    return Corpus([Document(title, f"{title}: {text}") for title, text in texts.items()])


def test_the_best_match_comes_first(corpus):
    cardiff, swansea = corpus.search("capital of Wales", 2)
    assert cardiff == "Cardiff: the capital of Wales"
    assert swansea.startswith("Swansea")


def test_a_query_that_is_a_title_finds_it_first(corpus):
    assert corpus.search(" swansea ", 1) == ["Swansea: a city on the coast of Wales"]


@pytest.mark.parametrize("query", ["", "zebra", "???"])
def test_what_matches_nothing_finds_nothing(corpus, query):
    assert corpus.search(query, 3) == []


def test_more_results_than_documents_gives_what_there_is(corpus):
    assert len(corpus.search("a", 10)) == 2


def test_keys_of_one_letter_are_found():
    corpus = Corpus([Document(key, value) for key, value in {"a": "1", "b": "2", "c": "3"}.items()])
    assert [corpus.search(key, 1) for key in "abc"] == [["1"], ["2"], ["3"]]


def test_rows_with_a_title_show_it_and_rows_with_a_key_do_not(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"title": "Tea", "text": "a drink"}, {"key": "k7", "text": "42"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = read_corpus(path)
    assert corpus.search("tea", 1) == ["Tea: a drink"]
    assert corpus.search("k7", 1) == ["42"]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"text": "no title"}', '{"title": 1, "text": "x"}'])
def test_a_bad_row_is_named(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"title": "a", "text": "b"}}\n{line}\n')
    with pytest.raises(DataError, match="line 2"):
        read_corpus(path)


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_a_missing_or_empty_corpus_names_the_flag(tmp_path, content):
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="--search-r1-corpus"):
        read_corpus(path)
