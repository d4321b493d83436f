"""verl 0.9.1: the exposure of `verl/workers/utils/losses.py: ppo_loss` with `verl/trainer/ppo/core_algos.py`.

    c = z w s + kl_loss_coef z_kl dk

s slope of the policy loss of `loss_mode`, `surrogate_slope`; w rollout_is_weights; z by loss_agg_mode, `normaliser`;
z_kl likewise, except that sapo and geo_mean have a z of their own for the policy loss. The log ratio is clamped to
+-20 in vanilla, sapo, cispo and dppo (no gradient outside where logp enters through the ratio), to at most 10 in gspo.
The entropy bonus reaches the weights through logits, not through logp: see `has_other_terms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from hilore_cli.errors import UsageError
from hilore_cli.exposure.pieces import (
    ROUNDING,
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
    soft_ceiling,
    soft_slope,
)

LOSS_MODES = ("vanilla", "gspo", "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "geo_mean", "dro", "kl_cov")
REFUSED_MODES = {
    "clip_cov": "it drops tokens at random after the forward; use kl_cov or vanilla",
    "bypass_mode": "it makes weights and masks from the forward; for its ppo_clip without rejection use vanilla with "
    "the rollout's log-probabilities as old_logps",
}
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_TYPES = (*KL_KINDS, *(name + "+" for name in KL_KINDS))
RATIO_CLAMP, SEQUENCE_CLAMP = 20.0, 10.0  # on log r
KL_VALUE_CLAMP = 10.0  # of k3; its clamp of ref - logp at +-20 lies outside of that, and never shows
LEAST_COUNT = 1e-8  # verl adds it to a row's count of tokens


@dataclass(frozen=True, kw_only=True)
class VerlLoss:
    """The settings of verl's actor (actor.*, actor.policy_loss.*) that shape the loss, with verl's names and defaults.

    `dp_size`, `batch_num_tokens`, `global_batch_size`: what FSDPEngine puts into global_batch_info for the mini-batch,
    over all ranks; None: of this micro-batch, as agg_loss does. `loss_scale_factor` None: T, the padded width.
    `temperature`: logits were divided by it (it scales d logp/d logits, not c).
    """

    trainer: ClassVar[str] = "verl"

    loss_mode: str = "vanilla"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2  # None: clip_ratio. dppo: the divergence threshold
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float = 3.0  # dual clip of vanilla, cap of the ratio of dppo
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl_cov_ratio: float = 0.0002  # share of the tokens
    ppo_kl_coef: float = 0.1  # of kl_cov
    dro_beta: float | None = None
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None  # sequences
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.loss_mode in REFUSED_MODES:
            raise UsageError(f"verl loss: loss_mode {self.loss_mode} is not supported: {REFUSED_MODES[self.loss_mode]}")
        check_known(self, "loss_mode", LOSS_MODES)
        check_known(self, "loss_agg_mode", AGG_MODES)
        check_known(self, "kl_loss_type", KL_TYPES)
        check_at_least(self, 0, "clip_ratio", "clip_ratio_low", "clip_ratio_high")
        check_at_least(self, 0, "tau_pos", "tau_neg", "kl_cov_ratio", "dro_beta", "temperature", strictly=True)
        check_at_least(self, 0, "loss_scale_factor", "batch_num_tokens", "global_batch_size", strictly=True)
        check_at_least(self, 1, "clip_ratio_c", strictly=True)
        check_at_least(self, 1, "dp_size")
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise UsageError("verl loss dro: dro_beta is None; pass a positive value")
        if self.dp_size > 1:
            check_global_constants(self)

    @property
    def low(self) -> float:
        """clip_ratio_low as the trainer resolves it."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """clip_ratio_high as the trainer resolves it."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def has_kl(self) -> bool:
        return self.use_kl_loss and self.kl_loss_coef != 0

    @property
    def kl_kind(self) -> str:
        """The estimator whose gradient is taken: a "+" puts k2's under any value (straight through)."""
        return "k2" if self.kl_loss_type.endswith("+") else KL_KINDS[self.kl_loss_type]


