"""The tables of ``docs/configuration.md``, written from the schemas: the manual cannot disagree with the code."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verl.config.problems import section_of
from verl.config.published import ANY, Pointless
from verl.config.rule import Rule


def key_tables(model: type[BaseModel], prefix: str = "", heading: str = "###") -> str:
    """Return one Markdown table per section of a schema, in declaration order, the top-level keys first."""
    plain = [(name, field) for name, field in model.model_fields.items() if section_of(field.annotation) is None]
    parts: list[str] = []
    if rows := [_row(prefix + name, field) for name, field in plain if field.exclude is not True]:
        title = f"`{prefix.rstrip('.')}`" if prefix else "top level"
        summary = (model.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        parts.append(f"{heading} {title}\n\n{summary}\n\n| key | default | values | meaning |\n|---|---|---|---|\n")
        parts[-1] += "\n".join(rows) + "\n"
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            parts.append(key_tables(section, f"{prefix}{name}.", heading))
    return "\n".join(parts)


def pointless_table(table: Mapping[str, Pointless]) -> str:
    """Return the table of published keys that decide nothing here."""
    rows = []
    for path, rule in table.items():
        if rule.same_as is not None:
            allowed = f"the value of `{rule.same_as}`"
        elif ANY in rule.allowed:
            allowed = "any value"
        else:
            allowed = ", ".join(f"`{show(value)}`" for value in rule.allowed)
        rows.append(f"| `{path}` | {allowed} | {rule.reason} |")
    return "| key | accepted at | why it decides nothing |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def rule_table(rules: Sequence[Rule]) -> str:
    """Return the table of rules about several keys."""
    rows = [f"| {rule.name} | {', '.join(f'`{key}`' for key in rule.keys)} | {rule.fix} |" for rule in rules]
    return "| rule | keys | when it is broken |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def show(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def _row(path: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    meaning = " ".join((field.description or "").split()).replace("|", "\\|").replace("``", "`")
    return f"| `{path}` | `{show(default)}` | {_values(field)} | {meaning} |"


def _values(field: FieldInfo) -> str:
    return ", ".join([_type(field.annotation), *_limits(field.metadata)]).replace("|", "\\|")


def _type(annotation: Any) -> str:
    """Return an annotation in the words of a user."""
    if annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{show(value)}`" for value in arguments)
    if origin is typing.Annotated:
        return " ".join([_type(arguments[0]), *_limits(arguments[1:])])
    if origin is tuple:
        item = _type(arguments[0])
        return f"list of {item}" if arguments[-1] is ... else f"{len(arguments)} of {item}"
    if arguments:
        return " or ".join(_type(argument) for argument in arguments)
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(annotation, "any")


def _limits(metadata: Sequence[Any]) -> list[str]:
    names = {annotated_types.Gt: (">", "gt"), annotated_types.Ge: (">=", "ge"),
             annotated_types.Lt: ("<", "lt"), annotated_types.Le: ("<=", "le")}  # fmt: skip
    return [
        f"{sign} {getattr(item, attribute)}"
        for item in metadata
        for kind, (sign, attribute) in names.items()
        if isinstance(item, kind)
    ]
