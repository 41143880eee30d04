"""Finds ids that occur twice, in eight bytes an id: a Python set of 20 million would take gigabytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_FIRST_CHECK = 1 << 16
_SORTED_AT_ONCE = 1 << 22


def hash_id(identifier: str) -> bytes:
    """Return eight bytes that are the same in every process (``hash`` of a string is not)."""
    return hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest()


class IdRegister:
    """Collects the ids of a corpus in order and says when it is time to look for repeats.

    Time comes whenever the number of ids has doubled, so that an early repeat is found early and all the looking
    together costs no more than twice the last.
    """

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._next_check = _FIRST_CHECK

    def add(self, identifier: str) -> bool:
        """Take the next id; return True when it is time to look."""
        self._hashes += hash_id(identifier)
        return self.due(len(self._hashes) // 8)

    def due(self, count: int) -> bool:
        """Return True when ``count`` ids have reached the next doubling."""
        if count < self._next_check:
            return False
        self._next_check = 2 * count
        return True

    def hashes(self) -> Hashes:
        """Return the hashes so far, one a row; a copy."""
        return np.frombuffer(bytes(self._hashes), np.uint64)


def repeats(chunks: Sequence[Hashes]) -> Iterator[tuple[int, int]]:
    """Yield (row of the first occurrence, row of the next) of every hash that occurs again, chunks being consecutive.

    Among 20 million different ids two share a hash with probability about 1e-5: compare the ids themselves. Sorts a
    slice of the hash range at a time, so memory stays at some 100 MB whatever the number of rows.
    """
    slices = -(-sum(map(len, chunks)) // _SORTED_AT_ONCE)  # rounded up
    for number in range(slices):
        found_hashes, found_rows, base = [], [], 0
        for chunk in chunks:
            own = np.flatnonzero(chunk % np.uint64(slices) == number)
            found_hashes.append(np.asarray(chunk[own]))
            found_rows.append(own + base)
            base += len(chunk)
        hashes, rows = np.concatenate(found_hashes), np.concatenate(found_rows)
        order = np.argsort(hashes, kind="stable")
        hashes, rows = hashes[order], rows[order]
        for place in np.flatnonzero(hashes[1:] == hashes[:-1]):
            yield int(rows[place]), int(rows[place + 1])
