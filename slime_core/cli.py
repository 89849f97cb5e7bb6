"""The `slime` command; a user's mistakes get one message, without a traceback."""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from slime_core import __version__
from slime_core.errors import SlimeError
from slime_core.hookspecs import CONTRACT_VERSION, HOOKS_WITH_EXAMPLES

if TYPE_CHECKING:
    from slime_core.plugins import Plugins

DESCRIPTION = "RL post-training for language models in which every decision about data is a plugin."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        if words[:1] == ["train"]:  # its flags are parsed in two phases, by options.py
            return run_train(words[1:])
        if words[:1] == ["score"]:  # likewise
            from slime_core.score import run_score

            return run_score(words[1:])
        parser = build_parser()
        args, args.flags = parser.parse_known_args(words)
        if args.flags and args.run is not run_check:
            parser.error(f"unrecognized arguments: {' '.join(args.flags)}")
        return int(args.run(args))
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The commands and, but for `train`, their flags."""
    parser = argparse.ArgumentParser(prog="slime", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"slime-core {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("train", help="train a model (`slime train --help` shows the flags)", add_help=False)
    commands.add_parser("score", help="grade the responses in a file (`slime score --help` shows how)", add_help=False)
    convert = commands.add_parser("convert", help="a model between the Hugging Face format and Megatron's torch_dist")
    convert.add_argument("source", help="a model directory, or a checkpoint of a Megatron run")
    convert.add_argument("target", help="a directory that does not exist yet")
    convert.add_argument("--to", choices=["torch_dist", "hf"], required=True, help="the format to write")
    convert.set_defaults(run=run_convert)
    plugins = commands.add_parser("plugins", help="list the installed plugins, or check them")
    plugins.add_argument("--json", action="store_true", help="print the list as JSON")
    plugins.set_defaults(run=run_plugins)
    actions = plugins.add_subparsers(title="actions", metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="check plugins against the whole contract, or say why they are broken",
        epilog="Flags of the plugin's own, and others of `slime train`, may follow one name.",
    )
    check.add_argument("name", nargs="*", help="a plugin's name, file or module (default: every installed plugin)")
    check.add_argument("--rows", metavar="FILE", help="rows with responses, as `slime score` reads, that it must grade")
    check.set_defaults(run=run_check)
    new = commands.add_parser("new-plugin", help="make a package with a plugin and its tests")
    new.add_argument("name", help="what one will write in the flag, for example my_reward")
    new.add_argument("--hook", required=True, choices=HOOKS_WITH_EXAMPLES, help="what it implements")
    new.add_argument("--async", dest="use_async", action="store_true", help="a reward that waits for I/O")
    new.add_argument("--directory", default=".", metavar="DIR", help="where to put it (default: here)")
    new.set_defaults(run=run_new_plugin)
    hooks = commands.add_parser("hooks", help="print the hook contract")
    form = hooks.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print it as docs/hooks.md has it")
    form.add_argument("--table", action="store_true", help="print the table that README.md has")
    hooks.set_defaults(run=run_hooks)
    commands.add_parser("flags", help="print every core flag, as docs/flags.md has them").set_defaults(run=run_flags)
    return parser


def run_train(words: list[str]) -> int:
    """`slime train`."""
    from slime_core.options import chosen_plugins, parse
    from slime_core.plugins import Plugins

    parsed = parse(words)
    if parsed.args.dry_run:
        from slime_core.training.megatron.config import check_backend

        check_backend(parsed.args)
        print(parsed.sources)
        plugins = Plugins()
        for reference in chosen_plugins(parsed.args):
            name = plugins.load(reference)
            print(describe(plugins, name))
        if parsed.args.engine == "sglang":
            from slime_core.engines.sglang import planned_commands

            print("\n".join(planned_commands(parsed.args)))
        return 0
    from slime_core.train import train

    run_dir = train(parsed.args)
    print(f"done: {run_dir}")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """`slime convert`."""
    from slime_core.training.megatron.command import convert

    convert(Path(args.source), Path(args.target), args.to)
    print(f"done: {args.target}")
    return 0


def run_plugins(args: argparse.Namespace) -> int:
    """`slime plugins`: from metadata alone, nothing is imported."""
    from slime_core.plugins import installed

    rows = [{"name": f.name, "package": f.package, "version": f.version} for f in installed()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    widths = [max(len(row[key]) for row in rows) for key in ("name", "package")]
    for row in rows:
        print(f"{row['name']:<{widths[0]}}  {row['package']:<{widths[1]}}  {row['version']}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`slime plugins check`: every plugin in a process of its own, so that a broken one harms no other."""
    from slime_core.errors import OptionError
    from slime_core.plugins import installed

    names = args.name or list(dict.fromkeys(f.name for f in installed()))
    if len(names) == 1:
        return check_one(names[0], args.flags, args.rows)
    if args.flags or args.rows:
        raise OptionError("flags and --rows are for the check of one plugin; name one.")
    command = [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())", "plugins", "check"]
    codes = []
    for name in names:
        done = subprocess.run([*command, name], capture_output=True, text=True)
        print((done.stdout or f"{name}  BROKEN\n  {done.stderr}").rstrip(), flush=True)
        codes.append(done.returncode)
    return max(codes)


