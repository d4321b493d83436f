"""Exposure: the derivative of a GRPO-like loss with respect to each token's log-probability, c[B,T] = dL/dlogp.

    L = sum over b, t of z[b,t] g[b,t] l(r[b,t], A[b,t])  +  coefficient sum z_kl[b,t] k(logp - ref)
    c = z g s  +  coefficient z_kl dk                             r per token, s = dl/dlog r
    c = m/n sum_t(z g s)  +  ...                                  r per sequence, exp(mean_t log r)

B rows, T completion columns; m mask, n a row's loss tokens; z normaliser (mask included, zero where masked); g gates
and importance weights; r = exp(logp - old); k an estimator of KL to the reference. The gradient into the logits is c
times d logp/d logits. Each trainer's own rules, in its own option names: `trl`, `verl`, `openrlhf`.

    loss = TrlLoss(loss_type="dapo", num_items_in_batch=4096)
    inputs = LossInputs(mask=mask, advantages=advantages)            # on-policy: no log-probabilities needed
    readiness(loss, inputs)                                          # Readiness.EXACT_BEFORE_FORWARD
    c = exposure(loss, inputs)                                       # numpy; xp=torch for tensors

Readiness is judged from what is known before the forward: logps and entropies never count. A bound may use the clip,
but not the trainers' clamps against overflow (log r at 10 or 20), nor r <= 1/p_old: true, and useless as a size.

Other trainers, by settings that give the same c:
    AReno grpo            TrlLoss(loss_type="bnpo"), on-policy (its ratio is always 1); gspo: loss_type="grpo", on-policy
    torchforge            TrlLoss(loss_type="grpo", beta=..., use_bias_correction_kl=False), on-policy
    torchtitan dapo       TrlLoss(loss_type="dapo", num_items_in_batch=global_valid_tokens) while |log r| <= 10; tokens
                          without a finite generator log-probability masked
    unsloth, Liger        TrlLoss of the same loss type (not unsloth's geometric_* ratios and rollout rejection)
    slime                 with eps_clip_c VerlLoss(loss_mode="vanilla", clip_ratio_c=eps_clip_c) while |log r| <= 20, else
                          TrlLoss; gspo: TrlLoss(importance_sampling_level="sequence"); use_unbiased_kl is TRL's bias
                          correction; its scale goes into LossInputs.normaliser
    verl <= 0.7           VerlLoss with LossInputs.normaliser: its z depends on the micro-batch
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from types import ModuleType
from typing import Any

import numpy

from hilore_cli.errors import UsageError
from hilore_cli.exposure import openrlhf, trl, verl
from hilore_cli.exposure.openrlhf import OpenRlhfLoss
from hilore_cli.exposure.pieces import Array, LossInputs, Readiness
from hilore_cli.exposure.trl import TrlLoss
from hilore_cli.exposure.verl import VerlLoss

__all__ = [
    "Loss",
    "LossInputs",
    "OpenRlhfLoss",
    "Readiness",
    "TrlLoss",
    "VerlLoss",
    "bound",
    "estimate",
    "exposure",
    "from_dict",
    "has_other_terms",
    "is_token_local",
    "needs_entropies",
    "normaliser",
    "reaches_zero_advantages",
    "readiness",
    "to_dict",
    "weight_of",
]

Loss = TrlLoss | VerlLoss | OpenRlhfLoss
LOSSES = {loss.trainer: loss for loss in (TrlLoss, VerlLoss, OpenRlhfLoss)}


def exposure(loss: Loss, inputs: LossInputs, *, xp: ModuleType = numpy) -> Array:
    """Return c[B,T] = dL/dlogp, exactly 0 where masked, in the dtype of logps (else of advantages).

    Raises UsageError naming the array that the loss needs and the inputs lack.
    """
    return family_of(loss).exposure(loss, inputs, xp=xp)


def normaliser(loss: Loss, inputs: LossInputs, *, xp: ModuleType = numpy) -> Array:
    """Return z[B,T], the weight of each token in the policy loss, mask included."""
    return family_of(loss).normaliser(loss, inputs, xp=xp)


def readiness(loss: Loss, inputs: LossInputs) -> Readiness:
    """Return how early c is known, from what `inputs` holds before the forward (logps and entropies are not counted)."""
    return family_of(loss).readiness(loss, inputs)


def estimate(loss: Loss, inputs: LossInputs, *, xp: ModuleType = numpy) -> Array:
    """Return c[B,T] as of the weights that sampled, which is known before the forward: exact on-policy without KL.

    Current log-probabilities are taken to be `old_logps` (every ratio 1), else the sampler's; terms that need a forward, the
    KL to the reference and the gates by entropy and by distance from the sampler, are left out.
    """
    match loss:
        case TrlLoss():
            plain = replace(loss, beta=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None)
        case VerlLoss():
            plain = replace(loss, use_kl_loss=False, loss_mode="vanilla" if loss.loss_mode == "kl_cov" else loss.loss_mode)
        case OpenRlhfLoss():
            plain = replace(loss, use_kl_loss=False)
    known = inputs.sampling_logps if inputs.old_logps is None else inputs.old_logps
    return exposure(plain, replace(inputs, logps=known, ref_logps=None, entropies=None), xp=xp)


def bound(loss: Loss, inputs: LossInputs, *, xp: ModuleType = numpy) -> Array:
    """Return [B,T] >= |c| from what is known before the forward; |c| itself where that is exact.

    Raises UsageError where readiness is EXACT_BEFORE_BACKWARD: no bound exists then.
    """
    ready = readiness(loss, inputs)
    if ready is Readiness.EXACT_BEFORE_BACKWARD:
        raise UsageError(
            f"bound of {loss.trainer} loss: |c| has no bound before the forward with these settings and inputs "
            "(a free ratio, weight or KL); call exposure after the forward"
        )
    if ready is Readiness.EXACT_BEFORE_FORWARD:
        return xp.abs(exposure(loss, inputs, xp=xp))
    return family_of(loss).bound(loss, inputs, xp=xp)


def is_token_local(loss: Loss) -> bool:
    """Return whether c[t] depends on that token's own log-probability only, z counted as known (a fused one-pass head)."""
    return family_of(loss).is_token_local(loss)


