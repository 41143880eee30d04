"""Rows for supervised training.

Two forms, told apart row by row: ``{"segments": [["prompt"|"model"|"env", text, weight?], ...]}``, and a prompt column
with a response column (the published form). Each segment is encoded on its own, exactly as an episode is at rollout
time, so the model learns the token boundaries it will meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.data.batch import Scored
from verl.errors import DataError
from verl.types import Origin

TextSegment = tuple[Origin, str, float]
"""(origin, text, loss weight)"""


@dataclass(frozen=True)
class RowFormat:
    """How rows are read; the keys of the config section ``data``."""

    max_length: int
    truncation: str = "error"
    """``error``, ``left`` (keep the end) or ``right`` (keep the start)."""
    prompt_key: str = "question"
    response_key: str = "answer"
    prompt_dict_keys: tuple[str, ...] = ()
    response_dict_keys: tuple[str, ...] = ()


def load_rows(files: Sequence[str], tokenizer: Any, form: RowFormat) -> list[Scored]:
    """Read and encode every row of the files in order. Raises DataError naming file and line (or row) and the remedy.

    The column ``weights`` holds each token's loss weight; a row without any trained token is an error.
    """
    rows: list[tuple[str, list[TextSegment]]] = []
    for file in files:
        for where, row in _records(Path(file)):
            rows.append((where, _segments(row, where, tokenizer, form)))
    texts = list({text for _, segments in rows for _, text, _ in segments})
    encoded = dict(zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True)) if texts else {}
    return [_encode(segments, where, encoded, form) for where, segments in rows]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a ``.jsonl`` or ``.parquet`` file."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist")
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        for number, row in enumerate(parquet.read_table(path).to_pylist(), start=1):
            yield f"{path}: row {number}", row
        return
    if path.suffix != ".jsonl":
        raise DataError(f"data file {path}: unknown form {path.suffix!r}; use .jsonl or .parquet")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a row is a JSON object, not {type(row).__name__}")
            yield f"{path}:{number}", row


def _segments(row: Mapping[str, Any], where: str, tokenizer: Any, form: RowFormat) -> list[TextSegment]:
    if "segments" in row:
        return [_segment(item, where) for item in row["segments"]]
    prompt = _descend(row, form.prompt_key, form.prompt_dict_keys, where)
    response = _descend(row, form.response_key, form.response_dict_keys, where)
    if not isinstance(response, str):
        raise DataError(f"{where}: {form.response_key} is not text")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if getattr(tokenizer, "chat_template", None):
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        rendered = "\n".join(message["content"] for message in messages)
    return [(Origin.PROMPT, rendered, 0.0), (Origin.MODEL, response + (tokenizer.eos_token or ""), 1.0)]


def _segment(item: Any, where: str) -> TextSegment:
    """Read ``[origin, text]`` or ``[origin, text, weight]``."""
    if not isinstance(item, list) or len(item) not in (2, 3) or not isinstance(item[1], str):
        raise DataError(f"{where}: a segment is [origin, text] or [origin, text, weight], got {str(item)[:80]}")
    if item[0] not in tuple(Origin):
        raise DataError(f"{where}: segment origin {item[0]!r} is none of {', '.join(Origin)}")
    origin = Origin(item[0])
    weight = item[2] if len(item) == 3 else 1.0
    if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0:
        raise DataError(f"{where}: segment weight {weight!r} is not a number of at least 0")
    return origin, item[1], float(weight) if origin is Origin.MODEL else 0.0


def _descend(row: Mapping[str, Any], key: str, inner: Sequence[str], where: str) -> Any:
    value: Any = row
    for name in (key, *inner):
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise DataError(f"{where}: no column {name!r} (there is: {known}); set data.prompt_key/data.response_key")
        value = value[name]
    return value


def _encode(segments: list[TextSegment], where: str, encoded: Mapping[str, list[int]], form: RowFormat) -> Scored:
    ids: list[int] = []
    weights: list[float] = []
    for _, text, weight in segments:
        tokens = encoded[text]
        ids += tokens
        weights += [weight] * len(tokens)
    if len(ids) > form.max_length:
        if form.truncation == "error":
            raise DataError(
                f"{where}: {len(ids)} tokens, more than data.max_length={form.max_length}; "
                "raise it or set data.truncation"
            )
        kept = slice(-form.max_length, None) if form.truncation == "left" else slice(form.max_length)
        ids, weights = ids[kept], weights[kept]
    if weights:
        weights[0] = 0.0  # nothing predicts the first token
    mask = [weight > 0 for weight in weights]
    if not any(mask):
        raise DataError(f"{where}: no token to train on (no model segment with a weight above 0)")
    return Scored(tuple(ids), tuple(mask), {"weights": tuple(weights)})
