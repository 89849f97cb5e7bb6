"""Every core flag, grouped, and the one `validate`. Sources: flags, the environment (`SLIME_*`), a TOML file."""

from __future__ import annotations

import argparse
import difflib
import json
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import configargparse

from slime_core.errors import OptionError
from slime_core.plugins import Plugins, absolute_reference, installed, plugin_name

ENV_PREFIX = "SLIME_"


class Options(argparse.Namespace):
    """The parsed options; nobody writes them after parsing, and run-time facts never travel in them."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options are read-only after parsing; '{name}' cannot be set")

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass(frozen=True)
class RewardChoice:
    """One `--reward` entry: `math`, `math=0.5`, `+length_penalty=0.1` (added whatever `--reward-field` says)."""

    reference: str
    weight: float = 1.0
    always: bool = False

    @property
    def name(self) -> str:
        """The plugin's plain name."""
        return plugin_name(self.reference)

    def __str__(self) -> str:
        return f"{'+' if self.always else ''}{self.reference}={self.weight:g}"


def reward_choice(text: str) -> RewardChoice:
    """Parse `[+]NAME[=WEIGHT]`."""
    always, rest = text.startswith("+"), text.removeprefix("+")
    reference, equals, weight = rest.rpartition("=")
    try:
        choice = RewardChoice(reference, float(weight), always) if equals else RewardChoice(rest, 1.0, always)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME or NAME=WEIGHT, for example math=0.5") from None
    return RewardChoice(absolute_reference(choice.reference), choice.weight, choice.always)


@dataclass(frozen=True)
class NamedPath:
    """One `--eval-data` entry: `heldout=data/test.jsonl`, or a path whose stem is the name."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


def named_path(text: str) -> NamedPath:
    """Parse `[NAME=]PATH`."""
    name, equals, path = text.partition("=")
    if not equals:
        return NamedPath(Path(text).stem, text)
    if not name or not path:
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME=PATH")
    return NamedPath(name, path)


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    if not text.strip().lstrip("+").isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def non_negative_int(text: str) -> int:
    """An integer of at least 0."""
    if not text.strip().lstrip("+").isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return value


def non_negative(text: str) -> float:
    """A number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 0")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


# --- the flags --------------------------------------------------------------------------------------------------------
def add_core_options(parser: argparse.ArgumentParser) -> None:
    """Every flag of the core, in groups."""
    _add_plugins(parser)
    _add_run(parser)
    _add_data(parser)
    _add_rollout(parser)
    _add_rewards(parser)
    _add_evaluation(parser)
    _add_engines(parser)
    _add_training(parser)
    _add_weights(parser)
    _add_cluster(parser)


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group(
        "plugins", "names of installed plugins (`slime plugins`), files (./my_reward.py) or modules (pkg.my_reward)"
    )
    g.add_argument(
        "--get-samples", type=absolute_reference, default="dataset", metavar="NAME", help="where prompts come from"
    )
    g.add_argument(
        "--generate",
        type=absolute_reference,
        default="single_turn",
        metavar="NAME",
        help="how a prompt becomes samples",
    )
    g.add_argument(
        "--reward",
        type=reward_choice,
        nargs="+",
        default=[],
        metavar="[+]NAME[=WEIGHT]",
        help="rewards, summed by weight",
    )
    g.add_argument(
        "--reward-field",
        metavar="FIELD",
        help="metadata field of a row that picks one of the rewards named without '+'",
    )
    g.add_argument(
        "--dynamic-filter",
        type=absolute_reference,
        nargs="+",
        default=[],
        metavar="NAME",
        help="the first objection drops a finished group",
    )
    g.add_argument(
        "--over-sampling-filter",
        type=absolute_reference,
        nargs="+",
        default=[],
        metavar="NAME",
        help="ranks the collected groups, one after the other",
    )
    g.add_argument(
        "--buffer-filter",
        type=absolute_reference,
        default="fifo",
        metavar="NAME",
        help="which waiting groups are taken first",
    )
    g.add_argument(
        "--convert-train-data",
        type=absolute_reference,
        default="samples",
        metavar="NAME",
        help="makes the training batch",
    )
    g.add_argument(
        "--rollout",
        type=absolute_reference,
        default="standard",
        metavar="NAME",
        help="replaces the whole collection of a round",
    )
    g.add_argument(
        "--advantage-estimator", type=absolute_reference, default="grpo", metavar="NAME", help="rewards to advantages"
    )
    g.add_argument(
        "--policy-loss", type=absolute_reference, default="ppo_clip", metavar="NAME", help="the loss of a token"
    )
    g.add_argument(
        "--tracker",
        type=absolute_reference,
        nargs="+",
        default=["jsonl", "console"],
        metavar="NAME",
        help="where metrics go",
    )
    g.add_argument(
        "--plugin", type=absolute_reference, nargs="+", default=[], metavar="NAME", help="plugins that only wrap hooks"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("run")
    g.add_argument(
        "--config",
        is_config_file=True,
        metavar="FILE",
        help="TOML file; keys are the flags without dashes, tables only group",
    )
    g.add_argument("--run-name", metavar="NAME", help="directory of the run under --runs-dir (default: date and time)")
    g.add_argument(
        "--runs-dir", default="runs", metavar="DIR", help="where runs are kept; DIR/latest links to the newest"
    )
    g.add_argument("--num-rollout", type=non_negative_int, default=100, metavar="N", help="rounds to train")
    g.add_argument(
        "--seed",
        type=non_negative_int,
        default=1234,
        metavar="N",
        help="for the data order, sampling and initialisation",
    )
    g.add_argument(
        "--save-interval",
        type=positive_int,
        metavar="N",
        help="checkpoint every N rounds, and at the end (default: only at the end)",
    )
    g.add_argument("--no-save", action="store_true", help="write no checkpoint")
    g.add_argument(
        "--keep-checkpoints", type=positive_int, default=2, metavar="N", help="older checkpoints are deleted"
    )
    g.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on from the newest checkpoint of a run directory, or of --run-name or the latest run",
    )
    g.add_argument("--dry-run", action="store_true", help="print the resolved options and plugins, and stop")


