"""``python -m retrieval_server.build_index``: build an index from a corpus, with the published flags.

Example: ``python -m retrieval_server.build_index --retrieval_method bm25 --corpus_path corpus.jsonl --save_dir index``
writes ``index/bm25``. The last line printed is the path of the index.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from retrieval_server.backends import BUILDERS, pick
from retrieval_server.building import BuildPlan
from retrieval_server.errors import RetrievalServerError

logger = logging.getLogger("retrieval_server.build_index")

# Published flags that describe an encoder; name -> default. bm25 has none, and says so when one is set.
_ENCODER_FLAGS = {
    "model_path": None,
    "max_length": 180,
    "batch_size": 512,
    "use_fp16": False,
    "pooling_method": None,
    "faiss_type": None,
    "save_embedding": False,
    "embedding_path": None,
    "faiss_gpu": False,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retrieval_server.build_index", allow_abbrev=False, description=__doc__)
    parser.add_argument("--retrieval_method", default="bm25", help=f"one of: {', '.join(BUILDERS)} (default: bm25)")
    parser.add_argument("--corpus_path", type=Path, required=True, help="JSON lines with id and contents (or text)")
    parser.add_argument("--save_dir", type=Path, default=Path("indexes"), help="the index becomes <save_dir>/<method>")
    parser.add_argument("--k1", type=float, default=0.9, help="bm25 term saturation (default: 0.9)")
    parser.add_argument("--b", type=float, default=0.4, help="bm25 length normalisation (default: 0.4)")
    parser.add_argument("--stopwords", default="english", help="english or none")
    parser.add_argument("--stemmer", default="lucene", help="lucene (words and stems), a Snowball language, none")
    parser.add_argument("--force", action="store_true", help="build even when this very index exists")
    encoder = parser.add_argument_group("encoder flags of the published builder (no meaning for bm25)")
    for name, default in _ENCODER_FLAGS.items():
        if isinstance(default, bool):
            encoder.add_argument(f"--{name}", action="store_true")
        else:
            encoder.add_argument(f"--{name}", type=int if isinstance(default, int) else str, default=default)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for; return the exit status (2 for what the user can mend)."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    ignored = [f"--{name}" for name, default in _ENCODER_FLAGS.items() if getattr(options, name) != default]
    try:
        builder = pick(BUILDERS, options.retrieval_method, "--retrieval_method")
        if ignored:
            logger.warning("%s has no encoder: no effect of %s", options.retrieval_method, ", ".join(ignored))
        plan = BuildPlan(
            corpus_path=options.corpus_path,
            save_dir=options.save_dir,
            k1=options.k1,
            b=options.b,
            stopwords=options.stopwords,
            stemmer=options.stemmer,
            force=options.force,
        )
        manifest = builder(plan)
    except RetrievalServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{options.save_dir / manifest.kind}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
