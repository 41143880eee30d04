"""Text and token ids: the only place of the task that talks to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from search_r1.tags import KNOWN_TAGS, escape_tags
from verl.errors import ModelError
from verl.types import Tokenizer

_MARK = "@@assistant-turn@@"


class Codec:
    """Encodes environment text, decodes model text, renders chat templates.

    Model ids are decoded for reading only; they are never encoded again.
    """

    def __init__(self, tokenizer: Tokenizer, native_thinking: str = "keep") -> None:
        """``native_thinking="forbid"`` uses the template's own switch; raises ModelError when it has none."""
        self._tokenizer: Any = tokenizer
        self._options: dict[str, Any] = {}
        if native_thinking == "forbid":
            self._forbid_thinking()
        tags = {f"<{slash}{tag}>" for tag in KNOWN_TAGS for slash in ("", "/")}
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        # Turn markers are often added tokens without a role (bos, eos, pad), which the list above leaves out.
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special |= {token.content for token in added if token.special}
        controls = special | {token.content for token in added}
        self._foreign = tuple(sorted(token for token in controls if token.startswith("<") and token not in tags))
        # A tokenizer may hold the tags as special tokens; skipping special tokens would then erase the actions.
        self._skip_special = not any(token in tags for token in special)

    def _forbid_thinking(self) -> None:
        """Render with the template's switch, which opens and closes an empty thinking block in the model's place."""
        probe = [{"role": "user", "content": "."}]
        before = self.render(probe) if self.has_chat_template else ""
        self._options = {"enable_thinking": False}
        if not self.has_chat_template or self.render(probe) == before:
            raise ModelError(
                "data.native_thinking=forbid: the tokenizer's chat template has no switch that turns thinking off "
                "(enable_thinking); set data.native_thinking=keep"
            )

    @property
    def thinking_is_forbidden(self) -> bool:
        """True when prompts are rendered with the template's thinking turned off."""
        return bool(self._options)

    @property
    def has_chat_template(self) -> bool:
        """True when prompts go through the model's own chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def escape(self, text: str) -> str:
        """Disarm tags and the tokenizer's control tokens in text that the model did not write."""
        return escape_tags(text, self._foreign)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode environment text on its own, without special tokens around it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode verbatim, special tokens included: what the action parser reads."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def readable(self, token_ids: Sequence[int]) -> str:
        """Decode for people and files: without special tokens, with the tags."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special)
        for token in () if self._skip_special else self._foreign:
            text = text.replace(token, "")
        return text

    def cut(self, token_ids: Sequence[int], limit: int) -> str:
        """Return the text of the first ``limit`` tokens, without a half character at its end."""
        return self.decode(token_ids[: max(limit, 0)]).rstrip("\ufffd")

    def shortest_prefix(self, token_ids: Sequence[int], text: str) -> int:
        """Return the smallest n for which the first n tokens decode to something that begins with ``text``."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if self.decode(token_ids[:middle]).startswith(text):
                high = middle
            else:
                low = middle + 1
        return low

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Encode chat messages with the generation prompt; without a template, the first message's content.

        The plain form keeps the tokenizer's own start token (``add_special_tokens``), which such models expect.
        """
        if not self.has_chat_template:
            return tuple(self._tokenizer.encode(messages[0]["content"], add_special_tokens=True))
        return self.encode(self.render(messages))

    def encode_user_turn(self, text: str) -> tuple[int, ...]:
        """Encode what follows an end-of-sequence token when the environment speaks next: a user turn of the template.

        Without a template the text follows bare, between blank lines.
        """
        if not self.has_chat_template:
            return self.encode(f"\n\n{text}\n\n")
        rendered = self.render(
            [
                {"role": "user", "content": "."},
                {"role": "assistant", "content": _MARK},
                {"role": "user", "content": text},
            ]
        )
        _, found, tail = rendered.rpartition(_MARK)
        if not found:
            raise ModelError("the tokenizer's chat template drops assistant turns; a hint cannot be placed after one")
        end_token = getattr(self._tokenizer, "eos_token", None)
        # The sampled end-of-sequence token is already in the context; it must not stand there twice.
        return self.encode(tail.removeprefix(end_token) if end_token else tail)

    def render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool = True) -> str:
        """Return the text that the chat template makes of messages, by default up to where the model goes on."""
        rendered: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._options,
        )
        return rendered
