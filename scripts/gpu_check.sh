#!/usr/bin/env bash
# Checks one machine with a CUDA device in under eight minutes and prints a table; a row that cannot run says what is
# missing. Needs torch and transformers alone. Usage: bash scripts/gpu_check.sh [--tiny] [--device cpu] [--only WORD]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$root/scripts/gpu_check.py" "$@"
