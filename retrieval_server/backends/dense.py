"""Dense retrieval: an encoder and inner-product search over the vectors of the passages.

Serves an index of this builder, whose manifest says everything, and a bare FAISS file as published, for which the
encoder is given and the corpus is matched by its number of passages. See ``encoder`` and ``exact_search`` for why a
query gets the same list alone as in any batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_server.backends.dense_parts import Searcher, load_bare_encoder, load_own_encoder, make_searcher
from retrieval_server.backends.encoder import Encoder
from retrieval_server.backends.faiss_files import LoadedIndex, index_pieces, quiet_faiss, read_index
from retrieval_server.backends.torch_models import set_threads
from retrieval_server.corpus import CorpusReader, PassageStore
from retrieval_server.errors import CorpusError, IndexFolderError, SettingsError
from retrieval_server.manifest import (
    MANIFEST_NAME,
    CorpusIdentity,
    check_files,
    identify,
    read_manifest,
    resolve_index,
    served_corpus,
)
from retrieval_server.specs import DenseSpec
from retrieval_server.types import Hit, LoadProgress

KIND = "dense"
STARTS = "starts.npy"


class DenseRetriever:
    """Implements ``types.Retriever``. Use ``load``."""

    name = KIND
    parallel = 1

    def __init__(
        self,
        encoder: Encoder,
        searcher: Searcher,
        passages: PassageStore,
        spec: DenseSpec,
        described: dict[str, Any],
    ) -> None:
        """``described`` is what ``info`` returns, but for the encoder's part."""
        self._encoder = encoder
        self._searcher = searcher
        self._passages = passages
        self._max_length = spec.max_query_length
        self._threads = spec.threads
        self._lock = threading.Lock()
        self._timings: dict[str, float] = {}
        self._info = {
            **described,
            "encoder": {
                "dimension": encoder.dim,
                "device": str(encoder.device),
                "dtype": str(encoder.dtype).removeprefix("torch."),
                "max_query_length": min(spec.max_query_length, encoder.max_length),
                **{field: getattr(encoder.encoding, field) for field in ("pooling", "normalize", "query_prefix")},
                "batch_deviation": encoder.batch_deviation(spec.max_query_length),
            },
        }

    @classmethod
    def load(cls, spec: DenseSpec, progress: LoadProgress) -> DenseRetriever:
        """Load encoder, index and corpus and check that they belong together.

        Raises IndexFolderError, CorpusError or SettingsError, with both values where two differ.
        """
        quiet_faiss()
        set_threads(spec.threads)
        if _is_bare(spec.index_path):
            return cls._load_bare(spec, progress)
        folder = resolve_index(spec.index_path.parent if spec.index_path.is_file() else spec.index_path)
        manifest = read_manifest(folder)
        if manifest.kind != KIND:
            raise IndexFolderError(f"{folder} is an index of kind {manifest.kind!r}, the retriever is {KIND!r}")
        progress.update("checking index and corpus", 0.0)
        total = manifest.corpus.bytes + sum(identity.bytes for identity in manifest.files.values())
        hashed = 0

        def count(n_bytes: int) -> None:
            nonlocal hashed
            hashed += n_bytes
            progress.update("checking index and corpus", 0.2 * hashed / total)

        check_files(folder, manifest, spec.verify, count)
        passages_path = served_corpus(folder, manifest, spec.corpus_path, spec.verify, count)
        progress.update("loading the encoder", 0.2)
        encoder = load_own_encoder(spec, folder, manifest)
        index = _read([folder / str(manifest.parameters["file"])], progress)
        _require(folder, "dimension", index.dim, encoder.dim)
        _require(folder, "vectors", index.size, manifest.corpus.passages)
        starts = load_starts(folder)
        _require(folder, "passages in starts.npy", len(starts), index.size)
        searcher, search_info = make_searcher(index, spec)
        dumped = manifest.model_dump(mode="json")
        described = {"corpus": dumped["corpus"], "manifest": dumped, "search": search_info}
        passages = PassageStore(passages_path, starts)
        progress.update("first queries", 0.95)
        retriever = cls(encoder, searcher, passages, spec, described)
        progress.update("ready", 1.0)
        return retriever

    @classmethod
    def _load_bare(cls, spec: DenseSpec, progress: LoadProgress) -> DenseRetriever:
        pieces = index_pieces(spec.index_path)
        progress.update("loading the encoder", 0.0)
        encoder = load_bare_encoder(spec, pieces[0])
        index = _read(pieces, progress)
        if index.dim != encoder.dim:
            raise IndexFolderError(
                f"index {pieces[0]} has {index.dim} dimensions, but the encoder {spec.model_path} gives {encoder.dim}: "
                "give the encoder that it was built with (--retriever_model)"
            )
        progress.update("counting the passages of the corpus", 0.8)
        passages_path, corpus, starts = _scan(spec.corpus_path, pieces[0])
        if corpus.passages != index.size:
            raise CorpusError(
                f"corpus {spec.corpus_path} has {corpus.passages} passages, but the index {pieces[0]} has {index.size} "
                "vectors; row n of the index must be passage n of the corpus: give the corpus that it was built from"
            )
        searcher, search_info = make_searcher(index, spec)
        described = {"corpus": corpus.model_dump(mode="json"), "search": search_info}
        passages = PassageStore(passages_path, starts)
        progress.update("first queries", 0.95)
        retriever = cls(encoder, searcher, passages, spec, described)
        progress.update("ready", 1.0)
        return retriever

    @property
    def size(self) -> int:
        """Number of passages."""
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the best k passages of each query by inner product; see the protocol."""
        if not queries:
            return []
        with self._lock:
            if self._threads:
                import faiss

                faiss.omp_set_num_threads(self._threads)  # counts for the calling thread alone
            started = time.perf_counter()
            vectors = self._encoder.encode_queries(queries, self._max_length)
            encoded = time.perf_counter()
            found = self._searcher.search(vectors, k)
            searched = time.perf_counter()
            hits = [
                [Hit(self._passages[row], score) for score, row in zip(scores.tolist(), rows.tolist(), strict=True)]
                for scores, rows in found
            ]
            self._timings = {
                "encode": encoded - started,
                "search": searched - encoded,
                "passages": time.perf_counter() - searched,
            }
        return hits

    def timings(self) -> dict[str, float]:
        """Return the seconds that the last search spent encoding, searching and reading passages."""
        return dict(self._timings)

    def info(self) -> dict[str, Any]:
        """Return the corpus, the manifest if there is one, and how encoder and search are set up."""
        return self._info

    def close(self) -> None:
        """Unmap the corpus."""
        self._passages.close()


def load_starts(folder: Path) -> npt.NDArray[np.int64]:
    """Return the offsets of the passages [N] from an index of this builder."""
    path = folder / STARTS
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise IndexFolderError(f"{path} cannot be read as an array ({error}); rebuild the index") from None


def _is_bare(path: Path) -> bool:
    """True for a FAISS file or its parts; false for an index of this builder, and for what is neither."""
    if path.is_file():
        return not (path.parent / MANIFEST_NAME).is_file()
    if (path / MANIFEST_NAME).is_file() or any(path.glob(f"*/{MANIFEST_NAME}")):
        return False
    return any(any(path.glob(pattern)) for pattern in ("part_*", "*.index", "*.faiss"))


def _read(pieces: Sequence[Path], progress: LoadProgress) -> LoadedIndex:
    total = max(1, sum(piece.stat().st_size for piece in pieces))
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        progress.update("reading the index", 0.3 + 0.5 * done / total)

    index = read_index(pieces, count)
    if index.size == 0:
        raise IndexFolderError(f"index {pieces[0]} holds no vectors; build it again")
    return index


def _scan(path: Path | None, index_file: Path) -> tuple[Path, CorpusIdentity, npt.NDArray[np.int64]]:
    """Return the file, the identity and the offsets of the passages [N] of a corpus that no manifest describes."""
    if path is None:
        raise SettingsError(
            f"{index_file} is a bare FAISS file: give the corpus that it was built from (--corpus_path)"
        )
    reader = CorpusReader(path)
    if reader.needs_copy:
        raise CorpusError(
            f"corpus {path} is compressed or in shards; beside a bare FAISS file only plain JSON lines can be served: "
            "unpack it into one file, in order"
        )
    starts = np.fromiter((line.start for line in reader.raw_lines()), np.int64)
    return reader.served, identify(reader), starts


def _require(folder: Path, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise IndexFolderError(f"{folder} is inconsistent: {what} {found}, expected {expected}; rebuild the index")
