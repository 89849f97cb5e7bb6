"""Start one inference server as a process of its own and learn its address."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from slime_core.engines import sglang
from slime_core.engines.parallel import Node
from slime_core.engines.process import ServerProcess, answers, free_port, listens, status_of
from slime_core.engines.topology import ask_topology
from slime_core.errors import EngineError
from slime_core.options import Options

PORT_ATTEMPTS = 3
POLL_S = 0.2
HEALTH_POLL_TIMEOUT_S = 5.0
PORT_TAKEN = ("address already in use", "port is already in use", "errno 98")


class EngineServer:
    """One engine: `start` gives its URL, `stop` ends it."""

    def __init__(
        self,
        args: Options,
        index: int,
        log_dir: Path,
        threads: int,
        name: str = "engine",
        gpus: Sequence[str] = (),
        node: Node | None = None,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            name: whose engine it is in logs and errors: `engine` for the policy's, a frozen model's own.
            gpus: those it uses; by default those that this process may use.
            node: which machine's part of the engine it is; by default the whole, on loopback.
        """
        self._node = node or Node()
        self._args, self._index, self._threads, self._name = args, index, threads, f"{name} {index}"
        self._log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            **dict(entry.split("=", 1) for entry in args.engine_env),
        }
        self.process: ServerProcess | None = None
        self._url = ""
        self._check_at = 0.0
        self._ill_since = math.inf

    def start(self, again: bool = False, check_others: Callable[[], None] = lambda: None) -> str:
        """Wait until the server is healthy and return its URL.

        Args:
            again: it is a replacement; the environment was looked at before.
            check_others: raises when a part of it on another machine has ended.

        Raises:
            EngineError: with the end of its log, when it does not get ready.
        """
        if self._args.external_engines:
            return self._find_external()
        sglang_engine = self._args.engine == "sglang"
        if sglang_engine and not again:
            found = sglang.inspect(self._args.engine_python or sys.executable, self._environment)
            sglang.check(self._args, found)
            if self._args.num_trainers and self._args.weight_transport == "broadcast" and found.nccl is not None:
                from slime_core.engines.weight_group import nccl_version

                sglang.check_nccl(found, nccl_version())
        self._url = self._start_sglang(check_others) if sglang_engine else self._start_embedded()
        return self._url

    def check(self, paused: bool = False, at_once: bool = False) -> None:
        """Do nothing while the server runs and is healthy; may wait --engine-health-timeout-s for its answer.

        Args:
            paused: it stands still because it was told to. SGLang's /health generates a token, and would hang.
            at_once: ask now, however lately it was asked, until it answers or is given up.

        Raises:
            EngineError: when it exited, or has not been healthy for --engine-health-timeout-s.
        """
        self.check_process()
        limit = self._args.engine_health_timeout_s
        while at_once or time.monotonic() >= self._check_at:
            asked = time.monotonic()
            # of a paused SGLang only /server_info goes as far as its scheduler; one that takes weights answers it late
            endpoint = "server_info" if at_once else "model_info" if paused else "health"
            status = status_of(f"{self._url}/{endpoint}", limit)
            self._check_at = time.monotonic() + self._args.engine_health_interval_s
            if status == 200:
                self._ill_since = math.inf
                return
            self.check_process()
            if status is None and self._args.external_engines and not listens(self._url):
                raise EngineError(f"{self._name} has gone: nobody listens at {self._url}.")
            self._ill_since = min(self._ill_since, asked)
            if time.monotonic() - self._ill_since >= limit:
                said = "no answer" if status is None else f"HTTP {status}"
                raise EngineError(f"{self._name} is not healthy ({said} for {limit:g} s).")
            time.sleep(POLL_S)

    def start_part(self) -> None:
        """Start this machine's part of an engine that another machine's serves; returns at once."""
        self._launch(sglang.command(self._args, self._index, free_port(self._node.host), self._node))

    @property
    def _file_stem(self) -> str:
        stem = self._name.replace(" ", "_")
        return stem if self._node.rank == 0 else f"{stem}_node_{self._node.rank}"

    def check_process(self) -> None:
        """Do nothing while the process runs; an EngineError otherwise."""
        if self.process is not None:
            self.process.check()

    def stop(self) -> None:
        """End the server, unless it is an external one."""
        if self.process is not None:
            self.process.stop()

    def _find_external(self) -> str:
        self._url = self._args.external_engines[self._index]
        deadline = time.monotonic() + self._args.engine_start_timeout_s
        while status_of(f"{self._url}/health", HEALTH_POLL_TIMEOUT_S) != 200:
            if time.monotonic() > deadline:
                limit = self._args.engine_start_timeout_s
                raise EngineError(
                    f"the external engine {self._url} was not healthy within {limit:g} s; is it running, and reachable?"
                )
            time.sleep(POLL_S)
        if self._args.engine == "sglang":
            found = ask_topology(self._url)
            sglang.check_version(found.version)
            if found.embeds:
                raise EngineError(f"the external engine {self._url} gives embeddings; it must generate text.")
        return self._url

    def _launch(self, command: Sequence[str]) -> ServerProcess:
        log = self._log_dir / f"{self._file_stem}.log"
        self.process = ServerProcess(self._name, command, log, self._environment)
        return self.process

    def _start_embedded(self) -> str:
        """The embedded engine takes any free port and writes down which."""
        args = self._args
        port_file = self._log_dir / f"{self._file_stem}.port"
        port_file.unlink(missing_ok=True)
        command = [args.engine_python or sys.executable, "-m", "slime_core.engines.embedded"]
        command += ["--model-path", args.model, "--host", self._node.host, "--port", "0"]
        command += ["--port-file", str(port_file)]
        command += ["--max-running-requests", str(args.engine_max_requests), "--dtype", args.engine_dtype]
        command += ["--num-threads", str(self._threads), "--seed", str(args.seed + self._index)]
        if args.max_context_tokens:
            command += ["--context-length", str(args.max_context_tokens)]
        process = self._launch(command)
        process.wait_until(port_file.exists, args.engine_start_timeout_s)
        url = f"http://{self._node.host}:{port_file.read_text().strip()}"
        process.wait_until(lambda: answers(f"{url}/health"), args.engine_start_timeout_s)
        return url

    def _start_sglang(self, check_others: Callable[[], None]) -> str:
        """SGLang wants to be told its port; another process may take the free one in between."""
        args = self._args
        for attempt in range(PORT_ATTEMPTS):
            port, bootstrap_port = free_port(self._node.host), free_port(self._node.host)
            url = f"http://{self._node.host}:{port}"
            process = self._launch(sglang.command(args, self._index, port, self._node, bootstrap_port))
            try:
                process.wait_until(partial(ready, process, url, check_others), args.engine_start_timeout_s, poll_s=0.25)
                return url
            except EngineError as error:
                process.stop()
                taken = any(words in str(error).lower() for words in PORT_TAKEN)
                if not taken or attempt == PORT_ATTEMPTS - 1:
                    raise
        raise EngineError(f"{self._name} found no free port.")


def ready(process: ServerProcess, url: str, check_others: Callable[[], None]) -> bool:
    """Whether a server is healthy.

    Raises:
        EngineError: when a part of it elsewhere has ended, or another program listens there, which SGLang sees late.
    """
    check_others()
    if not listens(url):
        return False
    if process.listens_on(urlsplit(url).port or 80):
        return answers(f"{url}/health")
    process.check()
    raise EngineError(f"{process.name}: its port is already in use by another program, which listens at {url}.")
