"""The turns: the model writes code, the plugin runs it, the model goes on, until there is no code."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from typing import Any

from slime_core import Sample, Turn, call_tools, flag_types, hookimpl, take_turns
from slime_tool_python.sandbox import CodeError, Limits, require_protection, run_code

CODE_BEGIN, CODE_END = "<code>", "</code>"
FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)(?:```\s*)?", re.DOTALL)
NO_CODE = f"there is no code; write it between {CODE_BEGIN} and {CODE_END}"
NO_OUTPUT = "(it printed nothing)"
GRACE_S = 30.0
"""For starting and clearing up, beyond the code's own time."""


class ToolPython:
    """Bounds how many sandboxes run at once; keeps nothing between samples."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._limits = Limits(
            timeout_s=args.tool_python_timeout_s,
            memory_mib=args.tool_python_memory_mib,
            disk_mib=args.tool_python_disk_mib,
            max_processes=args.tool_python_max_processes,
            max_output_characters=args.tool_python_max_output,
        )
        self._max_turns: int = args.tool_python_max_turns
        self._unsafe: bool = args.tool_python_unsafe
        self._slots = asyncio.Semaphore(args.tool_python_concurrency)
        self._trying = asyncio.Lock()
        self._tried = False

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The generator's flags."""
        flag = parser.add_argument
        flag("--tool-python-max-turns", type=flag_types.positive_int, default=8, metavar="N", help="turns of the model")
        flag("--tool-python-timeout-s", type=flag_types.positive, default=10.0, metavar="S", help="for one run")
        flag("--tool-python-memory-mib", type=flag_types.positive_int, default=512, metavar="N", help="for one run")
        flag("--tool-python-disk-mib", type=flag_types.positive_int, default=64, metavar="N", help="it may write")
        flag("--tool-python-max-processes", type=flag_types.positive_int, default=8, metavar="N", help="of one run")
        flag(
            "--tool-python-max-output",
            type=flag_types.positive_int,
            default=4000,
            metavar="N",
            help="characters of output that the model is shown; code that prints four times as many bytes is stopped",
        )
        flag(
            "--tool-python-concurrency",
            type=flag_types.positive_int,
            default=os.cpu_count() or 1,
            metavar="N",
            help="runs at once",
        )
        flag(
            "--tool-python-unsafe",
            action="store_true",
            help="run code without the sandbox, where the system has none: it can do all that this user can",
        )

    @hookimpl
    async def generate(self, engine: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
        """The sample after all its turns; one that was aborted goes on in the turn it was in."""
        await self._require_protection()

        async def reply(turn: Turn) -> str | None:
            if CODE_END not in turn.text:
                return None
            async with self._slots:
                (result,) = await call_tools(
                    sample, [self._run(code_of(turn.text))], timeout_s=self._limits.timeout_s + GRACE_S
                )
            return f"\n<interpreter>\n{result.text or NO_OUTPUT}\n</interpreter>\n"

        return [await take_turns(engine, sample, sampling_params, reply, max_turns=self._max_turns, stop=[CODE_END])]

    async def _run(self, code: str | None) -> str:
        if code is None:
            raise CodeError(NO_CODE)
        return await run_code(code, self._limits, unsafe=self._unsafe)

    async def _require_protection(self) -> None:
        """Once a process, before the first code runs."""
        async with self._trying:
            if not self._tried and not self._unsafe:
                await require_protection(self._limits)
            self._tried = True


def code_of(text: str) -> str | None:
    """The code of a turn's last block, without its fence; None where the block is not opened or empty."""
    _, begun, body = text.partition(CODE_END)[0].rpartition(CODE_BEGIN)
    if not begun:
        return None
    fenced = FENCED.fullmatch(body)
    code = fenced[1] if fenced else body
    return code if code.strip() else None
