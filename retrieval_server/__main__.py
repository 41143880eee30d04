"""``python -m retrieval_server``: serve an index, with the published flags.

Example: ``python -m retrieval_server --index_path index --corpus_path corpus.jsonl --topk 3``
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from retrieval_server.backends import LOADERS, load, pick
from retrieval_server.errors import SettingsError
from retrieval_server.manifest import read_manifest, resolve_index
from retrieval_server.server import bind, run_or_report, serve
from retrieval_server.settings import DEFAULT_PORT, Settings
from retrieval_server.specs import Bm25Spec

logger = logging.getLogger("retrieval_server")

# Published flags that describe an encoder; bm25 has none, and says so when one is set.
_ENCODER_FLAGS = ("retriever_model", "faiss_gpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retrieval_server", allow_abbrev=False, description=__doc__)
    parser.add_argument("--index_path", type=Path, required=True, help="the index, or the builder's --save_dir")
    parser.add_argument("--corpus_path", type=Path, required=True, help="the corpus the index was built from")
    parser.add_argument("--retriever_name", default=None, help="the backend (default: the one that built the index)")
    parser.add_argument("--retriever_model", default=None, help="encoder of a dense backend")
    parser.add_argument("--faiss_gpu", action="store_true", help="search of a dense backend on the GPU")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines (default: loopback)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--verify",
        choices=("auto", "full", "sampled"),
        default="auto",
        help="how files are compared with the manifest (auto: those above 1 GiB by samples)",
    )
    limits = parser.add_argument_group("limits and defaults")
    for field in dataclasses.fields(Settings):
        if isinstance(field.default, bool):
            limits.add_argument(f"--{field.name}", action="store_true")
        else:
            kind, shown = type(field.default), f"default: {field.default}"
            limits.add_argument(f"--{field.name}", type=kind, default=field.default, help=shown)
    return parser


def _serve(options: argparse.Namespace) -> int:
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    kind = read_manifest(resolve_index(options.index_path)).kind
    name = options.retriever_name or kind
    pick(LOADERS, name, "--retriever_name")
    if name != kind:
        raise SettingsError(f"--retriever_name is {name!r}, but {options.index_path} is an index of kind {kind!r}")
    ignored = [f"--{flag}" for flag in _ENCODER_FLAGS if getattr(options, flag)]
    if ignored:
        logger.warning("%s has no encoder: no effect of %s", name, ", ".join(ignored))
    spec = Bm25Spec(index_path=options.index_path, corpus_path=options.corpus_path, verify=options.verify)
    return serve(lambda progress: load(spec, progress), settings, bind(options.host, options.port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve what the command line asks for; return the exit status (2 for what the user can mend)."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return run_or_report(lambda: _serve(options))


if __name__ == "__main__":
    sys.exit(main())
