"""OpenRLHF 0.11.0: the exposure of `openrlhf/trainer/ray/ppo_actor.py: training_step` (`openrlhf/models/loss.py`).

    ppo     c = z w s + kl_coef z_kl dk
    gspo    c = m/n sum_t(z s) + kl_coef z_kl dk               r[B,1] = exp(mean_t log r)

s slope of the clipped surrogate; w the vLLM correction, `vllm_weights`; z by `token_level_loss` (gspo: per sample);
z_kl per token in every case (`aggregate_loss`'s default). L is what training_step hands to DeepSpeed, which then
divides by its accumulation steps. The entropy bonus and the router's loss reach the weights through logits, not logp.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hilore_cli.errors import UsageError
from hilore_cli.exposure.pieces import (
    Array,
    Batch,
    LossInputs,
    Readiness,
    check_at_least,
    check_known,
    check_settings,
    clipped_ceiling,
    clipped_slope,
    has_negative,
    kl_slope,
    kl_slope_ceiling,
    log_ratio,
    open_batch,
    read,
    row_mean,
    spread,
)

POLICY_LOSS_TYPES = ("ppo", "gspo")
CORRECTION_TYPES = ("tis", "icepop", "seq-mask-tis")
RATIO_CLAMP = 20.0  # on ppo's log r
KL_VALUE_CLAMP = 10.0  # of every estimator
LEAST_COUNT = 1e-8  # aggregate_loss adds it to a row's count of tokens


@dataclass(frozen=True, kw_only=True)
class OpenRlhfLoss:
    """The options of train_ppo_ray that shape the loss: the last part of OpenRLHF's dotted names, and its defaults.

    `use_kl_loss`, `kl_coef`, `kl_estimator`: --algo.kl.use_loss, the controller's value now (init_coef, unless it is
    adaptive), --algo.kl.estimator. `dp_size`, `batch_num_tokens`, `global_batch_size`: the loss_batch_info of the
    optimizer step (the counts are divided by DeepSpeed's accumulation steps there, so they need not be whole); None: of
    this micro-batch, without dp_size, as aggregate_loss does. `temperature`: logits were divided by it (not in c).
    """

    trainer: ClassVar[str] = "openrlhf"

    policy_loss_type: str = "ppo"
    eps_clip_low_high: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    token_level_loss: bool = True
    is_correction_enable: bool = False
    is_correction_type: str = "tis"
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None  # sequences
    use_kl_loss: bool = False
    kl_coef: float = 0.01
    kl_estimator: str = "k1"
    entropy_coef: float | None = None
    aux_loss_coef: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self)
        check_known(self, "policy_loss_type", POLICY_LOSS_TYPES)
        check_known(self, "is_correction_type", CORRECTION_TYPES)
        check_known(self, "kl_estimator", ("k1", "k2", "k3"))
        check_at_least(self, 1, "dual_clip", strictly=True)
        check_at_least(self, 1, "dp_size")
        check_at_least(self, 0, "kl_coef", "aux_loss_coef")
        check_at_least(self, 0, "batch_num_tokens", "global_batch_size", "temperature", strictly=True)
        if min(self.eps_clip_low_high) < 0:
            raise UsageError(f"openrlhf loss: eps_clip_low_high={self.eps_clip_low_high} is negative; pass >= 0")
        if not 0 <= self.is_correction_threshold[0] <= self.is_correction_threshold[1]:
            raise UsageError(
                f"openrlhf loss: is_correction_threshold={self.is_correction_threshold}; pass 0 <= low <= high"
            )

    @property
    def per_token(self) -> bool:
        """Whether the policy loss is one mean over tokens; gspo's never is."""
        return self.token_level_loss and self.policy_loss_type != "gspo"

    @property
    def has_kl(self) -> bool:
        return self.use_kl_loss and self.kl_coef != 0


def exposure(loss: OpenRlhfLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return c[B,T]."""
    batch = open_for(loss, inputs, xp=xp)
    c = through_ratio(loss, batch, surrogate_slope(loss, batch) * vllm_weights(loss, batch))
    if loss.has_kl:
        c = c + loss.kl_coef * kl_normaliser(loss, batch) * reference_slope(loss, batch)
    return xp.where(batch.live, c, 0.0)


def normaliser(loss: OpenRlhfLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return z[B,T] of the policy loss; n is a row's count of loss tokens.

    per token m dp_size/batch_num_tokens; per sample m dp_size/(global_batch_size (n + 1e-8)).
    """
    return policy_normaliser(loss, open_for(loss, inputs, xp=xp))


def policy_normaliser(loss: OpenRlhfLoss, batch: Batch) -> Array:
    if batch.inputs.normaliser is not None:
        return read(batch, "normaliser", why="the override")
    if loss.per_token:
        return token_mean(loss, batch)
    mask = batch.mask
    samples = max(float((mask.sum(1) > 0).sum()), 1.0)
    scale = 1 / samples if loss.global_batch_size is None else loss.dp_size / loss.global_batch_size
    return mask * scale / (mask.sum(1)[:, None] + LEAST_COUNT)


def kl_normaliser(loss: OpenRlhfLoss, batch: Batch) -> Array:
    """Return z[B,T] of the KL loss: per token, whatever the policy loss does."""
    if batch.inputs.normaliser is None:
        return token_mean(loss, batch)
    if not loss.per_token:
        raise UsageError(
            f"{batch.who}: its KL loss is a mean over tokens, its policy loss one over samples, and "
            "LossInputs.normaliser gives one z; leave it out and set batch_num_tokens and global_batch_size"
        )
    return read(batch, "normaliser", why="the override")


def token_mean(loss: OpenRlhfLoss, batch: Batch) -> Array:
    if loss.batch_num_tokens is None:
        return batch.mask / max(float(batch.mask.sum()), 1.0)
    return batch.mask * (loss.dp_size / loss.batch_num_tokens)


def readiness(loss: OpenRlhfLoss, inputs: LossInputs) -> Readiness:
    """Return how early c is known. The clamp of log r at +-20 guards against overflow and does not count as a bound."""
    slope, weights = slope_is_known(loss, inputs), weights_are_known(loss, inputs)
    free_slope = not slope and loss.dual_clip is None and has_negative(inputs)
    free_weights = not weights and loss.is_correction_type == "seq-mask-tis"
    if free_slope or free_weights:
        return Readiness.EXACT_BEFORE_BACKWARD
    exact = slope and weights and not loss.has_kl
    return Readiness.EXACT_BEFORE_FORWARD if exact else Readiness.BOUND_BEFORE_FORWARD


def bound(loss: OpenRlhfLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return [B,T] >= |c| from what is known before the forward; the caller has checked `readiness`."""
    batch = open_for(loss, inputs, xp=xp)
    high, a = loss.eps_clip_low_high[1], batch.advantages
    if slope_is_known(loss, inputs):
        most = xp.abs(surrogate_slope(loss, batch))
    else:
        most = clipped_ceiling(a, high=high, dual=loss.dual_clip, xp=xp)
    known = weights_are_known(loss, inputs)
    most = most * (xp.abs(vllm_weights(loss, batch)) if known else loss.is_correction_threshold[1])
    most = through_ratio(loss, batch, most)
    if loss.has_kl:
        steepest = kl_slope_ceiling(loss.kl_estimator, value_limit=KL_VALUE_CLAMP)
        most = most + abs(loss.kl_coef) * steepest * kl_normaliser(loss, batch)
    return xp.where(batch.live, most, 0.0)


def is_token_local(loss: OpenRlhfLoss) -> bool:
    """Whether c[t] depends on logp[t] alone. Not: gspo, and seq-mask-tis (whose weights follow logps when on-policy)."""
    masked = loss.is_correction_enable and loss.is_correction_type == "seq-mask-tis"
    return loss.policy_loss_type == "ppo" and not masked


def has_other_terms(loss: OpenRlhfLoss) -> bool:
    """Whether a row of zero advantages still has a gradient: KL loss, entropy bonus, router loss."""
    return loss.has_kl or bool(loss.entropy_coef) or loss.aux_loss_coef > 1e-8


def open_for(loss: OpenRlhfLoss, inputs: LossInputs, *, xp: ModuleType) -> Batch:
    """Open the inputs; importance weights that this loss would not use are refused, not ignored."""
    who = f"openrlhf loss {loss.policy_loss_type}"
    used = loss.is_correction_enable and loss.policy_loss_type == "ppo"
    if inputs.is_weights is not None and not used:
        raise UsageError(
            f"{who}: is_weights are given but not used; set is_correction_enable with ppo, or leave them out"
        )
    return open_batch(inputs, who=who, xp=xp)


def slope_is_known(loss: OpenRlhfLoss, inputs: LossInputs) -> bool:
    """On-policy; gspo with the correction takes its ratio to the rollout's log-probabilities instead."""
    return inputs.old_logps is None and not (loss.policy_loss_type == "gspo" and loss.is_correction_enable)


def weights_are_known(loss: OpenRlhfLoss, inputs: LossInputs) -> bool:
    """Whether the correction waits for no forward: it is off, given, or exp(old - sampling) of recorded ones."""
    unused = not loss.is_correction_enable or loss.policy_loss_type == "gspo"
    return unused or inputs.is_weights is not None or inputs.old_logps is not None


def surrogate_slope(loss: OpenRlhfLoss, batch: Batch) -> Array:
    """Return s[B,T] of `PolicyLoss`: -A r I, dual-clipped where A < 0."""
    xp, (low, high) = batch.xp, loss.eps_clip_low_high
    if loss.policy_loss_type == "gspo":
        ratio = xp.exp(row_mean(batch, sequence_log_ratio(loss, batch)))
        return clipped_slope(ratio, batch.advantages, low=low, high=high, dual=loss.dual_clip, xp=xp)
    log_r = log_ratio(batch)
    ratio = xp.exp(xp.clip(log_r, -RATIO_CLAMP, RATIO_CLAMP))
    slope = clipped_slope(ratio, batch.advantages, low=low, high=high, dual=loss.dual_clip, xp=xp)
    return xp.where(xp.abs(log_r) <= RATIO_CLAMP, slope, 0.0)


def sequence_log_ratio(loss: OpenRlhfLoss, batch: Batch) -> Array:
    if not loss.is_correction_enable:
        return log_ratio(batch)
    why = "gspo with is_correction_enable"
    return read(batch, "logps", why=why) - read(batch, "sampling_logps", why=why)


def through_ratio(loss: OpenRlhfLoss, batch: Batch, slope: Array) -> Array:
    """Return z s, and for gspo the share of each token in the sequence's sum of it."""
    weighted = policy_normaliser(loss, batch) * slope
    return spread(batch, weighted) if loss.policy_loss_type == "gspo" else weighted


def vllm_weights(loss: OpenRlhfLoss, batch: Batch) -> Array:
    """Return w[B,T] of the vLLM correction, u = exp(old - sampling), [low, high] = is_correction_threshold.

    tis clip(u, low, high); icepop u [low <= u <= high]; seq-mask-tis u (not clipped, whatever the name) where the
    row's geometric mean of u is within [low, high].
    """
    xp, (low, high) = batch.xp, loss.is_correction_threshold
    if not loss.is_correction_enable or loss.policy_loss_type == "gspo":
        return batch.mask * 0.0 + 1.0
    if batch.inputs.is_weights is not None:
        return read(batch, "is_weights", why="the correction")
    why = f"is_correction_type {loss.is_correction_type}"
    old = read(batch, "logps" if batch.inputs.old_logps is None else "old_logps", why=why)
    log_u = old - read(batch, "sampling_logps", why=why)
    u = xp.exp(log_u)
    if loss.is_correction_type == "tis":
        return xp.clip(u, low, high)
    judged = u if loss.is_correction_type == "icepop" else xp.exp(row_mean(batch, log_u))
    return xp.where((judged >= low) & (judged <= high), u, 0.0)


def reference_slope(loss: OpenRlhfLoss, batch: Batch) -> Array:
    """Return d compute_approx_kl/d logp, clamped at +-10."""
    why = f"kl_estimator {loss.kl_estimator}"
    gap = read(batch, "logps", why=why) - read(batch, "ref_logps", why=why)
    return kl_slope(gap, loss.kl_estimator, value_limit=KL_VALUE_CLAMP, xp=batch.xp)
