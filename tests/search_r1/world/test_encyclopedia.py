import itertools

import pytest

from search_r1.world.encyclopedia import Entity, Fact, build_encyclopedia
from search_r1.world.names import split_of
from search_r1.world.ontology import KIND_BY_WORD, KINDS


def _attribute(kind_word, noun):
    return next(a for a in KIND_BY_WORD[kind_word].attributes if a.noun == noun)


def test_passage_of_a_hand_made_entity():
    facts = (Fact(_attribute("Fort", "warden"), "Nazel", None), Fact(_attribute("Fort", "lookout"), "Mount Bela", 3))
    entity = Entity(0, KIND_BY_WORD["Fort"], "Torva", facts)
    assert [fact.answer for fact in facts] == ["Nazel", "Bela"]
    text = "Fort Torva has warden Nazel. Fort Torva has lookout Mount Bela."
    assert entity.passage() == {
        "id": "fort-torva",
        "contents": f'"Fort Torva"\n{text}',
        "title": "Fort Torva",
        "text": text,
    }


def test_same_seed_same_world_and_other_seed_other_world():
    assert build_encyclopedia("dev", 20, 7) == build_encyclopedia("dev", 20, 7)
    assert build_encyclopedia("dev", 20, 7) != build_encyclopedia("dev", 20, 8)


@pytest.mark.parametrize("split", ["train", "dev", "test", "practice"])
def test_every_name_belongs_to_the_split(split):
    world = build_encyclopedia(split, 40, 0)
    assert {split_of(stem) for stem in world.stems()} == {split}


def test_no_two_splits_share_a_name():
    stems = [build_encyclopedia(split, 40, 0).stems() for split in ("train", "dev", "test", "practice")]
    for one, other in itertools.combinations(stems, 2):
        assert not one & other


def test_facts_are_complete_and_relations_stay_inside_and_change_kind():
    world = build_encyclopedia("dev", 40, 1)
    assert len(world.entities) == 40 * len(KINDS)
    assert len({e.passage_id for e in world.entities}) == len(world.entities)
    for entity in world.entities:
        assert len({f.attribute.noun for f in entity.facts}) == len(entity.facts) == 4
        for fact in entity.facts:
            if fact.attribute.is_relation:
                target = world.entities[fact.target]
                assert (target.name, target.kind.word) == (fact.value, fact.attribute.value)
                assert target.kind is not entity.kind
            else:
                assert fact.target is None


def test_namesakes_of_another_kind_exist():
    world = build_encyclopedia("dev", 40, 0)
    assert len({e.stem for e in world.entities}) < len(world.entities)


def test_a_world_needs_entities():
    with pytest.raises(ValueError, match="positive"):
        build_encyclopedia("dev", 0, 0)
