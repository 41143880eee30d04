"""Texts to vectors: any encoder that transformers loads, with the pooling and prefixes that belong to it.

A text's vector does not depend on the texts it is encoded with: each is padded to a length that follows from its own
(the next multiple of 8 tokens), and only texts of equal padded length share a forward pass. Padding to the longest of a
batch, as is usual, changes the last bits (float32) or the third decimal (bfloat16) with the company; grouped like this
the vectors were bitwise equal alone and in any batch on the CPUs tried, and no slower. On accelerators the libraries
may choose another kernel for another number of rows, which is the deviation that ``batch_deviation`` measures.

Legend: B texts of one forward pass, L tokens with padding, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrieval_server.backends.encodings import Encoding
from retrieval_server.backends.model_folder import transformer_folder
from retrieval_server.backends.torch_models import Passes, convert_linear, mixed_precision
from retrieval_server.errors import SettingsError

Vectors = npt.NDArray[np.float32]

# Text beyond this many characters per token wanted is not even tokenized: it could only be cut off again.
_CHARACTERS_PER_TOKEN = 64
_UNLIMITED = 1 << 20


class Encoder:
    """A transformer with its tokenizer. Use ``load_encoder``."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        projections: Sequence[torch.nn.Module],
        encoding: Encoding,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int,
    ) -> None:
        convert_linear(model, dtype)
        self._model = model
        self._passes = Passes(device, batch_size)
        self._tokenizer = tokenizer
        self._projections = projections
        self._pad_id = tokenizer.pad_token_id or 0
        self.encoding = encoding
        self.device = device
        self.dtype = dtype
        """Of the matrix products; everything between them and after the transformer is float32."""
        self.batch_size = batch_size
        self.max_length = _token_limit(model, tokenizer)
        """Tokens that the model can take."""
        self.dim = self._encode([self._whole(["dimension"])[0]]).shape[1]

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(weight.numel() * weight.element_size() for weight in self._model.parameters())

    def encode_queries(self, queries: Sequence[str], max_length: int) -> Vectors:
        """Return [Q, dim]. A query longer than ``max_length`` tokens loses its beginning, but not the prefix."""
        limit = min(max_length, self.max_length)
        prefix = self.encoding.query_prefix
        texts = [prefix + query[-_CHARACTERS_PER_TOKEN * limit :] for query in queries]
        token_ids = self._whole(texts)
        for i, ids in enumerate(token_ids):
            if len(ids) > limit:
                token_ids[i] = self._cut_left(texts[i], len(prefix.rstrip()), limit)
        return self._encode(token_ids)

    def encode_passages(self, passages: Sequence[str], max_length: int) -> Vectors:
        """Return [P, dim]. A passage longer than ``max_length`` tokens loses its end."""
        limit = min(max_length, self.max_length)
        prefix = self.encoding.passage_prefix
        texts = [prefix + passage[: _CHARACTERS_PER_TOKEN * limit] for passage in passages]
        return self._encode(self._tokenizer(texts, truncation=True, max_length=limit)["input_ids"])

    def batch_deviation(self, max_length: int) -> float:
        """Return how far a query's vector moves when others are encoded with it (largest change of a coordinate)."""
        words = ["who", "wrote", "the", "first", "book", "on", "how", "a", "river", "runs", "to", "its", "sea"]
        probes = [" ".join([words[i % len(words)], *words[: i % 5 + 3]]) for i in range(2 * min(16, self.batch_size))]
        alone = np.concatenate([self.encode_queries([probe], max_length) for probe in probes[::4]])
        return float(np.abs(self.encode_queries(probes, max_length)[::4] - alone).max())

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text with special tokens, untruncated."""
        token_ids: list[list[int]] = self._tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        return token_ids

    def _cut_left(self, text: str, prefix_end: int, limit: int) -> list[int]:
        """Return ``limit`` token ids of a longer text: those of the prefix, then the last ones."""
        tokens = self._tokenizer(
            text, truncation=False, verbose=False, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        ids: list[int] = tokens["input_ids"]
        head = 0
        while head < limit and (tokens["special_tokens_mask"][head] or tokens["offset_mapping"][head][0] < prefix_end):
            head += 1
        return ids[:head] + ids[len(ids) - (limit - head) :]

    def _encode(self, token_ids: Sequence[Sequence[int]]) -> Vectors:
        vectors = None
        lengths = [len(ids) for ids in token_ids]

        def forward(rows: list[int], length: int) -> Vectors:
            return self._forward([token_ids[row] for row in rows], length)

        for rows, encoded in self._passes.run(forward, lengths, self.max_length):
            if vectors is None:
                vectors = np.empty((len(token_ids), encoded.shape[1]), np.float32)
            vectors[rows] = encoded
        if vectors is None:
            return np.empty((0, self.dim), np.float32)
        if not np.isfinite(vectors).all():
            raise FloatingPointError(f"the encoder's output is not finite in {self.dtype}; load it with dtype float32")
        return vectors

    def _forward(self, token_ids: Sequence[Sequence[int]], length: int) -> Vectors:
        """Return [B, dim] of texts padded to ``length``."""
        ids = np.full((len(token_ids), length), self._pad_id, np.int64)
        mask = np.zeros((len(token_ids), length), np.int64)
        for row, tokens in enumerate(token_ids):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            on_device = torch.from_numpy(mask).to(self.device)
            with mixed_precision(self.device, self.dtype):
                output = self._model(input_ids=torch.from_numpy(ids).to(self.device), attention_mask=on_device)
            vectors = self._pool(output, on_device)
            for projection in self._projections:
                vectors = projection(vectors)
            if self.encoding.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            array: Vectors = vectors.cpu().numpy()
        return array

    def _pool(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """Return [B, H] float32 of the model's output for ``mask`` [B, L]."""
        if self.encoding.pooling == "pooler":
            pooled: torch.Tensor | None = getattr(output, "pooler_output", None)
            if pooled is None:
                raise SettingsError(f"pooling 'pooler': {type(self._model).__name__} has no pooler; give mean or cls")
            return pooled.float()
        if not hasattr(output, "last_hidden_state"):
            raise SettingsError(
                f"pooling {self.encoding.pooling!r}: {type(self._model).__name__} gives no token states; give 'pooler'"
            )
        states: torch.Tensor = output.last_hidden_state.float()
        if self.encoding.pooling == "cls":
            return states[:, 0]
        weights = mask.unsqueeze(2).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


