#!/usr/bin/env bash
# Watch a language model learn to search by reinforcement on this machine: a few minutes on two cores, no GPU.
#   scripts/search_r1_tiny.sh [--seed N]
# Everything it makes is under .venv/ and runs/ of the repository; runs/latest is the run with the chart.
source "$(dirname "$0")/small_run.sh"
data=runs/search-r1-tiny-$seed

echo "1/3  a corpus of who is in which room, an untrained model, questions and demonstrations"
python scripts/make_search_r1_tiny.py --out "$data" --seed "$seed"

echo "2/3  supervised warm-up: learn to answer, mostly by guesses, sometimes by a search"
slime train --config scripts/search_r1_tiny_warmup.toml --run-name "warmup-$name" --seed "$seed" \
  --model "$data/model" --prompt-data "$data/demonstrations.jsonl"

echo "3/3  reinforcement: find out that searching pays"
slime train --config scripts/search_r1_tiny.toml --run-name "search-r1-tiny-$name" --seed "$seed" \
  --model "runs/warmup-$name/checkpoints/latest/model" --search-r1-corpus "$data/corpus.jsonl" \
  --prompt-data "$data/train.jsonl" --eval-data "heldout=$data/heldout.jsonl"
