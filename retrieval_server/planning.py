"""What building an index will take, before it runs: size on disk, memory, time, and what its kind costs in recall."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from retrieval_server.corpus import CorpusReader, RawLine
from retrieval_server.errors import CorpusError
from retrieval_server.progress import duration


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected for N passages, in bytes and in seconds of an otherwise idle machine."""

    passages: int
    measured_on: str
    index_bytes: int
    """Without the copy of the passages."""
    copy_bytes: int
    work_bytes: int
    """Beside the index while it is built; gone afterwards."""
    build_memory: int
    serve_memory: int
    seconds: float
    recall: str
    """Expected loss against an exact search, and where the figure comes from."""

    def lines(self, name: str, folder: Path) -> list[str]:
        """Return the estimate as lines of text."""
        copy = f" and a copy of the passages, {_size(self.copy_bytes)}" if self.copy_bytes else ""
        return [
            f"plan: {name} over {self.passages:,} passages, as {folder}",
            f"  measured on  {self.measured_on}",
            f"  disk         {_size(self.index_bytes)}{copy}; {_size(self.work_bytes)} more while it is built",
            f"  memory       {_size(self.build_memory)} to build, {_size(self.serve_memory)} to serve",
            f"  time         about {duration(self.seconds)}",
            f"  recall       {self.recall}",
        ]


def _size(n: int) -> str:
    """Return a number of bytes in the decimal unit that fits.

    >>> _size(61_440_000_000)
    '61.4 GB'
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if n >= factor:
            return f"{n / factor:.1f} {unit}"
    return f"{n / 1000:.0f} kB"


@dataclass(frozen=True, slots=True)
class Sample:
    """The first passages of a corpus and what they say about all of it."""

    lines: list[RawLine]
    line_bytes: float
    """JSON line of a passage, on average."""
    passages: int
    """Of the whole corpus, extrapolated from the part that was read."""
    needs_copy: bool

    def described(self) -> str:
        """Return what was read, in words."""
        return f"the first {len(self.lines):,} passages of the corpus ({self.line_bytes:,.0f} bytes each)"


def sample(path: Path, most: int) -> Sample:
    """Read at most ``most`` passages from the beginning of a corpus. Raises CorpusError."""
    reader = CorpusReader(path)
    lines: list[RawLine] = []
    fraction = 0.0
    with closing(reader.raw_lines()) as rows:
        for line in rows:
            lines.append(line)
            fraction = reader.fraction
            if len(lines) == most:
                break
        else:
            fraction = 1.0
    if not lines:
        raise CorpusError(f"corpus {path} has no passage")
    return Sample(lines, reader.size / len(lines), round(len(lines) / fraction), reader.needs_copy)
