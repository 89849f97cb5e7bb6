"""Start one inference server as a process of its own and learn its address."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_core.engines import sglang
from slime_core.engines.process import LOOPBACK, ServerProcess, answers, free_port
from slime_core.errors import EngineError
from slime_core.options import Options

PORT_ATTEMPTS = 3
PORT_TAKEN = ("address already in use", "port is already in use", "errno 98")


class EngineServer:
    """One engine: `start` gives its URL, `stop` ends it."""

    def __init__(self, args: Options, index: int, log_dir: Path, threads: int) -> None:
        self._args, self._index, self._threads = args, index, threads
        self._log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            **dict(entry.split("=", 1) for entry in args.engine_env),
        }
        self.process: ServerProcess | None = None

    def start(self) -> str:
        """Wait until the server is healthy and return its URL.

        Raises:
            EngineError: with the end of its log, when it does not get ready.
        """
        return self._start_sglang() if self._args.engine == "sglang" else self._start_embedded()

    def check(self) -> None:
        """Do nothing while the server runs; an EngineError otherwise."""
        if self.process is not None:
            self.process.check()

    def stop(self) -> None:
        """End the server."""
        if self.process is not None:
            self.process.stop()

    def _launch(self, command: Sequence[str]) -> ServerProcess:
        log = self._log_dir / f"engine_{self._index}.log"
        self.process = ServerProcess(f"engine {self._index}", command, log, self._environment)
        return self.process

    def _start_embedded(self) -> str:
        """The embedded engine takes any free port and writes down which."""
        args = self._args
        port_file = self._log_dir / f"engine_{self._index}.port"
        port_file.unlink(missing_ok=True)
        command = [args.engine_python or sys.executable, "-m", "slime_core.engines.embedded"]
        command += ["--model-path", args.model, "--host", LOOPBACK, "--port", "0", "--port-file", str(port_file)]
        command += ["--max-running-requests", str(args.engine_max_requests), "--dtype", args.engine_dtype]
        command += ["--num-threads", str(self._threads), "--seed", str(args.seed + self._index)]
        if args.max_context_tokens:
            command += ["--context-length", str(args.max_context_tokens)]
        process = self._launch(command)
        process.wait_until(port_file.exists, args.engine_start_timeout_s)
        url = f"http://{LOOPBACK}:{port_file.read_text().strip()}"
        process.wait_until(lambda: answers(f"{url}/health"), args.engine_start_timeout_s)
        return url

    def _start_sglang(self) -> str:
        """SGLang wants to be told its port; another process may take the free one in between."""
        args = self._args
        sglang.check(args, sglang.inspect(args.engine_python or sys.executable, self._environment))
        for attempt in range(PORT_ATTEMPTS):
            port = free_port()
            url = f"http://{LOOPBACK}:{port}"
            process = self._launch(sglang.command(args, self._index, port))
            try:
                process.wait_until(lambda url=url: answers(f"{url}/health"), args.engine_start_timeout_s, poll_s=0.25)
                return url
            except EngineError as error:
                process.stop()
                taken = any(words in str(error).lower() for words in PORT_TAKEN)
                if not taken or attempt == PORT_ATTEMPTS - 1:
                    raise
        raise EngineError(f"engine {self._index} found no free port.")
