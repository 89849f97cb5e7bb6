"""The sglang-router process that every generation passes through."""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from slime_core.engines.process import LOOPBACK, ServerProcess, answers, free_port, port_is_free
from slime_core.errors import EngineError
from slime_core.options import Options

START_TIMEOUT_S = 60.0
PORT_ATTEMPTS = 3


class Router:
    """A running sglang-router in front of the given engines."""

    def __init__(self, args: Options, worker_urls: Sequence[str], log_dir: Path) -> None:
        if args.router_port and not port_is_free(args.router_port):
            raise EngineError(
                f"port {args.router_port} on {LOOPBACK} is in use; give --router-port another one, or 0 for any."
            )
        attempts = 1 if args.router_port else PORT_ATTEMPTS
        for attempt in range(attempts):
            self.url = f"http://{LOOPBACK}:{args.router_port or free_port()}"
            self.process = ServerProcess("sglang-router", self._command(args, worker_urls), log_dir / "router.log")
            try:
                self.process.wait_until(lambda: self._num_healthy() == len(worker_urls), START_TIMEOUT_S)
                return
            except EngineError:
                # Another process may have taken the free port in between.
                taken = self.process.exit_code() is not None
                self.process.stop()
                if not taken or attempt == attempts - 1:
                    raise

    def _command(self, args: Options, worker_urls: Sequence[str]) -> list[str]:
        """Retries are the client's: the router's rerun a generation from scratch, up to five times."""
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", LOOPBACK]
        command += ["--port", self.url.rsplit(":", 1)[1], "--worker-urls", *worker_urls, "--policy", args.router_policy]
        command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port()), "--log-level", "warn"]
        command += ["--disable-retries", "--disable-circuit-breaker", "--max-concurrent-requests", "-1"]
        command += ["--health-check-interval-secs", "2", "--health-failure-threshold", "2"]
        command += ["--worker-startup-check-interval", "1"]
        command += ["--request-timeout-secs", str(math.ceil(args.request_timeout_s))]
        return command

    def _num_healthy(self) -> int:
        if not answers(f"{self.url}/readiness"):
            return -1
        with urllib.request.urlopen(f"{self.url}/workers", timeout=5) as response:
            workers = json.load(response)["workers"]
        return sum(worker["is_healthy"] for worker in workers)

    def stop(self) -> None:
        """End the router."""
        self.process.stop()
