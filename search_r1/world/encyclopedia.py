"""Entities, their facts and the passages about them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_r1.world.names import NamePool
from search_r1.world.ontology import KINDS, NUMBER, PERSON, Attribute, Kind, statement

_FACTS_PER_ENTITY = 4
_NAMESAKE_SHARE = 0.1
_PASSAGES_PER_PERSON = 20


@dataclass(frozen=True)
class Fact:
    """One attribute of one entity; ``target`` is the index of the entity that the value names, if any."""

    attribute: Attribute
    value: str
    target: int | None

    @property
    def answer(self) -> str:
        """The value without its kind word: a guessed kind must not earn half of a token-overlap score."""
        return self.value.split()[-1]


@dataclass(frozen=True)
class Entity:
    """One article: ``name`` is kind word and stem, ``index`` its position in the encyclopedia."""

    index: int
    kind: Kind
    stem: str
    facts: tuple[Fact, ...]

    @property
    def name(self) -> str:
        """Full name, e.g. ``Fort Torva``."""
        return f"{self.kind.word} {self.stem}"

    @property
    def passage_id(self) -> str:
        """Stable id of the passage, e.g. ``fort-torva``."""
        return f"{self.kind.word}-{self.stem}".lower()

    @property
    def text(self) -> str:
        """Body of the passage: one sentence per fact."""
        return " ".join(self.sentence(fact) for fact in self.facts)

    def sentence(self, fact: Fact) -> str:
        """The sentence of the passage that states ``fact``."""
        return statement(fact.attribute.noun, self.name, fact.value)

    def passage(self) -> dict[str, str]:
        """Corpus record with the keys ``id``, ``contents`` (quoted title, newline, body), ``title`` and ``text``."""
        return {
            "id": self.passage_id,
            "contents": f'"{self.name}"\n{self.text}',
            "title": self.name,
            "text": self.text,
        }


@dataclass(frozen=True)
class Encyclopedia:
    """All entities of one split; relations never leave it, and neither do names."""

    split: str
    entities: tuple[Entity, ...]

    def with_attribute(self, noun: str) -> list[Entity]:
        """Entities whose passage states the attribute ``noun``."""
        return [e for e in self.entities if any(f.attribute.noun == noun for f in e.facts)]

    def stems(self) -> set[str]:
        """Every invented stem that occurs in the passages, of entities and of people."""
        found = {e.stem for e in self.entities}
        found.update(f.value for e in self.entities for f in e.facts if f.attribute.value == PERSON)
        return found


def build_encyclopedia(split: str, per_kind: int, seed: int) -> Encyclopedia:
    """Builds ``per_kind`` entities of every kind from the names of ``split``.

    The same arguments always give the same encyclopedia. Raises ``IndexError`` when the split has too few names and
    ``ValueError`` for a non-positive size.
    """
    if per_kind <= 0:
        raise ValueError(f"per_kind must be positive, got {per_kind}")
    rng = random.Random(f"encyclopedia/{split}/{per_kind}/{seed}")
    pool = NamePool(split, rng)
    stems = _stems_by_kind(pool, per_kind, rng)
    members = {kind.word: range(i * per_kind, (i + 1) * per_kind) for i, kind in enumerate(KINDS)}
    names = [f"{kind.word} {stem}" for kind in KINDS for stem in stems[kind.word]]
    n_people = max(2, per_kind * len(KINDS) * 2 // _PASSAGES_PER_PERSON)
    people = [pool.draw() for _ in range(n_people)]
    entities = []
    for kind in KINDS:
        for index, stem in zip(members[kind.word], stems[kind.word], strict=True):
            entities.append(Entity(index, kind, stem, _facts(kind, members, names, people, rng)))
    return Encyclopedia(split, tuple(entities))


def _stems_by_kind(pool: NamePool, per_kind: int, rng: random.Random) -> dict[str, list[str]]:
    """Stems of every kind; some are borrowed from another kind, so that "Fort Torva" and "Lake Torva" both exist."""
    stems: dict[str, list[str]] = {}
    for kind in KINDS:
        own: list[str] = []
        elsewhere = [stem for others in stems.values() for stem in others]
        for _ in range(per_kind):
            if elsewhere and rng.random() < _NAMESAKE_SHARE:
                own.append(elsewhere.pop(rng.randrange(len(elsewhere))))
            else:
                own.append(pool.draw())
        # A stem borrowed from two different kinds may arrive twice.
        stems[kind.word] = _without_repeats(own, pool)
    return stems


def _without_repeats(stems: list[str], pool: NamePool) -> list[str]:
    seen: set[str] = set()
    for i, stem in enumerate(stems):
        if stem in seen:
            stems[i] = pool.draw()
        seen.add(stems[i])
    return stems


def _facts(
    kind: Kind, members: Mapping[str, range], names: Sequence[str], people: Sequence[str], rng: random.Random
) -> tuple[Fact, ...]:
    relations = [a for a in kind.attributes if a.is_relation]
    numbers = [a for a in kind.attributes if a.value == NUMBER]
    persons = [a for a in kind.attributes if a.value == PERSON]
    chosen = rng.sample(relations, rng.choice((1, 2)))
    if rng.random() < 0.5:
        chosen.append(rng.choice(numbers))
    chosen += rng.sample(persons, _FACTS_PER_ENTITY - len(chosen))
    rng.shuffle(chosen)
    return tuple(_fact(attribute, members, names, people, rng) for attribute in chosen)


def _fact(
    attribute: Attribute, members: Mapping[str, range], names: Sequence[str], people: Sequence[str], rng: random.Random
) -> Fact:
    if attribute.value == PERSON:
        return Fact(attribute, rng.choice(people), None)
    if attribute.value == NUMBER:
        return Fact(attribute, str(rng.randint(101, 999)), None)
    target = rng.choice(members[attribute.value])
    return Fact(attribute, names[target], target)
