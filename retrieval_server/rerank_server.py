"""``python -m retrieval_server.rerank_server``: serve ``/rerank`` alone, with the published flags.

Example: ``python -m retrieval_server.rerank_server --rerank_model_name_or_path cross-encoder/ms-marco-MiniLM-L12-v2``
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from retrieval_server.backends import load
from retrieval_server.launch import Launch, resolve
from retrieval_server.server import bind, run_or_report, serve
from retrieval_server.specs import RerankSpec

PORT = 6980
_FIELDS = RerankSpec.model_fields


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrieval_server.rerank_server",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = _FIELDS["model_path"].default
    parser.add_argument("--rerank_model_name_or_path", default=model, help=f"cross-encoder (default: {model})")
    parser.add_argument("--max_length", type=int, default=_FIELDS["max_length"].default, help="tokens of a pair")
    parser.add_argument("--rerank_topk", type=int, default=3, help="documents returned when a request does not say")
    parser.add_argument("--batch_size", type=int, default=_FIELDS["batch_size"].default, help="pairs scored together")
    parser.add_argument("--reranker_type", choices=("sentence_transformer",), default="sentence_transformer")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--threads", type=int, default=0, help="of the model on a CPU; 0 leaves it to torch")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines (default: loopback)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 takes a free one (default: {PORT})")
    return parser


def launch(arguments: Sequence[str] | None) -> Launch:
    """Return what the command line asks for; raises SettingsError that lists every mistake."""
    given = _parser().parse_args(arguments)
    backend = {
        "name": "rerank",
        "model_path": given.rerank_model_name_or_path,
        **{name: getattr(given, name) for name in ("max_length", "batch_size", "dtype", "device", "threads")},
    }
    return resolve(backend, {"host": given.host, "port": given.port, "topk": given.rerank_topk})


def _serve(arguments: Sequence[str] | None) -> int:
    wanted = launch(arguments)
    return serve(lambda progress: load(wanted.backend, progress), wanted.settings, bind(wanted.host, wanted.port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve what the command line asks for; return the exit status (2 for what the user can mend)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return run_or_report(lambda: _serve(arguments))


if __name__ == "__main__":
    sys.exit(main())
