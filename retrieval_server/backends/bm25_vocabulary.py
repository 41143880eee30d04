"""The terms of an index, looked up in the mapped file: a dictionary of a million would take 100 MB and a second."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrieval_server.errors import IndexFolderError

_BLOCK = 64
"""Terms that are searched as a whole, some 1.2 KB; of each block the first term is kept in memory."""


class Vocabulary:
    """Terms and their numbers, from a JSON object ``{"term": number, ..}`` in alphabetical order."""

    def __init__(self, path: Path, starts: npt.NDArray[np.int64]) -> None:
        """``starts`` [V]: where in the file each term begins. Raises IndexFolderError when they do not fit the file."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(starts) and not 0 < int(starts[0]) <= int(starts[-1]) < len(self._map):
            raise IndexFolderError(
                f"{path} has {len(self._map)} bytes, but its terms begin at {int(starts[0])} to {int(starts[-1])}; "
                "rebuild the index"
            )
        self._size = len(starts)
        # Where each block begins, at the quotation mark before its first term, and where the last one ends.
        self._places = [*(np.asarray(starts[::_BLOCK]) - 1).tolist(), len(self._map) - 1]
        self._heads = [self._head(place) for place in self._places[:-1]]

    def __len__(self) -> int:
        return self._size

    def number(self, term: str) -> int | None:
        """Return the number of a term in [0, V), or None when it does not occur."""
        wanted = term.encode("utf-8", "surrogatepass")
        block = bisect_right(self._heads, wanted) - 1
        if block < 0 or b'"' in wanted:
            return None
        entries = self._map[self._places[block] : self._places[block + 1]]
        _, _, found = entries.partition(b'"%b": ' % wanted)
        return int(found.partition(b",")[0]) if found else None

    def _head(self, place: int) -> bytes:
        return self._map[place + 1 : self._map.find(b'"', place + 1)]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
