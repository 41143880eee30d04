"""What a server is started with: one backend, the settings, an address. Flags and YAML files both become a Launch.

Example of a file::

    backend: {name: bm25, index_path: index, corpus_path: corpus.jsonl}
    server: {port: 8002, topk: 3}
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from retrieval_server.errors import SettingsError
from retrieval_server.settings import DEFAULT_PORT, Settings
from retrieval_server.specs import Spec

SPECS: Mapping[str, type[BaseModel]] = {
    cls.model_fields["name"].default: cls for cls in typing.get_args(typing.get_args(Spec)[0])
}
"""Backend name -> its spec."""
SETTINGS = typing.get_type_hints(Settings)
_SERVER_KEYS = {**SETTINGS, "host": str, "port": int}


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that ``serve`` needs."""

    backend: Spec
    settings: Settings
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections ``backend`` and ``server`` of a YAML file; raises SettingsError for any other content."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _NoDuplicates)
    except OSError as error:
        raise SettingsError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path} holds a {type(content).__name__}; it needs the keys backend and server")
    problems = [unknown_key(key, ("backend", "server")) for key in content if key not in ("backend", "server")]
    sections = {key: {} if content.get(key) is None else content[key] for key in ("backend", "server")}
    problems += [
        f"{key} is {value!r}: it must be a mapping of keys to values"
        for key, value in sections.items()
        if not isinstance(value, dict)
    ]
    if problems:
        raise _refusal(problems, f"--config {path}")
    return sections


def resolve(backend: Mapping[str, Any], server: Mapping[str, Any], where: str | None = None) -> Launch:
    """Check both sections and return what they describe; raises SettingsError that lists every mistake.

    ``where`` names the file that they came from, if any.
    """
    problems: list[str] = []
    spec: Any = None
    try:
        spec = TypeAdapter(Spec).validate_python(dict(backend))
    except ValidationError as error:
        problems += [_backend_problem(entry) for entry in error.errors(include_url=False)]
    values = dict(_typed(server, problems))
    address = {key: values.pop(key) for key in ("host", "port") if key in values}
    settings = None
    try:
        settings = Settings(**values)
    except SettingsError as error:
        problems += str(error).split("\n")
    if problems or settings is None:
        raise _refusal(problems, where)
    return Launch(spec, settings, **address)


def _typed(server: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the known keys with values of their type; append what is wrong with the others to ``problems``."""
    for key, value in server.items():
        if key not in _SERVER_KEYS:
            problems.append(unknown_key(f"server.{key}", [f"server.{known}" for known in _SERVER_KEYS]))
            continue
        try:
            yield key, TypeAdapter(_SERVER_KEYS[key]).validate_python(value)
        except ValidationError as error:
            problems.append(f"server.{key} is {value!r}: {error.errors()[0]['msg']}")


def _backend_problem(entry: Any) -> str:
    """Return one line for one of pydantic's errors."""
    path, spec = _path_and_spec(entry["loc"])
    key = ".".join(["backend", *path])
    if entry["type"] == "extra_forbidden" and spec is not None:
        parent = key.rpartition(".")[0]
        return unknown_key(key, [f"{parent}.{field}" for field in spec.model_fields])
    if entry["type"] == "missing":
        return f"{key} is missing"
    if entry["type"] == "union_tag_not_found":
        return f"{key}.name is missing; known: {', '.join(SPECS)}"
    if entry["type"] == "union_tag_invalid":
        tag = entry["ctx"]["tag"]
        near = difflib.get_close_matches(tag, SPECS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{key}.name {tag!r} is unknown{hint}; known: {', '.join(SPECS)}"
    return f"{key} is {entry['input']!r}: {entry['msg']}"


def _path_and_spec(location: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the keys that the user wrote, and the spec they stand in: pydantic names the chosen spec in between."""
    path: list[str] = []
    spec: type[BaseModel] | None = None
    tag_expected = True
    for part in location:
        if tag_expected and part in SPECS:
            spec = SPECS[str(part)]
        else:
            path.append(str(part))
        tag_expected = part in ("first", "second")
    return path, spec


def unknown_key(key: str, known: Sequence[str], what: str = "key") -> str:
    """Return what to say about a key that does not exist: the closest known one, else all of them."""
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
    return f"{key} is not a known {what}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")


def _refusal(problems: Sequence[str], where: str | None) -> SettingsError:
    if len(problems) == 1:
        return SettingsError(f"{where}: {problems[0]}" if where else problems[0])
    lines = [f"{where or 'the command line'} has {len(problems)} mistakes:"]
    return SettingsError("\n".join(lines + [f"  {number}. {text}" for number, text in enumerate(problems, 1)]))


class _NoDuplicates(yaml.SafeLoader):
    """YAML in which a key that is given twice is a mistake: the second would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def settings_fields() -> Iterator[tuple[str, type, Any]]:
    """Yield name, type and default of every setting."""
    for field in dataclasses.fields(Settings):
        yield field.name, SETTINGS[field.name], field.default
