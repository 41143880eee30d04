"""The manifest that every index carries: what it was built from, with what, and how to see that it is intact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from retrieval_server.corpus import file_sha256, sampled_sha256
from retrieval_server.errors import CorpusError, IndexFolderError

MANIFEST_NAME = "manifest.json"
FORMAT = "chatr1-index"
FORMAT_VERSION = 1
FULL_CHECK_BYTES = 1 << 30
"""Files up to this size are hashed whole at every start (about a second per GiB); larger ones by samples."""

Verify = Literal["auto", "full", "sampled"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CorpusIdentity(_Frozen):
    """Which corpus an index was built from. No path: the file may lie anywhere."""

    file: str
    """File name, for messages."""
    passages: int
    bytes: int
    sha256: str
    sampled_sha256: str


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into a folder that is complete but for it."""
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


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
