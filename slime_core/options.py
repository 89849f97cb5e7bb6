"""Every core flag, grouped, and the one `validate`. Sources: flags, the environment (`SLIME_*`), a TOML file."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import math
import re
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

import configargparse

from slime_core.errors import OptionError
from slime_core.flag_types import (
    fraction,
    non_negative,
    non_negative_int,
    positive,
    positive_fraction,
    positive_int,
)
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
        return f"{'+' if self.always else ''}{self.reference}={repr(self.weight).removesuffix('.0')}"


def reward_choice(text: str) -> RewardChoice:
    """Parse `[+]NAME[=WEIGHT]`."""
    always, rest = text.startswith("+"), text.removeprefix("+")
    reference, equals, weight = rest.rpartition("=")
    try:
        choice = RewardChoice(reference, float(weight), always) if equals else RewardChoice(rest, 1.0, always)
        if not math.isfinite(choice.weight):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME or NAME=WEIGHT, for example math=0.5") from None
    return RewardChoice(absolute_reference(choice.reference), choice.weight, choice.always)


@dataclass(frozen=True)
class DataFile:
    """One `--prompt-data` entry: `a.jsonl`, `b.parquet@[100:-5]`, `c.jsonl@[:10]=0.5`."""

    path: str
    start: int | None = None
    stop: int | None = None
    weight: float | None = None

    @property
    def slice_text(self) -> str:
        """`@[START:STOP]`, or nothing for the whole file."""
        bounds = ["" if bound is None else str(bound) for bound in (self.start, self.stop)]
        return f"@[{bounds[0]}:{bounds[1]}]" if any(bounds) else ""

    def resolved(self) -> DataFile:
        """With an absolute path."""
        return replace(self, path=str(Path(self.path).expanduser().resolve()))

    def __str__(self) -> str:
        return f"{self.path}{self.slice_text}" + ("" if self.weight is None else f"={self.weight!r}")


_DATA_FILE = re.compile(
    r"(?P<path>.+?)(@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?(=(?P<weight>(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?))?"
)


def data_file(text: str) -> DataFile:
    """Parse `PATH[@[START:STOP]][=WEIGHT]`; a slice counts rows as Python does."""
    match = _DATA_FILE.fullmatch(text)
    if match is None or "@[" in match["path"] or "-" in (match["start"], match["stop"]):
        raise argparse.ArgumentTypeError(f"'{text}' must look like FILE, FILE@[START:STOP] or either with =WEIGHT")
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return DataFile(match["path"], start, stop, None if match["weight"] is None else positive(match["weight"]))


@dataclass(frozen=True)
class MultimodalKey:
    """One `--multimodal-keys` entry: `image=images`."""

    kind: str
    key: str

    def __str__(self) -> str:
        return f"{self.kind}={self.key}"


def multimodal_key(text: str) -> MultimodalKey:
    """Parse `image=FIELD`."""
    kind, _, key = text.partition("=")
    if kind != "image" or not key:
        raise argparse.ArgumentTypeError(f"'{text}' must look like image=FIELD; images are what a run carries")
    return MultimodalKey(kind, key)


@dataclass(frozen=True)
class RatioBounds:
    """One `--importance-reject` entry: `geometric=0.99:1.01`."""

    level: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.level}={self.low!r}:{self.high!r}"


def ratio_bounds(text: str) -> RatioBounds:
    """Parse `LEVEL=LOW:HIGH`."""
    match = re.fullmatch(r"(token|sequence|geometric)=([^:]+):([^:]+)", text)
    if match is None:
        levels = "LEVEL token, sequence or geometric"
        raise argparse.ArgumentTypeError(f"'{text}' must look like LEVEL=LOW:HIGH with {levels}, as in sequence=0.5:2")
    bounds = RatioBounds(match[1], non_negative(match[2]), positive(match[3]))
    if bounds.low > bounds.high:
        raise argparse.ArgumentTypeError(f"'{text}' has its bounds the wrong way round")
    return bounds


@dataclass(frozen=True)
class EvalData:
    """One `--eval-data` entry: a file, and the settings of its own (None: those of the run)."""

    name: str
    path: str
    n_samples_per_prompt: int | None = None
    reward: tuple[RewardChoice, ...] | None = None
    generate: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_tokens: int | None = None

    def __str__(self) -> str:
        own = {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self) if f.name not in ("name", "path")}
        settings = {key: value for key, value in own.items() if value is not None}
        if not settings:
            return f"{self.name}={self.path}"
        return f"{self.name}={_inline_table({'path': self.path, **settings})}"


def eval_data(text: str) -> EvalData:
    """Parse `[NAME=]PATH` or `NAME={path = "PATH", ...}`, whose braces hold a TOML inline table."""
    name, equals, rest = text.partition("=")
    if not equals:
        return EvalData(Path(data_file(text).path).stem, text)
    if not name or not rest:
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME=PATH")
    if not rest.lstrip().startswith("{"):
        return EvalData(name, _eval_path(rest))
    return _eval_data_of(name, _settings_table(name, rest))


def _settings_table(name: str, text: str) -> dict[str, Any]:
    """The TOML inline table behind `NAME=`, its keys with underscores."""
    try:
        table = tomllib.loads(f"table = {text}")["table"]
    except tomllib.TOMLDecodeError as error:
        raise argparse.ArgumentTypeError(f"what follows '{name}=' is not a TOML inline table: {error}") from None
    return {str(key).replace("-", "_"): value for key, value in table.items()}


def _eval_data_of(name: str, table: dict[str, Any]) -> EvalData:
    known = [f.name for f in fields(EvalData) if f.name != "name"]
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}."
            raise argparse.ArgumentTypeError(f"data set '{name}' has an unknown setting '{key}'; {hint}")
    if "path" not in table:
        raise argparse.ArgumentTypeError(f"data set '{name}' needs a path")
    if isinstance(table.get("reward"), str):
        table["reward"] = [table["reward"]]
    checks: dict[str, Any] = {
        "path": _eval_path,
        "n_samples_per_prompt": positive_int,
        "reward": lambda texts: tuple(reward_choice(text) for text in texts),
        "generate": absolute_reference,
        "temperature": non_negative,
        "top_p": positive_fraction,
        "top_k": top_k,
        "max_response_tokens": positive_int,
    }
    values = {}
    for key, value in table.items():
        try:
            values[key] = checks[key](value if key == "reward" else str(value))
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"data set '{name}', {key}: {error}") from None
    return EvalData(name, **values)


def _eval_path(text: str) -> str:
    """A path that may carry a slice as in --prompt-data."""
    if data_file(text).weight is not None:
        raise argparse.ArgumentTypeError(f"'{text}' has a weight; evaluation takes every row of a file")
    return text


@dataclass(frozen=True)
class FrozenModel:
    """One `--frozen-model` entry: a model that engines of its own serve, and that is never trained."""

    name: str
    path: str
    num_engines: int = 1
    num_gpus_per_engine: int | None = None
    max_context_tokens: int | None = None
    sglang: tuple[tuple[str, tuple[str, ...] | None], ...] = ()
    """SGLang's flags that differ from the run's: (name, values), None for one that is dropped."""

    def __str__(self) -> str:
        own = {"path": self.path, "num-engines": self.num_engines, "num-gpus-per-engine": self.num_gpus_per_engine}
        own |= {"max-context-tokens": self.max_context_tokens}
        own |= {f"sglang-{name}": _table_value(values) for name, values in self.sglang}
        return f"{self.name}={_inline_table({key: value for key, value in own.items() if value is not None})}"


_FROZEN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TAKEN_NAMES = ("engine", "router", "rollout")
"""Log files and metrics of the run itself."""


def frozen_model(text: str) -> FrozenModel:
    """Parse `NAME=PATH` or `NAME={path = "PATH", num-engines = N, ...}`."""
    name, _, rest = text.partition("=")
    if not _FROZEN_NAME.fullmatch(name) or not rest:
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME=MODEL_DIRECTORY")
    if name in _TAKEN_NAMES:
        raise argparse.ArgumentTypeError(f"a frozen model cannot be called '{name}'; choose another name")
    if not rest.lstrip().startswith("{"):
        return FrozenModel(name, rest)
    table = _settings_table(name, rest)
    numbers = ("num_engines", "num_gpus_per_engine", "max_context_tokens")
    sglang = {key.removeprefix("sglang_").replace("_", "-"): table.pop(key) for key in [*table] if key[:7] == "sglang_"}
    if unknown := [key for key in table if key not in ("path", *numbers)]:
        raise argparse.ArgumentTypeError(
            f"model '{name}' has an unknown setting '{unknown[0]}'; there are path, {', '.join(numbers)}, sglang-FLAG"
        )
    if "path" not in table:
        raise argparse.ArgumentTypeError(f"model '{name}' needs a path")
    try:
        counts = {key: positive_int(str(table[key])) for key in numbers if key in table}
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"model '{name}': {error}") from None
    flags = tuple((key, _flag_values(value)) for key, value in sglang.items())
    return FrozenModel(name, str(table["path"]), sglang=flags, **counts)


def _flag_values(value: Any) -> tuple[str, ...] | None:
    """A TOML value as the words behind a flag: `true` is a flag without any, `false` no flag."""
    if isinstance(value, bool):
        return () if value else None
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _table_value(values: tuple[str, ...] | None) -> bool | str | list[str]:
    """What `_flag_values` made of a TOML value, as one again."""
    if not values:
        return values is not None
    return values[0] if len(values) == 1 else list(values)


def environment_entry(text: str) -> str:
    """Check `NAME=VALUE`."""
    if "=" not in text or text.startswith("="):
        raise argparse.ArgumentTypeError(f"'{text}' must look like NAME=VALUE")
    return text


def top_k(text: str) -> int:
    """-1, which is off, or an integer of at least 1."""
    if text.strip() != "-1" and (not text.strip().isdigit() or int(text) < 1):
        raise argparse.ArgumentTypeError(f"'{text}' is neither -1 (off) nor a whole number of at least 1")
    return int(text)


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
    _add_megatron(parser)
    _add_objective(parser)
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
        nargs="+",
        default=["single_turn"],
        metavar="NAME",
        help="how a prompt becomes samples; of several the first, unless --generate-field picks another",
    )
    g.add_argument("--generate-field", metavar="FIELD", help="metadata field of a row that picks one of the generators")
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
        "--eval-rollout",
        type=absolute_reference,
        default="standard",
        metavar="NAME",
        help="replaces the collection of an evaluation, by the same hook",
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
        "--num-epoch",
        type=positive_int,
        metavar="N",
        help="train N passes over --prompt-data instead of --num-rollout rounds: N groups for each of its rows, down "
        "to whole rounds (a row that turns out too long, or bad, is replaced by the next)",
    )
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
        "--async-save", action="store_true", help="write checkpoints beside the rounds that follow, from a copy"
    )
    g.add_argument(
        "--save-hf",
        type=positive_int,
        metavar="N",
        help="write the model in the Hugging Face format to hf/ every N rounds and at the end, and keep it "
        "(default: into every checkpoint)",
    )
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
    g.add_argument(
        "--prompt-data",
        type=data_file,
        nargs="+",
        default=[],
        metavar="FILE[@[A:B]][=WEIGHT]",
        help="JSONL or Parquet, one prompt a row, or rows A to B of it; with weights every file gives its share of the "
        "prompts; without a file prompts are blank",
    )
    g.add_argument(
        "--input-key",
        default="prompt",
        metavar="KEY",
        help="field with the prompt: text or a list of chat messages; a.b is field b of the object a",
    )
    g.add_argument(
        "--label-key",
        metavar="KEY",
        help="field with the ground truth, which every row must have (default: 'label' if there)",
    )
    g.add_argument(
        "--metadata-key",
        default="metadata",
        metavar="KEY",
        help="field with an object, or one written as JSON text, kept as sample.metadata",
    )
    g.add_argument("--tool-key", default="tools", metavar="KEY", help="field with the tools shown to the chat template")
    g.add_argument(
        "--sampling-params-key",
        default="sampling_params",
        metavar="KEY",
        help="field with an object of sampling parameters that go over the run's for this row",
    )
    g.add_argument(
        "--multimodal-keys",
        type=multimodal_key,
        nargs="+",
        default=[],
        metavar="image=KEY",
        help="field with the images of a row, which go where <image> or an image part stands in the prompt",
    )
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
    g.add_argument("--top-p", type=positive_fraction, default=1.0, metavar="X")
    g.add_argument("--top-k", type=top_k, default=-1, metavar="N", help="-1: off")
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
    # `extend`: from a file each text comes as `--stop=TEXT`, so that it may begin with a dash
    g.add_argument(
        "--stop", action="extend", nargs="+", default=[], metavar="TEXT", help="strings that end a generation"
    )
    g.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    g.add_argument(
        "--max-refills",
        type=positive_int,
        default=16,
        metavar="N",
        help="draws in a row after a first one, of all of which the filters keep no group, before the run stops",
    )
    g.add_argument(
        "--partial-rollout",
        action="store_true",
        help="groups that a round did not need are continued in a later one, with the tokens they have",
    )
    g.add_argument(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        help="tokens of earlier weights stay out of the loss when a group is continued",
    )
    g.add_argument(
        "--max-staleness",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="weight versions that a trained token may lag; 1: a round is generated while the last one trains (2 with "
        "--partial-rollout, whose tokens lag one themselves)",
    )
    g.add_argument(
        "--generate-timeout-s",
        type=positive,
        default=3600.0,
        metavar="S",
        help="a generator that takes longer over a sample, tools and waiting included, is cancelled, the sample FAILED",
    )
    g.add_argument(
        "--abort-timeout-s",
        type=positive,
        default=30.0,
        metavar="S",
        help="how long generators that are no longer needed may take to let go",
    )
    g.add_argument(
        "--save-samples",
        action="store_true",
        help="write the samples of every round to the run directory, as Parquet",
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
        "--eval-data",
        type=eval_data,
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="files to evaluate on; NAME={path='FILE', n-samples-per-prompt=16, reward=['math'], ...} gives a data set "
        "its own settings, as does a table [eval-data.NAME] of the config file",
    )
    g.add_argument(
        "--eval-interval",
        type=positive_int,
        metavar="N",
        help="evaluate before training, every N rounds and at the end (default: before and at the end)",
    )
    g.add_argument("--eval-n-samples-per-prompt", type=positive_int, default=1, metavar="N")
    g.add_argument("--eval-temperature", type=non_negative, metavar="X", help="default: --temperature")
    g.add_argument("--eval-top-p", type=positive_fraction, metavar="X", help="default: --top-p")
    g.add_argument("--eval-max-response-tokens", type=positive_int, metavar="N", help="default: --max-response-tokens")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("engines")
    g.add_argument(
        "--engine",
        choices=["embedded", "sglang"],
        default="embedded",
        help="the inference server: the CPU engine, or SGLang, which takes its own flags as --sglang-FLAG",
    )
    g.add_argument(
        "--num-engines",
        type=non_negative_int,
        default=1,
        metavar="N",
        help="0: no engine, for data that needs none (--generate sft)",
    )
    g.add_argument(
        "--external-engines",
        type=http_url,
        nargs="+",
        default=[],
        metavar="URL",
        help="servers of this --engine kind that run already, instead of --num-engines started here",
    )
    g.add_argument(
        "--frozen-model",
        type=frozen_model,
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="models that plugins ask as engine.frozen[NAME], on engines of their own; "
        'NAME={path = "DIR", num-engines = 2, sglang-tp-size = 4} sets what differs from the run',
    )
    g.add_argument(
        "--num-gpus-per-engine",
        type=positive_int,
        metavar="N",
        help="GPUs of a SGLang engine where trainers have GPUs: what its parallel sizes multiply to; without "
        "--sglang-tp-size the tensor parallel size follows from it",
    )
    g.add_argument(
        "--rollout-model",
        metavar="DIR",
        help="checkpoint that SGLang engines start from instead of --model's: the same model in block-wise FP8, to "
        "which the trainer's weights are cast on their way",
    )
    g.add_argument(
        "--num-nodes-per-engine",
        type=positive_int,
        default=1,
        metavar="N",
        help="machines that a SGLang engine is spread over, evenly; the first of them serves",
    )
    g.add_argument(
        "--num-prefill-engines",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="so many of --num-engines only read prompts, the others only generate (SGLang's disaggregation)",
    )
    g.add_argument("--engine-python", metavar="PATH", help="Python of the engine's own environment (default: this one)")
    g.add_argument(
        "--engine-env", type=environment_entry, nargs="+", default=[], metavar="NAME=VALUE", help="set for the engines"
    )
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
        "--engine-health-interval-s",
        type=positive,
        default=5.0,
        metavar="S",
        help="between two questions after an engine's health",
    )
    g.add_argument(
        "--engine-health-timeout-s",
        type=positive,
        default=60.0,
        metavar="S",
        help="an engine that is not healthy for longer is replaced",
    )
    g.add_argument(
        "--engine-recovery-timeout-s",
        type=positive,
        default=900.0,
        metavar="S",
        help="without any engine for longer, the run saves its state and stops",
    )
    g.add_argument(
        "--request-timeout-s",
        type=positive,
        default=1800.0,
        metavar="S",
        help="deadline of one generation, retries included; what attempts took whose engine died is given back, up to "
        "as much again",
    )
    g.add_argument("--router-port", type=non_negative_int, default=0, metavar="PORT", help="0: any free one")
    g.add_argument(
        "--router-policy",
        choices=["round_robin", "random", "cache_aware", "power_of_two", "manual"],
        default="round_robin",
        help="manual: the turns of a sample go to one engine",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("training")
    g.add_argument(
        "--model", metavar="DIR", help="the model to train, in the Hugging Face format (config, weights, tokenizer)"
    )
    g.add_argument("--train-backend", choices=["torch", "megatron"], default="torch")
    g.add_argument("--num-trainers", type=non_negative_int, default=1, metavar="N", help="ranks; 0: rollouts only")
    g.add_argument(
        "--data-parallel",
        choices=["replicated", "fsdp2"],
        default="replicated",
        help="every rank has the whole model, or a part of each layer's parameters, gradients and optimiser state",
    )
    g.add_argument(
        "--trainer-threads",
        type=positive_int,
        metavar="N",
        help="CPU threads of a rank (default: all cores, shared out)",
    )
    g.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the computation; the optimiser works in float32 (default: float32 on CPU, bfloat16 on GPU)",
    )
    g.add_argument(
        "--cpu-offload",
        action="store_true",
        help="keep parameters, gradients and optimiser state in host memory; needs --data-parallel fsdp2",
    )
    g.add_argument(
        "--recompute-activations",
        action="store_true",
        help="keep only the inputs of layers and compute the rest again in the backward pass: less memory, more time",
    )
    g.add_argument(
        "--only-train-params", nargs="+", default=[], metavar="REGEX", help="of their names; all others are frozen"
    )
    g.add_argument("--freeze-params", nargs="+", default=[], metavar="REGEX", help="of the names of those that stay")
    g.add_argument(
        "--lora-rank",
        type=positive_int,
        metavar="N",
        help="train LoRA adapters of this rank alone; engines and models on disk get them merged (slime-core[lora])",
    )
    g.add_argument(
        "--lora-alpha", type=positive, metavar="X", help="adapters count alpha / rank times (default: --lora-rank)"
    )
    g.add_argument(
        "--lora-targets", nargs="+", default=[], metavar="NAME", help="modules with adapters (default: all linear ones)"
    )
    g.add_argument(
        "--max-tokens-per-gpu", type=positive_int, default=8192, metavar="N", help="token budget of a micro-batch"
    )
    g.add_argument(
        "--balance-by",
        choices=["tokens", "flops"],
        default="tokens",
        help="what data-parallel ranks have about the same of in a step; flops counts attention's square of the length",
    )
    g.add_argument("--num-steps-per-rollout", type=positive_int, default=1, metavar="N", help="optimiser steps a round")
    g.add_argument(
        "--optimizer",
        choices=["adamw", "muon", "stateless_adam"],
        default="adamw",
        help="muon: matrices by Muon, the rest by AdamW; stateless_adam: AdamW without moments and their memory",
    )
    g.add_argument(
        "--reset-optimizer-state", action="store_true", help="every round starts without the optimiser's moments"
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


def _add_megatron(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("megatron", "for --train-backend megatron; what the sizes leave is data parallel")
    for flag, what in {
        "--tensor-model-parallel-size": "ranks that share each matrix",
        "--pipeline-model-parallel-size": "ranks that share the layers",
        "--context-parallel-size": "ranks that share each sequence",
        "--expert-model-parallel-size": "ranks that share the experts",
        "--expert-tensor-parallel-size": "ranks that share each expert's matrices",
    }.items():
        g.add_argument(flag, type=positive_int, default=1, metavar="N", help=what)
    g.add_argument(
        "--sequence-parallel", action="store_true", help="tensor-parallel ranks share what lies between matrices too"
    )
    g.add_argument(
        "--recompute-num-layers",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="layers whose inside is computed again in the backward pass, together; 0: none",
    )
    g.add_argument(
        "--fp8", choices=["e4m3", "hybrid"], help="format of matrix products; needs Transformer-Engine and a GPU for it"
    )
    g.add_argument(
        "--fp8-recipe",
        choices=["tensorwise", "delayed", "blockwise", "mxfp8"],
        default="tensorwise",
        help="how FP8 numbers are scaled; mxfp8 is for Blackwell",
    )
    g.add_argument("--overlap-grad-reduce", action="store_true", help="sum gradients while the backward pass goes on")
    g.add_argument(
        "--overlap-param-gather",
        action="store_true",
        help="fetch the updated weights while the next forward pass goes on; needs --overlap-grad-reduce",
    )


def _add_objective(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("objective", "what holds for every --advantage-estimator and --policy-loss")
    g.add_argument(
        "--loss-aggregation",
        choices=["token", "sequence", "rollout", "constant"],
        default="token",
        help="mean over all tokens, over sequences of their token means, over rollouts likewise (the samples of a "
        "fan-out are one), or the sum a sequence over a constant",
    )
    g.add_argument(
        "--loss-constant",
        type=positive,
        metavar="X",
        help="the constant of --loss-aggregation constant (default: --max-response-tokens)",
    )
    g.add_argument(
        "--mask-truncated", action="store_true", help="samples that ended for length count in their group but not train"
    )
    g.add_argument(
        "--whiten-advantages",
        action="store_true",
        help="advantages of a round get mean 0 and variance 1 over its tokens",
    )
    g.add_argument("--entropy-coef", type=non_negative, default=0.0, metavar="X", help="entropy bonus in the loss")
    g.add_argument(
        "--kl-coef",
        type=non_negative,
        default=0.0,
        metavar="X",
        help="divergence from the reference taken off every token's reward",
    )
    g.add_argument("--kl-type", choices=["k1", "k2", "k3", "low_var"], default="k1", help="estimator of --kl-coef")
    g.add_argument(
        "--kl-loss-coef", type=non_negative, default=0.0, metavar="X", help="divergence from the reference in the loss"
    )
    g.add_argument(
        "--kl-loss-type",
        choices=["k1", "k2", "k3", "low_var"],
        default="k3",
        help="estimator of --kl-loss-coef; k1 has a gradient only with --kl-loss-unbiased",
    )
    g.add_argument(
        "--kl-loss-unbiased",
        action="store_true",
        help="multiply that estimator by the importance ratio: the gradient of k1 and k3 is then the divergence's",
    )
    g.add_argument(
        "--ref-model",
        metavar="DIR",
        help="the reference, loaded when a KL term needs it or this is set (default: --model)",
    )
    g.add_argument(
        "--ref-update-interval", type=positive_int, metavar="N", help="the policy becomes the reference every N rounds"
    )
    g.add_argument(
        "--teacher-model",
        metavar="DIR",
        help="a model with the same tokenizer, for --advantage-estimator opd and --teacher-kl-coef",
    )
    g.add_argument(
        "--teacher-kl-coef",
        type=non_negative,
        default=0.0,
        metavar="X",
        help="log p_old - log p_teacher taken off the advantage of every token, whatever the estimator",
    )
    g.add_argument(
        "--critic", action="store_true", help="train a critic beside the policy, for --advantage-estimator ppo"
    )
    g.add_argument("--critic-model", metavar="DIR", help="what the critic starts from (default: --model)")
    g.add_argument(
        "--critic-lr", type=non_negative, default=1e-5, metavar="X", help="learning rate of the critic, by AdamW"
    )
    g.add_argument(
        "--critic-only-rounds", type=non_negative_int, default=0, metavar="N", help="first rounds without the policy"
    )
    g.add_argument(
        "--value-clip", type=positive, default=0.2, metavar="X", help="how far a value may move in a round's loss"
    )
    g.add_argument(
        "--use-rollout-logprobs", action="store_true", help="the engine's log-probabilities are the old policy's"
    )
    g.add_argument(
        "--overlap-logprobs",
        action="store_true",
        help="compute reference and old log-probabilities of finished groups while the rest of a round generates",
    )
    g.add_argument(
        "--importance-correction",
        choices=["tis", "icepop", "mask"],
        help="weigh tokens by p_trainer / p_engine: clamped (tis), 0 out of bounds (icepop), or only 0 or 1 (mask)",
    )
    g.add_argument(
        "--importance-level",
        choices=["token", "sequence", "geometric"],
        default="token",
        help="ratio of a token, of its sequence, or the geometric mean over the sequence",
    )
    g.add_argument(
        "--importance-low",
        type=non_negative,
        metavar="X",
        help="lower bound of that ratio (default: 0 for tis, else 0.5)",
    )
    g.add_argument(
        "--importance-high", type=positive, metavar="X", help="upper bound of that ratio (default: 2 for tis, else 5)"
    )
    g.add_argument(
        "--importance-normalize",
        action="store_true",
        help="divide these weights by their mean over the optimiser step's tokens, or sequences (self-normalised)",
    )
    g.add_argument(
        "--importance-reject",
        type=ratio_bounds,
        nargs="+",
        default=[],
        metavar="LEVEL=LOW:HIGH",
        help="leave out tokens, or sequences, whose ratio at that level is out of bounds, whatever weighs the others",
    )
    g.add_argument(
        "--importance-veto",
        type=positive,
        metavar="X",
        help="leave out a sequence with a token whose p_trainer / p_engine is below X, such as 1e-4",
    )
    g.add_argument(
        "--routing-replay",
        action="store_true",
        help="a token of a mixture of experts goes in every update to the experts of before the round's first one",
    )
    g.add_argument(
        "--mask-offpolicy-delta",
        type=non_negative,
        metavar="X",
        help="leave out sequences of negative advantage whose mean log p_engine - log p is above X nats",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("weights")
    g.add_argument(
        "--weight-transport",
        choices=["disk", "broadcast", "tensor"],
        default="disk",
        help="disk: files, on /dev/shm if there is one; broadcast: a torch.distributed group, gloo on CPU and NCCL "
        "between GPUs; tensor: SGLang opens the trainer's memory on the same machine",
    )
    g.add_argument(
        "--weight-bucket-mb",
        type=positive_int,
        default=512,
        metavar="MB",
        help="most that broadcast and tensor send at once; a larger tensor goes alone",
    )
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
    g.add_argument(
        "--weights-check-interval",
        type=positive_int,
        default=10,
        metavar="N",
        help="updates between two comparisons of a prompt's log-probabilities, engine against trainer; the first is "
        "always compared",
    )
    g.add_argument(
        "--weights-check-bound",
        type=positive,
        metavar="X",
        help="largest mean difference in that comparison (default: 0.001 where both compute in float32, 0.5 with a "
        "--rollout-model in FP8, else 0.3)",
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
    g.add_argument(
        "--stall-timeout-s",
        type=positive,
        default=600.0,
        metavar="S",
        help="the run stops when a plugin holds the rollout manager's event loop longer",
    )
    g.add_argument(
        "--offload-engines",
        action="store_true",
        help="SGLang engines that share GPUs with trainers (--placement colocated) free their memory while those train",
    )
    g.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def http_url(text: str) -> str:
    """`http://HOST:PORT`, without a slash at the end."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise argparse.ArgumentTypeError(f"'{text}' is not an address such as http://10.0.0.5:30000")
    return text.rstrip("/")


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
            if key.replace("_", "-") in _NAMED_TABLES and isinstance(value, dict):
                value = [f"{name}={_inline_table(settings)}" for name, settings in value.items()]
            entries = value if isinstance(value, dict) and key.replace("_", "-") not in _OBJECT_KEYS else {key: value}
            for inner, content in entries.items():
                flag = inner.replace("_", "-")
                if flag in flat:
                    raise OptionError(f"the key '{inner}' stands twice in {name}; keep one.")
                flat[flag] = _config_value(content)
                self.keys[flag] = name
        return flat


