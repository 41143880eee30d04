"""How good is each backend on conversations with known passages? nDCG@10, Recall@3, Recall@10 and MRR, one table.

    python benchmarks/retrieval_quality.py --data FOLDER --backend bm25=INDEX --backend lucene=LUCENE_INDEX
    python benchmarks/retrieval_quality.py --data FOLDER --backend a=INDEX --backend b=hybrid.yaml --compare a b

``--backend NAME=PATH`` may be given several times: an index (served over the folder's passages, with the backend's
defaults), or a server's YAML file, which describes any backend. The folder holds

* ``passages.jsonl``: ``{"id", "contents"}`` a line;
* ``conversations.jsonl``: ``{"qid", "dataset", "question", "history": [str], "rewrite": str or null}`` a line;
* ``qrels.trec``: ``qid 0 passage_id relevance`` a line.

A turn counts where the qrels have a relevant passage for it; it counts as zero where nothing is found. Every turn is
searched for as asked (raw), after everything said before it (history), and in its gold rewrite where it has one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from retrieval_server.backends import load
from retrieval_server.errors import RetrievalServerError, SettingsError
from retrieval_server.flags import index_kind
from retrieval_server.launch import read_config, resolve
from retrieval_server.specs import Spec
from retrieval_server.types import LoadProgress, Retriever

logger = logging.getLogger("retrieval_quality")

QUERIES = ("raw", "history", "rewrite")
MEASURES = {"nDCG@10": "ndcg_cut_10", "R@3": "recall_3", "R@10": "recall_10", "MRR@10": "recip_rank"}
"""Column -> trec_eval's name; its recip_rank has no cut-off of its own, the lists that it gets are 10 long."""
DEPTH = 10
_REQUESTED = {"ndcg_cut.10", "recall.3,10", "recip_rank"}
_BATCH = 64

Qrels = Mapping[str, Mapping[str, int]]
"""qid -> passage id -> relevance; every qid has one above 0."""


@dataclass(frozen=True)
class Turn:
    """One question of a conversation."""

    qid: str
    dataset: str
    question: str
    history: tuple[str, ...]
    """Everything said before, oldest first."""
    rewrite: str | None

    def query(self, kind: str) -> str | None:
        """Return what is searched for, or None where the turn has no such query."""
        if kind == "rewrite":
            return self.rewrite or None
        return " ".join([*self.history, self.question]) if kind == "history" else self.question


@dataclass(frozen=True)
class Cell:
    """Mean measures of one backend on one set with one kind of query."""

    turns: int
    means: Mapping[str, float]
    """Column -> mean over the turns."""


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Return the judgements of the turns that have a relevant passage."""
    qrels: dict[str, dict[str, int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        qid, _, passage, relevance = line.split()
        qrels.setdefault(qid, {})[passage] = int(relevance)
    return {qid: judged for qid, judged in qrels.items() if max(judged.values()) > 0}


def read_turns(path: Path, qrels: Qrels) -> list[Turn]:
    """Return the turns that can be scored."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [
        Turn(row["qid"], row["dataset"], row["question"], tuple(row["history"]), row.get("rewrite"))
        for row in rows
        if row["qid"] in qrels
    ]


def rankings(retriever: Retriever, turns: Sequence[Turn], kind: str) -> dict[str, list[str]]:
    """Return per turn that has such a query the ids found, best first, at most DEPTH."""
    asked = [(turn.qid, query) for turn in turns if (query := turn.query(kind)) is not None]
    found: dict[str, list[str]] = {}
    for start in range(0, len(asked), _BATCH):
        batch = asked[start : start + _BATCH]
        results = retriever.search([query for _, query in batch], DEPTH)
        for (qid, _), hits in zip(batch, results, strict=True):
            found[qid] = [hit.document.id for hit in hits]
    return found


def score(ranked: Mapping[str, Sequence[str]], qrels: Qrels) -> dict[str, dict[str, float]]:
    """Return the measures of each ranking, by qid, as trec_eval computes them."""
    import pytrec_eval

    # Scores that fall with the rank: trec_eval orders by score, and equal ones by id, which is not the order served.
    run = {
        qid: {passage: float(len(passages) - rank) for rank, passage in enumerate(passages)}
        for qid, passages in ranked.items()
    }
    evaluator = pytrec_eval.RelevanceEvaluator({qid: dict(qrels[qid]) for qid in run}, _REQUESTED)
    # An empty ranking is no query for trec_eval.
    measured = evaluator.evaluate({qid: scores for qid, scores in run.items() if scores})
    return {
        qid: {column: measured[qid][name] if qid in measured else 0.0 for column, name in MEASURES.items()}
        for qid in run
    }


