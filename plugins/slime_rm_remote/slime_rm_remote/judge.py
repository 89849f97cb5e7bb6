"""`--reward judge`: a language model behind an OpenAI-compatible endpoint grades the response."""

from __future__ import annotations

import argparse
import asyncio
from statistics import fmean
from typing import Any

from slime_core import OptionError, Sample, flag_types, hookimpl
from slime_rm_remote.flags import add_service_options, http_url, json_object, service
from slime_rm_remote.score import SCORE, ScoreParser, score_pattern
from slime_rm_remote.service import ServiceError
from slime_rm_remote.template import JudgeTemplate


class Judge:
    """Holds the connections, the template and the parser."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.judge_url is None or args.judge_model is None:
            raise OptionError("--reward judge needs an endpoint and a model: --judge-url URL --judge-model NAME.")
        if args.judge_min_score >= args.judge_max_score:
            raise OptionError(
                f"--judge-min-score {args.judge_min_score:g} must be below --judge-max-score {args.judge_max_score:g}."
            )
        self._template = JudgeTemplate(args.judge_template, args.judge_min_score, args.judge_max_score)
        self._parser = ScoreParser(
            args.judge_score_pattern, args.judge_score_key, args.judge_min_score, args.judge_max_score
        )
        self._service = service(args, "judge", f"{args.judge_url}/chat/completions")
        self._num_votes: int = args.judge_num_votes
        self._system: str | None = args.judge_system
        self._body = {
            "model": args.judge_model,
            "temperature": args.judge_temperature,
            "max_tokens": args.judge_max_tokens,
            **args.judge_extra_body,
        }

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The reward's flags."""
        parser.add_argument("--judge-url", type=http_url, metavar="URL", help="for example http://127.0.0.1:8000/v1")
        parser.add_argument("--judge-model", metavar="NAME", help="the model that the endpoint serves")
        parser.add_argument(
            "--judge-template",
            metavar="FILE",
            help="Jinja template of the question; it sees prompt, response, answer (the response behind its thinking), "
            "label, metadata, min_score and max_score",
        )
        parser.add_argument("--judge-system", metavar="TEXT", help="system message")
        parser.add_argument(
            "--judge-score-pattern",
            type=score_pattern,
            default=SCORE,
            metavar="REGEX",
            help="its first group is the score; the last match counts (default: 'Score: N')",
        )
        parser.add_argument(
            "--judge-score-key", metavar="KEY", help="the judge answers a JSON object, and the score is under this key"
        )
        parser.add_argument("--judge-min-score", type=float, default=0.0, metavar="X", help="gives reward 0")
        parser.add_argument("--judge-max-score", type=float, default=10.0, metavar="X", help="gives reward 1")
        parser.add_argument(
            "--judge-num-votes",
            type=flag_types.positive_int,
            default=1,
            metavar="N",
            help="answers asked for; their mean counts",
        )
        parser.add_argument("--judge-temperature", type=float, default=0.0, metavar="X", help="of its answers")
        parser.add_argument(
            "--judge-max-tokens", type=flag_types.positive_int, default=1024, metavar="N", help="of one answer"
        )
        parser.add_argument(
            "--judge-extra-body", type=json_object, default={}, metavar="JSON", help="further fields of the request"
        )
        add_service_options(parser, "judge")

    @hookimpl
    async def reward(self, sample: Sample) -> dict[str, float]:
        """Return the mean score between 0 and 1 as reward, and as the judge gave it under `score`.

        Raises:
            ServiceError: when the endpoint refuses, does not answer in time, or names no score in range.
        """
        messages = [{"role": "user", "content": self._template.render(sample)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        body = {**self._body, "messages": messages}
        scores = await asyncio.gather(*(self._score(body) for _ in range(self._num_votes)))
        return {"reward": self._parser.scaled(fmean(scores)), "score": fmean(scores)}

    def close(self) -> None:
        """Close the connections."""
        self._service.close()

    async def _score(self, body: dict[str, Any]) -> float:
        answer = await self._service.post(body)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"the endpoint's answer is no chat completion: {answer!r:.200}") from None
        try:
            return self._parser.score(text)
        except ValueError as error:
            cut = " (it was cut off at --judge-max-tokens)" if choice.get("finish_reason") == "length" else ""
            raise ServiceError(f"{error}{cut}") from None
