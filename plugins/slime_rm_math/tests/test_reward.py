import subprocess
import sys

import pytest

from slime_core.testing import make_options, make_sample
from slime_rm_math import reward


@pytest.fixture(scope="module")
def args():
    return make_options("--reward", "math")


def test_a_right_answer_earns_one(args):
    assert reward(args, make_sample(r"7+8=15. \boxed{15}", label="15")) == 1.0


def test_a_wrong_answer_earns_nothing(args):
    assert reward(args, make_sample(r"\boxed{16}", label="15")) == 0.0


def test_an_answer_outside_a_box_earns_nothing(args):
    assert reward(args, make_sample("15", label="15")) == 0.0


@pytest.mark.parametrize("label", [0, 0.0, "0", ["1", 0]])
def test_zero_is_a_label_like_any_other(args, label):
    assert reward(args, make_sample(r"\boxed{0}", label=label)) == 1.0
    assert reward(args, make_sample(r"\boxed{2}", label=label)) == 0.0


def test_any_of_several_labels_is_right(args):
    sample = make_sample(r"\boxed{\frac12}", label=["one half", "0.5"])
    assert reward(args, sample) == 1.0


@pytest.mark.parametrize("label", [None, {"a": 1}])
def test_a_missing_label_is_an_error_even_without_an_answer(args, label):
    with pytest.raises(ValueError, match="label"):
        reward(args, make_sample("no box", label=label))


def test_arithmetic_never_loads_sympy():
    script = (
        "import sys; from slime_rm_math import same_answer; "
        r"same_answer('84', '85'), same_answer(r'\frac12', '0.5'), same_answer('a cat', '7'); "
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