def check_global_constants(loss: VerlLoss) -> None:
    """With several ranks agg_loss refuses to count a micro-batch itself."""
    policy = {"sapo": "seq-mean-token-mean", "geo_mean": "token-sum"}.get(loss.loss_mode, loss.loss_agg_mode)
    for mode in {policy, loss.loss_agg_mode if loss.has_kl else policy} - {"token-sum"}:
        constant = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        if getattr(loss, constant) is None:
            raise UsageError(f"verl loss, {mode}: dp_size {loss.dp_size} needs {constant}, counted over all ranks")


def exposure(loss: VerlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return c[B,T]."""
    batch = open_batch(inputs, who=name_of(loss), xp=xp)
    c = policy_normaliser(loss, batch) * rollout_weights(loss, batch) * surrogate_slope(loss, batch)
    if loss.has_kl:
        c = c + loss.kl_loss_coef * kl_normaliser(loss, batch) * reference_slope(loss, batch)
    return xp.where(batch.live, c, 0.0)


def normaliser(loss: VerlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return z[B,T] of the policy loss; n is a row's count of loss tokens, d = dp_size.

    token-mean m d/batch_num_tokens; token-sum m d; seq-mean-token-sum m d/global_batch_size, -norm also over
    loss_scale_factor; seq-mean-token-mean m d/(global_batch_size (n + 1e-8)), which is sapo's in any mode;
    geo_mean's in any mode m/(B (n + 1e-8)).
    """
    return policy_normaliser(loss, open_batch(inputs, who=name_of(loss), xp=xp))


def policy_normaliser(loss: VerlLoss, batch: Batch) -> Array:
    if batch.inputs.normaliser is not None:
        return read(batch, "normaliser", why="the override")
    if loss.loss_mode == "geo_mean":
        return batch.mask / (padded_counts(batch) * batch.mask.shape[0])
    return aggregate(loss, batch, "seq-mean-token-mean" if loss.loss_mode == "sapo" else loss.loss_agg_mode)


def kl_normaliser(loss: VerlLoss, batch: Batch) -> Array:
    """Return z[B,T] of the KL loss: always by loss_agg_mode."""
    if batch.inputs.normaliser is None:
        return aggregate(loss, batch, loss.loss_agg_mode)
    if loss.loss_mode == "geo_mean" or (loss.loss_mode == "sapo" and loss.loss_agg_mode != "seq-mean-token-mean"):
        raise UsageError(
            f"{batch.who}: its KL loss has another normaliser ({loss.loss_agg_mode}) than its policy loss, and "
            "LossInputs.normaliser gives one; leave it out and set batch_num_tokens and global_batch_size"
        )
    return read(batch, "normaliser", why="the override")


def aggregate(loss: VerlLoss, batch: Batch, mode: str) -> Array:
    """Return the weights of `agg_loss`."""
    mask, scale = batch.mask, float(loss.dp_size)
    if mode == "token-sum":
        return mask * scale
    if mode == "token-mean":
        return mask * (scale / (loss.batch_num_tokens or max(float(mask.sum()), 1.0)))
    scale /= loss.global_batch_size or max(float((mask.sum(1) > 0).sum()), 1.0)
    if mode == "seq-mean-token-mean":
        return mask * scale / padded_counts(batch)
    return mask * (scale / (loss.loss_scale_factor or mask.shape[1]) if mode.endswith("norm") else scale)


def padded_counts(batch: Batch) -> Array:
    return batch.mask.sum(1)[:, None] + LEAST_COUNT


def readiness(loss: VerlLoss, inputs: LossInputs) -> Readiness:
    """Return how early c is known. Clamps that only guard against overflow (log r at 10 or 20) do not count as bounds."""
    free = loss.loss_mode in ("gspo", "geo_mean") and has_negative(inputs)
    unbounded = loss.loss_mode in ("dro", "kl_cov") or free
    if loss.has_kl and kl_ceiling(loss) == math.inf:
        return Readiness.EXACT_BEFORE_BACKWARD
    if not slope_is_known(loss, inputs):
        return Readiness.EXACT_BEFORE_BACKWARD if unbounded else Readiness.BOUND_BEFORE_FORWARD
    known = not loss.has_kl or loss.kl_kind == "k1"
    return Readiness.EXACT_BEFORE_FORWARD if known else Readiness.BOUND_BEFORE_FORWARD


def bound(loss: VerlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return [B,T] >= |c| from what is known before the forward; the caller has checked `readiness`."""
    batch = open_batch(inputs, who=name_of(loss), xp=xp)
    known = slope_is_known(loss, inputs)
    most = xp.abs(surrogate_slope(loss, batch)) if known else surrogate_ceiling(loss, batch)
    most = policy_normaliser(loss, batch) * xp.abs(rollout_weights(loss, batch)) * most
    if loss.has_kl:
        most = most + abs(loss.kl_loss_coef) * kl_ceiling(loss) * kl_normaliser(loss, batch)
    return xp.where(batch.live, most, 0.0)


def is_token_local(loss: VerlLoss) -> bool:
    """Whether c[t] depends on logp[t] alone. Not: sequence ratios, and kl_cov's choice among all tokens."""
    return loss.loss_mode not in ("gspo", "geo_mean", "kl_cov")


def has_other_terms(loss: VerlLoss) -> bool:
    """Whether a row of zero advantages still has a gradient: KL loss, entropy bonus, and the penalties of dro and kl_cov."""
    return loss.has_kl or loss.entropy_coeff != 0 or loss.loss_mode in ("dro", "kl_cov")


def name_of(loss: VerlLoss) -> str:
    return f"verl loss {loss.loss_mode}"


def slope_is_known(loss: VerlLoss, inputs: LossInputs) -> bool:
    return inputs.old_logps is None or loss.loss_mode == "gpg"


def rollout_weights(loss: VerlLoss, batch: Batch) -> Array:
    """Return w[B,T]; geo_mean takes the geometric mean of a row's weights."""
    if batch.inputs.is_weights is None:
        return batch.mask * 0.0 + 1.0
    if loss.loss_mode != "geo_mean":
        return read(batch, "is_weights", why="the weights")
    logs = batch.xp.log(read(batch, "is_weights", why="the weights", fill=1.0) + 1e-10) * batch.mask
    return batch.xp.exp(logs.sum(1)[:, None] / padded_counts(batch))


def surrogate_slope(loss: VerlLoss, batch: Batch) -> Array:
    """Return s[B,T], the slope of the mode's per-token loss `compute_policy_loss_*`."""
    a, xp = batch.advantages, batch.xp
    if loss.loss_mode == "gpg":
        return -a
    log_r = log_ratio(batch)
    if loss.loss_mode == "dro":
        return -a + loss.dro_beta * log_r
    if loss.loss_mode == "geo_mean":
        return geometric_slope(loss, batch, log_r)
    if loss.loss_mode == "kl_cov":
        return -a * xp.exp(log_r) + loss.ppo_kl_coef * covariance_penalty(loss, batch, log_r)
    if loss.loss_mode == "gspo":
        mean = row_mean(batch, log_r)
        ratio = xp.exp(xp.clip(mean, None, SEQUENCE_CLAMP))
        slope = clipped_slope(ratio, a, low=loss.low, high=loss.high, xp=xp)
        return xp.where(mean <= SEQUENCE_CLAMP, slope, 0.0)
    ratio = xp.exp(xp.clip(log_r, -RATIO_CLAMP, RATIO_CLAMP))
    if loss.loss_mode == "cispo":
        return -a * xp.clip(ratio, 1 - loss.low, 1 + loss.high)
    if loss.loss_mode in ("dppo_tv", "dppo_kl"):
        return xp.where(within_divergence(loss, batch), -a * xp.clip(ratio, None, loss.clip_ratio_c), 0.0)
    if loss.loss_mode == "sapo":
        slope = soft_slope(ratio, a, positive=loss.tau_pos, negative=loss.tau_neg, xp=xp)
    else:
        slope = clipped_slope(ratio, a, low=loss.low, high=loss.high, dual=loss.clip_ratio_c, xp=xp)
    return xp.where(xp.abs(log_r) <= RATIO_CLAMP, slope, 0.0)


def surrogate_ceiling(loss: VerlLoss, batch: Batch) -> Array:
    """Return the maximum of |s| over all ratios, for the modes that have one."""
    a, xp = batch.advantages, batch.xp
    if loss.loss_mode == "sapo":
        return soft_ceiling(a, positive=loss.tau_pos, negative=loss.tau_neg, xp=xp)
    if loss.loss_mode == "cispo":
        return xp.abs(a) * (1 + loss.high)
    if loss.loss_mode in ("dppo_tv", "dppo_kl"):
        return xp.abs(a) * loss.clip_ratio_c
    if loss.loss_mode == "geo_mean":  # every A >= 0, so every log ratio is at most `high`
        mean = a.sum(1)[:, None] / padded_counts(batch)
        return batch.mask * mean * xp.exp(xp.full_like(mean, loss.high)) * ROUNDING
    dual = loss.clip_ratio_c if loss.loss_mode == "vanilla" else None
    return clipped_ceiling(a, high=loss.high, dual=dual, xp=xp)


def geometric_slope(loss: VerlLoss, batch: Batch, log_r: Array) -> Array:
    """Return GMPO's -Abar rho I: rho = exp(mean_t of log r clipped where it would gain), I = not clipped."""
    xp, sign = batch.xp, batch.xp.sign(batch.advantages)
    clamped = xp.clip(log_r, -loss.low, loss.high)
    first, second = sign * log_r, sign * clamped
    live = xp.where(first <= second, sign**2, 0.0)  # a tie is an unclipped token, both of whose sides pass
    counted = padded_counts(batch)
    rho = xp.exp((sign * xp.minimum(first, second) * batch.mask).sum(1)[:, None] / counted)
    return -(batch.advantages.sum(1)[:, None] / counted) * rho * live


def covariance_penalty(loss: VerlLoss, batch: Batch, log_r: Array) -> Array:
    """Return sign(log r) on the kl_cov_ratio of tokens with the largest covariance of advantage and logp, else 0.

    On-policy every sign is 0 and logps are not asked for. Equal covariances go as the library sorts them.
    """
    if batch.inputs.old_logps is None or not bool(batch.live.any()):
        return log_r * 0.0
    xp, logps = batch.xp, read(batch, "logps", why="the covariance")
    a, lp = batch.advantages[batch.live], logps[batch.live]
    covariance = (a - a.mean()) * (lp - lp.mean())
    places = xp.where(batch.live.reshape(-1))[0]
    chosen = (batch.mask * 0.0).reshape(-1)
    chosen[places[xp.argsort(-covariance)[: max(1, int(len(a) * loss.kl_cov_ratio))]]] = 1.0
    return chosen.reshape(batch.mask.shape) * xp.sign(log_r)


def within_divergence(loss: VerlLoss, batch: Batch) -> Array:
    """Return DPPO's valid mask: the binary TV or KL divergence of old and new within the thresholds (2602.04879)."""
    if batch.inputs.old_logps is None:
        return batch.live
    xp = batch.xp
    logps, old = read(batch, "logps", why="the divergence"), read(batch, "old_logps", why="the divergence")
    p, q = xp.exp(logps), xp.exp(old)
    if loss.loss_mode == "dppo_tv":
        return xp.where(batch.advantages > 0, p - q <= loss.high, p - q >= -loss.low)
    divergence = q * (old - logps) + (1.0 - q) * xp.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    up, down = (divergence <= loss.high) | (p <= q), (divergence <= loss.low) | (p >= q)
    return xp.where(batch.advantages > 0, up, down)


def reference_slope(loss: VerlLoss, batch: Batch) -> Array:
    """Return d kl_penalty/d logp; k1's is 1 and asks for no log-probabilities."""
    if loss.kl_kind == "k1":
        return batch.mask
    why = f"kl_loss_type {loss.kl_loss_type}"
    gap = read(batch, "logps", why=why) - read(batch, "ref_logps", why=why)
    if loss.kl_kind == "k3":
        return kl_slope(gap, "k3", value_limit=KL_VALUE_CLAMP, xp=batch.xp)
    return kl_slope(gap, loss.kl_kind, xp=batch.xp)


def kl_ceiling(loss: VerlLoss) -> float:
    if loss.kl_kind == "k3":
        return kl_slope_ceiling("k3", value_limit=KL_VALUE_CLAMP)
    return kl_slope_ceiling(loss.kl_kind)
