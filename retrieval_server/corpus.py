"""The corpus file: JSON lines, one passage a line, read once to be indexed and memory-mapped to be served.

A line is ``{"id", "contents"}`` (contents: the title in double quotes, a newline, the text) or ``{"id", "title",
"text"}``, from which the quoted form is rebuilt. Blank lines are skipped, so a passage's row is not its line number.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from retrieval_server.errors import CorpusError
from retrieval_server.types import Document

_BOM = b"\xef\xbb\xbf"
_HASH_BLOCK = 1 << 20
_SAMPLE_BLOCK = 1 << 16
_N_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class CorpusLine:
    """One passage and where it lies in the file."""

    number: int
    """Line number, from 1."""
    start: int
    """Offset in bytes of the line's JSON."""
    document: Document


def split_contents(contents: str) -> tuple[str, str]:
    """Return (title, text) of a ``contents`` field: first line without its surrounding quotes, and the rest.

    A single line has no title: all of it is text.
    """
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    title = first.strip()
    if len(title) >= 2 and title[0] == '"' and title[-1] == '"':
        title = title[1:-1]
    return title, rest


def parse_passage(line: bytes) -> Document:
    """Parse one line of the corpus; raises ValueError that says what is wrong (without file and line)."""
    try:
        row = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object")
    if "id" not in row:
        raise ValueError(f"no 'id'; the line has {_keys(row)}")
    identifier = row["id"]
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    if not isinstance(identifier, str) or not identifier:
        raise ValueError(f"'id' is {identifier!r}, not a non-empty string")
    contents, title, text = _texts(row)
    try:
        return Document.of(identifier, contents, title, text)
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) in the text") from None


def _texts(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return (contents, title, text) of a parsed line, deriving what is absent."""
    for key in ("contents", "title", "text"):
        if key in row and row[key] is not None and not isinstance(row[key], str):
            raise ValueError(f"{key!r} is a {type(row[key]).__name__}, not a string")
    contents: str | None = row.get("contents")
    title: str | None = row.get("title")
    text: str | None = row.get("text")
    if contents is None:
        if text is None:
            raise ValueError(f"neither 'contents' nor 'text'; the line has {_keys(row)}")
        contents = f'"{title}"\n{text}' if title else text
        return contents, title or "", text
    derived_title, derived_text = split_contents(contents)
    return contents, derived_title if title is None else title, derived_text if text is None else text


def _keys(row: dict[str, Any]) -> str:
    return f"the keys {', '.join(sorted(map(str, row)))}" if row else "no keys"


def open_corpus(path: Path) -> BinaryIO:
    """Open a corpus file; raises CorpusError when it is not a plain JSON-lines file."""
    if path.is_dir():
        raise CorpusError(f"corpus {path} is a folder; give the .jsonl file inside it")
    if path.suffix in (".gz", ".zst", ".parquet"):
        raise CorpusError(f"corpus {path}: {path.suffix} is not read; convert it to plain JSON lines first")
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"corpus {path} cannot be read: {error.strerror}") from error


class CorpusReader:
    """Reads a corpus from front to back once, hashing on the way.

    ``for line in reader`` yields every passage; afterwards ``size`` and ``sha256`` describe the whole file.
    Raises CorpusError naming file and line for a malformed line or an id that was used before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes read so far."""
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Digest of what was read so far."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[CorpusLine]:
        # Keyed by hash: 20 million ids as strings would not fit where 20 million integers do. Two different ids meet
        # in a 64-bit hash with probability about 1e-5 there, and then the message shows both lines.
        first_seen: dict[int, int] = {}
        with open_corpus(self.path) as file:
            for number, line in enumerate(file, start=1):
                start = self.size
                self.size += len(line)
                self._digest.update(line)
                if number == 1 and line.startswith(_BOM):
                    start, line = start + len(_BOM), line[len(_BOM) :]
                if not line.strip():
                    continue
                try:
                    document = parse_passage(line)
                except ValueError as error:
                    raise CorpusError(f"{self.path}, line {number}: {error}") from None
                previous = first_seen.setdefault(hash(document.id), number)
                if previous != number:
                    raise CorpusError(
                        f"{self.path}, line {number}: id {document.id!r} was already used in line {previous}"
                    )
                yield CorpusLine(number, start, document)


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file; ``on_bytes(n)`` is called with the bytes read since the last call."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """Return a digest of the file's size and of 64 blocks of 64 KiB spread over it, its beginning and end included.

    Read in a few milliseconds whatever the size: it tells corpora apart where hashing 10 GB at every start would not
    do, but it does not see every changed byte.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BLOCK)
    with path.open("rb") as file:
        for offset in sorted({last * i // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)}):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BLOCK))
    return digest.hexdigest()


class PassageStore:
    """Random access to the passages of a corpus whose row offsets are known. The text stays memory-mapped.

    The file may be replaced (by rename) while it is mapped, but not written in place.
    """

    def __init__(self, path: Path, starts: npt.NDArray[np.int64], cached: int = 8192) -> None:
        self._starts = starts
        with open_corpus(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise CorpusError(f"corpus {path} is empty")
            if len(starts) and int(starts[-1]) >= size:
                raise CorpusError(f"corpus {path} has {size} bytes, but the last passage starts at {int(starts[-1])}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path = path
        # Training repeats its queries, so the same passages come back within seconds.
        self._cached_read = lru_cache(maxsize=cached)(self._read)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Document:
        """Return the passage of a row in [0, N); raises IndexError outside, negative rows included."""
        if not 0 <= row < len(self._starts):
            raise IndexError(f"row {row} of a corpus of {len(self._starts)} passages")
        return self._cached_read(row)

    def _read(self, row: int) -> Document:
        start = int(self._starts[row])
        end = self._map.find(b"\n", start)
        try:
            return parse_passage(self._map[start : end if end >= 0 else len(self._map)])
        except ValueError as error:
            raise CorpusError(f"{self.path}, row {row} at byte {start}: {error}") from None

    def close(self) -> None:
        """Unmap the file."""
        self._cached_read.cache_clear()
        self._map.close()
