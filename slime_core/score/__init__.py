"""`slime score`: grade the responses in a file as a run would, in the same worker processes, without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, TextIO

from slime_core.errors import OptionError
from slime_core.flag_types import non_negative, positive_int
from slime_core.options import Options, parse
from slime_core.score.grading import graded
from slime_core.score.report import Report
from slime_core.score.rows import read_rows
from slime_core.types import Sample

DESCRIPTION = (
    "Grade the responses in a JSONL file, as training would: in worker processes, with time and memory limits."
)
EPILOG = (
    "Further flags are those of `slime train`: --reward NAME[=WEIGHT]... (needed), those of the rewards, --label-key, "
    "--metadata-key, --reward-timeout-s, --reward-workers, --config FILE, ... With --model DIR its tokenizer counts "
    "response tokens; without it a word counts as one."
)


def run_score(words: Sequence[str]) -> int:
    """Grade and report; the exit code is 0 when at least one sample got a reward."""
    words, path = _take_file(list(words))
    own, rest = _parser().parse_known_args(words)
    if path is None:
        raise OptionError("name the file of rows, best first: slime score rows.jsonl --reward NAME")
    if not Path(path).is_file():
        raise OptionError(f"there is no file {path}.")
    args = parse(rest, needs_model=False).args
    if not args.reward:
        raise OptionError("name at least one reward: slime score rows.jsonl --reward NAME")
    report = Report(args, own.compare, own.tolerance, own.show)
    with ExitStack() as stack:
        out = stack.enter_context(Path(own.out).open("w")) if own.out else None
        asyncio.run(_score(args, own, path, report, out))
    print(json.dumps(report.as_dict()) if own.json else report.as_text(path))
    return 0 if report.num_graded else 1


async def _score(args: Options, own: argparse.Namespace, path: str, report: Report, out: TextIO | None) -> None:
    rows = read_rows(args, path, own.response_key, own.compare, own.limit, report.note_bad_row)
    started = time.monotonic()
    async for row in graded(args, rows, report):
        report.add(row)
        if out is not None:
            for sample in row.samples:
                out.write(json.dumps(_result(row.number, sample)) + "\n")
        if sys.stderr.isatty() and report.num_samples % 100 == 0:
            print(f"\r{report.num_samples:,} samples", end="", file=sys.stderr)
    report.wall_s = time.monotonic() - started
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def _result(number: int, sample: Sample) -> dict[str, object]:
    return {"row": number, "reward": sample.reward, "rewards": sample.rewards, "failure": sample.failure}


_SWITCHES = ("--json", "--skip-bad-rows", "--shuffle", "--no-shuffle", "--apply-chat-template")
"""Flags without a value that may stand before the file."""


def _take_file(words: list[str]) -> tuple[list[str], str | None]:
    """The words without the file of rows, and the file: the first word, or a .jsonl word that is no flag's value."""
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        is_value = before.startswith("--") and "=" not in before and before not in _SWITCHES
        if not word.startswith("-") and not is_value and (position == 0 or word.endswith(".jsonl")):
            return words[:position] + words[position + 1 :], word
    return words, None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message[:1].upper() + message[1:] + ".")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slime score",
        usage="slime score ROWS.jsonl --reward NAME... [flag ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--response-key", default="response", metavar="KEY", help="field with the response, or a list of them: a group"
    )
    parser.add_argument(
        "--compare", metavar="KEY", help="field (of the row or its metadata) with a reward to compare with, or a list"
    )
    parser.add_argument(
        "--tolerance", type=non_negative, default=1e-6, metavar="X", help="rewards that differ by more disagree"
    )
    parser.add_argument(
        "--show", type=int, default=5, metavar="N", help="failures and disagreements shown of each kind"
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="rows to grade (default: all)")
    parser.add_argument("--out", metavar="FILE", help="write a JSON line for every sample")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
