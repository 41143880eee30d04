import itertools
import random

import pytest

from search_r1.world.conversations import Turn, rows, write_conversation, write_conversations
from search_r1.world.encyclopedia import build_encyclopedia
from search_r1.world.ontology import KINDS


@pytest.fixture(scope="module")
def world():
    return build_encyclopedia("dev", 40, 0)


@pytest.fixture(scope="module")
def conversations(world):
    return write_conversations(world, 60, 0)


def resolve(history: list[str], question: str) -> str:
    """What the last question is about, by the two documented rules and from the text alone."""
    words = {kind.word: kind for kind in KINDS}
    latest: dict[str, str] = {}
    topic = ""
    lines = [*history, question]
    for i, line in enumerate(lines):
        tokens = [token.strip("?.,") for token in line.split()]
        for word, stem in itertools.pairwise(tokens):
            if word in words:
                latest[word] = f"{word} {stem}"
                if i % 2 == 0:
                    topic = latest[word]
        referred = [kind.word for kind in KINDS if kind.noun in tokens] if i % 2 == 0 else []
        if referred:
            topic = latest[referred[0]]
    return topic


def test_every_turn_is_decidable_from_the_text(conversations):
    for turns in conversations:
        history: list[str] = []
        for turn in turns:
            assert resolve(history, turn.question) == turn.entity.name
            history += [turn.question, turn.reply]


def test_moves_and_lengths(conversations):
    kinds = [turn.kind for turns in conversations for turn in turns]
    assert all(8 <= len(turns) <= 10 for turns in conversations)
    for kind in ("first", "ellipsis", "pronoun", "shift", "jump", "return"):
        assert kinds.count(kind) / len(kinds) > 0.05
    assert all(turns[0].kind == "first" and not turns[0].topic_shift for turns in conversations)


def test_no_fact_is_asked_twice_and_each_is_in_the_gold_passage(conversations):
    for turns in conversations:
        asked = [(turn.entity.index, turn.fact.attribute.noun) for turn in turns]
        assert len(set(asked)) == len(asked)
        for turn in turns:
            assert turn.entity.sentence(turn.fact) in turn.entity.text


def test_only_first_and_jump_turns_name_their_entity(conversations):
    for turn in (turn for turns in conversations for turn in turns):
        assert (turn.entity.name in turn.question) == (turn.kind in ("first", "jump"))


def test_rows_carry_the_whole_history(world):
    entity = world.entities[0]
    first, second = (Turn("first", f"Q{i}?", entity, fact, False) for i, fact in enumerate(entity.facts[:2]))
    one, two = rows([[first, second]], "dev")
    assert one["qid"] == "dev-0000-1" and one["history"] == [] and one["turn_id"] == 1
    assert two["history"] == ["Q0?", entity.facts[0].value]
    assert two["answers"] == [entity.facts[1].value.split()[-1]]
    assert two["gold_passage_ids"] == [entity.passage_id]
    assert two["rewrite"].endswith(f" of {entity.name}?")


def test_same_seed_same_conversations(world):
    assert write_conversations(world, 5, 3) == write_conversations(world, 5, 3)
    assert write_conversation(world, random.Random(1)) != write_conversation(world, random.Random(2))
