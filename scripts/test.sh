#!/usr/bin/env bash
# Run every check and test of slime-core and its plugins, in two processes (`-n 0`: in one).
#   scripts/test.sh [--all] [PYTEST_OPTION...]      --all: the slow tier too
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tier=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  tier=()
  shift
fi
"$root/scripts/install.sh" dev wandb bench megatron lora
cd "$root"
export PATH="$root/.venv/bin:$PATH"

ruff check .
ruff format --check .
mypy slime_core/types.py slime_core/errors.py slime_core/hostile.py slime_core/hookspecs.py slime_core/multi_turn.py slime_core/extra_keys.py slime_core/flag_types.py slime_core/bound.py slime_core/plugins.py slime_core/options.py
for plugin in plugins/*/; do
  mypy "$plugin$(basename "$plugin")"
done
# Threads that spin while they wait would take the cores from the processes under test.
# loadgroup: each test by itself goes to the process that is free, so that long ones do not wait for one another.
OMP_WAIT_POLICY=PASSIVE python -m pytest -n 2 --dist loadgroup ${tier[@]+"${tier[@]}"} "$@"
