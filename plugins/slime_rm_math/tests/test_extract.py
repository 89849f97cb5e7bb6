import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import cpu_seconds
from slime_rm_math import accepted_answers, last_boxed

BALANCED = st.recursive(
    st.text("ab1 +", max_size=4), lambda inner: st.lists(inner.map(lambda s: f"{{{s}}}")).map("".join)
)


def test_the_last_of_several_boxes_counts():
    assert last_boxed(r"\boxed{1} no, wait: \boxed{2}") == "2"


def test_an_fbox_is_a_box():
    assert last_boxed(r"so \fbox{7}") == "7"


def test_braces_inside_the_box_balance():
    assert last_boxed(r"\boxed{\frac{1}{2}} and {more}") == r"\frac{1}{2}"


def test_escaped_braces_are_text():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{(0, 1\}}") == r"(0, 1\}"


def test_a_nested_box_gives_its_content():
    assert last_boxed(r"\boxed{\boxed{7}}") == "7"


def test_a_box_cut_off_by_truncation_is_no_answer():
    assert last_boxed(r"it is \boxed{12") is None


def test_a_cut_off_box_leaves_the_one_before_it():
    assert last_boxed(r"\boxed{12}, so \boxed{1") == "12"


@pytest.mark.parametrize("response", ["", "12", r"\boxed", r"\boxed 12", r"boxed{12}"])
def test_no_box_is_no_answer(response):
    assert last_boxed(response) is None


@given(before=st.text("ab{} ", max_size=20), content=BALANCED)
def test_any_balanced_content_comes_back(before, content):
    assert last_boxed(f"{before}\\boxed{{{content}}}") == content.strip()


def test_many_unclosed_boxes_take_linear_time():
    response = r"\boxed{" * 20_000
    assert last_boxed(response) is None
    assert cpu_seconds(lambda: last_boxed(response)) < 1.0


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        (0, ["0"]),
        (-7, ["-7"]),
        (0.1, ["0.1"]),
        (" 1/2 ", ["1/2"]),
        (r"So \boxed{3}.", ["3"]),
        (["1", 2], ["1", "2"]),
        (10**30, ["1" + "0" * 30]),
    ],
)
def test_accepted_answers(label, answers):
    assert accepted_answers(label) == answers


@pytest.mark.parametrize("label", [None, "", "  ", [], [None], {"a": 1}, True, float("nan"), float("inf")])
def test_an_unusable_label_is_an_error_that_names_it(label):
    with pytest.raises(ValueError, match="label"):
        accepted_answers(label)
