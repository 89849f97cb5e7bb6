"""The graders beside `math`: what they give, what upstream graders get wrong, and that nothing hostile stops them."""

from functools import lru_cache

import pytest

from slime_core import OptionError, Sample
from slime_core.testing import cpu_seconds, make_options, make_sample
from slime_rm_math import dapo, deepscaler, length_penalty, overlong
from slime_rm_math import format as format_reward
from slime_rm_math import reward as math_reward

PLUGINS = {
    "deepscaler": deepscaler.reward,
    "dapo": dapo.reward,
    "format": format_reward.reward,
    "length_penalty": length_penalty.reward,
    "overlong": overlong.reward,
    "math": math_reward,
}


options = lru_cache(maxsize=None)(make_options)


@pytest.fixture
def grade():
    def run(name, response, label=None, *flags, **fields):
        args = options("--reward", name, *flags)
        return PLUGINS[name](args, make_sample(response, label=label, **fields))

    return run


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"<think>x</think> \boxed{15}", "15", 1.0),
        (r"<think>\boxed{15}</think> \boxed{16}", "15", 0.0),
        (r"<think>\boxed{15}</think> fifteen", "15", 0.0),
        (r"work ###Response so \boxed{15}", "15", 1.0),
        (r"<think>a</think> b <think>\boxed{1}</think> \boxed{2}", "2", 1.0),
        # an integer label wants an integer, a literal fraction the reduced one
        (r"</think> \boxed{\frac{14}{2}}", "7", 0.0),
        (r"</think> \boxed{7}", r"\frac{14}{2}", 1.0),
        (r"</think> \boxed{\frac{2}{4}}", r"\frac{1}{2}", 0.0),
        (r"</think> \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"</think> \boxed{x=7}", "7", 1.0),
        # labels that upstream always gives 0, or that end its run
        (r"</think> \boxed{0}", 0, 1.0),
        (r"</think> \boxed{2}", ["1", 2], 1.0),
    ],
)
def test_deepscaler(grade, response, label, score):
    assert grade("deepscaler", response, label) == score


def test_deepscaler_grades_a_model_that_does_not_think_aloud_unless_told_not_to(grade):
    assert grade("deepscaler", r"So \boxed{15}.", "15") == 1.0
    assert grade("deepscaler", r"So \boxed{15}.", "15", "--deepscaler-require-think") == 0.0


@pytest.mark.parametrize("prompt", ["Solve it.\n<think>\n", [{"role": "assistant", "content": "<think>"}]])
def test_deepscaler_gives_nothing_to_thinking_that_never_ends(grade, prompt):
    assert grade("deepscaler", r"<think> maybe \boxed{15}", "15") == 0.0
    assert grade("deepscaler", r"maybe \boxed{15}", "15", prompt=prompt) == 0.0
    assert grade("deepscaler", r"maybe </think> \boxed{15}", "15", prompt=prompt) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("Answer: 34", "34", True),
        ("answer : $34$", 34, True),
        ("Answer: 3\nno\nAnswer: 34", "34", True),
        ("Answer: x = 34", "34.0", True),
        ("Answer: 1,234", "1234", True),
        (r"Answer: \boxed{34}", "34", True),
        (r"Answer: 90^\circ", "90", True),
        ("Answer: 34 " + "x" * 300, "34", False),
        (r"\boxed{34}", "34", False),
        ("Answer: 2", 2.5, False),
        ("Answer: 2.5", 2, False),
        ("Answer: 2.5", "2.5", True),
        (r"Answer: \frac12", r"\frac{1}{2}", True),
        ("Answer: x+1", "x+1", True),
        ("Answer: 0", 0, True),
        ("Answer: 7", ["6", "7"], True),
        ("", "0", False),
    ],
)
def test_dapo(grade, response, label, right):
    assert grade("dapo", response, label) == {"reward": 1.0 if right else -1.0, "acc": float(right)}


def test_dapo_reads_the_box_when_told_to(grade):
    assert grade("dapo", r"\boxed{34} is it", "34", "--dapo-boxed")["acc"] == 1.0


@pytest.mark.parametrize("name", ["math", "deepscaler", "dapo"])
@pytest.mark.parametrize("label", [None, "", [], {"a": 1}, r"\boxed{}"])
def test_a_label_that_cannot_be_compared_is_an_error_never_a_score(grade, name, label):
    with pytest.raises(ValueError, match="label"):
        grade(name, r"Answer: \boxed{7}", label)


