"""Show the exact prompt of rows: what the model reads first, with its template, after turns were dropped to fit.

python scripts/show_prompt.py --data data/qrecc/dev.parquet --tokenizer MODEL_FOLDER --row 5 --history 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare_data import add_prompt_arguments, load_tokenizer

from search_r1.codec import Codec
from search_r1.datasets.load import load_rows
from search_r1.datasets.rows import Row
from search_r1.prompt_view import view
from search_r1.prompts import PromptBuilder
from search_r1.templates import template_version
from verl.errors import ChatR1Error, DataError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows, .jsonl or .parquet")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--row", type=int, action="append", help="position in the file, from 0; default 0; may repeat")
    which.add_argument("--qid", action="append", help="id of a row; may repeat")
    add_prompt_arguments(parser)
    parser.add_argument("--native-thinking", choices=("keep", "forbid"), default="keep")
    parser.add_argument("--max-start-length", type=int, default=2048, help="tokens of the first context")
    return parser.parse_args(arguments)


def chosen(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Return the rows that are asked for; raises DataError naming one that is not there."""
    if args.qid:
        known = {row.qid: row for row in rows}
        absent = [qid for qid in args.qid if qid not in known]
        if absent:
            raise DataError(f"{args.data}: no row with the qid {absent[0]!r}; the first is {rows[0].qid!r}")
        return [known[qid] for qid in args.qid]
    places = args.row or [0]
    for place in places:
        if not 0 <= place < len(rows):
            raise DataError(f"{args.data}: --row {place}: there are rows 0 to {len(rows) - 1}")
    return [rows[place] for place in places]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a mistake that the message explains."""
    args = parse(arguments)
    try:
        rows = chosen(load_rows([args.data]), args)
        tokenizer = load_tokenizer(args.tokenizer)
        codec = Codec(tokenizer, args.native_thinking)
        builder = PromptBuilder(codec, args.template, args.history, args.max_start_length, not args.questions_only)
        print(f"template {args.template} {template_version(args.template)}")
        for row in rows:
            print(f"\n{view(row, builder, tokenizer)}")
    except ChatR1Error as error:
        print(f"show_prompt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
