"""Supervised rows made from conversations with gold supervision."""

from dataclasses import replace

from search_r1.codec import Codec
from search_r1.datasets.rows import Row
from search_r1.demonstrations import DemonstrationWriter
from search_r1.prompts import PromptBuilder
from search_r1.testing import CharTokenizer
from verl.types import Document

ROW = Row(
    qid="q1",
    question="When?",
    answers=("1990", "in 1990"),
    history=("Who wrote it?", "Ann Lee."),
    rewrite="When did Ann Lee write it?",
    gold_passage_ids=("d7",),
)
FOUND = {"When did Ann Lee write it?": [Document("d7", "Ann Lee", "She wrote it in 1990.")]}


def writer(limit: int = 1000, require_gold: bool = True) -> DemonstrationWriter:
    codec = Codec(CharTokenizer())
    prompts = PromptBuilder(codec, "compact", "all", limit)
    return DemonstrationWriter(codec, prompts, lambda query: FOUND.get(query, []), 1000, require_gold)


def test_a_row_becomes_the_episode_that_should_have_been() -> None:
    (made,) = writer().write([ROW])
    assert made["segments"] == [
        ["prompt", "<context>\nUser: Who wrote it?\nAssistant: Ann Lee.\n</context>\nUser: When?"],
        ["model", "<think> The question depends on the context. </think><search> When did Ann Lee write it? </search>"],
        ["env", "\n\n<information>Doc 1(Title: Ann Lee) She wrote it in 1990.</information>\n\n"],
        ["model", "<think> The passages answer this. </think><answer> 1990 </answer>"],
    ]


def test_unusable_rows_are_counted_by_reason() -> None:
    rows = [
        replace(ROW, rewrite=None),
        replace(ROW, gold_passage_ids=("d8",)),
        replace(ROW, question="x" * 2000),
        replace(ROW, question="First?", history=(), rewrite=None, gold_passage_ids=None),
    ]
    writing = writer()
    made = list(writing.write(rows))
    assert writing.outcome.dropped == {"no_rewrite": 1, "gold_not_retrieved": 1, "prompt_too_long": 1}
    assert writing.outcome.kept == len(made) == 1
    assert "clear as it stands" in made[0]["segments"][1][1]  # a first question needs no rewrite


def test_rows_without_their_gold_passage_can_be_kept() -> None:
    assert len(list(writer(require_gold=False).write([replace(ROW, gold_passage_ids=("d8",))]))) == 1
