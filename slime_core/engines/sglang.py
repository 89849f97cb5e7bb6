"""SGLang as the engine: its command line, and what its own environment says of its version and flags."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from slime_core.engines.process import LOOPBACK
from slime_core.errors import EngineError, OptionError
from slime_core.options import Options

OLDEST = (0, 5, 9)
"""The first version whose protocol was tried."""

PROBE_TIMEOUT_S = 180.0
PROBE = """
import argparse, json, sglang
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
print("\\n" + json.dumps({"version": sglang.__version__, "flags": flags}))
"""
OURS = ("model-path", "model", "host", "port", "max-running-requests", "context-length")
"""Flags that slime sets itself."""


@dataclass(frozen=True)
class Installation:
    """What an environment's SGLang says of itself."""

    version: str
    flags: list[str]


def inspect(python: str, environment: Mapping[str, str]) -> Installation:
    """Ask the SGLang of that Python.

    Raises:
        EngineError: when there is none, or it cannot be imported.
    """
    try:
        done = subprocess.run(
            [python, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"--engine-python {python} cannot be run: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(
            f"{python} has no SGLang that can be imported ({last}); install it there (pip install sglang), or name "
            "another environment with --engine-python."
        )
    return Installation(**json.loads(done.stdout.strip().splitlines()[-1]))


def check(args: Options, found: Installation) -> None:
    """Refuse a version that is too old, and `--sglang-*` flags that this SGLang does not have.

    Raises:
        EngineError: for the version.
        OptionError: for a flag, with a suggestion.
    """
    number = tuple(int(part) for part in found.version.split(".")[:3] if part.isdigit())
    if number < OLDEST:
        raise EngineError(f"SGLang {found.version} is too old; --engine sglang needs {'.'.join(map(str, OLDEST))}.")
    for name in args.sglang:
        if name in OURS:
            raise OptionError(f"--sglang-{name} is set by slime itself; drop it.")
        if f"--{name}" not in found.flags:
            close = difflib.get_close_matches(f"--{name}", found.flags, n=1)
            hint = f"; did you mean --sglang-{close[0].removeprefix('--')}?" if close else "."
            raise OptionError(f"SGLang {found.version} has no flag --{name} (given as --sglang-{name}){hint}")


def command(args: Options, index: int, port: int) -> list[str]:
    """The server's command line."""
    words = [args.engine_python or sys.executable, "-m", "sglang.launch_server"]
    words += ["--model-path", args.model, "--host", LOOPBACK, "--port", str(port)]
    words += ["--max-running-requests", str(args.engine_max_requests)]
    if args.max_context_tokens:
        words += ["--context-length", str(args.max_context_tokens)]
    if "random-seed" not in args.sglang:
        words += ["--random-seed", str(args.seed + index)]
    if args.offload_engines and args.sglang.get("device") != ["cpu"] and "enable-memory-saver" not in args.sglang:
        words += ["--enable-memory-saver"]
    for name, values in args.sglang.items():
        words += [f"--{name}", *values]
    return words
