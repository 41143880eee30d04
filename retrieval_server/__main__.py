"""``python -m retrieval_server``: serve an index, with the published flags or from a YAML file.

Examples:
  python -m retrieval_server --index_path index --corpus_path corpus.jsonl --topk 3
  python -m retrieval_server --config configs/retrieval/hybrid.yaml --port 8003
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from retrieval_server import flags
from retrieval_server.backends import load
from retrieval_server.openmp import wait_without_spinning
from retrieval_server.server import bind, run_or_report, serve


def _serve(arguments: Sequence[str] | None) -> int:
    launch = flags.launch(arguments, __doc__)
    return serve(lambda progress: load(launch.backend, progress), launch.settings, bind(launch.host, launch.port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve what the command line asks for; return the exit status (2 for what the user can mend)."""
    wait_without_spinning()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return run_or_report(lambda: _serve(arguments))


if __name__ == "__main__":
    sys.exit(main())
