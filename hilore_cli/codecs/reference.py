"""The codecs in plain torch. This file IS the specification; every other path agrees with it, bit for bit where stated.

A codec cuts a tensor, in storage order, into groups of `group` elements and stores each as one row of bytes; a payload is the rows, end to end:

    int8    codes: group bytes          scale: fp32, 4 bytes    low: fp32, 4 bytes      (native byte order)
    int4    codes: group / 2 bytes      scale: fp16, 2 bytes    low: fp16, 2 bytes      element 2i in the low half of byte i

The last group, if short, is filled with copies of its last element, so `payload_bytes` depends on the number of elements only.
The layout and the arithmetic are those of torch's row-wise embedding quantizers, the one CPU kernel that ships with torch and is fast.

    int8    span = high - low; scale = span / 255; code = rint((x - low) * (255 / (span + 1e-8)))              x' = fma(code, scale, low)
    int4    low = fp16(low); scale = fp16((high - low) / 15), 1 if that is 0; code = rint((x - low) / scale)   x' = fma(code, scale, low)

(int4 multiplies by fl(1 / scale); codes saturate at 0 and 2^bits - 1; all in fp32, halves to even; x' is then rounded to the tensor's dtype.)

* A group of zeros, or of any constant that the metadata holds (int8: every finite one), comes back exactly.
* A group holding NaN or inf, or whose span (int8: 3.4e38) or low or scale (int4: 65504) overflows, comes back NaN as a whole; its neighbours are untouched.
* The sign of a zero is not kept (x' is then +0 or -0), nor is the sign of a zero `low` or `scale` in the payload specified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT8_EPSILON = 1e-8  # added to the span before its reciprocal is taken: absolute, so groups of a span near it feel it
FP16_MAX = 65504.0
# bits of the significand, smallest positive number
_FORMATS = {torch.float32: (24, 2.0**-149), torch.bfloat16: (8, 2.0**-133), torch.float16: (11, 2.0**-24)}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One way to store a tensor: `bits` a code, `group` elements that share a scale and a low."""

    name: str
    bits: int
    group: int

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one group."""
        return self.group * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Bytes of one group: codes, scale, low."""
        return self.code_bytes + (8 if self.bits == 8 else 4)

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2**self.bits - 1


def payload_bytes(codec: Codec, numel: int) -> int:
    """The exact length of a payload. `numel` may be a SymInt: nothing is guarded, the answer is an expression."""
    return (numel + codec.group - 1) // codec.group * codec.row_bytes


def compress(flat: Tensor, codec: Codec) -> Tensor:
    """`flat` [numel], contiguous, one of DTYPES -> uint8 [payload_bytes]."""
    rows = pad_to_groups(flat, codec).float().view(-1, codec.group)
    if not rows.numel():
        return flat.new_empty(0, dtype=torch.uint8)
    encode = _encode_int8 if codec.bits == 8 else _encode_int4
    return encode(rows).view(-1)


def decompress(payload: Tensor, codec: Codec, *, dtype: torch.dtype, numel: int) -> Tensor:
    """uint8 [payload_bytes] -> [numel] of `dtype`, contiguous."""
    rows = payload.view(-1, codec.row_bytes)
    if codec.bits == 8:
        codes, meta = rows[:, : codec.group], rows[:, codec.group :].contiguous().view(torch.float32)
    else:
        packed = rows[:, : codec.code_bytes]
        codes = torch.stack((packed & 15, packed >> 4), dim=2).view(-1, codec.group)
        meta = rows[:, codec.code_bytes :].contiguous().view(torch.float16).float()
    values = _fma(codes.float(), meta[:, :1], meta[:, 1:])
    return clamp_overshoot(values, codec, dtype).to(dtype).view(-1)[:numel]


def clamp_overshoot(values: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """int4's rounded scale can overshoot the largest fp16 by 0.05 %: that is to become the largest fp16, not inf."""
    overshoots = dtype == torch.float16 and codec.bits == 4
    return values.clamp(-FP16_MAX, FP16_MAX) if overshoots else values


def pad_to_groups(flat: Tensor, codec: Codec) -> Tensor:
    """Fill the last group with its own last element, which leaves its range alone."""
    missing = -flat.numel() % codec.group
    return torch.cat((flat, flat[-1:].expand(missing))) if missing else flat


def nan_row(codec: Codec, device: torch.device) -> Tensor:
    """The row of a group that holds a NaN: codes 0, scale and low NaN."""
    meta = torch.full((2,), torch.nan, dtype=torch.float32 if codec.bits == 8 else torch.float16, device=device)
    return torch.cat((torch.zeros(codec.code_bytes, dtype=torch.uint8, device=device), meta.view(torch.uint8)))


def error_bound(codec: Codec, low: Tensor, high: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The largest |x - x'| that a group with this range can show, float64, for finite groups that do not overflow.

    Half a step; what the metadata's own rounding adds; what fp32 arithmetic adds; half a unit in the last place of `dtype`.
    """
    low, high = low.double(), high.double()
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
    arithmetic = 2.0**-21 * span + 2.0**-23 * top + 2.0**-140
    bound = half_step + metadata + arithmetic
    mantissa_bits, least = _FORMATS[dtype]
    return bound + (top + bound) * 2.0**-mantissa_bits + least / 2


def _encode_int8(rows: Tensor) -> Tensor:
    """[groups, group] fp32 -> [groups, row_bytes] uint8."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    span = high - low
    levels = span.new_full((), 255.0)  # a tensor: torch may turn a division by, or of, a number into a product
    scale = span / levels
    codes = _codes(rows, low, levels / (span + INT8_EPSILON), 255)
    meta = torch.cat((scale, low), dim=1)
    return torch.cat((codes, _one_nan(meta).view(torch.uint8)), dim=1)


def _encode_int4(rows: Tensor) -> Tensor:
    """[groups, group] fp32 -> [groups, row_bytes] uint8."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    low_fp16 = low.half()
    low = low_fp16.float()
    span = high - low
    scale = (span / span.new_full((), 15.0)).half()
    scale = torch.where((scale == 0) | (span == 0), 1.0, scale)
    codes = _codes(rows, low, scale.float().reciprocal(), 15)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    meta = torch.cat((scale, low_fp16), dim=1)
    return torch.cat((packed, _one_nan(meta).view(torch.uint8)), dim=1)


def _codes(rows: Tensor, low: Tensor, inverse: Tensor, levels: int) -> Tensor:
    """Round half to even, saturate; where the group is not finite the code is 0."""
    return ((rows - low) * inverse).nan_to_num(nan=0.0).round().clamp(0, levels).to(torch.uint8)


def _one_nan(meta: Tensor) -> Tensor:
    """Every NaN in the metadata gets the same bits."""
    return torch.where(meta.isnan(), torch.nan, meta)


def _fma(code: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """code * scale + low in fp32 with ONE rounding, as the vector units do it; torch has no such op.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008), so that the second rounding, to fp32, is the only one that counts.
    """
    product, low = code.double() * scale.double(), low.double()
    total = product + low
    shadow = total - product
    lost = (product - (total - shadow)) + (low - shadow)  # Knuth's two-sum: total + lost is the exact sum
    bits = total.view(torch.int64)
    toward = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact_even = lost.isfinite() & (lost != 0) & (bits & 1 == 0)
    return torch.where(inexact_even, bits + toward, bits).view(torch.float64).float()
