"""Make what the quickstart trains on: a tokenizer, an untrained tiny Qwen3, demonstrations, prompts, a held-out set.

    python scripts/make_arithmetic.py --out DIR [--seed N]

The task is the sum of two two-digit numbers. The demonstrations mix two styles: most guess at once and are wrong, the
others add digit by digit and are right. Supervised training teaches both; reinforcement learning then finds out which
one pays.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 288
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELD_OUT_FRACTION = 0.1
GUESS_FRACTION = 0.6
LARGEST_ERROR = 9


def question(a: int, b: int) -> str:
    """What the user asks."""
    return f"What is {a}+{b}?"


def worked_answer(a: int, b: int) -> str:
    """The sum digit by digit, units first: 7+8=15. 3+4+1=8. \\boxed{85}."""
    units = a % 10 + b % 10
    carry = "+1" if units > 9 else ""
    return f"{a % 10}+{b % 10}={units}. {a // 10}+{b // 10}{carry}={(a + b) // 10}. \\boxed{{{a + b}}}"


def wrong_guess(a: int, b: int, rng: random.Random) -> str:
    """An answer at once that is close and never right: true guesses would teach to guess."""
    error = rng.choice([e for e in range(-LARGEST_ERROR, LARGEST_ERROR + 1) if e])
    return f"\\boxed{{{a + b + error}}}"


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """One style or the other."""
    return wrong_guess(a, b, rng) if rng.random() < GUESS_FRACTION else worked_answer(a, b)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """117 K parameters; the wide initialisation suits the small width."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write everything to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-demonstrations", type=int, default=350 * 64)
    parser.add_argument("--num-held-out", type=int, default=256, help="held-out questions that are evaluated")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    num_held_out = int(HELD_OUT_FRACTION * len(pairs))
    held_out, train = pairs[:num_held_out], pairs[num_held_out:]

    args.out.mkdir(parents=True, exist_ok=True)
    demonstrations = [(a, b, demonstration(a, b, rng)) for a, b in rng.choices(train, k=args.num_demonstrations)]
    write_rows(
        args.out / "demonstrations.jsonl",
        (
            {"prompt": [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": answer}]}
            for a, b, answer in demonstrations
        ),
    )
    write_rows(args.out / "train.jsonl", ({"prompt": question(a, b), "label": str(a + b)} for a, b in train))
    write_rows(
        args.out / "heldout.jsonl",
        ({"prompt": question(a, b), "label": str(a + b)} for a, b in held_out[: args.num_held_out]),
    )
    tokenizer = make_tokenizer(question(a, b) + answer for a, b, answer in demonstrations[:4096])
    tokenizer.save_pretrained(args.out / "model")
    make_model(tokenizer, args.seed).save_pretrained(args.out / "model")
    print(f"made model, demonstrations, prompts and held-out set in {args.out}")


if __name__ == "__main__":
    main()
