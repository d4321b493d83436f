"""What the three trainers' losses share: the inputs, masking, clip indicators, KL slopes and checks of settings.

Everything works on numpy arrays and, with `xp=torch`, on tensors of any device: only functions that both libraries have
under one name are called. Shapes: B rows, T columns. A "slope" is the derivative with respect to a log-probability or,
for ratios, with respect to log r (which is the same thing at token level).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from hilore_cli.errors import UsageError

Array = Any  # numpy.ndarray, or torch.Tensor with xp=torch

ARRAYS = ("logps", "old_logps", "ref_logps", "sampling_logps", "is_weights", "entropies", "normaliser")
ROUNDING = 1 + 1e-6  # on ceilings that are found numerically: a float32 slope may round above the true maximum


class Readiness(enum.Enum):
    """How early the exposure of a micro-batch is known."""

    EXACT_BEFORE_FORWARD = "exact before the forward"
    BOUND_BEFORE_FORWARD = "bound before the forward"
    EXACT_BEFORE_BACKWARD = "exact before the backward"


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What one micro-batch gives a loss. B rows, T columns; arrays are numpy or torch.

    Masked positions may hold anything, NaN included. `is_weights` are final: truncated or masked already.
    """

    mask: Array  # [B,T] 1 on loss tokens
    advantages: Array  # [B,T], or [B] (one per row)
    logps: Array | None = None  # [B,T] of the current weights (known after the forward)
    old_logps: Array | None = None  # [B,T]; None: on-policy, every ratio is 1 (old = logps.detach())
    ref_logps: Array | None = None  # [B,T]
    sampling_logps: Array | None = None  # [B,T] of the rollout engine
    is_weights: Array | None = None  # [B,T] or [B,1], known before the forward (vLLM correction, rollout_is_weights)
    entropies: Array | None = None  # [B,T], after the forward (entropy mask)
    normaliser: Array | None = None  # [B,T], mask included: overrides the loss's own rule for z


@dataclass(frozen=True, kw_only=True)
class Batch:
    """LossInputs opened for arithmetic in one dtype: that of logps, else that of advantages."""

    inputs: LossInputs
    who: str  # the loss, as messages name it
    xp: ModuleType
    dtype: Any
    live: Array  # [B,T] bool
    mask: Array  # [B,T] float
    advantages: Array  # [B,T]


def open_batch(inputs: LossInputs, *, who: str, xp: ModuleType) -> Batch:
    """Check the shapes, bring mask and advantages to [B,T] of one dtype, and zero what is masked."""
    shape = tuple(inputs.mask.shape)
    if len(shape) != 2:
        raise UsageError(f"{who}: mask has shape {shape}; pass [B,T]")
    advantages = by_token(inputs.advantages)
    if tuple(advantages.shape) not in (shape, (shape[0], 1)):
        raise UsageError(f"{who}: advantages have shape {tuple(inputs.advantages.shape)}; pass [B] or {shape}")
    for name in ARRAYS:
        array = getattr(inputs, name)
        allowed = (shape, (shape[0], 1)) if name == "is_weights" else (shape,)
        if array is not None and tuple(array.shape) not in allowed:
            raise UsageError(f"{who}: {name} has shape {tuple(array.shape)}; pass {shape}, the mask's")
    # times 1.0 keeps a float dtype and turns integers into the library's own float
    dtype = (advantages * 1.0).dtype if inputs.logps is None else inputs.logps.dtype
    live = inputs.mask != 0
    return Batch(
        inputs=inputs,
        who=who,
        xp=xp,
        dtype=dtype,
        live=live,
        mask=xp.asarray(inputs.mask, dtype=dtype),
        advantages=xp.where(live, xp.asarray(advantages, dtype=dtype), 0.0),
    )


def by_token(advantages: Array) -> Array:
    """[B] to [B,1]; [B,T] stays."""
    return advantages[:, None] if len(advantages.shape) == 1 else advantages


def has_negative(inputs: LossInputs) -> bool:
    """Return whether a loss token has a negative advantage; there single clips leave the ratio free upwards."""
    return bool(((inputs.mask != 0) & (by_token(inputs.advantages) < 0)).any())


