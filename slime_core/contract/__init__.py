"""Checks one plugin against the whole contract: `slime plugins check NAME`, and `slime_core.testing.check_plugin`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime_core.contract.finding import Finding, ok, problem, unchecked
from slime_core.contract.hooks import check_hooks
from slime_core.contract.loading import check_fresh_process, check_options, option_words
from slime_core.contract.rewards import check_rewards, ordinary_samples
from slime_core.errors import OptionError, PluginError, SlimeError
from slime_core.options import Options, parse
from slime_core.plugins import Plugins, load_plugins
from slime_core.score.rows import read_rows
from slime_core.types import Sample

__all__ = ["Finding", "check"]

NUM_ROWS = 20
"""Rows of a file that a check grades."""


def check(
    reference: str, flags: Sequence[str] = (), samples: Sequence[Sample] = (), rows: str | None = None
) -> list[Finding]:
    """Everything that can be found out about a plugin without a model or a network of its own.

    Args:
        reference: its name, file or module, as a flag would name it.
        flags: flags of `slime train` that it needs, such as its own.
        samples: finished samples that its reward must be able to grade; without any, one that suits common labels.
        rows: a file of such samples, as `slime score` reads it.
    """
    plugins = Plugins()
    try:
        name = plugins.load(reference)
    except PluginError as error:
        return [problem("loads", str(error))]
    findings = [ok("loads", "hooks, arguments and colours are those of the contract")]
    findings += check_fresh_process(reference, rewards=_grades(plugins, name))
    with tempfile.TemporaryDirectory() as directory:
        words = option_words(plugins, name, reference)
        common = ["--runs-dir", directory, "--reward-timeout-s", "10", *words]
        try:
            args = parse([*common, *flags], needs_model=False).args
        except (OptionError, PluginError) as error:
            return [*findings, *_refused(plugins, name, error)]
        findings += check_options(plugins, name, args)
        if any(finding.is_problem for finding in findings):
            return findings
        samples = [*samples, *(_samples_of(args, rows) if rows else ())]
        if set(plugins.hooks_of(name)) <= {"add_options", "configure", "log_metrics"}:
            return [*findings, unchecked("calls", "a tracker writes where it is told; it is not started here")]
        return findings + asyncio.run(_check_started(reference, args, samples))


def _samples_of(args: Options, path: str) -> list[Sample]:
    """The finished samples of a file's first rows."""
    if not Path(path).is_file():
        raise OptionError(f"there is no file {path}.")
    rows = read_rows(args, path, "response", None, NUM_ROWS, lambda: None)
    return [sample for row in rows for sample in row.samples]


async def _check_started(reference: str, args: Options, samples: Sequence[Sample]) -> list[Finding]:
    try:
        plugins = load_plugins(args, [reference])
    except SlimeError as error:
        return [unchecked("starts", f"{error} (give the flags it needs behind the name)")]
    except Exception as error:
        return [problem("starts", f"it raised {type(error).__name__}: {error}; for a wrong option raise OptionError")]
    findings = [ok("starts", "it is built and configured")]
    try:
        findings += await check_hooks(plugins, reference, args)
        findings += await check_rewards(plugins, reference, args, samples or ordinary_samples(), bool(samples))
    finally:
        try:
            plugins.close()
        except Exception as error:
            findings.append(problem("closes", f"close() raised {type(error).__name__}: {error}"))
        await asyncio.sleep(0)
    return findings


def _grades(plugins: Plugins, name: str) -> bool:
    return plugins.implements("reward", name) or plugins.implements("group_reward", name)


def _refused(plugins: Plugins, name: str, error: SlimeError) -> list[Finding]:
    """Options that are refused: a fault of the plugin when its flags break the rule, else flags it needs."""
    if isinstance(error, PluginError):
        return [problem("flags", str(error))]
    return [unchecked("starts", f"{error} (give the flags it needs behind the name)")]