_NAMED_TABLES = {"eval-data", "frozen-model"}
"""Keys whose value may be a table of NAME=SETTINGS."""
_OBJECT_KEYS = {"chat-template-kwargs"}
"""Keys whose value is a table itself."""


def _inline_table(value: Any) -> str:
    """TOML for a value of a table, itself a table or a plain path."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)


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
    namespace.sglang, unknown = _sglang_flags(unknown)
    if unknown:
        raise OptionError(_unknown_message(unknown[0], parser, toml, argv))
    _resolve_run(namespace)
    _resolve_paths(namespace)
    args = Options(**vars(namespace))
    validate(args, needs_model)
    for hook, references in hook_choices(args).items():
        for reference in references:
            _check_implements(plugins, hook, reference)
    plugins.check_options(args)
    return Parsed(args, _hide_secrets(parser.format_values(), args))


def without_secrets(args: argparse.Namespace) -> Options:
    """The options as trackers may see and send them: of --engine-env the names alone."""
    return Options(**{**vars(args), "engine_env": [_hidden(entry) for entry in args.engine_env]})


def _hide_secrets(text: str, args: argparse.Namespace) -> str:
    """The text without the values of --engine-env."""
    for entry in sorted(args.engine_env, key=len, reverse=True):  # one may begin as another does
        for written in (entry, repr(entry)[1:-1]):
            text = text.replace(written, _hidden(entry))
    return text


def _hidden(entry: str) -> str:
    return f"{entry.partition('=')[0]}=***"


SGLANG = "--sglang-"
_SGLANG_OURS = (
    "model-path", "model", "host", "port", "max-running-requests", "context-length",
    "nnodes", "node-rank", "dist-init-addr", "nccl-init-addr", "disaggregation-mode", "disaggregation-bootstrap-port",
)  # fmt: skip
"""Flags that slime sets itself."""
_SGLANG_KEYS = ("api-key", "admin-api-key")
"""Passwords, which neither the router nor the clients of a run send."""


def _sglang_flags(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Flags for SGLang, name -> values as they were given, and the other words.

    From a config file `true` is a flag without a value, `false` none, and a list several values.
    """
    flags: dict[str, list[str]] = {}
    others: list[str] = []
    current: list[str] | None = None
    for word in words:
        if word.startswith(SGLANG):
            name, equals, value = word.removeprefix(SGLANG).partition("=")
            if equals and value == "false":
                continue
            current = flags.setdefault(name, [])
            if equals and value != "true":
                current.append(value)
        elif current is not None and not word.startswith("--"):
            current.append(word)
        else:
            current = None
            others.append(word)
    return flags, others


