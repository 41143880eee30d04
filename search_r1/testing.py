"""Scripted fakes at the task's two seams, and a tokenizer without a library: for tests and for trying things out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from verl.errors import RetrievalError
from verl.types import Completion, Document, Sampling


class CharTokenizer:
    """One token per character, tags and control tokens excepted; invertible and the same everywhere.

    Example: ``CharTokenizer().encode("ab</search>")`` has three ids.
    """

    def __init__(
        self, merged: Sequence[str] = ("<search>", "</search>", "<answer>", "</answer>"), chat: bool = False
    ) -> None:
        """``merged`` strings are single tokens, matched longest first; ``chat`` adds a template with turn markers."""
        self.all_special_tokens = ["<|end|>", "<|user|>", "<|bot|>"] if chat else ["<|end|>"]
        self.eos_token = "<|end|>"
        self._pieces = sorted({*merged, *self.all_special_tokens}, key=lambda piece: (-len(piece), piece))
        self._ids = {piece: 0x110000 + index for index, piece in enumerate(self._pieces)}
        self._text = {index: piece for piece, index in self._ids.items()}
        self.eos_token_id: int | None = self._ids["<|end|>"]
        self.chat_template = "turns" if chat else None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode greedily, longest piece first."""
        ids, position = [], 0
        while position < len(text):
            piece = next((p for p in self._pieces if text.startswith(p, position)), None)
            ids.append(ord(text[position]) if piece is None else self._ids[piece])
            position += 1 if piece is None else len(piece)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Invert ``encode``."""
        pieces = [self._text[i] if i in self._text else chr(i) for i in token_ids]
        return "".join(p for p in pieces if not (skip_special_tokens and p in self.all_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        """Render ``<|user|>text<|end|>\\n<|bot|>`` turns."""
        marks = {"user": "<|user|>", "assistant": "<|bot|>", "system": "<|user|>"}
        turns = [f"{marks[message['role']]}{message['content']}<|end|>\n" for message in messages]
        return "".join(turns) + ("<|bot|>" if add_generation_prompt else "")


class ScriptedEngine:
    """Plays given turns; the ``Generate`` protocol.

    A turn is the text to sample, or an exception to raise. ``finish`` is worked out from the text: ``eos`` when it
    ends with the end token, ``length`` when it was cut at ``max_new_tokens``, else ``stop``. The engine honours stop
    strings unless ``runs_on``. Log-probs are -0.5, -1.5, -2.5 ... per turn, so that misalignment shows.
    """

    def __init__(
        self, tokenizer: CharTokenizer, turns: Sequence[str | Exception], runs_on: bool = False, delay_s: float = 0.0
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = list(turns)
        self._runs_on = runs_on
        self._delay_s = delay_s
        self.contexts: list[tuple[int, ...]] = []
        self.samplings: list[Sampling] = []
        self.sampled: list[tuple[int, ...]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Return the next turn of the script."""
        await asyncio.sleep(self._delay_s)
        self.contexts.append(tuple(token_ids))
        self.samplings.append(sampling)
        turn = self._turns[len(self.contexts) - 1]
        if isinstance(turn, Exception):
            raise turn
        ids = self._tokenizer.encode(turn)
        if not self._runs_on:
            ids = self._until_stop(ids, sampling.stop)
        finish = "eos" if ids and ids[-1] == self._tokenizer.eos_token_id else "stop"
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], "length"
        elif finish == "stop" and not any(stop in self._tokenizer.decode(ids) for stop in sampling.stop):
            finish = "length"
        self.sampled.append(tuple(ids))
        return Completion(tuple(ids), tuple(-0.5 - index for index in range(len(ids))), finish, policy_version=3)

    def _until_stop(self, ids: list[int], stops: Sequence[str]) -> list[int]:
        for length in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[:length])
            if any(stop in text for stop in stops):
                return ids[:length]
        return ids


class DictionarySearch:
    """Answers queries from a dictionary; unknown ones get nothing, and listed failures raise RetrievalError."""

    def __init__(
        self, passages: Mapping[str, Sequence[Document]], failing: Sequence[str] = (), delay_s: float = 0.0
    ) -> None:
        self._passages = passages
        self._failing = set(failing)
        self._delay_s = delay_s
        self.queries: list[str] = []

    async def search(self, query: str) -> tuple[Document, ...]:
        """Return the passages of ``query``."""
        await asyncio.sleep(self._delay_s)
        self.queries.append(query)
        if query in self._failing:
            raise RetrievalError(f"no answer for {query!r}")
        return tuple(self._passages[query]) if query in self._passages else ()
