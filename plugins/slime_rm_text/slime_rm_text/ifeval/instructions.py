"""The 25 instructions of IFEval: name -> whether a text follows one (Zhou et al. 2023, table 1)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime_core import Sample
from slime_rm_text.ifeval import count
from slime_rm_text.ifeval.language import LanguageDetector


@dataclass(frozen=True)
class Instruction:
    """One instruction of a row: its name and its arguments, those that are null left out."""

    name: str
    arguments: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """The argument under the first of these keys that is there.

        Raises:
            ValueError: when none is.
        """
        for key in keys:
            if key in self.arguments:
                return self.arguments[key]
        raise ValueError(f"the row's instruction '{self.name}' has no argument '{keys[0]}'")


def instructions_of(sample: Sample) -> list[Instruction]:
    """The row's instructions, from its metadata or its label: `instruction_id_list` and, in the same order, `kwargs`.

    Raises:
        ValueError: when they are missing or do not fit together.
    """
    row = sample.metadata if "instruction_id_list" in sample.metadata else sample.label
    names = row.get("instruction_id_list") if isinstance(row, dict) else None
    if not isinstance(names, list | tuple) or not names:
        raise ValueError("the row's metadata (or label) has no instruction_id_list; it names what is to be followed")
    arguments = row.get("kwargs") or [{}] * len(names)
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, list | tuple) or len(arguments) != len(names):
        raise ValueError(f"the row has {len(names)} instructions; its kwargs must be a list of as many objects")
    instructions = []
    for name, given in zip(names, arguments, strict=True):
        if name not in CHECKS:
            raise ValueError(f"there is no instruction '{name}'; slime-rm-text's README lists those of IFEval")
        instructions.append(Instruction(name, {k: v for k, v in (given or {}).items() if v is not None}))
    return instructions


def follows(instruction: Instruction, text: str, detector: LanguageDetector) -> bool:
    """Whether the text follows the instruction; an empty text follows none."""
    return bool(text.strip()) and CHECKS[instruction.name](instruction, text, detector)


Check: TypeAlias = Callable[[Instruction, str, LanguageDetector], bool]


def _related(instruction: Instruction, number: int, wanted_key: str, relation_key: str) -> bool:
    """Whether a count is 'at least' or 'less than' the wanted one."""
    relation, wanted = instruction.get(relation_key), int(instruction.get(wanted_key))
    if relation == "at least":
        return number >= wanted
    if relation == "less than":
        return number < wanted
    raise ValueError(f"the relation {relation!r} of '{instruction.name}' is neither 'at least' nor 'less than'")


def _number_paragraphs(it: Instruction, text: str) -> bool:
    parts = count.separated(text, "***")
    return parts is not None and len(parts) == int(it.get("num_paragraphs"))


def _first_word(it: Instruction, text: str) -> bool:
    parts = count.paragraphs(text)
    nth = int(it.get("nth_paragraph"))
    if len(parts) != int(it.get("num_paragraphs")) or not 1 <= nth <= len(parts):
        return False
    word = re.match(r"[\"'\u201c\u2018(*_]*([^\s.,?!'\")*_]*)", parts[nth - 1])
    return word is not None and word[1].lower() == str(it.get("first_word")).strip().lower()


def _postscript(it: Instruction, text: str) -> bool:
    marker = str(it.get("postscript_marker")).strip().lower()
    spelt = r"\s?".join(re.escape(character) for character in marker if not character.isspace())
    return re.search(rf"(?<![\w.]){spelt}", text.lower()) is not None


def _two_responses(it: Instruction, text: str) -> bool:
    parts = count.separated(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _json(it: Instruction, text: str) -> bool:
    inner = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```")
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


def _title(it: Instruction, text: str) -> bool:
    for line in text.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> \t"):
            return True
    return False


def _quoted(it: Instruction, text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def _ends(it: Instruction, text: str) -> bool:
    return text.strip().strip('"').strip().lower().endswith(str(it.get("end_phrase")).strip().lower())


def _repeats(it: Instruction, text: str) -> bool:
    return text.strip().lower().startswith(str(it.get("prompt_to_repeat")).strip().lower())


def _language(it: Instruction, text: str, detector: LanguageDetector) -> bool:
    found, wanted = detector.language(text), str(it.get("language")).lower()
    return found is not None and (found == wanted or found.partition("-")[0] == wanted)


def _english(text: str, detector: LanguageDetector) -> bool:
    # in small letters, because langdetect's profiles hardly know words in capitals
    return detector.language(text.lower()) == "en"


FIXED_ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")

CHECKS: dict[str, Check] = {
    "keywords:existence": lambda it, text, _: all(count.keyword(text, str(word)) for word in it.get("keywords")),
    "keywords:frequency": lambda it, text, _: _related(
        it, count.keyword(text, str(it.get("keyword"))), "frequency", "relation"
    ),
    "keywords:forbidden_words": lambda it, text, _: (
        not any(count.whole_word(text, str(word)) for word in it.get("forbidden_words"))
    ),
    "keywords:letter_frequency": lambda it, text, _: _related(
        it, count.letters(text, str(it.get("letter"))), "let_frequency", "let_relation"
    ),
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda it, text, _: _related(
        it, count.sentences(text), "num_sentences", "relation"
    ),
    "length_constraints:number_paragraphs": lambda it, text, _: _number_paragraphs(it, text),
    "length_constraints:number_words": lambda it, text, _: _related(it, count.words(text), "num_words", "relation"),
    "length_constraints:nth_paragraph_first_word": lambda it, text, _: _first_word(it, text),
    "detectable_content:number_placeholders": lambda it, text, _: (
        count.placeholders(text) >= int(it.get("num_placeholders"))
    ),
    "detectable_content:postscript": lambda it, text, _: _postscript(it, text),
    "detectable_format:number_bullet_lists": lambda it, text, _: count.bullets(text) == int(it.get("num_bullets")),
    "detectable_format:constrained_response": lambda it, text, _: any(
        answer in text.lower() for answer in FIXED_ANSWERS
    ),
    "detectable_format:number_highlighted_sections": lambda it, text, _: (
        count.highlights(text) >= int(it.get("num_highlights"))
    ),
    "detectable_format:multiple_sections": lambda it, text, _: (
        count.sections(text, str(it.get("section_spliter", "section_splitter"))) >= int(it.get("num_sections"))
    ),
    "detectable_format:json_format": lambda it, text, _: _json(it, text),
    "detectable_format:title": lambda it, text, _: _title(it, text),
    "combination:two_responses": lambda it, text, _: _two_responses(it, text),
    "combination:repeat_prompt": lambda it, text, _: _repeats(it, text),
    "startend:end_checker": lambda it, text, _: _ends(it, text),
    "startend:quotation": lambda it, text, _: _quoted(it, text),
    "change_case:capital_word_frequency": lambda it, text, _: _related(
        it, count.capital_words(text), "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda it, text, detector: text.isupper() and _english(text, detector),
    "change_case:english_lowercase": lambda it, text, detector: text.islower() and _english(text, detector),
    "punctuation:no_comma": lambda it, text, _: "," not in text,
}
