"""Exposure: the derivative of the GRPO loss with respect to each token's log-probability.

Pure functions that work alike on numpy arrays and, with `xp=torch`, on tensors. B rows, T completion columns.

    L = sum over b, t of z[b,t] * l(r[b,t], A[b])          z: normaliser (mask included), r = exp(lp - old)
    l(r, A) = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
    c[b,t] = dL/dlp[b,t] = z[b,t] * dl/dr * r = -z A r I,  I = r <= 1 + eps_high where A > 0, r >= 1 - eps_low where A < 0

The loss and its normalisers are those of TRL 1.16 (`trl/trainer/grpo_trainer.py: GRPOTrainer._compute_loss`): PPO's
clipped surrogate (Schulman et al. 2017, eq. 7) with the token-level normalisers of GRPO (Shao et al. 2024), BNPO,
Dr. GRPO (Liu et al. 2025) and DAPO (Yu et al. 2025). Not here: sequence-level ratios, KL, and other surrogates.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy

from hilore_cli.errors import UsageError

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")

Array = Any  # numpy.ndarray, or torch.Tensor with xp=torch


def exposure(
    *,
    advantages: Array,
    mask: Array,
    loss_type: str = "dapo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_tokens: int | None = None,
    accumulation_steps: int = 1,
    max_completion_tokens: int | None = None,
    logps: Array | None = None,
    old_logps: Array | None = None,
    xp: ModuleType = numpy,
) -> Array:
    """Return c[B,T] = dL/dlogp.

    advantages [B], mask [B,T] (1 on loss tokens). Without `old_logps` the step is on-policy: every ratio is 1, and c is
    known before the forward; with them, `logps` [B,T] is needed too.
    `loss_tokens`: loss tokens of the whole update (dapo); `max_completion_tokens`: dr_grpo's constant, default T.
    """
    z = normaliser(
        mask,
        loss_type=loss_type,
        loss_tokens=loss_tokens,
        accumulation_steps=accumulation_steps,
        max_completion_tokens=max_completion_tokens,
    )
    if old_logps is None:
        return -z * advantages[:, None]
    if logps is None:
        raise UsageError("exposure: old_logps without logps; pass the log-probabilities of the current weights too")
    # a masked column may hold anything, NaN included; its ratio must not reach the product
    ratio = xp.exp(xp.where(mask != 0, logps - old_logps, 0.0 * z))
    slope = surrogate_slope(ratio, advantages[:, None], epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return z * slope


def normaliser(
    mask: Array,
    *,
    loss_type: str,
    loss_tokens: int | None = None,
    accumulation_steps: int = 1,
    max_completion_tokens: int | None = None,
) -> Array:
    """Return z[B,T], the weight of each token in the loss of one micro-batch (zero where masked).

    grpo m/(B n GA), bnpo m/(sum m GA), dr_grpo m/(B max_completion_tokens GA), dapo m/loss_tokens; n is a row's own
    count, GA = `accumulation_steps` = micro-batches per update.
    """
    rows, columns = mask.shape
    if loss_type == "grpo":
        tokens = mask.sum(1)[:, None]
        return mask / ((tokens + (tokens == 0)) * (rows * accumulation_steps))
    if loss_type == "bnpo":
        return mask / (max(float(mask.sum()), 1.0) * accumulation_steps)
    if loss_type == "dr_grpo":
        return mask / float(rows * (max_completion_tokens or columns) * accumulation_steps)
    if loss_type == "dapo":
        if loss_tokens is None:
            raise UsageError("loss type dapo: needs loss_tokens, the loss tokens of the whole update")
        return mask / max(float(loss_tokens), 1.0)
    raise UsageError(f"loss type {loss_type!r}: unknown; use one of {', '.join(LOSS_TYPES)}")


def surrogate(
    ratio: Array, advantages: Array, *, epsilon_low: float, epsilon_high: float, xp: ModuleType = numpy
) -> Array:
    """Return l(r, A) per token: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    clipped = xp.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    return -xp.minimum(ratio * advantages, clipped * advantages)


def surrogate_slope(ratio: Array, advantages: Array, *, epsilon_low: float, epsilon_high: float) -> Array:
    """Return dl/dlp per token: -A r where the clip leaves the token live, else 0.

    Autograd splits the tie of `min` inside the clip range into halves of equal derivatives, so the tie needs no case.
    """
    live_up = (advantages > 0) & (ratio <= 1 + epsilon_high)
    live_down = (advantages < 0) & (ratio >= 1 - epsilon_low)
    return -advantages * ratio * (live_up | live_down)
