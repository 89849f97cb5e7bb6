"""`--generate gateway`: every sample is a session, which an agent fills by talking to the model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import OptionError, Sample, hookimpl
from slime_gateway.agents import AgentProcess
from slime_gateway.exchange import Exchange
from slime_gateway.flags import add_flags
from slime_gateway.outcome import Outcome
from slime_gateway.server import Server
from slime_gateway.session import Limits, Session, is_branch
from slime_gateway.task import Task

logger = logging.getLogger(__name__)


class Gateway:
    """Holds the server, the agents' processes, and the sessions that wait for another round."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._program_key = _program_key(args)
        self._exchange = Exchange()
        self._processes = [AgentProcess(words, Path(args.gateway_directory)) for words in _worker_words(args)]
        self._live: dict[int, _Rollout] = {}
        """Of training, by rollout index: those under way and those that wait for another round."""
        self._server: Server | None = None
        self._url = ""
        self._starting = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @staticmethod
    @hookimpl
    def add_options(parser: argparse._ArgumentGroup) -> None:
        """The gateway's flags."""
        add_flags(parser)

    @staticmethod
    @hookimpl
    def configure(args: argparse.Namespace) -> None:
        """Refuse two agents, an open door, and a time that the core would not wait, before anything is started."""
        if args.gateway_agent is not None and args.gateway_command is not None:
            raise OptionError("name the agent once: --gateway-agent FILE.py or --gateway-command COMMAND.")
        if args.gateway_key_env is None and args.gateway_host != "localhost" and not _is_loopback(args.gateway_host):
            raise OptionError(
                f"--gateway-host {args.gateway_host} can be reached from other machines; give programs that fetch "
                "tasks a key with --gateway-key-env NAME."
            )
        if args.gateway_timeout_s >= args.generate_timeout_s:
            raise OptionError(
                f"--gateway-timeout-s {args.gateway_timeout_s:g} must be less than --generate-timeout-s "
                f"{args.generate_timeout_s:g}, which would fail the sample; raise that one too."
            )

    @hookimpl
    async def generate(
        self,
        args: argparse.Namespace,
        engine: Any,
        sample: Sample,
        sampling_params: dict[str, Any],
        evaluation: bool,
    ) -> list[Sample]:
        """The samples of one session. ABORTED ones come back under partial rollout and go on with the living agent.

        Where the agent is gone, since the run was resumed, the first sample of its rollout begins a session, and the
        others give none.
        """
        rollout = await self._joined(sample, evaluation)
        if rollout is None and is_branch(sample):
            return []
        if rollout is None:
            rollout = await self._begin(args, engine, sample, sampling_params, evaluation)
        waits = False
        try:
            samples = await rollout.session.run(engine, sample)
            waits = args.partial_rollout and not evaluation and not rollout.session.over
        finally:
            if not waits:
                await self._end(rollout)
        if rollout.session.over:
            self._exchange.keep(samples)
        return samples

    async def _joined(self, sample: Sample, evaluation: bool) -> _Rollout | None:
        """The rollout that an ABORTED sample goes on with, where its agent lives; one that nobody wants is ended."""
        rollout = None if evaluation else self._live.get(sample.rollout_index)
        if rollout is None or rollout.session.knows(sample):
            return rollout
        if not is_branch(sample):
            await self._end(rollout)
        return None

    async def _begin(
        self, args: argparse.Namespace, engine: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
    ) -> _Rollout:
        if not engine.tokenizer.chat_template:
            raise OptionError("--generate gateway needs a chat template, and the tokenizer of --model has none.")
        async with self._starting:
            if self._server is None:
                await self._listen(args, engine.tokenizer)
        session = Session(
            sample,
            tokenizer=engine.tokenizer,
            context_tokens=engine.context_tokens,
            sampling_params=sampling_params,
            template_kwargs=args.chat_template_kwargs,
            limits=Limits(args.gateway_max_turns, args.gateway_timeout_s),
        )
        task = Task(
            prompt=sample.prompt,
            label=sample.label,
            metadata=session.prototype.metadata,
            base_url=f"{self._url}/v1",
            api_key=session.key,
            group_index=sample.group_index,
            index=sample.index,
            evaluation=evaluation,
        )
        self._exchange.open(session)
        rollout = _Rollout(None if evaluation else sample.rollout_index, session)
        try:
            if self._processes:
                process = min(self._processes, key=lambda one: one.num_running)
                rollout.agent = process, await process.start(task, session.end)
            else:
                self._exchange.offer(task)
        except BaseException:
            await self._end(rollout)
            raise
        if rollout.key is not None:
            self._live[rollout.key] = rollout
        return rollout

    async def _end(self, rollout: _Rollout) -> None:
        """Refuse the agent's requests and end it."""
        if rollout.key is not None and self._live.get(rollout.key) is rollout:
            del self._live[rollout.key]
        self._exchange.close(rollout.session)
        rollout.session.end(Outcome(error="it was given up"))
        if rollout.agent is not None:
            process, number = rollout.agent
            await process.cancel(number)

    async def _listen(self, args: argparse.Namespace, tokenizer: Any) -> None:
        server = Server(self._exchange, tokenizer, self._program_key)
        try:
            self._url = await server.start(args.gateway_host, args.gateway_port)
        except OSError as error:
            raise OptionError(
                f"--generate gateway cannot listen on {args.gateway_host}:{args.gateway_port}: {error}; see "
                "--gateway-host and --gateway-port."
            ) from None
        self._server = server
        if not self._processes:
            logger.warning("the gateway waits for programs that fetch tasks: POST %s/start_rollout", self._url)

    def close(self) -> None:
        """End the agents, and stop listening on the loop's next turns."""
        for process in self._processes:
            process.close()
        if self._server is not None:
            with contextlib.suppress(RuntimeError):  # the loop has gone, and the connections with it
                self._closing = asyncio.get_running_loop().create_task(self._server.close())


@dataclass
class _Rollout:
    """A session and the agent that fills it."""

    key: int | None
    """Its samples' rollout index; None in evaluations, which are never interrupted."""
    session: Session
    agent: tuple[AgentProcess, str] | None = None
    """None where programs fetch their tasks."""


def _worker_words(args: argparse.Namespace) -> list[list[str]]:
    """The command line of each agent process; none where programs fetch their tasks."""
    if args.gateway_agent is not None:
        path, _, name = args.gateway_agent.rpartition(":")
        words = ["function", path, name]
    elif args.gateway_command is not None:
        words = ["command", args.gateway_command]
    else:
        return []
    return [words] * args.gateway_num_processes


def _program_key(args: argparse.Namespace) -> str | None:
    if args.gateway_key_env is None:
        return None
    key = os.environ.get(args.gateway_key_env)
    if not key:
        raise OptionError(
            f"--gateway-key-env names the environment variable {args.gateway_key_env}, which is not set where "
            "rollouts run."
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
