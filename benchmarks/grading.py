r"""Agreement and speed of the `math` reward beside math-verify, and what hostile answers do to the workers.

Agreement, on sets of (answer, label, whether they are the same):

- known: the pairs that slime-rm-math is tested with, ours to get right;
- math_verify: math-verify's own test suite (Apache-2.0; none of it is in this repository), read from its source package
  (`--math-verify-source`, or fetched with pip).
  Ours grades a case without a box as its text in a box, math-verify as it is. Cases that set an option are left out.

Speed, on typical long responses: some thousand characters of working, then a box, every second one right, against the
label; numbers mostly, then fractions, roots, polynomials, tuples, intervals and words. Both graders take turns over
several rounds in one process, each round with new responses, and the median round counts, in responses per CPU-second.
`warm` is a round again, as the samples of a group share a label and often an answer.

Hostile: answers made to hang, crash or fill the memory go through worker processes as in a run, with every grader of
slime-rm-math and slime-rm-text, between ordinary ones: how many failed, whether an ordinary reward changed, and the
loop's longest gap, by the clock and in CPU time of its own.

    python -m benchmarks.grading [--quick] [--hostile FILE]

The last line of the output is one line of JSON with every figure.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slime_core import Sample
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.testing import make_options, make_sample
from slime_rm_math import boxed_answers, is_right

REPOSITORY = Path(__file__).resolve().parents[1]
KNOWN = REPOSITORY / "plugins/slime_rm_math/tests/known_answers.jsonl"
VERSION = "0.9.0"
GRADERS = ("math", "deepscaler", "dapo", "format", "length_penalty", "overlong", "f1", "exact_match", "gpqa", "ifeval")
METADATA = {
    "choices": ["3", "4", "5", "6"],
    "instruction_id_list": [
        "punctuation:no_comma",
        "language:response_language",
        "length_constraints:number_sentences",
    ],
    "kwargs": [{}, {"language": "en"}, {"relation": "at least", "num_sentences": 2}],
}
"""What the multiple choice and the instructions of a row need."""
HOSTILE = (
    "8**8**8**8",
    "7^{7^{7^{7}}}",
    "2**(2**40)",
    "(10^7)!",
    "(x+1)**9999",
    "t**t**t**t",
    "\\sum_{k=1}^{10^9} k^k",
    "\\int_0^1 x^{x^{x^x}} dx",
    "(" * 50_000 + ")" * 50_000,
    "\\frac{1}{" * 500 + "x" + "}" * 500,
    "9" * 400_000,
    "+" * 100_000 + "x",
    "a" * 100_000,
    "x^" * 2_000 + "x",
    "\\sin" * 2_000 + "x",
    "{" * 20_000,
    "1," * 20_000,
    "exec('1')",
    "\\",
    "",
)

Grade = Callable[[str, str], bool]


class Case(NamedTuple):
    """What a response is worth against a label; `written` is the response as the set has it, maybe without a box."""

    response: str
    label: str
    same: bool
    written: str = ""


def main() -> None:
    """Run the benchmark and print its report."""
    args = parse_arguments()
    rounds, responses = (1, 30) if args.quick else (args.rounds, args.responses)
    # first, as in a run the process that asks holds no SymPy, whose objects would slow its garbage collector
    report: dict[str, Any] = {"benchmark": "grading", "math_verify": VERSION}
    report |= asyncio.run(hostile(args.hostile, num_ordinary=100 if args.quick else 1000))
    graders: dict[str, Grade] = {"ours": is_right, "math_verify": math_verify_grade()}
    for name, cases in agreement_sets(args.math_verify_source).items():
        report |= agreement(name, cases, graders)
    report |= speed(graders, rounds, responses)
    print(json.dumps(report))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of 30 responses: does it run, not how fast")
    add("--rounds", type=int, default=3, help="turns of each grader (default: %(default)s)")
    add("--responses", type=int, default=300, help="responses a turn (default: %(default)s)")
    add("--math-verify-source", type=Path, metavar="DIR", help="unpacked source of math-verify (default: fetch it)")
    add("--hostile", type=Path, metavar="FILE", help="JSONL rows {answer, label} to grade besides the built-in ones")
    return parser.parse_args()


def math_verify_grade() -> Grade:
    """math-verify as its README uses it, timeouts included."""
    from math_verify import parse, verify

    def grade(response: str, label: str) -> bool:
        return bool(verify(parse(label if "$" in label or "\\boxed" in label else f"${label}$"), parse(response)))

    return grade


# --- agreement --------------------------------------------------------------------------------------------------------
def agreement_sets(source: Path | None) -> dict[str, list[Case]]:
    """Set name -> cases."""
    rows = [json.loads(line) for line in KNOWN.read_text().splitlines()]
    # an answer that ends in a backslash would escape the brace of its box
    boxed = [(row["answer"] + " " * row["answer"].endswith("\\"), row) for row in rows]
    sets = {"known": [Case(rf"\boxed{{{answer}}}", row["label"], row["same"]) for answer, row in boxed]}
    with tempfile.TemporaryDirectory() as directory:
        found = source or fetch_source(Path(directory))
        if found is not None:
            sets["math_verify"] = list(own_cases(found))
    return sets


def fetch_source(directory: Path) -> Path | None:
    """math-verify's source package, unpacked; None where pip or the package registry is out of reach."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--dest", str(directory), f"math-verify=={VERSION}"], capture_output=True, text=True, check=False
    )
    archives = list(directory.glob("*.tar.gz"))
    if done.returncode or not archives:
        print("math-verify's source could not be fetched, its own set is left out:", done.stderr[-300:].strip())
        return None
    with tarfile.open(archives[0]) as archive:
        archive.extractall(directory, filter="data")
    return next(path.parent for path in directory.glob("*/tests"))


