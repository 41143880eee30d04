"""The files of a corpus and their lines, whatever the format: streamed, with damage named by file and line.

A corpus is one file or a folder of shards, each JSON lines (plain, gzip or zstd) or parquet. A row of a parquet file
becomes the JSON line that it stands for, so that the rest of the service knows one format.
"""

from __future__ import annotations

import io
import json
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from retrieval_server.errors import CorpusError

Format = Literal["jsonl", "gzip", "zstd", "parquet"]

_MAGIC: tuple[tuple[bytes, Format], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"PAR1", "parquet"))
_SUFFIXES: dict[str, Format] = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
_SHARDS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst", ".parquet")
_OF = re.compile(r"-(\d+)-of-(\d+)\.")
_COLUMNS = ("id", "contents", "title", "text")
_ROWS_AT_ONCE = 1024
MAX_LINE_BYTES = 64 << 20
"""A longer line is refused: a file without line breaks would otherwise be read into memory whole."""


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of a corpus."""

    path: Path
    format: Format
    bytes: int

    @property
    def unit(self) -> str:
        """What its passages are counted in, for messages."""
        return "row" if self.format == "parquet" else "line"


def corpus_files(path: Path) -> list[CorpusFile]:
    """Return the file, or the shards of the folder in the order of their names.

    Raises CorpusError for what cannot be read, a folder without shards or with shards of several formats, and a set
    of numbered shards (``-00000-of-00006``) of which one is missing.
    """
    if not path.is_dir():
        return [_corpus_file(path)]
    visible = [child for child in sorted(path.iterdir()) if not child.name.startswith(".")]
    shards = [child for child in visible if child.name.endswith(_SHARDS)]
    if not shards:
        found = ", ".join(child.name for child in visible[:5]) or "nothing"
        raise CorpusError(f"corpus {path} is a folder without shards ({', '.join(_SHARDS)}); found: {found}")
    files = [_corpus_file(shard) for shard in shards]
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        raise CorpusError(f"corpus {path} holds shards of several formats ({', '.join(formats)}); name one file")
    _check_numbering(path, shards)
    return files


def _corpus_file(path: Path) -> CorpusFile:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorpusError(f"corpus {path} is not a regular file; a corpus is read more than once")
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise CorpusError(f"corpus {path} cannot be read: {error.strerror}") from error
    found: Format = next((name for magic, name in _MAGIC if head.startswith(magic)), "jsonl")
    named = _SUFFIXES.get(path.suffix)
    if named is not None and named != found:
        raise CorpusError(f"corpus {path} is named {path.suffix}, but begins with {head!r}, which is not {named}")
    return CorpusFile(path, found, status.st_size)


def _check_numbering(folder: Path, shards: list[Path]) -> None:
    totals: dict[int, set[int]] = {}
    for shard in shards:
        if match := _OF.search(shard.name):
            totals.setdefault(int(match[2]), set()).add(int(match[1]))
    for total, present in totals.items():
        first = 0 if 0 in present else 1
        missing = sorted(set(range(first, first + total)) - present)
        if missing:
            shown = ", ".join(map(str, missing[:5]))
            raise CorpusError(f"corpus {folder} has {len(present)} of {total} shards; missing: {shown}")


class FileLines:
    """Iterates once over the lines of one file (rows, for parquet), each with its line break if it has one.

    Raises CorpusError, naming the file and the line, for what is damaged.
    """

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._consumed: Callable[[], int] = lambda: 0
        self.number = 0
        """Number of the line that was yielded last, from 1."""

    @property
    def position(self) -> int:
        """Bytes of the file consumed so far, as stored: for progress."""
        return min(self._consumed(), self._file.bytes)

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._rows() if self._file.format == "parquet" else self._lines()
        except OSError as error:
            raise self._damaged(str(error.strerror or error)) from error

    def _damaged(self, reason: str) -> CorpusError:
        return CorpusError(f"{self._file.path}, after {self._file.unit} {self.number}: {' '.join(reason.split())}")

    def _lines(self) -> Iterator[bytes]:
        with ExitStack() as stack:
            stored, stream = _open(self._file, stack)
            self._consumed = stored.tell
            while line := stream.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise self._damaged(f"a line of more than {MAX_LINE_BYTES >> 20} MiB; this is not JSON lines")
                self.number += 1
                yield line
            self._consumed = lambda: self._file.bytes

    def _rows(self) -> Iterator[bytes]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self._file.path, page_checksum_verification=True, pre_buffer=False) as table:
                names = table.schema_arrow.names
                if "id" not in names or not {"contents", "text"} & set(names):
                    raise CorpusError(
                        f"{self._file.path} needs the columns id and contents (or text); it has: {', '.join(names)}"
                    )
                total = max(1, table.metadata.num_rows)
                self._consumed = lambda: self._file.bytes * self.number // total
                for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[name for name in _COLUMNS if name in names]):
                    for row in batch.to_pylist():
                        self.number += 1
                        yield self._json(row)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error

    def _json(self, row: dict[str, Any]) -> bytes:
        try:
            text = json.dumps({key: value for key, value in row.items() if value is not None}, ensure_ascii=False)
        except TypeError as error:
            raise CorpusError(f"{self._file.path}, row {self.number}: {error}") from None
        return text.encode("utf-8") + b"\n"


def _open(file: CorpusFile, stack: ExitStack) -> tuple[Any, IO[bytes]]:
    """Return (the file as stored, the stream of its decompressed bytes), closed by ``stack``."""
    if file.format == "jsonl":
        plain = stack.enter_context(file.path.open("rb"))
        return plain, plain
    import pyarrow  # its streams, unlike zstandard's own, report a truncated file

    stored = stack.enter_context(pyarrow.OSFile(str(file.path)))
    stream = stack.enter_context(pyarrow.CompressedInputStream(stored, file.format))
    return stored, stack.enter_context(io.BufferedReader(stream, 1 << 20))
