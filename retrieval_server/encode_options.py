"""How a dense index is built, as data: the encoder flags of the published builder, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrieval_server.errors import SettingsError

Pooling = Literal["mean", "cls", "pooler"]
FAMILY_NAMES = ("e5", "bge", "gte", "contriever", "jina", "dpr", "plain")
"""Kinds of encoder whose prefixes and pooling are known; ``backends.encodings`` has them."""
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Which encoder turns passages into vectors, and what FAISS index they become.

    Example: ``EncodeOptions(method="e5", model_path="intfloat/e5-base-v2", max_length=256, faiss_type="Flat")``.
    """

    method: str
    """e5, bge, contriever, dpr or any name; decides prefixes and pooling where nothing else does."""
    model_path: str
    """A folder (transformers or sentence-transformers layout) or a name on the Hugging Face hub."""
    max_length: int = 180
    """Tokens of a passage; a longer one loses its end."""
    batch_size: int = 512
    """Passages encoded together at most; fewer where they are long."""
    use_fp16: bool = False
    """Half precision where the device is fast in it: float16 on CUDA, bfloat16 on a CPU that has it."""
    pooling_method: Pooling | None = None
    faiss_type: str = "Flat"
    """A FAISS factory string; ``IVF`` alone chooses the number of lists."""
    save_embedding: bool = False
    """Keep the vectors as ``<save_dir>/emb_<method>.memmap`` (raw float32 [N, dim])."""
    embedding_path: Path | None = None
    """Take the vectors from such a file instead of encoding."""
    faiss_gpu: bool = False
    """Train and fill the index on the GPU, where the installed FAISS can."""
    dtype: Dtype | None = None
    """Precision of the encoder's matrix products; null: as ``use_fp16`` says, float32 without it."""
    embedding_dtype: Literal["float32", "float16"] = "float32"
    """Precision of the vectors on disk between encoding and indexing."""
    device: str = "auto"
    query_prefix: str | None = None
    passage_prefix: str | None = None
    """Null: as the model's own configuration says, else as ``method`` says."""
    query_model_path: str | None = None
    """Encoder of the queries, where it is another one (DPR)."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 8), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise SettingsError(f"--{name} is {getattr(self, name)}; it must be at least {least}")
        if self.use_fp16 and self.dtype is not None:
            raise SettingsError(f"--use_fp16 and --dtype {self.dtype} both choose the precision; give one of them")
        if self.save_embedding and self.embedding_dtype != "float32":
            raise SettingsError(f"--save_embedding keeps float32, not --embedding_dtype {self.embedding_dtype}")
        if not self.method or "/" in self.method or self.method.startswith("."):
            raise SettingsError(f"--retrieval_method {self.method!r} cannot be the name of a file; give a plain name")
