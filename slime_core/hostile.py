"""Responses that break graders: powers without end, deep nesting, megabytes, odd characters, code, nothing at all."""

from __future__ import annotations

from slime_core.types import Sample, Status

POWERS = ("8**8**8**8", "7^{7^{7^{7}}}", "6^6^6^6", "t**t**t**t", "3**5**17", "1.0001**88888888", "y^(9^99)",
          "5**5**5*z", "e**e**e**e", "(8^8)^8^8", "87654321**54321", "2e309", "9e999", "12!!", "(765432)!", "7!!!!!",
          "8**8!", "\\sqrt[10^9]{2}", "(1+i)^{10^9}", "0^{-1}")  # fmt: skip
ALGEBRA = ("cos(y)**24+tan(y)**9+sin(y)**31", "integrate(exp(y**3)*cos(y),y)", r"\int_1^2 \frac{y}{\ln y} dy",
           r"\sum_{k=1}^{10^9} \frac{1}{k^k}", r"\prod_{k=1}^{10^8} k", r"\lim_{y\to\infty} y^{y^y}", "root(y,88888)",
           "sqrt(y**77777)", "prime(10**8)", "fibonacci(10**8)", "(y+2)**8888", "(a+b+c+d)**150", "5/0", "y/(y-y)",
           "y%4", r"\binom{10^9}{10^8}", r"\tan 10^{300}", r"\sqrt{7+\sqrt{6+\sqrt{5+\sqrt{4+\sqrt{3}}}}}",
           r"\begin{pmatrix}a&b\\c\end{pmatrix}", r"\frac{21}{3}", r"\infty-\infty")  # fmt: skip
BROKEN = ("", " ", "\r\n4\r\n", "[]", "(4,5", "3^(3^(3", ";", "$$", "\\", "{", "}", r"\sqrt[", r"\frac{", r"\frac7",
          r"\boxed{", "\x00", "\ud800", "NaN", "+inf", "Infinity", "None", "false", "oo", "lambda: 0", "exec('1')",
          "().__class__", "import os", "</think>", "<think>", "<answer>", "```", '{"score": 1}', "Score: 10",
          "%s %d {0} {x}")  # fmt: skip
CHARACTERS = ("\u2461", "\u2154", "\u216b", "y\u00b3", "\uff14\uff15", "\u22127", "\u066b25", "-\u221e", "\u56db",
              "\U0001f680", "\u202e4\u202c", "\U0001d7d5", "e\u0301" * 50, "\u0130", "\u00df")  # fmt: skip


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
