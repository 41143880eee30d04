"""A small server after the published algorithm, to compare ours with on one machine. It has none of our ideas.

    python benchmarks/reference_server.py --kind dense --index FAISS --corpus corpus.arrow --model MODEL --port 8000
    python benchmarks/reference_server.py --kind bm25 --index LUCENE --port 8000

Per request, in FastAPI's thread pool: encode the queries in batches of up to 512 padded to the longest, search FAISS,
look every document up in an Arrow table by its row number, answer through the framework's encoder. BM25: one Lucene
call per query and one per document. The published progress bar is left out, which is in this server's favour.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

_BATCH = 512
_MAX_LENGTH = 256

Found = list[tuple[dict[str, Any], float]]


class Request(BaseModel):
    """The published request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class Searcher(Protocol):
    """Either kind of search."""

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Return (document, score) pairs per query."""
        ...


class DenseSearcher:
    """Mean pooling, unit length, inner product; one forward pass per request and batch."""

    def __init__(self, index: Path, corpus: Path, model: Path, prefix: str) -> None:
        import faiss
        import pyarrow as pa
        from transformers import AutoModel, AutoTokenizer

        self._index = faiss.read_index(str(index))
        self._rows = pa.ipc.open_file(pa.memory_map(str(corpus))).read_all()
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval()
        self._prefix = prefix

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Return the nearest passages of each query."""
        results: list[Found] = []
        for start in range(0, len(queries), _BATCH):
            scores, rows = self._index.search(self._encode(queries[start : start + _BATCH]), k)
            for query_scores, query_rows in zip(scores, rows, strict=True):
                documents = [self._rows.slice(int(row), 1).to_pylist()[0] for row in query_rows]
                results.append(list(zip(documents, query_scores.tolist(), strict=True)))
        return results

    def _encode(self, queries: Sequence[str]) -> Any:
        import torch

        texts = [self._prefix + query for query in queries]
        inputs = self._tokenizer(texts, padding=True, truncation=True, max_length=_MAX_LENGTH, return_tensors="pt")
        with torch.no_grad():
            states = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        pooled = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1).numpy()


class LuceneSearcher:
    """Anserini's searcher in this process, one call per query, asked of Java what pyserini asks.

    That is a map of field weights per query (empty), the id of every hit twice, a document per hit and its text.
    """

    def __init__(self, index: Path, heap: str) -> None:
        from retrieval_server.backends.lucene_java import find_setup

        setup = find_setup(None, None)
        os.environ["JAVA_HOME"] = str(setup.java_home)
        import jnius_config

        jnius_config.set_classpath(str(setup.jar))
        jnius_config.add_options(f"-Xmx{heap}")
        from jnius import autoclass

        self._map = autoclass("java.util.HashMap")
        self._searcher = autoclass("io.anserini.search.SimpleSearcher")(str(index))
        self._searcher.set_bm25(0.9, 0.4)

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Return the best passages of each query, none for a query without a hit."""
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> Found:
        found: Found = []
        self._map()
        seen: set[str] = set()
        hits = [hit for hit in self._searcher.search(query, k) if hit.docid not in seen]
        for hit in hits:
            document = self._searcher.doc(hit.docid)
            contents = json.loads(document.get("raw"))["contents"]
            title, _, text = contents.partition("\n")
            found.append(({"title": title.strip('"'), "text": text, "contents": contents}, hit.score))
        return found


def create_app(searcher: Searcher, topk: int) -> FastAPI:
    """Build the app: one route, a plain function, so that every request has a thread of the pool."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        results = searcher.search(request.queries, request.topk or topk)
        if request.return_scores:
            return {"result": [[{"document": document, "score": score} for document, score in r] for r in results]}
        return {"result": [[document for document, _ in r] for r in results]}

    return app


def write_arrow(corpus: Path, target: Path) -> None:
    """Write a JSON-lines corpus as an Arrow file with the columns id and contents, one record batch per 1,000 rows."""
    import pyarrow as pa

    schema = pa.schema([("id", pa.string()), ("contents", pa.string())])
    partial = target.with_suffix(".partial")
    with corpus.open("rb") as lines, pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        rows: list[dict[str, str]] = []
        for line in lines:
            row = json.loads(line)
            contents = row["contents"] if "contents" in row else f'"{row["title"]}"\n{row["text"]}'
            rows.append({"id": str(row["id"]), "contents": contents})
            if len(rows) == 1000:
                writer.write(pa.RecordBatch.from_pylist(rows, schema))
                rows = []
        if rows:
            writer.write(pa.RecordBatch.from_pylist(rows, schema))
    partial.rename(target)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("dense", "bm25"), required=True)
    parser.add_argument("--index", type=Path, required=True, help="a FAISS file, or a Lucene index with stored texts")
    parser.add_argument("--corpus", type=Path, help="dense: the corpus as written by write_arrow")
    parser.add_argument("--model", type=Path, help="dense: folder of the encoder")
    parser.add_argument("--prefix", default="", help="dense: in front of every query")
    parser.add_argument("--heap", default="2g", help="bm25: limit of the Java heap")
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    searcher: Searcher
    if options.kind == "dense":
        searcher = DenseSearcher(options.index, options.corpus, options.model, options.prefix)
    else:
        searcher = LuceneSearcher(options.index, options.heap)
    uvicorn.run(create_app(searcher, options.topk), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
