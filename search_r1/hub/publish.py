"""Publishing files on the hub: what is there already, byte for byte, is not sent again; huge files go up in pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from search_r1.hub.repository import RemoteFile, Repository, readable
from verl.errors import DataError

logger = logging.getLogger(__name__)
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Upload:
    """One file of the repository-to-be, a whole local file or a piece of one."""

    source: Path
    path: str
    """In the repository."""
    start: int
    size: int
    """Bytes."""

    @property
    def whole(self) -> bool:
        """True when it is the local file itself."""
        return self.start == 0 and self.size == self.source.stat().st_size


def uploads(source: Path, piece: int, prefix: str = "") -> list[Upload]:
    """Return what a file or folder becomes; files above ``piece`` bytes become ``part_aa``, ``part_ab`` ...

    They join again by ``cat part_*``. Raises DataError for a path that is none, and for an empty folder.
    """
    if source.is_file():
        return list(_of_file(source, f"{prefix}{source.name}", piece))
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder")
    files = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path.relative_to(source)))
    if not files:
        raise DataError(f"{source}: holds no file to upload")
    return [u for path in files for u in _of_file(path, f"{prefix}{path.relative_to(source).as_posix()}", piece)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _of_file(source: Path, path: str, piece: int) -> Iterator[Upload]:
    size = source.stat().st_size
    if size <= piece:
        yield Upload(source, path, 0, size)
        return
    folder = path.rpartition("/")[0]
    for number, start in enumerate(range(0, size, piece)):
        first, second = divmod(number, 26)
        if first >= 26:
            raise DataError(f"{source}: more than 676 pieces of {readable(piece)}; give a larger --split_gb")
        name = f"part_{chr(97 + first)}{chr(97 + second)}"
        yield Upload(source, f"{folder}/{name}" if folder else name, start, min(piece, size - start))


def publish(repository: Repository, items: list[Upload], scratch: Path, private: bool) -> tuple[int, int]:
    """Create the repository where there is none and send what it lacks; return (sent, already there).

    ``scratch`` holds one piece at a time. Raises Unreachable, or DataError when the hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    repository.asked(
        lambda: api.create_repo(repository.name, repo_type=repository.kind, private=private, exist_ok=True)
    )
    there = {file.path: file for file in repository.files()}
    sent = 0
    for item in items:
        if _is_there(item, there.get(item.path), scratch):
            logger.info("%s: %s is there already", repository, item.path)
            continue
        logger.info("%s: %s (%s)", repository, item.path, readable(item.size))
        local = item.source if item.whole else _cut(item, scratch)

        def send(local: Path = local, item: Upload = item) -> object:
            return api.upload_file(
                path_or_fileobj=local, path_in_repo=item.path, repo_id=repository.name, repo_type=repository.kind
            )

        try:
            repository.asked(send)
        finally:
            if not item.whole:
                local.unlink()
        sent += 1
    return sent, len(items) - sent


def _is_there(item: Upload, remote: RemoteFile | None, scratch: Path) -> bool:
    if remote is None or remote.size != item.size:
        return False
    if item.whole:
        return remote.mistake(item.source) is None
    local = _cut(item, scratch)
    try:
        return remote.mistake(local) is None
    finally:
        local.unlink()


def _cut(item: Upload, scratch: Path) -> Path:
    """Write a piece of a file and return its path."""
    target, left = scratch / item.path.rpartition("/")[2], item.size
    with item.source.open("rb") as source, target.open("wb") as sink:
        source.seek(item.start)
        while left:
            block = source.read(min(left, _BLOCK))
            if not block:
                raise DataError(f"{item.source}: became shorter while it was read")
            sink.write(block)
            left -= len(block)
    return target
