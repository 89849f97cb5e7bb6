"""Responses that break graders: powers without end, deep nesting, megabytes, odd characters, code, nothing at all."""

from __future__ import annotations

from slime_core.types import Sample, Status

POWERS = ("9**9**9**9", "9^{9^{9}}", "9^9^9^9", "x**x**x**x", "2**9**9", "1.5**99999999", "x^(10^10)", "7**7**7*x",
          "pi**pi**pi**pi", "(9^9)^9^9", "99999999**99999", "1e400", "1e500", "10!!", "(999999)!", "9!!!!",
          "9**9!")  # fmt: skip
ALGEBRA = ("sin(x)**20+cos(x)**20+tan(x)**7", "integrate(exp(x**2)*sin(x),x)", r"\int_0^1 x dx", "root(x,99999)",
           "sqrt(x**99999)", "prime(10**7)", "fibonacci(10**7)", "(x+1)**9999", "(x+y+z)**200", "0/0", "1/(x-x)", "x%3",
           r"\sqrt{1+\sqrt{2+\sqrt{3+\sqrt{4+\sqrt{5}}}}}", r"\begin{pmatrix}1\\2\end{pmatrix}",
           r"\frac{14}{2}")  # fmt: skip
BROKEN = ("", " ", "\n7\n", "()", "(1,2", "5^(5^(5", ",", "$", "\\", "{", "}", r"\sqrt", r"\frac", r"\frac1",
          r"\boxed{", "\x00", "\ud800", "nan", "-inf", "infinity", "None", "true", "zoo", "lambda x: x",
          "__import__('os').system('true')",
          "open('/etc/passwd')", "</think>", "<think>", "<answer>", "```", '{"score": 1}', "Score: 10",
          "%s %d {0} {x}")  # fmt: skip
CHARACTERS = ("\u2460", "\u00bd", "\u2167", "x\u00b2", "\uff11\uff12\uff13", "\u22125", "\u066b5", "\u221e",
              "\U0001f642",
              "\u202e7\u202c", "e\u0301" * 50, "\u0130", "\u00df")  # fmt: skip


def hostile_answers() -> list[str]:
    """Answers to put where an answer is looked for; the longest has half a million characters."""
    nested = [f"{left * 5_000}7{right * 5_000}" for left, right in ("()", "[]", "{}", (r"\frac{1}{", "}"))]
    long = ["7" * 400_000, "a" * 500_000, "+" * 100_000 + "7", "-" * 50_000, "1,111" * 5_000, "x" * 20_000 + "^2",
            "word " * 60_000, "\\boxed{" * 20_000, "\n" * 100_000, "<<" * 50_000, "*" * 100_000]  # fmt: skip
    return [*POWERS, *ALGEBRA, *BROKEN, *CHARACTERS, *nested, *long]


def hostile_responses() -> list[str]:
    """Every hostile answer alone, in a box, and behind 'Answer:'."""
    return [form for answer in hostile_answers() for form in (answer, rf"So \boxed{{{answer}}}", f"Answer: {answer}")]


def hostile_samples(ordinary: Sample) -> list[Sample]:
    """Finished samples as `ordinary` is, its prompt, label and metadata, with hostile responses; some are TRUNCATED."""
    samples = []
    for number, response in enumerate(hostile_responses()):
        sample = ordinary.clone()
        sample.restart()
        count = min(len(response), 4_096)
        sample.append([0] * count, text=response, logprobs=[-1.0] * count, weight_version=0)
        sample.status = Status.TRUNCATED if number % 10 == 9 else Status.COMPLETED
        sample.index = sample.rollout_index = number
        samples.append(sample)
    return samples
