"""FAISS index files: read from one file or from the pieces that it was published in, written without filling memory.

A Flat file is a header of 45 bytes and the vectors, so it is read here, straight into the array that is searched, with
progress and with both sizes in the message when it is cut short. Every other type is read by FAISS through a callback.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from retrieval_server.errors import IndexFolderError, SettingsError

_FLAT = {b"IxFI": "inner product", b"IxF2": "L2", b"IxFl": None}
# fourcc, dimension, vectors, two unused, trained, metric, and the number of 4-byte units that follow
_HEADER = struct.Struct("<4siqqqBiQ")
# what every type begins with: fourcc, dimension, vectors
_START = struct.Struct("<4siq")
_INNER_PRODUCT = 0
_BLOCK = 1 << 26


def quiet_faiss() -> None:
    """Keep FAISS from logging which of its builds it tried to load; before its first import."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)


def index_pieces(path: Path) -> list[Path]:
    """Return the file or files of a bare FAISS index, in order; raises IndexFolderError saying what is there instead.

    ``path`` is the file, the folder that has it, the folder of ``part_aa part_ab ...``, or one of those parts.
    """
    if path.is_file():
        return sorted(path.parent.glob("part_*")) if path.name.startswith("part_") else [path]
    if not path.is_dir():
        raise IndexFolderError(f"index {path} does not exist")
    files = sorted(child for pattern in ("*.index", "*.faiss") for child in path.glob(pattern))
    pieces = sorted(path.glob("part_*"))
    if len(files) == 1 or (pieces and not files):
        return files or pieces
    if files:
        raise IndexFolderError(f"{path} holds {len(files)} FAISS files ({', '.join(f.name for f in files)}); name one")
    found = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
    raise IndexFolderError(f"{path} holds no FAISS index: no *.index, *.faiss or part_* (found: {found})")


