"""Ray as the run needs it: joined, or started here and ended even when the driver is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import ray

from slime_core.cluster import reaper
from slime_core.errors import ClusterError
from slime_core.options import Options
from slime_core.weights import leftovers


def start_ray(args: Options, num_cpus: int) -> None:
    """Join the cluster of --ray-address, or start a Ray of our own that declares as many CPUs as the layout needs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    environment = {
        # Modules named by flags are looked up as `python -m` would, in the workers too.
        "PYTHONPATH": os.pathsep.join(p for p in (str(Path.cwd()), os.environ.get("PYTHONPATH", "")) if p),
        "HF_HUB_OFFLINE": "1",
        # Engines and trainers share the cores: threads that spin while they wait cost the others ten times the time.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    options: dict[str, Any] = {"address": args.ray_address or "local"}
    if not args.ray_address:
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": environment},
            **options,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise ClusterError(f"Ray did not start: {first_line(error)}") from error


def start_reaper() -> subprocess.Popen[str]:
    """A process that ends those of this Ray, should this process be killed; actors end with Ray.

    However the run ends, it removes the weights that a killed trainer left in shared memory.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__, leftovers.__file__],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for process in psutil.Process().children(recursive=True):
        if process.pid != watcher.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                watch(watcher, process.pid, process.create_time())
    return watcher


def watch(watcher: subprocess.Popen[str], pid: int, started: float) -> None:
    """Let the reaper end this process too; one of another machine is none to it."""
    if watcher.stdin is not None:
        watcher.stdin.write(f"{pid} {started!r}\n")
        watcher.stdin.flush()


def first_line(error: Exception) -> str:
    """What an error says first, as a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(error).__name__ + "."
