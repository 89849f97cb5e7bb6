#!/usr/bin/env bash
# Watch a language model learn to search by reinforcement on this machine: a few minutes on two cores, no GPU.
#   scripts/search_r1_tiny.sh [--seed N]
# Everything it makes is under .venv/ and runs/ of the repository; runs/latest is the run with the chart.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
seed=1234
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; see scripts/search_r1_tiny.sh --help" >&2; exit 2 ;;
  esac
done
"$root/scripts/install.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
name=$(date +%Y%m%d-%H%M%S)-$$
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
