import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import make_options, make_sample
from slime_rm_text import exact_match, f1
from slime_rm_text.normalize import normalized

SENTENCE = st.text(alphabet="abc the.,-1 25\n", max_size=30)


@functools.cache
def options(name, *flags):
    return make_options("--reward", name, *flags)


def f1_of(response, label, *flags):
    return f1.reward(options("f1", *flags), make_sample(response, label=label))


def exact(response, label, *flags):
    return exact_match.reward(options("exact_match", *flags), make_sample(response, label=label))


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("in Paris", "Paris", 2 / 3),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("London", ["Paris", "London"], 1.0),
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "no one knows", 0.0),
    ],
)
def test_f1_of_shared_words(response, label, score):
    assert f1_of(response, label) == pytest.approx(score)


@pytest.mark.parametrize("label", [0, "0", 0.0, [1, 0]])
def test_zero_is_a_label_like_any_other(label):
    right = "0.0" if isinstance(label, float) else "0"
    assert (f1_of(right, label), exact(right, label)) == (1.0, 1.0)
    assert (f1_of("7", label), exact("7", label)) == (0.0, 0.0)


@pytest.mark.parametrize("label", [None, "", " ", [], [None], {"a": 1}, float("inf"), float("nan")])
def test_a_label_without_a_text_is_an_error_even_without_an_answer(label):
    for grade in (f1_of, exact):
        with pytest.raises(ValueError, match="label"):
            grade("", label)


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("2.5", "25"),
        ("2.5", 2),
        ("-5", "5"),
        ("\u22125", 5),
        ("1/2", "12"),
        ("10:30", "1030"),
        (".5", "5"),
        ("A", "the"),
    ],
)
def test_different_numbers_and_articles_stay_different(response, label):
    assert (f1_of(response, label), exact(response, label)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("response", "label"),
    [("1,000", 1000), ("$5.", 5), ("\u22125", -5), ("a", "A"), ("It is 2.5.", "it is 2.5"), ("?", "?")],
)
def test_the_same_in_another_spelling_is_the_same(response, label):
    assert (f1_of(response, label), exact(response, label)) == (1.0, 1.0)


def test_the_answer_may_be_looked_for_in_a_part_of_the_response():
    assert exact("Well.\n<answer>Paris</answer>", "paris", "--exact-match-from", "tag") == 1.0
    assert f1_of(r"Well, \boxed{Paris}", "paris", "--f1-from", "boxed") == 1.0
    assert f1_of("Paris", "paris", "--f1-from", "boxed") == 0.0


@pytest.mark.parametrize(("normalize", "score"), [("squad", 1.0), ("space", 0.0), ("none", 0.0)])
def test_case_counts_unless_it_is_normalised_away(normalize, score):
    assert exact("PARIS", "paris", "--exact-match-normalize", normalize) == score


def test_outer_space_counts_only_without_any_normalisation():
    assert exact(" a  b\n", "a b", "--exact-match-normalize", "space") == 1.0
    assert exact(" a  b\n", "a b", "--exact-match-normalize", "none") == 0.0


@given(SENTENCE, SENTENCE)
def test_f1_is_symmetric_within_bounds_and_one_for_the_same_words(one: str, other: str):
    if not normalized(one) or not normalized(other):
        return
    assert f1.f1(one, other) == pytest.approx(f1.f1(other, one))
    assert 0 <= f1.f1(one, other) <= 1
    assert f1.f1(one, one) == 1.0
    assert (f1.f1(one, other) == 1.0) == (sorted(normalized(one).split()) == sorted(normalized(other).split()))


@given(st.decimals(-999, 999, places=2), st.decimals(-999, 999, places=2))
def test_different_decimals_stay_different(one, other):
    assert (normalized(f"{one:f}") == normalized(f"{other:f}")) == (f"{one:f}" == f"{other:f}")
