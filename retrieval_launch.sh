#!/usr/bin/env bash
# Serve a retrieval index. Flags as published, passed on:
#   bash retrieval_launch.sh --index_path INDEX --corpus_path CORPUS.jsonl [--topk 3] [--retriever_name bm25] [--port 8002]
#   bash retrieval_launch.sh --config configs/retrieval/hybrid.yaml [flags that override it]
# Stop it with Ctrl-C or SIGTERM: accepted requests are finished first. Readiness: GET /readyz.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-$here/.venv/bin/python}"
if ! command -v "$python" >/dev/null; then
    echo "error: $python not found: run 'make setup' in $here first, or set PYTHON to an interpreter with the packages" >&2
    exit 2
fi
# From the caller's folder, so that relative paths mean what they say. exec: signals reach the server itself.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m retrieval_server "$@"
