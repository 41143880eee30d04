"""The typed, frozen schema of a training or evaluation run: every key, its default and its meaning, declared once.

Names are those of the published scripts. Numbers are published defaults unless the docstring says "ours". The task
(``task``) brings its own top-level keys; they are validated by its schema and travel as ``RunConfig.task_config``.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from verl.config.algorithm_schema import (
    CRITIC_ESTIMATORS,
    ActorConfig,
    AlgorithmConfig,
    FsdpConfig,
    OptimConfig,
)
from verl.config.base import Paths, Section, Seed, Sinks, Template
from verl.config.health_schema import HealthConfig

DType = Literal["float32", "bfloat16"]


def vllm_installed() -> bool:
    """True when vLLM can be imported, of whichever build; looked for, not imported, since it is heavy."""
    return importlib.util.find_spec("vllm") is not None


class DataConfig(Section):
    """Where conversations come from and how much of them the model sees."""

    train_files: Paths = ("data_conv/topiocqa_train/train.parquet",)
    """Training rows: one path or a list, ``.jsonl`` or ``.parquet``."""
    val_files: Paths = ("data_conv/topiocqa_test/test.parquet",)
    """Held-out rows, evaluated in file order."""
    train_data_num: PositiveInt | None = None
    """Use a seeded random subset of this many training rows; null: all."""
    val_data_num: PositiveInt | None = None
    """Use a seeded random subset of this many held-out rows; null: all."""
    prompt_key: str = "prompt"
    """Column of an already rendered prompt (published parquet rows)."""
    template: Template = "chatr1"
    """How a conversation becomes a prompt: ``chatr1``, ``search_r1``, ``compact``, or a text file of one's own that
    ends in ``.txt`` and holds ``{question}`` and ``{context}``; ``row`` uses the rendered prompt of the row. Ours."""
    native_thinking: Literal["keep", "forbid"] = "keep"
    """Thinking that the model's own template knows (Qwen3). ``keep``: what the model thinks stays in the episode;
    ``forbid``: the template's switch turns it off. Taking it out of earlier turns (strip) is what such templates do to
    a finished conversation; an episode never does, since what is trained must be what was sampled. Ours."""
    history: Literal["all"] | NonNegativeInt = "all"
    """Turns of history shown to the model: ``all`` or the last n; 0 shows the question alone. Ours."""
    history_answers: bool = True
    """Show the answers of these turns; ``false`` shows only what was asked. Ours."""
    max_prompt_length: PositiveInt = 512
    """Tokens. With ``max_response_length`` it bounds the whole context of an episode."""
    max_response_length: PositiveInt = 512
    """New tokens per generation (one turn)."""
    max_start_length: PositiveInt = 256
    """Tokens of the rendered first prompt; whole oldest turns are dropped until it fits."""
    max_obs_length: PositiveInt = 512
    """Tokens of one observation, its tags included."""
    train_batch_size: PositiveInt = 1024
    """Prompts per training step."""
    val_batch_size: PositiveInt = 1312
    """Prompts handed to the rollout workers at a time during evaluation."""
    shuffle_train_dataloader: bool = True
    """Shuffle the prompts of every epoch with the run's seed."""


class ModelConfig(Section):
    """The policy model."""

    path: str = "Qwen/Qwen2.5-3B-Instruct"
    """A folder with a Hugging Face causal LM (safetensors) and its tokenizer, or a hub name."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Ours."""
    dtype: DType = "bfloat16"
    """Compute type of the training engine; master weights are float32. Ours."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""


class RefConfig(Section):
    """The frozen reference policy; loaded only when a KL term is used."""

    log_prob_micro_batch_size: PositiveInt = 128
    """Sequences per forward pass, over all ranks."""
    log_prob_use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens; follows the actor unless set."""
    log_prob_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per micro-batch and rank; follows the actor unless set."""
    fsdp_config: FsdpConfig = FsdpConfig()


class ValKwargs(Section):
    """How evaluation samples. Ours; the default is greedy."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus."""
    top_k: int = -1
    """-1 keeps all."""
    n: PositiveInt = 1
    """Episodes per question."""


