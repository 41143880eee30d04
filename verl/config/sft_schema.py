"""The schema of supervised training (``python -m verl.trainer.main_sft``). Published names; "ours" where added."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.config.algorithm_schema import FsdpConfig
from verl.config.base import Decay, Paths, Section, Seed, Sinks
from verl.config.schema import DType


class SftDataConfig(Section):
    """Rows: ``segments`` (JSONL, ours) or a prompt and a response column (published)."""

    train_files: Paths = ("data/sft/train.jsonl",)
    """Training rows, ``.jsonl`` or ``.parquet``."""
    val_files: Paths = ()
    """Held-out rows; none: no validation loss."""
    train_batch_size: PositiveInt = 256
    """Rows per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt = 16
    """Rows per forward pass and rank (when ``use_dynamic_bsz`` is off)."""
    use_dynamic_bsz: bool = True
    """Fill micro-batches by tokens instead of by rows. Ours."""
    max_token_len_per_gpu: PositiveInt = 8192
    """Tokens per micro-batch and rank (when ``use_dynamic_bsz`` is on). Ours."""
    prompt_key: str = "question"
    """Column of the prompt."""
    response_key: str = "answer"
    """Column of the response."""
    prompt_dict_keys: tuple[str, ...] = ()
    """Keys to descend into inside the prompt column."""
    response_dict_keys: tuple[str, ...] = ()
    """Keys to descend into inside the response column."""
    max_length: PositiveInt = 1024
    """Tokens of one row."""
    truncation: Literal["error", "left", "right"] = "error"
    """What happens to a longer row."""
    shuffle: bool = True
    """Shuffle the rows of every epoch with the run's seed. Ours."""


class SftModelConfig(Section):
    """The model that is trained."""

    partial_pretrain: str = "Qwen/Qwen2.5-3B-Instruct"
    """A model folder; one with a config but no weights is initialised from the run's seed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    dtype: DType = "bfloat16"
    """Compute type; master weights are float32. Ours."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp_config: FsdpConfig = FsdpConfig()


class SftOptimConfig(Section):
    """Optimizer and schedule, stepped once per training step."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` trains the matrices of the blocks with Muon and the rest with AdamW. Ours."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    muon_lr: PositiveFloat = 0.01
    """Peak learning rate of Muon. Ours."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's moment decays."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    warmup_steps_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of all steps that warms up linearly."""
    warmup_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Course after the warm-up. Ours."""
    min_lr_ratio: float | None = Field(None, ge=0.0, le=1.0)
    """Floor of the linear and cosine courses, as a share of the peak; null: 0. Ours."""
    clip_grad: PositiveFloat = 1.0
    """Maximum norm of the gradient."""


class SftTrainerConfig(Section):
    """Length of the run and logs."""

    default_local_dir: str = "checkpoints/chatr1/sft"
    """Folder of the run; the trained model is exported to its subfolder ``hf``."""
    resume_path: str | None = None
    """Checkpoint to continue from."""
    project_name: str = "chatr1"
    experiment_name: str = "sft"
    total_epochs: PositiveInt = 4
    """Passes over the rows, unless ``total_training_steps`` is set."""
    total_training_steps: PositiveInt | None = None
    """Number of updates; overrides ``total_epochs``."""
    stop_after: PositiveInt | None = None
    """Stop after this many updates with the schedule of the whole run (to repeat the start of a recipe). Ours."""
    validate_before_training: bool = False
    """Measure the held-out loss before the first update."""
    test_freq: int = -1
    """Steps between held-out losses; -1: only after the last step. Ours."""
    save_freq: int = -1
    """Steps between checkpoints; -1: only the final export. Ours."""
    log_every_n_steps: PositiveInt = 10
    """Steps between console lines; ``metrics.jsonl`` has every step."""
    logger: Sinks = ("console",)
    """Sinks beside ``metrics.jsonl``, which is always written."""
    seed: Seed = 1
    """Seeds initialisation and order."""
    threads: NonNegativeInt = 0
    """Compute threads on a CPU machine; 0: torch's default. Ours."""


class SftConfig(Section):
    """One supervised run."""

    data: SftDataConfig = SftDataConfig()
    model: SftModelConfig = SftModelConfig()
    optim: SftOptimConfig = SftOptimConfig()
    trainer: SftTrainerConfig = SftTrainerConfig()
