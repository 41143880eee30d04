"""CoQA (Reddy et al., TACL 2019): conversations about one story.

``coqa-{train,dev}-v1.0.json``: ``data`` of ``story``, ``questions``, ``answers`` and, in the development set,
``additional_answers``. The gold passage is the story. The set has no rewrites. An answer ``unknown`` without a span
marks a question that the story does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from search_r1.datasets.draft import Draft, attempt, references
from search_r1.datasets.fields import Fields
from search_r1.datasets.passages import Found, Passage, stable_id
from search_r1.datasets.passages import attempt as attempt_passages
from search_r1.datasets.raw import read_object
from search_r1.datasets.rows import Row
from search_r1.datasets.source import Source, SplitFile, matching

NAME = "coqa"
_FILES = r".*coqa.*\.json"


def _rows(file: SplitFile) -> Iterator[Draft]:
    def turns(story: Fields) -> Iterator[Draft]:
        return _turns(file, story)

    return attempt(read_object(file.path).objects("data"), turns)


def _turns(file: SplitFile, story: Fields) -> Iterator[Draft]:
    questions, answers = _by_turn(story, "questions"), _by_turn(story, "answers")
    others = story.object_or_none("additional_answers")
    more = [] if others is None else [_by_turn(others, name) for name in others.names_in_order()]
    identifier, history = story.text("id"), list[str]()
    for turn, question in questions.items():
        if turn not in answers:
            raise question.fail("turn_id", "has no answer in 'answers'")
        main = answers[turn]
        text = main.text("input_text")
        alternatives = [side[turn].text_or_none("input_text") for side in more if turn in side]
        yield Row(
            qid=file.qid(NAME, f"{identifier}_{turn}"),
            question=question.text("input_text"),
            answers=references([text, *alternatives]),
            history=tuple(history),
            conv_id=identifier,
            turn_id=turn,
            gold_passage_ids=(_id(story),),
            gold_text=story.text("story"),
            answerable=not (text.strip().lower() == "unknown" and main.integer("span_start") < 0),
            kind=story.text_or_none("source"),
            data_source=NAME,
        )
        history += [question.text("input_text"), text]


def _by_turn(record: Fields, name: str) -> dict[int, Fields]:
    return {item.integer("turn_id"): item for item in record.objects(name)}


def _id(story: Fields) -> str:
    return f"{NAME}:{stable_id(story.text('id'))}"


def _passages(folder: Path) -> Iterator[Found]:
    stories = (s for path in matching(folder, _FILES) for s in read_object(path).objects("data"))
    return attempt_passages(stories, lambda story: [(story.place, Passage(_id(story), "", story.text("story")))])


SOURCE = Source(NAME, _FILES, _rows, ("gold_passage_ids", "gold_text", "answerable", "kind"), passages=_passages)
