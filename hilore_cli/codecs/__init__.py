"""Lossy storage of activations: named codecs, and the two ops that the runtime puts into its graphs.

    hilore::compress(Tensor x, str codec, SymInt[]? stride=None) -> Tensor
    hilore::decompress(Tensor payload, str codec, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor

A payload is one flat uint8 tensor whose length is `payload_bytes(codec, x.numel())`, also on fake tensors with symbolic sizes. Groups run over x in
STORAGE order, so a permuted tensor costs no copy, and the strides given to decompress must be those that x had; give them to compress as well and it
refuses another layout, which would else come back permuted, silently. `reference.py` says what is stored and how well it comes back.

Not done here: gradients (the ops run below autograd), any choice of what to compress, a kernel for GPUs (the reference runs there, slowly).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilore_cli.codecs import cpu, reference
from hilore_cli.codecs.reference import DTYPES, Codec, error_bound, payload_bytes
from hilore_cli.errors import CodecError, UsageError

__all__ = [
    "CODECS",
    "Codec",
    "compress",
    "compressible",
    "decompress",
    "error_bound",
    "get_codec",
    "payload_bytes",
    "round_trip",
]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(name="int8", bits=8, group=32),
        Codec(name="int8-g64", bits=8, group=64),
        Codec(name="int8-g128", bits=8, group=128),
        Codec(name="int4", bits=4, group=32),
        Codec(name="int4-g64", bits=4, group=64),
        Codec(name="int4-g128", bits=4, group=128),
    )
}
MIN_NUMEL = 32  # the smallest group: below it the payload may be no smaller than the tensor


def get_codec(name: str) -> Codec:
    """The codec of that name, or UsageError with the names there are."""
    if name not in CODECS:
        raise UsageError(f"codec {name!r} does not exist; choose one of {', '.join(CODECS)}")
    return CODECS[name]


def compressible(tensor: Tensor) -> bool:
    """Whether a real or fake tensor can be compressed to advantage. Guards nothing: an unknown symbolic size counts as large enough."""
    numel = tensor.numel()
    too_small = isinstance(numel, int) and numel < MIN_NUMEL
    return tensor.dtype in DTYPES and tensor.layout == torch.strided and not too_small and not _is_expanded(tensor)


def compress(x: Tensor, codec: Codec | str) -> Tensor:
    """x -> uint8 [payload_bytes]. CodecError for other dtypes and for overlapping (expanded) tensors, whose payload could exceed what it replaces."""
    return torch.ops.hilore.compress.default(x.detach(), _name(codec))


def decompress(
    payload: Tensor, codec: Codec | str, *, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The tensor that was compressed: same dtype, size, strides, device; values as `reference.py` says."""
    return torch.ops.hilore.decompress.default(payload, _name(codec), dtype, size, stride)


def round_trip(x: Tensor, codec: Codec | str) -> Tensor:
    """What backward would read instead of x."""
    return decompress(compress(x, codec), codec, dtype=x.dtype, size=x.size(), stride=x.stride())


def _name(codec: Codec | str) -> str:
    return get_codec(codec if isinstance(codec, str) else codec.name).name


def _backend(device: torch.device):
    """The one place where a device chooses its kernels."""
    return cpu if device.type == "cpu" else reference


def _compress(x: Tensor, codec: str, stride: Sequence[int] | None = None) -> Tensor:
    spec = get_codec(codec)
    _check_input(x)
    if stride is not None and not _same_layout(x, stride):
        raise CodecError(f"compress was promised strides {tuple(stride)}, got {x.stride()} of shape {tuple(x.shape)}")
    return _backend(x.device).compress(_storage_order(x), spec)


def _decompress(payload: Tensor, codec: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    spec = get_codec(codec)
    numel = 1
    for length in size:
        numel *= length
    wanted = payload_bytes(spec, numel)
    if payload.dtype != torch.uint8 or payload.shape != (wanted,) or dtype not in DTYPES:
        got = f"{payload.dtype} of shape {tuple(payload.shape)}"
        raise CodecError(f"{codec} stores {dtype} {tuple(size)} in {wanted} bytes (float types only), got {got}")
    if numel == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device=payload.device)
    flat = _backend(payload.device).decompress(payload.contiguous(), spec, dtype=dtype, numel=numel)
    if _is_dense(size, stride):
        return flat.as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=dtype, device=payload.device).copy_(flat.view(size))


def _fake_compress(x: Tensor, codec: str, stride: Sequence[int] | None = None) -> Tensor:
    spec = get_codec(codec)
    if x.dtype not in DTYPES or _is_expanded(x):
        raise CodecError(_refusal(x))
    return x.new_empty((payload_bytes(spec, x.numel()),), dtype=torch.uint8)


def _fake_decompress(
    payload: Tensor, codec: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    get_codec(codec)
    return torch.empty_strided(size, stride, dtype=dtype, device=payload.device)


def _check_input(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise CodecError(_refusal(x))
    if not x.is_contiguous():
        last = sum((length - 1) * step for length, step in zip(x.shape, x.stride(), strict=True))
        if x.numel() > last + 1:
            raise CodecError(_refusal(x))


def _refusal(x: Tensor) -> str:
    wanted = "float32, bfloat16 and float16 tensors whose elements do not overlap in memory"
    return f"codecs take {wanted}, got {x.dtype} of shape {tuple(x.shape)} with strides {tuple(x.stride())}: store it, or compress its base"


def _storage_order(x: Tensor) -> Tensor:
    """[numel] in the order of memory: a view if x is dense, whatever its permutation; else a contiguous copy."""
    if x.is_contiguous():
        return x.view(-1)
    if _is_dense(x.shape, x.stride()):
        return x.as_strided((x.numel(),), (1,))
    return x.reshape(-1)


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """No holes and no overlaps: sorted by stride, each dimension steps over exactly the ones before it. Dimensions of one element have no say."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def _is_expanded(x: Tensor) -> bool:
    """A stride known to be 0 on a dimension not known to be 1. Only concrete numbers are looked at: nothing is guarded."""
    return any(
        isinstance(step, int) and step == 0 and not (isinstance(length, int) and length <= 1)
        for length, step in zip(x.shape, x.stride(), strict=True)
    )


def _same_layout(x: Tensor, stride: Sequence[int]) -> bool:
    if x.numel() == 0 or x.stride() == tuple(stride):
        return True
    return all(length == 1 or have == want for length, have, want in zip(x.shape, x.stride(), stride, strict=True))


def _register() -> torch.library.Library:
    """Plain registration: `torch.library.custom_op` costs tens of microseconds more a call."""
    library = torch.library.Library("hilore", "DEF")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define("compress(Tensor x, str codec, SymInt[]? stride=None) -> Tensor", tags=tags)
    library.define(
        "decompress(Tensor payload, str codec, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor", tags=tags
    )
    library.impl("compress", _compress, "CompositeExplicitAutograd")
    library.impl("decompress", _decompress, "CompositeExplicitAutograd")
    torch.library.register_fake("hilore::compress", _fake_compress, lib=library)
    torch.library.register_fake("hilore::decompress", _fake_decompress, lib=library)
    return library


_LIBRARY = _register()  # the ops live as long as this object
