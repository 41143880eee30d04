"""Cold-start demonstrations: rows of segments for the supervised trainer.

A row is ``{"segments": [[origin, text], ...]}`` with origin ``prompt``, ``env`` or ``model``; only ``model`` text is
learned. Every segment is tokenised on its own, as the environment does. All names come from the ``practice`` split.

Five sorts of rows, from dense practice to the real thing:

* copying: words said twice;
* recall: some passages, then all their facts again in another order, only the values learned;
* reading: some passages, then many (query, sentence, answer) triples about them. Looking up a value by entity *and*
  attribute is what a small model learns last, and one episode shows it only once;
* rewriting: a conversation and the first turn, without the long passages;
* episodes: both turns, with the mode of the first turn (gold, raw, wrong) drawn from given weights.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_r1.observation import NOTHING_FOUND
from search_r1.templates import compact
from search_r1.world.conversations import Turn, write_conversation
from search_r1.world.encyclopedia import Encyclopedia, Entity, Fact
from search_r1.world.ontology import cue, full_question

GOLD, RAW, WRONG = "gold", "raw", "wrong"
N_DOCUMENTS = 3
_SORTS = ("copying", "recall", "reading", "rewriting", "episode")

NO_HITS = f"\n\n<information>{NOTHING_FOUND}</information>\n\n"
GIVING_UP = "<think> Nothing was found. </think><answer> unknown </answer>"

Segment = tuple[str, str]
Row = dict[str, list[Segment]]


@dataclass(frozen=True)
class ModeWeights:
    """Relative frequency of the three first turns: gold rewrite, raw question, rewrite about a wrong entity."""

    gold: float
    raw: float
    wrong: float


@dataclass(frozen=True)
class Mixture:
    """Relative frequencies: of the sorts of rows, of 1, 2 and 3 passages to read, and of the modes of an episode."""

    copying: float = 0.0
    recall: float = 0.0
    reading: float = 0.0
    rewriting: float = 0.0
    episode: float = 0.0
    documents: tuple[float, float, float] = (0.1, 0.2, 0.7)
    modes: ModeWeights = ModeWeights(1.0, 0.0, 0.0)
    nothing_found: float = 0.0
    """Share of the raw questions that miss their passage for which the search has no hits at all."""


def chat(content: str) -> str:
    """``content`` rendered as one user message with the generation prompt, as the shipped chat template does."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def information(documents: Sequence[Entity]) -> str:
    """The observation that the environment appends after a search."""
    lines = [f"Doc {i}(Title: {e.name}) {e.text}" for i, e in enumerate(documents, start=1)]
    return "\n\n<information>" + "\n".join(lines) + "</information>\n\n"


def first_turn(mode: str, turn: Turn, wrong: Entity) -> str:
    """Reasoning and query. The word after ``<think>`` decides the mode, the context decides the rest."""
    if mode == GOLD:
        return _search(f"It is about {turn.entity.name}.", turn.rewrite)
    if mode == RAW:
        return _search("I search as asked.", turn.question)
    return _search(f"Perhaps {wrong.name}.", full_question(turn.fact.attribute, wrong.name))


def _search(thought: str, query: str) -> str:
    return f"<think> {thought} </think><search> {query} </search>"


def final_turn(entity: Entity, fact: Fact) -> str:
    """The sentence that answers, copied, and the answer in it."""
    return f"<think> {entity.sentence(fact)} </think><answer> {fact.answer} </answer>"


