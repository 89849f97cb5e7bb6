#!/usr/bin/env bash
# Watch a language model learn arithmetic by reinforcement on this machine: about two minutes on two cores, no GPU.
#   scripts/quickstart.sh [--seed N]
# Everything it makes is under .venv/ and runs/ of the repository; runs/latest is the run with the chart.
source "$(dirname "$0")/small_run.sh"
data=runs/arithmetic-$seed

echo "1/3  a tokenizer, an untrained model of 117 K parameters, questions and demonstrations"
python scripts/make_arithmetic.py --out "$data" --seed "$seed"

echo "2/3  supervised warm-up: learn to answer, mostly by wrong guesses, sometimes digit by digit"
slime train --config scripts/quickstart_warmup.toml --run-name "warmup-$name" --seed "$seed" \
  --model "$data/model" --prompt-data "$data/demonstrations.jsonl"

echo "3/3  reinforcement: find out which way of answering is right"
slime train --config scripts/quickstart.toml --run-name "quickstart-$name" --seed "$seed" \
  --model "runs/warmup-$name/checkpoints/latest/model" \
  --prompt-data "$data/train.jsonl" --eval-data "heldout=$data/heldout.jsonl"
