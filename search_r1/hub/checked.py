"""A record of the files of a folder whose checksums were compared: hashing 80 GB again takes minutes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NAME = ".checked.json"


class CheckedFiles:
    """The checked files of one repository in a folder. A file that changes afterwards counts as not checked."""

    def __init__(self, folder: Path, repository: str) -> None:
        self._folder, self._repository = folder, repository

    def holds(self, path: str, checksum: str) -> bool:
        """True when the file was found to have this checksum and has not changed since."""
        entry = self._entries().get(path)
        return entry is not None and entry["checksum"] == checksum and entry["state"] == self._state(path)

    def paths(self) -> list[str]:
        """Return the paths that were checked and have not changed since."""
        return [path for path, entry in self._entries().items() if entry["state"] == self._state(path)]

    def add(self, path: str, checksum: str) -> None:
        """Record that the file has this checksum."""
        record = self._record()
        record.setdefault(self._repository, {})[path] = {"checksum": checksum, "state": self._state(path)}
        unfinished = self._folder / f"{NAME}.partial"
        unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.replace(unfinished, self._folder / NAME)

    def _state(self, path: str) -> list[int] | None:
        file = self._folder / path
        return [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else None

    def _entries(self) -> dict[str, Any]:
        entries: dict[str, Any] = self._record().get(self._repository, {})
        return entries

    def _record(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self._folder / NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or damaged: everything is checked anew
            return {}
        return record
