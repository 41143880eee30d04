"""Write the synthetic world: ``corpus.jsonl`` and one JSONL file of conversation turns per split.

    python scripts/build_world.py --out data/world

The defaults are the world that the shipped model is trained and measured on; the same arguments always write the same
bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from search_r1.world import DEFAULT_WORLD, WorldSettings, write_world


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into (created when missing)")
    parser.add_argument("--seed", type=int, default=DEFAULT_WORLD.seed)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = _parser().parse_args(argv)
    settings = WorldSettings(splits=DEFAULT_WORLD.splits, seed=args.seed)
    for name, count in write_world(args.out, settings).items():
        sys.stdout.write(f"{args.out / name}: {count} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
