"""What the model is shown after a search: passages inside a closed information block, within a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search_r1.codec import Codec
from verl.types import Document

_OPEN, _CLOSE = "\n\n<information>", "</information>\n\n"
NOTHING_FOUND = "No documents were found."
"""What stands in the information block when a search has no hits."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a search."""

    token_ids: tuple[int, ...]
    """[S] at most ``max_obs_length``; always ends with the closed shell."""
    documents: tuple[Document, ...]
    """As shown: escaped, cut where the text was cut. Documents that were cut away entirely have an empty text."""
    truncated: bool


def build_observation(codec: Codec, documents: Sequence[Document], max_obs_length: int) -> Observation:
    """Render the passages in rank order as ``\\n\\n<information>Doc 1(Title: ..) ..\\nDoc 2 ..</information>\\n\\n``.

    When that is too long, the shell's tokens are reserved first and the passages share the rest: each takes what it
    needs in rank order, but at least budget / (2k) tokens stay for every later one. Cuts are at token boundaries.
    The result is encoded once, as one text. Raises ValueError when not even the shell fits.
    """
    shown = [replace(d, title=codec.escape(d.title.strip()), text=codec.escape(d.text.strip())) for d in documents]
    pieces = [f"Doc {rank}(Title: {d.title}) {d.text}" for rank, d in enumerate(shown, start=1)] or [NOTHING_FOUND]
    token_ids = codec.encode(_wrap(pieces))
    if len(token_ids) <= max_obs_length:
        return Observation(token_ids, tuple(shown), truncated=False)
    return _shortened(codec, shown, pieces, max_obs_length)


def shell_tokens(codec: Codec) -> int:
    """Return the length of an observation without passages: the least ``max_obs_length`` there can be."""
    return len(codec.encode(_wrap([""])))


def _shortened(codec: Codec, shown: list[Document], pieces: list[str], max_obs_length: int) -> Observation:
    shell = shell_tokens(codec)
    if shell > max_obs_length:
        raise ValueError(f"max_obs_length={max_obs_length} cannot hold the {shell} tokens of an empty observation")
    encoded = [codec.encode(piece) for piece in pieces]
    budget = max_obs_length - shell - (len(pieces) - 1) * len(codec.encode("\n"))
    while True:
        shares = share_budget([len(ids) for ids in encoded], budget)
        cut = [
            piece if share >= len(ids) else codec.cut(ids, share)
            for piece, ids, share in zip(pieces, encoded, shares, strict=True)
        ]
        token_ids = codec.encode(_wrap([piece.rstrip() for piece in cut if piece.strip()]))
        if len(token_ids) <= max_obs_length:
            return Observation(token_ids, _as_shown(shown, pieces, cut), truncated=True)
        # Text cut between two tokens can encode into more tokens than it was cut from; give that back.
        budget -= max(len(token_ids) - max_obs_length, 1)
        if budget <= 0:
            return Observation(codec.encode(_wrap([""])), _as_shown(shown, pieces, [""] * len(pieces)), truncated=True)


def share_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens each passage gets: rank order, at least ``budget // (2k)`` kept for each later one.

    ``share_budget([80, 50, 10], 60)`` is ``[40, 10, 10]``: the floor is 10, the first leaves 20 for the other two.
    """
    floor = budget // (2 * len(lengths)) if lengths else 0
    shares: list[int] = []
    remaining = max(budget, 0)
    for rank, length in enumerate(lengths):
        reserved = sum(min(later, floor) for later in lengths[rank + 1 :])
        share = min(length, max(remaining - reserved, 0))
        shares.append(share)
        remaining -= share
    return shares


def _wrap(pieces: Sequence[str]) -> str:
    return f"{_OPEN}{chr(10).join(pieces)}{_CLOSE}"


def _as_shown(documents: list[Document], pieces: list[str], cut: list[str]) -> tuple[Document, ...]:
    result = []
    for document, piece, kept in zip(documents, pieces, cut, strict=False):
        header = len(piece) - len(document.text)
        result.append(document if kept == piece else replace(document, text=kept[header:].rstrip()))
    return tuple(result)
