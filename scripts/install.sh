#!/usr/bin/env bash
# Make .venv at the repository's root and install slime-core and its plugins into it; quick when nothing has changed.
#   scripts/install.sh [EXTRA...]      for example: scripts/install.sh dev
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
extras=$(IFS=,; echo "$*")

find_python() {
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or newer with venv is needed; name one with PYTHON=/path/to/python." >&2
  exit 1
}

# The stamp tells what was installed; extras of an earlier call stay.
stamp=.venv/installed
wanted=$(cat constraints.txt pyproject.toml plugins/*/pyproject.toml scripts/install.sh | cksum)
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ] && grep -qx "extras=$extras" "$stamp"; then
  exit 0
fi
[ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

echo "installing into $root/.venv ..."
torch=$(grep '^torch==' constraints.txt)
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  # Without a GPU the CPU build is enough, and gigabytes smaller, where the configured index has one.
  if command -v nvidia-smi >/dev/null || ! pip install --quiet "$torch+cpu" 2>/dev/null; then
    pip install --quiet "$torch"
  fi
fi
packages=(--editable ".${extras:+[$extras]}")
# Developers get what the plugins' own tests need: their extra `test`, where they have one.
for plugin in plugins/*; do
  if [[ ",$extras," == *,dev,* ]] && grep -q '^test = ' "$plugin/pyproject.toml"; then
    plugin+="[test]"
  fi
  packages+=(--editable "./$plugin")
done
pip install --quiet --constraint constraints.txt "${packages[@]}"
{ echo "$wanted"; if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ]; then grep '^extras=' "$stamp" || true; fi
  echo "extras="; echo "extras=$extras"; } >"$stamp.new"
mv "$stamp.new" "$stamp"