class PieceReader:
    """Reads files as if they were one, front to back."""

    def __init__(self, pieces: Iterable[Path], on_bytes: Callable[[int], None] = lambda n: None) -> None:
        """``on_bytes(n)`` is called with the bytes read since the last call."""
        self.pieces = list(pieces)
        try:
            self.size = sum(piece.stat().st_size for piece in self.pieces)
            self._files: list[BinaryIO] = [piece.open("rb") for piece in self.pieces]
        except OSError as error:
            raise IndexFolderError(f"{error.filename} cannot be read: {error.strerror}") from error
        self._on_bytes = on_bytes
        self._at = 0

    def __call__(self, n: int) -> bytes:
        """Return up to n bytes, none at the end. This is the callback that FAISS wants."""
        buffer = bytearray(n)
        return bytes(memoryview(buffer)[: self.readinto(memoryview(buffer))])

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as there are bytes; return how many."""
        done = 0
        while done < len(buffer) and self._at < len(self._files):
            n = self._files[self._at].readinto(buffer[done : done + _BLOCK])  # type: ignore[attr-defined]
            self._at += n == 0
            done += n
            self._on_bytes(n)
        return done

    def rewind(self) -> None:
        """Start again from the first byte."""
        self._at = 0
        for file in self._files:
            file.seek(0)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    @property
    def name(self) -> str:
        """The first file and how many follow, for messages."""
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"{self.pieces[0]}{more}"


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """What a FAISS file holds. N vectors of d dimensions, compared by inner product."""

    faiss_index: Any
    """None for Flat: the vectors are all there is to it."""
    vectors: npt.NDArray[Any] | None
    """[N, d] float32 of a Flat index, float16 of an SQfp16; None for the others, which only FAISS can search."""
    size: int
    dim: int


def read_index(pieces: Iterable[Path], on_bytes: Callable[[int], None] = lambda n: None) -> LoadedIndex:
    """Read a FAISS index; raises IndexFolderError when it is damaged, cut short or of a kind that is not served."""
    reader = PieceReader(pieces, on_bytes)
    try:
        start = bytearray(_HEADER.size)
        if reader.readinto(memoryview(start)) == len(start) and bytes(start[:4]) in _FLAT:
            return _read_flat(reader, *_HEADER.unpack(start))
        reader.rewind()
        return _read_other(reader)
    except MemoryError:
        raise IndexFolderError(
            f"{reader.name} needs {reader.size / 1e9:.1f} GB of memory; take a smaller type of index (SQfp16, SQ8)"
        ) from None
    except OSError as error:
        raise IndexFolderError(f"{reader.name} cannot be read: {error.strerror}") from error
    finally:
        reader.close()


def _read_flat(
    reader: PieceReader, kind: bytes, dim: int, size: int, _a: int, _b: int, trained: int, metric: int, units: int
) -> LoadedIndex:
    if metric != _INNER_PRODUCT or _FLAT[kind] == "L2":
        raise IndexFolderError(_wrong_metric(reader))
    expected = _HEADER.size + size * dim * 4
    if dim < 1 or size < 0 or units != size * dim or reader.size != expected:
        raise IndexFolderError(
            f"{reader.name} has {reader.size} bytes, but its header says {size} vectors of {dim} dimensions, which are "
            f"{expected}: an incomplete download, a missing or extra part, or damaged"
        )
    vectors = np.empty((size, dim), np.float32)
    if (found := reader.readinto(vectors.reshape(-1).view(np.uint8).data)) != vectors.nbytes:
        raise IndexFolderError(f"{reader.name} ends after {found} of {vectors.nbytes} bytes of vectors")
    return LoadedIndex(None, vectors, size, dim)


def _wrong_metric(reader: PieceReader) -> str:
    return f"{reader.name} compares by L2 distance, the published format by inner product; build it again"


def _read_other(reader: PieceReader) -> LoadedIndex:
    import faiss.swigfaiss

    try:
        # The callback class is missing from FAISS's type stubs.
        callback: Any = faiss.swigfaiss.PyCallbackIOReader(reader, _BLOCK)  # type: ignore[no-untyped-call]
        index = faiss.read_index(callback)
    except RuntimeError as error:
        reason = str(error).rpartition("Error: ")[2].rpartition("failed: ")[2]
        raise IndexFolderError(
            f"{reader.name} ({reader.size} bytes) is not a whole FAISS index: {reason}; get or build it again"
        ) from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexFolderError(_wrong_metric(reader))
    if isinstance(index, faiss.IndexIDMap):
        raise IndexFolderError(f"{reader.name} has ids of its own (IDMap); ids must be rows of the corpus")
    return LoadedIndex(index, _half_vectors(index), index.ntotal, index.d)


def _half_vectors(index: Any) -> npt.NDArray[np.float16] | None:
    """Return the vectors [N, d] of an SQfp16 index, sharing its memory; None for another type."""
    import faiss

    half = faiss.ScalarQuantizer.QT_fp16
    if not isinstance(index, faiss.IndexScalarQuantizer) or index.sq.qtype != half or index.ntotal == 0:
        return None
    codes = faiss.rev_swig_ptr(index.codes.data(), index.ntotal * index.code_size)
    vectors: npt.NDArray[np.float16] = codes.view(np.float16).reshape(index.ntotal, index.d)
    return vectors


def make_index(dim: int, factory: str) -> Any:
    """Return an empty FAISS index for inner products; raises SettingsError for a string that FAISS does not know."""
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rpartition("Error: ")[2].strip() or str(error)
        raise SettingsError(
            f"--faiss_type {factory!r} is not an index that FAISS builds for {dim} dimensions ({reason}); "
            "for example Flat, SQfp16, SQ8, HNSW32, IVF, IVF4096,SQ8"
        ) from None


def index_size(path: Path) -> tuple[int, int]:
    """Return (vectors, dimension) as the header of a FAISS file says, whatever its type."""
    with path.open("rb") as file:
        start = file.read(_START.size)
    if len(start) < _START.size:
        raise IndexFolderError(f"{path} has {len(start)} bytes, too few for a FAISS index; build it again")
    _, dim, size = _START.unpack(start)
    return size, dim


def streams(index: Any) -> bool:
    """True when ``write_streamed`` can write this kind: its file is a header and one code per vector."""
    import faiss

    return isinstance(index, faiss.IndexFlat | faiss.IndexScalarQuantizer)


def write_streamed(index: Any, size: int, blocks: Iterable[npt.NDArray[np.float32]], path: Path) -> None:
    """Write a trained, empty Flat or SQ index as if ``blocks`` had been added to it, without holding them in memory.

    ``blocks`` are [n, d] and have ``size`` rows together.
    """
    import faiss

    empty = faiss.serialize_index(index).tobytes()
    probe = faiss.clone_index(index)
    probe.add(np.zeros((1, index.d), np.float32))
    one = faiss.serialize_index(probe).tobytes()
    unit = struct.unpack_from("<Q", one, len(empty) - 8)[0]  # of the code's length: bytes, or 4-byte units

    def header(n: int) -> bytes:
        return empty[:8] + struct.pack("<q", n) + empty[16:-8] + struct.pack("<Q", n * unit)

    if header(0) != empty or header(1) != one[: len(empty)] or len(one) != len(empty) + index.code_size:
        raise IndexFolderError(f"FAISS {faiss.__version__} writes {type(index).__name__} in a form not known here")
    written = 0
    with path.open("wb") as file:
        file.write(header(size))
        for block in blocks:
            file.write(index.sa_encode(block).tobytes())
            written += len(block)
    if written != size:
        raise IndexFolderError(f"{path}: {written} vectors came, {size} were announced")
