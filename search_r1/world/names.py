"""Invented names, split by hash so that no two splits can ever share one.

A stem is one initial and one final syllable ("Tor" + "va"). The syllables are chosen so that the shipped tokenizer
encodes every stem as exactly two tokens: a name nobody has seen is then as easy to copy as one that was seen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping

# Final syllables never start with a letter that may close a syllable ("r", "n"): no name can be split in two ways.
_INITIAL_ONSETS = ("B", "D", "F", "G", "H", "J", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z")
_FINAL_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "p", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")

INITIAL_SYLLABLES: tuple[str, ...] = tuple(o + v + c for o in _INITIAL_ONSETS for v in _VOWELS for c in ("", "r"))
FINAL_SYLLABLES: tuple[str, ...] = tuple(o + v + c for o in _FINAL_ONSETS for v in _VOWELS for c in ("", "n"))

# A stem that is also a kind word would be one token of its own.
_RESERVED = frozenset({"Lake"})

#: Share of all stems owned by each split, in percent. ``practice`` feeds tokenizer training and cold start only.
SPLIT_SHARES: Mapping[str, int] = {"test": 8, "dev": 8, "train": 24, "practice": 60}


def split_of(stem: str) -> str:
    """Name of the split that owns ``stem``: a pure function of its spelling, hence the same in every world and run."""
    bucket = zlib.crc32(stem.encode("ascii")) % 100
    for split, share in SPLIT_SHARES.items():
        if bucket < share:
            return split
        bucket -= share
    raise AssertionError("split shares must add up to 100")


def stems_of(split: str) -> list[str]:
    """All stems of one split in a fixed order. Raises ``KeyError`` for an unknown split."""
    if split not in SPLIT_SHARES:
        raise KeyError(f"unknown split {split!r}; known: {', '.join(SPLIT_SHARES)}")
    stems = (initial + final for initial in INITIAL_SYLLABLES for final in FINAL_SYLLABLES)
    return [stem for stem in stems if stem not in _RESERVED and split_of(stem) == split]


class NamePool:
    """Draws stems of one split without replacement."""

    def __init__(self, split: str, rng: random.Random) -> None:
        self._stems = stems_of(split)
        rng.shuffle(self._stems)

    def draw(self) -> str:
        """The next unused stem. Raises ``IndexError`` when the split is exhausted."""
        if not self._stems:
            raise IndexError("name pool exhausted: ask for fewer entities or give the split a larger share")
        return self._stems.pop()
