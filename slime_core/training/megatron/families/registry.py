"""Find the rules of a model family by the model's type, among the installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import importlib_metadata

from slime_core.errors import OptionError, PluginError

if TYPE_CHECKING:
    from slime_core.training.megatron.rules import Family

GROUP = "slime.models"
"""Of entry points: the name is the `model_type` of a config.json, the value a `Family`."""


def find_entry(model_type: str) -> importlib_metadata.EntryPoint:
    """The entry point of a model type; nothing is imported.

    Raises:
        OptionError: when no installed package has rules for it.
        PluginError: when several have.
    """
    entries = importlib_metadata.entry_points(group=GROUP)
    found = {entry.dist.name if entry.dist else entry.value: entry for entry in entries if entry.name == model_type}
    if not found:
        known = ", ".join(sorted({entry.name for entry in entries}))
        raise OptionError(
            f"Megatron has no rules for models of type '{model_type}'; there are {known}. A package can add a family "
            "(docs/megatron.md), or use --train-backend torch."
        )
    if len(found) > 1:
        raise PluginError(f"{' and '.join(sorted(found))} both provide the model family '{model_type}'; uninstall one.")
    return next(iter(found.values()))


def find_family(model_type: str) -> Family:
    """The family of a model type; only the package that has it is imported.

    Raises:
        OptionError: when no installed package has rules for it.
        PluginError: when the entry point does not load, or is no Family.
    """
    from slime_core.training.megatron.rules import Family

    entry = find_entry(model_type)
    try:
        family = entry.load()
    except Exception as error:
        raise PluginError(
            f"the model family '{model_type}' ({entry.value}) could not be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(family, Family):
        raise PluginError(f"the entry point '{model_type}' ({entry.value}) of {GROUP} is no Family.")
    return family
