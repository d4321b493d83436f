"""fbgemm-int8 and fbgemm-int4 in plain torch: the specification of the CPU's own codecs, which `rowwise_cpu.py` agrees with bit for bit.

Such a codec cuts a tensor, in storage order, into groups of `group` elements and stores each as one row of bytes; a payload is the rows, end to end:

    8 bits  codes: group bytes          scale: fp32, 4 bytes    low: fp32, 4 bytes      (native byte order)
    4 bits  codes: group / 2 bytes      scale: fp16, 2 bytes    low: fp16, 2 bytes      element 2i in the low half of byte i

The last group, if short, is filled with copies of its last element, so `payload_bytes` depends on the number of elements only.
The layout and the arithmetic are those of torch's row-wise embedding quantizers, the one CPU kernel that ships with torch and is fast.

    8 bits  span = high - low; scale = span / 255; code = rint((x - low) * (255 / (span + 1e-8)))              x' = fma(code, scale, low)
    4 bits  low = fp16(low); scale = fp16((high - low) / 15), 1 if that is 0; code = rint((x - low) / scale)   x' = fma(code, scale, low)

(4 bits multiply by fl(1 / scale); codes saturate at 0 and 2^bits - 1; all in fp32, halves to even; x' is then rounded to the tensor's dtype.)

* A group of zeros, or of any constant that the metadata holds (8 bits: every finite one), comes back exactly.
* A group holding NaN or inf, or whose span (8 bits: 3.4e38) or low or scale (4 bits: 65504) overflows, comes back NaN as a whole; its neighbours are untouched.
* The sign of a zero is not kept (x' is then +0 or -0), nor is the sign of a zero `low` or `scale` in the payload specified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_cli.codecs.formats import RowwiseCodec

INT8_EPSILON = 1e-8  # added to the span before its reciprocal is taken: absolute, so groups of a span near it feel it
FP16_MAX = 65504.0


def compress(flat: Tensor, codec: RowwiseCodec) -> Tensor:
    """`flat` [numel], contiguous, of a dtype that the codec takes -> uint8 [payload_bytes]."""
    rows = pad_to_groups(flat, codec).float().view(-1, codec.group)
    if not rows.numel():
        return flat.new_empty(0, dtype=torch.uint8)
    encode = _encode_int8 if codec.bits == 8 else _encode_int4
    return encode(rows).view(-1)


def decompress(payload: Tensor, codec: RowwiseCodec, *, dtype: torch.dtype, numel: int) -> Tensor:
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


def clamp_overshoot(values: Tensor, codec: RowwiseCodec, dtype: torch.dtype) -> Tensor:
    """int4's rounded scale can overshoot the largest fp16 by 0.05 %: that is to become the largest fp16, not inf."""
    overshoots = dtype == torch.float16 and codec.bits == 4
    return values.clamp(-FP16_MAX, FP16_MAX) if overshoots else values


def pad_to_groups(flat: Tensor, codec: RowwiseCodec) -> Tensor:
    """Fill the last group with its own last element, which leaves its range alone."""
    missing = -flat.numel() % codec.group
    return torch.cat((flat, flat[-1:].expand(missing))) if missing else flat


def nan_row(codec: RowwiseCodec, device: torch.device) -> Tensor:
    """The row of a group that holds a NaN: codes 0, scale and low NaN."""
    meta = torch.full((2,), torch.nan, dtype=torch.float32 if codec.bits == 8 else torch.float16, device=device)
    return torch.cat((torch.zeros(codec.code_bytes, dtype=torch.uint8, device=device), meta.view(torch.uint8)))


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
