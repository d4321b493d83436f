"""How far off a restored value can be, at worst. Derived from the formats, not from what was measured; tests/test_codecs.py tries to break it."""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_cli.codecs.formats import LEAST, Bf16Codec, Codec, GroupedCodec, MaskCodec, RowwiseCodec
from hilore_cli.codecs.rowwise import INT8_EPSILON

# bits of the significand, smallest positive number
_FORMATS = {torch.float32: (24, 2.0**-149), torch.bfloat16: (8, 2.0**-133), torch.float16: (11, 2.0**-24)}


def error_bound(codec: Codec, flat: Tensor) -> Tensor:
    """The largest |x - x'| that each element of `flat` [numel] can show, float64 [numel].

    Holds for groups that are finite and, asymmetric, whose range from the stored low on is below 2^127, so that the low is finite in bf16 (fbgemm-int8: does not overflow; fbgemm-int4: whose values fp16 can hold).
    """
    if isinstance(codec, MaskCodec):
        return torch.zeros(flat.numel(), dtype=torch.float64)
    if isinstance(codec, Bf16Codec):
        return flat.double().abs() * 2.0**-8 * (2 if codec.stochastic else 1) + 2.0**-133
    missing = -flat.numel() % codec.group
    rows = torch.cat((flat, flat[-1:].expand(missing))).double().view(-1, codec.group)
    bound = _rowwise_bound(codec, rows) if isinstance(codec, RowwiseCodec) else _grouped_bound(codec, rows)
    mantissa_bits, least = _FORMATS[flat.dtype]
    bound = bound + (rows.abs() + bound) * 2.0**-mantissa_bits + least / 2  # rounding to the dtype
    return bound.view(-1)[: flat.numel()]


def _grouped_bound(codec: GroupedCodec, rows: Tensor) -> Tensor:
    """[groups, group]. With a the group's largest magnitude (asymmetric: its range, from the stored low on), the scale is at most s = a / top (1 + u),
    u = 2^-7 (fp32: 2^-20), and what is rounded is off by at most

        int     s / 2                           half a step
        e4m3    max(|x| 2^-4, s 2^-10)          half a unit in the last place of 3 bits of mantissa, or of the least subnormal

    twice that if stochastic; then what fp32 arithmetic adds (two products, the scale's reciprocal and, asymmetric, two sums) and `LEAST`, for groups of scale 0.
    """
    top = rows.abs().amax(1, keepdim=True)
    reach = top
    if codec.asymmetric:
        low = rows.amin(1, keepdim=True)
        reach = rows.amax(1, keepdim=True) - low + (0 if codec.wide else low.abs() * 2.0**-7 + 2.0**-133)
    step = reach / codec.top * (1 + (2.0**-20 if codec.wide else 2.0**-7 + 2.0**-20))
    half = torch.maximum(rows.abs() * 2.0**-4, step * 2.0**-10) if codec.kind == "e4m3" else step / 2
    return half * (2 if codec.stochastic else 1) + (reach + top) * 2.0**-21 + LEAST


def _rowwise_bound(codec: RowwiseCodec, rows: Tensor) -> Tensor:
    """[groups, 1]. Half a step; what the metadata's own rounding adds; what fp32 arithmetic adds."""
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    span, top = high - low, torch.maximum(low.abs(), high.abs())
    if codec.bits == 8:
        half_step = span / (2 * codec.levels)
        metadata = INT8_EPSILON * span / (span + INT8_EPSILON)
    else:
        low_error = low.abs() * 2.0**-11 + 2.0**-25
        span = span + low_error
        scale_error = span / codec.levels * 2.0**-11 + 2.0**-25
        half_step = (span / codec.levels + scale_error) / 2
        metadata = low_error + codec.levels * scale_error
    return half_step + metadata + 2.0**-21 * span + 2.0**-23 * top + 2.0**-140
