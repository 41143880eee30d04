"""Prompt templates and fitting a conversation into the first context.

A template is a pure function ``(history, question) -> content of one user message``. Its name and version identify the
exact wording: a change of wording is a new version. Histories alternate question, answer, oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
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
    lines = [f"{'Assistant' if index % 2 else 'User'}: {text}" for index, text in enumerate(history)]
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

TEMPLATE_VERSIONS: Mapping[str, int] = {"chatr1": 1, "search_r1": 1, "compact": 1, "row": 1}


class Refusal(StrEnum):
    """Why a row cannot become a prompt."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """Instruction and current question alone exceed ``data.max_start_length``."""
    CONTEXT_UNPARSABLE = "context_unparsable"
    """A rendered prompt is too long and its history cannot be recognised."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A row's first context. Exactly one of ``token_ids`` (non-empty) and ``refusal`` is meaningful."""

    token_ids: tuple[int, ...]
    dropped_turns: int = 0
    """Oldest question-answer pairs left out to fit."""
    refusal: Refusal | None = None


class PromptBuilder:
    """Renders and encodes rows with one template.

    Example: ``PromptBuilder(codec, "compact", history="all", max_start_length=2048).build(row).token_ids``.
    """

    def __init__(self, codec: Codec, template: str, history: str | int, max_start_length: int) -> None:
        """``history`` is ``"all"`` or the number of last question-answer pairs to show."""
        if history != "all" and not (isinstance(history, int) and history >= 0):
            raise ConfigError(f"data.history: {history!r} is neither 'all' nor a number of turns")
        self._codec = codec
        self._template = None if template == "row" else TEMPLATES[template]
        self._history = history
        self._max_length = max_start_length

    def build(self, row: Row) -> FittedPrompt:
        """Return the longest form that fits: whole oldest turns are dropped, never instruction or question.

        Raises ConfigError when the template needs a column that the row lacks.
        """
        if self._template is None:
            return self._fit_rendered(row)
        if row.history is None:
            raise ConfigError(
                f"data.template: row {row.qid!r} carries no history column; set data.template=row to use its own prompt"
            )
        history = [self._codec.escape(text) for text in row.history]
        if self._history != "all":
            history = history[max(len(history) - 2 * int(self._history), 0) :]
        question = self._codec.escape(row.question)
        template = self._template

        def render(dropped: int) -> tuple[int, ...]:
            content = template(history[2 * dropped :], question)
            return self._codec.encode_messages([{"role": "user", "content": content}])

        return self._drop_until_fit(render, len(history) // 2, Refusal.PROMPT_TOO_LONG)

    def _fit_rendered(self, row: Row) -> FittedPrompt:
        messages = row.messages
        if messages is None:
            raise ConfigError(
                f"data.template: row {row.qid!r} carries no rendered prompt; data.template=row needs the prompt column"
            )
        split = split_rendered(messages[-1]["content"])
        turns = [] if split is None else split.turns
        reason = Refusal.CONTEXT_UNPARSABLE if split is None else Refusal.PROMPT_TOO_LONG

        def render(dropped: int) -> tuple[int, ...]:
            if split is None or not dropped:
                return self._codec.encode_messages(messages)
            content = split.before + "".join(turns[dropped:]) + split.after
            return self._codec.encode_messages([*messages[:-1], {**messages[-1], "content": content}])

        return self._drop_until_fit(render, len(turns), reason)

    def _drop_until_fit(self, render: Callable[[int], tuple[int, ...]], n_turns: int, reason: Refusal) -> FittedPrompt:
        token_ids = render(0)
        if len(token_ids) <= self._max_length:
            return FittedPrompt(token_ids)
        low, high = 1, n_turns + 1  # the smallest sufficient number of dropped turns, n_turns + 1 meaning none is
        fitted: tuple[int, ...] = ()
        while low < high:
            middle = (low + high) // 2
            token_ids = render(middle)
            if len(token_ids) <= self._max_length:
                high, fitted = middle, token_ids
            else:
                low = middle + 1
        if low > n_turns:
            return FittedPrompt((), n_turns, reason)
        return FittedPrompt(fitted, low)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A published prompt taken apart: ``before + "".join(turns) + after`` is the original text."""

    before: str
    """Up to and including the line of ``<context>``."""
    turns: list[str]
    """Oldest first; each begins with ``User: `` and holds the answer too, up to the next ``User: `` line."""
    after: str
    """From ``</context>`` on."""


def split_rendered(content: str) -> RenderedPrompt | None:
    """Take a rendered prompt apart at its last ``<context>`` block; None when it does not have the known layout."""
    end = content.rfind("</context>")
    start = content.rfind("<context>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len("<context>")
    lines = content[start:end].splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    if first < len(lines) and not lines[first].startswith("User: "):
        return None
    turns: list[str] = []
    for line in lines[first:]:
        if line.startswith("User: "):
            turns.append(line)
        else:
            turns[-1] += line
    return RenderedPrompt(content[:start] + "".join(lines[:first]), turns, content[end:])
