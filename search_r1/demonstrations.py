"""Demonstrations for a cold start, made from rows with gold supervision: what a good episode would have looked like.

A row becomes prompt, a turn that searches with the gold rewrite, the passages that really come back, and a turn that
answers with the first reference. Only what the model would write is learned. This teaches the form and the habit of
rewriting; it invents no reasoning beyond naming what is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.observation import build_observation
from search_r1.prompts import PromptBuilder
from search_r1.tags import ANSWER, SEARCH, THINK
from verl.types import Document

Search = Callable[[str], Sequence[Document]]
SupervisedRow = dict[str, Any]
"""``{"segments": [[origin, text], ...]}``: what ``verl.trainer.main_sft`` reads."""


@dataclass
class Outcome:
    """What became of the rows read so far."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class DemonstrationWriter:
    """Turns rows into supervised rows.

    Args:
        codec: the model's tokenizer.
        prompts: renders and fits the first context exactly as training does.
        search: the retriever; called with the gold rewrite.
        max_obs_length: tokens of the observation, as in training.
        require_gold: drop rows whose gold passage is not among those found (an answer that cannot be read teaches
            the model to invent). Rows without known gold passages are kept.
    """

    def __init__(
        self, codec: Codec, prompts: PromptBuilder, search: Search, max_obs_length: int, require_gold: bool = True
    ) -> None:
        self._codec, self._prompts, self._search = codec, prompts, search
        self._max_obs_length, self._require_gold = max_obs_length, require_gold
        self.outcome = Outcome()

    def write(self, rows: Sequence[Row]) -> Iterator[SupervisedRow]:
        """Yield one supervised row for every usable row, in order; ``outcome`` counts the others by reason."""
        for row in rows:
            made = self._one(row)
            if isinstance(made, str):
                self.outcome.dropped[made] += 1
            else:
                self.outcome.kept += 1
                yield made

    def _one(self, row: Row) -> SupervisedRow | str:
        fitted = self._prompts.build(row)
        if fitted.refusal is not None:
            return fitted.refusal.value
        query = row.rewrite or (row.question if not row.history else None)
        if query is None:
            return "no_rewrite"
        documents = self._search(query)
        gold = set(row.gold_passage_ids or ())
        if self._require_gold and gold and not gold & {document.id for document in documents}:
            return "gold_not_retrieved"
        observation = build_observation(self._codec, documents, self._max_obs_length)
        thought = (
            "The question is clear as it stands." if query == row.question else "The question depends on the context."
        )
        return {
            "segments": [
                ["prompt", self._codec.decode(fitted.token_ids)],
                ["model", _turn(thought, SEARCH, query, self._codec)],
                ["env", self._codec.decode(observation.token_ids)],
                ["model", _turn("The passages answer this.", ANSWER, row.answers[0], self._codec)],
            ]
        }


def _turn(thought: str, tag: str, content: str, codec: Codec) -> str:
    return f"<{THINK}> {thought} </{THINK}><{tag}> {codec.escape(content)} </{tag}>"
