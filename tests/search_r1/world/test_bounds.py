"""How well plain BM25 pipelines do on the dev split: the room that learning to rewrite has.

The test split is only counted, never measured: it is kept for reported results.
"""

import bm25s
import pytest
import Stemmer

from search_r1.world import DEFAULT_WORLD, build_corpus, build_rows
from search_r1.world.names import split_of


@pytest.fixture(scope="module")
def corpus():
    return build_corpus()


@pytest.fixture(scope="module")
def dev():
    return build_rows("dev")


@pytest.fixture(scope="module")
def recall_at_3(corpus, dev):
    stemmer = Stemmer.Stemmer("english")

    def tokens(texts):
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)

    index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    index.index(tokens([passage["contents"] for passage in corpus]), show_progress=False)

    def measure(make_query) -> float:
        found, _ = index.retrieve(tokens([make_query(row) for row in dev]), k=3, show_progress=False)
        hits = [
            row["gold_passage_ids"][0] in {corpus[i]["id"] for i in ids} for row, ids in zip(dev, found, strict=True)
        ]
        return sum(hits) / len(hits)

    return measure


def test_last_question_alone_is_not_enough(recall_at_3):
    assert recall_at_3(lambda row: row["question"]) <= 0.30


def test_pasting_the_history_is_not_enough(recall_at_3):
    assert recall_at_3(lambda row: " ".join([*row["history"], row["question"]])) <= 0.60
    assert recall_at_3(lambda row: " ".join([*row["history"][::2], row["question"]])) <= 0.60


def test_the_gold_rewrite_finds_the_passage(recall_at_3):
    assert recall_at_3(lambda row: row["rewrite"]) >= 0.95


def test_most_frequent_answers_do_not_help(dev):
    train_answers = [row["answers"][0] for row in build_rows("train")]
    best = max(set(train_answers), key=train_answers.count)
    assert sum(row["answers"][0] == best for row in dev) / len(dev) < 0.02


def test_sizes(corpus, dev):
    assert len(corpus) == 6 * sum(size.per_kind for size in DEFAULT_WORLD.splits.values())
    assert len({passage["id"] for passage in corpus}) == len(corpus)
    assert len(dev) >= 300 and len(build_rows("test")) >= 600 and len(build_rows("train")) >= 2000


def test_splits_share_no_passage_and_no_answer_name():
    gold = {s: {i for row in build_rows(s) for i in row["gold_passage_ids"]} for s in DEFAULT_WORLD.splits}
    assert not gold["train"] & gold["dev"] and not gold["train"] & gold["test"] and not gold["dev"] & gold["test"]
    for split in DEFAULT_WORLD.splits:
        names = [row["answers"][0].split()[-1] for row in build_rows(split) if not row["answers"][0].isdigit()]
        assert {split_of(name) for name in names} == {split}
