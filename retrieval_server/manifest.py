"""The manifest that every index carries: what it was built from, with what, and how to see that it is intact."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from retrieval_server.corpus import CorpusReader, file_sha256, sampled_sha256
from retrieval_server.corpus_files import CorpusFile, corpus_files
from retrieval_server.errors import CorpusError, IndexFolderError

MANIFEST_NAME = "manifest.json"
PASSAGES_NAME = "passages.jsonl"
"""Copy of the corpus in the index folder, there when the corpus itself cannot be read at random places."""
FORMAT = "chatr1-index"
FORMAT_VERSION = 1
FULL_CHECK_BYTES = 1 << 30
"""Files up to this size are hashed whole at every start (about a second per GiB); larger ones by samples."""

Verify = Literal["auto", "full", "sampled"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SourceIdentity(_Frozen):
    """One file of a corpus as it is stored, compressed or not."""

    file: str
    """File name, for messages: a corpus may be moved and renamed."""
    bytes: int
    sampled_sha256: str


class CorpusIdentity(_Frozen):
    """Which corpus an index was built from. No path: the file may lie anywhere.

    Bytes and digests are those of its plain JSON lines, so that they are the same whether the index was built from
    these or from a compressed copy.
    """

    file: str
    """Name of the file or folder, for messages."""
    passages: int
    bytes: int
    sha256: str
    sampled_sha256: str
    sources: tuple[SourceIdentity, ...] = ()
    """The files it was read from, in order."""


class FileIdentity(_Frozen):
    """One file of the index folder."""

    bytes: int
    sha256: str


class Manifest(_Frozen):
    """``manifest.json``, written last, so a folder that has one is complete."""

    format: str
    format_version: int
    kind: str
    """The backend that built it and can read it."""
    created: str
    """UTC, ISO 8601."""
    corpus: CorpusIdentity
    parameters: dict[str, Any]
    """The backend's own: for bm25 its k1, b, stop words, stemmer and a fingerprint of the analyzer."""
    statistics: dict[str, Any]
    files: dict[str, FileIdentity]
    versions: dict[str, str]
    """Libraries the index was built with."""


