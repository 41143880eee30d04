"""The training engine: one Hugging Face model with optimiser and schedule, sharded with FSDP2 over its group.

It knows packed micro-batches, log-probs, values, gradients and checkpoints, and nothing of reinforcement learning. On
one rank the module stays plain; results do not depend on the number of ranks beyond floating-point order.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.data.batch import MicroBatch
from verl.errors import CheckpointError
from verl.workers import device as devices
from verl.workers.attention import PACKED, Packing
from verl.workers.device import Device
from verl.workers.models import PackedModel, check_packed_model, decoder_layers, load_causal_lm, load_tokenizer
from verl.workers.optim import Optimizers, OptimSpec, build_optimizers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSpec:
    """What model to train and how."""

    model_path: str
    seed: int
    optim: OptimSpec | None = None
    """None for a frozen model (reference policy)."""
    random_start: bool = False
    """Begin from ``seed`` where the folder has no weights, instead of refusing it."""
    value_head: bool = False
    dtype: str = "float32"
    """Compute type; master weights, gradients and optimiser state are float32."""
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    max_grad_norm: float = 1.0
    param_offload: bool = False
    """Keep parameters in host memory between phases (accelerators only)."""
    optimizer_offload: bool = False
    """Keep optimiser state in host memory between phases (accelerators only)."""


class Engine:
    """See the module's docstring. Every rank of the group makes the same calls in the same order."""

    def __init__(self, spec: EngineSpec, device: Device) -> None:
        self.spec = spec
        self.device = device
        self.update = 0
        """Trainer steps made so far: the schedule's position, part of the checkpoint."""
        self._dtype = devices.dtype_of(spec.dtype)
        model = load_causal_lm(
            spec.model_path,
            attention=PACKED,
            trust_remote_code=spec.trust_remote_code,
            seed=spec.seed if spec.random_start else None,
        )
        check_packed_model(model)
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.module = PackedModel(model, spec.value_head)
        if spec.gradient_checkpointing:
            self.module.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module.train(spec.optim is not None).requires_grad_(spec.optim is not None)
        self._shard()
        self.optimizers: Optimizers | None = None
        if spec.optim is not None:
            self.optimizers = build_optimizers(self.module, spec.optim)

    def _shard(self) -> None:
        """Move the module to its device; with several ranks, shard each block and then the rest."""
        self.module.to(self.device.torch_device)
        if self.device.world_size > 1:
            shard_module(self.module, self.device, self._dtype)

    # -- computing ---------------------------------------------------------------------------------------------------

    def forward(self, batch: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return (log-probs [M], entropies [M]) of the batch's scored tokens; with a value head (values [M], zeros)."""
        batch = batch.to(self.device.torch_device)
        packing = Packing.of(batch.lengths, self.device.torch_device)
        dtype = self._dtype if self.device.world_size == 1 else torch.float32  # FSDP2 casts by its own policy
        with devices.compute_dtype(self.device, dtype):
            result: tuple[Tensor, Tensor] = self.module(
                batch.token_ids, batch.position_ids, packing, batch.predictors, batch.targets, temperature
            )
        return result

    def score(self, batch: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """``forward`` without gradients, results on the CPU."""
        self.module.eval()
        with torch.no_grad():
            first, second = self.forward(batch, temperature)
        self._reshard()
        return first.float().cpu(), second.float().cpu()

    def _reshard(self) -> None:
        """Free gathered parameters. After a forward pass without backward FSDP2 would keep the root's, in the compute
        type, where the next reader of the weights expects float32 shards."""
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of ``loss``; ``last`` marks the final micro-batch before ``step``."""
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(last)
        loss.backward()

    def train_mode(self) -> None:
        """Prepare for forward passes that will be followed by ``backward``."""
        self.module.train()

    def step(self) -> dict[str, float] | None:
        """Clip, update with the schedule's rate for ``self.update`` (from 1) and drop the gradients.

        Returns ``grad_norm`` (before clipping) and ``lr``. With a gradient that is not finite nothing is
        touched, neither weights nor moments, and None is returned, on every rank.
        """
        assert self.optimizers is not None, "a frozen engine cannot step"
        norm = self._clip()
        if not norm < float("inf"):
            self.optimizers.zero_grad()
            return None
        factor = self.optimizers.set_update(self.update)
        self.optimizers.step()
        return {"grad_norm": norm, "lr": self.optimizers.spec.lr * factor}

    def _clip(self) -> float:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([cast(Tensor, p.grad) for p in parameters], foreach=None)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, self.spec.max_grad_norm, norm)
        return float(norm)

    # -- memory ------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move what the spec says to host memory (no-op on a CPU)."""
        self._place(torch.device("cpu"))
        devices.empty_cache(self.device)

    def load_back(self) -> None:
        """Undo ``offload`` before computing."""
        self._place(self.device.torch_device)

    def _place(self, target: torch.device) -> None:
        if not self.device.is_accelerator:
            return
        if self.spec.param_offload:
            self.module.to(target)
        if self.spec.optimizer_offload and self.optimizers is not None:
            self.optimizers.to(target)

    # -- weights out -------------------------------------------------------------------------------------------------

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor), gathering one at a time; all ranks must iterate in step.

        A head tied to the embedding appears once, under the embedding's name.
        """
        for name, parameter in self.module.named_parameters():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            yield name.removeprefix("model.") if name.startswith("model.") else name, tensor

    def export(self, directory: str | Path) -> None:
        """Write a Hugging Face folder (safetensors, config, tokenizer) that plain transformers loads; rank 0 writes."""
        state = {}
        for name, tensor in self.named_full_tensors():
            if self.device.is_main:
                state[name] = tensor.to("cpu", copy=True)
        if not self.device.is_main:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.module.model
        if self.spec.value_head:
            raise CheckpointError("a critic has no Hugging Face causal-LM form; save its trainer state instead")
        if model.config.tie_word_embeddings:
            embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
            state.setdefault("lm_head.weight", state[embedding])
        own = model.config._attn_implementation
        model.config._attn_implementation = None
        try:
            model.save_pretrained(folder, state_dict=state)
        finally:
            model.config._attn_implementation = own
        load_tokenizer(self.spec.model_path, self.spec.trust_remote_code).save_pretrained(folder)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Write model, optimiser and random state as a distributed checkpoint into an empty folder."""
        folder = Path(directory)
        model_state, optimizer_state = get_state_dict(self.module, self._optimizer_parts())
        state = {"model": model_state, "optimizer": optimizer_state, "update": torch.tensor(self.update)}
        with _quiet_alone():
            dcp.save(state, checkpoint_id=folder, no_dist=self._alone)
        self._forget_invented_state()
        torch.save(devices.rng_state(self.device), folder / f"rng_{self.device.rank}.pt")
        devices.barrier(self.device)

    def load(self, directory: str | Path) -> None:
        """Restore what ``save`` wrote, at any number of ranks. Raises CheckpointError naming the folder."""
        folder = Path(directory)
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{folder} holds no trainer state (.metadata is missing)")
        model_state, optimizer_state = get_state_dict(self.module, self._optimizer_parts())
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "update": torch.tensor(0)}
        try:
            with _quiet_alone():
                dcp.load(state, checkpoint_id=folder, no_dist=self._alone)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"cannot read the trainer state in {folder}: {error}") from error
        set_state_dict(
            self.module,
            self._optimizer_parts(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )
        self.update = int(state["update"])
        self._forget_invented_state()
        rng = folder / f"rng_{self.device.rank}.pt"
        if rng.is_file():
            devices.restore_rng(self.device, torch.load(rng, weights_only=True))

    def _forget_invented_state(self) -> None:
        """Before the first update torch makes up an optimiser state by a step without gradients; its step count of 1
        would change the bias correction of the first real update."""
        if self.update == 0:
            for part in self._optimizer_parts():
                part.state.clear()

    def _optimizer_parts(self) -> list[torch.optim.Optimizer]:
        return [] if self.optimizers is None else self.optimizers.parts

    @property
    def _alone(self) -> bool:
        return self.device.world_size == 1


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """One process needs no group to save or load; torch warns about that all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def shard_module(module: PackedModel, device: Device, dtype: torch.dtype) -> None:
    """Shard each block and then the rest over the ranks of the process group, computing in ``dtype`` (FSDP2)."""
    mesh = init_device_mesh(device.torch_device.type, (device.world_size,))
    low = None if dtype is torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=None)
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # Losses are already divided by global counts: gradients are summed over ranks, not averaged.
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only
