"""A plugin alone: in a fresh process, and its flags."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from slime_core.contract.finding import Finding, ok, problem
from slime_core.errors import SlimeError
from slime_core.options import HOOK_FLAGS, Options, parse, write_options
from slime_core.plugins import Plugins

FRESH = """
import json, sys, time
from slime_core.plugins import Plugins
started = time.process_time()
try:
    Plugins().load(sys.argv[1])
except Exception as error:
    print(json.dumps({"error": str(error)}))
else:
    heavy = [module for module in ("torch", "transformers", "ray") if module in sys.modules]
    print(json.dumps({"cpu_s": time.process_time() - started, "heavy": heavy}))
"""
LOAD_TIMEOUT_S = 120.0


def check_fresh_process(reference: str, rewards: bool) -> list[Finding]:
    """Load the plugin by name in a new process, as every worker and actor does."""
    what = "loads in a fresh process"
    command = [sys.executable, "-c", FRESH, reference]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
        report = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [problem(what, f"its import takes longer than {LOAD_TIMEOUT_S:g} s")]
    except (ValueError, IndexError):
        return [problem(what, f"its import ended the process: {done.stderr.strip()[-300:]}")]
    if "error" in report:
        return [problem(what, report["error"])]
    weight = f"{report['cpu_s']:.2f} s of CPU"
    if report["heavy"] and rewards:
        weight += f", and loads {', '.join(report['heavy'])} in every reward worker"
    return [ok(what, weight)]


def option_words(plugins: Plugins, name: str, reference: str) -> list[str]:
    """The flags that name the plugin for every hook it implements; `--plugin` where it only wraps."""
    flags = {
        HOOK_FLAGS[hook] for hook in plugins.hooks_of(name) if hook in HOOK_FLAGS and plugins.implements(hook, name)
    }
    return [word for flag in sorted(flags or {"--plugin"}) for word in (flag, reference)]


def check_options(plugins: Plugins, name: str, args: Options) -> list[Finding]:
    """The plugin's flags: prefix, help, and values that go to other processes and into a run's options.toml."""
    parser = argparse.ArgumentParser(add_help=False)
    plugins.add_options(parser, only=name)  # `parse` has already refused a wrong prefix
    actions = parser._actions
    if not actions:
        return [ok("flags", "none")]
    without = [action.option_strings[0] for action in actions if not action.help]
    findings = [problem("flags", f"{flag} has no help text") for flag in without]
    for action in actions:
        try:
            pickle.dumps(getattr(args, action.dest))
        except Exception as error:
            reason = f"its value cannot go to other processes ({type(error).__name__}: {error}); keep options plain"
            findings.append(problem("flags", f"{action.option_strings[0]}: {reason}"))
    findings += _check_resume(actions, args)
    return findings or [ok("flags", ", ".join(action.option_strings[0] for action in actions))]


def _check_resume(actions: list[argparse.Action], args: Options) -> list[Finding]:
    """Whether the values survive being written to options.toml, from which --resume reads them."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "options.toml"
        try:
            write_options(args, path)
            again = parse(["--config", str(path)], needs_model=False).args
        except (SlimeError, TypeError, ValueError) as error:
            return [problem("flags", f"its options cannot be written to options.toml and read again: {error}")]
    changed = [action for action in actions if getattr(args, action.dest) != getattr(again, action.dest)]
    return [
        problem(
            "flags",
            f"{action.option_strings[0]} is {getattr(args, action.dest)!r}, but {getattr(again, action.dest)!r} after "
            "--resume; let the value be a number, a text or a list of these",
        )
        for action in changed
    ]
