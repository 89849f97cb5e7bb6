"""Tests that need CUDA; without it they are skipped and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
