"""Fetch a published passage collection and its index: ``python scripts/download.py --save_path collection``.

Fetched are the pieces of the index (``index/part_*``) and the passages, which become
``<save_path>/<collection>.jsonl``. The pieces join by ``cat collection/index/part_* >
collection/topiocqa/index/e5_Flat.index``, or here with ``--join``. The environment variables of huggingface_hub hold:
HF_ENDPOINT (a mirror), HF_HUB_OFFLINE, HF_HOME (cache), HF_TOKEN. What was cut off goes on where it stopped; every
file is compared with the hub's checksum.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from search_r1.hub.collections import COLLECTIONS, INDEX_NAME, Collection, join_parts, merge_shards
from search_r1.hub.repository import REMEDY, Repository, Unreachable
from verl.errors import ChatR1Error

log = logging.getLogger("download")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save_path", type=Path, required=True, help="folder to write to")
    parser.add_argument("--collection", default="topiocqa", choices=sorted(COLLECTIONS))
    parser.add_argument("--corpus_repo", help="owner/name of another repository with the passages, laid out alike")
    parser.add_argument("--index_repo", help="owner/name of another repository with the index, laid out alike")
    parser.add_argument("--name", help="name of the passages' file and of the index's folder; default: the collection")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--skip_index", action="store_true", help="the passages only, to build an index of your own")
    parser.add_argument("--join", action="store_true", help=f"join the pieces to <save_path>/<name>/index/{INDEX_NAME}")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Fetch and assemble; raises ChatR1Error with the remedy."""
    collection = COLLECTIONS[args.collection]
    collection = replace(
        collection,
        corpus_repo=args.corpus_repo or collection.corpus_repo,
        index_repo=args.index_repo or collection.index_repo,
    )
    name = args.name or args.collection
    folder = args.save_path / name / "index"
    folder.mkdir(parents=True, exist_ok=True)  # where the published commands write the joined index
    if not args.skip_index:
        parts = Repository(collection.index_repo, revision=args.revision).fetch(collection.index, args.save_path)
        if args.join:
            size = join_parts(parts, folder / INDEX_NAME)
            log.info("%s: %d bytes of %d pieces", folder / INDEX_NAME, size, len(parts))
    fetch_corpus(collection, args.save_path, name, args.revision)


def fetch_corpus(collection: Collection, save_path: Path, name: str, revision: str) -> None:
    """Fetch the passages; parquet shards become one file of JSON lines, others stay as they are published."""
    files = Repository(collection.corpus_repo, revision=revision).fetch(collection.corpus, save_path)
    shards = [path for path in files if path.suffix == ".parquet"]
    if shards:
        target = save_path / f"{name}.jsonl"
        log.info("%s: %d passages", target, merge_shards(shards, target))
    else:
        log.info("%s", ", ".join(map(str, files)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for what a user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return reported("download", lambda: run(parse(arguments)))


def reported(program: str, action: Callable[[], None]) -> int:
    """Run the action; print what a user can mend as one line."""
    try:
        action()
    except Unreachable as error:
        print(f"{program}: {error}. {REMEDY}.", file=sys.stderr)
        return 2
    except ChatR1Error as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{program}: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