def check_one(reference: str, flags: list[str], rows: str | None) -> int:
    """Check one plugin and print its hooks, options and what was found; 1 when it breaks the contract."""
    from slime_core.contract import check
    from slime_core.plugins import Plugins

    plugins = Plugins()
    print(describe(plugins, plugins.load(reference)))
    findings = check(reference, flags, rows=rows)
    print("\n".join(f"  {finding}" for finding in findings))
    return int(any(finding.is_problem for finding in findings))


def run_new_plugin(args: argparse.Namespace) -> int:
    """`slime new-plugin`."""
    from slime_core.scaffold import run_new_plugin

    return run_new_plugin(args)


def run_hooks(args: argparse.Namespace) -> int:
    """`slime hooks`: the contract, from the specifications themselves."""
    from slime_core.plugins import HOOKS

    if args.table:
        print(hook_table())
        return 0
    print(f"# Hooks\n\nContract version {CONTRACT_VERSION}." if args.markdown else f"hook contract {CONTRACT_VERSION}")
    for name, spec in HOOKS.items():
        colour = _colour(name)
        signature = f"{name}({', '.join(inspect.signature(spec).parameters)})"
        text = inspect.getdoc(spec) or ""
        if args.markdown:
            print(f"\n## `{signature}`\n\n*{colour}*\n\n{text}")
        else:
            indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
            print(f"\n{signature}  [{colour}]\n{indented}")
    return 0


def hook_table() -> str:
    """The hooks as a Markdown table: signature, colour, flag, what to return."""
    from slime_core.options import HOOK_FLAGS
    from slime_core.plugins import HOOKS

    lines = ["| hook | written as | named by | what it does |", "|---|---|---|---|"]
    for name, spec in HOOKS.items():
        summary = (inspect.getdoc(spec) or "").split("\n\n")[0].replace("\n", " ")
        signature = f"{name}({', '.join(inspect.signature(spec).parameters)})"
        flag = f"`{HOOK_FLAGS[name]}`" if name in HOOK_FLAGS else "any plugin"
        lines.append(f"| `{signature}` | `{_colour(name)}` | {flag} | {summary} |")
    return "\n".join(lines)


def run_flags(args: argparse.Namespace) -> int:
    """`slime flags`: every core flag as a Markdown table a group; plugins add theirs."""
    from slime_core.options import TomlFile, new_parser

    parser = new_parser(TomlFile(), add_help=False)
    print("# Flags\n\nOf `slime train`; each is also a key of a `--config` file and a variable `SLIME_...`.")
    for group in parser._action_groups:
        if group._group_actions:
            print(f"\n## {group.title}\n")
            print(f"{group.description}\n\n" if group.description else "", end="")
            print("| flag | default | meaning |\n|---|---|---|")
            for action in group._group_actions:
                print(_flag_row(action))
    return 0


def _flag_row(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    default = "" if action.default in (None, [], {}, argparse.SUPPRESS, False) else f"`{action.default}`"
    choices = f"one of {', '.join(map(str, action.choices))}" if action.choices else ""
    return f"| {flags} | {default} | {'; '.join(text for text in (action.help, choices) if text)} |"


def describe(plugins: Plugins, name: str) -> str:
    """A loaded plugin's origin, hooks and options, as text."""
    lines = [f"{name}  ({plugins.loaded[name].origin})"]
    for hook, impl in plugins.hooks_of(name).items():
        kind = "wraps" if impl.wrapper else "async def" if inspect.iscoroutinefunction(impl.function) else "def"
        lines.append(f"  {kind} {hook}({', '.join(impl.argnames)})")
    parser = argparse.ArgumentParser(add_help=False)
    plugins.add_options(parser, only=name)
    for action in parser._actions:
        default = "" if action.default in (None, argparse.SUPPRESS) else f" (default: {action.default})"
        lines.append(f"  {', '.join(action.option_strings)}: {action.help or 'no description'}{default}")
    return "\n".join(lines)


def _colour(hook: str) -> str:
    from slime_core.hookspecs import EITHER_COLOUR
    from slime_core.plugins import HOOKS

    if hook in EITHER_COLOUR:
        return "def or async def"
    return "async def" if inspect.iscoroutinefunction(HOOKS[hook]) else "def"


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does: everything is stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
