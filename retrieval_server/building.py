"""What every index build has in common: one builder at a time, a folder that appears complete, a manifest."""

from __future__ import annotations

import errno
import fcntl
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

from retrieval_server.corpus import file_sha256, open_corpus
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import IndexFolderError, RetrievalServerError
from retrieval_server.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    CorpusIdentity,
    FileIdentity,
    Manifest,
    check_corpus,
    check_files,
    read_manifest,
    write_manifest,
)

logger = logging.getLogger(__name__)


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
    encode: EncodeOptions | None = None
    """Of a dense index; the other kinds have none."""


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
    """Build ``<save_dir>/<kind>`` and return its manifest.

    The folder appears complete or not at all; an older index there is replaced only then. When it already holds this
    corpus with these parameters, nothing is done. ``write`` fills an empty folder; ``check`` opens the finished one as
    the server would, before anybody else sees it. Raises CorpusError, SettingsError or IndexFolderError.
    """
    open_corpus(plan.corpus_path).close()  # a wrong path should not leave an empty folder behind
    target = plan.save_dir / kind
    try:
        plan.save_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(plan.save_dir):
            if not plan.force and (existing := _same_index(target, kind, plan.corpus_path, parameters)) is not None:
                logger.info("%s already holds this index; --force builds it again", target)
                return existing
            return _build_and_swap(target, kind, parameters, write, check)
    except OSError as error:
        raise IndexFolderError(f"{target} cannot be written: {_reason(error, target)}") from error


def _reason(error: OSError, folder: Path) -> str:
    """Return the error in words, with the free space when that may be the reason (numpy's own has no errno)."""
    if error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror} ({error.filename})"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{error.strerror or error} ({shutil.disk_usage(existing).free / 1e6:.1f} MB free on that disk)"


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
        check_corpus(corpus_path, manifest.corpus, "full", lambda _: None)
        check_files(target, manifest, "full", lambda _: None)
    except RetrievalServerError as error:
        logger.info("building again: %s", error)
        return None
    return manifest


def _build_and_swap(
    target: Path,
    kind: str,
    parameters: dict[str, Any],
    write: Callable[[Path], Written],
    check: Callable[[Path], None],
) -> Manifest:
    partial = target.parent / f".{kind}.partial"
    replaced = target.parent / f".{kind}.replaced"
    if target.exists() and not target.is_dir():
        raise IndexFolderError(f"{target} is a file; move it away")
    for leftover in (partial, replaced):  # of a build that was killed: we hold the lock, so nobody uses them
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        manifest = _describe(partial, kind, parameters, write(partial))
        write_manifest(partial, manifest)
        check(partial)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    return manifest


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
        },
        versions={"python": platform.python_version(), **{name: _version(name) for name in written.libraries}},
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
