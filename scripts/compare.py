"""Is one evaluation better than another? Paired by question, from their result files.

    python scripts/compare.py BEFORE AFTER [AFTER ...] [--table] [--model FOLDER] [--normaliser NAME] [--json OUT]

Files: ``results_step_N.jsonl`` of an evaluation, its ``step_N.jsonl`` (with --model, whose tokenizer reads it), or a
published ``validation_results_stepN.json``; ``NAME=FILE`` names one. Each AFTER is compared with BEFORE: difference,
95 % bootstrap interval, p of a paired randomisation test and of the paired t-test. ``--table`` prints the table of all
files as in the papers as well. Exit status: 0, or 2 when files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from score_results import codec_of

from search_r1.evaluation.compare import Comparison, compare
from search_r1.evaluation.files import read_results
from search_r1.evaluation.tables import methods_table
from search_r1.rewards.text import NORMALISERS
from verl.errors import ChatR1Error, DataError


def named(text: str) -> tuple[str, Path]:
    """Return (name, path) of ``NAME=FILE``; a bare file is its own name."""
    name, sign, path = text.partition("=")
    return (name, Path(path)) if sign else (text, Path(text))


def lines(after: str, found: Mapping[str, Comparison]) -> Iterator[str]:
    """Yield the rows of the table for one comparison."""
    for name, one in found.items():
        gain = f"{one.gain.mean:+.4f} [{one.gain.low:+.4f}, {one.gain.high:+.4f}]"
        cells = (after, name, str(one.n), f"{one.before:.4f}", f"{one.after:.4f}", gain)
        yield f"| {' | '.join(cells)} | {_p(one.p_randomisation)} | {_p(one.p_t_test)} |"


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=named, metavar="[NAME=]BEFORE")
    parser.add_argument("after", type=named, nargs="+", metavar="[NAME=]AFTER")
    parser.add_argument("--table", action="store_true", help="print the table of all files, a row each")
    parser.add_argument("--model", help="folder of the tokenizer that reads files of trajectories")
    parser.add_argument("--normaliser", choices=NORMALISERS.names(), default="squad")
    parser.add_argument("--json", type=Path, help="write the comparisons there as well")
    given = parser.parse_args(arguments)
    form = NORMALISERS[given.normaliser]
    try:
        codec = codec_of(given.model)
        rows = {name: read_results(path, codec, form) for name, path in (given.before, *given.after)}
        if len(rows) < 1 + len(given.after):
            raise DataError("two files have one name; give them names of their own: NAME=FILE")
        before, *others = rows
        found = {name: compare(rows[before], rows[name], form) for name in others}
        if given.json is not None:
            text = {file: {name: asdict(one) for name, one in each.items()} for file, each in found.items()}
            given.json.write_text(json.dumps({"before": before, "after": text}, indent=1), encoding="utf-8")
    except (ChatR1Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.table:
        print(f"{methods_table(rows, form)}\n")
    print(f"before: {before}\n")
    print("| after | figure | questions | before | after | difference [95 %] | p (randomisation) | p (t-test) |")
    print("|---|---|---|---|---|---|---|---|")
    for name, each in found.items():
        for line in lines(name, each):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
