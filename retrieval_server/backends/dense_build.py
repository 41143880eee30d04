"""Builds a dense index: the corpus is read and checked, encoded into a file, and the file becomes a FAISS index.

Each stage goes on where an interrupted building stopped. Memory holds a block of passages and of vectors, whatever the
size of the corpus; for the types that FAISS fills in memory (all but Flat and SQ) it holds the index as well.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrieval_server.backends.dense import KIND, STARTS, load_starts
from retrieval_server.backends.embeddings import EmbeddingFile, write_embeddings
from retrieval_server.backends.encoder import Encoder, load_encoder
from retrieval_server.backends.encodings import Declared, Encoding, combine, family_of
from retrieval_server.backends.faiss_files import index_size, make_index, quiet_faiss, streams, write_streamed
from retrieval_server.backends.faiss_search import gpu_count
from retrieval_server.backends.model_folder import fingerprint, local_folder, read_sentence_transformer
from retrieval_server.backends.torch_models import pick_device, pick_dtype
from retrieval_server.building import WORK, BuildPlan, Written, build_index, write_durably
from retrieval_server.corpus import CorpusReader, PassageStore, sampled_sha256
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import CorpusError, IndexFolderError, SettingsError
from retrieval_server.manifest import PASSAGES_NAME, CorpusIdentity, Manifest, identify, read_manifest
from retrieval_server.progress import Progress

logger = logging.getLogger(__name__)

_IDENTITY = "corpus.json"
_EMBEDDINGS = "embeddings.raw"
# Vectors that a quantiser is trained on at least, and per list of an IVF index.
_TRAINED_ON = 100_000
_TRAINED_ON_PER_LIST = 64


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's folder and what was decided about it."""

    path: str
    """As it goes into the manifest: absolute for a folder, so that it is found from anywhere."""
    folder: Path
    fingerprint: str
    encoding: Encoding
    max_length: int


def build(plan: BuildPlan) -> Manifest:
    """Build ``<save_dir>/<method>`` and return its manifest; see ``building.build_index``.

    Raises CorpusError (naming file and line), SettingsError or IndexFolderError.
    """
    quiet_faiss()
    options = plan.encode
    if options is None:
        raise SettingsError("a dense index needs an encoder: give --model_path, a folder or a name on the hub")
    if options.faiss_gpu and not gpu_count():
        raise SettingsError("--faiss_gpu: the installed FAISS finds no GPU; install faiss-gpu-cu12, or leave it out")
    passages = _describe(options, options.model_path)
    queries = passages if options.query_model_path is None else _describe(options, options.query_model_path)
    dtype = _dtype(options)
    index_name = f"{options.method}_{options.faiss_type.replace(',', '_')}.index"
    parameters: dict[str, Any] = {
        "method": options.method,
        "passage_fingerprint": passages.fingerprint,
        "passage_encoding": dataclasses.asdict(passages.encoding),
        "query_fingerprint": queries.fingerprint,
        "query_encoding": dataclasses.asdict(queries.encoding),
        "max_length": passages.max_length,
        "dtype": str(dtype).removeprefix("torch."),
        "faiss_type": options.faiss_type,
        "file": index_name,
        "embedding_dtype": options.embedding_dtype,
        "embeddings_from": _identity_of(options.embedding_path),
    }

    def write(folder: Path) -> Written:
        return _Writer(plan, options, passages, queries.path, dtype, folder, index_name).write()

    return build_index(plan, KIND, parameters, write, _check)


def _describe(options: EncodeOptions, model_path: str) -> _Model:
    folder = local_folder(model_path)
    said = read_sentence_transformer(folder)
    asked = Declared(options.pooling_method, None, options.query_prefix, options.passage_prefix)
    encoding = combine(family_of(options.method, model_path), [asked, said.declared])
    limit = said.max_length or options.max_length
    if limit < options.max_length:
        logger.warning("%s was made for %d tokens: --max_length %d is cut", model_path, limit, options.max_length)
    logger.info(
        "%s: pooling %s, %s, passages begin with %r, queries with %r", model_path, encoding.pooling,
        "normalised" if encoding.normalize else "not normalised", encoding.passage_prefix, encoding.query_prefix,
    )  # fmt: skip
    shown = str(Path(model_path).resolve()) if Path(model_path).is_dir() else model_path
    return _Model(shown, folder, fingerprint(folder), encoding, min(limit, options.max_length))


