"""TopiOCQA (Adlakha et al., TACL 2022): open-domain conversations that change their topic.

``topiocqa_{train,valid}.json`` or ``.jsonl``, a record a turn in the order of the conversations, and
``full_wiki_segments.tsv`` with all passages. The set has no rewrites. A topic shift is a turn whose ``Topic`` (the
Wikipedia page of the answer) differs from that of the turn before; the first turn of a conversation has no mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, Placed, stable_id, wiki_table
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

NAME = "topiocqa"
FILES = r"topiocqa_.*\.jsonl?"
_TABLE = r"full_wiki_segments.*\.tsv"
_UNANSWERABLE = "unanswerable"


class _Turns:
    """Parses the turns of one file; remembers the topic of the turn before."""

    def __init__(self, file: SplitFile) -> None:
        self._file = file
        self._before: tuple[int, int, str] | None = None
        """Conversation, turn and topic of the record before."""

    def __call__(self, record: Fields) -> Iterator[Draft]:
        conversation, turn = record.integer("Conversation_no"), record.integer("Turn_no")
        topic, answer = record.text("Topic"), record.text("Answer")
        others = record.objects("Additional_answers") if "Additional_answers" in record.names() else []
        before, self._before = self._before, (conversation, turn, topic)
        follows = before is not None and before[:2] == (conversation, turn - 1)
        gold = record.object_or_none("Gold_passage")
        yield Row(
            qid=self._file.qid(NAME, f"{conversation}_{turn}"),
            question=record.text("Question"),
            answers=references([answer, *(other.text_or_none("Answer") for other in others)]),
            history=record.history("Context"),
            conv_id=str(conversation),
            turn_id=turn,
            gold_passage_ids=None if gold is None else (_gold_id(gold),),
            gold_text=None if gold is None else gold.text_or_none("text"),
            topic_shift=topic != before[2] if follows and before is not None else None,
            answerable=answer.strip().lower() != _UNANSWERABLE,
            data_source=NAME,
            extra={"topic": topic},
        )


def _gold_id(gold: Fields) -> str:
    """Return the id as the table of passages has it: records write ``wiki:`` before it."""
    return stable_id(gold.text("id").removeprefix("wiki:"))


def _rows(file: SplitFile) -> Iterator[Draft]:
    return attempt(read_records(file.path), _Turns(file))


def _passages(folder: Path) -> Iterator[Found]:
    """Yield the table of all passages; without it, the gold passages that the records carry."""
    tables = matching(folder, _TABLE)
    for table in tables:
        yield from wiki_table(table)
    if not tables:
        records = (record for path in matching(folder, FILES) for record in read_records(path))
        yield from attempt_passages(records, _gold_passage)


def _gold_passage(record: Fields) -> Iterator[Placed]:
    gold = record.object_or_none("Gold_passage")
    if gold is not None:
        yield gold.place, Passage(_gold_id(gold), gold.text_or_none("title") or "", gold.text("text"))


SOURCE = Source(NAME, FILES, _rows, ("gold_passage_ids", "gold_text", "topic_shift", "answerable"), passages=_passages)
