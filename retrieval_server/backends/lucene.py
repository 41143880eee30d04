"""Search in an existing Lucene index (pyserini, Anserini), with the ranking that pyserini gives.

The JVM lives in a process of its own: ``lucene_process`` is that process, ``lucene_client`` our end of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_server.backends.lucene_client import CHILD, LuceneClient, LuceneProcessError
from retrieval_server.backends.lucene_java import JavaSetup, find_setup
from retrieval_server.backends.lucene_texts import PassagesById
from retrieval_server.corpus import parse_passage, split_contents
from retrieval_server.errors import CorpusError, IndexFolderError
from retrieval_server.manifest import MANIFEST_NAME
from retrieval_server.specs import LuceneSpec
from retrieval_server.types import Document, Hit, LoadProgress

logger = logging.getLogger(__name__)

KIND = "lucene"
_CACHED = 8192
_HITS_PER_MESSAGE = 8192
"""Queries times k of one message: bounds its size, and the work that has to be done within the time limit."""


class LuceneRetriever:
    """Implements ``types.Retriever``. Among equal scores the smaller id ranks first, as in pyserini."""

    name = KIND
    parallel = 1

    def __init__(self, client: LuceneClient, description: dict[str, Any], texts: PassagesById | None) -> None:
        """``client`` runs already and gave ``description``; ``texts`` are the corpus, or None for stored ones."""
        self._client, self._description, self._texts = client, description, texts
        # Training repeats its queries, so the same passages come back within seconds.
        self._documents: OrderedDict[str, Document] = OrderedDict()

    @classmethod
    def load(cls, spec: LuceneSpec, progress: LoadProgress, command: Sequence[str] = CHILD) -> LuceneRetriever:
        """Start the process, open the index and, where given, read the corpus.

        Raises SettingsError for a missing jar or Java, IndexFolderError or CorpusError for an index that holds no
        texts without a corpus, or whose ids the corpus does not have, and LuceneProcessError.
        """
        folder = resolve_lucene_index(spec.index_path)
        setup = find_setup(spec.anserini_jar, spec.java_home)
        # The corpus first: it takes minutes where the index takes a second, and is where mistakes are.
        texts = None if spec.corpus_path is None else PassagesById(spec.corpus_path, progress)
        progress.update("starting the JVM", 0.9)
        config = {
            "jar": str(setup.jar),
            "options": jvm_options(setup, spec.heap_mb),
            "index": str(folder),
            "k1": spec.k1,
            "b": spec.b,
            "threads": spec.threads,
            "texts": texts is None,
        }
        client = LuceneClient(config, spec.timeout_s, {"JAVA_HOME": str(setup.java_home)}, command)
        try:
            description = client.start()
            _check_index(folder, description, texts)
        except Exception:
            client.close()
            if texts is not None:
                texts.close()
            raise
        logger.info(
            "Lucene %s (%s, Java %s): %s documents, opened in %.1f s, %d MB resident",
            description["lucene"], setup.jar.name, description["java"],
            f"{description['documents']:,}", description["start_s"], description["rss_mb"],
        )  # fmt: skip
        progress.update("ready", 1.0)
        return cls(client, {**description, "index": str(folder), "jar": setup.jar.name}, texts)

    @property
    def size(self) -> int:
        """Number of documents of the index."""
        documents: int = self._description["documents"]
        return documents

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the documents that share a term with each query, best first, at most k; see the protocol.

        Raises LuceneProcessError when the process fails twice, does not answer in time or refuses, and CorpusError
        for a document that the corpus does not have.
        """
        k = min(k, self.size)
        asked = list(dict.fromkeys(query for query in queries if query.strip()))
        if k < 1 or not asked:
            return [[] for _ in queries]
        step = max(1, _HITS_PER_MESSAGE // k)
        hits: dict[str, list[Hit]] = {}
        for start in range(0, len(asked), step):
            hits.update(self._ask(asked[start : start + step], k))
        return [list(hits.get(query, ())) for query in queries]

    def _ask(self, queries: list[str], k: int) -> dict[str, list[Hit]]:
        answer = self._client.ask({"queries": queries, "k": k})["hits"]
        if len(answer) != len(queries):
            raise LuceneProcessError(f"lucene answered {len(answer)} of {len(queries)} queries")
        return {
            query: [Hit(self._document(id, text), score) for id, score, text in found]
            for query, found in zip(queries, answer, strict=True)
        }

    def _document(self, id: str, stored: str | None) -> Document:
        if self._texts is not None:
            document = self._texts.find(id)
            if document is None:
                raise CorpusError(f"document {id!r} of the index is not in the corpus {self._texts.path}")
            return document
        document = self._documents.pop(id, None) or stored_document(id, stored or "")
        self._documents[id] = document
        if len(self._documents) > _CACHED:
            self._documents.popitem(last=False)
        return document

    def info(self) -> dict[str, Any]:
        """Return the corpus, as far as it is known, and what the process is and needs."""
        described = {key: value for key, value in self._description.items() if key != "sample"}
        process = {**described, "rss_mb": self._client.rss_mb, "restarts": self._client.restarts}
        if self._texts is None:
            return {"corpus": {"passages": self.size}, "lucene": process}
        return {"corpus": self._texts.identity.model_dump(mode="json"), "lucene": process}

    def close(self) -> None:
        """End the process and unmap the corpus."""
        self._client.close()
        if self._texts is not None:
            self._texts.close()


def jvm_options(setup: JavaSetup, heap_mb: int) -> list[str]:
    """Return the options of the JVM: capped heap, an end instead of a half-dead process, nothing written to disk."""
    options = [
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",  # one search at a time on a small heap: least memory and threads
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:+ErrorFileToStderr",
        "-XX:-UsePerfData",
        "-Xrs",  # signals stay with the interpreter
    ]
    if setup.java_version is not None and setup.java_version >= 22:
        options.append("--enable-native-access=ALL-UNNAMED")
    if setup.java_version is not None and setup.java_version >= 23:
        options.append("--sun-misc-unsafe-memory-access=allow")  # Lucene 9 unmaps its files that way
    return options


def resolve_lucene_index(path: Path) -> Path:
    """Return the folder with Lucene's ``segments_N``: ``path``, or the one folder inside it that is an index.

    Raises IndexFolderError that says what was found instead.
    """
    if not path.is_dir():
        what = "is a file, not an index folder" if path.exists() else "does not exist"
        raise IndexFolderError(f"index {path} {what}; build one with: java -cp JAR io.anserini.index.IndexCollection")
    if _is_lucene(path):
        return path
    inside = sorted(child for child in path.iterdir() if child.is_dir() and _is_lucene(child))
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise IndexFolderError(f"{path} holds {len(inside)} indexes ({', '.join(p.name for p in inside)}); name one")
    if any(path.glob(MANIFEST_NAME)) or any(path.glob(f"*/{MANIFEST_NAME}")):
        raise IndexFolderError(f"{path} is an index of this service's own builder, not of Lucene; serve it as bm25")
    found = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
    raise IndexFolderError(f"{path} is not a Lucene index: no segments_N file (found: {found})")


def _is_lucene(folder: Path) -> bool:
    return any(folder.glob("segments_*"))


def _check_index(folder: Path, description: dict[str, Any], texts: PassagesById | None) -> None:
    documents = description["documents"]
    if documents < 1:
        raise IndexFolderError(f"{folder} holds no document")
    if texts is None:
        if description["stored"] is None:
            raise IndexFolderError(
                f"{folder} stores no texts (it was built without -storeRaw); give corpus_path, the file it was built "
                "from"
            )
        return
    if documents > len(texts):
        raise CorpusError(
            f"corpus {texts.path} has {len(texts)} passages, but {folder} has {documents} documents; give the corpus "
            "it was built from"
        )
    for id in description["sample"]:
        if texts.find(id) is None:
            raise CorpusError(
                f"corpus {texts.path} has no passage {id!r}, which {folder} has; give the corpus it was built from"
            )
    if documents < len(texts):
        logger.warning("%s has %d of the %d passages of %s", folder, documents, len(texts), texts.path)


def stored_document(id: str, stored: str) -> Document:
    """Return the document of a stored text: a line of a corpus, else the text itself under the index's id."""
    try:
        return parse_passage(stored.encode("utf-8"))
    except ValueError:
        contents = stored.encode("utf-8", "replace").decode("utf-8")
        title, text = split_contents(contents)
        return Document.of(id, contents, title, text)
