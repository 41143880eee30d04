"""Conversations about an encyclopedia, with gold rewrites and gold passages.

A conversation walks over the relations of the encyclopedia. What a follow-up question means is always decidable by two
rules, and the generator checks both for every turn it writes:

* a kind word ("that fort") means the most recent entity of that kind, whoever mentioned it;
* a pronoun or nothing at all ("And the warden?") means what the previous turn was about.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from search_r1.world.encyclopedia import Encyclopedia, Entity, Fact
from search_r1.world.ontology import Attribute, full_question

FIRST, ELLIPSIS, PRONOUN, SHIFT, JUMP, RETURN = "first", "ellipsis", "pronoun", "shift", "jump", "return"


@dataclass(frozen=True)
class Turn:
    """One question and its answer; ``entity`` is what it is about and ``fact`` what it asks for."""

    kind: str
    question: str
    entity: Entity
    fact: Fact
    topic_shift: bool

    @property
    def rewrite(self) -> str:
        """The question with everything resolved."""
        return full_question(self.fact.attribute, self.entity.name)

    @property
    def reply(self) -> str:
        """What the assistant says in the history: the value in full, so that "that fort" has something to refer to."""
        return self.fact.value

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.fact.answer


@dataclass(frozen=True)
class ConversationSettings:
    """Length (in turns) and the relative weights of the moves from one turn to the next.

    ``shift`` goes on with an entity that the last answer named, ``jump`` starts with an entity named in full and
    ``back`` returns to an earlier topic by its kind.
    """

    min_turns: int = 8
    max_turns: int = 10
    stay: float = 1.7
    shift: float = 6.0
    jump: float = 1.0
    back: float = 1.0
    relation_preference: float = 8.0


@dataclass
class _State:
    """What has been said so far."""

    turns: list[Turn] = field(default_factory=list)
    latest_of_kind: dict[str, Entity] = field(default_factory=dict)
    topics: dict[int, Entity] = field(default_factory=dict)
    asked: set[tuple[int, str]] = field(default_factory=set)

    def open_facts(self, entity: Entity) -> list[Fact]:
        return [f for f in entity.facts if (entity.index, f.attribute.noun) not in self.asked]


def write_conversation(
    world: Encyclopedia, rng: random.Random, settings: ConversationSettings | None = None
) -> list[Turn]:
    """One conversation of at most ``settings.max_turns`` turns."""
    settings = settings or ConversationSettings()
    state = _State()
    for _ in range(rng.randint(settings.min_turns, settings.max_turns)):
        move, entity = _next_move(state, world, rng, settings)
        _say(state, move, entity, world, rng, settings)
    return state.turns


def _next_move(
    state: _State, world: Encyclopedia, rng: random.Random, settings: ConversationSettings
) -> tuple[str, Entity]:
    if not state.turns:
        return FIRST, rng.choice(world.entities)
    options: list[tuple[float, str, Entity]] = [(settings.jump, JUMP, _fresh_entity(state, world, rng))]
    topic = state.turns[-1].entity
    if state.open_facts(topic):
        options.append((settings.stay, ELLIPSIS if rng.random() < 0.5 else PRONOUN, topic))
    named = [e for e in state.latest_of_kind.values() if e.index not in state.topics]
    if named:
        options.append((settings.shift, SHIFT, rng.choice(named)))
    earlier = [e for e in state.topics.values() if _can_return(state, e, topic)]
    if earlier:
        options.append((settings.back, RETURN, rng.choice(earlier)))
    weights = [weight for weight, _, _ in options]
    _, move, entity = rng.choices(options, weights)[0]
    return move, entity


def _fresh_entity(state: _State, world: Encyclopedia, rng: random.Random) -> Entity:
    while True:
        entity = rng.choice(world.entities)
        if entity.index not in state.topics:
            return entity


def _can_return(state: _State, entity: Entity, topic: Entity) -> bool:
    is_latest = state.latest_of_kind[entity.kind.word] is entity
    return entity is not topic and is_latest and bool(state.open_facts(entity))


def _say(
    state: _State,
    move: str,
    entity: Entity,
    world: Encyclopedia,
    rng: random.Random,
    settings: ConversationSettings,
) -> None:
    facts = state.open_facts(entity)
    weights = [settings.relation_preference if f.attribute.is_relation else 1.0 for f in facts]
    fact = rng.choices(facts, weights)[0]
    _check_reference(state, move, entity)
    shifted = bool(state.turns) and state.turns[-1].entity is not entity
    state.turns.append(Turn(move, _question(move, entity, fact.attribute, rng), entity, fact, shifted))
    state.asked.add((entity.index, fact.attribute.noun))
    state.topics[entity.index] = entity
    state.latest_of_kind[entity.kind.word] = entity
    if fact.target is not None:
        named = world.entities[fact.target]
        state.latest_of_kind[named.kind.word] = named


def _check_reference(state: _State, move: str, entity: Entity) -> None:
    if move in (SHIFT, RETURN, ELLIPSIS, PRONOUN) and state.latest_of_kind[entity.kind.word] is not entity:
        raise AssertionError(f"{move}: {entity.name} is not the latest {entity.kind.noun}")


def _question(move: str, entity: Entity, attribute: Attribute, rng: random.Random) -> str:
    noun, ask = attribute.noun, attribute.ask
    forms = {
        FIRST: (full_question(attribute, entity.name), f"I read about {entity.name}. {ask} the {noun}?"),
        JUMP: (f"Now {entity.name}. {ask} the {noun}?", full_question(attribute, entity.name)),
        ELLIPSIS: (f"And the {noun}?", f"What about the {noun}?"),
        PRONOUN: (f"{ask} its {noun}?", attribute.verbal),
        SHIFT: (f"{ask} the {noun} of that {entity.kind.noun}?", f"And that {entity.kind.noun}? {attribute.verbal}"),
        RETURN: (
            f"Back to the {entity.kind.noun}. {ask} the {noun}?",
            f"And {ask[0].lower()}{ask[1:]} the {noun} of the {entity.kind.noun}?",
        ),
    }
    return rng.choice(forms[move])


def write_conversations(
    world: Encyclopedia, n_conversations: int, seed: int, settings: ConversationSettings | None = None
) -> list[list[Turn]]:
    """``n_conversations`` conversations; the same arguments always give the same ones."""
    rng = random.Random(f"conversations/{world.split}/{n_conversations}/{seed}")
    return [write_conversation(world, rng, settings) for _ in range(n_conversations)]


def rows(conversations: list[list[Turn]], split: str) -> Iterator[dict[str, object]]:
    """Dataset rows, one per turn, in conversation order.

    ``history`` alternates user and assistant lines and holds all earlier turns; ``turn_id`` counts from 1.
    """
    for number, turns in enumerate(conversations):
        history: list[str] = []
        for turn_id, turn in enumerate(turns, start=1):
            yield {
                "qid": f"{split}-{number:04d}-{turn_id}",
                "conv_id": f"{split}-{number:04d}",
                "turn_id": turn_id,
                "question": turn.question,
                "history": list(history),
                "answers": [turn.answer],
                "rewrite": turn.rewrite,
                "gold_passage_ids": [turn.entity.passage_id],
                "topic_shift": turn.topic_shift,
                "kind": turn.kind,
            }
            history += [turn.question, turn.reply]
