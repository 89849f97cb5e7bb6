import pytest

from slime_rm_text.answer import answer_from, without_thinking


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so</think>Paris", "Paris"),
        ("<think>a</think>b</think>Paris", "Paris"),
        ("Paris", "Paris"),
        ("<think>it never ends", "<think>it never ends"),
    ],
)
def test_thinking_is_left_out_and_may_be_missing(response, answer):
    assert without_thinking(response) == answer


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("response", "one\ntwo", "one\ntwo"),
        ("last_line", "one\ntwo\n \n", "two"),
        ("answer_line", "Answer: one\nThe **answer**: two\nbye", "two"),
        ("answer_line", "The answer is: **Paris**", "Paris"),
        ("boxed", r"\boxed{a} or \boxed{b{c}}", "b{c}"),
        ("boxed", r"\boxed{a} or \boxed{b", "a"),
        ("tag", "<answer>a</answer><answer> b </answer>", "b"),
        ("tag", r"<think><answer>a</answer></think>b", None),
        ("boxed", "nothing", None),
        ("answer_line", "no such line", None),
        ("last_line", " \n", None),
        ("tag", "</answer>", None),
    ],
)
def test_the_part_that_is_graded(source, response, answer):
    assert answer_from(response, source) == answer
