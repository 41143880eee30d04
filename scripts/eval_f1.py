"""Score a validation file: ``python scripts/eval_f1.py --predictions runs/.../validation_results_step0.json``.

Prints the published table and writes ``<stem>_eval_f1.json`` beside the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from search_r1.published import predictions_path, read_predictions, score_rows, table, write_scored
from verl.errors import ChatR1Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 when the file cannot be scored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", required=True, help="validation JSON of a run; .json may be left out")
    path = predictions_path(parser.parse_args(arguments).predictions)
    try:
        scored = score_rows(read_predictions(path), path)
        written = write_scored(scored, path)
    except (ChatR1Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in table(scored, path):
        print(line)
    print(f"\nwrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
