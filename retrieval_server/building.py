"""What every index build has in common: one builder at a time, a folder that appears complete, a manifest."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from retrieval_server.corpus import file_sha256
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import CorpusError, IndexFolderError, RetrievalServerError
from retrieval_server.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    PASSAGES_NAME,
    CorpusIdentity,
    FileIdentity,
    Manifest,
    SourceIdentity,
    check_files,
    identify_sources,
    read_manifest,
    served_corpus,
    write_manifest,
)

logger = logging.getLogger(__name__)

WORK = "work"
"""Folder inside the partial index for what only the building needs; it is gone from the finished index."""
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What an index is built from, with the options that the command line has for every backend."""

    corpus_path: Path
    save_dir: Path
    """The index becomes the folder ``<save_dir>/<method>``."""
    k1: float
    b: float
    stopwords: str
    stemmer: str
    force: bool
    """Build even when the folder already holds exactly this index."""
    workers: int = 1
    """Processes that analyze the passages of a BM25 index; 0 chooses. The index is the same with any number."""
    encode: EncodeOptions | None = None
    """Of a dense index; the other kinds have none."""

    def folder(self, kind: str) -> Path:
        """Return where an index of this kind goes: one encoder's beside another's, so by the name of the method."""
        return self.save_dir / (kind if self.encode is None else self.encode.method)


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer put into the partial folder."""

    corpus: CorpusIdentity
    statistics: Mapping[str, Any]
    libraries: tuple[str, ...]
    """Distributions whose versions belong into the manifest."""


def build_index(
    plan: BuildPlan,
    kind: str,
    parameters: dict[str, Any],
    write: Callable[[Path], Written],
    check: Callable[[Path], None],
) -> Manifest:
    """Build ``plan.folder(kind)`` and return its manifest.

    The folder appears complete or not at all; an older index there is replaced only then. When it already holds this
    corpus with these parameters, nothing is done. ``check`` opens the finished folder as the server would, before
    anybody else sees it. Raises CorpusError, SettingsError or IndexFolderError.

    ``write`` fills a folder; everything but ``WORK`` inside it becomes the index. The folder has nothing but an empty
    ``WORK``, unless an earlier building of this very index was interrupted: then it is as that one left it, at
    any point, and ``write`` goes on from there (or overwrites everything).
    """
    sources = identify_sources(plan.corpus_path)  # a wrong path should not leave an empty folder behind
    target = plan.folder(kind)
    try:
        plan.save_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(plan.save_dir):
            shutil.rmtree(target / WORK, ignore_errors=True)  # left by one that was killed at its very end
            if not plan.force and (existing := _same_index(target, kind, plan.corpus_path, parameters)) is not None:
                logger.info("%s already holds this index; --force builds it again", target)
                return existing
            partial = _partial_folder(target, parameters, sources)
            manifest = _build(partial, kind, parameters, sources, write, check)
            _swap(partial, target)
            return manifest
    except OSError as error:
        raise IndexFolderError(f"{target} cannot be written: {_reason(error, target)}") from error


def _reason(error: OSError, folder: Path) -> str:
    """Return the error in words, with the free space when that may be the reason (numpy's own has no errno)."""
    if error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 1e6
    return f"{error.strerror or error} ({free:.1f} MB free on that disk); make room and run again, it goes on from here"


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IndexFolderError(f"another process is building an index in {folder}; wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _same_index(target: Path, kind: str, corpus_path: Path, parameters: dict[str, Any]) -> Manifest | None:
    """Return the manifest of an intact index of this corpus with these parameters, or None."""
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = read_manifest(target)
        if manifest.kind != kind or manifest.parameters != parameters:
            return None
        served_corpus(target, manifest, corpus_path, "full", lambda _: None)
        check_files(target, manifest, "full", lambda _: None)
    except RetrievalServerError as error:
        logger.info("building again: %s", error)
        return None
    return manifest


def _partial_folder(target: Path, parameters: dict[str, Any], sources: tuple[SourceIdentity, ...]) -> Path:
    """Return the folder to build in: that of an interrupted building of the same index, or an empty one."""
    partial = target.parent / f".{target.name}.partial"
    if target.exists() and not target.is_dir():
        raise IndexFolderError(f"{target} is a file; move it away")
    state = {"parameters": parameters, "sources": [source.model_dump() for source in sources]}
    path = partial / WORK / _STATE
    try:
        if json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(state)):
            logger.info("going on with the building of %s that was interrupted", target)
            return partial
        logger.info("another corpus or other parameters than the interrupted building had: starting over")
    except (OSError, ValueError):  # none, or killed before it had begun
        pass
    shutil.rmtree(partial, ignore_errors=True)
    path.parent.mkdir(parents=True)
    write_durably(path, json.dumps(state).encode())
    return partial


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file that is there whole or not at all, after a power failure too."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _build(
    partial: Path,
    kind: str,
    parameters: dict[str, Any],
    sources: tuple[SourceIdentity, ...],
    write: Callable[[Path], Written],
    check: Callable[[Path], None],
) -> Manifest:
    """Fill the partial folder and check it; what a full disk or a signal interrupts stays to be continued."""
    try:
        written = write(partial)
        if written.corpus.sources != sources:
            raise CorpusError(f"corpus {written.corpus.file} changed while it was read; build again")
        manifest = _describe(partial, kind, parameters, written)
        copy = manifest.files.get(PASSAGES_NAME)
        if copy is not None and copy.sha256 != written.corpus.sha256:
            raise IndexFolderError(
                f"{partial / PASSAGES_NAME} has sha256 {copy.sha256[:16]}, what was read {written.corpus.sha256[:16]}: "
                "something else wrote to it, or the disk is failing; build again"
            )
        write_manifest(partial, manifest)
        check(partial)
    except (CorpusError, IndexFolderError):
        shutil.rmtree(partial, ignore_errors=True)  # going on would fail in the same way
        raise
    return manifest


def _swap(partial: Path, target: Path) -> None:
    replaced = target.parent / f".{target.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)  # left by one that was killed: we hold the lock, so nobody uses it
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    for leftover in (replaced, target / WORK):
        shutil.rmtree(leftover, ignore_errors=True)


def _describe(folder: Path, kind: str, parameters: dict[str, Any], written: Written) -> Manifest:
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        kind=kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        corpus=written.corpus,
        parameters=parameters,
        statistics=dict(written.statistics),
        files={
            path.name: FileIdentity(bytes=path.stat().st_size, sha256=file_sha256(path))
            for path in sorted(folder.iterdir())
            if path.name not in (WORK, MANIFEST_NAME)
        },
        versions={"python": platform.python_version(), **{name: _version(name) for name in written.libraries}},
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
