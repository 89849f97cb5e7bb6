"""No response hangs or breaks a grader: long, deep, odd ones take linear time and are wrong, not FAILED."""

import functools

import pytest

from slime_core.testing import cpu_seconds, hostile_answers, hostile_responses, make_options, make_sample
from slime_rm_text import exact_match, f1, gpqa
from slime_rm_text.ifeval import IFEval
from slime_rm_text.ifeval.instructions import CHECKS

LONG = 100_000
REPEATED = ["answer ", "answer is ", "so, ", "A ", "A)\n", "(", "\\boxed{", "\\text{", "<<", "[", "*", "* ", " ", "\n",
            "1.", "-", "a.", "'", "\u0130", "answer: \\boxed{\\text{"]  # fmt: skip
ARGUMENTS = {
    "keywords": ["a"], "keyword": "a", "frequency": 1, "relation": "at least", "forbidden_words": ["a"], "letter": "a",
    "let_frequency": 1, "let_relation": "at least", "language": "en", "num_sentences": 1, "num_paragraphs": 1,
    "num_words": 1, "nth_paragraph": 1, "first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.",
    "num_bullets": 1, "num_highlights": 1, "section_spliter": "Section", "num_sections": 1, "prompt_to_repeat": "a",
    "end_phrase": "a", "capital_frequency": 1, "capital_relation": "at least",
}  # fmt: skip
INSTRUCTIONS = {"instruction_id_list": list(CHECKS), "kwargs": [ARGUMENTS] * len(CHECKS)}


@functools.cache
def graders():
    args = make_options("--reward", "f1", "exact_match", "gpqa", "ifeval")
    plugin = IFEval(args)
    return {
        "f1": lambda s: f1.reward(args, s),
        "exact_match": lambda s: exact_match.reward(args, s),
        "gpqa": lambda s: gpqa.reward(args, s),
        "ifeval": lambda s: plugin.reward(s)["reward"],
    }


@pytest.mark.parametrize("name", ["f1", "exact_match", "gpqa", "ifeval"])
def test_a_hostile_response_gets_a_reward(name):
    for response in hostile_answers() if name == "ifeval" else hostile_responses():
        assert 0 <= graders()[name](make_sample(response, label="A", metadata=INSTRUCTIONS)) <= 1


@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.parametrize("name", ["f1", "exact_match", "gpqa", "ifeval"])
def test_time_grows_no_faster_than_the_response(name, piece):
    def seconds(length):
        sample = make_sample(label="A", metadata=INSTRUCTIONS)
        sample.response = piece * (length // len(piece))
        return cpu_seconds(lambda: graders()[name](sample))

    assert seconds(LONG) < 40 * seconds(LONG // 10) + 0.1
