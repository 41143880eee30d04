"""Mistakes in a configuration as data: key path, value, rule, remedy; and the report that shows all of them."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<nothing>", "__bool__": lambda self: False})()
"""Stands for a key that is not there (None is a value)."""


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    key: str
    value: Any
    rule: str
    """What does not hold, as a predicate of the key: ``must be above 0``."""
    fix: str
    """What to write instead."""

    @classmethod
    def unknown(cls, key: str, value: Any, known: Sequence[str]) -> Problem:
        """A key that does not exist; names the closest known path."""
        near = closest_path(key, known)
        return cls(key, value, "is not a known key", f"did you mean {near}?" if near else "remove it")

    def __str__(self) -> str:
        shown = "" if self.value is MISSING or isinstance(self.value, dict) else f" = {self.value!r}"
        return f"{self.key}{shown}: {self.rule}; {self.fix}"


def report(problems: Sequence[Problem], what: str) -> str:
    """Return the message of a ConfigError: one line per mistake."""
    noun = "mistake" if len(problems) == 1 else "mistakes"
    lines = [f"{what} has {len(problems)} {noun}:"]
    return "\n".join(lines + [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)])


def closest_path(key: str, known: Sequence[str]) -> str | None:
    """Return the known key path nearest to ``key``: same last name elsewhere first, then by spelling."""
    last = key.rpartition(".")[2]
    same_name = [path for path in known if path.rpartition(".")[2] == last]
    pool = same_name or list(known)
    near = difflib.get_close_matches(key, pool, n=1, cutoff=0.0 if same_name else 0.6)
    if not near:
        by_last = {path.rpartition(".")[2]: path for path in known}
        hit = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)
        near = [by_last[hit[0]]] if hit else []
    return near[0] if near else None


# ---------------------------------------------------------------------------------------------------------------
# Nested dictionaries by key path


def dig(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``a.b.c``, or MISSING."""
    node: Any = values
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return MISSING
        node = node[name]
    return node


def nested_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of everything that is not a non-empty dictionary."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from nested_leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def remove(values: dict[str, Any], path: str) -> None:
    """Delete ``a.b.c``; a path that does not exist is left alone."""
    *parents, last = path.split(".")
    node: Any = values
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


# ---------------------------------------------------------------------------------------------------------------
# Translation of pydantic's errors


def problems_of(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """Return one Problem per key that failed (a union reports several errors for one key)."""
    paths = all_paths(model)
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        key = _key_path(item["loc"], model)
        value = dig(values, key) if key else MISSING
        if item["type"] == "extra_forbidden":
            problem = Problem.unknown(key, value, paths)
        else:
            problem = Problem(key or model.__name__, value, _rule(item), _fix(key, model))
        if problem.key in found:
            earlier = found[problem.key].rule
            merged = earlier if problem.rule in earlier.split(", or ") else f"{earlier}, or {problem.rule}"
            problem = Problem(problem.key, value, merged, problem.fix)
        found[problem.key] = problem
    return list(found.values())


def truth_values(values: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[Problem]:
    """Yield a Problem for every ``true`` or ``false`` where a number is meant; pydantic would read 1 or 0."""
    for name, field in model.model_fields.items():
        value, section = values.get(name), section_of(field.annotation)
        if section is not None:
            if isinstance(value, Mapping):
                yield from truth_values(value, section, f"{prefix}{name}.")
        elif any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value])):
            kinds = set(_plain_types(field.annotation))
            if kinds & {int, float} and not kinds & {bool, Any}:
                yield Problem(f"{prefix}{name}", value, "must be a number, not true or false", _fix(name, model))


def _plain_types(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value or an item of it may have."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from _plain_types(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) is not typing.Literal and (arguments := typing.get_args(annotation)):
        for argument in arguments:
            yield from _plain_types(argument)
    elif typing.get_origin(annotation) is None:
        yield annotation


def all_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the key path of every leaf of a schema, sections included."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        section = section_of(field.annotation)
        if section is not None:
            paths += all_paths(section, f"{prefix}{name}.")
    return paths


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field's annotation (also behind ``| None``), or None for a plain key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if (section := section_of(argument)) is not None:
                return section
    return None


def _key_path(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Return the key path of an error's location, without indices and names of union members."""
    names: list[str] = []
    section: type[BaseModel] | None = model
    for part in location:
        if section is None or not isinstance(part, str):
            break
        names.append(part)
        field = section.model_fields.get(part)
        section = section_of(field.annotation) if field is not None else None
    return ".".join(names)


def _rule(item: Any) -> str:
    """Return pydantic's message as a predicate: 'Input should be greater than 0' -> 'must be greater than 0'."""
    message: str = item["msg"]
    for start, instead in (("Input should be ", "must be "), ("Value error, ", ""), ("Assertion failed, ", "")):
        if message.startswith(start):
            return instead + message.removeprefix(start)
    return message[:1].lower() + message[1:]


def _fix(key: str, model: type[BaseModel]) -> str:
    """Return the remedy for a wrong value: the default and, when it is documented, the meaning."""
    section: type[BaseModel] | None = model
    field = None
    for name in key.split("."):
        if section is None or name not in section.model_fields:
            return "correct the value"
        field = section.model_fields[name]
        section = section_of(field.annotation)
    assert field is not None
    if section is not None or field.is_required():
        return "see docs/configuration.md"
    default = field.get_default(call_default_factory=True)
    shown = (
        {None: "null", True: "true", False: "false"}.get(default, default)
        if isinstance(default, bool | None)
        else default
    )
    meaning = f" ({field.description.splitlines()[0].rstrip('.')})" if field.description else ""
    return f"the default is {shown}{meaning}"
