#!/usr/bin/env bash
# The published name of: retrieval_launch.sh over TopiOCQA's collection and E5 index (flags that follow override these).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/retrieval_launch.sh" --index_path collection/topiocqa/index/e5_Flat.index --corpus_path collection/topiocqa.jsonl \
    --topk 3 --retriever_name e5 --retriever_model intfloat/e5-base-v2 --faiss_gpu "$@"
