"""Which encoder and which search a dense retriever is made of, and the checks that they fit the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from retrieval_server.backends.encoder import Encoder, load_encoder
from retrieval_server.backends.encodings import Declared, Encoding, combine, family_of
from retrieval_server.backends.exact_search import NEVER, ExactSearch, Floats, Rows
from retrieval_server.backends.faiss_files import LoadedIndex
from retrieval_server.backends.faiss_search import (
    GPU_MAX_CANDIDATES,
    FaissSearch,
    gpu_count,
    one_by_one,
    to_gpus,
)
from retrieval_server.backends.model_folder import fingerprint, local_folder, read_sentence_transformer
from retrieval_server.backends.torch_models import pick_device, pick_dtype
from retrieval_server.errors import IndexFolderError, SettingsError
from retrieval_server.manifest import Manifest
from retrieval_server.specs import DenseSpec

# From how many queries on a matrix product beats FAISS's loop on a CPU.
_MANY = 8
# Share of an accelerator's free memory that vectors in float32 may take; beyond it they are kept in float16.
_FLOAT32_SHARE = 0.6


class Searcher(Protocol):
    """Finds rows by vector."""

    def search(self, queries: Floats, k: int) -> list[tuple[Floats, Rows]]:
        """Return per query (scores, rows), best first, at most k."""
        ...


def load_own_encoder(spec: DenseSpec, folder: Path, manifest: Manifest) -> Encoder:
    """Load the query encoder of an index of this builder; whatever the spec says otherwise is refused."""
    told = manifest.parameters
    try:
        encoding = Encoding(**told["query_encoding"])
        expected, method = told["query_fingerprint"], told["method"]
        recorded = manifest.statistics["query_model_path"]
    except (KeyError, TypeError) as error:
        raise IndexFolderError(f"{folder}: the manifest does not describe an encoder ({error}); rebuild it") from None
    for flag, asked, built in (
        ("pooling", spec.pooling, encoding.pooling),
        ("query_prefix", spec.query_prefix, encoding.query_prefix),
        ("encoder", spec.encoder and family_of(spec.encoder), family_of(method)),
    ):
        if asked is not None and asked != built:
            raise SettingsError(f"{flag} is {asked!r}, but {folder} was built for {built!r}; leave it out or rebuild")
    model_path = spec.model_path or recorded
    model_folder = local_folder(model_path)
    found = fingerprint(model_folder)
    if found != expected:
        raise IndexFolderError(
            f"encoder {model_path} has fingerprint {found[:16]}, but {folder} was built for {recorded} with "
            f"{expected[:16]}: another model, or other weights; give the one it was built with or rebuild the index"
        )
    projections = read_sentence_transformer(model_folder).projections
    device = pick_device(spec.device)
    return load_encoder(model_folder, encoding, projections, device, pick_dtype(spec.dtype, device), spec.batch_size)


def load_bare_encoder(spec: DenseSpec, index_file: Path) -> Encoder:
    """Load the encoder that the spec names for a FAISS file, which itself says nothing about it."""
    if spec.model_path is None:
        raise SettingsError(
            f"{index_file} is a bare FAISS file: name the encoder that it was built with (--retriever_model)"
        )
    folder = local_folder(spec.model_path)
    said = read_sentence_transformer(folder)
    family = family_of(spec.encoder, index_file.name, spec.model_path)
    encoding = combine(family, [Declared(spec.pooling, None, spec.query_prefix), said.declared])
    device = pick_device(spec.device)
    return load_encoder(folder, encoding, said.projections, device, pick_dtype(spec.dtype, device), spec.batch_size)


def make_searcher(index: LoadedIndex, spec: DenseSpec) -> tuple[Searcher, dict[str, Any]]:
    """Return the search for an index and what ``/info`` says of it; raises SettingsError or IndexFolderError."""
    kind = "IndexFlatIP" if index.faiss_index is None else type(index.faiss_index).__name__
    described: dict[str, Any] = {"index": kind, "vectors": index.size, "dimension": index.dim}
    gpus = gpu_count() if spec.faiss_gpu else 0
    if index.vectors is None:
        if spec.search == "torch":
            raise SettingsError(f"search 'torch' needs plain vectors (Flat, SQfp16); this index is a {kind}: take auto")
        if spec.faiss_gpu and not gpus:
            raise SettingsError(
                f"faiss_gpu: a {kind} is searched on a GPU by FAISS alone, and the installed one finds none; leave "
                "faiss_gpu out, or install faiss-gpu-cu12"
            )
        approximate = FaissSearch(index.faiss_index, spec.nprobe, spec.ef_search, bool(gpus))
        return approximate, {**described, "device": f"{gpus} GPUs" if gpus else "cpu", **approximate.parameters}
    for name in ("nprobe", "ef_search"):
        if getattr(spec, name) is not None:
            raise SettingsError(f"{name} {getattr(spec, name)} has no meaning for exact search ({kind}); leave it out")
    try:
        exact, device = _exact_search(index, spec, gpus)
    except ValueError as error:
        raise IndexFolderError(f"the index is damaged: {error}; build or get it again") from None
    return exact, {**described, "device": device}


def _exact_search(index: LoadedIndex, spec: DenseSpec, gpus: int) -> tuple[ExactSearch, str]:
    import faiss

    vectors = index.vectors
    assert vectors is not None
    cpu = torch.device("cpu")
    one_by_one()
    if gpus and spec.search != "torch":
        whole = index.faiss_index
        if whole is None:
            whole = faiss.IndexFlatIP(index.dim)
            whole.add(vectors)
        limit = min(index.size, GPU_MAX_CANDIDATES)
        return ExactSearch(vectors, to_gpus(whole).search, NEVER, cpu, True, limit), f"{gpus} GPUs"
    if spec.faiss_gpu:
        if spec.search == "faiss":
            raise SettingsError(
                "search 'faiss' under faiss_gpu needs a FAISS that finds GPUs (faiss-gpu-cu12); take auto"
            )
        device = pick_device(spec.device)
        if device.type == "cpu":
            raise SettingsError("faiss_gpu: neither FAISS nor PyTorch finds a GPU here; leave it out")
        half = vectors.dtype == "float16" or vectors.nbytes > _FLOAT32_SHARE * _free_memory(device)
        return ExactSearch(vectors, None, 0, device, half), f"{device}, {'float16' if half else 'float32'}"
    many = {"auto": _MANY, "faiss": NEVER, "torch": 0}[spec.search]

    def few(queries: Floats, m: int) -> tuple[Floats, Rows]:
        if index.faiss_index is not None:
            found: tuple[Floats, Rows] = index.faiss_index.search(queries, m)
        else:
            found = faiss.knn(queries, vectors, m, metric=faiss.METRIC_INNER_PRODUCT)
        return found

    return ExactSearch(vectors, few, many, cpu), "cpu"


def _free_memory(device: torch.device) -> int:
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)
