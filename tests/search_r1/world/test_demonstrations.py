import random
import re

import pytest

from search_r1.world.conversations import Turn
from search_r1.world.demonstrations import (
    GOLD,
    RAW,
    WRONG,
    Demonstrator,
    Mixture,
    ModeWeights,
    final_turn,
    first_turn,
    information,
)
from search_r1.world.encyclopedia import Entity, Fact, build_encyclopedia
from search_r1.world.names import stems_of
from search_r1.world.ontology import KIND_BY_WORD

FIRST = re.compile(r"<think> [^<]+ </think><search> [^<]+ </search>")
FINAL = re.compile(r"<think> [^<]+ </think><answer> [^<]+ </answer>")


@pytest.fixture
def demonstrator():
    return Demonstrator(build_encyclopedia("practice", 20, 0), random.Random(0))


@pytest.fixture
def fort():
    warden = next(a for a in KIND_BY_WORD["Fort"].attributes if a.noun == "warden")
    return Entity(0, KIND_BY_WORD["Fort"], "Torva", (Fact(warden, "Nazel", None),))


def test_the_three_modes_differ_from_their_first_word_on(fort):
    turn = Turn("ellipsis", "And the warden?", fort, fort.facts[0], False)
    lake = Entity(1, KIND_BY_WORD["Lake"], "Dovo", ())
    assert first_turn(GOLD, turn, lake) == (
        "<think> It is about Fort Torva. </think><search> Who is the warden of Fort Torva? </search>"
    )
    assert first_turn(RAW, turn, lake) == "<think> I search as asked. </think><search> And the warden? </search>"
    assert first_turn(WRONG, turn, lake) == (
        "<think> Perhaps Lake Dovo. </think><search> Who is the warden of Lake Dovo? </search>"
    )


def test_reading_is_copying_the_sentence_and_its_value(fort):
    assert final_turn(fort, fort.facts[0]) == ("<think> Fort Torva has warden Nazel. </think><answer> Nazel </answer>")
    assert information([fort]) == (
        "\n\n<information>Doc 1(Title: Fort Torva) Fort Torva has warden Nazel.</information>\n\n"
    )


@pytest.mark.parametrize("modes", [ModeWeights(1, 0, 0), ModeWeights(0, 1, 0), ModeWeights(0, 0, 1)])
def test_an_episode_has_two_turns_around_its_information(demonstrator, modes):
    for _ in range(30):
        segments = demonstrator.episode(modes)["segments"]
        assert [origin for origin, _ in segments] == ["prompt", "model", "env", "model"]
        prompt, first, documents, final = (text for _, text in segments)
        assert prompt.startswith("<|im_start|>user\n<context>\n") and prompt.endswith("<|im_start|>assistant\n")
        assert FIRST.fullmatch(first) and FINAL.fullmatch(final)
        sentence = final.removeprefix("<think> ").split(" </think>")[0]
        assert sentence in documents
        assert documents.count("Doc ") == 3


def test_a_gold_query_is_answered_from_the_entity_it_names(demonstrator):
    for _ in range(30):
        _, (_, first), _, (_, final) = demonstrator.episode(ModeWeights(1, 0, 0))["segments"]
        name = first.removeprefix("<think> It is about ").split(".")[0]
        assert final.startswith(f"<think> {name} has ")


def test_rows_about_practice_worlds_never_use_the_names_of_other_splits(demonstrator):
    reserved = {stem for split in ("train", "dev", "test") for stem in stems_of(split)}
    mixture = Mixture(1, 1, 1, 1, 1, modes=ModeWeights(1, 1, 1))
    for _ in range(100):
        text = " ".join(text for _, text in demonstrator.row(mixture)["segments"])
        assert not reserved & set(re.findall(r"[A-Z][a-z]+", text))


def test_the_seed_decides_the_rows():
    def rows(seed):
        demonstrator = Demonstrator(build_encyclopedia("practice", 20, 0), random.Random(seed))
        return [demonstrator.row(Mixture(1, 1, 1, 1, 1)) for _ in range(20)]

    assert rows(1) == rows(1) != rows(2)
