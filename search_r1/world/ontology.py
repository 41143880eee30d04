"""The kinds of things of the synthetic encyclopedia, their attributes and how people ask for them.

Two conventions make the world readable for a model of a million parameters and are kept everywhere:
the kind word comes before the stem ("Fort Torva"), and the value comes last ("Fort Torva has warden Nazel.").
A causal model can then tell what a token is from what stands to its left.
"""

from __future__ import annotations

from dataclasses import dataclass

PERSON = "person"
NUMBER = "number"


@dataclass(frozen=True)
class Attribute:
    """Something one can ask about an entity.

    ``value`` is ``PERSON``, ``NUMBER`` or the kind word of the entities it points to. ``ask`` starts the full question
    ("Who is"). ``verbal`` asks the same without the noun; it may say "it" but never a kind word.
    """

    noun: str
    value: str
    ask: str
    verbal: str

    @property
    def is_relation(self) -> bool:
        """True when the value is another entity."""
        return self.value not in (PERSON, NUMBER)


@dataclass(frozen=True)
class Kind:
    """A class of entities: ``word`` as in names ("Fort"), ``noun`` as in references ("that fort")."""

    word: str
    noun: str
    attributes: tuple[Attribute, ...]


def _person(noun: str, verbal: str) -> Attribute:
    return Attribute(noun, PERSON, "Who is", verbal)


def _number(noun: str, verbal: str) -> Attribute:
    return Attribute(noun, NUMBER, "What is", verbal)


def _relation(noun: str, value: str, verbal: str) -> Attribute:
    return Attribute(noun, value, "What is", verbal)


# People attributes exist for every kind, so that the attribute alone never tells which entity is meant.
PEOPLE: tuple[Attribute, ...] = (
    _person("warden", "Who guards it?"),
    _person("painter", "Who painted it?"),
    _person("owner", "Who owns it?"),
    _person("surveyor", "Who measured it?"),
    _person("patron", "Who pays for it?"),
    _person("poet", "Who wrote about it?"),
    _person("steward", "Who runs it?"),
    _person("guide", "Who shows visitors around?"),
)
_AGE = _number("age", "How old is it?")
_LENGTH = _number("length", "How long is it?")
_DEPTH = _number("depth", "How deep is it?")
_HEIGHT = _number("height", "How high is it?")


def _kind(word: str, noun: str, numbers: tuple[Attribute, ...], relations: tuple[Attribute, ...]) -> Kind:
    return Kind(word, noun, relations + numbers + PEOPLE)


# A relation never points to its own kind: while people talk about one fort, no answer names another fort. "That fort"
# and "it" therefore always mean the most recent entity of that kind.
KINDS: tuple[Kind, ...] = (
    _kind(
        "River",
        "river",
        (_AGE, _LENGTH),
        (_relation("source", "Mount", "Where does it rise?"), _relation("mouth", "Lake", "Where does it end?")),
    ),
    _kind(
        "Lake",
        "lake",
        (_AGE, _DEPTH),
        (
            _relation("outlet", "River", "Where does its water go?"),
            _relation("harbour", "Port", "Where do its boats land?"),
        ),
    ),
    _kind(
        "Mount",
        "mountain",
        (_AGE, _HEIGHT),
        (
            _relation("refuge", "Fort", "Where do its climbers sleep?"),
            _relation("spring", "River", "What flows down from it?"),
        ),
    ),
    _kind(
        "Fort",
        "fort",
        (_AGE, _HEIGHT),
        (
            _relation("lookout", "Mount", "Where do its scouts watch from?"),
            _relation("supplier", "Port", "Where does its food come from?"),
        ),
    ),
    _kind(
        "Port",
        "port",
        (_AGE, _DEPTH),
        (
            _relation("shelter", "Isle", "What protects it from storms?"),
            _relation("defender", "Fort", "What defends it?"),
        ),
    ),
    _kind(
        "Isle",
        "island",
        (_AGE, _LENGTH),
        (
            _relation("landing", "Port", "Where do its ferries go?"),
            _relation("lagoon", "Lake", "Where do its people swim?"),
        ),
    ),
)

KIND_BY_WORD: dict[str, Kind] = {kind.word: kind for kind in KINDS}


def cue(noun: str, name: str) -> str:
    """The sentence up to its value."""
    return f"{name} has {noun}"


def statement(noun: str, name: str, value: str) -> str:
    """The sentence of the encyclopedia that gives one fact."""
    return f"{cue(noun, name)} {value}."


def full_question(attribute: Attribute, name: str) -> str:
    """The self-contained question, which is also the gold rewrite."""
    return f"{attribute.ask} the {attribute.noun} of {name}?"