def need(batch: Batch, name: str, *, why: str) -> Array:
    """Return an array of the inputs as it is, or say what asks for it."""
    array = getattr(batch.inputs, name)
    if array is None:
        raise UsageError(f"{batch.who}: {why} needs {name}, which is None; pass LossInputs({name}=...)")
    return array


def read(batch: Batch, name: str, *, why: str, fill: float = 0.0) -> Array:
    """Return an array of the inputs as [B,T] in the batch's dtype, `fill` where masked."""
    array = batch.xp.asarray(need(batch, name, why=why), dtype=batch.dtype)
    return batch.xp.where(batch.live, array, fill)


def log_ratio(batch: Batch) -> Array:
    """Return log r[B,T] = logps - old_logps; zero where masked, and everywhere on-policy (old = logps.detach())."""
    if batch.inputs.old_logps is None:
        return batch.mask * 0.0
    return read(batch, "logps", why="old_logps (a ratio)") - read(batch, "old_logps", why="the ratio")


def counts(batch: Batch) -> Array:
    """Return n[B,1], loss tokens per row, at least 1."""
    return batch.xp.clip(batch.mask.sum(1)[:, None], 1.0, None)


def row_mean(batch: Batch, per_token: Array) -> Array:
    """Return [B,1], the mean over a row's loss tokens."""
    return (per_token * batch.mask).sum(1)[:, None] / counts(batch)


def spread(batch: Batch, per_token: Array) -> Array:
    """Return m/n * sum_t x[b,t]: the chain rule through a sequence-level ratio exp(mean_t log r)."""
    return batch.mask / counts(batch) * per_token.sum(1)[:, None]


def by_sign(positive: Array, first: float, second: float, *, like: Array, xp: ModuleType) -> Array:
    """`where` of two constants in the dtype of `like` (torch.where of two floats is always float32)."""
    return xp.where(positive, xp.full_like(like, first), xp.full_like(like, second))


def clipped_slope(
    ratio: Array,
    advantages: Array,
    *,
    low: float,
    high: float,
    delta: float | None = None,
    dual: float | None = None,
    xp: ModuleType,
) -> Array:
    """Return dl/dlog r of l = -min(min(r, delta) A, clip(r, 1-low, 1+high) A), floored at dual A where A < 0.

    -A r I with torch's rules: clamp passes at its ends, and a tie of min or max gives each side one half.
    `ratio` [B,T] or [B,1]. PPO eq. 7 (1707.06347), dual clip eq. 5 (1912.09729); delta is TRL's, from INTELLECT-2.
    """
    capped = ratio if delta is None else xp.clip(ratio, None, delta)
    clipped = xp.clip(ratio, 1 - low, 1 + high)
    first, second = capped * advantages, clipped * advantages
    first_passes = xp.asarray(capped == ratio, dtype=ratio.dtype)
    second_passes = xp.asarray(clipped == ratio, dtype=ratio.dtype)
    tie = (first_passes + second_passes) * 0.5
    live = xp.where(first < second, first_passes, xp.where(first > second, second_passes, tie))
    if dual is not None:
        least, floor = xp.minimum(first, second), dual * advantages
        floored = (advantages < 0) & (least < floor)
        even = (advantages < 0) & (least == floor)
        live = xp.where(floored, live * 0.0, xp.where(even, live * 0.5, live))
    return xp.where((live != 0) & (advantages != 0), -advantages * ratio * live, 0.0)


def clipped_ceiling(
    advantages: Array, *, high: float, delta: float | None = None, dual: float | None = None, xp: ModuleType
) -> Array:
    """Return max over r of |clipped_slope|; infinite where A < 0 and neither delta nor dual ends the ratio."""
    up = 1 + high if delta is None else min(delta, 1 + high)
    down = math.inf if delta is None else max(delta, 1 + high)
    down = down if dual is None else min(down, dual)
    negative = -advantages * down if down < math.inf else xp.full_like(advantages, math.inf)
    return xp.where(advantages > 0, advantages * up, xp.where(advantages < 0, negative, 0.0))


def soft_slope(ratio: Array, advantages: Array, *, positive: float, negative: float, xp: ModuleType) -> Array:
    """Return dl/dlog r of SAPO's l = -A sigmoid(tau (r-1)) 4/tau: -A r 4 q (1-q); tau by A > 0 (2511.20347)."""
    tau = by_sign(advantages > 0, positive, negative, like=advantages, xp=xp)
    decay = xp.exp(-xp.abs(tau * (ratio - 1.0)))
    gate = 4.0 * decay / (1.0 + decay) ** 2  # 4 q (1-q), without overflow
    return xp.where(gate > 0, -advantages * ratio * gate, 0.0)


