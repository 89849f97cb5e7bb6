#!/usr/bin/env bash
# Watch an agent that knows only OpenAI's API being trained through the gateway: some minutes on two cores, no GPU.
#   scripts/gateway_tiny.sh [--seed N]
# Everything it makes is under .venv/ and runs/ of the repository; runs/latest is the run with the chart.
source "$(dirname "$0")/small_run.sh"
python -c 'import openai' 2>/dev/null || pip install --quiet --constraint constraints.txt openai
data=runs/arithmetic-$seed

echo "1/3  a tokenizer, an untrained model of 117 K parameters, questions and demonstrations"
python scripts/make_arithmetic.py --out "$data" --seed "$seed"

echo "2/3  supervised warm-up: learn to answer, mostly by wrong guesses, sometimes digit by digit"
slime train --config scripts/quickstart_warmup.toml --run-name "warmup-$name" --seed "$seed" \
  --model "$data/model" --prompt-data "$data/demonstrations.jsonl"

echo "3/3  reinforcement: the agent asks, and asks once more when the answer was wrong"
slime train --config scripts/gateway_tiny.toml --run-name "gateway-$name" --seed "$seed" \
  --model "runs/warmup-$name/checkpoints/latest/model" \
  --prompt-data "$data/train.jsonl" --eval-data "heldout=$data/heldout.jsonl"
