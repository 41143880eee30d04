"""Prompts that are rendered already (the published parquet), taken apart into turns: to shorten them, to read them."""

from __future__ import annotations

from dataclasses import dataclass

USER, ASSISTANT = "User: ", "Assistant: "


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
    if first < len(lines) and not lines[first].startswith(USER):
        return None
    turns: list[str] = []
    for line in lines[first:]:
        if line.startswith(USER):
            turns.append(line)
        else:
            turns[-1] += line
    return RenderedPrompt(content[:start] + "".join(lines[:first]), turns, content[end:])


def history_of(content: str) -> tuple[str, ...] | None:
    """Return the history (question, answer ...) that a rendered prompt shows; None where its layout leaves doubt.

    Every turn must be one ``User:`` line, with what continues it, and one ``Assistant:`` line, with what continues it.
    """
    split = split_rendered(content)
    if split is None:
        return None
    history: list[str] = []
    for turn in split.turns:
        question, found, answer = turn.removeprefix(USER).partition(f"\n{ASSISTANT}")
        if not found or f"\n{ASSISTANT}" in answer:
            return None
        history += [question, answer.removesuffix("\n")]
    return tuple(history)