def own_cases(source: Path) -> Iterator[Case]:
    """The (gold, pred, expected) rows of its parametrized tests, read without running anything but literals."""
    for path in sorted((source / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize"):
                continue
            names = [name.strip() for name in str(ast.literal_eval(node.args[0])).split(",")]
            if not {"gold", "pred"} <= set(names):
                continue
            for element in getattr(node.args[1], "elts", []):
                try:
                    row = dict(zip(names, ast.literal_eval(element), strict=True))
                except ValueError:  # a row that is computed
                    continue
                options = {key: row[key] for key in ("precision", "strict", "allow_set_relation_comp") if key in row}
                if options and options != {"precision": 6}:
                    continue
                response = row["pred"] if boxed_answers(row["pred"]) else rf"\boxed{{{row['pred']}}}"
                yield Case(response, row["gold"], bool(row.get("expected", row.get("result"))), row["pred"])


def agreement(name: str, cases: list[Case], graders: dict[str, Grade]) -> dict[str, Any]:
    """Share of right verdicts, and how many verdicts of each kind are wrong."""
    report: dict[str, Any] = {f"{name}_cases": len(cases)}
    for grader, grade in graders.items():
        verdicts = [
            (grade((grader == "math_verify" and case.written) or case.response, case.label), case) for case in cases
        ]
        wrong = [case for verdict, case in verdicts if verdict != case.same]
        report |= {
            f"{name}_{grader}_agreement": round(1 - len(wrong) / len(cases), 4),
            f"{name}_{grader}_false_positives": sum(not case.same for case in wrong),
            f"{name}_{grader}_false_negatives": sum(case.same for case in wrong),
        }
        for case in wrong:
            print(f"{name}: {grader} is wrong: ...{case.response[-60:]!r} against {case.label[-60:]!r}: {case.same}")
    return report


# --- speed ------------------------------------------------------------------------------------------------------------
def speed(graders: dict[str, Grade], rounds: int, responses: int) -> dict[str, Any]:
    """Responses per CPU-second of each grader, and ours over math-verify's; the first round warms up."""
    rates: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        cases = typical_cases(responses, seed=number)
        for name, grade in graders.items():
            rate, right = timed(grade, cases)
            if number > 0:
                rates.setdefault(name, []).append(rate)
                rates.setdefault(f"{name}_right", []).append(right)
                rates.setdefault(f"{name}_warm", []).append(timed(grade, cases)[0])
    figures = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "typical_responses": responses,
        **{f"{name}_per_cpu_s": round(figures[name], 1) for name in ("ours", "ours_warm", "math_verify")},
        **{f"{name}_typical_agreement": round(figures[f"{name}_right"], 4) for name in graders},
        "speed_ratio": round(figures["ours"] / figures["math_verify"], 1),
        "speed_ratio_warm": round(figures["ours_warm"] / figures["math_verify_warm"], 1),
    }


def timed(grade: Grade, cases: list[Case]) -> tuple[float, float]:
    """Cases per CPU-second, and the share of right verdicts."""
    start = time.process_time()
    right = sum(grade(case.response, case.label) == case.same for case in cases)
    return len(cases) / max(time.process_time() - start, 1e-9), right / len(cases)


def typical_cases(count: int, seed: int) -> list[Case]:
    """Long responses with a box, every second one right."""
    chance = random.Random(seed)
    cases = []
    for number in range(count):
        make = chance.choices(MAKERS, WEIGHTS)[0]
        label, same, other = make(chance)
        right = number % 2 == 0
        cases.append(
            Case(f"{working(chance)}\n\n**Answer**\n\\[\\boxed{{{same if right else other}}}\\]", label, right)
        )
    return cases


def working(chance: random.Random) -> str:
    """Some thousand characters of steps."""
    steps = []
    for number in range(chance.randint(20, 60)):
        a, b, c = (chance.randint(2, 99) for _ in range(3))
        steps.append(
            f"Step {number}: we have $x_{{{number}}} = \\frac{{{a}}}{{{b}}} + {c}\\sqrt{{{a + b}}}$, and since "
            f"${a} \\cdot {b} = {a * b}$ this gives \\( y = {a * b + c} \\), so we check the case $n \\le {c}$ next."
        )
    return "\n".join(steps)


Made = tuple[str, str, str]  # a label, another way to write it, another answer


def _integer(chance: random.Random) -> Made:
    value = chance.randint(-5000, 50000)
    return str(value), chance.choice([f"{value}", f"{value:,}", f"{value}.0", f"{value}\\text{{ cm}}"]), str(value + 1)


def _fraction(chance: random.Random) -> Made:
    top, bottom = chance.randint(1, 99), chance.randint(101, 199)
    divisor = math.gcd(top, bottom)
    reduced = f"\\frac{{{top // divisor}}}{{{bottom // divisor}}}"
    return reduced, f"\\dfrac{{{top}}}{{{bottom}}}", f"\\frac{{{top + 1}}}{{{bottom}}}"


def _root(chance: random.Random) -> Made:
    factor, radicand = chance.randint(2, 40), chance.choice([2, 3, 5, 7, 11])
    return (
        f"{factor}\\sqrt{{{radicand}}}",
        f"\\sqrt{{{factor**2 * radicand}}}",
        f"{factor + 1}\\sqrt{{{radicand}}}",
    )


def _polynomial(chance: random.Random) -> Made:
    a, b = chance.randint(1, 30), chance.randint(31, 60)
    return f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"(x+{a})(x+{b + 1})"


def _tuple(chance: random.Random) -> Made:
    a, b = chance.randint(-99, 99), chance.randint(2, 99)
    return f"({a}, \\frac{{{b}}}{{101}})", f"\\left({a},\\tfrac{{{b}}}{{101}}\\right)", f"({a}, {b})"


def _interval(chance: random.Random) -> Made:
    a, b = chance.randint(-99, 0), chance.randint(1, 99)
    return f"[{a},{b})", f"{a} \\le x < {b}", f"({a},{b})"


def _words(chance: random.Random) -> Made:
    day, other = chance.sample(["Monday", "Tuesday", "Friday", "Sunday", "even", "odd", "Evelyn", "Carla"], 2)
    return f"\\text{{{day}}}", day, f"\\text{{{other}}}"


MAKERS = (_integer, _fraction, _root, _polynomial, _tuple, _interval, _words)
WEIGHTS = (55, 15, 10, 8, 5, 4, 3)


# --- hostile answers --------------------------------------------------------------------------------------------------
async def hostile(file: Path | None, num_ordinary: int) -> dict[str, Any]:
    """Grade hostile answers between ordinary ones in two workers, and watch the loop meanwhile."""
    rows = [(answer, label) for answer in HOSTILE for label in ("7", "x", "\\frac{\\pi}{2}", "(1,2)")]
    if file is not None:
        given = [json.loads(line) for line in file.read_text().splitlines()]
        rows += [(row["answer"], row["label"]) for row in given]
    args = make_options("--reward", *GRADERS, "--reward-timeout-s", "5", "--reward-memory-gib", "2")
    pool = RewardPool(args, GRADERS)
    failures: dict[str, int] = {}
    killed = 0

    async def grade(reference: str, sample: Sample) -> Any:
        nonlocal killed
        try:
            return await pool.grade("reward", reference, {"sample": sample})
        except RewardFailure as failure:
            failures[reference] = failures.get(reference, 0) + 1
            killed += "worker" in str(failure) or "killed" in str(failure)
            return None

    ordinary = [make_sample(f"\\boxed{{{n}}}", label=str(n // 2 * 2)) for n in range(num_ordinary)]
    samples = [make_sample(f"Answer: \\boxed{{{answer}}}", label=label, metadata=METADATA) for answer, label in rows]
    attacks = [(reference, sample) for reference in GRADERS for sample in samples]
    await asyncio.gather(*(grade("math", sample) for sample in ordinary[:100]))
    gaps: list[Gap] = []
    watcher = asyncio.create_task(watch(gaps))
    started = time.perf_counter()
    results = await asyncio.gather(*(grade("math", one) for one in ordinary), *(grade(*attack) for attack in attacks))
    seconds = time.perf_counter() - started
    watcher.cancel()
    pool.close()
    changed = sum(result != float(n % 2 == 0) for n, result in enumerate(results[: len(ordinary)]))
    return {
        "hostile_calls": len(attacks),
        "hostile_failed": sum(failures.values()),
        "hostile_killed": killed,
        "hostile_s": round(seconds, 2),
        "ordinary_calls": len(ordinary),
        "ordinary_changed": changed,
        "loop_longest_gap_ms": round(1000 * max(gap.wall_s for gap in gaps), 1),
        "loop_longest_work_ms": round(1000 * max(gap.cpu_s for gap in gaps), 1),
    }


class Gap(NamedTuple):
    """How late the loop woke a task, and what its thread computed meanwhile: less, where others use the machine."""

    wall_s: float
    cpu_s: float


async def watch(gaps: list[Gap]) -> None:
    """Note how late the loop wakes this task."""
    while True:
        before, cpu_before = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.001)
        gaps.append(Gap(time.perf_counter() - before - 0.001, time.thread_time() - cpu_before))


if __name__ == "__main__":
    main()