def has_other_terms(loss: Loss) -> bool:
    """Return whether a row of zero advantages still has a gradient: KL, entropy bonus, router loss."""
    return family_of(loss).has_other_terms(loss)


def weight_of(c: Array, rule: str, *, logps: Array | None = None, xp: ModuleType = numpy) -> float:
    """Return what a micro-batch's squared gradient is taken to go with before its forward, from its tokens' exposure.

    squared   sum c^2
    logits    sum (c (1 - p))^2, p = exp(logps): dL/dlogit of each token, d logp/d logit being 1 - p; a token that was
              sure when it was sampled moves little
    scalar    (sum |c|)^2
    """
    if rule == "scalar":
        return float(xp.abs(c).sum()) ** 2
    if rule == "squared":
        return float((c**2).sum())
    if rule != "logits":
        raise UsageError(f"exposure rule {rule!r}: gives no weight from exposures; use logits, squared or scalar, or pass the weight")
    if logps is None:
        raise UsageError("exposure rule logits: needs the log-probabilities that were recorded at sampling; pass logps")
    return float((xp.where(c != 0, c * xp.expm1(logps), 0.0) ** 2).sum())  # padding may hold NaN


def reaches_zero_advantages(loss: Loss) -> bool:
    """Return whether tokens of zero advantage have an exposure: KL, and the terms of verl's dro and kl_cov."""
    match loss:
        case TrlLoss():
            return loss.beta != 0
        case VerlLoss():
            return loss.loss_mode in ("dro", "kl_cov") or (loss.use_kl_loss and loss.kl_loss_coef != 0)
        case OpenRlhfLoss():
            return loss.use_kl_loss and loss.kl_coef != 0


def needs_entropies(loss: Loss) -> bool:
    """Return whether c depends on the entropies of the positions (TRL's entropy gate)."""
    return isinstance(loss, TrlLoss) and loss.top_entropy_quantile < 1


def to_dict(loss: Loss) -> dict[str, Any]:
    """Return the settings as plain values, the trainer first."""
    family_of(loss)
    return {"trainer": loss.trainer, **asdict(loss)}


def from_dict(settings: dict[str, Any]) -> Loss:
    """Return the loss of `to_dict`, also after JSON (lists become tuples); missing settings take the trainer's default."""
    if not isinstance(settings, dict):
        raise UsageError(f"loss settings: {settings!r} is not a dictionary; pass what to_dict returned")
    trainer = settings.get("trainer")
    if not isinstance(trainer, str) or trainer not in LOSSES:
        raise UsageError(f"loss settings: trainer={trainer!r} is unknown; use one of {', '.join(LOSSES)}")
    known = {field.name for field in fields(LOSSES[trainer])}
    given = {key: value for key, value in settings.items() if key != "trainer"}
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise UsageError(f"{trainer} loss: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return LOSSES[trainer](**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def family_of(loss: Loss) -> ModuleType:
    """Return the module with the loss's rules."""
    match loss:
        case TrlLoss():
            return trl
        case VerlLoss():
            return verl
        case OpenRlhfLoss():
            return openrlhf
    raise UsageError(
        f"loss {loss!r} is none of ours; pass one of {', '.join(kind.__name__ for kind in LOSSES.values())}"
    )