def _with_resumed_options(argv: Sequence[str]) -> list[str]:
    """Under --resume the run's own options come first, so that only what changes needs a flag."""
    first, _ = _parse_known(new_parser(TomlFile(), add_help=False), [a for a in argv if a not in ("-h", "--help")])
    if first.resume is None or first.config is not None:
        return list(argv)
    saved = _resumed_directory(first) / OPTIONS_FILE
    if not saved.is_file():
        raise OptionError(f"--resume: {saved} is missing; give the run's flags again in a file, by --config.")
    return ["--config", str(saved), *argv]


def write_options(args: argparse.Namespace, path: Path) -> None:
    """Write every option that is set as a TOML file that --config and --resume read."""
    lines = []
    for name, values in args.sglang.items():
        lines.append(f"sglang-{name} = {_toml_value(values if len(values) > 1 else (*values, True)[0])}")
    for name, value in sorted(vars(args).items()):
        if name in _NOT_WRITTEN or value is None or value == []:
            continue
        lines.append(f"{name.replace('_', '-')} = {_toml_value(value)}")
    unfinished = path.with_name(f".{path.name}")
    unfinished.touch(mode=0o600)  # a value of --engine-env may be a secret, which a resumed run needs
    unfinished.write_text("\n".join(lines) + "\n")
    unfinished.replace(path)  # a run that is killed meanwhile can still be resumed


