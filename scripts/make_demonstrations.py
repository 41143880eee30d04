"""Write supervised rows for a cold start from conversations with gold rewrites, answers and passages.

    python scripts/make_demonstrations.py --conversations train.jsonl --model MODEL_FOLDER \
        --index-path INDEX --corpus-path passages.jsonl --output sft.jsonl

The result is what ``python -m verl.trainer.main_sft data.train_files=sft.jsonl`` reads. Prompts, observations and
limits are those of training: give the same template and lengths here as there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from prepare_data import add_prompt_arguments

from retrieval_server.backends import load
from retrieval_server.errors import RetrievalServerError
from retrieval_server.specs import Bm25Spec
from retrieval_server.types import LoadProgress
from search_r1.codec import Codec
from search_r1.datasets.load import load_rows
from search_r1.demonstrations import DemonstrationWriter
from search_r1.prompts import PromptBuilder
from verl.errors import ChatR1Error, ModelError
from verl.types import Document

log = logging.getLogger("make_demonstrations")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", nargs="+", required=True, help="rows, .jsonl or .parquet (docs/data.md)")
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--index-path", type=Path, required=True)
    parser.add_argument("--corpus-path", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--topk", type=int, default=3)
    add_prompt_arguments(parser)
    parser.add_argument("--max-start-length", type=int, default=1024)
    parser.add_argument("--max-obs-length", type=int, default=384)
    parser.add_argument("--limit", type=int, help="use a fixed random subset of this many rows")
    parser.add_argument("--keep-unanswerable", action="store_true", help="keep rows whose gold passage is not found")
    return parser.parse_args(arguments)


def open_search(args: argparse.Namespace) -> Callable[[str], list[Document]]:
    """Load the index in this process; the passages are the ones the service would send."""
    retriever = load(Bm25Spec(index_path=args.index_path, corpus_path=args.corpus_path), LoadProgress())

    def search(query: str) -> list[Document]:
        hits = retriever.search([query], args.topk)[0]
        return [Document(hit.document.id, hit.document.title, hit.document.text, hit.score) for hit in hits]

    return search


def run(args: argparse.Namespace) -> None:
    """Write the rows; raises ChatR1Error or RetrievalServerError with the remedy."""
    from transformers import AutoTokenizer

    if not (args.model / "tokenizer.json").is_file():
        raise ModelError(f"--model {args.model}: no tokenizer.json in it; give a folder with model and tokenizer")
    codec = Codec(AutoTokenizer.from_pretrained(args.model))
    rows = load_rows(args.conversations, limit=args.limit)
    writer = DemonstrationWriter(
        codec,
        PromptBuilder(codec, args.template, args.history, args.max_start_length, not args.questions_only),
        open_search(args),
        args.max_obs_length,
        require_gold=not args.keep_unanswerable,
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as sink:
        for row in writer.write(rows):
            sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(writer.outcome.dropped.items())) or "none"
    log.info("%s: %d of %d rows kept; dropped: %s", args.output, writer.outcome.kept, len(rows), dropped)


def main() -> int:
    """Run; print a user's mistake as one line and return 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(parse())
    except (ChatR1Error, RetrievalServerError) as error:
        log.error("make_demonstrations: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
