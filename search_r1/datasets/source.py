"""One source of conversations: which files are its, how its records become rows, which passages it brings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from search_r1.datasets.draft import Draft
from search_r1.datasets.passages import Found
from verl.errors import DataError


@dataclass(frozen=True, slots=True)
class SplitFile:
    """One file of one split."""

    path: Path
    split: str
    """``train``, ``dev`` or ``test``."""

    def qid(self, source: str, official: str) -> str:
        """Return the id of a question: source, split and the source's own id, since ids restart in every split."""
        return f"{source}:{self.split}:{official}"

    def beside(self, pattern: str) -> list[Path]:
        """Return the files of the same folder whose whole name matches, sorted."""
        return matching(self.path.parent, pattern)


@dataclass(frozen=True)
class Source:
    """How one data set is imported.

    ``rows`` and ``passages`` read lazily and in file order, and drop what breaks the format on its own.
    """

    name: str
    """The ``data_source`` of its rows."""
    files: str
    """Regular expression over whole file names: the files with conversations."""
    rows: Callable[[SplitFile], Iterator[Draft]]
    supplies: tuple[str, ...]
    """Fields of ``Row`` that the published files can fill, beyond question and answers."""
    passages: Callable[[Path], Iterator[Found]] | None = None
    """Passages in or beside the published files, given their folder; None where the source brings none."""
    default_split: str = "test"
    """Split of a file whose name tells none."""

    def split_files(self, place: Path) -> list[SplitFile]:
        """Return the files of a folder, or the one file; raises DataError naming what was looked for."""
        if place.is_file():
            return [SplitFile(place, split_of(place.name) or self.default_split)]
        if not place.is_dir():
            raise DataError(f"{place}: no such file or folder")
        found = matching(place, self.files)
        if not found:
            raise DataError(f"{place}: no file of {self.name} in it; looked for names like {self.files!r}")
        return [SplitFile(path, split_of(path.name) or self.default_split) for path in found]


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder whose whole name matches, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and re.fullmatch(pattern, path.name))


_SPLITS: Mapping[str, str] = {"train": "train", "dev": "dev", "valid": "dev", "test": "test"}


def split_of(name: str) -> str | None:
    """Return the split that a file's name tells, None when it tells none. A word of the name that begins so decides."""
    for word in re.split(r"[^a-z]+", name.lower()):
        for beginning, split in _SPLITS.items():
            if word.startswith(beginning):
                return split
    return None
