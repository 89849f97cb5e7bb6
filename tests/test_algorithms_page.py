"""docs/algorithms.md: its loss trains, and its tables name every built-in estimator and loss with its flags."""

from __future__ import annotations

import dataclasses
import importlib
import re
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest

from slime_core.plugins import installed
from slime_core.types import Sample, Shard, TrainBatch
from tiny_model import write_model

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()


def built_in(hook: str) -> dict[str, object]:
    """The built-in plugins that implement a hook."""
    modules = {
        found.name: importlib.import_module(f"slime_core.defaults.{found.name}")
        for found in installed()
        if found.package == "slime-core"
    }
    return {name: module for name, module in modules.items() if hasattr(module, hook)}


@pytest.mark.parametrize("hook", ["estimate_advantages", "policy_loss"])
def test_the_tables_name_every_plugin_and_its_flags(hook):
    plugins = built_in(hook)
    assert len(plugins) >= 4
    for name, module in plugins.items():
        assert f"\n| `{name}`" in PAGE, name
        parser = ArgumentParser(add_help=False)
        if hasattr(module, "add_options"):
            module.add_options(parser)
        for action in parser._actions:
            assert any(f"`{flag}`" in PAGE for flag in action.option_strings), action.option_strings


def test_the_page_names_all_that_a_batch_has():
    from slime_core.training.batch import TensorBatch

    named = set(re.findall(r"`(\w+)", PAGE))
    assert {field.name for field in dataclasses.fields(TensorBatch)} - named == set()


def test_the_pages_loss_trains_in_fifteen_lines(tmp_path):
    from slime_core.options import parse
    from slime_core.training.torch_backend.trainer import TorchTrainer

    (source,) = re.findall(r"^```python\n# sapo\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len([line for line in source.splitlines() if line]) <= 15
    plugin = tmp_path / "sapo.py"
    plugin.write_text(source)
    model = write_model(tmp_path / "model")
    flags = ["--model", str(model), "--policy-loss", str(plugin), "--sapo-tau", "1.05", "--num-steps-per-rollout", "2"]
    rng = np.random.default_rng(0)
    made = []
    for index in range(8):
        sample = Sample(index=index, group_index=index // 4, reward=float(index % 3))
        sample.tokens = rng.integers(0, 250, 3).astype(np.int32)
        sample.append(rng.integers(0, 250, 5), logprobs=[-5.0] * 5)
        made.append(sample)
    batch = TrainBatch.from_samples(made)
    trainer = TorchTrainer(
        parse(flags).args, rank=0, world_size=1, master_address="127.0.0.1", master_port=0, device="cpu"
    )
    try:
        metrics = trainer.train(0, Shard(batch, [4, 8], batch.rewards, batch.group_index))
    finally:
        trainer.close()
    assert metrics["train/grad_norm"] > 0
    # at a ratio of 1 the gate is 2 / tau
    assert metrics["train/gate"] == pytest.approx(2 / 1.05, rel=1e-3)
