"""Our scores beside independent ones: SQuAD's from a package, and the published reward written down anew.

The published reward reads prompt and response as one text with regular expressions; that is written down here from its
description and compared with ours on made-up episodes, where its documented defects do not bite (equal) and where they
do (the difference is the expected one).
"""

from __future__ import annotations

import random
import re
import string

import pytest

from search_r1.codec import Codec
from search_r1.config import RewardConfig
from search_r1.datasets.rows import Row
from search_r1.rewards.formulas import score
from search_r1.rewards.text import exact_match, f1
from search_r1.rewards.view import EpisodeView
from search_r1.testing import CharTokenizer
from verl.types import Document, Origin, SearchCall, Segment, StopReason, Trajectory

_PLAIN = "a an the The A. THE an, cat cats cat's don't U.S.A. 3.14 1,000 -5 o'the theatre an1 _a_ 100% & <b> / ... --"
_FOREIGN = "naïve café Köln 東京 ١٢ «x» “q” ½ ß İ I ǅ — … É é e\u0301 \u200b"
WORDS = [*_PLAIN.split(), *_FOREIGN.split(), "\u00a0", "\u3000", "\t", "\\", "the-cat"]


def random_pairs(count: int) -> list[tuple[str, str]]:
    """Half of the pairs share words; a part are edits of each other; a part are random characters."""
    rng = random.Random(7)
    alphabet = string.printable + "éß東\u00a0\u0301İ–’"
    pairs = []
    for index in range(count):
        left = [rng.choice(WORDS) for _ in range(rng.randrange(0, 9))]
        if index % 4 == 0:
            right = list(left)
            for _ in range(rng.randrange(0, 3)):
                right.insert(rng.randrange(0, len(right) + 1), rng.choice(WORDS))
        elif index % 4 == 1:
            right = rng.sample(left, len(left))
        elif index % 4 == 2:
            right = [rng.choice(WORDS) for _ in range(rng.randrange(0, 9))]
        else:
            left = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(0, 25)))]
            right = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(0, 25)))]
        pairs.append((" ".join(left), " ".join(right)))
    return pairs


def test_em_and_f1_equal_an_independent_scorer_on_ten_thousand_pairs() -> None:
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    pairs = random_pairs(10_000)
    assert 0.1 < sum(exact_match(*pair) for pair in pairs) / len(pairs) < 0.9  # there is something to disagree about
    different = [
        (prediction, reference)
        for prediction, reference in pairs
        if exact_match(prediction, reference) != compute_exact(reference, prediction)
        or f1(prediction, reference) != pytest.approx(compute_f1(reference, prediction), abs=1e-12)
    ]
    assert different == []


# ---------------------------------------------------------------------------------------------------------------
# The published reward