def resolve_index(path: Path) -> Path:
    """Return the folder with the manifest: ``path`` itself, or the only index inside it (the builder's --save_dir).

    Raises IndexFolderError that says what was found instead.
    """
    if not path.exists():
        raise IndexFolderError(f"index {path} does not exist; build it with: python -m retrieval_server.build_index")
    if path.is_file():
        raise IndexFolderError(
            f"index {path} is a file ({path.stat().st_size} bytes), not an index folder with a {MANIFEST_NAME}"
        )
    if (path / MANIFEST_NAME).is_file():
        return path
    inside = sorted(child.parent for child in path.glob(f"*/{MANIFEST_NAME}") if not child.parent.name.startswith("."))
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise IndexFolderError(f"{path} holds {len(inside)} indexes ({', '.join(p.name for p in inside)}); name one")
    found = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
    raise IndexFolderError(
        f"{path} has no {MANIFEST_NAME} (found: {found}): not an index of this service, or its building did not finish"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``; raises IndexFolderError showing the value found and the one expected."""
    path = folder / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IndexFolderError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IndexFolderError(f"{path} is not JSON ({error}); rebuild the index") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise IndexFolderError(f"{path} has format {found!r}, expected {FORMAT!r}: not an index of this service")
    if raw.get("format_version") != FORMAT_VERSION:
        raise IndexFolderError(
            f"{path} has format version {raw.get('format_version')!r}, this server reads {FORMAT_VERSION}; rebuild it"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise IndexFolderError(f"{path}: {where}: {first['msg']}; rebuild the index") from None


def holds_passages(index_path: Path) -> bool:
    """Return True when an index has the passages itself, so that it can be served without its corpus."""
    return PASSAGES_NAME in read_manifest(resolve_index(index_path)).files


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into a folder that is complete but for it."""
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def identify_sources(path: Path) -> tuple[SourceIdentity, ...]:
    """Return the identity of every file of a corpus, read by samples; raises CorpusError when it cannot be read."""
    return tuple(
        SourceIdentity(file=file.path.name, bytes=file.bytes, sampled_sha256=sampled_sha256(file.path))
        for file in corpus_files(path)
    )


def identify(reader: CorpusReader) -> CorpusIdentity:
    """Return the identity of a corpus that was read to its end; its copy, if there is one, must be complete."""
    return CorpusIdentity(
        file=reader.path.name,
        passages=reader.passages,
        bytes=reader.size,
        sha256=reader.sha256,
        sampled_sha256=sampled_sha256(reader.served),
        sources=identify_sources(reader.path),
    )


def served_corpus(
    folder: Path, manifest: Manifest, path: Path | None, verify: Verify, on_bytes: Callable[[int], None]
) -> Path:
    """Return the plain JSON-lines file with the passages of an index: its own copy, or the corpus at ``path``.

    ``path`` may be omitted for an index with a copy (whose bytes ``check_files`` checks); given all the same, it must
    be the corpus that was copied, as it was or as plain JSON lines. Raises CorpusError, with both values, otherwise.
    """
    expected = manifest.corpus
    if PASSAGES_NAME in manifest.files:
        if path is not None:
            _check_original(path, expected, verify, on_bytes)
        return folder / PASSAGES_NAME
    if path is None:
        raise CorpusError(
            f"{folder} holds no passages of its own: give --corpus_path, the file {expected.file} ({expected.bytes} "
            f"bytes, {expected.passages} passages) that it was built from"
        )
    files = corpus_files(path)
    if len(files) > 1 or files[0].format != "jsonl":
        raise CorpusError(
            f"corpus {path} is {_described(files)}, but the index was built from the plain JSON lines {expected.file} "
            f"({expected.bytes} bytes), which are served as they are; give that file or rebuild the index"
        )
    check_corpus(files[0].path, expected, verify, on_bytes)
    return files[0].path


def _check_original(path: Path, expected: CorpusIdentity, verify: Verify, on_bytes: Callable[[int], None]) -> None:
    files = corpus_files(path)
    if len(files) == 1 and files[0].format == "jsonl":
        return check_corpus(files[0].path, expected, verify, on_bytes)
    sizes, expected_sizes = [file.bytes for file in files], [source.bytes for source in expected.sources]
    found, wanted = _described(files), f"{len(expected_sizes)} file(s) of {sum(expected_sizes)} bytes"
    if sizes == expected_sizes:
        digests = [sampled_sha256(file.path) for file in files]
        differing = [i for i, source in enumerate(expected.sources) if digests[i] != source.sampled_sha256]
        if not differing:
            return None
        first = differing[0]
        found = f"{files[first].path.name} with sampled sha256 {digests[first][:16]}"
        wanted = expected.sources[first].sampled_sha256[:16]
    raise CorpusError(
        f"corpus {path} is {found}, but the index was built from {expected.file}, {wanted}: another corpus, or changed "
        "since; give the right one, omit --corpus_path (the index has the passages), or rebuild"
    )


def _described(files: Sequence[CorpusFile]) -> str:
    return f"{len(files)} {files[0].format} file(s) of {sum(file.bytes for file in files)} bytes"


def check_corpus(path: Path, expected: CorpusIdentity, verify: Verify, on_bytes: Callable[[int], None]) -> None:
    """Raise CorpusError, with both values, unless ``path`` is the corpus the index was built from."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorpusError(f"corpus {path} cannot be read: {error.strerror}") from error
    if size != expected.bytes:
        raise CorpusError(
            f"corpus {path} has {size} bytes, but the index was built from {expected.file} with {expected.bytes} bytes "
            f"({expected.passages} passages): {_size_hint(size, expected.bytes)}"
        )
    full = verify == "full" or (verify == "auto" and size <= FULL_CHECK_BYTES)
    found = file_sha256(path, on_bytes) if full else sampled_sha256(path)
    wanted = expected.sha256 if full else expected.sampled_sha256
    if found != wanted:
        raise CorpusError(
            f"corpus {path} has {'' if full else 'sampled '}sha256 {found[:16]}, but the index was built from "
            f"{expected.file} with {wanted[:16]}: another corpus, or changed since; give the right one or rebuild"
        )


def _size_hint(found: int, expected: int) -> str:
    if found < expected:
        return "another corpus, or a truncated copy; give the right one or rebuild the index"
    return "another corpus, or it has grown since; give the right one or rebuild the index"


def check_files(folder: Path, manifest: Manifest, verify: Verify, on_bytes: Callable[[int], None]) -> None:
    """Raise IndexFolderError, with both values, unless every file of the index is as it was built."""
    total = sum(identity.bytes for identity in manifest.files.values())
    full = verify == "full" or (verify == "auto" and total <= FULL_CHECK_BYTES)
    for name, identity in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise IndexFolderError(f"{path} is missing from the index; rebuild it")
        size = path.stat().st_size
        if size != identity.bytes:
            raise IndexFolderError(f"{path} has {size} bytes, its manifest says {identity.bytes}; rebuild the index")
        if full and (found := file_sha256(path, on_bytes)) != identity.sha256:
            raise IndexFolderError(
                f"{path} is damaged: sha256 {found[:16]}, its manifest says {identity.sha256[:16]}; rebuild the index"
            )
