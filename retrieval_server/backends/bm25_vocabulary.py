"""The terms of an index, looked up in the mapped file: a dictionary of a million would take 100 MB and a second."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrieval_server.errors import IndexFolderError


class Vocabulary:
    """Terms and their numbers, from a JSON object ``{"term": number, ..}`` in alphabetical order."""

    def __init__(self, path: Path, starts: npt.NDArray[np.int64]) -> None:
        """``starts`` [V]: where in the file each term begins. Raises IndexFolderError when they do not fit the file."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = starts
        if len(starts) and not 0 < int(starts[0]) <= int(starts[-1]) < len(self._map):
            raise IndexFolderError(
                f"{path} has {len(self._map)} bytes, but its terms begin at {int(starts[0])} to {int(starts[-1])}; "
                "rebuild the index"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, term: str) -> int | None:
        """Return the number of a term in [0, V), or None when it does not occur."""
        wanted, low, high = term.encode("utf-8", "surrogatepass"), 0, len(self._starts)
        while low < high:
            middle = (low + high) // 2
            if self._term(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self._starts) and self._term(low) == wanted else None

    def _term(self, number: int) -> bytes:
        start = int(self._starts[number])
        return self._map[start : self._map.find(b'"', start)]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