OPTIONS_FILE = "options.toml"
_NOT_WRITTEN = {"sglang", "config", "resume", "dry_run", "run_name", "runs_dir"}


def _toml_value(value: Any) -> str:
    """TOML for a flag's value; strings and arrays are written as in JSON."""
    if isinstance(value, dict):
        return json.dumps(json.dumps(value))
    if isinstance(value, list | tuple):
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
    directories = ("model", "rollout_model", "ref_model", "teacher_model", "critic_model", "runs_dir", "weights_dir")
    for name in directories:
        value = getattr(args, name)
        setattr(args, name, value and str(Path(value).expanduser().resolve()))
    args.prompt_data = [file.resolved() for file in args.prompt_data]
    args.eval_data = [replace(e, path=str(data_file(e.path).resolved())) for e in args.eval_data]
    args.frozen_model = [replace(m, path=str(Path(m.path).expanduser().resolve())) for m in args.frozen_model]


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
        "generate": [*args.generate, *(entry.generate for entry in args.eval_data if entry.generate)],
        "reward": [choice.reference for choice in [*args.reward, *_eval_rewards(args)]],
        "dynamic_filter": args.dynamic_filter,
        "over_sampling_filter": args.over_sampling_filter,
        "buffer_filter": [args.buffer_filter],
        "convert_train_data": [args.convert_train_data],
        "rollout": [args.rollout, args.eval_rollout],
        "estimate_advantages": [args.advantage_estimator],
        "policy_loss": [args.policy_loss],
        "log_metrics": args.tracker,
    }


