"""The validation report of a prepared data set, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from search_r1.datasets.checks import FIELDS

_WORD_OF = {
    "history": "history",
    "rewrite": "rewrite",
    "gold_passage_ids": "gold passages",
    "gold_text": "gold text",
    "topic_shift": "topic mark",
    "kind": "kind",
    "answerable": "answerable mark",
    "dialogue_act": "dialogue act",
}
_ALWAYS = ("history",)


def report(figures: Mapping[str, Any], prompts: Sequence[str]) -> str:
    """Return the report in Markdown, of ``Prepared.figures()`` and the prompts of a few rows."""
    return "\n".join(_lines(figures, prompts)) + "\n"


def _lines(figures: Mapping[str, Any], prompts: Sequence[str]) -> Iterator[str]:
    yield f"# {figures['dataset']}"
    yield ""
    yield "| split | read | rows | with a reference | conversations | references | dropped |"
    yield "|---|---|---|---|---|---|---|"
    for name, split in figures["splits"].items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in split["dropped"].items()) or "-"
        cells = (split[key] for key in ("read", "rows", "with_reference", "conversations", "references"))
        yield f"| {name} | {' | '.join(map(str, cells))} | {dropped} |"
    yield ""
    yield "Rows without a reference are in `conversations.jsonl` and in no parquet file."
    yield from _coverage(figures)
    yield from _passages(figures)
    yield from _lengths(figures)
    yield from _shared(figures)
    yield from _details(figures)
    yield ""
    yield f"## Prompts ({figures['template']})"
    for prompt in prompts:
        yield from ("", "````text", prompt, "````")


def _coverage(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What rows have", "")
    yield f"| | {' | '.join(figures['splits'])} |"
    yield f"|---|{'|'.join('---' for _ in figures['splits'])}|"
    for name in FIELDS:
        counts = [split["have"][name] for split in figures["splits"].values()]
        supplied = name in figures["supplies"] or name in _ALWAYS or any(counts)
        cells = [f"{n} of {s['rows']}" for n, s in zip(counts, figures["splits"].values(), strict=True)]
        yield f"| {_WORD_OF[name]} | {' | '.join(cells if supplied else ['not in this set'] * len(cells))} |"


def _passages(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Passages", "")
    corpus = figures["corpus"]
    if corpus is None:
        yield "No passages were found beside the files: gold passages are not checked. Give a corpus with `--corpus`."
        return
    yield f"{corpus['passages']} passages in `{corpus['path']}` (sha256 {corpus['sha256']})."
    if corpus["malformed"]:
        yield f"{corpus['malformed']} records with passages break their format:"
        yield ""
        yield from (f"- {line}" for line in corpus["details"])
        yield ""
    for name, split in figures["splits"].items():
        ids, rows = split["gold_ids_not_in_corpus"], split["rows_with_gold_not_in_corpus"]
        yield f"{name}: {ids} gold ids of {rows} rows are not in it."
        if split["gold_left_out_of_qrels"]:
            yield f"{name}: {split['gold_left_out_of_qrels']} pairs are not in `qrels.trec`: an id has white space."


def _lengths(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"## Lengths in {figures['length_unit']}", "")
    yield "| split | of | minimum | median | 90 % | 99 % | maximum |"
    yield "|---|---|---|---|---|---|---|"
    for name, split in figures["splits"].items():
        for part, values in split["lengths"].items():
            yield f"| {name} | {part} | {' | '.join(map(str, values))} |"
    for name, prompt in (figures.get("prompts") or {}).items():
        yield ""
        yield (
            f"{name}: with max_start_length={prompt['max_start_length']}, {prompt['shortened']} of {prompt['rows']} "
            f"prompts lose turns and {prompt['refused']} are refused."
        )


def _shared(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What splits share", "")
    yield "Equal but for case and white space; a question counts where all that was said before it is equal too."
    yield ""
    yield "| in | again in | questions | rewrites | such as |"
    yield "|---|---|---|---|---|"
    for shared in figures["shared"]:
        examples = "; ".join(" = ".join(pair) for pair in shared["examples"]) or "-"
        cells = (shared[key] for key in ("first", "second", "questions", "rewrites"))
        yield f"| {' | '.join(map(str, cells))} | {examples} |"


def _details(figures: Mapping[str, Any]) -> Iterator[str]:
    for name, split in figures["splits"].items():
        for reason, lines in split["details"].items():
            yield from ("", f"## {name}: {reason} ({split['dropped'][reason]})", "")
            yield from (f"- {line}" for line in lines)
            if split["dropped"][reason] > len(lines):
                yield "- ..."