def soft_ceiling(advantages: Array, *, positive: float, negative: float, xp: ModuleType) -> Array:
    """Return max over r of |soft_slope|."""
    most = by_sign(advantages > 0, soft_peak(positive), soft_peak(negative), like=advantages, xp=xp)
    return xp.abs(advantages) * most


def soft_peak(tau: float) -> float:
    """Return max over r >= 0 of r / cosh(tau (r-1)/2)^2; its place solves tau r tanh(tau (r-1)/2) = 1, r > 1."""
    place = bisect(lambda r: tau * r * math.tanh(tau * (r - 1) / 2) - 1, 1.0, 2.0 + 2.0 / tau)
    return place / math.cosh(tau * (place - 1) / 2) ** 2 * ROUNDING


def kl_slope(gap: Array, kind: str, *, value_limit: float = math.inf, xp: ModuleType) -> Array:
    """Return dKL/dlogp of an estimator of KL(pi || ref), gap = logps - ref_logps (joschu.net/blog/kl-approx.html).

    k1 gap: 1. abs |gap|: sign. k2 gap^2/2: gap. k3 exp(-gap) + gap - 1: 1 - exp(-gap). Zero where the trainer's clamp
    of the value to +-value_limit is active.
    """
    if kind == "k1":
        value, slope = gap, gap * 0.0 + 1.0
    elif kind == "abs":
        value, slope = xp.abs(gap), xp.sign(gap)
    elif kind == "k2":
        value, slope = 0.5 * gap**2, gap
    else:
        value, slope = xp.expm1(-gap) + gap, -xp.expm1(-gap)
    return xp.where(xp.abs(value) <= value_limit, slope, 0.0)


def kl_slope_ceiling(kind: str, *, value_limit: float = math.inf) -> float:
    """Return max |kl_slope|: 1 for k1 and abs; for k2 and k3 finite only where the trainer clamps the value."""
    if kind in ("k1", "abs"):
        return 1.0
    if value_limit == math.inf:
        return math.inf
    if kind == "k2":
        return math.sqrt(2 * value_limit) * ROUNDING
    return math.expm1(bisect(lambda e: math.expm1(e) - e - value_limit, 0.0, 1.0 + value_limit)) * ROUNDING


def bisect(rising: Any, low: float, high: float) -> float:
    """Return the zero of a rising function between low and high, to the last bit or so."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return 0.5 * (low + high)


def check_settings(loss: Any) -> None:
    """Refuse settings of the wrong type, NaN and infinity; the annotations of the dataclass are the rule."""
    for field in fields(loss):
        value, allowed = getattr(loss, field.name), str(field.type).split(" | ")
        if value is None and "None" in allowed:
            continue
        numbers = value if allowed[0] == "tuple[float, float]" and isinstance(value, tuple) else (value,)
        kinds = {"str": (str,), "bool": (bool,), "int": (int,)}.get(allowed[0], (int, float))
        right = all(isinstance(n, kinds) and (isinstance(n, bool) == (allowed[0] == "bool")) for n in numbers)
        if not right or (allowed[0].startswith("tuple") and (numbers is not value or len(value) != 2)):
            raise UsageError(f"{loss.trainer} loss: {field.name}={value!r} is not {field.type}; correct the value")
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            raise UsageError(
                f"{loss.trainer} loss: {field.name}={value!r} is not finite; pass a number, or leave it out"
            )


def check_known(loss: Any, name: str, known: tuple[str, ...]) -> None:
    value = getattr(loss, name)
    if value not in known:
        raise UsageError(f"{loss.trainer} loss: {name}={value!r} is unknown; use one of {', '.join(known)}")


def check_at_least(loss: Any, least: float, *names: str, strictly: bool = False) -> None:
    """Refuse a number below `least` (or equal to it, `strictly`); None passes."""
    for name in names:
        value = getattr(loss, name)
        if value is not None and (value < least or (strictly and value == least)):
            raise UsageError(
                f"{loss.trainer} loss: {name}={value} is too small; pass {'>' if strictly else '>='} {least}"
            )