def _eval_rewards(args: argparse.Namespace) -> list[RewardChoice]:
    return [choice for entry in args.eval_data for choice in entry.reward or ()]


def chosen_plugins(args: argparse.Namespace) -> list[str]:
    """Every plugin that the options name, once each."""
    references = [reference for group in hook_choices(args).values() for reference in group]
    return list(dict.fromkeys([*references, *args.plugin]))


def _check_implements(plugins: Plugins, hook: str, reference: str) -> None:
    if hook == "reward" and plugins.implements("group_reward", plugin_name(reference)):
        return
    plugins.bind(hook, reference)


def needs_reference(args: argparse.Namespace) -> bool:
    """Whether a trainer keeps a reference model."""
    return bool(args.kl_coef or args.kl_loss_coef or args.ref_model is not None)


def generates_ahead(args: argparse.Namespace) -> bool:
    """Whether a round is generated while the one before it trains, so that its tokens lag one weight version.

    Groups continued by --partial-rollout lag one themselves, unless such tokens are masked.
    """
    lag_of_continued = args.partial_rollout and not args.mask_offpolicy_in_partial_rollout
    return bool(args.max_staleness > int(lag_of_continued))


def importance_bounds(args: argparse.Namespace) -> tuple[float, float]:
    """The bounds of --importance-correction, with their defaults."""
    low, high = (0.0, 2.0) if args.importance_correction == "tis" else (0.5, 5.0)
    return (
        low if args.importance_low is None else args.importance_low,
        high if args.importance_high is None else args.importance_high,
    )