@pytest.mark.parametrize(
    ("response", "flags", "score"),
    [
        ("<think>a</think> b", [], 1.0),
        ("<think></think> b", [], 0.0),
        ("<think>a</think> ", [], 0.0),
        ("<think>a</think> b <think>c</think>", [], 0.0),
        ("a</think> b", [], 0.0),
        ("<think>a", [], 0.0),
        ("b", [], 0.0),
        (r"b \boxed{1}", ["--format-wants", "boxed"], 1.0),
        (r"\boxed{1} or \boxed{2}", ["--format-wants", "boxed"], 0.0),
        (r"<think>\boxed{1}</think> \boxed{2}", ["--format-wants", "think", "boxed"], 1.0),
        (r"<think>\boxed{1}</think> 2", ["--format-wants", "think", "boxed"], 0.0),
        ("<a>1\n2</a>", ["--format-pattern", "<a>.*</a>"], 1.0),
        ("x<a>1</a>", ["--format-pattern", "<a>.*</a>"], 0.0),
    ],
)
def test_format(grade, response, flags, score):
    assert grade("format", response, None, *flags) == score


def test_format_counts_a_thinking_block_that_the_prompt_opened(grade):
    assert grade("format", "a</think> b", prompt="Solve. <think>\n") == 1.0


def test_a_format_pattern_that_is_none_is_refused():
    with pytest.raises(OptionError, match="--format-pattern"):
        format_reward.configure(make_options("--reward", "format", "--format-pattern", "("))


@pytest.mark.parametrize(("length", "score"), [(0, 0.0), (20, 0.0), (60, -0.5), (100, -1.0), (150, -1.0)])
def test_length_penalty(grade, length, score):
    flags = ["--length-penalty-free-tokens", "20", "--length-penalty-max-tokens", "100"]
    assert grade("length_penalty", "x" * length, None, *flags) == pytest.approx(score)


@pytest.mark.parametrize("length", [0, 79, 80, 81, 90, 99, 100, 101, 500])
def test_overlong_is_equation_13(grade, length):
    longest, cache = 100, 20
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    flags = ["--overlong-max-tokens", str(longest), "--overlong-cache-tokens", str(cache)]
    assert grade("overlong", "x" * length, None, *flags) == pytest.approx(expected)


def test_overlong_limits_follow_the_longest_response(grade):
    args = make_options("--reward", "overlong", "--max-response-tokens", "20480")
    assert overlong.limits(args) == (20480, 4096)


@pytest.mark.parametrize(
    ("plugin", "flags"),
    [
        (overlong, ["--reward", "overlong", "--overlong-max-tokens", "10", "--overlong-cache-tokens", "11"]),
        (overlong, ["--reward", "overlong", "--overlong-cache-tokens", "0"]),
        (length_penalty, ["--reward", "length_penalty", "--length-penalty-free-tokens", "10"]),
    ],
)
def test_limits_without_room_are_refused(plugin, flags):
    flags = [*flags, "--max-response-tokens", "10"]
    with pytest.raises(OptionError, match="tokens"):
        plugin.configure(make_options(*flags))


INNER = ("1" * 200_000, "a " * 50_000, "x^" * 5_000, "\\frac" * 5_000, "9**9**9", "{" * 1_000, "\\text{" * 300)
HOSTILE = ["(" * 20_000, "<think>" * 5_000, "Answer:" * 5_000, r"\boxed{" * 5_000, "$" * 50_000]
HOSTILE += [f"Answer: \\boxed{{{inner}}}" for inner in INNER]


@pytest.fixture(scope="module")
def hostile_samples():
    # without tokens, which no grader here reads, and which take longer to make than to grade
    return [Sample(response=response, label="x") for response in HOSTILE]


@pytest.mark.parametrize(
    ("name", "flags"),
    [*((name, []) for name in PLUGINS), ("dapo", ["--dapo-boxed"]), ("math", ["--math-extract=anywhere"])],
)
def test_long_and_hostile_responses_cost_little(hostile_samples, name, flags):
    args = make_options("--reward", name, *flags)
    for sample in hostile_samples:
        taken = cpu_seconds(lambda sample=sample: PLUGINS[name](args, sample), tries=1)  # a second try reads a cache
        assert taken < 2.0, sample.response[:50]
