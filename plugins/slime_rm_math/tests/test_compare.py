from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.testing import cpu_seconds
from slime_rm_math import same_answer
from slime_rm_math.full_parser import full_parser_agrees

EQUAL = [
    # spelling
    ("7", "$7$"),
    ("7.", "7"),
    (r"\$7", "7"),
    ("\u22127", "-7"),
    ("\uff17", "7"),
    (r"\text{Tuesday}", "tuesday"),
    ("(A)", "A"),
    (r"\left(0, 1\right]", "(0,1]"),
    ("\u221e", r"\infty"),
    # names and units
    ("x=7", "7"),
    (r"x \in [1,2]", "[1,2]"),
    (r"7\text{ cm}", "7"),
    (r"7 \text{ cm}^2", "7"),
    ("7 apples", r"7\text{ apple}"),
    ("90^\\circ", "90 degrees"),
    # numbers
    ("1,234.50", "1234.5"),
    (r"10\,000", "10000"),
    ("1{,}234", "1234"),
    (r"\frac12", "0.5"),
    (r"\dfrac{14}{2}", "7"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"3\frac12", "7/2"),
    ("3 1/2", "3.5"),
    (r"1.5\times10^3", "1500"),
    ("1e-3", ".001"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    ("50 percent", r"50\%"),
    # lists
    ("1, -2", "-2,1"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"(\frac12, \sqrt{4})", "(0.5,2)"),
    # expressions
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt3/2"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{1}{1+\frac{1}{x}}", r"\frac{x}{x+1}"),
    (r"\sin(x)^2+\cos^2 x", "1"),
    ("3+4i", "4i+3"),
    (r"e^{x+1}", "e*e^x"),
    (r"\log_2 8", "3"),
    (r"\tan\frac{\pi}{4}", "1"),
    ("2^{10}", "1024"),
    ("a_1+b", "b+a_{1}"),
    ("|-3|", "3"),
]

DIFFERENT = [
    ("", "1"),
    ("0.333", "1/3"),
    ("1 2", "12"),
    ("1, 234", "1234"),
    (r"5\%", r"500\%"),
    ("y=7", "x=7"),
    ("7 cm", "7 km"),
    ("5 x", "5"),
    ("a", "A"),
    ("(1,2)", "(2,1)"),
    ("(0,1)", "[0,1]"),
    ("1,1", "1"),
    ("1,1,2", "1,2,2"),
    ("|x|", "x"),
    (r"\sqrt{x^2}", "x"),
    ("2^{-200}", "0"),
    (r"\sqrt{2}", "1.414"),
    ("x", "y"),
    ("1/0", "1"),
    ("0^0", "1"),
    ("hello", "hello world"),
    ("teh", "the answer"),
]

HOSTILE = [
    "9^{9^{9}}",
    "9**9**9",
    "((9^64)^64)^64",
    "(x+1)^{2000}",
    "9999999!",
    "2^{2^{x}}",
    r"e^{e^{e^{10}}}",
    r"\exp(\exp(\exp(99)))",
    r"\sin(9^{999})",
    "1e999999999",
    "9" * 5000,
    "(" * 5000 + ")" * 5000,
    r"\frac{1}{" * 61 + "x" + "}" * 61,
    r"\sin" * 300 + "x",
    "{" * 1900,
    "a" * 1900 + "!",
    "1 " * 900,
    "a," * 900,
    " and " * 380,
    "$" * 1900,
    r"\frac" * 300,
    "x=" * 900,
    r"\text{" * 300,
    "1:" * 900,
    r"\begin{pmatrix}" + "1&" * 500 + r"\end{pmatrix}",
    "-" * 151 + "x",
    "x" + "^2" * 90,
    "x^{1/99999999999999999999}",
    "open('/etc/passwd')",
    "__import__('os')",
    "\\",
    "{}",
    "()",
    r"\sqrt",
    r"\frac1",
    "nan",
    "1,2,3" * 60,
    "7^" + " " * 100_000 + "7",
    "^" + " " * 1900,
]


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal_answers(answer, label):
    assert same_answer(answer, label)
    assert same_answer(label, answer)


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_answers(answer, label):
    assert not same_answer(answer, label)
    assert not same_answer(label, answer)


@pytest.mark.parametrize("answer", HOSTILE)
@pytest.mark.parametrize("label", ["7", "x", r"\frac{\pi}{2}", "(1,2)"])
def test_a_hostile_answer_is_wrong_and_costs_little(answer, label):
    full_parser_agrees("x", "y")  # loads SymPy
    verdicts = []
    taken = cpu_seconds(lambda: verdicts.append(same_answer(answer, label)), tries=1)  # a second try reads a cache
    assert verdicts == [False]
    assert taken < 2.0


RATIONALS = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=500)


@given(left=RATIONALS, right=RATIONALS)
def test_fractions_are_equal_exactly_when_their_values_are(left: Fraction, right: Fraction):
    latex = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert same_answer(latex, f"{left.numerator}/{left.denominator}")
    assert same_answer(latex, f"{right.numerator}/{right.denominator}") == (left == right)


@given(st.integers(min_value=-(10**30), max_value=10**30))
def test_thousands_separators_change_nothing(value: int):
    assert same_answer(f"{value:,}", str(value))
    assert not same_answer(f"{value:,}", str(value + 1))


@given(coefficients=st.lists(st.integers(-9, 9), min_size=1, max_size=5), change=st.integers(1, 5))
def test_polynomials_are_equal_exactly_when_their_coefficients_are(coefficients: list[int], change: int):
    terms = [f"({c})x^{{{power}}}" for power, c in enumerate(coefficients)]
    horner = ""
    for c in reversed(coefficients):
        horner = f"({c})+x({horner})" if horner else f"({c})"
    assert same_answer("+".join(terms), horner)
    assert not same_answer("+".join(terms), f"{horner}+{change}")


@given(st.text(r"0123456789.,/%\{}()[]^+-xe frac sqrt\pi", max_size=40), st.text(r"12/.,x\frac{}", max_size=12))
def test_any_text_is_compared_without_an_error(answer: str, label: str):
    assert same_answer(answer, label) == same_answer(label, answer)