def load_encoder(
    folder: Path,
    encoding: Encoding,
    projections: Sequence[Path],
    device: torch.device,
    dtype: torch.dtype,
    batch_size: int,
) -> Encoder:
    """Load a model's folder onto a device; raises SettingsError in one line when it is not an encoder's."""
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = transformer_folder(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = _load_model(path, encoding)
        layers = [_load_projection(projection).to(device) for projection in projections]
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise SettingsError(f"encoder {folder} cannot be loaded: {type(error).__name__}: {reason}") from None
    if not tokenizer.is_fast:
        raise SettingsError(f"encoder {folder} has no fast tokenizer (tokenizer.json); convert it with transformers")
    return Encoder(model.to(device).eval(), tokenizer, layers, encoding, device, dtype, batch_size)


def _load_model(path: Path, encoding: Encoding) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    kind: Any = transformers.AutoModel
    if config.model_type == "dpr":  # AutoModel takes either of its two encoders for the question's
        kind = getattr(transformers, (config.architectures or ["DPRQuestionEncoder"])[0])
    model, report = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    unused = () if encoding.pooling == "pooler" else ("pooler.",)
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
    if missing:
        raise ValueError(f"the weights lack {len(missing)} tensors, {missing[0]} the first")
    return model.get_encoder() if config.is_encoder_decoder else model


def _load_projection(folder: Path) -> torch.nn.Module:
    """Return a linear layer of sentence-transformers' Dense module."""
    import safetensors.torch

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    activations = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh}
    name = config.get("activation_function", "Tanh").rpartition(".")[2]
    if name not in activations:
        raise ValueError(f"{folder} has the activation {name}; supported: {', '.join(activations)}")
    linear = torch.nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    weights = folder / "model.safetensors"
    if weights.exists():
        state = safetensors.torch.load_file(weights)
    else:
        state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    linear.load_state_dict({key.removeprefix("linear."): value for key, value in state.items()})
    return torch.nn.Sequential(linear, activations[name]())


def _token_limit(model: Any, tokenizer: Any) -> int:
    """Return how many tokens the model has positions for; a large number when nothing bounds them."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    table = next((layer for name, layer in model.named_modules() if name.endswith("position_embeddings")), None)
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa counts positions from behind the padding's.
        limits.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    return min([limit for limit in limits if limit], default=_UNLIMITED)
