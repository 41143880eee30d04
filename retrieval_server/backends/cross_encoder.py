"""A cross-encoder: a transformer that reads query and passage together and says how relevant the passage is.

Loads what Hugging Face and sentence-transformers save for sequence classification, with one logit or two.

Legend: P pairs of one call, T tokens of a pair with padding.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retrieval_server.backends.model_folder import local_folder, transformer_folder
from retrieval_server.backends.torch_models import (
    Passes,
    convert_linear,
    mixed_precision,
    pick_device,
    pick_dtype,
    set_threads,
)
from retrieval_server.errors import SettingsError
from retrieval_server.specs import RerankSpec

logger = logging.getLogger(__name__)

Pair = tuple[str, str]
"""(query, passage)"""


class CrossEncoder:
    """Scores pairs in batches of the same padded length. One call at a time."""

    def __init__(self, model: nn.Module, pairs: PairEncoder, batch_size: int, dtype: torch.dtype) -> None:
        """``model`` is in evaluation mode and where it computes; its logits are [pairs, 1 or 2]."""
        self._model, self._pairs, self._dtype = model, pairs, dtype
        self._device = next(model.parameters()).device
        self._passes = Passes(self._device, batch_size)
        # The ten passages of one query are of ten lengths: an accelerator would get ten passes of one row each.
        self._step = 8 if self._device.type == "cpu" else 64

    def logits(self, pairs: Sequence[Pair]) -> list[float]:
        """Return one log-odds of "relevant" per pair [P]; raises RuntimeError when the model gives no number.

        A pair's value depends on the others in the last bits of float32 only: the layers after the first token's
        pooling work on the whole batch.
        """
        encoded = self._pairs.encode(pairs)

        def forward(rows: list[int], length: int) -> list[float]:
            return self._forward([encoded[row] for row in rows], length)

        found = [0.0] * len(encoded)
        lengths = [len(pair.ids) for pair in encoded]
        for rows, logits in self._passes.run(forward, lengths, self._pairs.max_length, self._step):
            for row, logit in zip(rows, logits, strict=True):
                found[row] = logit
        if not all(map(math.isfinite, found)):
            raise RuntimeError("the cross-encoder gave a score that is not a number; try dtype float32")
        return found

    def _forward(self, batch: Sequence[EncodedPair], length: int) -> list[float]:
        inputs = {name: tensor.to(self._device) for name, tensor in self._pairs.collate(batch, length).items()}
        with torch.inference_mode(), mixed_precision(self._device, self._dtype):
            logits = self._model(**inputs).logits.float()
        # Two logits are (not relevant, relevant); their difference is the log-odds that a single logit is.
        relevant: list[float] = (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).tolist()
        return relevant


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """One pair as token ids with special tokens, and the segment of each [tokens]."""

    ids: list[int]
    segments: list[int]


class PairEncoder:
    """Turns pairs into tokens of at most ``max_length``.

    When a pair is too long, the query keeps its last tokens, since a pasted conversation ends with its question, and
    the passage its first ones. A query gets half of the room, and more where the passage leaves it.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        """``tokenizer`` is a Hugging Face tokenizer that the tokenizers library runs."""
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pad_id: int = tokenizer.pad_token_id
        self._with_segments = "token_type_ids" in tokenizer.model_input_names
        self.max_length = max_length
        self._room = max_length - self._backend.num_special_tokens_to_add(True)
        if self._room < 2:
            raise SettingsError(f"max_length is {max_length}, which leaves no room for a query and a passage")
        self._template = self._learn_template()

    def _learn_template(self) -> tuple[list[EncodedPair], int, int]:
        """Return (special tokens before, between and after the texts; segment of the query; of the passage).

        Read off a sample: tokenizers do not tell how they join two texts.
        """
        parts = self._backend.encode_batch(["a", "a"], add_special_tokens=False)
        joined = self._backend.post_process(*parts)
        special, ids, segments = joined.special_tokens_mask, joined.ids, joined.type_ids
        n = len(parts[0].ids)
        start = special.index(0)
        second = special.index(0, start + n)
        bounds = ((0, start), (start + n, second), (second + n, len(ids)))
        return [EncodedPair(ids[a:b], segments[a:b]) for a, b in bounds], segments[start], segments[second]

    def encode(self, pairs: Sequence[Pair]) -> list[EncodedPair]:
        """Return the tokens of each pair [P]. A text that occurs in several pairs is tokenised once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(texts, encodings, strict=True)}
        return [self._join(ids[query], ids[passage]) for query, passage in pairs]

    def _join(self, query: list[int], passage: list[int]) -> EncodedPair:
        keep = min(len(query), max(self._room // 2, self._room - len(passage)))
        query = query[len(query) - keep :]
        passage = passage[: self._room - keep]
        (before, between, after), first, second = self._template
        return EncodedPair(
            [*before.ids, *query, *between.ids, *passage, *after.ids],
            [*before.segments, *[first] * len(query), *between.segments, *[second] * len(passage), *after.segments],
        )

    def collate(self, batch: Sequence[EncodedPair], length: int) -> dict[str, torch.Tensor]:
        """Return the model's inputs [pairs, T], padded on the right to ``length``."""
        rows = [(pair, length - len(pair.ids)) for pair in batch]
        inputs = {
            "input_ids": torch.tensor([pair.ids + [self._pad_id] * gap for pair, gap in rows]),
            "attention_mask": torch.tensor([[1] * len(pair.ids) + [0] * gap for pair, gap in rows]),
        }
        if self._with_segments:
            inputs["token_type_ids"] = torch.tensor([pair.segments + [0] * gap for pair, gap in rows])
        return inputs


