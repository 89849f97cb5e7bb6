"""The sglang-router process that every generation passes through, and the engines that it knows."""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.engines.process import DIRECT, LOOPBACK, ServerProcess, answers, free_port, port_is_free
from slime_core.engines.topology import ask_topology
from slime_core.errors import EngineError
from slime_core.options import Options

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 5.0
POLL_S = 0.05
PORT_ATTEMPTS = 3


class Router:
    """A running sglang-router in front of the given engines. Its address stays, also over a restart."""

    def __init__(self, args: Options, worker_urls: Sequence[str], log_dir: Path, name: str = "router") -> None:
        self._args, self._log = args, log_dir / f"{name}.log"
        self._disaggregated = args.num_prefill_engines > 0 or (
            args.engine == "sglang" and any(ask_topology(url).role != "regular" for url in args.external_engines)
        )
        if args.router_port and not port_is_free(args.router_port):
            raise EngineError(
                f"port {args.router_port} on {LOOPBACK} is in use; give --router-port another one, or 0 for any."
            )
        attempts = 1 if args.router_port else PORT_ATTEMPTS
        for attempt in range(attempts):
            self.url = f"http://{LOOPBACK}:{args.router_port or free_port()}"
            self.process = self._launch()
            try:
                self._set_up(worker_urls, len(worker_urls))
                return
            except EngineError:
                # Another process may have taken the free port in between.
                taken = self.process.exit_code() is not None
                self.process.stop()
                if not taken or attempt == attempts - 1:
                    raise

    def alive(self, timeout_s: float) -> bool:
        """Whether the process runs and answers."""
        return self.process.exit_code() is None and answers(f"{self.url}/health", timeout_s)

    def restart(self, worker_urls: Sequence[str]) -> None:
        """Begin anew at the same address; returns once one of these engines is reached.

        Raises:
            EngineError: with the end of its log, when it does not get ready.
        """
        self.process.stop()
        self.process = self._launch()
        self._set_up(worker_urls, min(1, len(worker_urls)))

    def add(self, url: str) -> None:
        """Send requests to an engine, from when this returns.

        Raises:
            EngineError: when the router does not find it healthy.
        """
        self._introduce(url)
        self.process.wait_until(lambda: any(w["url"] == url and w["is_healthy"] for w in self._workers()), 30, POLL_S)

    def remove(self, url: str) -> None:
        """Send an engine nothing more; one that is not known is no error."""
        for worker in self._workers():
            if worker["url"] == url:
                self._call("DELETE", f"/workers/{worker['id']}")

    def stop(self) -> None:
        """End the router."""
        self.process.stop()

    def _launch(self) -> ServerProcess:
        """Retries are the client's: the router's rerun a generation from scratch, up to five times."""
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", LOOPBACK]
        command += ["--port", self.url.rsplit(":", 1)[1], "--policy", self._args.router_policy]
        command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port()), "--log-level", "warn"]
        command += ["--disable-retries", "--disable-circuit-breaker", "--max-concurrent-requests", "-1"]
        # To /health engines that stand still for an update, or have released their memory, are ill; the fleet asks that
        command += ["--health-check-endpoint", "/model_info"]
        command += ["--health-check-interval-secs", "2", "--health-failure-threshold", "2"]
        command += ["--worker-startup-check-interval", "1"]
        command += ["--request-timeout-secs", str(math.ceil(self._args.request_timeout_s))]
        if self._disaggregated:
            command += ["--pd-disaggregation"]
        return ServerProcess("sglang-router", command, self._log)

    def _set_up(self, worker_urls: Sequence[str], num_healthy: int) -> None:
        self.process.wait_until(lambda: answers(f"{self.url}/health"), START_TIMEOUT_S)
        for url in worker_urls:
            self._introduce(url)
        self.process.wait_until(
            lambda: sum(worker["is_healthy"] for worker in self._workers()) >= num_healthy, START_TIMEOUT_S
        )

    def _introduce(self, url: str) -> None:
        worker: dict[str, object] = {"url": url}
        if self._disaggregated:
            topology = ask_topology(url)
            worker["worker_type"] = topology.role
            if topology.bootstrap_port is not None:
                worker["bootstrap_port"] = topology.bootstrap_port
        self._call("POST", "/workers", worker)

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = json.loads(self._call("GET", "/workers"))["workers"]
        return workers

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with DIRECT.open(request, timeout=CALL_TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except OSError as error:
            raise EngineError(f"sglang-router does not answer {method} {path}: {error}") from None
