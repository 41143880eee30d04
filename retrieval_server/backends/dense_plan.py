"""Estimates what a dense index will take: the encoder is timed on the corpus itself, the index type is known."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from retrieval_server.backends.dense_build import factory_string, passage_encoder
from retrieval_server.backends.encoder import Encoder
from retrieval_server.backends.faiss_files import make_index, quiet_faiss, streams
from retrieval_server.building import BuildPlan
from retrieval_server.encode_options import EncodeOptions
from retrieval_server.errors import SettingsError
from retrieval_server.planning import Estimate, Sample, sample

_SAMPLED = 2048
_AT_ONCE = 64
_LONGEST_S = 10.0
_PROCESS = 900 << 20
"""Of torch, transformers and FAISS, before any model."""
_STARTS = 8
_ID = 8
# Seconds a vector of 768 dimensions takes to be added, on one core: measured on 200,000 of them.
_HNSW_S, _HNSW_MEASURED = 0.67e-3, 200_000
_IVF_S = 0.13e-3
_FLAT_S = 5e-6

_SOURCE = (
    "measured on 20,104 real passages x 384 dimensions (all-MiniLM-L6-v2), 512 questions, the top 10 against those of "
    "an exact search; larger collections lose more at the same setting"
)
_RECALL = (
    (r"Flat", "none: the search is exact"),
    (r"SQfp16", "0.0 % of the top 10"),
    (r"SQbf16", "0.1 % of the top 10"),
    (r"SQ8", "0.3 % of the top 10"),
    (r"HNSW\d+(,Flat)?", "4.7 % of the top 10 at ef_search 16, 0.6 % at 64, 0.2 % at 128 (32 links)"),
    (r"IVF\d*(,Flat)?", "16.3 % of the top 10 at nprobe 8, 6.6 % at 32, 1.3 % at 128 (567 lists)"),
    (r"IVF\d*,SQ8", "6.5 % of the top 10 at nprobe 32 (567 lists)"),
)


def estimate(plan: BuildPlan, passages: int | None) -> Estimate:
    """Return what building this index would take; raises CorpusError or SettingsError."""
    quiet_faiss()
    options = plan.encode
    if options is None:
        raise SettingsError("a dense index needs an encoder: give --model_path, a folder or a name on the hub")
    found = sample(plan.corpus_path, _SAMPLED)
    n = passages or found.passages
    encoder, max_length = passage_encoder(options)
    factory = factory_string(options.faiss_type, n)
    index = make_index(encoder.dim, factory)
    encoded, seconds = (0, 0.0) if options.embedding_path else _time_encoder(encoder, found, max_length)
    vectors = n * _vector_bytes(index)
    index_bytes = vectors + _list_bytes(index) + n * _STARTS
    model = encoder.weight_bytes
    stored = encoder.dim * (2 if options.embedding_dtype == "float16" else 4)
    in_memory = 0 if streams(index) else vectors
    measured = f"{found.described()}; {encoded} of them encoded on {encoder.device} in {seconds:.1f} s"
    return Estimate(
        passages=n,
        measured_on=measured if encoded else found.described(),
        index_bytes=index_bytes,
        copy_bytes=round(found.line_bytes * n) if found.needs_copy else 0,
        work_bytes=0 if options.embedding_path else n * stored,
        build_memory=_PROCESS + 2 * model + in_memory,
        serve_memory=_PROCESS + 2 * model + vectors,
        seconds=n * (seconds / max(1, encoded) + _adding_s(index, n)),
        recall=expected_loss(options),
    )


def _time_encoder(encoder: Encoder, found: Sample, max_length: int) -> tuple[int, float]:
    """Encode passages spread over the sample for some seconds; return how many there were and the seconds.

    On a CPU these are of this process alone where that is less: what others take of the machine now says nothing.
    """
    contents = [line.fields()[1] for line in found.lines]
    contents = [contents[row * 997 % len(contents)] for row in range(len(contents))]  # 997 is prime: every row once
    encoder.encode_passages(contents[:_AT_ONCE], max_length)  # the first is slower than all that follow
    started, used, done = time.perf_counter(), time.process_time(), 0
    while done < len(contents) and time.perf_counter() - started < _LONGEST_S:
        done += len(encoder.encode_passages(contents[done : done + _AT_ONCE], max_length))
    elapsed, used = time.perf_counter() - started, time.process_time() - used
    return done, min(elapsed, used) if encoder.device.type == "cpu" else elapsed


def _vector_bytes(index: Any) -> int:
    """Return the bytes that one vector takes in the index, links and ids included."""
    import faiss

    if isinstance(index, faiss.IndexHNSW):
        hnsw: Any = index.hnsw
        links = int(hnsw.nb_neighbors(0))
        # Twice M links of 4 bytes on the ground level, M on each of the upper ones, which one vector in M reaches.
        return int(index.storage.sa_code_size()) + 4 * links + 4 + 12
    code = int(index.sa_code_size())
    return code + _ID if faiss.try_extract_index_ivf(index) is not None else code


def _list_bytes(index: Any) -> int:
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return 0 if ivf is None else int(ivf.nlist) * int(ivf.d) * 4


def _adding_s(index: Any, n: int) -> float:
    """Return the seconds that a vector takes to enter the index, training included."""
    import faiss

    scale = float(index.d) / 768
    if isinstance(index, faiss.IndexHNSW):
        return _HNSW_S * scale * max(1.0, math.log(max(n, 2)) / math.log(_HNSW_MEASURED))
    return scale * (_IVF_S if faiss.try_extract_index_ivf(index) is not None else _FLAT_S)


def expected_loss(options: EncodeOptions) -> str:
    """Return what the index type loses against an exact search, with the source of the figure."""
    known = next((text for pattern, text in _RECALL if re.fullmatch(pattern, options.faiss_type)), None)
    if known is None:
        return f"not measured for {options.faiss_type}: compare with SQfp16 or Flat on questions of your own"
    return known if options.faiss_type == "Flat" else f"loses {known}; {_SOURCE}"
