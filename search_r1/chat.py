"""Asking a model: one conversation that keeps its history, and a transcript that shows an episode as it happens.

The episode is the one that training runs; nothing here generates, searches or parses by itself.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.episode import EpisodeTools, Event, run_episode
from search_r1.prompts import PromptBuilder
from search_r1.tags import ANSWER, INFORMATION, SEARCH, TAG_PATTERN, THINK
from search_r1.whole_text import is_whole
from verl.errors import DataError
from verl.types import EpisodeContext, Generate, Prompt, StopReason, Trajectory, episode_seed

NO_ANSWER = "unanswerable"
"""What stands in the history for a question that got no answer."""

_LABELS = {THINK: "thinking", SEARCH: "searching", ANSWER: "answer", INFORMATION: "invented"}
_STYLES = {THINK: "2", SEARCH: "36", ANSWER: "1;32", INFORMATION: "31", "passage": "33", "note": "35"}
_LONGEST_TAG = len("</information>")
_PASSAGE_CHARS = 240


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the model is sampled."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0


class Conversation:
    """Questions and answers so far. ``await ask(...)`` runs one episode and remembers its answer."""

    def __init__(
        self, builder: PromptBuilder, tools: EpisodeTools, decoding: Decoding, history: Sequence[str] = ()
    ) -> None:
        self.history = list(history)
        self._builder = builder
        self._tools = tools
        self._decoding = decoding

    async def ask(
        self, question: str, generate: Generate, observer: Callable[[Event], None] | None = None
    ) -> Trajectory:
        """Answer a question in the light of the history; raises DataError when the model cannot read it whole."""
        if not is_whole(question):
            raise DataError("the question holds bytes that are no UTF-8; write it in UTF-8")
        question = as_question(question)
        turn = len(self.history) // 2 + 1
        row = Row(qid=f"turn-{turn}", question=question, answers=("",), history=tuple(self.history))
        fitted = self._builder.build(row)
        if fitted.refusal is not None:
            raise DataError(f"the question is too long for this model's first prompt ({fitted.refusal.value})")
        decoding = self._decoding
        context = EpisodeContext(
            sample_index=0,
            seed=episode_seed(decoding.seed, turn, row.qid, 0),
            temperature=decoding.temperature,
            top_p=decoding.top_p,
        )
        prompt = Prompt(row.qid, fitted.token_ids, row.to_json())
        trajectory = await run_episode(prompt, generate, context, replace(self._tools, observer=observer))
        self.history += [question, trajectory.prediction or NO_ANSWER]
        return trajectory


def as_question(text: str) -> str:
    """Strip, and end with a question mark when no other mark ends it, as in the training conversations."""
    text = text.strip()
    return text if text.endswith(("?", ".", "!")) else f"{text}?"


class Transcript:
    """Shows an episode in a terminal: thoughts, queries, passages, the answer, each under its label.

    ``token`` takes model tokens as they are sampled and ``event`` what the episode reports; without tokens (an engine
    that does not stream) each turn appears when it is complete.
    """

    def __init__(self, codec: Codec, write: Callable[[str], None], colour: bool) -> None:
        self._codec = codec
        self._write = write
        self._colour = colour
        self._ids: list[int] = []
        self._seen = self._held = ""
        self._block: str | None = None
        self._blank = True

    def token(self, token_id: int) -> None:
        """Show one more model token."""
        self._ids.append(token_id)
        text = self._codec.readable(self._ids)
        if not text.endswith("\ufffd"):  # half a character: wait for its other bytes
            self._feed(text[len(self._seen) :])
            self._seen = text

    def event(self, event: Event) -> None:
        """Show what the episode reports."""
        if event.kind == "model":
            if not self._ids:
                self._feed(event.text)
            self._show(self._held)
            self._end_block()
            self._begin_turn()
        elif event.kind == "documents":
            for rank, document in enumerate(event.documents, start=1):
                text = textwrap.shorten(f"{document.title}: {document.text}", _PASSAGE_CHARS, placeholder=" ...")
                self._write(self._styled(f"  passage {rank}  {text}", "passage") + "\n")
            if not event.documents:
                self.note("nothing was found")
        elif event.kind == "hint":
            self.note(event.text)

    def note(self, text: str) -> None:
        """Show a remark of ours."""
        self._write(self._styled(f"  ({text})", "note") + "\n")

    def end(self, trajectory: Trajectory) -> None:
        """Say why there is no answer, when there is none."""
        self._end_block()
        if trajectory.stop is not StopReason.ANSWERED or trajectory.prediction is None:
            error = next((call.error for call in trajectory.searches if call.error), None)
            self.note(f"no answer: {trajectory.stop.value}" + (f", {error}" if error else ""))

    # -----------------------------------------------------------------------------------------------------------

    def _begin_turn(self) -> None:
        self._ids, self._seen, self._held = [], "", ""
        self._block, self._blank = None, True

    def _feed(self, text: str) -> None:
        """Show text up to where a tag might be under way; a tag opens or closes a block and is not shown itself."""
        self._held += text
        while match := TAG_PATTERN.search(self._held):
            self._show(self._held[: match.start()])
            self._held = self._held[match.end() :]
            self._end_block()
            if not match.group().startswith("</"):
                self._block = match.group()[1:-1]
                self._write(self._styled(f"  {_LABELS[self._block]:<9}  ", self._block, keep=True))
        start = self._held.rfind("<")
        cut = start if start >= 0 and len(self._held) - start < _LONGEST_TAG else len(self._held)
        self._show(self._held[:cut])
        self._held = self._held[cut:]

    def _show(self, text: str) -> None:
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            self._write(text)

    def _end_block(self) -> None:
        if self._block is not None or not self._blank:
            self._write("\033[0m\n" if self._colour and self._block is not None else "\n")
        self._block, self._blank = None, True

    def _styled(self, text: str, style: str, keep: bool = False) -> str:
        if not self._colour:
            return text
        return f"\033[{_STYLES[style]}m{text}" + ("" if keep else "\033[0m")
