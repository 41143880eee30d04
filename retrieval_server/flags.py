"""The command line: the published flags, and how they become a backend and its settings."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_server.backends import pick
from retrieval_server.backends.encodings import FAMILIES
from retrieval_server.errors import SettingsError
from retrieval_server.launch import SPECS, Launch, read_config, resolve, settings_fields, unknown_key
from retrieval_server.manifest import MANIFEST_NAME, holds_passages, read_manifest, resolve_index
from retrieval_server.settings import DEFAULT_PORT

logger = logging.getLogger("retrieval_server")

ENCODERS = tuple(FAMILIES)
"""Values of --retriever_name that mean the dense backend with an encoder of that family."""
_PUBLISHED_ENCODER = "intfloat/e5-base-v2"
_RERANKER = SPECS["rerank"].model_fields["model_path"].default
_ABSENT = argparse.SUPPRESS

# Flag -> field of the backend that searches first.
_BACKEND_FLAGS = {
    "index_path": "index_path",
    "corpus_path": "corpus_path",
    "retriever_model": "model_path",
    "faiss_gpu": "faiss_gpu",
    "verify": "verify",
}
# Published launch lines carry these for bm25 too, which has no encoder.
_ENCODER_FLAGS = ("retriever_model", "faiss_gpu")
_RERANK_FLAGS = {"reranker_model": "model_path", "retrieval_topk": "depth", "reranker_batch_size": "batch_size"}
_OTHER_FLAGS = ("config", "retriever_name", "reranking_topk")
_SERVER_FLAGS = ("host", "port", *(name for name, _, _ in settings_fields()))


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser. A flag that is not given is absent from the result, so that a file's value stays."""
    top = argparse.ArgumentParser(
        prog="retrieval_server",
        allow_abbrev=False,
        argument_default=_ABSENT,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--config", type=Path, help="YAML file with the keys backend and server; flags override it")
    top.add_argument("--host", help="0.0.0.0 serves other machines (default: 127.0.0.1)")
    top.add_argument("--port", type=int, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    search = top.add_argument_group("what is searched")
    search.add_argument("--index_path", type=Path, help="the index, or the builder's --save_dir")
    search.add_argument(
        "--corpus_path", type=Path, help="the corpus the index was built from, unless the index holds it"
    )
    names = ", ".join(("bm25", "lucene", "dense", *ENCODERS))
    search.add_argument("--retriever_name", help=f"{names} (default: as the index says)")
    search.add_argument("--retriever_model", help="encoder of a dense index (default: as the index says)")
    search.add_argument("--faiss_gpu", action="store_true", help="search a dense index on the GPU")
    search.add_argument(
        "--verify",
        choices=("auto", "full", "sampled"),
        help="how files are compared with the manifest (auto: those above 1 GiB by samples)",
    )
    rerank = top.add_argument_group("reranking (any of these flags switches it on)")
    rerank.add_argument("--retrieval_topk", type=int, help="passages that are reranked (default: 10)")
    rerank.add_argument("--reranking_topk", type=int, help="passages that are returned (default: --topk)")
    rerank.add_argument("--reranker_model", help=f"cross-encoder (default: {_RERANKER})")
    rerank.add_argument("--reranker_batch_size", type=int, help="pairs scored together (default: 32)")
    limits = top.add_argument_group("limits and defaults")
    for name, kind, default in settings_fields():
        if kind is bool:
            limits.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=f"default: {default}")
        else:
            limits.add_argument(f"--{name}", type=kind, help=f"default: {default!r}")
    return top


def launch(arguments: Sequence[str] | None, description: str | None = None) -> Launch:
    """Return what the command line (None: this process's) asks for; raises SettingsError or IndexFolderError."""
    options, unknown = parser(description).parse_known_args(arguments)
    if unknown:
        known = [f"--{name}" for name in (*_BACKEND_FLAGS, *_RERANK_FLAGS, *_OTHER_FLAGS, *_SERVER_FLAGS)]
        raise SettingsError(unknown_key(unknown[0].partition("=")[0], known, "flag"))
    given = vars(options)
    config: Path | None = given.get("config")
    sections = read_config(config) if config else {"backend": {}, "server": {}}
    backend, server = sections["backend"], sections["server"]
    backend = _overridden(backend, given) if backend else _from_flags(given)
    backend = _reranked(backend, given)
    server = {**server, **{name: value for name, value in given.items() if name in _SERVER_FLAGS}}
    if "reranking_topk" in given:
        if given.get("topk", given["reranking_topk"]) != given["reranking_topk"]:
            raise SettingsError(
                f"--topk {given['topk']} and --reranking_topk {given['reranking_topk']} both say how many passages are "
                "returned; give one"
            )
        server["topk"] = given["reranking_topk"]
    return resolve(backend, server, f"--config {config}" if config else None)


def _from_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend that the flags describe without a file."""
    if "index_path" not in given:
        raise SettingsError("nothing to serve: give --index_path and --corpus_path, or --config FILE.yaml")
    asked, index = given.get("retriever_name"), given["index_path"]
    kind, index = _chosen_index(asked, index)
    name, encoder = _name_and_encoder(asked, kind, index)
    if name != "lucene" and "corpus_path" not in given and not (manifests(index) and holds_passages(index)):
        raise SettingsError(f"--corpus_path is missing: {name} returns passages of the corpus the index was built from")
    backend: dict[str, Any] = {"name": name}
    if encoder is not None:
        backend["encoder"] = encoder
        if encoder == "e5" and "retriever_model" not in given and not manifests(index):
            backend["model_path"] = _PUBLISHED_ENCODER
    others = {flag: value for flag, value in given.items() if flag != "retriever_name"}
    return _overridden(backend, {**others, "index_path": index})


def _chosen_index(asked: str | None, path: Path) -> tuple[str, Path]:
    """Return an index's kind and path: of several in one --save_dir the one that --retriever_name means."""
    wanted = "dense" if asked in ENCODERS else asked
    if asked is not None and len(inside := manifests(path)) > 1:
        fitting = [folder for folder in inside if read_manifest(folder).kind == wanted]
        named = [folder for folder in fitting if folder.name == asked]
        if len(chosen := named or fitting) == 1:
            return str(wanted), chosen[0]
    return index_kind(path), path


def _name_and_encoder(asked: str | None, kind: str, index: Path) -> tuple[str, str | None]:
    """Return the backend for an index and the encoder family, if --retriever_name names one."""
    if asked is None:
        return kind, None
    known = {**{name: name for name in ("bm25", "lucene", "dense")}, **dict.fromkeys(ENCODERS, "dense")}
    if asked in SPECS and asked not in known:
        raise SettingsError(
            f"--retriever_name {asked!r} takes more than flags can say: describe it in --config FILE.yaml"
        )
    name = pick(known, asked, "--retriever_name")
    if (asked, kind) == ("bm25", "lucene"):  # what bm25 means in the published launch lines
        logger.info("%s is a Lucene index: served by the lucene backend", index)
        return "lucene", None
    if name != kind:
        raise SettingsError(f"--retriever_name is {asked!r}, but {index} is an index of kind {kind!r}")
    return name, asked if asked in ENCODERS else None


def index_kind(path: Path) -> str:
    """Return the backend that reads an index: what its manifest says, else what its files are.

    Raises IndexFolderError when there is nothing that any backend reads.
    """
    if path.is_file():
        return "dense"
    if manifests(path):
        return read_manifest(resolve_index(path)).kind
    if any(path.glob("segments_*")) or any(path.glob("*/segments_*")):
        return "lucene"
    if any(any(path.glob(pattern)) for pattern in ("part_*", "*.index", "*.faiss")):
        return "dense"  # as published: a FAISS file, or its pieces
    return read_manifest(resolve_index(path)).kind  # raises, with what was found


def manifests(path: Path) -> list[Path]:
    """Return the folders with a manifest: ``path`` itself, else those in it."""
    if (path / MANIFEST_NAME).is_file():
        return [path]
    inside = sorted(file.parent for file in path.glob(f"*/{MANIFEST_NAME}")) if path.is_dir() else []
    return [folder for folder in inside if not folder.name.startswith(".")]


def _overridden(backend: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend with the flags set in it: under a reranker, in its first stage."""
    if backend.get("name") == "rerank" and isinstance(backend.get("first"), Mapping):
        return {**backend, "first": _overridden(backend["first"], given)}
    name, changed = str(backend.get("name")), dict(backend)
    if name not in SPECS:
        return changed  # resolve() says what is wrong with it
    if (asked := given.get("retriever_name")) is not None and asked != name:
        if name != "dense" or asked not in ENCODERS:
            raise SettingsError(f"--retriever_name is {asked!r}, but the file describes the backend {name!r}")
        changed["encoder"] = asked
    for flag, field in _BACKEND_FLAGS.items():
        if flag not in given:
            continue
        if field in SPECS[name].model_fields:
            changed[field] = given[flag]
        elif flag in _ENCODER_FLAGS:
            logger.warning("%s has no encoder: no effect of --%s", name, flag)
        else:
            raise SettingsError(f"--{flag} has no meaning for the backend {name!r}")
    return changed


def _reranked(backend: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the backend with a reranker on top if a flag asks for one, or with the flags set in the one it has."""
    values = {field: given[flag] for flag, field in _RERANK_FLAGS.items() if flag in given}
    if backend.get("name") == "rerank":
        return {**backend, **values}
    if not values and "reranking_topk" not in given:
        return backend
    return {"name": "rerank", "first": backend, **values}
