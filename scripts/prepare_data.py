"""Make a published data set, or your own rows, ready: parquet, passages, qrels and a validation report.

    python scripts/prepare_data.py --dataset qrecc --input DOWNLOADS/qrecc --output data/qrecc --tokenizer MODEL_FOLDER

Sources, their files and what they hold: docs/data.md. Written are ``train.parquet``, ``dev.parquet``, ``test.parquet``
(what there is), ``passages.jsonl``, ``conversations.jsonl``, ``qrels.trec``, ``report.md`` and ``report.json``. Records
that break the format are named by file and line and counted; ``--strict`` stops at the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from search_r1.codec import Codec
from search_r1.datasets.catalog import SOURCES
from search_r1.datasets.preparation import Preparation, Prepared, prepare
from search_r1.datasets.report import report
from search_r1.datasets.rows import Row
from search_r1.prompt_view import fit, view
from search_r1.prompts import PromptBuilder
from verl.errors import ChatR1Error, ModelError
from verl.types import Tokenizer

SHOWN = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help=f"one of {', '.join(SOURCES.names())}, or module:attribute")
    parser.add_argument("--input", type=Path, required=True, help="folder with the published files, or one of them")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tokenizer", type=Path, help="model folder; lengths are then tokens, else characters")
    parser.add_argument("--strict", action="store_true", help="stop at the first malformed or repeated record")
    parser.add_argument("--corpus", type=Path, help="passages to join instead of the set's own (JSON lines)")
    parser.add_argument("--pin-corpus", action="store_true", help="a run with other passages is to be refused")
    parser.add_argument("--rewrites", type=Path, help="JSON lines of id and rewrite, for rows without a gold rewrite")
    add_prompt_arguments(parser)
    parser.add_argument(
        "--max-start-length", type=int, default=2048, help="tokens of the first context, for the report"
    )
    return parser.parse_args(arguments)


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what decides about the form of a prompt; the meaning is that of the keys under ``data``."""
    parser.add_argument("--template", default="chatr1", help="chatr1, search_r1, compact, row, or a .txt file")
    parser.add_argument("--history", type=_turns, default="all", help="'all' or the number of last turns")
    parser.add_argument("--questions-only", action="store_true", help="show what was asked, not what was answered")


def _turns(text: str) -> str | int:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'all' nor a number of turns")
    return text if text == "all" else int(text)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder; raises ModelError naming what is missing."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: no tokenizer.json in it; give a folder with a model and its tokenizer")
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def examples(prepared: Prepared) -> list[Row]:
    """Return the first, middle and last row of the last split that has any: rows to look at."""
    rows = [split.usable or split.rows for split in prepared.splits.values() if split.rows][-1]
    places = sorted({0, len(rows) // 2, len(rows) - 1})
    return [rows[place] for place in places[:SHOWN]]


def prompts(prepared: Prepared, builder: PromptBuilder | None, tokenizer: Tokenizer | None) -> list[str]:
    """Return the prompts of the examples: exactly as tokenized, or without a tokenizer the content of the message."""
    if builder is not None and tokenizer is not None:
        return [view(row, builder, tokenizer) for row in examples(prepared) if _can_be_built(row, prepared)]
    return [f"{row.qid}:\n{row.messages[-1]['content']}" for row in examples(prepared) if row.messages]


def _can_be_built(row: Row, prepared: Prepared) -> bool:
    return row.messages is not None if prepared.settings.template == "row" else row.history is not None


def run(args: argparse.Namespace) -> Mapping[str, Any]:
    """Prepare and return the figures; raises ChatR1Error with the remedy."""
    settings = Preparation(
        dataset=args.dataset,
        input=args.input,
        output=args.output,
        strict=args.strict,
        corpus=args.corpus,
        pin_corpus=args.pin_corpus,
        rewrites=args.rewrites,
        template=args.template,
        history=args.history,
        history_answers=not args.questions_only,
    )
    tokenizer = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    codec = None if tokenizer is None else Codec(tokenizer)
    prepared = prepare(settings) if codec is None else prepare(settings, lambda text: len(codec.encode(text)), "tokens")
    figures = prepared.figures()
    builder = None
    if codec is not None:
        builder = PromptBuilder(codec, args.template, args.history, args.max_start_length, not args.questions_only)
        figures["prompts"] = {
            name: {"max_start_length": args.max_start_length, **asdict(fit(rows, builder))}
            for name, split in prepared.splits.items()
            if (rows := [row for row in split.usable if _can_be_built(row, prepared)])
        }
    text = report(figures, prompts(prepared, builder, tokenizer))
    (args.output / "report.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False), encoding="utf-8")
    (args.output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    for name, count in prepared.files.items():
        print(f"wrote {args.output / name} ({count})")
    print(f"wrote {args.output / 'report.md'} and report.json")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a mistake that the message explains."""
    try:
        run(parse(arguments))
    except ChatR1Error as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prepare_data: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
