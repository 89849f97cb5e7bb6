"""Compare the weights an engine uses with those the trainer sent."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.errors import WeightsDifferError

SHOWN = 3
"""Differing names that an error lists."""


def compare(sent: Mapping[str, str], used: Mapping[str, str], engine: str) -> None:
    """Refuse an engine whose checksums are not those of what was sent.

    Args:
        sent, used: tensor name -> checksum.

    Raises:
        WeightsDifferError: naming the tensors that differ.
    """
    differing = sorted(name for name in sent.keys() | used.keys() if sent.get(name) != used.get(name))
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise WeightsDifferError(
            f"{engine} does not use the weights the trainer sent: {', '.join(differing[:SHOWN])}{more} differ."
        )
