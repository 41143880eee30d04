"""The first half of building a BM25 index: passages become blocks on disk, each an index of some megabytes of corpus.

A block stands on its own: its terms in alphabetical order, and for each the rows it occurs in. So memory is bounded by
one block, blocks may be made by several processes, and a building that is killed goes on after the last complete one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_server.analyzer import Analyzer
from retrieval_server.corpus import RawLine
from retrieval_server.unique_ids import hash_id

_STOP = -1


@dataclass(frozen=True, slots=True)
class Block:
    """The files of one block: D passages, V terms, P postings (pairs of a term and a passage it occurs in)."""

    prefix: Path

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an array, memory-mapped.

        ``starts`` [D] offset of each passage in the served file, ``lengths`` [D] in terms, ``hashes`` [D] of the ids,
        ``pointers`` [V + 1] of each term's postings, ``rows`` [P] ascending per term, counted from the block's first
        passage, ``frequencies`` [P] of the term in the passage.
        """
        mapped: npt.NDArray[Any] = np.load(self.path(f"{name}.npy"), mmap_mode="r", allow_pickle=False)
        return mapped

    def path(self, name: str) -> Path:
        """Return the path of one of the block's files."""
        return self.prefix.with_name(f"{self.prefix.name}.{name}")


class _TermNumbers(dict[str, int]):
    """Word -> number of its term in order of first occurrence; ``_STOP`` for a stop word. Words are met one by one."""

    def __init__(self, analyzer: Analyzer) -> None:
        super().__init__()
        self._term = analyzer.term
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = self._term(word)
        number = _STOP if term is None else self.terms.setdefault(term, len(self.terms))
        self[word] = number
        return number


def write_block(lines: Sequence[RawLine], analyzer: Analyzer, block: Block) -> None:
    """Index consecutive lines of the corpus into the files of a block; raises CorpusError naming file and line."""
    numbers = _TermNumbers(analyzer)
    occurrences, lengths, hashes = array("i"), array("i"), bytearray()
    for line in lines:
        identifier, contents, _, _ = line.fields()
        found = [number for word in analyzer.words(contents) if (number := numbers[word]) != _STOP]
        occurrences.extend(found)
        lengths.append(len(found))
        hashes += hash_id(identifier)
    terms = sorted(numbers.terms)
    pointers, rows, frequencies = _postings(occurrences, lengths, [numbers.terms[term] for term in terms])
    _write(block.path("terms"), "".join(f"{term}\n" for term in terms).encode())
    arrays: dict[str, npt.NDArray[Any]] = {
        "starts": np.array([line.start for line in lines], np.int64),
        "lengths": np.frombuffer(lengths, np.int32),
        "hashes": np.frombuffer(hashes, np.uint64),
        "pointers": pointers,
        "rows": rows,
        "frequencies": frequencies,
    }
    for name, values in arrays.items():
        _write(block.path(f"{name}.npy"), values)


def _postings(
    occurrences: array[int], lengths: array[int], alphabetical: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.unsignedinteger[Any]]]:
    """Return (pointers [V + 1], rows [P], frequencies [P]) from the terms of all passages one after the other.

    ``alphabetical`` [V] lists the numbers of the terms in the order that they are to have.
    """
    n_terms, n_rows = len(alphabetical), len(lengths)
    places = np.empty(n_terms, np.int64)
    places[np.asarray(alphabetical, np.int64)] = np.arange(n_terms)
    pairs = places[np.frombuffer(occurrences, np.int32)] * n_rows
    pairs += np.repeat(np.arange(n_rows), np.frombuffer(lengths, np.int32))
    pairs.sort()
    firsts = np.flatnonzero(np.diff(pairs, prepend=-1))
    frequencies = np.diff(firsts, append=len(pairs))
    pairs = pairs[firsts]
    pointers = np.searchsorted(pairs, np.arange(n_terms + 1) * n_rows)
    largest = int(frequencies.max(initial=0))
    return pointers, (pairs % n_rows).astype(np.int32), frequencies.astype(np.min_scalar_type(largest))


def _write(path: Path, content: bytes | npt.NDArray[Any]) -> None:
    """Write a file that survives a power failure: the record that names the block complete comes after it."""
    with path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            np.save(file, content)
        file.flush()
        os.fsync(file.fileno())
