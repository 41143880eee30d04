"""When a generation ends: end-of-sequence ids, stop strings in the decoded text, the limit of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from verl.errors import EngineError
from verl.types import Sampling


class Decoder(Protocol):
    """The part of a tokenizer used here."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class StopRule:
    """Decides after each token whether a row is finished.

    A stop string is looked for in the decoded text of everything the row generated, so it is found however it is cut
    into tokens, and a token that carries characters after it still ends the row. Decoding at every step would cost
    more than a small model's forward pass, so text is decoded only when the newest token contains the last character
    of a stop string: no other token can complete it. What a single token contains is decoded once and remembered.
    """

    def __init__(self, tokenizer: Decoder, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._pieces: dict[int, str] = {}

    def finish(self, generated: Sequence[int], sampling: Sampling) -> str | None:
        """Return ``eos`` or ``stop`` when the newest of ``generated`` ends the row, otherwise None."""
        newest = generated[-1]
        if newest in self._eos:
            return "eos"
        if sampling.stop and self._may_complete(newest, sampling.stop):
            text = self.decode(generated)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids with every special token written out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _may_complete(self, token: int, stops: Sequence[str]) -> bool:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.decode([token])
        # A character outside ASCII can be spread over several byte tokens, none of which shows it alone.
        return any(stop[-1] in piece or not stop[-1].isascii() for stop in stops)


def eos_token_ids(*sources: Any) -> set[int]:
    """Collect the end-of-sequence ids of tokenizer, config and generation config (chat models have several)."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return found


def new_token_limit(context: Sequence[int], sampling: Sampling, max_model_len: int) -> int:
    """Return how many tokens may follow ``context``; raises EngineError when not even one may."""
    room = max_model_len - len(context)
    if not context or sampling.max_new_tokens < 1 or room < 1:
        raise EngineError(
            f"cannot generate {sampling.max_new_tokens} tokens after {len(context)} tokens of context: "
            f"both must be positive and the model's limit is {max_model_len}"
        )
    return min(sampling.max_new_tokens, room)
