"""Every source: one made-up conversation in the published format, and the row that it must become."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from search_r1.datasets.catalog import SOURCES
from search_r1.datasets.draft import Draft, Dropped, Reason
from search_r1.datasets.rows import Row
from search_r1.datasets.source import split_of
from verl.errors import ConfigError, DataError

Files = Mapping[str, Any]
"""File name -> a JSON value, a list of JSON lines (``.jsonl``, ``.txt``) or text."""


def put(folder: Path, files: Files) -> Path:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            path.write_text(value)
        elif path.suffix == ".json":
            path.write_text(json.dumps(value, indent=1))
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in value))
    return folder


def read(source: str, folder: Path) -> list[Draft]:
    found = SOURCES[source]
    return [draft for file in found.split_files(folder) for draft in found.rows(file)]


def rows(source: str, folder: Path) -> list[Row]:
    drafts = read(source, folder)
    assert not [draft for draft in drafts if isinstance(draft, Dropped)]
    return [draft for draft in drafts if isinstance(draft, Row)]


def passages(source: str, folder: Path) -> dict[str, str]:
    listed = SOURCES[source].passages
    assert listed is not None
    found = list(listed(folder))
    assert not [passage for passage in found if isinstance(passage, Dropped)]
    return {passage.id: passage.contents for passage in found if not isinstance(passage, Dropped)}


def topiocqa(turn: int, topic: str, answer: str, *others: str) -> dict[str, Any]:
    return {
        "Context": ["who built the Zorn mill", "Ada Krell"][: 2 * (turn - 1)],
        "Conversation_no": 4,
        "Turn_no": turn,
        "Question": "when",
        "is_nq": False,
        "Answer": answer,
        "Topic": topic,
        "Topic_section": "Introduction",
        "Rationale": "It was built in 1801.",
        "Additional_answers": [{"Answer": other, "Topic": topic} for other in others],
        "Gold_passage": {"id": f"wiki:{turn}7", "title": f"{topic} [SEP] Introduction", "text": f"Text {turn}."},
    }


def test_topiocqa(tmp_path: Path) -> None:
    records = [topiocqa(1, "Zorn mill", "Ada Krell"), topiocqa(2, "Krell", "1801", "in 1801", "1801", "")]
    put(tmp_path, {"topiocqa_valid.json": records, "notes.json": []})
    first, second = rows("topiocqa", tmp_path)
    assert second == Row(
        qid="topiocqa:dev:4_2",
        question="when",
        answers=("1801", "in 1801"),
        history=("who built the Zorn mill", "Ada Krell"),
        conv_id="4",
        turn_id=2,
        gold_passage_ids=("27",),
        gold_text="Text 2.",
        topic_shift=True,
        answerable=True,
        data_source="topiocqa",
        extra={"topic": "Krell"},
    )
    assert first.topic_shift is None and first.rewrite is None
    assert passages("topiocqa", tmp_path)["27"] == '"Krell [SEP] Introduction"\nText 2.'
    put(
        tmp_path,
        {"full_wiki_segments.tsv": 'id\ttext\ttitle\n27\tThe "old" text.\tKrell\n28\t"Quoted ""all"" over"\t\n'},
    )
    assert passages("topiocqa", tmp_path) == {"27": '"Krell"\nThe "old" text.', "28": 'Quoted "all" over'}


def test_topiocqa_unanswerable_and_same_topic(tmp_path: Path) -> None:
    records = [topiocqa(1, "Zorn mill", "Ada Krell"), topiocqa(2, "Zorn mill", "UNANSWERABLE")]
    put(tmp_path, {"topiocqa_train.jsonl": records})
    _, row = rows("topiocqa", tmp_path)
    assert (row.qid, row.topic_shift, row.answerable) == ("topiocqa:train:4_2", False, False)


QRECC = {
    "Context": ["Who built the Zorn mill?", "Ada Krell did."],
    "Question": "When?",
    "Rewrite": "When was the Zorn mill built?",
    "Answer": "In 1801.",
    "Answer_URL": "http://example.org/mill",
    "Conversation_no": 12,
    "Turn_no": 2,
    "Conversation_source": "trec",
}


def test_qrecc(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "qrecc_test.json": [QRECC, {**QRECC, "Turn_no": 3, "Answer": ""}],
            "qrels_test.json": {"12_2": {"http://example.org/mill_p1": 1}, "12_3": {"": 1}},
            "collection-paragraph/part.jsonl": [{"id": "http://example.org/mill_p1", "contents": "Built\nin 1801."}],
        },
    )
    row, silent = rows("qrecc", tmp_path)
    assert row == Row(
        qid="qrecc:test:12_2",
        question="When?",
        answers=("In 1801.",),
        history=("Who built the Zorn mill?", "Ada Krell did."),
        conv_id="12",
        turn_id=2,
        rewrite="When was the Zorn mill built?",
        gold_passage_ids=("http://example.org/mill_p1",),
        kind="trec",
        data_source="qrecc",
    )
    assert (silent.answers, silent.gold_passage_ids) == ((), None)
    assert passages("qrecc", tmp_path) == {"http://example.org/mill_p1": "Built in 1801."}
    scai = {
        **{name: QRECC[name] for name in ("Question", "Conversation_no", "Turn_no", "Conversation_source", "Context")},
        **{
            "Truth_answer": "In 1801.",
            "Truth_rewrite": QRECC["Rewrite"],
            "Truth_passages": ["http://example.org/mill_p1"],
        },
    }
    (tmp_path / "scai").mkdir()
    assert rows("qrecc", put(tmp_path / "scai", {"scai-qrecc21-test-turns.json": [scai]})) == [row]


def label(kind: str, reply: str, passage: int) -> dict[str, Any]:
    evidence = {
        "passage_id": f"Zorn mill:{passage}",
        "passage_text": f"Text {passage}.",
        "passage_titles": ["Zorn mill", "Past"],
    }
    return {"responseType": kind, "response": reply, "evidence": [evidence]}


def test_inscit(tmp_path: Path) -> None:
    turns = [
        {"context": ["Who built it?"], "prevEvidence": [], "labels": [label("noAnswerNoRelevantInfo", "No idea.", 1)]},
        {
            "context": ["Who built it?", "No idea.", "When?"],
            "prevEvidence": [],
            "labels": [label("directAnswer", "In 1801.", 2), label("clarification", "The first mill?", 1)],
        },
        {"context": ["a", "b", "c"], "labels": [label("clarification", "Which?", 1)]},
    ]
    put(tmp_path, {"dev.json": {"mill dial 1": {"seedArticle": {"title": "Zorn mill"}, "turns": turns}}})
    first, row, unclear = rows("inscit", tmp_path)
    assert row == Row(
        qid="inscit:dev:mill_dial_1_2",
        question="When?",
        answers=("In 1801.", "The first mill?"),
        history=("Who built it?", "No idea."),
        conv_id="mill_dial_1",
        turn_id=2,
        gold_passage_ids=("Zorn_mill:2", "Zorn_mill:1"),
        gold_text="Text 2.",
        answerable=True,
        dialogue_act="directAnswer|clarification",
        data_source="inscit",
    )
    assert (first.answerable, unclear.answerable) == (False, None)
    assert passages("inscit", tmp_path) == {f"Zorn_mill:{n}": f'"Zorn mill > Past"\nText {n}.' for n in (1, 2)}


def turn(number: int, role: str, text: str, act: str, *references: tuple[str, str]) -> dict[str, Any]:
    spans = [{"label": "solution", "id_sp": span, "doc_id": document} for document, span in references]
    return {"turn_id": number, "role": role, "da": act, "references": spans, "utterance": text}


DIALOGUE = [
    turn(1, "user", "My mill is idle.", "query_condition", ("Idle mills#1", "1")),
    turn(2, "agent", "Is it old?", "query_condition", ("Idle mills#1", "1")),
    turn(3, "agent", "And dry?", "query_condition", ("Idle mills#1", "2")),
    turn(4, "user", "Yes. What now?", "query_solution", ("Sales#1", "1")),
    turn(5, "agent", "Sell it.", "respond_solution", ("Sales#1", "1"), ("Sales#1", "2")),
    turn(6, "user", "To whom?", "query_solution"),
    turn(7, "agent", "I cannot say.", "respond_no_solution"),
]


def document(name: str) -> dict[str, Any]:
    def span(number: str, section: str) -> dict[str, Any]:
        parents = [{"text": "Mills"}] if section == "a" else ""
        text = f"\nSection {section} of {name}.\n"
        return {"id_sp": number, "id_sec": section, "text_sec": text, "title": "What to do", "parent_titles": parents}

    return {"doc_id": name, "title": name, "spans": {"1": span("1", "a"), "2": span("2", "b")}}


def test_multidoc2dial(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "multidoc2dial_dial_train.json": {"dial_data": {"mills": [{"dial_id": "d1", "turns": DIALOGUE}]}},
            "multidoc2dial_doc.json": {"doc_data": {"mills": {n: document(n) for n in ("Idle mills#1", "Sales#1")}}},
        },
    )
    first, row, refused = rows("md2d", tmp_path)
    assert row == Row(
        qid="md2d:train:d1_4",
        question="Yes. What now?",
        answers=("Sell it.",),
        history=("My mill is idle.", "Is it old?", "", "And dry?"),
        conv_id="d1",
        turn_id=2,
        gold_passage_ids=("Sales%231:a", "Sales%231:b"),
        gold_text="Section a of Sales#1.",
        topic_shift=True,
        kind="query_solution",
        answerable=True,
        dialogue_act="respond_solution",
        data_source="md2d",
        extra={"documents": ["Sales#1"]},
    )
    assert (first.topic_shift, first.answerable, first.gold_passage_ids) == (None, None, ("Idle%20mills%231:a",))
    assert (refused.topic_shift, refused.answerable, refused.gold_passage_ids) == (None, False, None)
    corpus = passages("md2d", tmp_path)
    assert len(corpus) == 4
    assert corpus["Sales%231:a"] == '"Sales#1 > Mills > What to do"\nSection a of Sales#1.'
    assert corpus["Sales%231:b"] == '"Sales#1 > What to do"\nSection b of Sales#1.'


def test_multidoc2dial_without_documents_has_no_gold_and_shared_task_no_references(tmp_path: Path) -> None:
    said = [{"turn_id": n, "role": r, "utterance": f"u{n}"} for n, r in ((1, "user"), (2, "agent"), (3, "user"))]
    pub = [{"id": "d9_3", "ground_doc_id": "x", "dial": said}]
    put(
        tmp_path,
        {
            "multidoc2dial_dial_validation.json": {"dial_data": {"mills": [{"dial_id": "d1", "turns": DIALOGUE}]}},
            "mdd_dev_pub.json": pub,
        },
    )
    shared, *others = rows("md2d", tmp_path)
    assert (shared.qid, shared.question, shared.answers, shared.history) == ("md2d:dev:d9_3", "u3", (), ("u1", "u2"))
    assert [row.gold_passage_ids for row in others] == [None] * 3


def test_multidoc2dial_a_blank_question_costs_that_turn_only(tmp_path: Path) -> None:
    dialogue = {"dial_id": "d1", "turns": [turn(1, "user", "", "query_solution"), *DIALOGUE[1:]]}
    put(tmp_path, {"multidoc2dial_dial_train.json": {"dial_data": {"mills": [dialogue]}}})
    dropped, *others = read("md2d", tmp_path)
    assert isinstance(dropped, Dropped) and dropped.reason is Reason.MALFORMED
    assert dropped.detail.endswith("multidoc2dial_dial_train.json:7: utterance: the question is blank")
    assert [row.history[:2] for row in others if isinstance(row, Row) and row.history] == [("", "Is it old?")] * 2


def test_doc2dial(tmp_path: Path) -> None:
    turns = [
        {**turn(1, "user", "And now?", "query_solution"), "references": [{"sp_id": "1", "label": "precondition"}]},
        {**turn(2, "agent", "Sell it.", "respond_solution"), "references": [{"sp_id": "2", "label": "solution"}]},
    ]
    dialogue = {"dial_id": "d2", "doc_id": "Sales#1", "domain": "mills", "turns": turns}
    put(
        tmp_path,
        {
            "doc2dial_dial_validation.json": {"dial_data": {"mills": {"Sales#1": [dialogue]}}},
            "doc2dial_doc.json": {"doc_data": {"mills": {"Sales#1": document("Sales#1")}}},
        },
    )
    (row,) = rows("doc2dial", tmp_path)
    assert (row.qid, row.answers, row.gold_passage_ids) == ("doc2dial:dev:d2_1", ("Sell it.",), ("Sales%231:b",))


def test_faithdial(tmp_path: Path) -> None:
    edited = {
        "history": ["Hello there.", "I like mills.", "Hi!", "Who built the Zorn mill?"][1:],
        "speaker": "Wizard",
        "knowledge": "Ada Krell built it.",
        "original_response": "I did.",
        "response": "Ada Krell did.",
        "BEGIN": ["Hallucination"],
        "VRM": ["Disclosure"],
    }
    kept = {**edited, "history": ["Who?"], "original_response": None, "VRM": ["Edification", "Question"]}
    put(tmp_path, {"valid.json": [{"utterances": [edited, kept]}]})
    row, other = rows("faithdial", tmp_path)
    assert row == Row(
        qid="faithdial:dev:0_1",
        question="Who built the Zorn mill?",
        answers=("Ada Krell did.",),
        history=("I like mills.", "Hi!"),
        conv_id="0",
        turn_id=1,
        gold_passage_ids=("faithdial:ec915f8a4d61901c",),
        gold_text="Ada Krell built it.",
        data_source="faithdial",
        extra={"begin": ["Hallucination"], "vrm": ["Disclosure"], "original_response": "I did."},
    )
    assert (other.history, other.dialogue_act) == ((), "Edification|Question")
    assert passages("faithdial", tmp_path) == {"faithdial:ec915f8a4d61901c": "Ada Krell built it."}


def test_faithdial_where_the_wizard_speaks_first(tmp_path: Path) -> None:
    reply = {"history": ["Welcome.", "Who built it?"], "knowledge": "Ada.", "response": "Ada did."}
    put(tmp_path, {"train.json": [{"utterances": [reply]}]})
    (row,) = rows("faithdial", tmp_path)
    assert row.history == ("", "Welcome.")


def cast(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"number": 31, "title": "mills", "turn": [{"number": n, **turn} for n, turn in enumerate(turns, start=1)]}]


def test_cast_2019(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "evaluation_topics_v1.0.json": cast({"raw_utterance": "Who built it?"}, {"raw_utterance": "When?"}),
            "evaluation_topics_annotated_resolved_v1.0.tsv": "31_1\tWho built it?\n31_2\tWhen was it built?\n",
            "2019qrels.txt": "31_2 Q0 CAR_a 3\n31_2 Q0 MARCO_7 1\n31_2 Q0 MARCO_8 2\n",
        },
    )
    _, row = rows("cast2019", tmp_path)
    assert row == Row(
        qid="cast2019:test:31_2",
        question="When?",
        answers=(),
        history=("Who built it?", ""),
        conv_id="31",
        turn_id=2,
        rewrite="When was it built?",
        gold_passage_ids=("CAR_a", "MARCO_8"),
        data_source="cast2019",
    )


def test_cast_2020_and_2021(tmp_path: Path) -> None:
    rewrite = {"raw_utterance": "When?", "manual_rewritten_utterance": "When was it built?"}
    put(
        tmp_path,
        {
            "2020_manual_evaluation_topics_v1.0.json": cast({**rewrite, "manual_canonical_result_id": "MARCO_7"}),
            "2021_manual_evaluation_topics_v1.0.json": cast(
                {**rewrite, "canonical_result_id": "KILT_5", "passage_id": 3, "passage": "In 1801."}, rewrite
            ),
        },
    )
    (old,) = rows("cast2020", tmp_path)
    assert (old.qid, old.answers, old.rewrite) == ("cast2020:test:31_1", (), "When was it built?")
    assert old.gold_passage_ids == ("MARCO_7",)
    first, second = rows("cast2021", tmp_path)
    assert (first.answers, first.gold_passage_ids, first.gold_text) == (("In 1801.",), ("KILT_5-3",), "In 1801.")
    assert (second.history, second.answers, second.gold_passage_ids) == (("When?", "In 1801."), (), None)
    assert passages("cast2021", tmp_path) == {"KILT_5-3": "In 1801."}


def test_cast_2022_joins_the_paths_of_a_topic(tmp_path: Path) -> None:
    def said(number: str, text: str, reply: str, *provenance: str) -> dict[str, Any]:
        return {"number": number, "utterance": text, "manual_rewritten_utterance": f"{text} (the mill)",
                "response": reply, "provenance": list(provenance)}  # fmt: skip

    first = said("1-1", "Who built it?", "Ada did.", "MARCO_1-2")
    paths = [
        [first, said("1-3", "When?", "In 1801.", "MARCO_1-3")],
        [first, said("1-3", "When?", "Which one?"), said("2-1", "The big one.", "In 1802.")],
    ]
    topics = [{"number": 132, "turn": turns} for turns in paths]
    put(tmp_path, {"2022_evaluation_topics_flattened_duplicated_v1.0.json": topics})
    drafts = read("cast2022", tmp_path)
    found = [draft for draft in drafts if isinstance(draft, Row)]
    assert [row.qid for row in found] == [f"cast2022:test:132_{n}" for n in ("1-1", "1-3", "2-1")]
    assert [draft.reason for draft in drafts if isinstance(draft, Dropped)] == [Reason.REPEATED_TURN] * 2
    assert (found[1].answers, found[1].gold_passage_ids) == (("In 1801.", "Which one?"), ("MARCO_1-3",))
    assert found[1].rewrite == "When? (the mill)"
    assert (found[2].turn_id, found[2].history[-2:]) == (3, ("When?", "Which one?"))


@pytest.mark.parametrize(("year", "number"), [(2023, "1-2"), (2024, 7)])
def test_ikat(tmp_path: Path, year: int, number: str | int) -> None:
    def said(turn_id: int, text: str, *provenance: str) -> dict[str, Any]:
        return {"turn_id": turn_id, "utterance": text, "resolved_utterance": f"{text} (the mill)", "response": "Yes.",
                "ptkb_provenance": [1], "response_provenance": list(provenance)}  # fmt: skip

    turns = [said(1, "Is it old?"), said(2, "Is it dry?", "clueweb22-en0001:2")]
    put(tmp_path, {f"{year}_test_topics.json": [{"number": number, "ptkb": {"1": "I am a miller."}, "turns": turns}]})
    _, row = rows(f"ikat{year}", tmp_path)
    assert row == Row(
        qid=f"ikat{year}:test:{number}_2",
        question="Is it dry?",
        answers=("Yes.",),
        history=("Is it old?", "Yes."),
        conv_id=str(number),
        turn_id=2,
        rewrite="Is it dry? (the mill)",
        gold_passage_ids=("clueweb22-en0001:2",),
        data_source=f"ikat{year}",
        extra={"ptkb": {"1": "I am a miller."}, "ptkb_provenance": ["1"]},
    )


def test_coqa(tmp_path: Path) -> None:
    def answer(turn_id: int, text: str, start: int = 0) -> dict[str, Any]:
        return {"turn_id": turn_id, "input_text": text, "span_text": text, "span_start": start, "span_end": start + 1}

    story = {
        "source": "mctest",
        "id": "3x",
        "story": "Ada built a mill.",
        "questions": [{"turn_id": 1, "input_text": "Who?"}, {"turn_id": 2, "input_text": "Why?"}],
        "answers": [answer(1, "Ada"), answer(2, "unknown", -1)],
        "additional_answers": {"0": [answer(1, "Ada did"), answer(2, "unknown", -1)]},
    }
    put(tmp_path, {"coqa-dev-v1.0.json": {"version": "1.0", "data": [story]}})
    first, row = rows("coqa", tmp_path)
    assert first.answers == ("Ada", "Ada did") and first.answerable is True
    assert row == Row(
        qid="coqa:dev:3x_2",
        question="Why?",
        answers=("unknown",),
        history=("Who?", "Ada"),
        conv_id="3x",
        turn_id=2,
        gold_passage_ids=("coqa:3x",),
        gold_text="Ada built a mill.",
        answerable=False,
        kind="mctest",
        data_source="coqa",
    )
    assert passages("coqa", tmp_path) == {"coqa:3x": "Ada built a mill."}


def test_canard(tmp_path: Path) -> None:
    def record(number: int, *said: str) -> dict[str, Any]:
        return {"History": ["Zorn mill", "Past", *said], "QuAC_dialog_id": "C_1", "Question": f"q{number}?",
                "Question_no": number, "Rewrite": f"q{number} of the mill?"}  # fmt: skip

    put(tmp_path, {"dev.json": [record(1), record(2, "q1?", "a1")], "multiple_refs.json": [["a", "b"]]})
    row, last = rows("canard", tmp_path)
    assert row == Row(
        qid="canard:dev:C_1_1",
        question="q1?",
        answers=("a1",),
        history=(),
        conv_id="C_1",
        turn_id=1,
        rewrite="q1 of the mill?",
        data_source="canard",
        extra={"article": "Zorn mill", "section": "Past"},
    )
    assert (last.history, last.answers) == (("q1?", "a1"), ())


def test_quac(tmp_path: Path) -> None:
    def asked(number: int, *answers: str) -> dict[str, Any]:
        spans = [{"text": text, "answer_start": 0} for text in answers]
        return {"id": f"C_1_q#{number}", "question": f"q{number}?", "answers": spans, "orig_answer": spans[0],
                "followup": "y", "yesno": "x"}  # fmt: skip

    paragraph = {
        "id": "C_1",
        "context": "Ada built it. CANNOTANSWER",
        "qas": [asked(0, "Ada", "Ada K."), asked(1, "CANNOTANSWER")],
    }
    article = {"title": "Zorn mill", "section_title": "Past", "background": "", "paragraphs": [paragraph]}
    put(tmp_path, {"val_v0.2.json": {"data": [article]}})
    first, row = rows("quac", tmp_path)
    assert (first.qid, first.answers, first.answerable) == ("quac:dev:C_1_q#0", ("Ada", "Ada K."), True)
    assert row == Row(
        qid="quac:dev:C_1_q#1",
        question="q1?",
        answers=("CANNOTANSWER",),
        history=("q0?", "Ada"),
        conv_id="C_1",
        turn_id=2,
        gold_passage_ids=("quac:C_1",),
        gold_text="Ada built it.",
        answerable=False,
        dialogue_act="followup=y yesno=x",
        data_source="quac",
    )
    assert passages("quac", tmp_path) == {"quac:C_1": '"Zorn mill > Past"\nAda built it.'}


def test_orquac(tmp_path: Path) -> None:
    record = {
        "qid": "C_1_q#1",
        "question": "q1?",
        "rewrite": "q1 of the mill?",
        "evidences": ["Ada built it."],
        "retrieval_labels": [1],
        "answer": {"text": "Ada", "answer_start": 0},
        "history": [{"question": "q0?", "answer": {"text": "CANNOTANSWER", "answer_start": 4}}],
    }
    put(
        tmp_path,
        {
            "test.txt": [record],
            "qrels.txt": json.dumps({"C_1_q#1": {"12@3": 1, "12@4": 0}}),
            "all_blocks.txt": [{"id": "12@3", "title": "Zorn mill", "text": "Ada built it.", "aid": "12", "bid": 3}],
        },
    )
    (row,) = rows("orquac", tmp_path)
    assert row == Row(
        qid="orquac:test:C_1_q#1",
        question="q1?",
        answers=("Ada",),
        history=("q0?", "CANNOTANSWER"),
        conv_id="C_1",
        turn_id=2,
        rewrite="q1 of the mill?",
        gold_passage_ids=("12@3",),
        answerable=True,
        data_source="orquac",
    )
    assert passages("orquac", tmp_path) == {"12@3": '"Zorn mill"\nAda built it.'}


@pytest.mark.parametrize("source", ["nq", "hotpotqa"])
def test_single_turn(tmp_path: Path, source: str) -> None:
    record = {
        "id": "test_0",
        "question": "who built the Zorn mill",
        "golden_answers": ["Ada", "Ada K.", ""],
        "metadata": {},
    }
    corpus = [{"id": "0", "contents": '"Zorn mill"\nAda\nbuilt it.'}, {"id": "1", "title": "Mill", "text": "Old."}]
    put(tmp_path, {"test.jsonl": [record], "wiki-18.jsonl": corpus})
    (row,) = rows(source, tmp_path)
    assert row == Row(
        qid=f"{source}:test:test_0",
        question="who built the Zorn mill",
        answers=("Ada", "Ada K."),
        history=(),
        turn_id=1,
        data_source=source,
    )
    assert passages(source, tmp_path) == {"0": '"Zorn mill"\nAda\nbuilt it.', "1": '"Mill"\nOld.'}


def test_own_rows(tmp_path: Path) -> None:
    record = {"qid": "q1", "question": "When?", "history": ["Who?", "Ada."], "answers": ["1801"]}
    put(tmp_path, {"train.jsonl": [record], "passages.jsonl": [{"id": "p", "contents": "text"}]})
    assert rows("own", tmp_path) == [Row(qid="q1", question="When?", answers=("1801",), history=("Who?", "Ada."))]
    assert passages("own", tmp_path) == {"p": "text"}


@pytest.mark.parametrize(
    ("lines", "history"),
    [("User: Who?\nAssistant: Ada.\n", ("Who?", "Ada.")), ("", ()), ("They met.\n", None)],
)
def test_published_rows_tell_their_history(tmp_path: Path, lines: str, history: tuple[str, ...] | None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = f"Answer.\nConversation context:\n<context>\n{lines}</context>\nUser query:\nWhen?\n"
    record = {
        "data_source": "topiocqa",
        "prompt": [{"role": "user", "content": content}],
        "question": "When?",
        "golden_answers": ["1801"],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["1801"], "rewrite": "When was it?", "doc": ""}},
        "extra_info": {"split": "train", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "train.parquet")
    (row,) = rows("published", tmp_path)
    assert (row.qid, row.history, row.rewrite) == ("topiocqa:train:0", history, "When was it?")
    assert row.messages is not None and row.messages[0]["content"] == content


def test_what_breaks_the_format_is_named_by_file_and_line(tmp_path: Path) -> None:
    good, bad = QRECC, {**QRECC, "Turn_no": "third"}
    put(tmp_path, {"qrecc_test.json": [good, bad, "text"]})
    row, wrong, stranger = read("qrecc", tmp_path)
    assert isinstance(row, Row) and isinstance(wrong, Dropped) and isinstance(stranger, Dropped)
    opening = [n for n, line in enumerate((tmp_path / "qrecc_test.json").read_text().split("\n"), 1) if line == " {"]
    line = opening[1]
    assert wrong.detail == f"{tmp_path}/qrecc_test.json:{line}: Turn_no: must be a whole number; found 'third'"
    assert wrong.place == f"{tmp_path}/qrecc_test.json:{line}"
    assert stranger.detail == f"{tmp_path}/qrecc_test.json: record 2: must be an object, is a str"
    put(tmp_path, {"qrecc_test.json": '[\n{"Context": []},\n{"Context" []}]'})
    with pytest.raises(DataError, match=r"qrecc_test\.json:3: not JSON: Expecting ':' delimiter \(column 12\)"):
        read("qrecc", tmp_path)


def test_a_broken_line_costs_that_line_only(tmp_path: Path) -> None:
    record = json.dumps({"id": "a", "question": "who", "golden_answers": ["x"]})
    (tmp_path / "test.jsonl").write_bytes(f"{record}\n{{oops\n\n".encode() + b'{"id": "\xff"}\n' + record.encode())
    first, broken, latin, last = read("nq", tmp_path)
    assert isinstance(first, Row) and isinstance(last, Row)
    assert isinstance(broken, Dropped) and broken.place == f"{tmp_path}/test.jsonl:2"
    assert isinstance(latin, Dropped) and latin.detail.startswith(f"{tmp_path}/test.jsonl:4: not JSON: 'utf-8'")


def test_a_folder_without_the_files_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of topiocqa in it; looked for names like 'topiocqa_"):
        SOURCES["topiocqa"].split_files(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        SOURCES["topiocqa"].split_files(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"unknown data set 'topioqa' \(did you mean 'topiocqa'\?\)"):
        SOURCES["topioqa"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(("topiocqa_train.jsonl", "train"), ("valid.json", "dev"), ("multidoc2dial_dial_validation.json", "dev")),
        *(("2023_test_topics.json", "test"), ("contest.json", None), ("val_v0.2.json", None)),
    ],
)
def test_the_split_is_a_word_of_the_name(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_a_broken_passage_costs_that_record_only(tmp_path: Path) -> None:
    listed = SOURCES["topiocqa"].passages
    assert listed is not None
    records = [topiocqa(1, "Zorn mill", "Ada Krell"), topiocqa(1, "Krell", "1801"), topiocqa(2, "Krell", "1801")]
    put(tmp_path, {"topiocqa_dev.json": records})
    first, twice, last = listed(tmp_path)
    assert not isinstance(first, Dropped) and not isinstance(last, Dropped) and (first.id, last.id) == ("17", "27")
    assert isinstance(twice, Dropped) and twice.reason is Reason.MALFORMED
    assert re.search(r"topiocqa_dev\.json:\d+: Gold_passage: passage '17' has another text here than at", twice.detail)
    put(tmp_path, {"full_wiki_segments.tsv": "id\ttext\ttitle\n1\tText\n2\tText\tMill\n3\t \tMill\n"})
    short, good, blank = listed(tmp_path)
    assert isinstance(short, Dropped) and short.detail.endswith("segments.tsv:2: has 2 cells, the table has 3 columns")
    assert not isinstance(good, Dropped) and good.id == "2"
    assert isinstance(blank, Dropped) and ":4: text: must be a non-empty string" in blank.detail
