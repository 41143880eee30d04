"""The corpus: one passage a line, read once to be indexed and at random places to be served.

A line is ``{"id", "contents"}`` (contents: the title in double quotes, a newline, the text) or ``{"id", "title",
"text"}``, from which the quoted form is rebuilt. Blank lines are skipped, so a passage's row is not its line number.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic_core

from retrieval_server.corpus_files import CorpusFile, FileLines, corpus_files
from retrieval_server.errors import CorpusError
from retrieval_server.types import Document
from retrieval_server.unique_ids import IdRegister, repeats

_BOM = b"\xef\xbb\xbf"
_HASH_BLOCK = 1 << 20
_SAMPLE_BLOCK = 1 << 16
_N_SAMPLES = 64


class RawLine(NamedTuple):
    """A line that holds a passage, not yet parsed."""

    file: CorpusFile
    number: int
    """Line number in its file (row number, in a parquet file), from 1."""
    start: int
    """Offset in bytes of its JSON in the file that is served."""
    data: bytes

    def parse(self) -> Document:
        """Return the passage; raises CorpusError naming file and line."""
        return Document.of(*self.fields())

    def fields(self) -> tuple[str, str, str, str]:
        """Return (id, contents, title, text); raises CorpusError naming file and line."""
        try:
            return parse_fields(self.data)
        except ValueError as error:
            raise CorpusError(f"{self.where}: {error}") from None

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return f"{self.file.path}, {self.file.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class CorpusLine:
    """One passage and where it lies in the file."""

    number: int
    """Line number in its file, from 1."""
    start: int
    """Offset in bytes of the line's JSON in the file that is served."""
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
    return Document.of(*parse_fields(line))


def parse_fields(line: bytes) -> tuple[str, str, str, str]:
    """Return (id, contents, title, text) of one line; raises ValueError like ``parse_passage``."""
    try:
        row = pydantic_core.from_json(line)  # a quarter of the time of the json module, which has the better messages
    except ValueError:
        row = _row(line)
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
    if b"\\u" in line:  # otherwise the line is UTF-8, which has none
        try:
            "".join((identifier, contents, title, text)).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) in the text") from None
    return identifier, contents, title, text


def _row(line: bytes) -> Any:
    """Return the JSON value of a line; raises ValueError that says where it is none."""
    try:
        return json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None


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


class CorpusReader:
    """Reads a corpus of any format from front to back once, hashing on the way.

    ``for line in reader`` yields every passage; afterwards ``size`` and ``sha256`` describe the JSON lines of the whole
    corpus. A plain JSON-lines file is served as it is, and they describe that file. Any other corpus (``needs_copy``)
    is served from the copy that is written to ``copy_to`` while it is read: the decompressed lines of all its shards.

    Raises CorpusError naming file and line for a malformed line or an id that was used before.
    """

    def __init__(self, path: Path, copy_to: Path | None = None, copied: int = 0) -> None:
        """``copied``: leading bytes of ``copy_to`` to keep, written by an interrupted reading of this corpus.

        A shorter file, whose end never reached the disk, is written anew.
        """
        self.path = path
        self.files = corpus_files(path)
        self.needs_copy = len(self.files) > 1 or self.files[0].format != "jsonl"
        self.size = 0
        """Bytes of JSON lines read so far."""
        self.passages = 0
        """Passages read so far."""
        self._copy_to = copy_to if self.needs_copy else None
        self._copied = copied if self._copy_to and copied <= _size(self._copy_to) else 0
        self._copy: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._stored_bytes = sum(file.bytes for file in self.files)
        self._stored_before = 0
        self._lines: FileLines | None = None

    @property
    def sha256(self) -> str:
        """Digest of what was read so far."""
        return self._digest.hexdigest()

    @property
    def fraction(self) -> float:
        """How much of the corpus as it is stored was read, 0 to 1."""
        position = self._stored_before + (self._lines.position if self._lines else 0)
        return position / max(1, self._stored_bytes)

    @property
    def served(self) -> Path:
        """The plain JSON-lines file to serve from: the corpus, or its copy. Raises CorpusError when there is none."""
        if not self.needs_copy:
            return self.files[0].path
        if self._copy_to is None:
            raise CorpusError(f"corpus {self.path} is not one plain JSON-lines file, which is what can be served from")
        return self._copy_to

    def __iter__(self) -> Iterator[CorpusLine]:
        ids = IdRegister()
        for raw in self.raw_lines():
            document = raw.parse()
            yield CorpusLine(raw.number, raw.start, document)
            if ids.add(document.id):
                refuse_repeated_ids(self.path, [ids.hashes()])
        refuse_repeated_ids(self.path, [ids.hashes()])

    def raw_lines(self) -> Generator[RawLine, None, None]:
        """Yield the lines that hold something; they are not parsed and their ids not compared."""
        with ExitStack() as stack:
            if self._copy_to is not None:
                self._copy = stack.enter_context(_continued(self._copy_to, self._copied))
            complete = True
            for file in self.files:
                if not complete:
                    self._take(b"\n")  # the line break that the last line of the shard before lacks
                self._lines = FileLines(file)
                for number, data in enumerate(self._lines, start=1):
                    start = self.size
                    self._take(data)
                    complete = data.endswith(b"\n")
                    if number == 1 and data.startswith(_BOM):
                        start, data = start + len(_BOM), data[len(_BOM) :]
                    if data.strip():
                        self.passages += 1
                        yield RawLine(file, number, start, data)
                self._lines = None
                self._stored_before += file.bytes

    def flush(self) -> None:
        """Make the copy's bytes of what was read so far safe from the end of this process."""
        if self._copy is not None and not self._copy.closed:
            self._copy.flush()

    def _take(self, data: bytes) -> None:
        """Account for bytes of the corpus, and write them unless the copy has them."""
        if self._copy is not None and self.size >= self._copied:
            self._copy.write(data)
        self._digest.update(data)
        self.size += len(data)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _continued(path: Path, kept: int) -> BinaryIO:
    """Open a file for writing after its first ``kept`` bytes, which must exist."""
    if not kept:
        return path.open("wb")
    file = path.open("r+b")
    file.truncate(kept)
    file.seek(kept)
    return file


