"""MultiDoc2Dial (Feng et al., EMNLP 2021) and Doc2Dial (Feng et al., EMNLP 2020): dialogues grounded in documents.

``multidoc2dial_dial_*.json`` / ``doc2dial_dial_*.json`` and, beside them, the documents (``*2dial_doc*.json``). A
question is a user turn with the agent turn that follows at once (the task of the papers); where one side speaks twice
in a row, a blank stands for the other. ``mdd_*_pub.json`` of the shared task (DialDoc 2022) has dialogues without
replies.

Passages are the sections of the documents, and gold ones those in which the reply's spans lie, all of them; so there
are gold passages only where the documents are. The topic shifts where the reply's documents have none in common with
those of the grounded reply before. The kind is the act of the user turn. Not answerable: no references, or
``respond_no_solution``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from search_r1.datasets.draft import Draft, Dropped, Reason, alternating, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_object, read_records
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching
from verl.errors import DataError

NAME, FIRST_NAME = "md2d", "doc2dial"
_FILES, _FIRST_FILES = r"multidoc2dial_dial_.*\.json|mdd_.*_pub\.json", r"doc2dial_dial_.*\.json"
_DOCUMENTS = r".*2dial_doc.*\.json"
_ANSWERABLE: Mapping[str, bool] = {"respond_solution": True, "respond_no_solution": False}

Sections = Mapping[tuple[str, str], Passage]
"""(document, span) -> the section it lies in."""


def _documents(folder: Path) -> Iterator[Fields]:
    for path in matching(folder, _DOCUMENTS):
        table = read_object(path).object_or_none("doc_data")
        for _, domain in [] if table is None else table.entries():
            yield from (document for _, document in domain.entries())


def _sections(document: Fields) -> Iterator[tuple[str, str, str, Passage]]:
    """Yield (document, span, place, section) of every span."""
    name, title, spans = document.text("doc_id"), document.text("title"), document.object_or_none("spans")
    for span_id, span in [] if spans is None else spans.entries():
        # Document names hold spaces and signs; quoting is exact, unlike leaving things out.
        section = f"{quote(name, safe='')}:{span.text('id_sec')}"
        heading = span.text_or_none("title")
        titles = dict.fromkeys([title, *_parents(span), *([heading] if heading else [])])
        yield name, span_id, span.place, Passage(section, " > ".join(titles), span.text("text_sec").strip())


def _sections_of_spans(folder: Path) -> Sections:
    """Return the section of every span; documents that break the format are left out, and named with the passages."""
    found: dict[tuple[str, str], Passage] = {}
    for document in _documents(folder):
        with suppress(DataError):
            found |= {(name, span): section for name, span, _, section in list(_sections(document))}
    return found


def _parents(span: Fields) -> list[str]:
    """Return the titles above a section; releases write them as objects with a text, or as an empty string."""
    if not span.is_list("parent_titles"):
        return []
    return [text for parent in span.objects("parent_titles") if (text := parent.text_or_none("text")) is not None]


def _rows(file: SplitFile, source: str) -> Iterator[Draft]:
    if file.path.name.startswith("mdd_"):
        return attempt(read_records(file.path), partial(_without_reply, file, source))
    return attempt(_dialogues(file.path), partial(_turns, file, source, _sections_of_spans(file.path.parent)))


def _dialogues(path: Path) -> Iterator[Fields]:
    table = read_object(path)
    domains = table.object_or_none("dial_data")
    if domains is None:
        raise table.fail("dial_data", "is required")
    if domains.holds_lists():
        for _, dialogues in domains.lists():
            yield from dialogues
        return
    for _, documents in domains.entries():  # Doc2Dial groups the dialogues of a domain by their document
        for _, dialogues in documents.lists():
            yield from dialogues


def _turns(file: SplitFile, source: str, sections: Sections, dialogue: Fields) -> Iterator[Draft]:
    name, turns = dialogue.text("dial_id"), dialogue.objects("turns")
    own_document = dialogue.text_or_none("doc_id")
    number, grounded_before = 0, frozenset[str]()
    for place, (turn, reply) in enumerate(pairwise(turns)):
        if turn.text("role") != "user" or reply.text("role") != "agent":
            continue
        number += 1
        if not _said(turn):
            yield Dropped(Reason.MALFORMED, turn.place, f"{turn.place}: utterance: the question is blank")
            continue
        spans = [
            (reference.text_or_none("doc_id") or own_document or "", reference.text("id_sp", "sp_id"))
            for reference in reply.objects("references")
        ]
        documents = frozenset(document for document, _ in spans)
        # Gold that is known in part would make a retrieval look better than it is.
        known = all(span in sections for span in spans)
        gold = dict.fromkeys(sections[span] for span in spans) if known else {}
        act = reply.text_or_none("da")
        yield Row(
            qid=file.qid(source, f"{name}_{turn.integer('turn_id')}"),
            question=turn.text("utterance"),
            answers=references([reply.text_or_none("utterance")]),
            history=alternating((t.text("role") == "user", _said(t)) for t in turns[:place]),
            conv_id=name,
            turn_id=number,
            gold_passage_ids=tuple(passage.id for passage in gold) or None,
            gold_text=next((passage.text for passage in gold), None),
            topic_shift=not documents & grounded_before if documents and grounded_before else None,
            kind=turn.text_or_none("da"),
            answerable=_ANSWERABLE.get(act or "") if spans else False,
            dialogue_act=act,
            data_source=source,
            extra={"documents": sorted(documents)},
        )
        grounded_before = documents or grounded_before


def _said(turn: Fields) -> str:
    """Return what a turn says; a few turns of the releases are blank."""
    return turn.text_or_none("utterance") or ""


def _without_reply(file: SplitFile, source: str, record: Fields) -> Iterator[Draft]:
    *earlier, question = record.objects("dial")
    yield Row(
        qid=file.qid(source, record.text("id")),
        question=question.text("utterance"),
        answers=(),
        history=alternating((turn.text("role") == "user", _said(turn)) for turn in earlier),
        conv_id=record.text("id").rpartition("_")[0],
        data_source=source,
    )


def _passages(folder: Path) -> Iterator[Found]:
    return attempt_passages(
        _documents(folder), lambda document: ((place, section) for _, _, place, section in _sections(document))
    )


_SUPPLIES = ("gold_passage_ids", "gold_text", "topic_shift", "kind", "answerable", "dialogue_act")
SOURCE = Source(NAME, _FILES, partial(_rows, source=NAME), _SUPPLIES, passages=_passages)
DOC2DIAL = Source(FIRST_NAME, _FIRST_FILES, partial(_rows, source=FIRST_NAME), _SUPPLIES, passages=_passages)
