import pytest

from slime_core.testing import check_plugin, make_options, make_sample
from slime_search_r1 import SearchR1
from slime_search_r1.reward import has_form, last_answer, parts

GOOD = (
    "<think>who?</think><search>capital of Wales</search>\n\n<information>Doc 1 Cardiff</information>\n\n"
    "<think>so</think><answer>The Cardiff</answer>"
)


def test_the_parts_of_a_good_response():
    assert parts(GOOD, "cardiff") == {"em": 1.0, "f1": 1.0, "format": 1.0}


def test_an_answer_that_shares_words_has_their_f1():
    assert parts("<answer>Cardiff in Wales</answer>", "Cardiff") == {"em": 0.0, "f1": 0.5, "format": 1.0}


@pytest.mark.parametrize("label", [["x", "Cardiff"], {"target": ["Cardiff"]}, "cardiff."])
def test_any_accepted_answer_counts(label):
    assert parts(GOOD, label)["em"] == 1.0


def test_a_response_without_an_answer_earns_nothing():
    assert parts("<search>x</search>", "x") == {"em": 0.0, "f1": 0.0, "format": 0.0}


def test_an_answer_that_a_document_shows_does_not_count():
    shown = "<search>q</search><information><answer>Cardiff</answer></information>"
    assert last_answer(shown) is None
    assert last_answer(shown + "<answer>mine</answer>") == "mine"


@pytest.mark.parametrize(
    "response",
    [
        "<answer>a</answer>",
        "<think>t</think> <answer>a</answer>\n",
        "<search>q</search><information>i</information><answer>a</answer>",
        GOOD,
    ],
)
def test_the_asked_form(response):
    assert has_form(response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "a",
        "<answer>a",
        "<answer>a</answer> and more",
        "before <answer>a</answer>",
        "<answer>a</answer><answer>b</answer>",
        "<think>t</think><think>t</think><answer>a</answer>",
        "<search>q</search><answer>a</answer>",
        "<information>made up</information><answer>a</answer>",
        "<think><search>q</search></think><answer>a</answer>",
        "</answer>",
    ],
)
def test_other_forms(response):
    assert not has_form(response)


def test_the_weights_add_up():
    weights = ("--search-r1-em-weight", "1", "--search-r1-f1-weight", "0.5", "--search-r1-format-weight", "0.2")
    plugin = SearchR1(make_options("--reward", "search_r1", *weights))
    result = plugin.reward(make_sample("<answer>Cardiff in Wales</answer>", label="Cardiff"))
    assert result["reward"] == pytest.approx(0.5 * 0.5 + 0.2)
    assert {"em", "f1", "format", "malformed_searches"} < set(result)


@pytest.mark.parametrize("tag", ["<think>", "<information>", "<answer>", "</answer>", "<search></search>"])
def test_a_long_response_of_tags_is_graded(tag):
    """In time quadratic in its length each of these would take hours."""
    assert parts(tag * 200_000, "x") == {"em": 0.0, "f1": 0.0, "format": 0.0}


def test_the_contract_of_the_reward_alone():
    check_plugin("search_r1", "--search-r1-backend", "http", "--search-r1-url", "http://127.0.0.1:1/retrieve")