def refuse_repeated_ids(path: Path, hashes: Sequence[npt.NDArray[np.uint64]]) -> None:
    """Raise CorpusError naming both lines when an id of the corpus occurs twice; ``hashes`` are those of its rows."""
    for first, second in repeats(hashes):
        rows = islice(CorpusReader(path).raw_lines(), second + 1)
        lines = [(raw, raw.fields()[0]) for row, raw in enumerate(rows) if row in (first, second)]
        (before, earlier_id), (raw, identifier) = lines
        if identifier == earlier_id:
            place = f"{before.file.unit} {before.number}" if before.file == raw.file else before.where
            raise CorpusError(f"{raw.where}: id {identifier!r} was already used in {place}")


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


_PER_BYTE = 4
"""A document holds its text three times: alone, after its title, and encoded."""


class PassageStore:
    """Random access to the passages of a corpus whose row offsets are known. The text stays in the kernel's file cache.

    Read, not memory-mapped: mapped pages count as this process's memory and would add up to the whole corpus, and a
    file that is cut short ends a process that has it mapped where here it is an error. The file may be replaced (by
    rename) meanwhile, but not written in place.
    """

    def __init__(self, path: Path, starts: npt.NDArray[np.int64], cache_bytes: int = 64 << 20) -> None:
        """``starts`` [N]: offset in bytes of each passage, ascending."""
        self._starts = starts
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CorpusError(f"corpus {path} cannot be read: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size
        self.path = path
        # Training repeats its queries, so the same passages come back within seconds.
        mean_bytes = max(1, self._size // max(1, len(starts)))
        self._cached_read = lru_cache(maxsize=cache_bytes // (_PER_BYTE * mean_bytes))(self._read)
        if self._size == 0:
            raise CorpusError(f"corpus {path} is empty")
        if len(starts) and int(starts[-1]) >= self._size:
            raise CorpusError(f"corpus {path} has {self._size} bytes, but the last passage starts at {int(starts[-1])}")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Document:
        """Return the passage of a row in [0, N); raises IndexError outside, negative rows included."""
        if not 0 <= row < len(self._starts):
            raise IndexError(f"row {row} of a corpus of {len(self._starts)} passages")
        return self._cached_read(row)

    def _read(self, row: int) -> Document:
        start = int(self._starts[row])
        following = int(self._starts[row + 1]) if row + 1 < len(self._starts) else self._size
        try:
            # Between two passages there may be blank lines.
            line, _, _ = os.pread(self._file, following - start, start).partition(b"\n")
            return parse_passage(line)
        except (OSError, ValueError) as error:
            raise CorpusError(f"{self.path}, row {row} at byte {start}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._cached_read.cache_clear()
        self._close()
