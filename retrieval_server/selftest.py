"""Asks an index for some of its own passages: a wrong encoder, a shifted corpus or a poor index type shows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from retrieval_server.corpus import parse_passage
from retrieval_server.errors import SelfTestError
from retrieval_server.types import Document, Retriever

PASSAGES = 100
TOP = 3
_WORDS = 100
_TRIES = 20


@dataclass(frozen=True, slots=True)
class SelfTest:
    """How many of the passages asked for came back where they should."""

    asked: int
    first: int
    in_top: int
    """Among the first ``TOP``."""
    example: str | None
    """Id of a passage that did not, if any."""

    def line(self) -> str:
        """Return the result in one line."""
        return f"selftest: of {self.asked} own passages {self.first} come back first, {self.in_top} in the top {TOP}"


def run(retriever: Retriever, corpus: Path, bound: float, seed: int = 0) -> SelfTest:
    """Ask for sampled passages by their own words; raises SelfTestError when too few are in the top ``TOP``.

    ``corpus`` is the plain JSON-lines file that the index serves from, ``bound`` the fraction that has to come back. A
    passage with the same contents counts as the passage itself. The same seed asks for the same passages.
    """
    asked = sample_passages(corpus, PASSAGES, seed)
    found = retriever.search([_question(passage) for passage in asked], TOP)
    answers = [(passage, [hit.document for hit in hits]) for passage, hits in zip(asked, found, strict=True)]
    missed = [passage.id for passage, found in answers if not _holds(found, passage)]
    first = sum(_holds(found[:1], passage) for passage, found in answers)
    result = SelfTest(len(answers), first, len(answers) - len(missed), missed[0] if missed else None)
    if result.in_top < bound * result.asked:
        raise SelfTestError(
            f"{result.line()}, below the bound of {bound:.0%} (missing, for example: {result.example}): the index does "
            "not find what it holds; check the encoder, its prefixes and the index type, or lower --selftest_bound"
        )
    return result


def _question(passage: Document) -> str:
    """Return the beginning of a passage: of a long one an encoder has seen no more."""
    return " ".join(passage.contents.split()[:_WORDS])


def _holds(found: Sequence[Document], passage: Document) -> bool:
    return any(document.id == passage.id or document.contents == passage.contents for document in found)


def sample_passages(path: Path, n: int, seed: int) -> list[Document]:
    """Return up to n different passages from random places of a plain JSON-lines corpus, without reading it whole.

    A place is a byte, so a passage after a long one is more likely than one after a short one.
    """
    draw = random.Random(seed)
    size = path.stat().st_size
    found: dict[int, Document] = {}
    with path.open("rb") as file:
        for _ in range(_TRIES * n):
            file.seek(draw.randrange(size))
            file.readline()
            start, line = _next_line(file)
            if not line:  # the end of the file: go round
                file.seek(0)
                start, line = _next_line(file)
            if start not in found:
                found[start] = parse_passage(line.removeprefix(b"\xef\xbb\xbf"))
            if len(found) == n:
                break
    return list(found.values())


def _next_line(file: BinaryIO) -> tuple[int, bytes]:
    """Return the offset and the bytes of the next line that holds something; no bytes at the end of the file."""
    start = file.tell()
    while (line := file.readline()) and not line.strip():
        start = file.tell()
    return start, line
