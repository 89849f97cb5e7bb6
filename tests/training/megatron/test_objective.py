"""One loss code for both backends: what the torch backend trains with a set of flags, Megatron trains too."""

from __future__ import annotations

import pytest

from training.megatron.cases import OBJECTIVES, objective_flags
from training.megatron.conftest import by_torch, check_same


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_is_that_of_the_torch_backend(name, two_ranks, models):
    check_same(two_ranks, name, by_torch(models["qwen3"], objective_flags(models, name), steps=2))
