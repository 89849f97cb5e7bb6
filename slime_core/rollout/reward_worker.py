"""Runs in a reward worker process: loads the plugins by name and grades what it is sent."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from slime_core.options import Options
from slime_core.plugins import Plugins, load_plugins

PR_SET_PDEATHSIG = 1
_prepared: ContextVar[tuple[Options, Plugins]] = ContextVar("prepared")


def start(args: Options, references: Sequence[str], memory_bytes: int) -> None:
    """Prepare the process: a memory limit, no life after the parent's, the plugins loaded."""
    _die_with_parent()
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an address-space limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _prepared.set((args, load_plugins(args, references)))


def ready() -> None:
    """Do nothing; a pool starts its processes with the first task."""


def grade(hook: str, reference: str, subject: dict[str, Any]) -> tuple[Any, str | None]:
    """The plugin's result and None, or None and why it failed: its exception types need not exist in the parent."""
    args, plugins = _prepared.get()
    try:
        return plugins.bind(hook, reference)(args=args, engine=None, **subject), None
    except (Exception, SystemExit) as error:
        return None, f"{type(error).__name__}: {error}"


def _die_with_parent() -> None:
    """A grader stuck in C code notices nothing; the kernel ends it when the parent goes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
