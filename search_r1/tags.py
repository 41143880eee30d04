"""The tag vocabulary of an episode and the one map that keeps foreign text from using it."""

from __future__ import annotations

import re
from collections.abc import Sequence

THINK, SEARCH, INFORMATION, ANSWER = "think", "search", "information", "answer"
KNOWN_TAGS = (THINK, SEARCH, INFORMATION, ANSWER)
STOP_STRINGS = ("</search>", "</answer>")
"""What ends a generation; the string stays in the output."""

TAG_PATTERN = re.compile(rf"</?(?:{'|'.join(KNOWN_TAGS)})>")


def escape_tags(text: str, special_tokens: Sequence[str] = ()) -> str:
    """Replace the ``<`` of every known tag, and of the given special tokens, by ``&lt;``.

    Passages and conversation text go through this before the model sees them, so that they can neither act, nor
    answer, nor close a chat turn. Rewards compare texts under the same map.
    ``escape_tags("a </information> b")`` is ``"a &lt;/information> b"``; ``"1 < 2 <b>"`` is unchanged.
    """
    text = TAG_PATTERN.sub(lambda match: "&lt;" + match.group()[1:], text)
    for token in special_tokens:
        if token.startswith("<"):
            text = text.replace(token, "&lt;" + token[1:])
    return text
