"""Two turns against a real embedded engine, whose model is made to say what the test needs."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slime_core import Sample, Status
from slime_core.engines.client import EngineClient, SampleEngine
from slime_core.engines.requests import Requests
from slime_core.testing import make_options
from slime_search_r1 import SearchR1

SAYS = {
    "?": "<search>",
    "<search>": "tea",
    "tea": "</search>",
    "<gap>": "<answer>",
    "<answer>": "kettle",
    "kettle": "</answer>",
}
"""What the model writes behind each word; `<gap>` stands for every text that is no word."""

VOCABULARY = ["<end>", "<information>", "</information>", "</search>", "</answer>", *SAYS]

INFORMATION = ["<gap>", "<information>", "kettle", "</information>", "<gap>"]
ANSWER = ["<answer>", "kettle", "</answer>"]
SHOWN = ("--search-r1-document-format", "{text}")


def save_model(directory: Path) -> None:
    """A model whose one layer adds nothing: an embedding is its token's own direction, the head maps it to the next."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    size = 16
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(ids),
            hidden_size=size,
            intermediate_size=size,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=size,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=0,
        )
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(ids), size))
        model.lm_head.weight.zero_()
        for word, following in SAYS.items():
            model.lm_head.weight[ids[following], ids[word]] = 10.0
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel(ids, unk_token="<gap>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|\?"), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(directory)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def engine_url(model_dir, tmp_path_factory):
    port_file = tmp_path_factory.mktemp("engine") / "port"
    command = [sys.executable, "-m", "slime_core.engines.embedded", "--model-path", str(model_dir)]
    with subprocess.Popen([*command, "--port", "0", "--port-file", str(port_file)]) as engine:
        try:
            deadline = time.monotonic() + 120
            while not port_file.exists() and engine.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        finally:
            engine.terminate()


async def test_two_turns_against_the_embedded_engine(engine_url, model_dir, corpus_file):
    plugin = SearchR1(make_options("--generate", "search_r1", "--search-r1-corpus", str(corpus_file), *SHOWN))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    sample = Sample(prompt="?", tokens=np.array(tokenizer.encode("?"), np.int32))
    async with EngineClient(engine_url, tokenizer=tokenizer, concurrency=64, timeout_s=60) as client:
        params = {"temperature": 0.0, "max_new_tokens": 32, "stop": []}
        engine = SampleEngine(client, Requests(), 0, sample)
        (sample,) = await plugin.generate(engine=engine, sample=sample, sampling_params=params)
    said = ["<search>", "tea", "</search>", *INFORMATION, *ANSWER]
    assert sample.status is Status.COMPLETED
    assert tokenizer.convert_ids_to_tokens(sample.tokens[sample.prompt_length :].tolist()) == said
    assert sample.loss_mask.tolist() == [1] * 3 + [0] * 5 + [1] * 3
    assert np.isnan(sample.logprobs).tolist() == [False] * 3 + [True] * 5 + [False] * 3
