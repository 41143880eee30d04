"""Prompt templates: how a conversation becomes the content of one user message.

A template is a pure function ``(history, question) -> content``. Its name and version identify the exact wording: a
change of wording is a new version. Histories alternate question, answer, oldest first; blank entries (a side that said
nothing) are left out. A template of one's own is a text file with ``{question}`` and, to show the conversation,
``{context}``; every other brace is text. Its version is a hash of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from search_r1.rendered import ASSISTANT, USER
from verl.errors import ConfigError
from verl.registry import Registry

Template = Callable[[Sequence[str], str], str]

_CHATR1 = """\
You are a helpful assistant in a conversation. Give a complete and informative answer to the user's last query.
The query may be short, ambiguous or elliptic: use the conversation so far to work out what is meant.
- Always reason first, inside <think> and </think>, also each time you have received new information.
- When you need facts that you do not have, write a search query that can be understood without the conversation: \
<search> your query </search>
- The retrieved passages will then be given to you between <information> and </information>.
- You may search more than once, one query at a time.
- When you are ready, write the final, complete answer: <answer> your answer </answer>

Conversation context:
{context}

User query:
{question}
"""

_SEARCH_R1 = """\
Answer the question below. Whenever you receive new information, first reason about it inside <think> and </think>. \
If, after reasoning, you find that you lack some knowledge, you can call a search engine with \
<search> query </search>, and it will return the best passages between <information> and </information>. You can \
search as often as you want. As soon as no further knowledge is needed, give the answer inside <answer> and </answer> \
without explanations, for example <answer> Canberra </answer>.
{context}Question: {question}
"""


def _context(history: Sequence[str]) -> str:
    lines = [f"{ASSISTANT if index % 2 else USER}{text}" for index, text in enumerate(history) if text.strip()]
    return "\n".join(["<context>", *lines, "</context>"])


def _with_mark(question: str) -> str:
    return question if question.endswith("?") else f"{question}?"


def chatr1(history: Sequence[str], question: str) -> str:
    """Instruct, show the conversation, ask. For instruction-tuned models."""
    return _CHATR1.format(context=_context(history), question=question)


def search_r1(history: Sequence[str], question: str) -> str:
    """Single-question instruction; a conversation, when there is one, stands before the question."""
    context = f"{_context(history)}\n" if history else ""
    return _SEARCH_R1.format(context=context, question=_with_mark(question))


def compact(history: Sequence[str], question: str) -> str:
    """The conversation and the question, nothing else. For models that were trained on exactly this form."""
    return f"{_context(history)}\nUser: {question}"


TEMPLATES: Registry[Template] = Registry(
    "prompt template", {"chatr1": chatr1, "search_r1": search_r1, "compact": compact}
)
"""``data.template=row`` is no template: it takes the row's own rendered prompt."""

_VERSIONS: Mapping[str, int] = {"chatr1": 1, "search_r1": 1, "compact": 1, "row": 1}
FILE_ENDING = ".txt"
"""What tells the path of a template from a name."""


def template_named(name: str) -> Template:
    """Return a template by name, or that of a file; raises ConfigError for a file that cannot be one."""
    return partial(_fill, _file_text(name)) if name.endswith(FILE_ENDING) else TEMPLATES[name]


def template_version(name: str) -> str:
    """Return ``v<number>`` of a built-in template, ``sha256:<12 digits>`` of a file."""
    if name.endswith(FILE_ENDING):
        return f"sha256:{hashlib.sha256(_file_text(name).encode()).hexdigest()[:12]}"
    return f"v{_VERSIONS[name]}"


def _file_text(name: str) -> str:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.template: {name!r} cannot be read ({error}); give a text file or a name") from None
    if text.count("{question}") != 1 or text.count("{context}") > 1:
        raise ConfigError(f"data.template: {name!r} must hold {{question}} once, and {{context}} at most once")
    return text


def _fill(text: str, history: Sequence[str], question: str) -> str:
    """Fill a template's places at once: what is filled in is never searched for places."""
    before, _, after = text.partition("{question}")
    context = _context(history)
    return question.join(part.replace("{context}", context) for part in (before, after))
