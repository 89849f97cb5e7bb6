"""What a frozen model's engines are started with, and how plugins ask for one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.engines.client import SampleEngine
from slime_core.engines.connect import connect
from slime_core.engines.frozen import options_of
from slime_core.engines.requests import Requests
from slime_core.errors import EngineError
from slime_core.options import frozen_model, parse, write_options
from slime_core.types import Sample

TABLE = (
    'judge={path = "%s", num-engines = 2, num-gpus-per-engine = 4, max-context-tokens = 99, sglang-tp-size = 4, '
    "sglang-enable-metrics = false, sglang-cuda-graph-bs = [1, 2], sglang-disable-radix-cache = true}"
)
SGLANG = ["--engine", "sglang", "--sglang-enable-metrics", "--sglang-dtype", "float32", "--sglang-tp-size", "1"]


def parsed(model_dir, *words: str):
    return parse(["--model", str(model_dir), *words]).args


def test_its_engines_have_the_runs_options_but_for_what_its_table_says(model_dir, other_model_dir):
    words = ["--router-port", "30000", "--engine-max-requests", "7"]
    args = parsed(model_dir, *SGLANG, *words, "--frozen-model", TABLE % other_model_dir)
    own = options_of(args, args.frozen_model[0])
    assert own.model == str(other_model_dir)
    assert (own.num_engines, own.num_gpus_per_engine, own.max_context_tokens, own.router_port) == (2, 4, 99, 0)
    assert own.engine_max_requests == 7
    assert own.sglang == {
        "dtype": ["float32"], "tp-size": ["4"], "cuda-graph-bs": ["1", "2"], "disable-radix-cache": []
    }  # fmt: skip
    assert args.sglang["tp-size"] == ["1"], "the run's own stay"


def test_it_survives_the_options_file(model_dir, other_model_dir, tmp_path):
    first = parsed(model_dir, *SGLANG, "--frozen-model", TABLE % other_model_dir, f"ref={other_model_dir}")
    write_options(first, tmp_path / "options.toml")
    assert parse(["--config", str(tmp_path / "options.toml")]).args.frozen_model == first.frozen_model


def test_toml_names_it_in_a_table(model_dir, other_model_dir, tmp_path):
    (tmp_path / "run.toml").write_text(
        f'model = "{model_dir}"\n[frozen-model.judge]\npath = "{other_model_dir}"\nnum-engines = 3\n'
    )
    args = parse(["--config", str(tmp_path / "run.toml")]).args
    assert args.frozen_model == [frozen_model(f'judge={{path = "{other_model_dir}", num-engines = 3}}')]


async def test_an_unknown_one_is_named_with_those_there_are(model_dir):
    args = parsed(model_dir)
    judge = connect(args, "http://127.0.0.1:1", [])
    async with connect(args, "http://127.0.0.1:1", [], {"judge": judge}) as engine:
        assert engine.frozen["judge"] is judge
        with pytest.raises(EngineError, match="no frozen model is called 'jugde': there are judge; --frozen-model"):
            engine.frozen["jugde"]
        with pytest.raises(EngineError, match="there is none"):
            judge.frozen["judge"]


async def test_the_logprobs_of_given_tokens_are_the_models(server):
    args = parsed(server.model_dir)
    tokens = [5, 80, 7, 200, 7]
    async with connect(args, server.url, [server.url]) as client:
        of_sample = SampleEngine(client, Requests(), 0, Sample())
        asked = (client.prompt_logprobs(tokens), client.prompt_logprobs(tokens[:1]), of_sample.prompt_logprobs(tokens))
        given = await asyncio.gather(*asked)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(server.model_dir)(torch.tensor([tokens])).logits[0]
    wanted = logits.log_softmax(-1)[torch.arange(4), torch.tensor(tokens[1:])].numpy()
    np.testing.assert_allclose(given[0], wanted, atol=1e-4)
    np.testing.assert_array_equal(given[2], given[0])
    assert given[0].dtype == np.float32 and given[1].shape == (0,)
