# Sourced by the scripts that train a small model on this machine. It reads their options, brings the installation up to
# date, and gives them `seed`, and `name`, under which this run's directories are found. Their help is lines 2-4.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
seed=1234
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1; see scripts/$(basename "$0") --help" >&2; exit 2 ;;
  esac
done
"$root/scripts/install.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH"
name=$(date +%Y%m%d-%H%M%S)-$$
