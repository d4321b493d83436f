"""TRL 1.16.0: the exposure of `trl/trainer/grpo_trainer.py: GRPOTrainer._compute_loss`.

    token level      c = z g s + KL
    sequence level   c = m/n sum_t(z g s) + KL                 r[B,1] = exp(mean_t log r)
    direct           c = z g s + KL                            cispo, vespo: a detached coefficient times logp

z normaliser with the mask, `normaliser`; g gates, `gates`; s slope of the surrogate, `surrogate_slope`. The KL term
(k3 to the reference) is added after the gates, so gated tokens and tokens of zero advantage keep it. The entropy bonus
and the router's loss reach the weights through logits, not through logp: see `has_other_terms`.
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
    by_sign,
    check_at_least,
    check_known,
    check_settings,
    clipped_ceiling,
    clipped_slope,
    counts,
    has_negative,
    kl_slope,
    log_ratio,
    need,
    open_batch,
    read,
    row_mean,
    soft_ceiling,
    soft_slope,
    spread,
)

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
DIRECT = ("cispo", "vespo")
WINDOW = ("dapo", "cispo", "vespo")  # normalised by num_items_in_batch
LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT = math.log(1e-8), 20.0  # get_gamma_weights' clamps


@dataclass(frozen=True, kw_only=True)
class TrlLoss:
    """The settings of GRPOConfig that shape the loss, with TRL's names and defaults, and what z needs of the run.

    `num_items_in_batch`: loss tokens of the generation batch, all processes (in the inputs dict; any number >= 0 where
    LossInputs.normaliser is given). `entropy_threshold`: the quantile of entropies gathered over the ranks; None: over
    this micro-batch. `temperature`: logits were divided by it (it scales d logp/d logits, not c).
    """

    trainer: ClassVar[str] = "trl"

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon. cispo: the absolute cap of the ratio
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    top_entropy_quantile: float = 1.0
    entropy_threshold: float | None = None
    off_policy_mask_threshold: float | None = None
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    router_aux_loss_coef: float = 0.0
    temperature: float = 1.0
    current_gradient_accumulation_steps: int = 1  # micro-batches per update (GA)
    steps_per_generation: int = 1
    num_processes: int = 1
    num_items_in_batch: int | None = None
    max_completion_length: int | None = 512  # tokens

    def __post_init__(self) -> None:
        check_settings(self)
        check_known(self, "loss_type", LOSS_TYPES)
        check_known(self, "importance_sampling_level", ("token", "sequence"))
        check_at_least(self, 0, "epsilon", "epsilon_high", "top_entropy_quantile", "num_items_in_batch")
        check_at_least(self, 0, "delta", "sapo_temperature_pos", "sapo_temperature_neg", "temperature", strictly=True)
        check_at_least(self, 1, "current_gradient_accumulation_steps", "steps_per_generation", "num_processes")
        check_at_least(self, 1, "max_completion_length")
        if self.top_entropy_quantile > 1:
            raise UsageError(f"trl loss: top_entropy_quantile={self.top_entropy_quantile} is above 1; pass 0 to 1")
        if self.loss_type in WINDOW and self.num_items_in_batch is None:
            raise UsageError(
                f"trl loss {self.loss_type}: needs num_items_in_batch, loss tokens of the generation batch"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise UsageError("trl loss dr_grpo: max_completion_length is None; pass the tokens it divides by")

    @property
    def high(self) -> float:
        """epsilon_high as the trainer resolves it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def exposure(loss: TrlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return c[B,T]."""
    batch = open_batch(inputs, who=name_of(loss), xp=xp)
    z = own_normaliser(loss, batch)
    log_r = log_ratio(batch)
    gated = z * gates(loss, batch, log_r) * surrogate_slope(loss, batch, log_r)
    c = spread(batch, gated) if through_sequence(loss) else gated
    if loss.beta != 0:
        c = c + kl_exposure(loss, batch, z, log_r)
    return xp.where(batch.live, c, 0.0)


def normaliser(loss: TrlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return z[B,T]; n is a row's count of loss tokens, GA micro-batches per update, W processes.

    grpo, sapo m/(B n GA); bnpo m/(sum m GA); dr_grpo m/(B max_completion_length GA); luspo m/(B GA);
    dapo, cispo, vespo m W steps_per_generation/(num_items_in_batch GA).
    """
    return own_normaliser(loss, open_batch(inputs, who=name_of(loss), xp=xp))


def own_normaliser(loss: TrlLoss, batch: Batch) -> Array:
    if batch.inputs.normaliser is not None:
        return read(batch, "normaliser", why="the override")
    mask, steps = batch.mask, loss.current_gradient_accumulation_steps
    rows = mask.shape[0]
    if loss.loss_type in ("grpo", "sapo"):
        return mask / (counts(batch) * (rows * steps))
    if loss.loss_type == "bnpo":
        return mask / (max(float(mask.sum()), 1.0) * steps)
    if loss.loss_type == "dr_grpo":
        return mask / float(rows * loss.max_completion_length * steps)
    if loss.loss_type == "luspo":
        return mask / float(rows * steps)
    return mask / (max(loss.num_items_in_batch, 1.0) / loss.num_processes * steps / loss.steps_per_generation)


def readiness(loss: TrlLoss, inputs: LossInputs) -> Readiness:
    """Return how early c is known. beta: its KL has no bound. A < 0 off-policy: bounded by delta, or by the loss type."""
    if loss.beta != 0:
        return Readiness.EXACT_BEFORE_BACKWARD
    on_policy = inputs.old_logps is None
    if on_policy and loss.top_entropy_quantile == 1 and not gate_waits(loss, inputs):
        return Readiness.EXACT_BEFORE_FORWARD
    clipped = loss.loss_type not in ("sapo", *DIRECT)
    if not on_policy and clipped and loss.delta is None and has_negative(inputs):
        return Readiness.EXACT_BEFORE_BACKWARD
    return Readiness.BOUND_BEFORE_FORWARD


def bound(loss: TrlLoss, inputs: LossInputs, *, xp: ModuleType) -> Array:
    """Return [B,T] >= |c| from what is known before the forward; the caller has checked `readiness`."""
    batch = open_batch(inputs, who=name_of(loss), xp=xp)
    on_policy = inputs.old_logps is None
    most = xp.abs(surrogate_slope(loss, batch, log_ratio(batch))) if on_policy else surrogate_ceiling(loss, batch)
    gated = own_normaliser(loss, batch) * xp.abs(known_gate(loss, batch)) * most
    return xp.where(batch.live, spread(batch, gated) if through_sequence(loss) else gated, 0.0)


def is_token_local(loss: TrlLoss) -> bool:
    """Whether c[t] depends on logp[t] alone. Not: sequence ratios, vespo, the off-policy mask, the entropy mask."""
    gated = loss.off_policy_mask_threshold is not None or loss.top_entropy_quantile < 1
    return loss.importance_sampling_level == "token" and loss.loss_type != "vespo" and not gated


def has_other_terms(loss: TrlLoss) -> bool:
    """Whether a row of zero advantages still has a gradient: KL, entropy bonus, router loss."""
    bonus = loss.entropy_coef != 0 or loss.use_adaptive_entropy
    return loss.beta != 0 or bonus or loss.router_aux_loss_coef != 0


def name_of(loss: TrlLoss) -> str:
    return f"trl loss {loss.loss_type}"


def through_sequence(loss: TrlLoss) -> bool:
    """Whether logp enters the surrogate through the sequence's ratio."""
    return loss.importance_sampling_level == "sequence" and loss.loss_type not in DIRECT


def ratio_of(loss: TrlLoss, batch: Batch, log_r: Array) -> Array:
    """Return r, [B,T] at token level and [B,1] at sequence level."""
    return batch.xp.exp(log_r if loss.importance_sampling_level == "token" else row_mean(batch, log_r))


def surrogate_slope(loss: TrlLoss, batch: Batch, log_r: Array) -> Array:
    """Return s[B,T]: -A r I (clipped), SAPO's soft gate, -A min(r, epsilon_high) (cispo), -A phi(w) (vespo)."""
    a, xp = batch.advantages, batch.xp
    if loss.loss_type == "vespo":
        return -a * gamma_weights(loss, batch, log_r)
    ratio = ratio_of(loss, batch, log_r)
    if loss.loss_type == "cispo":
        return -a * xp.clip(ratio, None, loss.high)
    if loss.loss_type == "sapo":
        return soft_slope(ratio, a, positive=loss.sapo_temperature_pos, negative=loss.sapo_temperature_neg, xp=xp)
    return clipped_slope(ratio, a, low=loss.epsilon, high=loss.high, delta=loss.delta, xp=xp)


def surrogate_ceiling(loss: TrlLoss, batch: Batch) -> Array:
    """Return the maximum of |s| over all ratios."""
    a, xp = batch.advantages, batch.xp
    if loss.loss_type == "vespo":
        up = gamma_peak(loss.vespo_k_pos, loss.vespo_lambda_pos)
        down = gamma_peak(loss.vespo_k_neg, loss.vespo_lambda_neg)
        return xp.abs(a) * by_sign(a >= 0, up, down, like=a, xp=xp)
    if loss.loss_type == "cispo":
        return xp.abs(a) * loss.high
    if loss.loss_type == "sapo":
        return soft_ceiling(a, positive=loss.sapo_temperature_pos, negative=loss.sapo_temperature_neg, xp=xp)
    return clipped_ceiling(a, high=loss.high, delta=loss.delta, xp=xp)


def gamma_weights(loss: TrlLoss, batch: Batch, log_r: Array) -> Array:
    """Return phi(w) = exp(lambda + k log w - lambda w) of VESPO, w[B,1] the product of a row's clamped ratios.

    `get_gamma_weights`. is_weights enter w, not the gates; [B,1] counts once (TRL's constructor asks for [B,T]).
    """
    xp, a = batch.xp, batch.advantages
    log_w = (xp.clip(log_r, -20.0, 20.0) * batch.mask).sum(1)[:, None]
    if batch.inputs.is_weights is not None:
        weights = read(batch, "is_weights", why="vespo", fill=1.0)
        logs = xp.log(xp.clip(weights, 1e-8, math.exp(MOST_LOG_WEIGHT)))
        once = batch.inputs.is_weights.shape[1] == 1
        log_w = log_w + (row_mean(batch, logs) if once else logs.sum(1)[:, None])
    log_w = xp.clip(log_w, LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    k = by_sign(a >= 0, loss.vespo_k_pos, loss.vespo_k_neg, like=a, xp=xp)
    rate = by_sign(a >= 0, max(loss.vespo_lambda_pos, 1e-4), max(loss.vespo_lambda_neg, 1e-4), like=a, xp=xp)
    phi = xp.exp(rate + k * log_w - rate * xp.exp(log_w))
    return xp.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0)


def gamma_peak(k: float, rate: float) -> float:
    """Return max phi over the clamped w; log phi is concave in log w with its top at w = k/lambda."""
    rate = max(rate, 1e-4)
    log_w = LEAST_LOG_WEIGHT if k <= 0 else min(max(math.log(k / rate), LEAST_LOG_WEIGHT), MOST_LOG_WEIGHT)
    log_phi = rate + k * log_w - rate * math.exp(log_w)
    return math.exp(min(log_phi, 700.0)) * ROUNDING


def gates(loss: TrlLoss, batch: Batch, log_r: Array) -> Array:
    """Return g[B,T]: importance weights (not vespo's), off-policy sequence mask, top-entropy mask."""
    g = known_gate(loss, batch)
    if loss.off_policy_mask_threshold is not None and has_negative(batch.inputs):
        g = g * off_policy_mask(loss, batch, log_r)
    if loss.top_entropy_quantile < 1:
        g = g * entropy_mask(loss, batch)
    return g


def known_gate(loss: TrlLoss, batch: Batch) -> Array:
    """Return the part of g known before the forward: the importance weights, else 1. The masks only take away."""
    if batch.inputs.is_weights is None or loss.loss_type == "vespo":
        return batch.mask * 0.0 + 1.0
    return read(batch, "is_weights", why="the gate")


def gate_waits(loss: TrlLoss, inputs: LossInputs) -> bool:
    """Whether the off-policy mask waits for the forward: A >= 0 is kept, and on-policy its KL is zero."""
    measured = inputs.sampling_logps is not None or inputs.old_logps is not None
    return loss.off_policy_mask_threshold is not None and measured and has_negative(inputs)


def off_policy_mask(loss: TrlLoss, batch: Batch, log_r: Array) -> Array:
    """Return [B,T]: 1 where A >= 0 or the row's mean of (sampling or old) - logps is within the threshold.

    `get_off_policy_mask` (DeepSeek-V3.2); sampling log-probabilities that vLLM could not give (NaN) count zero.
    """
    if batch.inputs.sampling_logps is None:
        drift = -log_r
    else:
        drift = read(batch, "sampling_logps", why="the off-policy mask")
        drift = batch.xp.nan_to_num(drift - read(batch, "logps", why="the off-policy mask"), nan=0.0)
    keep = (batch.advantages >= 0) | (row_mean(batch, drift) <= loss.off_policy_mask_threshold)
    return batch.xp.asarray(keep, dtype=batch.dtype)


def entropy_mask(loss: TrlLoss, batch: Batch) -> Array:
    """Return [B,T]: 1 on tokens of at least the threshold's entropy. `get_high_entropy_mask`, its float32 quantile."""
    xp, entropies = batch.xp, need(batch, "entropies", why=f"top_entropy_quantile {loss.top_entropy_quantile}")
    threshold = loss.entropy_threshold
    if threshold is None:
        taken = xp.asarray(entropies[batch.live], dtype=xp.float32)
        if taken.shape[0] == 0:
            return batch.mask * 0.0
        threshold = xp.quantile(taken, 1 - loss.top_entropy_quantile)
    return xp.asarray((xp.where(batch.live, entropies, 0.0) >= threshold) & batch.live, dtype=batch.dtype)


def kl_exposure(loss: TrlLoss, batch: Batch, z: Array, log_r: Array) -> Array:
    """Return beta z dk, k = exp(e) - e - 1, dk = 1 - exp(e), e = ref - logp; with the bias correction of r k:

    token beta z r (k + dk); sequence beta (z r dk + m/n sum_t z r k). The r of the KL is not capped by delta.
    """
    xp, why = batch.xp, f"beta {loss.beta}"
    gap = read(batch, "logps", why=why) - read(batch, "ref_logps", why=why)
    slope = kl_slope(gap, "k3", xp=xp)
    if not loss.use_bias_correction_kl:
        return loss.beta * z * slope
    ratio = ratio_of(loss, batch, log_r)
    value = xp.expm1(-gap) + gap
    if loss.importance_sampling_level == "token":
        return loss.beta * z * ratio * (value + slope)
    return loss.beta * (z * ratio * slope + spread(batch, z * ratio * value))
