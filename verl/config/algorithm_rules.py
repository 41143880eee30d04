"""Rules about keys of the algorithm: what would have no effect, or not the one its paper means, is refused."""

from __future__ import annotations

from verl.config.algorithm_schema import POLICY_LOSSES
from verl.config.rule import Rule
from verl.config.schema import RunConfig

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
ALGORITHM = "algorithm"
CORRECTION = "algorithm.correction"
SHAPING = "algorithm.shaping"


def _policy_loss_known(config: RunConfig) -> bool:
    name = config.actor_rollout_ref.actor.policy_loss
    return name in POLICY_LOSSES or ":" in name


def _correction_bounds(config: RunConfig) -> bool:
    correction = config.algorithm.correction
    return correction.low is None or (correction.mode == "mask" and correction.low < correction.high)


def _overlong(config: RunConfig) -> bool:
    shaping = config.algorithm.shaping
    if shaping.overlong_coef == 0:
        return shaping.max_tokens is None and shaping.overlong_buffer == 0
    return shaping.max_tokens is not None and shaping.overlong_buffer <= shaping.max_tokens


ALGORITHM_RULES: tuple[Rule, ...] = (
    Rule(
        "known policy loss",
        (f"{ACTOR}.policy_loss",),
        _policy_loss_known,
        "is not a known policy loss",
        f"set one of {', '.join(POLICY_LOSSES)}, or module:function",
    ),
    Rule(
        "gspo averages trajectories",
        (f"{ACTOR}.policy_loss", f"{ACTOR}.loss_agg"),
        lambda c: c.actor_rollout_ref.actor.policy_loss != "gspo" or c.actor_rollout_ref.actor.loss_agg == "sequence",
        f"its ratio belongs to a whole trajectory, and {ACTOR}.loss_agg={{{ACTOR}.loss_agg}} would weigh it by length",
        f"set {ACTOR}.loss_agg=sequence",
    ),
    Rule(
        "dual clip has a surrogate",
        (f"{ACTOR}.clip_ratio_c", f"{ACTOR}.policy_loss"),
        lambda c: c.actor_rollout_ref.actor.clip_ratio_c is None or c.actor_rollout_ref.actor.policy_loss != "cispo",
        "has no effect with policy_loss=cispo, whose weight is bounded already",
        f"leave it out, or set {ACTOR}.policy_loss=ppo",
    ),
    Rule(
        "loss scale is used",
        (f"{ACTOR}.loss_scale_factor", f"{ACTOR}.loss_agg"),
        lambda c: (
            c.actor_rollout_ref.actor.loss_scale_factor is None or c.actor_rollout_ref.actor.loss_agg == "constant"
        ),
        f"has no effect with {ACTOR}.loss_agg={{{ACTOR}.loss_agg}}",
        f"set {ACTOR}.loss_agg=constant, or leave it out",
    ),
    Rule(
        "entropy starts within its bounds",
        (f"{ACTOR}.entropy_coeff", f"{ACTOR}.entropy_ctrl.target", f"{ACTOR}.entropy_ctrl.max_coeff"),
        lambda c: (
            c.actor_rollout_ref.actor.entropy_ctrl.target is None
            or 0 <= c.actor_rollout_ref.actor.entropy_coeff <= c.actor_rollout_ref.actor.entropy_ctrl.max_coeff
        ),
        f"is the start of a controlled weight, which stays between 0 and {{{ACTOR}.entropy_ctrl.max_coeff}}",
        f"set it within these bounds, or raise {ACTOR}.entropy_ctrl.max_coeff",
    ),
    Rule(
        "adaptive kl is in the reward",
        (f"{ALGORITHM}.kl_ctrl.type", f"{ACTOR}.use_kl_loss"),
        lambda c: c.algorithm.kl_ctrl.type == "fixed" or not c.actor_rollout_ref.actor.use_kl_loss,
        "the controller moves the weight of the penalty in the reward, which use_kl_loss turns off",
        f"set {ALGORITHM}.kl_ctrl.type=fixed, or {ACTOR}.use_kl_loss=false",
    ),
    Rule(
        "turn discounts are used",
        (f"{ALGORITHM}.turn_gamma", f"{ALGORITHM}.turn_lam", f"{ALGORITHM}.adv_estimator"),
        lambda c: (
            c.algorithm.adv_estimator == "bi_level_gae"
            or ":" in c.algorithm.adv_estimator
            or (c.algorithm.turn_gamma == c.algorithm.turn_lam == 1.0)
        ),
        "turn_gamma and turn_lam have no effect with this estimator ({algorithm.adv_estimator})",
        f"set {ALGORITHM}.adv_estimator=bi_level_gae, or leave both at 1",
    ),
    Rule(
        "turn weight is used",
        (f"{ALGORITHM}.turn_coef", f"{ALGORITHM}.adv_estimator"),
        lambda c: (
            c.algorithm.turn_coef == 1.0 or c.algorithm.adv_estimator == "turn_grpo" or ":" in c.algorithm.adv_estimator
        ),
        "has no effect with this estimator ({algorithm.adv_estimator})",
        f"set {ALGORITHM}.adv_estimator=turn_grpo, or leave it at 1",
    ),
    Rule(
        "turn rewards are rewards",
        (f"{ALGORITHM}.kl_ctrl.kl_coef", f"{ALGORITHM}.adv_estimator", f"{ACTOR}.use_kl_loss"),
        lambda c: c.algorithm.adv_estimator != "turn_grpo" or not c.kl_in_reward,
        "turn_grpo would standardise the penalty of single turns as if it were their reward",
        f"set {ALGORITHM}.kl_ctrl.kl_coef=0, or {ACTOR}.use_kl_loss=true",
    ),
    Rule(
        "correction knows the distribution",
        (f"{CORRECTION}.mode", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"),
        lambda c: (
            c.algorithm.correction.mode == "none"
            or (c.actor_rollout_ref.rollout.top_p == 1.0 and c.actor_rollout_ref.rollout.top_k == -1)
        ),
        f"importance weights are wrong when top_p ({{{ROLLOUT}.top_p}}) or top_k ({{{ROLLOUT}.top_k}}) cut the "
        "distribution that tokens are drawn from",
        f"set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1, or {CORRECTION}.mode=none",
    ),
    Rule(
        "correction bounds",
        (f"{CORRECTION}.low", f"{CORRECTION}.mode", f"{CORRECTION}.high"),
        _correction_bounds,
        f"is a bound of mode=mask below {CORRECTION}.high ({{{CORRECTION}.high}})",
        f"set {CORRECTION}.mode=mask and a smaller value, or leave it out",
    ),
    Rule(
        "filter has groups",
        (f"{ALGORITHM}.filter_groups.enable", f"{ROLLOUT}.n", f"{ROLLOUT}.n_agent"),
        lambda c: not c.algorithm.filter_groups.enable or c.actor_rollout_ref.rollout.group_size > 1,
        "a group of one has equal rewards always",
        f"set {ROLLOUT}.n_agent to 2 or more",
    ),
    Rule(
        "overlong has a length",
        (f"{SHAPING}.overlong_coef", f"{SHAPING}.max_tokens", f"{SHAPING}.overlong_buffer"),
        _overlong,
        f"overlong_coef, max_tokens ({{{SHAPING}.max_tokens}}) and overlong_buffer ({{{SHAPING}.overlong_buffer}}, at "
        "most max_tokens) belong together",
        f"set {SHAPING}.overlong_coef above 0 with {SHAPING}.max_tokens, or leave all out",
    ),
)
"""Appended to ``RUN_RULES``."""