def passage_encoder(options: EncodeOptions) -> tuple[Encoder, int]:
    """Return the encoder that ``build`` would use and the tokens it would take of a passage; raises SettingsError."""
    model = _describe(options, options.model_path)
    return _load(options, model, _dtype(options)), model.max_length


def _load(options: EncodeOptions, model: _Model, dtype: torch.dtype) -> Encoder:
    projections = read_sentence_transformer(model.folder).projections
    device = pick_device(options.device)
    return load_encoder(model.folder, model.encoding, projections, device, dtype, options.batch_size)


def _dtype(options: EncodeOptions) -> torch.dtype:
    device = pick_device(options.device)
    if options.dtype is not None or options.use_fp16:
        return pick_dtype(options.dtype or "auto", device)
    if options.embedding_path is None and pick_dtype("auto", device) != torch.float32:
        logger.info("encoding in float32; --use_fp16 takes about half the time on this %s", device.type)
    return torch.float32


def _identity_of(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return sampled_sha256(path)
    except OSError as error:
        raise SettingsError(f"--embedding_path {path} cannot be read: {error.strerror}") from None


class _Writer:
    """One building, from the partial folder as it is to all the index's files in it."""

    def __init__(
        self,
        plan: BuildPlan,
        options: EncodeOptions,
        model: _Model,
        query_model_path: str,
        dtype: torch.dtype,
        folder: Path,
        index_name: str,
    ) -> None:
        self._plan, self._options, self._model = plan, options, model
        self._query_model_path, self._dtype = query_model_path, dtype
        self._folder, self._work = folder, folder / WORK
        self._index_path = folder / index_name

    def write(self) -> Written:
        """Read, encode, index."""
        corpus = self._read_corpus()
        encoder = _load(self._options, self._model, self._dtype)
        factory = factory_string(self._options.faiss_type, corpus.passages)
        index = self._empty_index(factory, encoder.dim, corpus.passages)
        embeddings = self._embed(corpus, encoder)
        self._fill(index, factory, embeddings)
        self._keep(embeddings)
        statistics = {
            "dimension": encoder.dim,
            "faiss_factory": factory,
            "passage_model_path": self._model.path,
            "query_model_path": self._query_model_path,
            "passage_tokens": min(self._model.max_length, encoder.max_length),
        }
        return Written(corpus, statistics, ("torch", "transformers", "tokenizers", "faiss-cpu", "numpy"))

    def _read_corpus(self) -> CorpusIdentity:
        """Check every line, note where it begins, copy what cannot be mapped; once, before hours of encoding."""
        noted = self._work / _IDENTITY
        if noted.exists():
            return CorpusIdentity.model_validate_json(noted.read_text(encoding="utf-8"))
        reader = CorpusReader(self._plan.corpus_path, self._folder / PASSAGES_NAME)
        progress = Progress("reading the corpus")

        def starts() -> Iterator[int]:
            for line in reader:
                yield line.start
                progress.update(reader.fraction, f"{reader.passages:,} passages")

        np.save(self._folder / STARTS, np.fromiter(starts(), np.int64))
        if not reader.passages:
            raise CorpusError(f"corpus {reader.path} has no passage")
        corpus = identify(reader)
        progress.done(f"{corpus.passages:,} passages")
        for path in (self._folder / STARTS, *([self._folder / PASSAGES_NAME] if reader.needs_copy else [])):
            _sync(path)
        write_durably(noted, corpus.model_dump_json().encode())
        return corpus

    def _embed(self, corpus: CorpusIdentity, encoder: Encoder) -> EmbeddingFile:
        given = self._options.embedding_path
        if given is not None:
            return EmbeddingFile(given, corpus.passages, encoder.dim, "float32")
        copy = self._folder / PASSAGES_NAME
        served = copy if copy.exists() else CorpusReader(self._plan.corpus_path).served
        passages = PassageStore(served, load_starts(self._folder), cache_bytes=0)

        def encode(rows: range) -> npt.NDArray[np.float32]:
            return encoder.encode_passages([passages[row].contents for row in rows], self._model.max_length)

        try:
            return write_embeddings(
                self._work / _EMBEDDINGS, corpus.passages, encoder.dim, self._options.embedding_dtype, encode
            )
        except FloatingPointError as error:
            raise SettingsError(str(error)) from None
        finally:
            passages.close()

    def _empty_index(self, factory: str, dim: int, size: int) -> Any:
        """Return the index to be filled, before hours of encoding; raises SettingsError when it cannot be."""
        import faiss

        index = make_index(dim, factory)
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None and ivf.nlist > size:
            raise SettingsError(
                f"--faiss_type {factory} has {ivf.nlist} lists for {size} passages; take fewer, or IVF alone, which "
                "chooses their number"
            )
        return index

    def _fill(self, index: Any, factory: str, embeddings: EmbeddingFile) -> None:
        """Write the FAISS file."""
        import faiss

        progress = Progress("indexing")
        if not index.is_trained:
            self._train(index, embeddings, factory)
        if streams(index):
            write_streamed(index, embeddings.size, embeddings.blocks(), self._index_path)
        else:
            for block in embeddings.blocks():
                index.add(block)
                progress.update(index.ntotal / embeddings.size, f"{index.ntotal:,} vectors in {factory}")
            faiss.write_index(index, str(self._index_path))
        progress.done(f"{embeddings.size:,} vectors in {factory}")

    def _train(self, index: Any, embeddings: EmbeddingFile, factory: str) -> None:
        import faiss

        ivf = faiss.try_extract_index_ivf(index)
        lists = ivf.nlist if ivf is not None else 0
        if ivf is not None and self._options.faiss_gpu:
            ivf.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(ivf.d))
        sample = embeddings.sample(max(_TRAINED_ON, _TRAINED_ON_PER_LIST * lists))
        logger.info("training %s on %s vectors", factory, f"{len(sample):,}")
        try:
            index.train(sample)
        except RuntimeError as error:
            reason = str(error).rpartition("Error: ")[2].strip()
            raise SettingsError(f"--faiss_type {factory} cannot be trained on this corpus: {reason}") from None

    def _keep(self, embeddings: EmbeddingFile) -> None:
        """Keep the vectors under the published name, if asked to; without a second copy where the disk allows."""
        if not self._options.save_embedding or embeddings.path == self._options.embedding_path:
            return
        target = self._plan.save_dir / f"emb_{self._options.method}.memmap"
        draft = target.with_name(f".{target.name}.draft")
        draft.unlink(missing_ok=True)
        try:
            os.link(embeddings.path, draft)
        except OSError:
            shutil.copyfile(embeddings.path, draft)
        draft.replace(target)


def factory_string(faiss_type: str, size: int) -> str:
    """Return the factory string, with a number of lists where IVF names none: 4 times the root of the passages."""
    lists = max(1, min(4 * math.isqrt(size), size // 39))
    factory = re.sub(r"IVF(?!\d)", f"IVF{lists}", faiss_type)
    return f"{factory},Flat" if re.fullmatch(r"IVF\d+", factory) else factory


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check(folder: Path) -> None:
    """Compare what the files say. Nothing is loaded: the index may be larger than this machine's memory."""
    manifest = read_manifest(folder)
    found = index_size(folder / str(manifest.parameters["file"]))
    expected = (manifest.corpus.passages, manifest.statistics["dimension"])
    if found != expected or len(load_starts(folder)) != expected[0]:
        raise IndexFolderError(f"{folder} has (vectors, dimension) {found}, expected {expected}; build again")
