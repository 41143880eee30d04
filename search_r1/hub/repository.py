"""One repository of the hub: what it holds, and getting files of it, whole and checked, into a folder.

Everything goes through ``huggingface_hub``, so its environment variables hold: ``HF_ENDPOINT`` (a mirror),
``HF_HUB_OFFLINE``, ``HF_HOME`` (cache), ``HF_TOKEN``. A download that was cut off goes on where it stopped. Files lie
in the folder itself and not in the cache, which often is a small home folder; where the hub cannot be reached, files
of the folder that were checked before are used, then those of the cache.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from search_r1.hub.checked import CheckedFiles
from verl.errors import DataError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_LARGEST_HTTP = 50 * 10**9
"""Bytes; the hub serves larger files by its own protocol only, which huggingface_hub speaks."""
_TIMEOUT = 10.0
"""Seconds for the first answer of the hub: what follows is tried again for much longer."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it."""

    path: str
    size: int
    """Bytes."""
    sha256: str | None
    """Of its bytes; None for a small file, which git keeps itself."""
    git_sha1: str
    """Of a small file, as git hashes it."""

    def mistake(self, path: Path) -> str | None:
        """Return what is wrong with a downloaded copy, None when it is this file."""
        if path.stat().st_size != self.size:
            return f"has {path.stat().st_size} bytes, the hub lists {self.size}"
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\x00" % self.size)
        with path.open("rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
        expected = self.sha256 or self.git_sha1
        return None if digest.hexdigest() == expected else f"has the checksum {digest.hexdigest()}, the hub {expected}"


@dataclass(frozen=True)
class Repository:
    """A data set or model on the hub."""

    name: str
    """``owner/name``."""
    kind: str = "dataset"
    revision: str = "main"

    def files(self) -> list[RemoteFile]:
        """Return all files, sorted by path; raises Unreachable, or DataError for a repository that is not there."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        def listed() -> list[RemoteFile]:
            HfApi().repo_info(self.name, repo_type=self.kind, revision=self.revision, timeout=_TIMEOUT)
            entries = HfApi().list_repo_tree(self.name, recursive=True, repo_type=self.kind, revision=self.revision)
            files = [entry for entry in entries if isinstance(entry, RepoFile)]
            return [RemoteFile(f.path, f.size, f.lfs.sha256 if f.lfs else None, f.blob_id) for f in files]

        return sorted(self.asked(listed), key=lambda file: file.path)

    def fetch(self, patterns: Sequence[str], folder: Path) -> list[Path]:
        """Bring the files that match into ``folder``, under their paths; return these, sorted.

        Raises DataError when a pattern matches nothing, a shard is missing, or a copy is not what the hub lists.
        """
        folder.mkdir(parents=True, exist_ok=True)
        checked = CheckedFiles(folder, f"{self.kind}s/{self.name}@{self.revision}")
        try:
            wanted = self._chosen(patterns, self.files())
        except Unreachable as reason:
            return self._without_hub(patterns, folder, checked, reason)
        return [self._fetch_one(file, folder, checked) for file in wanted]

    def _chosen(self, patterns: Sequence[str], files: Sequence[RemoteFile]) -> list[RemoteFile]:
        self.check_complete(patterns, [file.path for file in files])
        return [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)]

    def check_complete(self, patterns: Sequence[str], paths: Sequence[str]) -> None:
        """Raise DataError when a pattern matches no path, or a numbered shard (``-00001-of-00006``) is absent."""
        for pattern in patterns:
            matches = fnmatch.filter(paths, pattern)
            if not matches:
                shown = ", ".join(paths[:8]) or "nothing"
                raise DataError(
                    f"{self}: no file {pattern!r} in it; it holds {shown}{' ...' if len(paths) > 8 else ''}"
                )
            for path in matches:
                if shard := re.search(r"-(\d+)-of-(\d+)", path):
                    start, end = shard.span()
                    names = [f"-{n:0{len(shard[1])}}-of-{shard[2]}" for n in range(int(shard[2]))]
                    absent = [name for name in names if f"{path[:start]}{name}{path[end:]}" not in paths]
                    if absent:
                        raise DataError(f"{self}: {path} is one of {shard[2]} shards, and {absent[0]} is missing")

    def _fetch_one(self, file: RemoteFile, folder: Path, checked: CheckedFiles) -> Path:
        target = folder / file.path
        expected = file.sha256 or file.git_sha1
        if checked.holds(file.path, expected):
            return target
        if not target.is_file() or file.mistake(target) is not None:
            logger.info("%s: %s (%s)", self, file.path, readable(file.size))
            self._download(file, folder)
        if (mistake := file.mistake(target)) is not None:
            target.unlink()
            raise DataError(f"{target}: {mistake}; the copy was removed, run the same command again")
        checked.add(file.path, expected)
        return target

    def _download(self, file: RemoteFile, folder: Path) -> None:
        """Take the file from the cache, or download it and go on where an earlier download stopped.

        ``hf_hub_download`` begins anew in every process, which a 40 GB file on a cluster may never survive.
        """
        from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        target, expected = folder / file.path, file.sha256 or file.git_sha1
        target.parent.mkdir(parents=True, exist_ok=True)
        cached = try_to_load_from_cache(self.name, file.path, repo_type=self.kind, revision=self.revision)
        if isinstance(cached, str) and Path(cached).resolve().name == expected:  # blobs are named by their checksum
            _linked(Path(cached).resolve(), target)
            return
        if file.size > _LARGEST_HTTP:
            self.asked(
                lambda: hf_hub_download(
                    self.name, file.path, repo_type=self.kind, revision=self.revision, local_dir=folder
                )
            )
            return
        url = hf_hub_url(self.name, file.path, repo_type=self.kind, revision=self.revision)
        unfinished = target.with_name(f".{target.name}.{expected[:16]}.partial")
        with unfinished.open("ab") as sink:
            if sink.tell() > file.size:
                sink.truncate(0)
                sink.seek(0)
            start = sink.tell()
            self.asked(
                lambda: http_get(url, sink, resume_size=start, headers=build_hf_headers(), expected_size=file.size)
            )
        os.replace(unfinished, target)

    def _without_hub(
        self, patterns: Sequence[str], folder: Path, checked: CheckedFiles, reason: Unreachable
    ) -> list[Path]:
        here = [path for path in checked.paths() if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
        try:
            self.check_complete(patterns, here)
            logger.warning("%s; using the %d files in %s that were checked before", reason, len(here), folder)
            return [folder / path for path in sorted(here)]
        except DataError:
            return self._from_cache(patterns, folder, reason)

    def _from_cache(self, patterns: Sequence[str], folder: Path, reason: Unreachable) -> list[Path]:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                self.name,
                repo_type=self.kind,
                revision=self.revision,
                allow_patterns=list(patterns),
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            raise reason from None
        snapshot = Path(found)
        cached = sorted(str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file())
        try:
            self.check_complete(patterns, cached)
        except DataError as error:
            raise Unreachable(f"{reason}; the cache has a part only: {error}") from None
        chosen = [path for path in cached if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
        logger.warning("%s; using %d files of the cache %s", reason, len(chosen), snapshot)
        return [_linked((snapshot / path).resolve(), folder / path) for path in chosen]

    def asked(self, request: Callable[[], Result]) -> Result:
        """Return what a request gives; errors of the client become one of ours, with the remedy."""
        import httpx2  # the client beneath huggingface_hub; its errors come through as they are
        from huggingface_hub import constants, errors

        where = constants.ENDPOINT
        try:
            return request()
        except errors.OfflineModeIsEnabled:
            raise Unreachable(f"{self}: not asked for, HF_HUB_OFFLINE is set") from None
        except errors.RepositoryNotFoundError as error:
            hint = "check the name, and HF_TOKEN if it is private"
            raise DataError(f"{self}: not found at {where} ({_status(error)}); {hint}") from None
        except errors.RevisionNotFoundError:
            raise DataError(f"{self}: has no revision {self.revision!r} at {where}") from None
        except errors.HfHubHTTPError as error:
            raise Unreachable(f"{self}: {where} answered {_status(error)}") from None
        except errors.LocalEntryNotFoundError as error:
            raise Unreachable(f"{self}: {where} cannot be reached ({_first_line(error)})") from None
        except (httpx2.HTTPError, OSError) as error:
            raise Unreachable(f"{self}: {where} cannot be reached ({_first_line(error)})") from None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Unreachable(DataError):
    """The hub does not answer, or is not to be asked."""


REMEDY = (
    "Set HF_ENDPOINT to a mirror, or run the same command where the hub can be reached and copy the folder here: what "
    "is complete in it, or in the cache (HF_HOME), is used without the hub"
)
"""What a user can do about ``Unreachable``."""


def readable(size: int) -> str:
    """Return a number of bytes for people."""
    amount, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def _linked(source: Path, target: Path) -> Path:
    """Put a file of the cache into the folder: as a hard link where that is possible, else as a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    return f"HTTP {response.status_code}" if response is not None else _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
