"""What a plugin imports. Loads neither torch nor ray."""

from slime_core import flag_types
from slime_core.errors import DataError, EngineError, OptionError, PluginError, SlimeError
from slime_core.hookspecs import CONTRACT_VERSION, hookimpl
from slime_core.multi_turn import ToolResult, Turn, call_tools, split_turns, take_turns, turns_of
from slime_core.types import Drop, Generation, Group, Sample, Status, TrainBatch

__all__ = [
    "CONTRACT_VERSION",
    "DataError",
    "Drop",
    "EngineError",
    "Generation",
    "Group",
    "OptionError",
    "PluginError",
    "Sample",
    "SlimeError",
    "Status",
    "ToolResult",
    "TrainBatch",
    "Turn",
    "call_tools",
    "flag_types",
    "hookimpl",
    "split_turns",
    "take_turns",
    "turns_of",
]

__version__ = "0.1.0"
