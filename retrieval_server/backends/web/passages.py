"""From a page to a passage: the main text, and the window of it that a search result is about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

_WORD = re.compile(r"\w+")
_CHARSET = re.compile(r"charset=[\"']?([\w.:-]+)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_MAX_TEXT_CHARS = 400_000
_MAX_LEAD_CHARS = 300
"""How far before its first matching word a window may begin, looking for the start of a sentence."""


def extract_text(body: bytes, content_type: str) -> str:
    """Return the main text of a page, without menus and comments; "" when there is none."""
    declared = _CHARSET.search(content_type)
    page: str | bytes = body
    if declared is not None:
        with suppress(LookupError, UnicodeDecodeError):
            page = body.decode(declared[1])
    if content_type.startswith("text/plain"):
        plain = page if isinstance(page, str) else page.decode("utf-8", "replace")
        return plain[:_MAX_TEXT_CHARS].strip()
    import trafilatura  # takes half a second

    text = trafilatura.extract(page, include_comments=False, include_tables=True)
    return (text or "")[:_MAX_TEXT_CHARS].strip()


def best_window(text: str, snippet: str, query: str, size: int) -> str:
    """Return the passage of at most ``size`` characters that holds most of the snippet's and the query's words.

    Words count once per passage, more when they are rare in the text, and twice when both ask for them; of equally good
    passages the first is taken. It begins and ends with a sentence where that is possible. "" when no word of the two
    occurs at all: then the page does not hold what was found.
    """
    spans = [(match.group().lower(), match.start(), match.end()) for match in _WORD.finditer(text)]
    frequency = Counter(word for word, _, _ in spans)
    wanted = Counter(set(_words(snippet))) + Counter(set(_words(query)))
    weight = {word: n / frequency[word] ** 0.5 for word, n in wanted.items() if word in frequency}
    hits = [(word, start, end) for word, start, end in spans if word in weight]
    if not hits:
        return ""
    first, last = _densest(hits, weight, size)
    start = _sentence_start(text, hits[first][1], max(0, hits[last][2] - size))
    return _cut(text, start, size, hits[last][2])


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _densest(hits: Sequence[tuple[str, int, int]], weight: dict[str, float], size: int) -> tuple[int, int]:
    """Return (first, last) of the run of hits within ``size`` characters whose distinct words weigh most.

    Of equally heavy runs the first, and without words at its beginning that come again in it.
    """
    inside: Counter[str] = Counter()
    total, best, first = 0.0, -1.0, 0
    result = (0, 0)
    for last, (word, _, end) in enumerate(hits):
        inside[word] += 1
        if inside[word] == 1:
            total += weight[word]
        while first < last and (end - hits[first][1] > size or inside[hits[first][0]] > 1):
            dropped = hits[first][0]
            inside[dropped] -= 1
            if not inside[dropped]:
                total -= weight[dropped]
            first += 1
        if total > best + 1e-9:
            best, result = total, (first, last)
    return result


def _sentence_start(text: str, position: int, earliest: int) -> int:
    """Return the start of the sentence that ``position`` is in, or a word's start, not before ``earliest``."""
    earliest = max(earliest, position - _MAX_LEAD_CHARS)
    starts = [earliest + match.end() for match in _SENTENCE_END.finditer(text[earliest:position])]
    if starts:
        return starts[-1]
    return 0 if earliest == 0 else position


def _cut(text: str, start: int, size: int, needed: int) -> str:
    """Return up to ``size`` characters from ``start``, ending with a sentence or else a word, not before ``needed``."""
    end = min(len(text), start + size)
    needed = min(end, max(needed, start + size // 2))
    ends = [end] if end == len(text) else [match.start() + start for match in _SENTENCE_END.finditer(text[start:end])]
    if not ends or ends[-1] < needed:
        ends = [end if text[end].isspace() else max(text.rfind(" ", start, end), text.rfind("\n", start, end))]
    return text[start : ends[-1] if ends[-1] >= needed else end].strip()
