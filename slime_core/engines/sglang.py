"""SGLang as the engine: its command line, and what its own environment says of its version and flags."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_core.engines.frozen import options_of
from slime_core.engines.parallel import TENSOR, Node, check_updates, sizes
from slime_core.errors import EngineError, OptionError
from slime_core.options import Options

OLDEST = (0, 5, 9)
"""The first version whose protocol was tried."""

PROBE_TIMEOUT_S = 180.0
PROBE = """
import argparse, json, sglang, torch
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print("\\n" + json.dumps({"version": sglang.__version__, "flags": flags, "nccl": nccl}))
"""


@dataclass(frozen=True)
class Installation:
    """What an environment's SGLang says of itself."""

    version: str
    flags: list[str]
    nccl: list[int] | None = None
    """The version of its torch's NCCL; None where it finds no GPU."""


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


def check_nccl(found: Installation, own: Sequence[int] | None) -> None:
    """Refuse to broadcast weights between two releases of NCCL, which do not speak with one another.

    Args:
        found: the engines' environment.
        own: the version of the trainer's NCCL; None without one.

    Raises:
        OptionError: naming both.
    """
    if found.nccl is not None and own is not None and list(own) != found.nccl:
        theirs, ours = (".".join(map(str, version)) for version in (found.nccl, own))
        raise OptionError(
            f"--weight-transport broadcast: SGLang's environment has NCCL {theirs} and the trainer's {ours}, which "
            "refuse each other; install the same torch in both, or use --weight-transport disk."
        )


def check(args: Options, found: Installation) -> None:
    """Refuse a version that is too old, and `--sglang-*` flags that this SGLang does not have.

    Raises:
        EngineError: for the version.
        OptionError: for a flag, with a suggestion.
    """
    check_version(found.version)
    for name in args.sglang:
        if f"--{name}" not in found.flags:
            close = difflib.get_close_matches(f"--{name}", found.flags, n=1)
            hint = f"; did you mean --sglang-{close[0].removeprefix('--')}?" if close else "."
            raise OptionError(f"SGLang {found.version} has no flag --{name} (given as --sglang-{name}){hint}")


def version_number(version: str) -> tuple[int, ...]:
    """Its first three numbers: (0, 5, 24) of `0.5.24rc1`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_version(version: str) -> None:
    """Refuse one that is too old.

    Raises:
        EngineError: naming it and the oldest.
    """
    if version_number(version) < OLDEST:
        raise EngineError(f"SGLang {version} is too old; --engine sglang needs {'.'.join(map(str, OLDEST))}.")


def command(
    args: Options, index: int, port: int | str, node: Node | None = None, bootstrap_port: int | str = 0
) -> list[str]:
    """The command line of a server, or of one machine's part of it.

    Args:
        bootstrap_port: where decoding engines find this one, if it prefills.

    Raises:
        OptionError: when its parallel sizes contradict each other.
    """
    node = node or Node()
    words = [args.engine_python or sys.executable, "-m", "sglang.launch_server"]
    words += ["--model-path", args.rollout_model or args.model, "--host", node.host, "--port", str(port)]
    words += ["--max-running-requests", str(args.engine_max_requests)]
    if args.max_context_tokens:
        words += ["--context-length", str(args.max_context_tokens)]
    if "random-seed" not in args.sglang:
        words += ["--random-seed", str(args.seed + index)]
    tensor = sizes(args).tensor
    if tensor > 1 and not any(name in args.sglang for name in TENSOR):
        words += ["--tp-size", str(tensor)]
    if node.num_nodes > 1:
        words += ["--nnodes", str(node.num_nodes), "--node-rank", str(node.rank), "--dist-init-addr", node.meeting]
    if prefills(args, index):
        words += ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap_port)]
    elif args.num_prefill_engines:
        words += ["--disaggregation-mode", "decode"]
    if args.offload_engines and args.sglang.get("device") != ["cpu"] and "enable-memory-saver" not in args.sglang:
        words += ["--enable-memory-saver"]
    for name, values in args.sglang.items():
        words += [f"--{name}", *values]
    return words


def prefills(args: Options, index: int) -> bool:
    """Whether an engine only reads prompts; the first ones do."""
    return index < int(args.num_prefill_engines)


def planned_commands(args: Options) -> list[str]:
    """The lines that start the engines of a run, for people to read; ports and addresses are chosen at the start.

    Raises:
        OptionError: when an engine's parallel sizes contradict each other, or it could take no weights.
    """
    if not args.external_engines:
        check_updates(args)
    lines = [] if args.external_engines else _planned(args, "engine")
    return lines + [line for model in args.frozen_model for line in _planned(options_of(args, model), model.name)]


def _planned(args: Options, name: str) -> list[str]:
    num_gpus, lines = sizes(args).num_gpus, []
    for index in range(args.num_engines):
        for rank in range(args.num_nodes_per_engine):
            node = Node("HOST", rank, args.num_nodes_per_engine, "HOST:PORT")
            words = command(args, index, "PORT", node, "PORT")
            machine = f", machine {rank}" if args.num_nodes_per_engine > 1 else ""
            lines.append(f"{name} {index}{machine} ({num_gpus} GPUs): {shlex.join(words)}")
    return lines
