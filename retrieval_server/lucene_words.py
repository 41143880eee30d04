"""Words and stems as Lucene's English analyzer makes them, so that both kinds of BM25 index rank alike.

Words follow Unicode's default word boundaries (UAX #29), as in Lucene's standard tokenizer: ``U.S.A``, ``don't`` and
``3.5`` are one word, ``e-mail`` is two, single characters count, each ideograph is a word. Left out: emoji and signs
like the copyright sign, which Lucene keeps as words, and its cut after 255 characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache

# Between two letters, and between two digits, these join what would be two words.
_BETWEEN_LETTERS = ".:'\u2018\u2019\u00b7\u0387\u055f\u05f4\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a"
_BETWEEN_DIGITS = (
    ".,;'\u2018\u2019\u037e\u0589\u060c\u060d\u066c\u07f8\u2024\u2044"
    "\ufe10\ufe14\ufe50\ufe52\ufe54\uff07\uff0c\uff0e\uff1b"
)
_IDEOGRAPHS = "\u3005\u3007\u3041-\u3096\u309d-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Han and Hiragana: every character is a word."""
_CHARACTERS = 0x20000
"""Planes 0 and 1: beyond them there are ideographs only."""

# Six in seven English passages are plain ASCII, and this pattern takes half the time.
_ASCII_WORD = re.compile(r"\w+(?:(?:[.:'](?=[a-z])(?<=[a-z].)|[.,;'](?=\d)(?<=\d.))\w+)*", re.ASCII)


def words(text: str) -> list[str]:
    """Return the words of a text, lower case, without the possessive s."""
    if text.isascii():
        text = text.lower()
        found = _ASCII_WORD.findall(text)
        if "'s" not in text and "_" not in text:  # nothing for the last line to do
            return found
    else:  # Python makes two characters of a dotted capital I, Lucene one
        found = _word_pattern().findall(text.replace("\u0130", "i").lower())
    return [_without_possessive(word) for word in found if word.strip("_")]


def _without_possessive(word: str) -> str:
    return word[:-2] if word.endswith(("'s", "\u2019s", "\uff07s")) else word


@lru_cache(maxsize=1)
def _word_pattern() -> re.Pattern[str]:
    """Return the pattern for text of any script; made from Python's character database in a tenth of a second."""
    ideograph = re.compile(f"[{_IDEOGRAPHS}]")
    letters, digits, marks = [], [], []
    for code in range(_CHARACTERS):
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Nd":
            digits.append(code)
        elif category[0] == "M" or (category == "Cf" and character != "\u200b"):
            marks.append(code)
        elif (category[0] == "L" or category == "Nl") and not ideograph.match(character):
            letters.append(code)
    letter, digit, mark = map(_character_class, (letters, digits, marks))
    word = f"[{letter}{digit}_][{letter}{digit}{mark}_]*"
    joint = f"[{_BETWEEN_LETTERS}](?=[{letter}])(?<=[{letter}].)|[{_BETWEEN_DIGITS}](?=[{digit}])(?<=[{digit}].)"
    return re.compile(f"{word}(?:(?:{joint})[{letter}{digit}{mark}_]+)*|[{_IDEOGRAPHS}][{mark}]*")


def _character_class(codes: Iterable[int]) -> str:
    """Return sorted code points as the inside of a character class."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def stem_function() -> Callable[[str], str]:
    """Return Porter's stemmer in the version that Lucene has, for lower-case words.

    It is Snowball's ``porter`` but for what Porter's own program changed after his paper: -logi becomes -log, -bli
    becomes -ble, and words of two letters stay.
    """
    import Stemmer

    porter: Callable[[str], str] = Stemmer.Stemmer("porter", 0).stemWord

    def stem(word: str) -> str:
        if len(word) <= 2:
            return word
        changed = _CHANGED_ENDING.fullmatch(word)
        if changed is not None and _VOWEL_CONSONANT.search(changed["stem"]):
            word = changed["stem"] + ("log" if changed["log"] else "ble")
        return porter(word)

    return stem


_CHANGED_ENDING = re.compile(r"(?P<stem>.+)(?:(?P<log>log)|bl)(?:y|i|ies|is|ys)")
# Porter's "measure above 0": a vowel before a consonant. y is a consonant after a vowel and a vowel after a consonant.
_VOWEL_CONSONANT = re.compile(r"[aeiou][^aeiou]|[^aeiou]y[^aeiou]")