class RolloutConfig(Section):
    """The rollout engine and how episodes are sampled."""

    name: Literal["auto", "hf", "vllm"] = "auto"
    """Engine: ``hf`` (transformers), ``vllm``, or ``auto``: vllm where it is installed, else hf."""
    n: PositiveInt = 1
    """Alias of ``n_agent``; only one of the two may be above 1."""
    n_agent: PositiveInt = 1
    """Trajectories per prompt (the group of GRPO)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training; the trainer's log-probs use the same."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus. Published default 0.95; ours is 1 so that what is trained is what was sampled."""
    top_k: int = -1
    """-1 keeps all."""
    dtype: DType = "bfloat16"
    """Type of the engine's copy of the weights."""
    n_workers: PositiveInt | None = None
    """Rollout workers (engines); null: one per training rank, or per device of their own when split. Ours."""
    max_num_seqs: PositiveInt = 1024
    """Episodes that one worker runs at the same time."""
    deterministic: bool = False
    """Batches depend on (step, trajectory) alone and nothing stops by the clock: exact reruns (hf only). Ours."""
    chunk_size: PositiveInt = 32
    """Trajectories handed to a worker at once. Ours."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds until an episode is aborted. Ours."""
    max_failure_rate: float = Field(0.1, ge=0.0, le=1.0)
    """Share of failed episodes in a step above which the run stops. Ours."""
    placement: Literal["colocated", "split"] = "colocated"
    """Engines on the training devices, or on devices of their own. Ours."""
    n_gpus: PositiveInt | None = None
    """Devices of the engines when ``placement`` is split. Ours."""
    log_prob_micro_batch_size: PositiveInt = 128
    """Sequences per forward pass when the policy recomputes log-probs, over all ranks."""
    tensor_model_parallel_size: PositiveInt = 1
    """Devices per engine (vllm). Published default 2."""
    gpu_memory_utilization: float = Field(0.5, gt=0.0, le=1.0)
    """Share of device memory for the engine (vllm). On a CPU the most that all engines together take."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens per engine step (vllm); the CPU build reads prompts whole and takes at least the context's length."""
    enforce_eager: bool = True
    """Do without compiled graphs (vllm)."""
    check_weights: bool = False
    """Compare a checksum of every published tensor on arrival, and of all of them before every rollout. Ours."""
    val_kwargs: ValKwargs = ValKwargs()

    @model_validator(mode="before")
    @classmethod
    def _choose_engine(cls, values: Any) -> Any:
        """Settle ``auto`` where the run is configured: all workers do the same, and a resume notices a change."""
        if isinstance(values, dict) and values.get("name", "auto") == "auto":
            chosen = "vllm" if vllm_installed() and values.get("deterministic") is not True else "hf"
            return values | {"name": chosen}
        return values

    @property
    def group_size(self) -> int:
        """Trajectories per prompt, whichever of the two names was used."""
        return max(self.n, self.n_agent)


class ActorRolloutRefConfig(Section):
    """Policy, reference and rollout engine."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()


class CriticModelConfig(ModelConfig):
    """The critic's model: the same kind of network with a scalar head."""

    fsdp_config: FsdpConfig = FsdpConfig()


class CriticConfig(Section):
    """The value function (the estimators ``gae``, ``turn_gae`` and ``bi_level_gae``)."""

    model: CriticModelConfig = CriticModelConfig()
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: PositiveInt = 256
    """Trajectories per optimizer step, over all ranks; the actor's unless set."""
    ppo_micro_batch_size: PositiveInt = 64
    """Sequences per forward-backward pass, over all ranks."""
    forward_micro_batch_size: PositiveInt = 64
    """Sequences per forward pass when values are read; ``ppo_micro_batch_size`` unless set."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens; the actor's unless set."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Tokens per micro-batch and rank (when ``use_dynamic_bsz`` is on)."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's trajectories; the actor's unless set."""
    grad_clip: PositiveFloat = 1.0
    """Maximum norm of the gradient."""
    cliprange_value: PositiveFloat = 0.5
    """Range in which a value may move before its loss is clipped."""


class TrainerConfig(Section):
    """Length of the run, evaluation, checkpoints and logs."""

    project_name: str = "chatr1"
    experiment_name: str = "ppo"
    default_local_dir: str = "checkpoints/chatr1/ppo"
    """Folder of the run: checkpoints, metrics, rollouts, report."""
    total_epochs: PositiveInt = 30
    """Passes over the training rows, unless ``total_training_steps`` is set."""
    total_training_steps: PositiveInt | None = None
    """Number of updates; overrides ``total_epochs``."""
    nnodes: PositiveInt = 1
    """Machines."""
    n_gpus_per_node: PositiveInt = 8
    """Training ranks per machine (CPU ranks on a machine without GPU)."""
    save_freq: int = -1
    """Steps between checkpoints; -1: only the last step. The last step is always saved."""
    test_freq: int = -1
    """Steps between evaluations; -1: only before and after."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept beside the best one. Ours."""
    export_every: NonNegativeInt = 1
    """Write the Hugging Face export with every n-th checkpoint; 0: only with the last. Ours."""
    val_before_train: bool = True
    """Evaluate before the first update."""
    val_only: bool = False
    """Evaluate and stop."""
    critic_warmup: NonNegativeInt = 0
    """Steps that update the critic alone."""
    staleness: NonNegativeInt = 0
    """Steps by which rollouts may lag behind the policy. Ours."""
    resume: str = "auto"
    """``auto`` (an unfinished run in ``default_local_dir``), ``never``, or the path of a checkpoint. Ours."""
    seed: Seed = 1
    """Seeds everything."""
    logger: Sinks = ("console",)
    """Sinks beside ``metrics.jsonl``, which is always written."""


