"""The second half of building a BM25 index: blocks become the arrays that bm25s would have made, value for value.

The scores of the Lucene variant are computed with the same operations in the same order and precision as bm25s does,
but for a range of terms at a time, so that the postings of the whole corpus are never in memory together. Terms are
numbered in alphabetical order (bm25s leaves their order open).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from retrieval_server.backends.bm25_blocks import Block

Array = npt.NDArray[Any]

_READ_TERMS = 1 << 14
_KEPT_NUMBERS = 1 << 12
_HEADER = 128


class ArrayWriter:
    """Writes a one-dimensional ``.npy`` file piece by piece, byte for byte as ``np.save`` does for the whole.

    Not a memory map: a full disk is an OSError here, and a killed process there.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER))
        self.length = 0

    def append(self, values: npt.ArrayLike) -> None:
        """Write the next values."""
        piece = np.ascontiguousarray(values, self._dtype)
        self._file.write(piece.data)
        self.length += len(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                facts = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
                np.lib.format.write_array_header_1_0(self._file, facts)  # type: ignore[no-untyped-call]
                assert self._file.tell() == _HEADER


def merge_vocabularies(blocks: Sequence[Block], vocabulary: Path, starts: Path) -> int:
    """Number the terms of all blocks in alphabetical order; return how many there are.

    Writes ``vocabulary``, a JSON object from term to number as bm25s reads it, ``starts`` [V], where in that file each
    term begins, and for each block ``numbers``: raw int32 [V of the block], ascending.
    """
    kept = [array("i") for _ in blocks]
    for block in blocks:
        block.path("numbers").write_bytes(b"")

    def spill(which: int) -> None:
        with blocks[which].path("numbers").open("ab") as file:
            kept[which].tofile(file)
        del kept[which][:]

    number, position = -1, 1
    previous: bytes | None = None
    with vocabulary.open("wb") as text, ArrayWriter(starts, np.int64) as places:
        text.write(b"{")
        found: list[int] = []
        for term, which in heapq.merge(*(_terms(block, which) for which, block in enumerate(blocks))):
            if term != previous:
                previous, number = term, number + 1
                entry = b'%s"%s": %d' % (b", " if number else b"", term, number)
                found.append(position + (3 if number else 1))
                text.write(entry)
                position += len(entry)
                if len(found) == _KEPT_NUMBERS:
                    places.append(found)
                    found = []
            kept[which].append(number)
            if len(kept[which]) == _KEPT_NUMBERS:
                spill(which)
        places.append(found)
        text.write(b"}")
    for which in range(len(blocks)):
        spill(which)
    return number + 1


def _terms(block: Block, which: int) -> Iterator[tuple[bytes, int]]:
    """Yield the terms of a block with the block's number. The file is not held open: there may be thousands."""
    path, offset, rest = block.path("terms"), 0, b""
    while True:
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(_READ_TERMS)
        offset += len(piece)
        *terms, rest = (rest + piece).split(b"\n")
        for term in terms:
            yield term, which
        if not piece:
            return


@dataclass(frozen=True, slots=True)
class Scoring:
    """What the scores of a corpus depend on beside the frequencies."""

    k1: float
    b: float
    passages: int
    mean_length: float

    def norms(self, lengths: Array) -> npt.NDArray[np.float64]:
        """Return what each passage's length adds to the denominator, in the operations of bm25s."""
        norms: npt.NDArray[np.float64] = self.k1 * ((1 - self.b) + self.b * lengths / np.float64(self.mean_length))
        return norms

    def idf(self, document_frequencies: Array) -> npt.NDArray[np.float32]:
        """Return the weight of each term: ``math.log``, which differs from numpy's in the last bit."""
        values, places = np.unique(document_frequencies, return_inverse=True)
        weights = [math.log(1 + (self.passages - df + 0.5) / (df + 0.5)) for df in values.tolist()]
        return np.asarray(weights, np.float32)[places]


def document_frequencies(blocks: Sequence[Block], terms: int) -> npt.NDArray[np.int64]:
    """Return in how many passages each term occurs [V]."""
    counts = np.zeros(terms, np.int64)
    for block in blocks:
        counts[_numbers(block)] += np.diff(block.array("pointers"))
    return counts


def _numbers(block: Block) -> Array:
    path = block.path("numbers")
    return np.memmap(path, np.int32, mode="r") if path.stat().st_size else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PostingFiles:
    """Where the arrays of the postings go: by term and row ``values`` and ``rows``, by term ``largest`` value."""

    values: Path
    rows: Path
    largest: Path


def write_postings(
    blocks: Sequence[Block],
    indptr: npt.NDArray[np.int64],
    scoring: Scoring,
    files: PostingFiles,
    at_once: int,
    on_range: Callable[[float], None],
) -> None:
    """Write the scores and the rows of all postings, by term and then by row, and the largest score of each term.

    ``on_range`` is told the fraction done. ``at_once``: postings in memory together; a single term with more of them
    goes from the blocks to the files directly.
    """
    bases = np.cumsum([0, *(len(block.array("lengths")) for block in blocks)])
    with (
        ArrayWriter(files.values, np.float32) as value_file,
        ArrayWriter(files.rows, np.int32) as row_file,
        ArrayWriter(files.largest, np.float32) as largest_file,
    ):
        for first, last in _ranges(indptr, at_once):
            weights = scoring.idf(np.diff(indptr[first : last + 1])).astype(np.float64)
            pieces = (
                _piece(block, int(base), first, last, weights, scoring)
                for block, base in zip(blocks, bases, strict=False)
            )
            if last - first == 1:
                largest = np.float32(0)
                for _, _, rows, scores in pieces:
                    row_file.append(rows)
                    value_file.append(scores)
                    largest = max(largest, scores.max(initial=0))
                largest_file.append([largest])
            else:
                starts = indptr[first : last + 1] - indptr[first]
                rows, scores = _gathered(pieces, starts)
                row_file.append(rows)
                value_file.append(scores)
                largest_file.append(np.maximum.reduceat(scores, starts[:-1]))
            on_range(int(indptr[last]) / max(1, int(indptr[-1])))


def _ranges(indptr: npt.NDArray[np.int64], at_once: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of terms with at most ``at_once`` postings together, or of a single term."""
    first, terms = 0, len(indptr) - 1
    while first < terms:
        last = int(np.searchsorted(indptr, indptr[first] + at_once, side="right")) - 1
        last = min(max(last, first + 1), terms)
        yield first, last
        first = last


def _piece(
    block: Block, base: int, first: int, last: int, weights: Array, scoring: Scoring
) -> tuple[Array, Array, Array, Array]:
    """Return what one block knows of a range of terms.

    (terms counted from ``first`` [v], postings of each [v], rows in the corpus [p], scores [p]), by term and row.
    """
    numbers = _numbers(block)
    low, high = np.searchsorted(numbers, [first, last])
    pointers = np.asarray(block.array("pointers")[low : high + 1])
    counts = np.diff(pointers)
    terms = np.asarray(numbers[low:high]) - first
    span = slice(int(pointers[0]), int(pointers[-1]))
    rows = np.asarray(block.array("rows")[span])
    frequencies = np.asarray(block.array("frequencies")[span]).astype(np.float64)
    norms = scoring.norms(np.asarray(block.array("lengths")))[rows]
    scores = np.repeat(weights[terms], counts) * (frequencies / (norms + frequencies))
    return terms, counts, rows + np.int32(base), scores.astype(np.float32)


def _gathered(pieces: Iterator[tuple[Array, Array, Array, Array]], starts: Array) -> tuple[Array, Array]:
    """Return (rows, scores) of a range of terms: for each term the postings of all blocks, in the order of the blocks.

    ``starts`` [v + 1]: where the postings of each term begin.
    """
    rows_of_all = np.empty(int(starts[-1]), np.int32)
    scores_of_all = np.empty(int(starts[-1]), np.float32)
    free = starts[:-1].copy()
    for terms, counts, rows, scores in pieces:
        own_starts = np.cumsum(counts) - counts
        places = np.repeat(free[terms] - own_starts, counts) + np.arange(len(rows))
        rows_of_all[places], scores_of_all[places] = rows, scores
        free[terms] += counts
    return rows_of_all, scores_of_all
