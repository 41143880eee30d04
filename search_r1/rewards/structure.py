"""Is the think/search/answer structure valid? One state machine for episodes and for saved text.

think comes first; after think comes search or answer; after search comes information, written by the environment; after
information comes think again, or (ChatR1's relaxed form) the answer; exactly one answer, last; nothing but whitespace
outside blocks; no block inside another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_r1.tags import ANSWER, INFORMATION, SEARCH, TAG_PATTERN, THINK

_START = ""
_NEXT: Mapping[str, frozenset[str]] = {
    _START: frozenset({THINK}),
    THINK: frozenset({SEARCH, ANSWER}),
    SEARCH: frozenset({INFORMATION}),
    INFORMATION: frozenset({THINK, ANSWER}),
    ANSWER: frozenset(),
}
_STRICT_AFTER_INFORMATION = frozenset({THINK})


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an episode's text behind the prompt."""

    text: str
    from_model: bool
    """True: an information block in it is an invention and makes the structure invalid."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` is ``valid`` or the first thing that is wrong, in words."""

    valid: bool
    reason: str


def check_structure(pieces: Sequence[Piece], relaxed: bool = True) -> Verdict:
    """Check an episode. ``relaxed`` allows the answer directly after information (ChatR1; Search-R1 does not)."""
    machine = _Machine(relaxed)
    for piece in pieces:
        reason = machine.read(piece)
        if reason is not None:
            return Verdict(False, reason)
    reason = machine.end()
    return Verdict(reason is None, reason or "valid")


def check_text(text: str, relaxed: bool = True) -> Verdict:
    """Check saved text, whose information blocks have to be taken on trust."""
    return check_structure([Piece(text, from_model=False)], relaxed)


class _Machine:
    def __init__(self, relaxed: bool) -> None:
        self._relaxed = relaxed
        self._last = _START
        self._open: str | None = None

    def read(self, piece: Piece) -> str | None:
        """Take one piece; return what is wrong with it, or None."""
        position = 0
        for match in TAG_PATTERN.finditer(piece.text):
            reason = self._between(piece.text[position : match.start()]) or self._tag(match.group(), piece.from_model)
            if reason is not None:
                return reason
            position = match.end()
        return self._between(piece.text[position:])

    def end(self) -> str | None:
        """Return what is missing at the end, or None."""
        if self._open is not None:
            return f"<{self._open}> is not closed"
        return None if self._last == ANSWER else "there is no answer"

    def _between(self, text: str) -> str | None:
        if self._open is None and text.strip():
            return f"text outside of blocks: {text.strip()[:40]!r}"
        return None

    def _tag(self, tag: str, from_model: bool) -> str | None:
        name = tag.strip("</>")
        if name == INFORMATION and from_model:
            return "an information block that the model wrote itself"
        if tag.startswith("</"):
            if self._open != name:
                return f"{tag} without <{name}>"
            self._open, self._last = None, name
            return None
        if self._open is not None:
            return f"{tag} inside <{self._open}>"
        allowed = _NEXT[self._last]
        if self._last == INFORMATION and not self._relaxed:
            allowed = _STRICT_AFTER_INFORMATION
        if name not in allowed:
            return f"{tag} at the start" if self._last == _START else f"{tag} after {self._last}"
        self._open = name
        return None