Activation = Callable[[float], float]


def load_cross_encoder(spec: RerankSpec) -> tuple[CrossEncoder, Activation]:
    """Load the model; return it and the function that turns a logit into the score that is shown.

    Raises SettingsError when it is absent, is no cross-encoder, or was saved without a trained head.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = pick_device(spec.device)
    dtype = pick_dtype(spec.dtype, device)
    set_threads(spec.threads)
    folder = local_folder(spec.model_path)
    saved = _saved_beside(folder)
    path = transformer_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(f"the cross-encoder {spec.model_path} cannot be loaded: {reason}") from error
    _check(spec.model_path, model, tokenizer, report)
    _keep_head_in_float32(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            convert_linear(module, dtype)
    model.to(device).eval()
    max_length = _fitting_length(spec.max_length, model.config, tokenizer)
    encoder = CrossEncoder(model, PairEncoder(tokenizer, max_length), spec.batch_size, dtype)
    return encoder, _activation(spec.model_path, model.config, saved)


def _saved_beside(folder: Path) -> dict[str, Any]:
    """Return what sentence-transformers saved beside the transformer; raises SettingsError for what it cannot mean."""
    saved: dict[str, Any] = _read_json(folder / "config_sentence_transformers.json")
    modules = _read_json(folder / "modules.json")
    if len(modules) > 1:
        kinds = ", ".join(str(module["type"]).rsplit(".", 1)[-1] for module in modules)
        raise SettingsError(f"{folder} is made of {kinds}; only a single transformer with a head is served")
    if saved.get("default_prompt_name"):
        raise SettingsError(f"{folder} expects the prompt {saved['default_prompt_name']!r}, which is not served")
    return saved


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, or an empty dictionary when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


def _check(name: str, model: nn.Module, tokenizer: Any, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise SettingsError(
            f"{name} has no trained weights for {', '.join(missing[:3])}: an encoder without a classification head "
            "cannot rerank; give a cross-encoder"
        )
    n_labels: int = model.config.num_labels  # type: ignore[assignment, union-attr]
    if n_labels not in (1, 2):
        raise SettingsError(f"{name} has {n_labels} labels; a cross-encoder has 1 (relevance) or 2 (no, yes)")
    if not tokenizer.is_fast:
        raise SettingsError(f"{name} has a tokenizer without tokenizer.json; save it with a fast tokenizer")
    if tokenizer.pad_token_id is None:
        raise SettingsError(f"{name} has a tokenizer without a padding token; name one in tokenizer_config.json")


def _fitting_length(wanted: int, config: Any, tokenizer: Any) -> int:
    """Return ``max_length``, cut to what the model has positions for."""
    limits: list[int] = [wanted, tokenizer.model_max_length]
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        # The RoBERTa family counts positions from after the padding id.
        offset = config.pad_token_id + 1 if "roberta" in config.model_type or config.model_type == "mpnet" else 0
        limits.append(positions - offset)
    if min(limits) < wanted:
        logger.info("max_length %d is more than the cross-encoder has: %d is used", wanted, min(limits))
    return min(limits)


def _activation(name: str, config: Any, saved: dict[str, Any]) -> Activation:
    """Return the activation that the model was saved with; the sentence-transformers default is the sigmoid.

    Ranking is by logits, so that scores which the sigmoid rounds to 1 keep their order.
    """
    places = [saved.get("activation_fn"), (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")]
    places.append(getattr(config, "sbert_ce_default_activation_function", None))
    named = next((place for place in places if place), "Sigmoid" if config.num_labels == 1 else "Identity")
    table: dict[str, Activation] = {"Sigmoid": _sigmoid, "Identity": float}
    try:
        return table[named.rsplit(".", 1)[-1]]
    except KeyError:
        raise SettingsError(f"{name} was saved with the activation {named}; known: Sigmoid, Identity") from None


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else (e := math.exp(logit)) / (1.0 + e)


class _Float32Linear(nn.Module):
    """A linear layer that mixed precision leaves alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., labels] in float32."""
        with torch.autocast(features.device.type, enabled=False):
            logits: torch.Tensor = self.linear(features.float())
        return logits


def _keep_head_in_float32(model: nn.Module) -> None:
    """Compute what follows the layers (pooler, classifier) in float32.

    bfloat16 knows multiples of 1/32 from 8 on: documents would tie, and the last bits, which depend on the batch, would
    become its second decimal.
    """
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in linear:
        if not name.startswith(layers):
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, child, _Float32Linear(getattr(owner, child)))
