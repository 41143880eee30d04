"""What a search API returns, cleaned, and how it becomes documents."""

from __future__ import annotations

import hashlib
import html
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from retrieval_server.types import Document

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
# Parameters that say where a click came from and never what a page shows.
_TRACKING = re.compile(r"(utm_\w+|gclid|fbclid|msclkid|dclid|yclid|mc_[ce]id|igshid|srsltid)", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a search. Every field may be empty, never all of title and snippet."""

    title: str
    url: str
    """Canonical, see ``canonical_url``."""
    snippet: str

    @classmethod
    def of(cls, title: Any, url: Any, snippet: Any) -> Result | None:
        """Clean what an answer holds, which may be of any type or absent; None when there is nothing to show."""
        result = cls(clean(title), canonical_url(url), clean(snippet))
        return result if result.title or result.snippet else None


@dataclass(frozen=True, slots=True)
class ResultPage:
    """One parsed answer of an API."""

    results: tuple[Result, ...]
    lead: tuple[Result, ...] = ()
    """What the API shows above its results, such as an answer box."""
    tail: tuple[Result, ...] = ()
    """What fills up a list that is too short, such as related questions."""
    more: bool = False
    """The API has a next page."""


def clean(text: Any) -> str:
    """Return text on one line, without markup, control characters and lone surrogates; "" for what is not text."""
    if not isinstance(text, str):
        return ""
    return one_line(html.unescape(_TAG.sub("", text)))


def one_line(text: str) -> str:
    """Return text with a blank for every run of white space and control characters; lone surrogates become "?"."""
    valid = text.encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in valid).split())


def canonical_url(url: Any) -> str:
    """Return one spelling for addresses of the same page; "" for what is not an http address.

    Example: ``HTTP://Example.org:80/a?utm_source=x&id=1#top`` gives ``http://example.org/a?id=1``.
    """
    if not isinstance(url, str):
        return ""
    try:
        parts = urlsplit(url.strip())
        scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower().rstrip("."), parts.port
    except ValueError:
        return ""
    if scheme not in _PORTS or not host or any(c.isspace() or not c.isprintable() for c in host):
        return ""
    host = f"[{host}]" if ":" in host else host
    place = host if port in (None, _PORTS[scheme]) else f"{host}:{port}"
    fields = parse_qsl(parts.query, keep_blank_values=True)
    kept = [(name, value) for name, value in fields if not _TRACKING.fullmatch(name)]
    query = parts.query if len(kept) == len(fields) else urlencode(kept)
    # Cleaned part by part: a query of nothing but what is dropped would leave a question mark.
    return urlunsplit((scheme, place, one_line(parts.path) or "/", one_line(query), "")).replace(" ", "%20")


def document(result: Result, text: str) -> Document:
    """Return a result as a document with this text; a result without an address is known by its contents."""
    title = result.title or urlsplit(result.url).hostname or "untitled"
    contents = f'"{title}"\n{text}'
    name = result.url or f"sha256:{hashlib.sha256(contents.encode()).hexdigest()[:16]}"
    return Document.of(name, contents, title, text)
