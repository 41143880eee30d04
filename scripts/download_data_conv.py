"""Fetch the published conversations: ``python scripts/download_data_conv.py``.

Without arguments it does what the published script does: the configuration ``topiocqa`` of
``slupart/chatr1-convqa-all`` becomes ``data_conv/topiocqa_train/train.parquet`` and
``data_conv/topiocqa_test/test.parquet``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from download import reported

from search_r1.hub.conversations import REPOSITORY, merge, split_patterns
from search_r1.hub.repository import Repository, Unreachable
from verl.errors import DataError

log = logging.getLogger("download_data_conv")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo_id", default=REPOSITORY, help="owner/name of the repository")
    parser.add_argument("--config", default="topiocqa", help="configuration: topiocqa, qrecc, inscit ...")
    parser.add_argument("--save_path", type=Path, default=Path("data_conv"))
    parser.add_argument("--revision", default="main")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Fetch and merge; raises ChatR1Error with the remedy."""
    repository = Repository(args.repo_id, revision=args.revision)
    raw = args.save_path / ".hub"
    card, paths = _contents(repository, raw)
    for split, patterns in split_patterns(args.config, card, paths).items():
        target = args.save_path / f"{args.config}_{split}" / f"{split}.parquet"
        count = merge(repository.fetch(patterns, raw), target)
        log.info("%s: %d rows", target, count)


def _contents(repository: Repository, raw: Path) -> tuple[str | None, list[str]]:
    """Return the card and the paths of the repository; without the hub, of what lies here or in the cache."""
    try:
        paths = [file.path for file in repository.files()]
        card = repository.fetch(["README.md"], raw)[0] if "README.md" in paths else None
    except Unreachable as reason:
        try:
            found = repository.fetch(["*"], raw)
        except DataError:
            raise reason from None
        paths = [str(path.relative_to(raw)) for path in found]
        card = raw / "README.md" if "README.md" in paths else None
    return None if card is None else card.read_text(encoding="utf-8"), paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for what a user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return reported("download_data_conv", lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
