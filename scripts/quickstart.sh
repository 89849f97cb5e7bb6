#!/usr/bin/env bash
# Watch a language model learn arithmetic by reinforcement on this machine: about two minutes on two cores, no GPU.
#   scripts/quickstart.sh [--seed N]
# Everything it makes is under .venv/ and runs/ of the repository; runs/latest is the run with the chart.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
seed=1234
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; see scripts/quickstart.sh --help" >&2; exit 2 ;;
  esac
done
"$root/scripts/install.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
name=$(date +%Y%m%d-%H%M%S)-$$
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
