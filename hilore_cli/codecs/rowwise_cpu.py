"""fbgemm-int8 and fbgemm-int4 on the CPU, through the row-wise embedding quantizers that every torch build carries (FBGEMM; AVX2 and FMA on x86).

Equal to `rowwise.py` bit for bit on finite input, payload and values, up to the sign of zeros (tests/test_codecs.py).
Those kernels drop NaN when they take the minimum, and the other codes of that group are then garbage; a sum over the input, which any NaN reaches,
finds that out at about six times the kernel's own speed. Infinities need no help: they make the scale infinite, and the group NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hilore_cli.codecs.formats import RowwiseCodec
from hilore_cli.codecs.rowwise import clamp_overshoot, nan_row, pad_to_groups

# Elements converted to or from fp32 at a time (a multiple of every group): 4 MiB of it stay in the cache and hardly show in the peak.
# bf16 int8, 1 thread, 16 M elements, GB/s of fp32 (in; out): 128 Ki 5.8; 11.0, 1 Mi 6.6; 14.6, all at once 5.4; 9.6.
CHUNK_NUMEL = 2**20

_prepack8 = torch.ops.quantized.embedding_bag_byte_prepack.default
_prepack4 = torch.ops.quantized.embedding_bag_4bit_prepack.default
_unpack8 = torch.ops.quantized.embedding_bag_byte_unpack.default
_unpack4 = torch.ops.quantized.embedding_bag_4bit_unpack.default


def compress(flat: Tensor, codec: RowwiseCodec) -> Tensor:
    """As `rowwise.compress`."""
    numel = flat.numel()
    if numel <= CHUNK_NUMEL or (flat.dtype == torch.float32 and numel % codec.group == 0):
        return _encode(pad_to_groups(flat.float(), codec), codec).view(-1)
    payload = flat.new_empty(codec.payload_bytes(numel), dtype=torch.uint8)
    rows = payload.view(-1, codec.row_bytes)
    for start in range(0, numel, CHUNK_NUMEL):
        part = pad_to_groups(flat[start : start + CHUNK_NUMEL].float(), codec)
        row = start // codec.group
        rows[row : row + part.numel() // codec.group] = _encode(part, codec)
    return payload


def decompress(payload: Tensor, codec: RowwiseCodec, *, dtype: torch.dtype, numel: int) -> Tensor:
    """As `rowwise.decompress`; in fp32 the storage of the result may extend over the filling of the last group."""
    unpack = _unpack8 if codec.bits == 8 else _unpack4
    rows = payload.view(-1, codec.row_bytes)
    if dtype == torch.float32:
        return unpack(rows).view(-1)[:numel]
    flat = payload.new_empty(numel, dtype=dtype)
    step = CHUNK_NUMEL // codec.group
    for row in range(0, rows.shape[0], step):
        target = flat[row * codec.group : (row + step) * codec.group]
        values = unpack(rows[row : row + step]).view(-1)[: target.numel()]
        target.copy_(clamp_overshoot(values, codec, dtype))  # rounds to dtype on the way
    return flat


def _encode(flat: Tensor, codec: RowwiseCodec) -> Tensor:
    """fp32 [groups * group] -> uint8 [groups, row_bytes]."""
    rows = flat.view(flat.numel() // codec.group, codec.group)
    packed = _prepack8(rows) if codec.bits == 8 else _prepack4(rows)
    if not math.isfinite(flat.sum().item()):  # NaN for certain, or an infinity, or a sum that overflows
        packed[rows.isnan().any(dim=1)] = nan_row(codec, flat.device)
    return packed
