"""Demonstrations as samples: which tokens are trained, under chat templates of several styles."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from slime_core.defaults import sft
from slime_core.errors import DataError
from slime_core.types import Sample, Status

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TEXT = ["the cat sat on the mat and the dog sat on the log", "2+2=4 assistant user system question answer"] * 20

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%}"
    "{{ m.content }}<|im_end|>{%- endgeneration -%}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
SPACED = "{% for m in messages %}{{ m.role }}: {{ m.content.strip() }} \n</s>{% endfor %}"
BARE = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}"
# inserts thoughts in the last turn only, as reasoning models do
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
)
# moves what stands before </think> elsewhere, so that a marker is rendered differently from the real text
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and parts | length < 2 %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
)
SHOUTING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"


def make_tokenizer(template: str | None = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    return fast


def run(tokenizer: Any, sample: Sample, context_tokens: int = 1 << 20, **options: Any) -> Sample:
    args = Namespace(
        **{
            "apply_chat_template": False,
            "chat_template_kwargs": {},
            "max_response_tokens": 1000,
            **options,
        }
    )
    engine = SimpleNamespace(tokenizer=tokenizer, context_tokens=context_tokens)
    (made,) = asyncio.run(sft.generate(args=args, engine=engine, sample=sample))
    return made


def trained_text(tokenizer: Any, sample: Sample) -> list[str]:
    """The text of each run of trained tokens."""
    response = sample.tokens[sample.prompt_length :]
    runs = [part for part, trainable in sft._runs(response.tolist(), sample.loss_mask.tolist()) if trainable]
    return [tokenizer.decode(part, skip_special_tokens=False) for part in runs]


CHAT = [
    {"role": "system", "content": "the assistant"},
    {"role": "user", "content": "2+2=4?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on 4\nmats, naïve 日本"},
]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ("<|im_end|>", "<|im_end|>")),
        (LLAMA3, ("<|eot_id|>", "<|eot_id|>")),
        (MARKED, ("<|im_end|>", "<|im_end|>")),
        (SPACED, (" \n</s>", " \n</s>")),
        (BARE, ("", "</s>")),
        (THINKING, ("<|im_end|>", "<|im_end|>")),
    ],
    ids=["chatml", "llama3", "marked", "spaced", "bare", "thinking"],
)
def test_every_assistant_turn_and_its_end_is_trained(template, ends):
    tokenizer = make_tokenizer(template)
    sample = run(tokenizer, Sample(prompt=CHAT))
    got = [text.removeprefix(" ") for text in trained_text(tokenizer, sample)]
    assert got == ["4" + ends[0], "sat on 4\nmats, naïve 日本" + ends[1]]
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    whole = tokenizer.decode(sample.tokens, skip_special_tokens=False)
    assert whole == rendered.rstrip("\n") + ("</s>" if template == BARE else "")
    assert sample.status is Status.COMPLETED
    assert np.isnan(sample.logprobs).all()


@pytest.mark.parametrize("template", [LLAMA3, SPACED])
def test_a_template_may_strip_the_answer(template):
    tokenizer = make_tokenizer(template)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " \nsat on\nthe mat\n\n"}]
    (text,) = trained_text(tokenizer, run(tokenizer, Sample(prompt=chat)))
    assert text.lstrip(" ").startswith("sat on\nthe mat")


def test_an_answer_that_also_stands_in_the_question_and_the_header():
    tokenizer = make_tokenizer(CHATML)
    chat = [{"role": "user", "content": "assistant, say a"}, {"role": "assistant", "content": "a"}]
    sample = run(tokenizer, Sample(prompt=chat))
    assert trained_text(tokenizer, sample) == ["a<|im_end|>"]
    assert tokenizer.decode(sample.tokens[: sample.prompt_length]).endswith("<|im_start|>assistant\n")


def test_an_answer_that_the_template_treats_by_its_content_is_searched_for():
    tokenizer = make_tokenizer(REASONING)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>two</think>the answer"}]
    sample = run(tokenizer, Sample(prompt=chat))
    assert trained_text(tokenizer, sample) == ["<think>two</think>the answer<|im_end|>"]


def test_a_searched_answer_that_could_be_elsewhere_is_refused():
    tokenizer = make_tokenizer(REASONING)
    answer = "<think>two</think>4"
    chat = [{"role": "user", "content": f"why {answer}?"}, {"role": "assistant", "content": answer}]
    with pytest.raises(DataError, match="assistant turn 0 of sample 3"):
        run(tokenizer, Sample(prompt=chat, index=3))


def test_a_template_that_changes_the_answer_is_refused():
    with pytest.raises(DataError, match="does not render assistant turn 0 of sample 7 of data set 'train'"):
        run(make_tokenizer(SHOUTING), Sample(prompt=CHAT, index=7))


def test_a_tokenizer_that_loses_text_is_refused():
    tokenizer = make_tokenizer(CHATML, normalizers.Lowercase())
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "SAT"}]
    with pytest.raises(DataError, match="normalisation"):
        run(tokenizer, Sample(prompt=chat))


def test_a_template_that_raises_names_the_row():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses sample 5 .* roles must alternate"):
        run(make_tokenizer(template), Sample(prompt=CHAT, index=5))


def test_content_in_parts_asks_for_marks():
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": []}]
    with pytest.raises(DataError, match="generation"):
        run(make_tokenizer(CHATML), Sample(prompt=chat))


def test_a_conversation_without_template_is_refused():
    with pytest.raises(DataError, match="no chat template"):
        run(make_tokenizer(), Sample(prompt=CHAT))


def test_messages_without_an_answer_take_the_label():
    tokenizer = make_tokenizer(CHATML)
    sample = run(tokenizer, Sample(prompt=[{"role": "user", "content": "the cat"}], label="sat"))
    assert trained_text(tokenizer, sample) == ["sat<|im_end|>"]
    assert sample.response == "sat"


def test_a_text_prompt_is_wrapped_when_the_chat_template_is_asked_for():
    tokenizer = make_tokenizer(CHATML)
    sample = run(tokenizer, Sample(prompt="the cat", label="sat"), apply_chat_template=True)
    assert tokenizer.decode(sample.tokens) == (
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>"
    )


@pytest.mark.parametrize("tokenised", [True, False])
def test_a_plain_prompt_is_followed_by_label_and_end_of_text(tokenised):
    tokenizer = make_tokenizer(CHATML)
    prompt = tokenizer.encode("<s>the cat" if tokenised else "the cat", add_special_tokens=False)
    tokens = np.array(prompt if tokenised else [], np.int32)
    sample = run(tokenizer, Sample(prompt="the cat", tokens=tokens, label=" sat on the mat"))
    assert sample.tokens[: sample.prompt_length].tolist() == prompt
    assert trained_text(tokenizer, sample) == [" sat on the mat</s>"]
    assert sample.response == " sat on the mat"


def test_a_text_without_prompt_trains_all_but_its_first_token():
    tokenizer = make_tokenizer()
    sample = run(tokenizer, Sample(prompt="", label="the cat sat"))
    assert sample.prompt_length == 0
    assert sample.loss_mask.tolist() == [0] + [1] * (len(sample.tokens) - 1)


def test_a_row_without_demonstration_is_refused():
    with pytest.raises(DataError, match="--label-key"):
        run(make_tokenizer(), Sample(prompt="the cat"))


@pytest.mark.parametrize(("options", "kept"), [({"max_response_tokens": 2}, 2), ({"context_tokens": 7}, 3)])
def test_long_demonstrations_are_cut(options, kept):
    tokens = np.array([5, 5, 5, 5], np.int32)
    sample = run(make_tokenizer(), Sample(prompt="x", tokens=tokens, label="12345678"), **options)
    assert sample.response_length == kept
    assert sample.response == "12345678"[:kept]
    assert sample.status is Status.TRUNCATED


def test_a_prompt_beyond_the_context_leaves_no_response():
    sample = run(make_tokenizer(), Sample(tokens=np.arange(9, dtype=np.int32), label="12"), context_tokens=5)
    assert (sample.response_length, sample.status) == (0, Status.TRUNCATED)


def test_tools_and_template_variables_reach_the_template():
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ mood }}" + CHATML
    tokenizer = make_tokenizer(template)
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    sample = Sample(prompt=CHAT[1:3], metadata={"tools": [tool]})
    made = run(tokenizer, sample, chat_template_kwargs={"mood": "cheerful"})
    assert tokenizer.decode(made.tokens).startswith("[search]cheerful<|im_start|>user")


def test_the_loss_is_the_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0])
    loss, metrics = sft.policy_loss(logprobs=logprobs)
    assert loss.tolist() == [1.0, 2.0]
    assert metrics == {}
