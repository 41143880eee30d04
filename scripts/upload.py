"""Publish files on the hub: ``python scripts/upload.py --repo_id OWNER/NAME --path INDEX_OR_FOLDER``.

Files above ``--split_gb`` go up as ``part_aa``, ``part_ab`` ... and join again by ``cat part_*``. What the repository
has already, byte for byte, is not sent again, so a broken upload is repeated by the same command. Needs HF_TOKEN.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from download import reported

from search_r1.hub.publish import publish, uploads
from search_r1.hub.repository import Repository
from verl.errors import DataError

log = logging.getLogger("upload")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo_id", required=True, help="owner/name; made where there is none")
    parser.add_argument("--path", type=Path, required=True, help="file or folder; hidden files are left out")
    parser.add_argument("--repo_type", default="dataset", choices=("dataset", "model"))
    parser.add_argument("--path_in_repo", default="", help="folder in the repository")
    parser.add_argument("--split_gb", type=float, default=40.0, help="largest file, in 10^9 bytes")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--scratch", type=Path, help="folder for one piece at a time; default: beside the file")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Send what is missing; raises ChatR1Error with the remedy."""
    piece = int(args.split_gb * 1e9)
    if piece < 1:
        raise DataError(f"--split_gb {args.split_gb}: must be above 0")
    prefix = f"{args.path_in_repo.strip('/')}/" if args.path_in_repo.strip("/") else ""
    items = uploads(args.path, piece, prefix)
    beside = args.path.parent if args.path.is_file() else args.path
    with tempfile.TemporaryDirectory(dir=args.scratch or beside, prefix=".upload-") as scratch:
        sent, there = publish(Repository(args.repo_id, args.repo_type), items, Path(scratch), args.private)
    log.info("%s: %d files sent, %d were there", args.repo_id, sent, there)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for what a user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return reported("upload", lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
