"""Passages by id, for Lucene indexes that store none.

By id and never by row: Lucene numbers its documents in the order in which they were indexed, which several threads, a
merge or a skipped empty passage make another than that of the corpus file.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrieval_server.corpus import CorpusReader, PassageStore
from retrieval_server.errors import CorpusError
from retrieval_server.manifest import identify
from retrieval_server.types import Document, LoadProgress

_REPORT_EVERY = 1 << 14


class PassagesById:
    """A corpus file and a table from id to place: 16 bytes a passage, the text stays on the disk."""

    def __init__(self, path: Path, progress: LoadProgress) -> None:
        """Read the corpus once; raises CorpusError naming file and line for a malformed one."""
        reader = CorpusReader(path)
        served = reader.served
        keys, starts = array("q"), array("q")
        for line in reader:
            keys.append(_key(line.document.id))
            starts.append(line.start)
            if len(keys) % _REPORT_EVERY == 0:
                progress.update("reading the corpus", 0.9 * reader.fraction)
        if not keys:
            raise CorpusError(f"corpus {path} has no passage")
        order = np.argsort(np.frombuffer(keys, np.int64), kind="stable")
        self._keys: npt.NDArray[np.int64] = np.frombuffer(keys, np.int64)[order]
        self._passages = PassageStore(served, np.frombuffer(starts, np.int64))
        self._rows: npt.NDArray[np.int64] = order
        self.path = path
        self.identity = identify(reader)

    def __len__(self) -> int:
        return len(self._passages)

    def find(self, id: str) -> Document | None:
        """Return the passage with this id, or None."""
        key = _key(id)
        for slot in range(int(np.searchsorted(self._keys, key)), len(self._keys)):
            if self._keys[slot] != key:
                break
            document = self._passages[int(self._rows[slot])]
            if document.id == id:
                return document
        return None

    def close(self) -> None:
        """Unmap the file."""
        self._passages.close()


def _key(id: str) -> int:
    """Return 63 bits of a digest of the id, the same in every process."""
    digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