class ClusterConfig(Section):
    """Where workers run. Ours."""

    kind: Literal["ray", "local"] = "ray"
    """``ray``, or ``local``: everything in one process, for debugging."""
    oversubscribe: bool = False
    """Allow more workers than cores."""
    threads_per_worker: PositiveInt = 1
    """Compute threads of a worker on a CPU machine."""
    port: int = Field(6379, ge=1024, le=65535)
    """Where the head of Ray listens when the job starts it over several nodes."""
    interface: str | None = None
    """Network interface that the nodes of a job share, such as ``ib0``; null: that of the host's name."""
    join_timeout_s: PositiveFloat = 300.0
    """Seconds in which every node of a job must have joined."""


class AuditConfig(Section):
    """What ``verl.trainer.main_audit`` runs and how much it allows. Ours."""

    episodes: PositiveInt = 64
    """Episodes that are run and compared."""
    split: Literal["train", "val"] = "val"
    """Whose prompts."""
    max_gap: PositiveFloat | None = None
    """Nats between engine and trainer at any one token; null: 1e-4 where both compute in float32, else no limit."""
    mean_gap: PositiveFloat = 0.05
    """Mean nats between engine and trainer per token."""


class JobConfig(Section):
    """What the launcher (``train_ppo.sh``) does around the training. Ours."""

    build_world: bool = False
    """Build the synthetic world and its conversations first."""
    world_seed: Seed = 0
    """Seed of the world; the shipped model was measured on that of 0."""
    prepare_model: Literal["smollm2"] | None = None
    """Convert this packaged model into ``actor_rollout_ref.model.path`` first."""
    serve_retrieval: bool = False
    """Start the retrieval service, wait for it and stop it at the end."""
    index_path: str | None = None
    """Index of the service; built from ``corpus_path`` when it does not exist."""
    corpus_path: str | None = None
    """Passages (JSONL) of the service."""
    cache_dir: str = ".cache"
    """Where the world, the index and converted models are kept between runs."""
    evaluate_bounds: bool = False
    """Measure the task's fixed pipelines (``evaluation.pipelines``) beside the policy, and print their table."""


class RunConfig(Section):
    """One run. ``load_config`` builds it; everything reads attributes by the published key path."""

    task: str = "search_r1.task:SearchTask"
    """Import path of the task; its ``config_schema()`` brings further top-level keys."""
    save_val: bool = False
    """Write ``validation_results_step<N>.json`` at every evaluation."""
    save_val_dir: str | None = None
    """Folder of those files; null: the run's folder."""
    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    health: HealthConfig = HealthConfig()
    cluster: ClusterConfig = ClusterConfig()
    job: JobConfig = JobConfig()
    audit: AuditConfig = AuditConfig()
    task_config: Any = Field(None, exclude=True)
    """Filled by ``load_config``: the validated instance of the task's schema. Not a key."""

    @property
    def world_size(self) -> int:
        """Training ranks over all machines."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def n_rollout_workers(self) -> int:
        """Rollout workers (engines) over all machines: as many as fit the devices unless they are counted."""
        rollout = self.actor_rollout_ref.rollout
        if rollout.n_workers is not None:
            return rollout.n_workers
        devices = rollout.n_gpus if rollout.n_gpus is not None else self.world_size
        return max(1, devices // rollout.tensor_model_parallel_size)

    @property
    def uses_critic(self) -> bool:
        """True when the advantage estimator needs values."""
        return self.algorithm.adv_estimator in CRITIC_ESTIMATORS

    @property
    def kl_in_reward(self) -> bool:
        """True when the KL penalty is part of the reward."""
        return not self.actor_rollout_ref.actor.use_kl_loss and self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def uses_reference(self) -> bool:
        """True when a reference policy has to be loaded."""
        return self.kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
