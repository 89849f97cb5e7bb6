import json

import pytest

from slime_core.testing import make_options, make_sample
from slime_rm_text.ifeval import IFEval, count
from slime_rm_text.ifeval.instructions import CHECKS


@pytest.fixture(scope="module")
def strict():
    return IFEval(make_options("--reward", "ifeval"))


def grade(plugin, response, *instructions):
    names, arguments = zip(*instructions, strict=True)
    metadata = {"instruction_id_list": list(names), "kwargs": list(arguments)}
    return plugin.reward(make_sample(response, metadata=metadata))["reward"]


CASES = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "hi", "frequency": 2, "relation": "at least"}, "hi HI", "hi"),
    ("keywords:frequency", {"keyword": "hi", "frequency": 2, "relation": "less than"}, "hi", "hi hi"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat!"),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Qq", "q"),
    ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz.", "This is an English sentence."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "Only one."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "first\n\n**Then**, more",
        "first\n\nafterwards",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [town]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n\n**P. S.** more", "Bye. no PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. P.S. more", "P.P.S. more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP. P. S. more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n---\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<The end>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It", "It"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So "... the end."', "the end. Or not?"),
    ("startend:quotation", {}, '"quoted"', '"quoted'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "AB C d", "AB c"),
    ("change_case:english_capital", {}, "THIS IS ALL IN ENGLISH.", "This is all in English."),
    ("change_case:english_lowercase", {}, "this is all in english.", "This is all in english."),
    ("punctuation:no_comma", {}, "none", "one, two"),
]


@pytest.mark.parametrize(("name", "arguments", "follows", "breaks"), CASES, ids=[case[0] for case in CASES])
def test_an_instruction_is_followed_or_not(strict, name, arguments, follows, breaks):
    assert grade(strict, follows, (name, arguments)) == 1.0
    assert grade(strict, breaks, (name, arguments)) == 0.0


def test_all_instructions_of_the_paper_are_there_and_tested():
    assert len(CHECKS) == 25
    assert {case[0] for case in CASES} == set(CHECKS)


def test_every_instruction_must_be_followed(strict):
    no_comma, title = ("punctuation:no_comma", {}), ("detectable_format:title", {})
    sample = make_sample("no title", metadata={"instruction_id_list": [no_comma[0], title[0]], "kwargs": None})
    assert strict.reward(sample) == {"reward": 0.0, "followed": 0.5}
    partial = IFEval(make_options("--reward", "ifeval", "--ifeval-partial"))
    assert partial.reward(sample) == {"reward": 0.5, "followed": 0.5}


def test_the_loose_mode_forgives_an_introduction_and_asterisks(strict):
    loose = IFEval(make_options("--reward", "ifeval", "--ifeval-mode", "loose"))
    wrapped = "Sure, here it is:\n*my answer is yes.*"
    quoted = ("startend:end_checker", {"end_phrase": "is yes."})
    assert (grade(strict, wrapped, quoted), grade(loose, wrapped, quoted)) == (0.0, 1.0)
    no_comma = ("punctuation:no_comma", {})
    assert (grade(strict, wrapped, no_comma), grade(loose, wrapped, no_comma)) == (0.0, 1.0)


@pytest.mark.parametrize("response", ["", " \n"])
def test_an_empty_response_follows_nothing(strict, response):
    assert grade(strict, response, ("punctuation:no_comma", {})) == 0.0


def test_the_thinking_is_not_graded(strict):
    assert grade(strict, "one, two</think>none", ("punctuation:no_comma", {})) == 1.0


def test_a_text_in_no_language_follows_no_language(strict):
    assert grade(strict, "7 + 8 = 15", ("language:response_language", {"language": "en"})) == 0.0


def test_instructions_may_be_the_label_and_their_arguments_text_with_nulls(strict):
    label = {
        "instruction_id_list": ["keywords:existence"],
        "kwargs": json.dumps([{"keywords": ["cat"], "num_words": None}]),
    }
    assert strict.reward(make_sample("cat", label=label))["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "instruction_id_list"),
        ({"instruction_id_list": []}, "instruction_id_list"),
        ({"instruction_id_list": ["punctuation:no_dash"]}, "punctuation:no_dash"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "1 instructions"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "no argument 'keywords'"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"relation": "exactly", "num_words": 1}],
            },
            "'exactly'",
        ),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error(strict, row, message):
    with pytest.raises(ValueError, match=message):
        strict.reward(make_sample("text", metadata=row))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith paid 3.5 dollars. He left.", 2),
        ("The answer is no. Really.", 2),
        ("A heading\n\nAnd a line", 2),
        ("J. R. R. Tolkien wrote it.", 1),
        ("Wait... what?!", 2),
        ("1. First item\n2. Second item", 1),
        ("\u4f60\u597d\u3002\u518d\u89c1\u3002", 2),
        ("...", 0),
    ],
)
def test_sentences_are_counted(text, number):
    assert count.sentences(text) == number
