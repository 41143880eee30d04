"""QuAC (Choi et al., EMNLP 2018) and OR-QuAC (Qu et al., SIGIR 2020): questions about a section one cannot see.

QuAC: ``train_v0.2.json``, ``val_v0.2.json`` in SQuAD's nesting; a passage is a section of an article. OR-QuAC: the
preprocessed ``train.txt``, ``dev.txt``, ``test.txt`` (JSON lines with CANARD's rewrites), ``qrels.txt`` (a JSON object
question -> passage -> grade) and ``all_blocks.txt`` (JSON lines with ``id``, ``title``, ``text``).
``CANNOTANSWER`` is the sets' own word for no answer; it stays the reference, and the row is marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, Placed, corpus_lines, stable_id
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_object, read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

QUAC, ORQUAC = "quac", "orquac"
_QUAC_FILES, _ORQUAC_FILES = r"(train|val|dev|test)_v0\.\d.*\.json", r"(train|dev|test)\.(txt|jsonl)"
_NO_ANSWER = "CANNOTANSWER"


# -- QuAC -----------------------------------------------------------------------------------------------------------


def _rows(file: SplitFile) -> Iterator[Draft]:
    articles = read_object(file.path).objects("data")
    return attempt((p for a in articles for p in a.objects("paragraphs")), partial(_dialogue, file))


def _dialogue(file: SplitFile, paragraph: Fields) -> Iterator[Draft]:
    dialogue, history = paragraph.text("id"), list[str]()
    for number, turn in enumerate(paragraph.objects("qas"), start=1):
        answers = [answer.text("text") for answer in turn.objects("answers")]
        first = turn.object_or_none("orig_answer")
        shown = first.text("text") if first is not None else (answers or [""])[0]
        yield Row(
            qid=file.qid(QUAC, turn.text("id")),
            question=turn.text("question"),
            answers=references([shown, *answers]),
            history=tuple(history),
            conv_id=dialogue,
            turn_id=number,
            gold_passage_ids=(_id(paragraph),),
            gold_text=_context(paragraph),
            answerable=None if not answers else shown != _NO_ANSWER,
            dialogue_act=_acts(turn),
            data_source=QUAC,
        )
        history += [turn.text("question"), shown]


def _acts(turn: Fields) -> str | None:
    """Return the teacher's marks: whether to follow up (y, m, n) and yes or no (y, n, x)."""
    marks = [f"{name}={mark}" for name in ("followup", "yesno") if (mark := turn.text_or_none(name)) is not None]
    return " ".join(marks) or None


def _id(paragraph: Fields) -> str:
    return f"{QUAC}:{stable_id(paragraph.text('id'))}"


def _context(paragraph: Fields) -> str:
    return paragraph.text("context").removesuffix(_NO_ANSWER).strip()


def _sections(folder: Path) -> Iterator[Found]:
    articles = (a for path in matching(folder, _QUAC_FILES) for a in read_object(path).objects("data"))
    return attempt_passages(articles, _sections_of)


def _sections_of(article: Fields) -> Iterator[Placed]:
    titles = (article.text_or_none(name) for name in ("title", "section_title"))
    title = " > ".join(filter(None, titles))
    for paragraph in article.objects("paragraphs"):
        yield paragraph.place, Passage(_id(paragraph), title, _context(paragraph))


# -- OR-QuAC --------------------------------------------------------------------------------------------------------


def _open_rows(file: SplitFile) -> Iterator[Draft]:
    gold: dict[str, tuple[str, ...]] = {}
    for path in file.beside(r"qrels\.(txt|json)"):
        for question, passages in read_object(path).entries():
            gold[question] = tuple(stable_id(name) for name in passages.names_in_order() if passages.integer(name))
    return attempt(read_records(file.path), partial(_open_row, file, gold))


def _open_row(file: SplitFile, gold: Mapping[str, tuple[str, ...]], record: Fields) -> Iterator[Draft]:
    question_id, answer = record.text("qid"), record.object_or_none("answer")
    dialogue, _, number = question_id.rpartition("_q#")
    if not dialogue or not number.isdigit():
        raise record.fail("qid", "must be <dialogue>_q#<number>")
    reference = None if answer is None else answer.text_or_none("text")
    yield Row(
        qid=file.qid(ORQUAC, question_id),
        question=record.text("question"),
        answers=references([reference]),
        history=_history(record),
        conv_id=dialogue,
        turn_id=int(number) + 1,
        rewrite=record.text_or_none("rewrite"),
        gold_passage_ids=gold.get(question_id) or None,
        answerable=None if reference is None else reference != _NO_ANSWER,
        data_source=ORQUAC,
    )


def _history(record: Fields) -> tuple[str, ...]:
    said: list[str] = []
    for turn in record.objects("history"):
        answer = turn.object_or_none("answer")
        said += [turn.text("question"), (None if answer is None else answer.text_or_none("text")) or ""]
    return tuple(said)


def _blocks(folder: Path) -> Iterator[Found]:
    for path in matching(folder, r"all_blocks.*\.(txt|jsonl)"):
        yield from corpus_lines(path)


SOURCE = Source(
    QUAC,
    _QUAC_FILES,
    _rows,
    ("gold_passage_ids", "gold_text", "answerable", "dialogue_act"),
    passages=_sections,
    default_split="dev",
)
OPEN = Source(ORQUAC, _ORQUAC_FILES, _open_rows, ("rewrite", "gold_passage_ids", "answerable"), passages=_blocks)
