"""The gateway's flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_core import flag_types

DEFAULT_FUNCTION = "agent"


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """`--gateway-*`."""
    parser.add_argument(
        "--gateway-agent",
        type=_agent_file,
        metavar="FILE.py[:NAME]",
        help="the agent: `async def agent(task)` of a file, or the function called NAME",
    )
    parser.add_argument(
        "--gateway-command",
        metavar="COMMAND",
        help="the agent: a shell command, one process a sample, the task as JSON on its standard input",
    )
    parser.add_argument(
        "--gateway-directory",
        type=_absolute,
        default=".",
        metavar="DIR",
        help="where agents run; by default where the run was started",
    )
    parser.add_argument(
        "--gateway-num-processes", type=flag_types.positive_int, default=1, metavar="N", help="that agents run in"
    )
    parser.add_argument(
        "--gateway-max-turns", type=flag_types.positive_int, default=64, metavar="N", help="requests of one agent"
    )
    parser.add_argument(
        "--gateway-timeout-s", type=flag_types.positive, default=1800.0, metavar="S", help="for one agent"
    )
    parser.add_argument("--gateway-host", default="127.0.0.1", metavar="ADDRESS", help="to listen on")
    parser.add_argument(
        "--gateway-port", type=_port, default=0, metavar="PORT", help="to listen on; 0 is any that is free"
    )
    parser.add_argument(
        "--gateway-key-env",
        metavar="NAME",
        help="environment variable with the key of programs that fetch tasks; needed off the loopback address",
    )


def _agent_file(text: str) -> str:
    """FILE.py or FILE.py:NAME with the file's absolute path and the function's name: processes start elsewhere."""
    path, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        path, name = text, DEFAULT_FUNCTION
    if not Path(path).expanduser().is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return f"{_absolute(path)}:{name}"


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().absolute())


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port, a number from 0 to 65535")
    return int(text)
