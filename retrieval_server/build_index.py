"""``python -m retrieval_server.build_index``: build an index from a corpus, with the published flags.

Example: ``python -m retrieval_server.build_index --retrieval_method bm25 --corpus_path corpus.jsonl --save_dir index``
writes ``index/bm25``; ``--retrieval_method e5 --model_path intfloat/e5-base-v2`` a dense one, ``index/e5``. The last
line printed is the path of the index.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from retrieval_server import selftest
from retrieval_server.backends import INDEX_KINDS, builder, load, pick, planner
from retrieval_server.building import BuildPlan
from retrieval_server.encode_options import FAMILY_NAMES, EncodeOptions
from retrieval_server.errors import RetrievalServerError, SettingsError
from retrieval_server.manifest import Manifest, Verify, served_corpus
from retrieval_server.openmp import wait_without_spinning
from retrieval_server.specs import Spec
from retrieval_server.types import LoadProgress

logger = logging.getLogger("retrieval_server.build_index")

_CORPUS_HELP = "JSON lines (also .gz, .zst) or parquet with id and contents, or title and text; or a folder of shards"
_METHOD = "method"
_METHOD_HELP = f"bm25 (default), or an encoder: {', '.join(FAMILY_NAMES)} or any name"
_ENCODER_FIELDS = {field.name: field for field in dataclasses.fields(EncodeOptions) if field.name != _METHOD}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retrieval_server.build_index", allow_abbrev=False, description=__doc__)
    parser.add_argument("--retrieval_method", default="bm25", help=_METHOD_HELP)
    parser.add_argument("--corpus_path", type=Path, required=True, help=_CORPUS_HELP)
    parser.add_argument("--save_dir", type=Path, default=Path("indexes"), help="the index becomes <save_dir>/<method>")
    parser.add_argument("--k1", type=float, default=0.9, help="bm25 term saturation (default: 0.9)")
    parser.add_argument("--b", type=float, default=0.4, help="bm25 length normalisation (default: 0.4)")
    parser.add_argument("--stopwords", default="english", help="english or none")
    parser.add_argument("--stemmer", default="lucene", help="lucene (words and stems), a Snowball language, none")
    parser.add_argument("--force", action="store_true", help="build even when this very index exists")
    parser.add_argument("--workers", type=int, default=0, help="bm25: processes that analyze (default: 0, chooses)")
    before = parser.add_argument_group("before and after")
    before.add_argument("--plan", action="store_true", help="only say what it will take: disk, memory, time, recall")
    before.add_argument("--plan_passages", type=int, default=None, help="plan for so many passages (default: all)")
    before.add_argument("--selftest", action="store_true", help="then ask the index for a hundred of its own passages")
    before.add_argument(
        "--selftest_bound", type=float, default=0.9, help="fraction of them in the top 3, below which it fails (0.9)"
    )
    encoder = parser.add_argument_group("dense indexes: the encoder and what its vectors become (no meaning for bm25)")
    for name, kind in typing.get_type_hints(EncodeOptions).items():
        if name != _METHOD:
            _add_flag(encoder, name, kind)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, kind: Any) -> None:
    """Add the flag of one field of EncodeOptions, absent from the result when it is not given."""
    default = _ENCODER_FIELDS[name].default
    shown = f"default: {default}" if default not in (None, dataclasses.MISSING, False) else None
    kinds = [part for part in (typing.get_args(kind) or (kind,)) if part is not type(None)]
    if kind is bool:
        group.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS)
    elif all(isinstance(part, str) for part in kinds) or typing.get_origin(kinds[0]) is typing.Literal:
        choices = kinds if isinstance(kinds[0], str) else typing.get_args(kinds[0])
        group.add_argument(f"--{name}", choices=choices, default=argparse.SUPPRESS, help=shown)
    else:
        group.add_argument(f"--{name}", type=kinds[0], default=argparse.SUPPRESS, help=shown)


def _pick_kind(options: argparse.Namespace) -> tuple[str, EncodeOptions | None]:
    """Return the kind of index for --retrieval_method: any name that is no other kind is an encoder's."""
    method = options.retrieval_method
    given = {name: getattr(options, name) for name in _ENCODER_FIELDS if hasattr(options, name)}
    if method in INDEX_KINDS and method != "dense":
        if given:
            flags = ", ".join(f"--{name}" for name in given)
            logger.warning("%s has no encoder: no effect of %s", method, flags)
        return method, None
    if "model_path" not in given:
        pick(dict.fromkeys((*INDEX_KINDS, *FAMILY_NAMES)), method, "--retrieval_method")
        raise SettingsError(f"--retrieval_method {method} encodes the passages: name the encoder with --model_path")
    return "dense", EncodeOptions(method=method, **given)


def _check_ranges(options: argparse.Namespace) -> None:
    if options.workers < 0:
        raise SettingsError(f"--workers is {options.workers}; it must be at least 1, or 0 to choose")
    if options.plan_passages is not None and options.plan_passages < 1:
        raise SettingsError(f"--plan_passages is {options.plan_passages}; it must be at least 1")
    if not 0 <= options.selftest_bound <= 1:
        raise SettingsError(f"--selftest_bound is {options.selftest_bound}; it is a fraction between 0 and 1")


def _selftest(folder: Path, manifest: Manifest, corpus_path: Path, bound: float) -> None:
    verify: Verify = "sampled"  # everything was compared when it was built
    described = {"name": manifest.kind, "index_path": folder, "corpus_path": corpus_path, "verify": verify}
    retriever = load(TypeAdapter(Spec).validate_python(described), LoadProgress())
    try:
        result = selftest.run(retriever, served_corpus(folder, manifest, corpus_path, verify, lambda _: None), bound)
    finally:
        retriever.close()
    logger.info("%s", result.line())


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for; return the exit status (2 for what the user can mend)."""
    options = _parser().parse_args(arguments)
    wait_without_spinning()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _check_ranges(options)
        kind, encode = _pick_kind(options)
        plan = BuildPlan(
            corpus_path=options.corpus_path,
            save_dir=options.save_dir,
            k1=options.k1,
            b=options.b,
            stopwords=options.stopwords,
            stemmer=options.stemmer,
            force=options.force,
            encode=encode,
            workers=options.workers,
        )
        if options.plan or options.plan_passages is not None:
            estimate = planner(kind)(plan, options.plan_passages)
            sys.stdout.write("\n".join(estimate.lines(options.retrieval_method, plan.folder(kind))) + "\n")
            return 0
        manifest = builder(kind)(plan)
        if options.selftest:
            _selftest(plan.folder(kind), manifest, options.corpus_path, options.selftest_bound)
    except RetrievalServerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{plan.folder(manifest.kind)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
