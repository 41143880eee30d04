"""TREC CAsT 2019-2022 (Dalton et al.): conversational search topics with judged passages.

What a year publishes differs, and so does what a row has:

| year | files | references | rewrite | gold passages |
|---|---|---|---|---|
| 2019 | ``evaluation_topics_v1.0.json``, ``*annotated_resolved*.tsv``, ``*qrels*.txt`` | none | resolved file | qrels |
| 2020 | ``2020_manual_evaluation_topics*.json`` | none | manual | canonical passage |
| 2021 | ``2021_manual_evaluation_topics*.json`` | the canonical passage, as said | manual | that passage |
| 2022 | ``2022_evaluation_topics_flattened*.json`` | the response | manual | its provenance |

Rows without references cannot be trained or scored on; they serve to measure retrieval. Passages of qrels count from
grade 2 on, the threshold of the track's binary measures. Where a system's reply is not published, the history has a
blank. The files of 2022 repeat the turns that several paths of a topic share: they become one row with the replies of
all paths as references, and repetitions are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, Dropped, Reason, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, Placed
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_qrels, read_records, read_table
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching
from verl.errors import DataError

_GRADE = 2


def _beside_2019(file: SplitFile) -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]]]:
    rewrites: dict[str, str] = {}
    for path in file.beside(r".*annotated_resolved.*\.tsv"):
        for row in read_table(path, ("id", "rewrite")):
            if isinstance(row, DataError):
                raise row
            rewrites[row.text("id")] = row.text("rewrite")
    qrels: dict[str, tuple[str, ...]] = {}
    for path in file.beside(r"2019.*qrels?.*\.txt"):
        qrels |= read_qrels(path, _GRADE)
    return rewrites, qrels


def _rows_2019(file: SplitFile) -> Iterator[Draft]:
    rewrites, qrels = _beside_2019(file)

    def turns(topic: Fields) -> Iterator[Draft]:
        for draft in _turns(file, "cast2019", topic):
            official = f"{draft.conv_id}_{draft.turn_id}"
            yield draft.with_supervision(rewrite=rewrites.get(official), gold_passage_ids=qrels.get(official))

    return attempt(read_records(file.path), turns)


def _rows_2020(file: SplitFile) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_turns, file, "cast2020"))


def _rows_2021(file: SplitFile) -> Iterator[Draft]:
    return attempt(read_records(file.path), partial(_turns, file, "cast2021"))


def _turns(file: SplitFile, source: str, topic: Fields) -> Iterator[Row]:
    """Yield the turns of a topic of 2019-2021: numbered utterances, from 2020 on with rewrite and canonical passage."""
    number, history = topic.integer("number"), list[str]()
    for turn in topic.objects("turn"):
        turn_id, question, passage = turn.integer("number"), turn.text("raw_utterance"), turn.text_or_none("passage")
        yield Row(
            qid=file.qid(source, f"{number}_{turn_id}"),
            question=question,
            answers=references([passage]),
            history=tuple(history),
            conv_id=str(number),
            turn_id=turn_id,
            rewrite=turn.text_or_none("manual_rewritten_utterance"),
            gold_passage_ids=_canonical(turn),
            gold_text=passage,
            data_source=source,
        )
        history += [question, passage or ""]


def _canonical(turn: Fields) -> tuple[str, ...] | None:
    whole = turn.text_or_none("manual_canonical_result_id")
    if whole is not None:
        return (whole,)
    document = turn.text_or_none("canonical_result_id")
    return None if document is None else (f"{document}-{turn.integer('passage_id')}",)


def _passages_2021(folder: Path) -> Iterator[Found]:
    topics = (topic for path in matching(folder, _FILES[2021]) for topic in read_records(path))
    return attempt_passages(topics, _canonical_passages)


def _canonical_passages(topic: Fields) -> Iterator[Placed]:
    for turn in topic.objects("turn"):
        ids, text = _canonical(turn), turn.text_or_none("passage")
        if ids is not None and text is not None:
            yield turn.place, Passage(ids[0], "", text)


def _rows_2022(file: SplitFile) -> Iterator[Draft]:
    rows: dict[str, Row] = {}
    repeated: list[Dropped] = []
    for draft in attempt(read_records(file.path), partial(_path, file)):
        if isinstance(draft, Dropped):
            yield draft
        elif draft.qid not in rows or _asked(draft) != _asked(rows[draft.qid]):
            rows[draft.qid] = draft
        else:
            rows[draft.qid] = _merged(rows[draft.qid], draft)
            repeated.append(Dropped(Reason.REPEATED_TURN, str(file.path), draft.qid))
    yield from rows.values()
    yield from repeated


def _path(file: SplitFile, path: Fields) -> Iterator[Draft]:
    number, history = path.integer("number"), list[str]()
    for place, turn in enumerate(path.objects("turn"), start=1):
        question, response = turn.text("utterance"), turn.text_or_none("response")
        yield Row(
            qid=file.qid("cast2022", f"{number}_{turn.text('number')}"),
            question=question,
            answers=references([response]),
            history=tuple(history),
            conv_id=str(number),
            turn_id=place,
            rewrite=turn.text_or_none("manual_rewritten_utterance"),
            gold_passage_ids=turn.texts_or_none("provenance"),
            data_source="cast2022",
        )
        history += [question, response or ""]


def _asked(row: Row) -> tuple[object, ...]:
    return row.history, row.question


def _merged(row: Row, again: Row) -> Row:
    """Return the row with the references and gold passages of both: paths part where a reply differs."""
    gold = dict.fromkeys([*(row.gold_passage_ids or ()), *(again.gold_passage_ids or ())])
    return replace(row, answers=references([*row.answers, *again.answers]), gold_passage_ids=tuple(gold) or None)


_FILES = {
    2019: r"(?!202).*evaluation_topics_v1.*\.json",
    2020: r"2020_manual_evaluation_topics.*\.json",
    2021: r"2021_manual_evaluation_topics.*\.json",
    2022: r"2022_evaluation_topics_flattened.*\.json",
}
SOURCES = (
    Source("cast2019", _FILES[2019], _rows_2019, ("rewrite", "gold_passage_ids")),
    Source("cast2020", _FILES[2020], _rows_2020, ("rewrite", "gold_passage_ids")),
    Source("cast2021", _FILES[2021], _rows_2021, ("rewrite", "gold_passage_ids", "gold_text"), passages=_passages_2021),
    Source("cast2022", _FILES[2022], _rows_2022, ("rewrite", "gold_passage_ids")),
)
