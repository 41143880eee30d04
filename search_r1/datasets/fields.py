"""Checking one raw record: typed access whose errors name file and line, column, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from search_r1.whole_text import HALF_A_PAIR, is_whole
from verl.errors import DataError


class Fields:
    """A raw record with its place. ``Fields({"qid": 7}, "a.jsonl:3").text("qid")`` is an error naming ``a.jsonl:3``."""

    def __init__(self, record: Mapping[str, Any], place: str) -> None:
        self._record = record
        self.place = place

    def fail(self, name: str, rule: str) -> DataError:
        """Return the error for a column that breaks a rule."""
        value = repr(self._record[name])[:80] if name in self._record else "missing"
        return DataError(f"{self.place}: {name}: {rule}; found {value}")

    def raw(self, name: str) -> Any:
        """Return the value, None when missing; text in it must be valid Unicode, or it could not be written again."""
        value = self._record.get(name)
        for text in value if isinstance(value, list) else (value,):
            if isinstance(text, str) and not is_whole(text):
                raise self.fail(name, HALF_A_PAIR)
        return value

    def text(self, name: str, other: str | None = None) -> str:
        """Return a non-blank string; ``other`` is a second name of the column, read where the first is missing."""
        name = other if other is not None and name not in self._record else name
        value = self.raw(name)
        if not isinstance(value, str) or not value.strip():
            raise self.fail(name, "must be a non-empty string")
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a string, None when missing, null or blank (no supervision rather than an empty one)."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fail(name, "must be a string or null")
        return value if value.strip() else None

    def identifier(self, name: str) -> str | None:
        """Return a string or whole number as a string, None when missing."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise self.fail(name, "must be a string or a whole number")
        return str(value)

    def integer(self, name: str) -> int:
        """Return a whole number, also one written as a string."""
        value = self.raw(name)
        if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, "must be a whole number")
        return value

    def integer_or_none(self, name: str) -> int | None:
        """Return a whole number, None when missing."""
        value = self.raw(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.fail(name, "must be a whole number or null")
        return value

    def flag_or_none(self, name: str) -> bool | None:
        """Return a boolean, None when missing."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(name, "must be true, false or null")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a non-empty list of strings; a single string is a list of one."""
        value = self.raw(name)
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.fail(name, "must be a non-empty list of strings")
        return tuple(value)

    def texts_or_none(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings or whole numbers as strings, None when missing or empty."""
        value = self.raw(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
            raise self.fail(name, "must be a list of strings or null")
        return tuple(str(item) for item in value)

    def object_or_none(self, name: str) -> Fields | None:
        """Return an object inside this one, None when missing or null."""
        value = self._record.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(name, "must be an object or null")
        return Fields(value, f"{self.place}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """Return the objects of a list; the places of those that know their line name it."""
        value = self._record.get(name)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.fail(name, "must be a list of objects")
        return [Fields(item, self._place_of(item, f"{name}[{index}]")) for index, item in enumerate(value)]

    def entries(self) -> Iterator[tuple[str, Fields]]:
        """Yield (key, object) of an object that is a table of objects; raises DataError for any other value."""
        for key, value in self._record.items():
            if not isinstance(value, Mapping):
                raise self.fail(key, "must be an object")
            yield key, Fields(value, self._place_of(value, key))

    def lists(self) -> Iterator[tuple[str, list[Fields]]]:
        """Yield (key, objects) of an object that is a table of lists of objects."""
        for key in self._record:
            yield key, self.objects(key)

    def is_list(self, name: str) -> bool:
        """True when the column holds a list."""
        return isinstance(self._record.get(name), list)

    def holds_lists(self) -> bool:
        """True for a table of lists."""
        return bool(self._record) and all(isinstance(value, list) for value in self._record.values())

    def names(self) -> frozenset[str]:
        """Return the columns that are present."""
        return frozenset(self._record)

    def names_in_order(self) -> tuple[str, ...]:
        """Return the columns in the order of the file."""
        return tuple(self._record)

    def _place_of(self, item: Mapping[str, Any], label: str) -> str:
        file, line = getattr(item, "file", None), getattr(item, "line", None)
        return f"{self.place}: {label}" if line is None else f"{file}:{line}"

    def history(self, name: str) -> tuple[str, ...]:
        """Return an alternating history: strings, question first, even length; missing is empty."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(name, "must be a list of strings: question, answer, question, answer ...")
        if len(value) % 2:
            raise self.fail(name, f"must end with an answer (even length), has {len(value)} entries")
        return tuple(value)