def compares_old_logprobs(args: argparse.Namespace, num_steps: int) -> bool:
    """Whether a round needs the policy's log-probabilities before its first update's own forward."""
    wanted = bool(args.kl_coef) or args.teacher_model is not None or args.importance_normalize or args.routing_replay
    return (num_steps > 1 or wanted) and not args.use_rollout_logprobs


MEGATRON_DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "fp8": None,
    "fp8_recipe": "tensorwise",
    "sequence_parallel": False,
    "recompute_num_layers": 0,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""Options that only `--train-backend megatron` knows."""


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
    for file in [*args.prompt_data, *(data_file(entry.path) for entry in args.eval_data)]:
        if not Path(file.path).is_file():
            raise OptionError(f"there is no data file {file.path}; check --prompt-data and --eval-data.")
    if len(args.multimodal_keys) > 1:
        raise OptionError("--multimodal-keys names the field of images twice; name one.")
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
    if args.weight_transport == "tensor" and args.engine == "embedded":
        raise OptionError(
            "--weight-transport tensor passes pickles, which the embedded engine does not read; use disk or broadcast, "
            "or --engine sglang."
        )
    if args.rollout_model is not None and args.engine != "sglang":
        raise OptionError("--rollout-model is for SGLang, which reads FP8; add --engine sglang, or drop it.")
    if args.sglang and args.engine != "sglang":
        raise OptionError(f"--sglang-{next(iter(args.sglang))} is for SGLang; add --engine sglang.")
    for name in args.sglang:
        _check_sglang_flag(name, f"--sglang-{name}")
    if args.generate_field and len(args.generate) < 2:
        raise OptionError("--generate-field picks one of several generators; name at least two with --generate.")
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        raise OptionError("--mask-offpolicy-in-partial-rollout needs --partial-rollout.")
    if args.partial_rollout and args.max_staleness < 1 and not args.mask_offpolicy_in_partial_rollout:
        raise OptionError(
            "--partial-rollout trains tokens of earlier weights: allow it with --max-staleness 1, or keep them out of "
            "the loss with --mask-offpolicy-in-partial-rollout."
        )
    if max(args.adam_betas) >= 1:
        raise OptionError(f"--adam-betas {args.adam_betas[0]:g} {args.adam_betas[1]:g}: both must be below 1.")
    if args.cpu_offload and args.data_parallel != "fsdp2":
        raise OptionError("--cpu-offload is FSDP2's; add --data-parallel fsdp2.")
    if args.lora_rank is None and (args.lora_targets or args.lora_alpha is not None):
        raise OptionError("--lora-targets and --lora-alpha shape adapters, of which there are none; add --lora-rank.")
    if args.lora_rank is not None and (args.freeze_params or args.only_train_params):
        raise OptionError("--lora-rank trains adapters alone; drop --freeze-params and --only-train-params.")
    if args.lora_rank is not None and importlib.util.find_spec("peft") is None:
        raise OptionError("--lora-rank needs peft: pip install 'slime-core[lora]'.")
    for pattern in (*args.only_train_params, *args.freeze_params):
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(f"'{pattern}' is no regular expression for names of parameters: {error}.") from None
    if args.save_hf is not None and args.num_trainers == 0:
        raise OptionError("--save-hf writes a trained model, but --num-trainers is 0.")
    for flag, directory in {
        "--rollout-model": args.rollout_model,
        "--ref-model": args.ref_model,
        "--teacher-model": args.teacher_model,
        "--critic-model": args.critic_model,
    }.items():
        if directory is not None and not (Path(directory) / "config.json").is_file():
            raise OptionError(f"{flag} {directory} is not a model directory: it has no config.json.")
    _validate_frozen_models(args)
    _validate_offload(args)
    _validate_layout(args)
    if args.ref_update_interval is not None and not needs_reference(args):
        raise OptionError(
            "--ref-update-interval renews a reference, but there is none; set --kl-coef or --kl-loss-coef."
        )
    _validate_overlap(args)
    compared = {
        "--importance-correction": args.importance_correction is not None,
        "--importance-reject": bool(args.importance_reject),
        "--importance-veto": args.importance_veto is not None,
    }
    for flag, given in compared.items():
        if given and args.use_rollout_logprobs:
            raise OptionError(
                f"{flag} compares the trainer with the engine, whose log-probabilities --use-rollout-logprobs takes "
                "for the trainer's; drop one of them."
            )
    if args.importance_normalize and args.importance_correction is None:
        raise OptionError("--importance-normalize divides the weights of --importance-correction, which is not given.")
    before = {"--use-rollout-logprobs": args.use_rollout_logprobs, "--overlap-logprobs": args.overlap_logprobs}
    for flag, given in before.items():
        if args.routing_replay and given:
            raise OptionError(
                f"--routing-replay takes experts from the trainer's own pass over the whole round, which {flag} "
                "leaves out; drop one of them."
            )
    low, high = importance_bounds(args)
    if low > high:
        raise OptionError(f"--importance-low {low:g} is above --importance-high {high:g}.")
    if args.num_epoch is not None and not args.prompt_data:
        raise OptionError("--num-epoch counts passes over --prompt-data, which is not given.")
    if args.external_engines and len(set(args.external_engines)) < len(args.external_engines):
        raise OptionError("--external-engines names an engine twice.")
    _validate_backend(args)
    if args.num_trainers == 0 and args.num_engines == 0:
        raise OptionError("--num-trainers and --num-engines are both 0; there is nothing to run.")
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


def _validate_overlap(args: argparse.Namespace) -> None:
    if not args.overlap_logprobs:
        return
    if args.num_trainers == 0 or args.num_engines == 0:
        raise OptionError("--overlap-logprobs needs engines and trainers.")
    if generates_ahead(args):
        raise OptionError(
            f"--overlap-logprobs and --max-staleness {args.max_staleness}: a round that is generated ahead keeps the "
            "trainers busy with the one before it, whose update changes the log-probabilities; use one of them."
        )
    if not needs_reference(args) and not compares_old_logprobs(args, args.num_steps_per_rollout):
        raise OptionError(
            "--overlap-logprobs has nothing to compute: no reference (--kl-coef, --kl-loss-coef, --ref-model), and one "
            "optimiser step a round finds the old log-probabilities in its own forward (which --num-steps-per-rollout, "
            "--teacher-model and --importance-normalize change)."
        )


def _validate_frozen_models(args: argparse.Namespace) -> None:
    names = [model.name for model in args.frozen_model]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"two --frozen-model entries are called '{doubled.pop()}'.")
    for model in args.frozen_model:
        if not (Path(model.path) / "config.json").is_file():
            raise OptionError(
                f"--frozen-model {model.name}: {model.path} is not a model directory: it has no config.json."
            )
        if model.sglang and args.engine != "sglang":
            raise OptionError(
                f"--frozen-model {model.name}: sglang-{model.sglang[0][0]} is for SGLang; add --engine sglang."
            )

        for name, values in model.sglang:
            if values is not None:
                _check_sglang_flag(name, f"--frozen-model {model.name}: sglang-{name}")


def _check_sglang_flag(name: str, given: str) -> None:
    """Refuse a flag for SGLang that no run can have; `given` is where it stands."""
    if name in _SGLANG_OURS:
        raise OptionError(f"{given} is set by slime itself; drop it.")
    if name in _SGLANG_KEYS:
        raise OptionError(f"{given}: no request of a run carries a key, and the server would refuse all; drop it.")


def _validate_offload(args: argparse.Namespace) -> None:
    if not args.offload_engines:
        return
    wrong = {
        "--engine embedded, which computes on the CPU": args.engine == "embedded",
        "--external-engines, which are not the run's to stop": bool(args.external_engines),
        "--placement disaggregated, where nobody shares": args.placement == "disaggregated",
        "this --max-staleness, under which engines generate while trainers train": generates_ahead(args),
        "--overlap-logprobs, under which trainers compute while engines generate": args.overlap_logprobs,
        "--num-trainers 0": args.num_trainers == 0,
        "--num-engines 0": args.num_engines == 0,
    }
    if found := next((reason for reason, applies in wrong.items() if applies), None):
        raise OptionError(f"--offload-engines does not go with {found}; drop one of them.")


TORCH_FLAGS = (
    "data_parallel",
    "reset_optimizer_state",
    "cpu_offload",
    "recompute_activations",
    "only_train_params",
    "freeze_params",
    "lora_rank",
    "async_save",
    "multimodal_keys",
)
"""Options that only `--train-backend torch` knows."""


def _validate_backend(args: argparse.Namespace) -> None:
    if args.train_backend != "megatron":
        for name, default in MEGATRON_DEFAULTS.items():
            if getattr(args, name) != default:
                raise OptionError(f"--{name.replace('_', '-')} is for Megatron; add --train-backend megatron.")
        return
    for name in TORCH_FLAGS:
        if getattr(args, name) not in (None, False, [], {}, "replicated"):
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} is for --train-backend torch; see docs/megatron.md for what Megatron has.")
    if args.optimizer != "adamw":
        raise OptionError(f"--optimizer {args.optimizer} is for --train-backend torch; Megatron trains with adamw.")
    copy = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    if args.num_trainers % copy:
        raise OptionError(
            f"--num-trainers {args.num_trainers} is no multiple of the {copy} ranks of one copy of the model "
            "(--tensor-model-parallel-size x --context-parallel-size x --pipeline-model-parallel-size)."
        )
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if args.num_trainers % experts:
        raise OptionError(
            f"--num-trainers {args.num_trainers} is no multiple of the {experts} ranks of one copy of the experts "
            "(--expert-model-parallel-size x --expert-tensor-parallel-size x --pipeline-model-parallel-size)."
        )
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        raise OptionError("--sequence-parallel needs --tensor-model-parallel-size of at least 2.")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise OptionError("--overlap-param-gather needs --overlap-grad-reduce.")


def _validate_layout(args: argparse.Namespace) -> None:
    for flag, given in {
        "--num-prefill-engines": args.num_prefill_engines > 0,
        "--num-nodes-per-engine": args.num_nodes_per_engine > 1,
    }.items():
        if given and (args.engine != "sglang" or args.external_engines):
            raise OptionError(f"{flag} is for engines that the run starts with --engine sglang.")
    if args.num_prefill_engines and args.num_prefill_engines >= args.num_engines:
        raise OptionError(
            f"--num-prefill-engines {args.num_prefill_engines} of --num-engines {args.num_engines} leave none to "
            "generate."
        )
    if args.num_prefill_engines and args.router_policy == "manual":
        raise OptionError("--router-policy manual keeps sessions on one engine; --num-prefill-engines needs another.")
    if args.num_nodes_per_engine > 1 and args.offload_engines:
        raise OptionError("--offload-engines is for engines on one machine; drop --num-nodes-per-engine.")
