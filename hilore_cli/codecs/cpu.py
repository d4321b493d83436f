"""The codecs on the CPU: `reference.py`, in parts that stay in the cache, and torch's own cast where it is the same.

The parts are as large as those of `rowwise_cpu.py`: smaller ones stay in the L2 cache, but two dozen small operations a part cost more than that gains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilore_cli.codecs import reference
from hilore_cli.codecs.formats import Bf16Codec, Codec

CHUNK_NUMEL = 2**20
"""Elements at a time (a multiple of every group)."""
BF16_MAX = torch.finfo(torch.bfloat16).max


def compress(flat: Tensor, codec: Codec, *, seed: int = 0, stream: int = 0) -> Tensor:
    """As `reference.compress`."""
    numel = flat.numel()
    payload = flat.new_empty(codec.payload_bytes(numel), dtype=torch.uint8)
    for start in range(0, numel, CHUNK_NUMEL):
        part = flat[start : start + CHUNK_NUMEL]
        if isinstance(codec, Bf16Codec) and not codec.stochastic and part.amin() >= -BF16_MAX and part.amax() <= BF16_MAX:
            payload.view(torch.bfloat16)[start : start + part.numel()] = part
        else:
            reference.compress_into(payload, part, codec, start=start, numel=numel, seed=seed, stream=stream)
    return payload


def decompress(payload: Tensor, codec: Codec, *, dtype: torch.dtype, numel: int) -> Tensor:
    """As `reference.decompress`."""
    flat = payload.new_empty(numel, dtype=dtype)
    for start in range(0, numel, CHUNK_NUMEL):
        reference.decompress_into(flat[start : start + CHUNK_NUMEL], payload, codec, start=start, numel=numel)
    return flat
