#!/usr/bin/env bash
# Make .venv-sglang at the repository's root with real SGLang on CPU, for tests/real_sglang; quick when it is there.
#   scripts/install_sglang_cpu.sh
#
# With GPUs SGLang installs as its own documentation says, into an environment of its own:
#   python3 -m venv sglang-env && sglang-env/bin/pip install "sglang==0.5.23"
# and `slime train --engine sglang --engine-python sglang-env/bin/python` uses it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=.venv-sglang
wanted=$(cat scripts/install_sglang_cpu.sh scripts/sglang_cpu_requirements.txt | cksum)
if [ -f "$venv/installed" ] && [ "$(cat "$venv/installed")" = "$wanted" ]; then
  exit 0
fi
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

echo "installing SGLang for CPU into $root/$venv ..."
torch=$(grep '^torch==' constraints.txt)
pip install "$torch+cpu" 2>/dev/null || pip install "$torch"
# What its packages depend on beyond this list are CUDA packages that a CPU server never imports.
pip install --no-deps --requirement scripts/sglang_cpu_requirements.txt
echo "$wanted" >"$venv/installed"
