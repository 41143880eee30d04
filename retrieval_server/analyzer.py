"""Text to terms, for passages and queries alike: the one place where both are decided."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata

from retrieval_server import lucene_words
from retrieval_server.errors import SettingsError

_WORD = re.compile(r"\b\w\w+\b")

# The list that Lucene's English analyzer uses.
_ENGLISH = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
    "this to was will with"
)
ENGLISH_STOPWORDS = frozenset(_ENGLISH.split())
STOPWORDS: dict[str, frozenset[str]] = {"english": ENGLISH_STOPWORDS, "none": frozenset()}

_PROBE = (
    "The cities' relational studies were generously organised in 1984, yet happily nobody's skies or ponies had "
    "agreed: running, easily connected caresses of hopping, national, conditional, vietnamization, Zürich café."
)


class Analyzer:
    """Lower-cases, splits into words, drops stop words, stems.

    With the stemmer ``lucene`` the words are Lucene's too; else they are runs of at least two word characters.

    Not safe for several threads at once (the stemmer keeps a buffer).
    """

    def __init__(self, stopwords: str, stemmer: str) -> None:
        """``stopwords``: english or none. ``stemmer``: lucene, none or a Snowball language. Raises SettingsError."""
        if stopwords not in STOPWORDS:
            raise SettingsError(f"stopwords {stopwords!r} is unknown; known: {', '.join(sorted(STOPWORDS))}")
        self._stopwords = STOPWORDS[stopwords]
        self.words: Callable[[str], list[str]] = lucene_words.words if stemmer == "lucene" else _words
        """Return the words of a text in order; ``term`` says what each becomes."""
        # A corpus of millions of passages has few distinct words; the cache takes stemming out of the profile.
        self._stem = lru_cache(maxsize=1 << 18)(_stem_function(stemmer))

    def terms(self, text: str) -> list[str]:
        """Return the terms of a text in order, repetitions included."""
        stopwords, stem = self._stopwords, self._stem
        return [stem(word) for word in self.words(text) if word not in stopwords]

    def term(self, word: str) -> str | None:
        """Return the term of a word, or None for a stop word."""
        return None if word in self._stopwords else self._stem(word)

    def fingerprint(self) -> str:
        """Return a short digest of what this analyzer makes of a fixed text.

        An index keeps it: an analyzer that behaves differently (another stemmer version, say) must not query it.
        """
        return hashlib.sha256(" ".join(self.terms(_PROBE)).encode()).hexdigest()[:16]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _stem_function(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    if name == "lucene":
        return lucene_words.stem_function()
    import Stemmer  # only indexes that stem need it

    if name not in Stemmer.algorithms():
        known = ", ".join(sorted(["lucene", "none", *Stemmer.algorithms()]))
        raise SettingsError(f"stemmer {name!r} is unknown; known: {known}")
    stem: Callable[[str], str] = Stemmer.Stemmer(name, 0).stemWord
    return stem


def stemmer_version() -> str:
    """Return the installed version of PyStemmer, or ``not installed``."""
    try:
        return metadata.version("PyStemmer")
    except metadata.PackageNotFoundError:
        return "not installed"
