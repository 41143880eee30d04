"""Text that can be tokenized and written again: the one check for everything that comes from outside."""

from __future__ import annotations

HALF_A_PAIR = "holds half of a surrogate pair (\\ud800 to \\udfff), which is no valid Unicode"


def is_whole(text: str) -> bool:
    """False for text with half a surrogate pair, which JSON and broken command lines carry, but nothing can encode."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
