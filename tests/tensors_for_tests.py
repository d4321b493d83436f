"""Tensors that look like activations, and those that break quantizers; what a codec owes them."""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_cli.codecs.formats import GroupedCodec, RowwiseCodec
from hilore_cli.codecs.reference import LIMIT

FP32_MAX = torch.finfo(torch.float32).max
FP16_MAX = torch.finfo(torch.float16).max
BF16_MAX = torch.finfo(torch.bfloat16).max


def sample_tensors(numel: int) -> dict[str, Tensor]:
    """Finite fp32 tensors [numel] of many kinds."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exponents = normal.roll(1).mul(4).clamp(-30, 30)
    outliers = normal.clone()
    outliers[::7] *= 1e4
    lonely = normal.clone()
    lonely[5::128] = 1e30
    return {
        "normal": normal,
        "bf16_ties": (normal.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32),
        "relu": normal.relu(),
        "minus_zero": -normal.relu(),
        "zeros": torch.zeros(numel),
        "constant": torch.full((numel,), 3.3),
        "outliers": outliers,
        "huge_outlier": lonely,
        "heavy_tail": normal**9,
        "all_scales": normal * 10**exponents,
        "denormal": normal * 1e-40,
        "near_epsilon": normal * 1e-8,
        "tiny": normal * 1e-30,
        "near_least": normal * 2.0**-100,
        "offset": 1000 + 0.1 * normal,
        "far_offset": -3e4 + normal,
        "huge": normal * 2e37,
        "near_limit": (normal * 1e38).clamp(-8e37, 8e37),
        "positive_near_max": (FP32_MAX - normal.abs() * 1e37).clamp(max=FP32_MAX),
        "negative_near_max": (normal.abs() * 1e37 - FP32_MAX).clamp(min=-FP32_MAX),
        "near_max": (normal * 1e39).clamp(-FP32_MAX, FP32_MAX),
    }


def non_finite_tensors(numel: int) -> dict[str, Tensor]:
    """fp32 [numel] with NaN and inf among ordinary numbers, and NaN of every sign and payload."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    rare = normal.clone()
    rare[97::997] = torch.nan
    rare[5::601] = torch.inf
    rare[6::811] = -torch.inf
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(1)).int()
    return {"rare": rare, "any_bits": bits.view(torch.float32), "nan_bits": (bits | 0x7F800000).view(torch.float32)}


def pool_tensors(samples: dict[str, Tensor], *, dtype: torch.dtype, numel: int) -> Tensor:
    """An equal share of each sample, end to end: [numel] of `dtype`, what is finite clamped to its range."""
    share = -(-numel // len(samples))
    pooled = torch.cat([sample[:share] for sample in samples.values()])[:numel]
    largest = torch.finfo(dtype).max
    return torch.where(pooled.isfinite(), pooled.clamp(-largest, largest), pooled).to(dtype)


def pooled_everything(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of all that there is above."""
    return pool_tensors(sample_tensors(numel) | non_finite_tensors(numel), dtype=dtype, numel=numel)


def restorable(codec: object, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Of each element of a finite `flat` [numel]: whether its group has to come back finite, and whether it may (it has to be NaN if not)."""
    yes = torch.ones(flat.numel(), dtype=torch.bool)
    if not isinstance(codec, RowwiseCodec) and not (isinstance(codec, GroupedCodec) and codec.asymmetric):
        return yes, yes
    rows = torch.cat((flat, flat[-1:].expand(-flat.numel() % codec.group))).double().view(-1, codec.group)
    low, high = rows.amin(1), rows.amax(1)
    reach, top = high - low, torch.maximum(-low, high)
    if isinstance(codec, GroupedCodec):
        stored = low >= (-FP32_MAX if codec.wide else -BF16_MAX)  # rounded down to bf16 the low is still finite
        has_to, may = stored & (reach + low.abs() * 2.0**-7 < LIMIT * (1 - 2.0**-20)), stored & (reach < LIMIT)
    elif codec.bits == 8:
        has_to, may = (reach < FP32_MAX) & (top < FP32_MAX * (1 - 2.0**-20)), reach < FP32_MAX * (1 + 2.0**-20)
    else:
        has_to, may = top <= FP16_MAX, (low > -FP16_MAX * 1.001) & (reach < 15.1 * FP16_MAX)
    return tuple(judged[:, None].expand(-1, codec.group).reshape(-1)[: flat.numel()] for judged in (has_to, may))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, the sign of zeros included; NaN is NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.dtype.itemsize]
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.is_floating_point:
        if not torch.equal(one.isnan(), other.isnan()):
            return False
        one, other = (torch.where(values.isnan(), 0, values) for values in (one, other))
    return torch.equal(one.view(integers), other.view(integers))
