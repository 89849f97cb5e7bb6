"""Make what scripts/search_r1_tiny.sh trains on: a corpus, an untrained tiny Qwen3, demonstrations and questions.

    python scripts/make_search_r1_tiny.py --out DIR [--seed N]

Invented people have rooms, and only the corpus knows which. The demonstrations mix two styles: most guess a room at
once and are wrong, the others search for the name and read it. Nothing says which style pays; reinforcement finds out.
"""

from __future__ import annotations

import argparse
import random
from itertools import product
from pathlib import Path

from make_arithmetic import make_model, make_tokenizer, write_rows

TAGS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|assistant|>{% endif %}"
    "{% generation %}{{ message['content'] }}{% if loop.last %}<|end|>{% endif %}{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""What a tool says stands inside the assistant's turn, as a search's information does."""
SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
NUM_NAMES = 1200
HELD_OUT_FRACTION = 0.2
GUESS_FRACTION = 0.6


def question(name: str) -> str:
    """What the user asks."""
    return f'Where is "{name}"?'


def demonstration(name: str, rooms: dict[str, int], rng: random.Random) -> list[dict[str, str]]:
    """A conversation in one style or the other."""
    asked = {"role": "user", "content": question(name)}
    if rng.random() < GUESS_FRACTION:
        wrong = rng.choice([room for room in range(10, 100) if room != rooms[name]])
        return [asked, {"role": "assistant", "content": f"<answer>{wrong}</answer>"}]
    return [
        asked,
        {"role": "assistant", "content": f"<search>{name}</search>"},
        {"role": "tool", "content": f"\n\n<information>{rooms[name]}</information>\n\n"},
        {"role": "assistant", "content": f"<answer>{rooms[name]}</answer>"},
    ]


def main() -> None:
    """Write everything to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-demonstrations", type=int, default=500 * 64)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    names = ["".join(pair) for pair in rng.sample(list(product(SYLLABLES, SYLLABLES)), NUM_NAMES)]
    rooms = {name: rng.randrange(10, 100) for name in names}
    num_held_out = int(HELD_OUT_FRACTION * NUM_NAMES)
    held_out, train = names[:num_held_out], names[num_held_out:]

    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out / "corpus.jsonl", ({"title": name, "text": str(room)} for name, room in rooms.items()))
    write_rows(
        args.out / "demonstrations.jsonl",
        ({"prompt": demonstration(name, rooms, rng)} for name in rng.choices(train, k=args.num_demonstrations)),
    )
    for file, asked in (("train.jsonl", train), ("heldout.jsonl", held_out)):
        write_rows(args.out / file, ({"prompt": question(name), "label": str(rooms[name])} for name in asked))
    tokenizer = make_tokenizer(question(name) for name in names)
    tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(args.out / "model")
    model = make_model(tokenizer, args.seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(args.out / "model")
    print(f"made corpus, model, demonstrations, questions and held-out questions in {args.out}")


if __name__ == "__main__":
    main()