def _add_data(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("data")
    g.add_argument("--prompt-data", metavar="FILE", help="JSONL file, one prompt a row; without it prompts are blank")
    g.add_argument(
        "--input-key", default="prompt", metavar="KEY", help="field with the prompt: text or a list of chat messages"
    )
    g.add_argument(
        "--label-key",
        metavar="KEY",
        help="field with the ground truth, which every row must have (default: 'label' if there)",
    )
    g.add_argument(
        "--metadata-key", default="metadata", metavar="KEY", help="field with an object kept as sample.metadata"
    )
    g.add_argument("--tool-key", default="tools", metavar="KEY", help="field with the tools shown to the chat template")
    g.add_argument("--apply-chat-template", action="store_true", help="wrap a text prompt as one user message")
    g.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="further variables of the chat template",
    )
    g.add_argument(
        "--max-prompt-tokens", type=positive_int, metavar="N", help="longer prompts are left out and counted"
    )
    g.add_argument("--skip-bad-rows", action="store_true", help="count malformed rows instead of stopping at the first")
    g.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, default=True, help="a fresh permutation every epoch"
    )


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("rollout")
    g.add_argument("--rollout-batch-size", type=positive_int, default=32, metavar="N", help="groups trained a round")
    g.add_argument("--n-samples-per-prompt", type=positive_int, default=8, metavar="N", help="samples in a group")
    g.add_argument(
        "--over-sampling-batch-size",
        type=positive_int,
        metavar="N",
        help="groups drawn at a time (default: the rollout batch size)",
    )
    g.add_argument("--temperature", type=non_negative, default=1.0, metavar="X")
    g.add_argument("--top-p", type=fraction, default=1.0, metavar="X")
    g.add_argument("--top-k", type=int, default=-1, metavar="N", help="-1: off")
    g.add_argument("--min-p", type=fraction, default=0.0, metavar="X")
    g.add_argument(
        "--max-response-tokens",
        type=positive_int,
        default=1024,
        metavar="N",
        help="response tokens of a sample, all turns together",
    )
    g.add_argument(
        "--max-context-tokens",
        type=positive_int,
        metavar="N",
        help="prompt and response together (default: the model's)",
    )
    g.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="strings that end a generation")
    g.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    g.add_argument(
        "--max-refills",
        type=positive_int,
        default=16,
        metavar="N",
        help="draws in a row of which the filters keep no group, before the run stops",
    )


