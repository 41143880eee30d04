"""Loading and building Hugging Face models for training: from safetensors, or from a config alone with a seed.

The modules here wrap a model so that one ``forward`` takes a packed micro-batch and returns what the trainer needs; the
sharding of FSDP2 hooks into exactly that call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from verl.errors import ModelError
from verl.workers.attention import PACKED, Packing
from verl.workers.logits import token_statistics

logger = logging.getLogger(__name__)
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


def has_weights(folder: Path) -> bool:
    """True when the folder holds safetensors; raises ModelError when it holds weights in another form only."""
    if any(folder.glob("*.safetensors")):
        return True
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if others:
        raise ModelError(
            f"{folder} has weights as {others[0]} only; convert them to safetensors, nothing else is loaded"
        )
    return False


def load_causal_lm(path: str, *, attention: str, trust_remote_code: bool, seed: int | None = None) -> PreTrainedModel:
    """Load a causal LM in float32 from a folder or hub name.

    A folder without weights is initialised from ``seed``, and refused when that is None: nobody wants to evaluate, ask
    or reinforce random weights by mistake. Raises ModelError when the folder is missing, has no config, or holds
    weights that do not fit it.
    """
    disable_progress_bar()  # a run shows its own progress
    folder = Path(path)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    if not folder.is_dir() and (path.startswith((".", "/")) or path.count("/") != 1):
        raise ModelError(f"model folder {path} does not exist")
    try:
        if folder.is_dir() and not has_weights(folder):
            if seed is None:
                raise ModelError(
                    f"{path} holds no weights (*.safetensors): copy them beside its config.json, or train a start with "
                    "verl.trainer.main_sft, which begins from random weights"
                )
            config = AutoConfig.from_pretrained(path, **options)
            logger.info("%s has no weights: initialising from seed %d", path, seed)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        else:
            with _quiet():  # what does not fit is said here, in one line
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path,
                    attn_implementation=attention,
                    dtype=torch.float32,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **options,
                )
            model, report = loaded
            _refuse_mismatched(path, report["mismatched_keys"])
            _refuse_missing(path, report["missing_keys"])
    except SafetensorError as error:
        raise ModelError(
            f"cannot load a causal LM from {path}: its *.safetensors are damaged or cut short ({_one_line(error)}); "
            "copy them again"
        ) from error
    except (OSError, ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"cannot load a causal LM from {path}: {_one_line(error)}") from error
    return cast(PreTrainedModel, model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own report of a load from the terminal."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _refuse_mismatched(path: str, mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    found = sorted((name, list(stored), list(wanted)) for name, stored, wanted in mismatched)
    if found:
        name, stored, wanted = found[0]
        raise ModelError(
            f"{path}: {len(found)} weights do not fit its config.json ({name} is {stored} in the files and {wanted} by "
            "the config); put the config.json back that belongs to the weights"
        )


def _refuse_missing(path: str, missing: Iterable[str]) -> None:
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:5])
        raise ModelError(f"{path}: {len(names)} weights of its architecture are missing from the files ({shown} ...)")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model folder; raises ModelError naming the folder when there is none."""
    if not Path(path).is_dir() and (path.startswith((".", "/")) or path.count("/") != 1):
        raise ModelError(f"model folder {path} does not exist")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exceptions for a damaged file
        raise ModelError(f"{path} has no usable tokenizer: {_one_line(error)}") from error
    # Without tokenizer files transformers builds an empty one of the architecture's class instead of failing.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ModelError(f"{path} has no usable tokenizer: tokenizer files are missing")
    return tokenizer


class PackedModel(nn.Module):
    """A causal LM, or its body with a scalar value head, over packed micro-batches."""

    def __init__(self, model: PreTrainedModel, value_head: bool) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        if value_head:
            self.value_head = nn.Linear(_hidden_size(model), 1)
            # Values start at exactly 0: the first advantages are the returns themselves, not noise of a random head.
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            self._drop_language_head()
        text_config = model.config.get_text_config()
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)

    def _drop_language_head(self) -> None:
        """A critic keeps the body only. A tied head shares the embedding and stays as that."""
        self.model = cast(PreTrainedModel, self.model.base_model)

    @property
    def body(self) -> nn.Module:
        """The model without its language head."""
        return self.model if self.value_head is not None else self.model.base_model

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        predictors: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probs [M], entropies [M]), or (values [M], zeros [M]) with a value head."""
        output = self.body(
            input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
        ).last_hidden_state
        hidden = output[0].index_select(0, predictors)
        if self.value_head is not None:
            values = self.value_head(hidden).squeeze(-1).float()
            return values, torch.zeros_like(values)
        head = self.model.get_output_embeddings()
        return token_statistics(hidden, head.weight, targets, temperature, getattr(head, "bias", None), self.softcap)


def _hidden_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


def decoder_layers(module: PackedModel) -> list[nn.Module]:
    """Return the blocks that are sharded and checkpointed one by one, in order."""
    kinds = set(getattr(module.model, "_no_split_modules", None) or ())
    return [child for child in module.modules() if type(child).__name__ in kinds]


def check_packed_model(model: PreTrainedModel) -> None:
    """Compare the packed log-probs with the model's own forward pass on a few tokens.

    Raises ModelError for an architecture whose attention or head does something that packing does not reproduce
    (extra logit scaling, attention sinks, ...), before anything is trained on wrong numbers.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(1, 7, dtype=torch.int64) % vocabulary
    packed = PackedModel(model, value_head=False)
    with torch.no_grad():
        # Two sequences of 3 tokens, each predicting its own last two.
        positions = torch.tensor([0, 1, 2, 0, 1, 2])
        predictors, targets = torch.tensor([0, 1, 3, 4]), ids[[1, 2, 4, 5]]
        got, _ = packed(ids, positions, Packing.of((3, 3), ids.device), predictors, targets, 1.0)
        own_attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids.view(2, 3), use_cache=False).logits.float()
        model.set_attn_implementation(own_attention)
        wanted = logits.log_softmax(-1)[:, :2].reshape(4, -1).gather(-1, targets[:, None]).squeeze(-1)
    worst = float((got - wanted).abs().max())
    if not worst < 1e-3:
        raise ModelError(
            f"{type(model).__name__} cannot be trained with packed sequences: log-probs differ by {worst:.2g} "
            "from its own forward pass"
        )


assert PACKED  # registering the attention function is a side effect of importing it
