"""`--reward remote_rm`: a service of your own grades; prompt, response, label and metadata go there as JSON."""

from __future__ import annotations

import argparse
import numbers
from collections.abc import Sequence
from typing import Any

from slime_core import OptionError, Sample, flag_types, hookimpl
from slime_rm_remote.batcher import Batcher
from slime_rm_remote.flags import add_service_options, http_url, service
from slime_rm_remote.service import ServiceError


class RemoteReward:
    """Holds the connections and the batch being gathered."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.remote_rm_url is None:
            raise OptionError("--reward remote_rm needs the address of a reward service: --remote-rm-url URL.")
        self._key: str = args.remote_rm_key
        self._service = service(args, "remote-rm", args.remote_rm_url)
        self._batched: bool = args.remote_rm_batch_size > 1
        self._batcher = Batcher(args.remote_rm_batch_size, args.remote_rm_batch_wait_ms / 1000, self._grade_batch)

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The reward's flags."""
        parser.add_argument("--remote-rm-url", type=http_url, metavar="URL", help="where samples are posted")
        parser.add_argument(
            "--remote-rm-key", default="reward", metavar="KEY", help="of an answer that is an object (default: reward)"
        )
        parser.add_argument(
            "--remote-rm-batch-size",
            type=flag_types.positive_int,
            default=1,
            metavar="N",
            help="1: a request holds one sample and its answer one reward; more: lists of at most so many",
        )
        parser.add_argument(
            "--remote-rm-batch-wait-ms",
            type=flag_types.positive,
            default=20.0,
            metavar="MS",
            help="how long a batch waits to become full (default: 20)",
        )
        add_service_options(parser, "remote-rm")

    @hookimpl
    async def reward(self, sample: Sample) -> float | dict[str, float]:
        """Return what the service gives.

        Raises:
            ServiceError: when it refuses, does not answer in time, or answers something else than rewards.
        """
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        if not self._batched:
            return self._reward(await self._service.post(body))
        return self._reward(await self._batcher.submit(body))

    def close(self) -> None:
        """Close the connections."""
        self._service.close()

    async def _grade_batch(self, bodies: list[Any]) -> Sequence[Any]:
        answers = await self._service.post(bodies)
        if not isinstance(answers, list) or len(answers) != len(bodies):
            what = f"a list of {len(answers)}" if isinstance(answers, list) else type(answers).__name__
            raise ServiceError(f"the service answered {what} where a list of {len(bodies)} rewards is needed")
        return answers

    def _reward(self, answer: Any) -> float | dict[str, float]:
        """A number, or an object's number under `--remote-rm-key` with its other numbers, which are logged."""
        if _is_number(answer):
            return float(answer)
        if not isinstance(answer, dict):
            raise ServiceError(f"the service answered {answer!r:.200} where a number or an object is needed")
        if not _is_number(answer.get(self._key)):
            raise ServiceError(
                f"the service's answer has no number under '{self._key}' (--remote-rm-key): {answer!r:.200}"
            )
        others = {key: float(value) for key, value in answer.items() if _is_number(value) and key != "reward"}
        others.pop(self._key, None)
        return {"reward": float(answer[self._key]), **others}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)
