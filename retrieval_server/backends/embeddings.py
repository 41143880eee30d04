"""Vectors of a whole corpus on disk: written block by block, continued where a killed building stopped.

The file is raw [N, dim], so that of float32 is the published embedding cache as it stands. Beside it a small journal
says how many rows are safely in it; what lies behind them was being written when the building was interrupted.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrieval_server.building import write_durably
from retrieval_server.errors import SettingsError
from retrieval_server.progress import Progress

logger = logging.getLogger(__name__)

BLOCK_ROWS = 1024
"""Passages between two entries of the journal, so what a killed building has to encode again at most."""
_READ_BYTES = 1 << 26


class EmbeddingFile:
    """The vectors of N passages, complete."""

    def __init__(self, path: Path, size: int, dim: int, dtype: str) -> None:
        """Raise SettingsError unless the file has N x dim numbers."""
        expected = size * dim * np.dtype(dtype).itemsize
        try:
            found = path.stat().st_size
        except OSError as error:
            raise SettingsError(f"embeddings {path} cannot be read: {error.strerror}") from None
        if found != expected:
            raise SettingsError(
                f"embeddings {path} has {found} bytes, but {size} passages of {dim} dimensions in {dtype} are "
                f"{expected}: made from another corpus or by another encoder, or not complete"
            )
        self.path, self.size, self.dim = path, size, dim
        self._array: npt.NDArray[np.floating] = np.memmap(path, dtype, "r", shape=(size, dim))

    def blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield all vectors in order, some at a time [n, dim]; raises SettingsError for one that is not finite."""
        step = max(1, _READ_BYTES // (4 * self.dim))
        for start in range(0, self.size, step):
            block = np.ascontiguousarray(self._array[start : start + step], np.float32)
            if not np.isfinite(block).all():
                row = start + int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
                raise SettingsError(f"embeddings {self.path}: the vector of row {row} is not finite; encode again")
            yield block

    def sample(self, n: int) -> npt.NDArray[np.float32]:
        """Return n vectors spread over the file at random, the same ones every time [n, dim]."""
        rows = np.sort(np.random.default_rng(0).choice(self.size, min(n, self.size), replace=False))
        return np.ascontiguousarray(self._array[rows], np.float32)


def write_embeddings(
    path: Path,
    size: int,
    dim: int,
    dtype: str,
    encode: Callable[[range], npt.NDArray[np.float32]],
) -> EmbeddingFile:
    """Fill the file with ``encode(rows)`` [rows, dim], from the first row that it does not have yet."""
    journal = path.with_suffix(".json")
    width = dim * np.dtype(dtype).itemsize
    done = _rows_written(path, journal, width)
    if done:
        logger.info("%s of %s passages were encoded before the interruption", f"{done:,}", f"{size:,}")
    progress = Progress("encoding", begin=done / size)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(done * width)
        file.seek(done * width)
        for start in range(done, size, BLOCK_ROWS):
            rows = range(start, min(start + BLOCK_ROWS, size))
            file.write(encode(rows).astype(dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
            write_durably(journal, json.dumps({"rows": rows.stop}).encode())
            progress.update(rows.stop / size, f"{rows.stop:,} of {size:,} passages")
    progress.done(f"{size - done:,} passages")
    return EmbeddingFile(path, size, dim, dtype)


def _rows_written(path: Path, journal: Path, width: int) -> int:
    """Return how many rows of the file are certain; 0 when journal and file do not fit each other."""
    try:
        rows = json.loads(journal.read_text(encoding="utf-8"))["rows"]
        return int(rows) if path.stat().st_size >= rows * width else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