class Demonstrator:
    """Writes rows about one practice encyclopedia."""

    def __init__(self, world: Encyclopedia, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        nouns = {f.attribute.noun for e in world.entities for f in e.facts}
        self._with_noun: Mapping[str, list[Entity]] = {noun: world.with_attribute(noun) for noun in sorted(nouns)}
        self._namesakes: dict[str, list[Entity]] = {}
        for entity in world.entities:
            self._namesakes.setdefault(entity.stem, []).append(entity)

    def row(self, mixture: Mixture) -> Row:
        """One row of a sort drawn from ``mixture``."""
        rng = self._rng
        shares = {name: getattr(mixture, name) for name in _SORTS}
        sort = rng.choices(list(shares), list(shares.values()))[0]
        n_documents = rng.choices((1, 2, 3), mixture.documents)[0]
        if sort == "copying":
            return self.copying(rng.randint(10, 30))
        if sort == "recall":
            return self.recall(n_documents)
        if sort == "reading":
            return self.reading(n_documents, n_questions=10)
        if sort == "rewriting":
            return self.rewriting()
        return self.episode(mixture.modes, mixture.nothing_found)

    def copying(self, n_words: int) -> Row:
        """``n_words`` words of the world in random order, said twice: what copying is, without anything else."""
        rng = self._rng
        words: list[str] = []
        while len(words) < n_words:
            entity = rng.choice(self._world.entities)
            fact = rng.choice(entity.facts)
            words += rng.sample([entity.name, fact.attribute.noun, fact.value, entity.stem], 2)
        text = " ".join(["", *words])
        return {"segments": [("env", text), ("model", text)]}

    def recall(self, n_documents: int) -> Row:
        """``n_documents`` passages, then all their facts again in another order, only the values learned.

        The densest form of the lookup: a value every ten tokens.
        """
        documents = self._some_documents(n_documents)
        segments: list[Segment] = [("env", information(documents))]
        for e, f in self._shuffled_facts(documents):
            segments += [("env", " " + cue(f.attribute.noun, e.name)), ("model", f" {f.value}.")]
        return {"segments": segments}

    def _some_documents(self, n_documents: int) -> list[Entity]:
        entity = self._rng.choice(self._world.entities)
        return self._retrieved(entity, self._rng.choice(entity.facts), hit=True)[:n_documents]

    def _shuffled_facts(self, documents: Sequence[Entity]) -> list[tuple[Entity, Fact]]:
        facts = [(e, f) for e in documents for f in e.facts]
        self._rng.shuffle(facts)
        return facts

    def reading(self, n_documents: int, n_questions: int) -> Row:
        """``n_documents`` passages, then at most ``n_questions`` lookups in them."""
        documents = self._some_documents(n_documents)
        segments: list[Segment] = [("prompt", chat(compact([], "?"))), ("env", information(documents))]
        for e, f in self._shuffled_facts(documents)[:n_questions]:
            segments.append(("env", f"<search> {full_question(f.attribute, e.name)} </search>"))
            segments.append(("model", final_turn(e, f)))
        return {"segments": segments}

    def conversation(self) -> tuple[list[Turn], list[str]]:
        """Turns of one conversation and the lines said in it (two per turn)."""
        turns = write_conversation(self._world, self._rng)
        return turns, [line for turn in turns for line in (turn.question, turn.reply)]

    def rewriting(self) -> Row:
        """A random turn of a random conversation: prompt and first turn, resolved as it should be."""
        turns, lines = self.conversation()
        i = self._rng.randrange(len(turns))
        return {"segments": self._opening(turns, lines, i, GOLD, self._wrong_entity(turns, i))}

    def episode(self, weights: ModeWeights, nothing_found: float = 0.0) -> Row:
        """A whole episode whose query was issued in a mode drawn from ``weights``; see ``Mixture.nothing_found``."""
        turns, lines = self.conversation()
        i = self._rng.randrange(len(turns))
        turn, wrong = turns[i], self._wrong_entity(turns, i)
        mode = self._rng.choices((GOLD, RAW, WRONG), (weights.gold, weights.raw, weights.wrong))[0]
        about = wrong if mode == WRONG else turn.entity
        found = mode != RAW or turn.entity.name in turn.question
        opening = self._opening(turns, lines, i, mode, wrong)
        if not found and nothing_found and self._rng.random() < nothing_found:
            return {"segments": [*opening, ("env", NO_HITS), ("model", GIVING_UP)]}
        documents = self._retrieved(about, turn.fact, hit=found)
        return {
            "segments": [
                *opening,
                ("env", information(documents)),
                ("model", final_turn(*self._evidence(turn, documents))),
            ]
        }

    def _opening(self, turns: list[Turn], lines: list[str], i: int, mode: str, wrong: Entity) -> list[Segment]:
        prompt = chat(compact(lines[: 2 * i], turns[i].question))
        return [("prompt", prompt), ("model", first_turn(mode, turns[i], wrong))]

    def _wrong_entity(self, turns: list[Turn], i: int) -> Entity:
        """Another entity of the conversation so far, the latest first; any entity when there is none."""
        right = turns[i].entity
        for turn in reversed(turns[:i]):
            named = None if turn.fact.target is None else self._world.entities[turn.fact.target]
            for entity in (named, turn.entity):
                if entity is not None and entity is not right:
                    return entity
        return self._rng.choice(self._world.entities)

    def _evidence(self, turn: Turn, documents: Sequence[Entity]) -> tuple[Entity, Fact]:
        """What to copy: the gold sentence, else the same attribute of the first passage that has it, else anything."""
        if turn.entity in documents:
            return turn.entity, turn.fact
        for entity in documents:
            for fact in entity.facts:
                if fact.attribute.noun == turn.fact.attribute.noun:
                    return entity, fact
        return documents[0], documents[0].facts[0]

    def _retrieved(self, entity: Entity, fact: Fact, hit: bool) -> list[Entity]:
        """What a lexical retriever might return: namesakes, passages with the same attribute, the gold one anywhere."""
        rng = self._rng
        others = [e for e in self._namesakes[entity.stem] if e is not entity]
        pool = self._with_noun[fact.attribute.noun]
        while len(others) < N_DOCUMENTS:
            other = rng.choice(pool if rng.random() < 0.8 else self._world.entities)
            if other is not entity and other not in others:
                others.append(other)
        if not hit:
            return others[-N_DOCUMENTS:]
        found = others[: N_DOCUMENTS - 1]
        found.insert(0 if rng.random() < 0.5 else rng.randrange(N_DOCUMENTS), entity)
        return found