def cells(scores: Mapping[str, Mapping[str, float]], turns: Sequence[Turn], at_least: int) -> dict[str, Cell]:
    """Return the means per data set with that many turns, and over ``all`` turns, small sets included."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for turn in turns:
        if turn.qid in scores:
            groups.setdefault(turn.dataset, []).append(scores[turn.qid])
    groups = {
        **{name: rows for name, rows in groups.items() if len(rows) >= at_least},
        "all": [row for rows in groups.values() for row in rows],
    }
    return {
        name: Cell(len(rows), {column: sum(row[column] for row in rows) / len(rows) for column in MEASURES})
        for name, rows in groups.items()
        if rows
    }


Results = Mapping[str, Mapping[str, Mapping[str, Cell]]]
"""Backend -> kind of query -> data set -> cell."""


def _rows(results: Results) -> Iterator[tuple[str, str]]:
    """Yield (data set, kind of query) of every row, ``all`` last."""
    first = next(iter(results.values()))
    names = list(dict.fromkeys(name for kind in QUERIES for name in first[kind] if name != "all"))
    for name in [*names, "all"]:
        yield from ((name, kind) for kind in QUERIES if name in first[kind])


def markdown(results: Results) -> str:
    """Return the table: a row per data set and query, a column per backend with all measures."""
    columns = " / ".join(MEASURES)
    head = ["set", "query", "turns", *(f"{name}: {columns}" for name in results)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, kind in _rows(results):
        here = [result[kind][name] for result in results.values()]
        figures = (" / ".join(f"{cell.means[column]:.3f}" for column in MEASURES) for cell in here)
        lines.append("| " + " | ".join([name, kind, str(here[0].turns), *figures]) + " |")
    return "\n".join(lines)


def differences(results: Results, pair: Sequence[str]) -> list[tuple[str, str, float]]:
    """Return (data set, kind of query, nDCG@10 of the first minus that of the second) of every row."""
    first, second = (results[name] for name in pair)
    return [
        (name, kind, first[kind][name].means["nDCG@10"] - second[kind][name].means["nDCG@10"])
        for name, kind in _rows(results)
    ]


def spec_of(path: Path, corpus: Path) -> Spec:
    """Return the backend that a YAML file describes, or the one that reads an index; raises RetrievalServerError."""
    if path.suffix in (".yaml", ".yml"):
        section = read_config(path)["backend"]
        return resolve(section, {}, str(path)).backend
    return resolve({"name": index_kind(path), "index_path": path, "corpus_path": corpus}, {}).backend


def measure(spec: Spec, turns: Sequence[Turn], qrels: Qrels, at_least: int) -> dict[str, dict[str, Cell]]:
    """Load one backend, search every kind of query, and return the cells by kind and data set."""
    retriever = load(spec, LoadProgress())
    try:
        return {kind: cells(score(rankings(retriever, turns, kind), qrels), turns, at_least) for kind in QUERIES}
    finally:
        retriever.close()


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with passages, conversations and qrels")
    parser.add_argument("--backend", type=_named, action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--min_turns", type=int, default=10, help="sets with fewer turns count in 'all' only")
    parser.add_argument("--compare", nargs=2, metavar="NAME", help="two backends whose nDCG@10 must agree")
    parser.add_argument("--within", type=float, default=0.02, help="how far apart they may be on any set (0.02)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when the backends that are compared are further apart than allowed, 2 for a mistake."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _report(options)
    except (RetrievalServerError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _report(options: argparse.Namespace) -> int:
    names = [name for name, _ in options.backend]
    for name in options.compare or ():
        if name not in names:
            raise SettingsError(f"--compare {name}: no such --backend; given: {', '.join(names)}")
    qrels = read_qrels(options.data / "qrels.trec")
    turns = read_turns(options.data / "conversations.jsonl", qrels)
    results = {}
    for name, path in options.backend:
        logger.info("%s: %s", name, path)
        results[name] = measure(spec_of(path, options.data / "passages.jsonl"), turns, qrels, options.min_turns)
    sys.stdout.write(markdown(results) + "\n")
    if options.compare is None:
        return 0
    apart = max(differences(results, options.compare), key=lambda row: abs(row[2]))
    first, second = options.compare
    sys.stdout.write(
        f"\nLargest difference in nDCG@10, {first} minus {second}: {apart[2]:+.3f} ({apart[0]}, {apart[1]})\n"
    )
    return int(abs(apart[2]) > options.within)


if __name__ == "__main__":
    sys.exit(main())