def _add_rewards(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("rewards")
    g.add_argument(
        "--reward-timeout-s",
        type=positive,
        default=30.0,
        metavar="S",
        help="a slower grader is killed and its sample FAILED",
    )
    g.add_argument(
        "--reward-workers", type=positive_int, default=2, metavar="N", help="worker processes for plain `def` rewards"
    )
    g.add_argument(
        "--reward-memory-gib", type=positive, default=4.0, metavar="GIB", help="address space of one reward worker"
    )
    g.add_argument(
        "--max-reward-failure-rate",
        type=fraction,
        default=0.5,
        metavar="X",
        help="the run stops when more samples of a round fail",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("evaluation")
    g.add_argument(
        "--eval-data", type=named_path, nargs="+", default=[], metavar="NAME=FILE", help="JSONL files to evaluate on"
    )
    g.add_argument(
        "--eval-interval",
        type=positive_int,
        metavar="N",
        help="evaluate before training, every N rounds and at the end (default: before and at the end)",
    )
    g.add_argument("--eval-n-samples-per-prompt", type=positive_int, default=1, metavar="N")
    g.add_argument("--eval-temperature", type=non_negative, metavar="X", help="default: --temperature")
    g.add_argument("--eval-top-p", type=fraction, metavar="X", help="default: --top-p")
    g.add_argument("--eval-max-response-tokens", type=positive_int, metavar="N", help="default: --max-response-tokens")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("engines")
    g.add_argument(
        "--engine", choices=["embedded"], default="embedded", help="the inference server (default: the CPU engine)"
    )
    g.add_argument(
        "--num-engines",
        type=non_negative_int,
        default=1,
        metavar="N",
        help="0: no engine, for data that needs none (--generate sft)",
    )
    g.add_argument("--engine-python", metavar="PATH", help="Python of the engine's own environment (default: this one)")
    g.add_argument(
        "--engine-threads",
        type=positive_int,
        metavar="N",
        help="CPU threads of an embedded engine (default: by the model's size, cores shared out)",
    )
    g.add_argument("--engine-dtype", choices=["float32", "bfloat16"], default="float32", help="of an embedded engine")
    g.add_argument(
        "--engine-max-requests",
        type=positive_int,
        default=256,
        metavar="N",
        help="requests an engine runs at once; more wait at the client",
    )
    g.add_argument("--engine-start-timeout-s", type=positive, default=300.0, metavar="S")
    g.add_argument(
        "--request-timeout-s",
        type=positive,
        default=1800.0,
        metavar="S",
        help="deadline of one generation, retries included",
    )
    g.add_argument("--router-port", type=non_negative_int, default=0, metavar="PORT", help="0: any free one")
    g.add_argument(
        "--router-policy", choices=["round_robin", "random", "cache_aware", "power_of_two"], default="round_robin"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("training")
    g.add_argument(
        "--model", metavar="DIR", help="the model to train, in the Hugging Face format (config, weights, tokenizer)"
    )
    g.add_argument("--train-backend", choices=["torch"], default="torch")
    g.add_argument("--num-trainers", type=positive_int, default=1, metavar="N", help="data-parallel ranks")
    g.add_argument(
        "--trainer-threads",
        type=positive_int,
        metavar="N",
        help="CPU threads of a rank (default: all cores, shared out)",
    )
    g.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the trained weights (default: float32 on CPU, bfloat16 on GPU)",
    )
    g.add_argument(
        "--max-tokens-per-gpu", type=positive_int, default=8192, metavar="N", help="token budget of a micro-batch"
    )
    g.add_argument("--num-steps-per-rollout", type=positive_int, default=1, metavar="N", help="optimiser steps a round")
    g.add_argument(
        "--loss-aggregation",
        choices=["token", "sequence"],
        default="token",
        help="mean over all tokens, or over sequences of their token means",
    )
    g.add_argument(
        "--use-rollout-logprobs", action="store_true", help="the engine's log-probabilities are the old policy's"
    )
    g.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: matrices by Muon, the rest by AdamW"
    )
    g.add_argument("--lr", type=non_negative, default=1e-6, metavar="X")
    g.add_argument(
        "--muon-lr",
        type=non_negative,
        default=0.02,
        metavar="X",
        help="learning rate of the matrices under --optimizer muon",
    )
    g.add_argument(
        "--lr-warmup-steps", type=non_negative_int, default=0, metavar="N", help="optimiser steps of linear rise"
    )
    g.add_argument(
        "--lr-schedule",
        choices=["constant", "linear", "cosine"],
        default="constant",
        help="after the rise, down to 0 over the run",
    )
    g.add_argument("--weight-decay", type=non_negative, default=0.0, metavar="X")
    g.add_argument("--adam-betas", type=fraction, nargs=2, default=[0.9, 0.999], metavar=("B1", "B2"))
    g.add_argument("--adam-eps", type=positive, default=1e-8, metavar="X")
    g.add_argument("--clip-grad", type=non_negative, default=1.0, metavar="X", help="largest gradient norm; 0: off")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("weights")
    g.add_argument(
        "--weights-dir",
        metavar="DIR",
        help="where weights pass to the engines (default: /dev/shm where there is one, else the run directory)",
    )
    g.add_argument(
        "--pause-mode",
        choices=["abort", "retract", "in_place"],
        default="retract",
        help="what a weight update does to running requests",
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("cluster")
    g.add_argument("--ray-address", metavar="ADDR", help="an existing Ray cluster (default: start one for the run)")
    g.add_argument(
        "--placement",
        choices=["colocated", "disaggregated"],
        default="colocated",
        help="engines and trainers share devices, or have their own",
    )
    g.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value


# --- parsing ----------------------------------------------------------------------------------------------------------
class TomlFile(configargparse.ConfigFileParser):  # type: ignore[misc]
    """A TOML run file: keys as the flags, dashes or underscores; tables only group them."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        """Flag-style key -> the file it came from."""

    def get_syntax_description(self) -> str:
        """What `--help` says of the file."""
        return "The config file is TOML; its keys are the flags without the leading dashes."

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        """Flatten the file; a key in two tables is refused."""
        name = str(getattr(stream, "name", "the config file"))
        try:
            document = tomllib.loads(stream.read())
        except tomllib.TOMLDecodeError as error:
            raise OptionError(f"{name} is not valid TOML: {error}") from None
        flat: dict[str, Any] = {}
        for key, value in document.items():
            entries = value if isinstance(value, dict) and key.replace("_", "-") not in _OBJECT_KEYS else {key: value}
            for inner, content in entries.items():
                flag = inner.replace("_", "-")
                if flag in flat:
                    raise OptionError(f"the key '{inner}' stands twice in {name}; keep one.")
                flat[flag] = _config_value(content)
                self.keys[flag] = name
        return flat


_OBJECT_KEYS = {"chat-template-kwargs"}
"""Keys whose value is a table itself."""


def _config_value(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return [_config_value(item) for item in value]
    return json.dumps(value) if isinstance(value, bool) else str(value)


class _Parser(configargparse.ArgumentParser):  # type: ignore[misc]
    """Raises OptionError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message[:1].upper() + message[1:] + ".")


def new_parser(toml: TomlFile, add_help: bool) -> _Parser:
    """A parser of the core's flags, which also reads `SLIME_*` variables and, by `toml`, the --config file."""
    parser = _Parser(
        prog="slime train",
        description="Train a language model by reinforcement learning, with plugins chosen by name.",
        auto_env_var_prefix=ENV_PREFIX,
        config_file_parser_class=toml,
        allow_abbrev=False,
        add_help=add_help,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
    )
    add_core_options(parser)
    return parser


@dataclass(frozen=True)
class Parsed:
    """The options of a run, and where each came from."""

    args: Options
    sources: str


def parse(argv: Sequence[str], needs_model: bool = True) -> Parsed:
    """Parse in two phases, as pytest does: first the plugins' names, then everything with the plugins' own flags.

    Without `needs_model` the flag --model may be missing, for commands that train nothing.

    Raises:
        OptionError: naming the flag, the key or the variable that is wrong.
        PluginError: when a named plugin cannot be loaded.
    """
    argv = _with_resumed_options(argv)
    first, _ = _parse_known(new_parser(TomlFile(), add_help=False), [a for a in argv if a not in ("-h", "--help")])
    plugins = Plugins()
    for reference in chosen_plugins(first):
        plugins.load(reference)
    toml = TomlFile()
    parser = new_parser(toml, add_help=True)
    plugins.add_options(parser)
    namespace, unknown = _parse_known(parser, list(argv))
    if unknown:
        raise OptionError(_unknown_message(unknown[0], parser, toml, argv))
    _resolve_run(namespace)
    _resolve_paths(namespace)
    args = Options(**vars(namespace))
    validate(args, needs_model)
    for hook, references in hook_choices(args).items():
        for reference in references:
            _check_implements(plugins, hook, reference)
    return Parsed(args, parser.format_values())


def _with_resumed_options(argv: Sequence[str]) -> list[str]:
    """Under --resume the run's own options come first, so that only what changes needs a flag."""
    first, _ = _parse_known(new_parser(TomlFile(), add_help=False), [a for a in argv if a not in ("-h", "--help")])
    if first.resume is None or first.config is not None:
        return list(argv)
    saved = _resumed_directory(first) / OPTIONS_FILE
    if not saved.is_file():
        raise OptionError(f"--resume: {saved} is missing; give the run's flags again with --config or by hand.")
    return ["--config", str(saved), *argv]


def write_options(args: argparse.Namespace, path: Path) -> None:
    """Write every option that is set as a TOML file that --config and --resume read."""
    lines = []
    for name, value in sorted(vars(args).items()):
        if name in _NOT_WRITTEN or value is None or value == []:
            continue
        lines.append(f"{name.replace('_', '-')} = {_toml_value(value)}")
    path.write_text("\n".join(lines) + "\n")


OPTIONS_FILE = "options.toml"
_NOT_WRITTEN = {"config", "resume", "dry_run", "run_name", "runs_dir"}


def _toml_value(value: Any) -> str:
    """TOML for a flag's value; strings and arrays are written as in JSON."""
    if isinstance(value, dict):
        return json.dumps(json.dumps(value))
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def _resumed_directory(args: argparse.Namespace) -> Path:
    named = args.run_name if args.resume == "latest" and args.run_name else args.resume
    directory = next((d for d in (Path(args.runs_dir) / named, Path(named)) if d.is_dir()), None)
    if directory is None:
        raise OptionError(f"--resume: there is no run '{named}' in {args.runs_dir}.")
    return directory.resolve()


def _resolve_run(args: argparse.Namespace) -> None:
    """Settle the run directory, `--runs-dir`/`--run-name`, which `--resume` may name."""
    if args.resume is None:
        args.run_name = args.run_name or time.strftime("%Y%m%d-%H%M%S")
        return
    directory = _resumed_directory(args)
    args.runs_dir, args.run_name = str(directory.parent), directory.name


def _resolve_paths(args: argparse.Namespace) -> None:
    """Make paths good in processes with another working directory."""
    for name in ("model", "prompt_data", "runs_dir", "weights_dir"):
        value = getattr(args, name)
        setattr(args, name, value and str(Path(value).expanduser().resolve()))
    args.eval_data = [NamedPath(e.name, str(Path(e.path).expanduser().resolve())) for e in args.eval_data]


def _parse_known(parser: _Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    namespace, unknown = parser.parse_known_args(argv)
    return namespace, unknown


def _unknown_message(word: str, parser: argparse.ArgumentParser, toml: TomlFile, argv: Sequence[str]) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    flag, _, _ = word.partition("=")
    key = flag.removeprefix("--")
    if not flag.startswith("-"):
        return f"Unexpected word '{word}'; a flag that takes one value was given more, or a dash is missing."
    close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; `slime train --help` lists the flags."
    if key in toml.keys and not any(a == flag or a.startswith(f"{flag}=") for a in argv):
        hint = f"; did you mean '{close[0].removeprefix('--')}'?" if close else "; `slime train --help` lists the keys."
        return f"Unknown key '{key}' in {toml.keys[key]}{hint}"
    owner = next((f for f in installed() if flag.startswith(f"--{f.name.replace('_', '-')}-")), None)
    if owner and not close:
        hint = f"; flags of plugin '{owner.name}' exist only when a flag names the plugin."
    return f"Unknown flag {flag}{hint}"


HOOK_FLAGS = {
    "get_samples": "--get-samples",
    "generate": "--generate",
    "reward": "--reward",
    "group_reward": "--reward",
    "dynamic_filter": "--dynamic-filter",
    "over_sampling_filter": "--over-sampling-filter",
    "buffer_filter": "--buffer-filter",
    "convert_train_data": "--convert-train-data",
    "rollout": "--rollout",
    "estimate_advantages": "--advantage-estimator",
    "policy_loss": "--policy-loss",
    "log_metrics": "--tracker",
}
"""Hook -> the flag that names its plugins; `add_options` and `configure` are called on every named plugin."""


def hook_choices(args: argparse.Namespace) -> dict[str, list[str]]:
    """Hook name -> the plugins that the options name for it. `reward` covers group rewards too."""
    return {
        "get_samples": [args.get_samples],
        "generate": [args.generate],
        "reward": [choice.reference for choice in args.reward],
        "dynamic_filter": args.dynamic_filter,
        "over_sampling_filter": args.over_sampling_filter,
        "buffer_filter": [args.buffer_filter],
        "convert_train_data": [args.convert_train_data],
        "rollout": [args.rollout],
        "estimate_advantages": [args.advantage_estimator],
        "policy_loss": [args.policy_loss],
        "log_metrics": args.tracker,
    }


def chosen_plugins(args: argparse.Namespace) -> list[str]:
    """Every plugin that the options name, once each."""
    references = [reference for group in hook_choices(args).values() for reference in group]
    return list(dict.fromkeys([*references, *args.plugin]))


def _check_implements(plugins: Plugins, hook: str, reference: str) -> None:
    if hook == "reward" and plugins.implements("group_reward", plugin_name(reference)):
        return
    plugins.bind(hook, reference)


# --- validation -------------------------------------------------------------------------------------------------------
def validate(args: argparse.Namespace, needs_model: bool = True) -> None:
    """Refuse options that cannot work, alone or together, before anything starts.

    Raises:
        OptionError: naming the flag and what to do.
    """
    if args.model is None and needs_model:
        raise OptionError("--model is needed: a model directory in the Hugging Face format.")
    if args.model is not None and not (Path(args.model) / "config.json").is_file():
        raise OptionError(f"--model {args.model} is not a model directory: it has no config.json.")
    for path in [args.prompt_data, *(entry.path for entry in args.eval_data)]:
        if path is not None and not Path(path).is_file():
            raise OptionError(f"there is no data file {path}; check --prompt-data and --eval-data.")
    names = [entry.name for entry in args.eval_data]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"two --eval-data sets are called '{doubled.pop()}'; name them NAME=FILE.")
    if args.over_sampling_batch_size is not None and args.over_sampling_batch_size < args.rollout_batch_size:
        raise OptionError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is smaller than "
            f"--rollout-batch-size {args.rollout_batch_size}; it counts the groups drawn for one batch."
        )
    if args.num_steps_per_rollout > args.rollout_batch_size * args.n_samples_per_prompt:
        raise OptionError("--num-steps-per-rollout is larger than the number of samples in a round.")
    if args.top_k == 0 or args.top_k < -1:
        raise OptionError(f"--top-k {args.top_k} must be -1 (off) or at least 1.")
    if args.num_engines == 0 and args.eval_data:
        raise OptionError("--eval-data needs an engine; --num-engines is 0.")
    if args.reward_field and len(args.reward) < 2:
        raise OptionError("--reward-field picks one of several rewards; name at least two with --reward.")
    reward_names = [choice.name for choice in args.reward]
    if doubled := {name for name in reward_names if reward_names.count(name) > 1}:
        raise OptionError(f"--reward names '{doubled.pop()}' twice; name it once with the summed weight.")
    if args.resume is not None and args.no_save:
        raise OptionError("--resume needs checkpoints; drop --no-save.")
    if args.run_name is not None and (
        not args.run_name or args.run_name in (".", "..", "latest") or "/" in args.run_name
    ):
        raise OptionError(f"--run-name '{args.run_name}' cannot be a directory name under --runs-dir.")