def published_f1(prediction: str, gold: str) -> float:
    def words(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    left, right = words(prediction), words(gold)
    if not left or not right:
        return float(left == right)
    common = len(set(left) & set(right))
    precision, recall = common / len(left), common / len(right)
    return 0.0 if common == 0 else 2 * precision * recall / (precision + recall)


def published(whole: str, targets: list[str], rewrite: str, alpha: float) -> float:
    """R = max F1 + alpha * max F1(search block, rewrite), over prompt and response decoded as one text."""
    answers = list(re.finditer(r"<answer>(.*?)</answer>", whole, re.DOTALL))
    if len(answers) < 2:
        return 0.0
    answer = answers[-1].group(1).strip()
    blocks = re.findall(r"<search>(.*?)</search>", whole[: answers[-1].end()], re.DOTALL | re.IGNORECASE)
    intent = max((published_f1(block, rewrite) for block in blocks), default=0.0)
    return max(published_f1(answer, target) for target in targets) + alpha * intent


CODEC = Codec(CharTokenizer())
HARMLESS = "Answer in a block, as in <answer> zzz </answer>.\n"
CHATR1 = RewardConfig(preset="chatr1", function="f1", f1_mode="chatr1", rewrite_score=0.2)
_SENTENCE = "the red fox and a blue whale met in Oslo, Oslo! twice; fox's whale-song"
VOCABULARY = _SENTENCE.split()


def ours(prompt: str, queries: list[str], answer: str | None, row: Row) -> tuple[float, str]:
    """Return our reward of an episode and its whole text."""
    segments, text = [Segment(Origin.PROMPT, CODEC.encode(prompt))], prompt

    def add(origin: Origin, piece: str) -> None:
        nonlocal text
        ids = CODEC.encode(piece)
        model = origin is Origin.MODEL
        segments.append(Segment(origin, ids, (0.0,) * len(ids) if model else None, 0 if model else None))
        text += piece

    searches = []
    for turn, query in enumerate(queries):
        add(Origin.MODEL, f"<think>t</think><search> {query} </search>")
        add(Origin.ENV, "\n\n<information>Doc 1(Title: T) x</information>\n\n")
        searches.append(SearchCall(turn, query, (Document("d", "T", "x"),)))
    add(Origin.MODEL, "<think>t</think>" + ("" if answer is None else f"<answer> {answer} </answer>"))
    stop = StopReason.TURN_LIMIT if answer is None else StopReason.ANSWERED
    trajectory = Trajectory("q#0", "q", tuple(segments), stop, tuple(searches), prediction=answer, row=row.to_json())
    return score(EpisodeView.of(trajectory, CODEC), CHATR1).total, text


def phrase(rng: random.Random, least: int = 1) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randrange(least, 8)))


def test_published_reward_is_reproduced_where_no_defect_bites() -> None:
    rng = random.Random(11)
    values = []
    for _ in range(2_000):
        row = Row("q", "?", tuple(phrase(rng) for _ in range(rng.randrange(1, 4))), rewrite=phrase(rng), history=())
        queries = [phrase(rng) for _ in range(rng.randrange(0, 4))]
        mine, text = ours(HARMLESS, queries, phrase(rng) if rng.random() < 0.9 else None, row)
        assert mine == pytest.approx(published(text, list(row.answers), row.rewrite or "", 0.2), abs=1e-12), text
        values.append(mine)
    assert len({round(value, 6) for value in values}) > 200 and min(values) == 0.0 and max(values) > 1.0


ROW = Row("q", "?", ("red fox", "a fox"), rewrite="where did the red fox meet a blue whale", history=())
PERFECT = "where did the red fox meet a blue whale"


def test_defect_1_one_perfect_query_is_hidden_by_a_search_tag_of_the_prompt() -> None:
    prompt = HARMLESS + "You may issue several <search> queries, one at a time, and read what comes back. " + "x " * 40
    mine, text = ours(prompt, [PERFECT], "red fox", ROW)
    theirs = published(text, list(ROW.answers), PERFECT, 0.2)
    assert mine == pytest.approx(1.2) and 1.0 < theirs < 1.1
    again, text = ours(prompt, [PERFECT, PERFECT], "red fox", ROW)  # only from the second search on are both equal
    assert again == pytest.approx(published(text, list(ROW.answers), PERFECT, 0.2)) == pytest.approx(1.2)


def test_defect_2_answers_are_lost_or_invented_with_the_prompts_example() -> None:
    mine, text = ours("A prompt whose example was cut away.\n", [PERFECT], "red fox", ROW)
    assert mine == pytest.approx(1.2) and published(text, list(ROW.answers), PERFECT, 0.2) == 0.0
    mine, text = ours(HARMLESS + "Write between <answer> and </answer>.\n", [], None, ROW)
    row = Row("q", "?", ("and",), rewrite=None, history=())
    assert published(text, ["and"], "", 0.0) == 1.0  # the hint's words are taken for the answer
    assert ours(HARMLESS + "Write between <answer> and </answer>.\n", [], None, row)[0] == 0.0


def test_defect_13_repeated_words_lower_the_set_form_and_not_the_multiset_form() -> None:
    assert published_f1("go go gone", "go go gone") == pytest.approx(2 / 3)
    assert f1("go go gone", "go go gone") == 1.0
