"""Start one inference server as a process of its own and learn its address."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime_core.engines.process import LOOPBACK, ServerProcess, answers
from slime_core.options import Options


class EngineServer:
    """One embedded engine: `start` gives its URL, `stop` ends it."""

    def __init__(self, args: Options, index: int, log_dir: Path, threads: int) -> None:
        self.name = f"engine {index}"
        port_file = log_dir / f"engine_{index}.port"
        port_file.parent.mkdir(parents=True, exist_ok=True)
        port_file.unlink(missing_ok=True)
        self._port_file = port_file
        self._timeout_s = args.engine_start_timeout_s
        command = [args.engine_python or sys.executable, "-m", "slime_core.engines.embedded"]
        command += ["--model-path", args.model, "--host", LOOPBACK, "--port", "0", "--port-file", str(port_file)]
        command += ["--max-running-requests", str(args.engine_max_requests), "--dtype", args.engine_dtype]
        command += ["--num-threads", str(threads), "--seed", str(args.seed + index)]
        if args.max_context_tokens:
            command += ["--context-length", str(args.max_context_tokens)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.process = ServerProcess(self.name, command, log_dir / f"engine_{index}.log", environment)

    def start(self) -> str:
        """Wait until the server is healthy and return its URL.

        Raises:
            EngineError: with the end of its log, when it does not get ready.
        """
        self.process.wait_until(self._port_file.exists, self._timeout_s)
        url = f"http://{LOOPBACK}:{self._port_file.read_text().strip()}"
        self.process.wait_until(lambda: answers(f"{url}/health"), self._timeout_s)
        return url

    def stop(self) -> None:
        """End the server."""
        self.process.stop()
