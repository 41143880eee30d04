"""The algorithm's part of the schema: the policy update, returns and advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.config.base import Decay, Section

CRITIC_ESTIMATORS = ("gae", "turn_gae", "bi_level_gae")
"""Advantage estimators that need values."""
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "turn_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantage estimators that compare the trajectories of a prompt."""
ESTIMATORS = (*CRITIC_ESTIMATORS, *GROUP_ESTIMATORS, "reinforce_plus_plus")
"""Names of ``verl.algorithms.advantages.ADVANTAGES``, which needs torch."""
POLICY_LOSSES = ("ppo", "gspo", "cispo")
"""Names of ``verl.algorithms.policy_losses.POLICY_LOSSES``, which needs torch."""


class FsdpConfig(Section):
    """What sharded workers keep in host memory between uses."""

    param_offload: bool = False
    """Keep parameters on the host while the worker is idle."""
    optimizer_offload: bool = False
    """Keep optimizer state on the host while the worker is idle."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule, stepped once per training step."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    lr_warmup_steps_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Share of all steps that warms up linearly; update k uses min(1, k / warm-up steps)."""
    warmup_style: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up."""
    min_lr_ratio: float | None = Field(None, ge=0.0, le=1.0)
    """Floor of the linear and cosine courses, as a share of the peak; null: 0."""


class EntropyCtrlConfig(Section):
    """Steers the entropy bonus towards a target (Skywork-OR1). Ours."""

    target: PositiveFloat | None = None
    """Nats per token below which the entropy should not fall; null: ``entropy_coeff`` stays as it is."""
    delta: PositiveFloat = 0.005
    """By how much the weight moves per step."""
    max_coeff: PositiveFloat = 0.1
    """The weight's upper bound."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: PositiveInt = 256
    """Trajectories per optimizer step, over all ranks."""
    ppo_micro_batch_size: PositiveInt = 64
    """Sequences per forward pass, over all ranks (when ``use_dynamic_bsz`` is off)."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens per micro-batch and rank (when ``use_dynamic_bsz`` is on)."""
    grad_clip: PositiveFloat = 1.0
    """Maximum norm of the gradient."""
    clip_ratio: PositiveFloat = 0.2
    """PPO's epsilon."""
    clip_ratio_low: float | None = Field(None, gt=0.0, le=1.0)
    """Lower epsilon, the ratio stays above 1 - it; null: ``clip_ratio``."""
    clip_ratio_high: PositiveFloat | None = None
    """Upper epsilon (DAPO's clip-higher: 0.28); null: ``clip_ratio``."""
    clip_ratio_c: float | None = Field(None, gt=1.0)
    """Dual-clip: a token with a negative advantage costs at most this times it; null: no bound."""
    policy_loss: str = "ppo"
    """``ppo``, ``gspo`` (one ratio per trajectory), ``cispo`` (bounded weight, no cut gradient), or
    ``module:function``. Ours."""
    entropy_coeff: float = 0.001
    """Weight of the entropy bonus, or its start value."""
    entropy_ctrl: EntropyCtrlConfig = EntropyCtrlConfig()
    use_kl_loss: bool = False
    """KL as a loss term. When off and ``algorithm.kl_ctrl.kl_coef`` > 0, KL is in the reward instead."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss term."""
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl"
    """Estimator of the KL loss term (kl = k1, mse = k2, low_var_kl = k3)."""
    llds_coef: NonNegativeFloat = 0.0
    """Weight of the penalty on likelihood that good trajectories lose (LLDS). Ours."""
    loss_agg: Literal["token", "sequence", "constant"] = "token"
    """Divide by the mini-batch's model tokens; average each trajectory first; or divide each trajectory's sum by
    ``loss_scale_factor`` (Dr. GRPO). Ours."""
    loss_scale_factor: PositiveFloat | None = None
    """Tokens that stand for a trajectory's length with ``loss_agg=constant``; null: ``data.max_response_length``."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's trajectories."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class KlCtrlConfig(Section):
    """The weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive`` steers towards ``target_kl``."""
    kl_coef: NonNegativeFloat = 0.001
    """Weight, or its start value."""
    target_kl: PositiveFloat | None = None
    """Nats per token that the adaptive controller aims at."""
    horizon: PositiveInt | None = None
    """Trajectories over which the adaptive controller reacts."""


class CorrectionConfig(Section):
    """Importance weights where the engine's policy is not the trainer's. Ours."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """``truncate``: weights are at most ``high``; ``mask``: tokens outside the bounds teach nothing."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of a token, of the whole trajectory (product), or its geometric mean."""
    high: PositiveFloat = 2.0
    """Upper bound of trainer over engine probability."""
    low: PositiveFloat | None = None
    """Lower bound (``mask``)."""


class ShapingConfig(Section):
    """What an episode's length adds to its reward, in model tokens. Ours."""

    overlong_coef: NonNegativeFloat = 0.0
    """Weight of DAPO's soft overlong penalty, which is between -1 and 0."""
    max_tokens: PositiveInt | None = None
    """Model tokens of an episode from which the penalty is whole."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before ``max_tokens`` over which it grows."""
    length_coef: NonNegativeFloat = 0.0
    """Reward taken off per 1,000 model tokens."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: prompts whose rewards are all equal are replaced by further ones."""

    enable: bool = False
    """Roll out further prompts until ``data.train_batch_size`` groups have something to compare."""
    max_num_gen_batches: PositiveInt = 10
    """Batches of prompts per step at most; the step then goes on with what there is."""


class AlgorithmConfig(Section):
    """Returns and advantages."""

    adv_estimator: str = "gae"
    """With a critic: ``gae`` (PPO), ``turn_gae``, ``bi_level_gae``; comparing a prompt's trajectories: ``grpo``,
    ``dr_grpo``, ``turn_grpo``, ``rloo``, ``reinforce_plus_plus_baseline``; ``reinforce_plus_plus``;
    or ``module:function``."""
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount, over model tokens only."""
    lam: float = Field(1.0, ge=0.0, le=1.0)
    """GAE's lambda, over model tokens only."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl"] = "kl"
    """Estimator of the KL penalty in the reward."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    whiten: bool = True
    """Whiten the advantages of gae and REINFORCE++ over all model tokens of the step. Ours."""
    turn_gamma: float = Field(1.0, ge=0.0, le=1.0)
    """Discount between turns (``bi_level_gae``). Ours."""
    turn_lam: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda between turns (``bi_level_gae``). Ours."""
    turn_coef: float = 1.0
    """Weight of a turn's own reward beside the outcome's (``turn_grpo``). Ours."""
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    permute_rewards: bool = False
    """Control experiment: every trajectory gets another prompt's reward, so that no gain may appear. Ours."""
