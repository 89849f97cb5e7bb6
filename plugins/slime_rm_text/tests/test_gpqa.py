import functools

import pytest

from slime_core.testing import make_options, make_sample
from slime_rm_text.choice import chosen_letter
from slime_rm_text.gpqa import reward

LETTERS = "ABCDEFGHIJ"


@functools.cache
def options(*flags):
    return make_options("--reward", "gpqa", *flags)


def grade(response, label, **metadata):
    return reward(options(), make_sample(response, label=label, metadata=metadata))


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer depends on the temperature. Therefore B", "B"),
        ("Let me think.\n\nThe correct answer is (C).", "C"),
        ("Answer: **D**", "D"),
        ("**Answer:** D", "D"),
        ("ANSWER: $C", "C"),
        (r"The answer is $\boxed{\text{B}}$.", "B"),
        (r"\boxed{\text{(B) } 5\,m}", "B"),
        (r"I first said \boxed{A}. Wait. The final answer is C.", "C"),
        (r"Perhaps the answer is C. No: \boxed{A}", "A"),
        ("B", "B"),
        ("(b)", "B"),
        ("b.", "B"),
        ("B) mitochondria", "B"),
        ("B\n\nBecause A is larger than C.", "B"),
        ("I think the answer is A because it is larger.", "A"),
        ("The answer: I think B", "B"),
        ("It cannot be A. It is not C. D", "D"),
        ("It's B, not C", "B"),
        ("Not A but B", "B"),
        ("Option A: too small.\nOption B: too large.\nOption D: plausible.\nThe correct choice is C", "C"),
        ("A is wrong, B is correct.", "B"),
        ("So A and B are wrong; the answer is D.", "D"),
        ("Answer choices: A) x B) y\nAnswer: B", "B"),
        ("The best answer would be option E, clearly", "E"),
        ("Hence, option C.", "C"),
        ("We go with F", "F"),
        ("the answer is: c", "C"),
        ("The energy is E = 5 J and the answer is B", "B"),
        ("Final Answer\n\nC", "C"),
        ("The answer is B. I considered A, but A is not correct.", "B"),
        ("Therefore, the answer is\n\n(D)", "D"),
        ("\u7b54\u6848\uff1aC", "C"),
    ],
)
def test_the_letter_a_response_settles_on(response, letter):
    assert chosen_letter(response, LETTERS, {}) == letter


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I am not sure.",
        "A good question.",
        "the answer is a function of time",
        "E = mc^2",
        "A) red\nB) green\nC) blue",
    ],
)
def test_a_response_that_settles_on_nothing_chooses_nothing(response):
    assert chosen_letter(response, LETTERS, {}) is None


def test_a_word_inside_another_is_not_an_option():
    choices = ["not", "it depends", "5 m/s", "7 m/s"]
    assert grade("I am not sure", "A", choices=choices) == 0.0
    assert grade("So the speed is 5 m/s.", "C", choices=choices) == 1.0
    assert grade("The speed: it depends", "B", choices=choices) == 1.0


@pytest.mark.parametrize("label", ["B", "b", "(B)", "B.", 1, "green", "Green.", ["B"], ["A", "B"]])
def test_a_label_is_a_letter_an_index_or_an_options_text(label):
    assert grade("The answer is B", label, choices=["red", "green"]) == 1.0
    assert grade("The answer is C", label, choices=["red", "green", "blue"]) == 0.0


def test_the_index_zero_is_the_first_option():
    assert (grade("The answer is A", 0), grade("The answer is B", 0)) == (1.0, 0.0)


@pytest.mark.parametrize("label", [None, "", [], {"a": 1}, True, 12, "a word", [None]])
def test_a_label_that_names_no_option_is_an_error(label):
    with pytest.raises(ValueError, match="label"):
        grade("The answer is B", label)


def test_choices_that_are_no_list_are_an_error():
    with pytest.raises(ValueError, match="choices"):
        grade("B", "B", choices="red, green")


def test_only_the_letters_of_the_row_are_valid():
    assert grade("The answer is B. See figure F", "B", choices={"A": "x", "B": "y"}) == 1.0


def test_the_thinking_does_not_count_and_may_be_missing():
    assert grade("<think>The answer is A</think>\nB", "B") == 1.0
    assert grade("Thinking it over, therefore B", "B") == 1.0


def test_the_key_of_the_choices_can_be_named():
    sample = make_sample("green", label="green", metadata={"options": ["red", "green"]})
    assert reward(options("--gpqa-choices-key", "options"), sample) == 1.0
