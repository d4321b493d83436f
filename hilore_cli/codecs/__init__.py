"""Lossy storage of activations: named codecs, and the two ops that the runtime puts into its graphs.

    hilore::compress(Tensor x, str codec, SymInt[]? stride=None, int stream=0) -> Tensor
    hilore::decompress(Tensor payload, str codec, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor

A payload is one flat uint8 tensor whose length is `payload_bytes(codec, x.numel())`, also on fake tensors with symbolic sizes. Groups run over x in
STORAGE order, so a permuted tensor costs no copy, and the strides given to decompress must be those that x had; give them to compress as well and it
refuses another layout, which would else come back permuted, silently. Stochastic codecs draw from the seed of the surrounding `seeded` and the op's `stream`.

`formats.py` names the codecs, `reference.py` and `rowwise.py` say what is stored and how it comes back, `bounds.py` how well.
Not done here: gradients (the ops run below autograd), any choice of what to compress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from hilore_cli.codecs import cpu, rowwise, rowwise_cpu
from hilore_cli.codecs.bounds import error_bound
from hilore_cli.codecs.formats import CODECS, FLOATS, Codec, RowwiseCodec, default_codecs, get_codec, payload_bytes
from hilore_cli.errors import CodecError

__all__ = [
    "CODECS",
    "Codec",
    "compress",
    "compressible",
    "decompress",
    "default_codecs",
    "error_bound",
    "get_codec",
    "payload_bytes",
    "round_trip",
    "seeded",
]

MIN_NUMEL = 32  # the smallest group: below it the payload may be no smaller than the tensor

LARGEST_WORD = 4
"""Bytes: payloads are read as words of up to so many, which torch wants aligned."""

_SEED: ContextVar[int] = ContextVar("hilore_seed", default=0)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which stochastic codecs draw from this seed (64 bits)."""
    token = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(token)


def compressible(tensor: Tensor) -> bool:
    """Whether a real or fake tensor can be compressed to advantage. Guards nothing: an unknown symbolic size counts as large enough."""
    numel = tensor.numel()
    too_small = isinstance(numel, int) and numel < MIN_NUMEL
    return tensor.dtype in FLOATS and tensor.layout == torch.strided and not too_small and not _is_expanded(tensor)


def compress(x: Tensor, codec: Codec | str, *, seed: int | None = None, stream: int = 0) -> Tensor:
    """x -> uint8 [payload_bytes]. CodecError for a dtype that the codec does not take and for tensors whose elements outnumber the memory that they
    span (expanded ones), whose payload could exceed what it replaces. `seed` (None: that of the surrounding `seeded`, else 0) and `stream` decide how a
    stochastic codec rounds; torch.compile traces neither a seed nor `seeded`: a stochastic op in a graph draws from the seed around its call."""
    name = _name(codec)
    if not isinstance(x, Tensor) or x.is_nested:
        raise CodecError(f"{name} takes plain tensors, got {'a nested tensor' if isinstance(x, Tensor) else type(x).__name__}: store it")
    with nullcontext() if seed is None or not CODECS[name].stochastic else seeded(seed):
        return torch.ops.hilore.compress.default(x, name, None, stream)


def decompress(
    payload: Tensor, codec: Codec | str, *, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The tensor that was compressed: same dtype, size, strides, device; values as `reference.py` says."""
    return torch.ops.hilore.decompress.default(payload, _name(codec), dtype, size, stride)


def round_trip(x: Tensor, codec: Codec | str, *, seed: int | None = None, stream: int = 0) -> Tensor:
    """What backward would read instead of x."""
    return decompress(compress(x, codec, seed=seed, stream=stream), codec, dtype=x.dtype, size=x.size(), stride=x.stride())


def _name(codec: Codec | str) -> str:
    return get_codec(getattr(codec, "name", codec)).name


def _kernels(codec: Codec, device: torch.device) -> ModuleType:
    """The one place where codec and device choose what runs."""
    if isinstance(codec, RowwiseCodec):
        return rowwise_cpu if device.type == "cpu" else rowwise
    return cpu if device.type == "cpu" else _triton(device)


def _triton(device: torch.device) -> ModuleType:
    try:
        from hilore_cli.codecs import triton
    except ImportError as error:
        raise CodecError(f"codecs on {device.type} need Triton, which cannot be imported ({error}); install the version that belongs to this torch (pip install triton), or plan with --risk 0") from error
    return triton


def _compress(x: Tensor, codec: str, stride: Sequence[int] | None = None, stream: int = 0) -> Tensor:
    spec = get_codec(codec)
    _check_input(x, spec)
    if stride is not None and not _same_layout(x, stride):
        raise CodecError(f"compress was promised strides {tuple(stride)}, got {x.stride()} of shape {tuple(x.shape)}")
    drawn = {"seed": _SEED.get(), "stream": stream} if spec.stochastic else {}
    return _kernels(spec, x.device).compress(_storage_order(x), spec, **drawn)


def _decompress(payload: Tensor, codec: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    spec = get_codec(codec)
    _check_layout(codec, size, stride)
    numel = math.prod(size)
    wanted = payload_bytes(spec, numel)
    if payload.dtype != torch.uint8 or payload.shape != (wanted,) or dtype not in spec.dtypes:
        got = f"{payload.dtype} of shape {tuple(payload.shape)}"
        raise CodecError(f"{codec} stores {dtype} {tuple(size)} in {wanted} bytes ({_dtypes(spec)} only), got {got}")
    aligned = payload.is_contiguous() and payload.storage_offset() % LARGEST_WORD == 0
    flat = _kernels(spec, payload.device).decompress(payload if aligned else payload.clone(memory_format=torch.contiguous_format), spec, dtype=dtype, numel=numel)
    if _is_dense(size, stride):
        return flat.as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=dtype, device=payload.device).copy_(flat.view(size))


def _fake_compress(x: Tensor, codec: str, stride: Sequence[int] | None = None, stream: int = 0) -> Tensor:
    spec = get_codec(codec)
    if x.dtype not in spec.dtypes or _is_expanded(x):
        raise CodecError(_refusal(x, spec))
    return x.new_empty((payload_bytes(spec, x.numel()),), dtype=torch.uint8)


def _fake_decompress(
    payload: Tensor, codec: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    get_codec(codec)
    return torch.empty_strided(size, stride, dtype=dtype, device=payload.device)


def _check_layout(codec: str, size: Sequence[int], stride: Sequence[int]) -> None:
    """Raise CodecError for what no tensor that was compressed can have had: the elements that it restores would lie outside its memory, or on each other."""
    elements = math.prod(size)
    if len(size) != len(stride) or min((*size, *stride), default=0) < 0 or (elements and elements > span_of(size, stride)):
        raise CodecError(f"{codec} cannot restore size {tuple(size)} with strides {tuple(stride)}; give those that the tensor had when it was compressed")


def span_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last of a tensor that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _check_input(x: Tensor, codec: Codec) -> None:
    if x.dtype not in codec.dtypes:
        raise CodecError(_refusal(x, codec))
    if not x.is_contiguous() and x.numel() > span_of(x.shape, x.stride()):
        raise CodecError(_refusal(x, codec))


def _refusal(x: Tensor, codec: Codec) -> str:
    layout = f" with strides {tuple(x.stride())}" if x.layout == torch.strided else f" and layout {x.layout}"
    wanted = f"{_dtypes(codec)} tensors whose elements do not overlap in memory"
    return f"{codec.name} takes {wanted}, got {x.dtype} of shape {tuple(x.shape)}{layout}: store it, or compress its base"


def _dtypes(codec: Codec) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in codec.dtypes]
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


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
    library.define("compress(Tensor x, str codec, SymInt[]? stride=None, int stream=0) -> Tensor", tags=tags)
    library.define(
        "decompress(Tensor payload, str codec, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor", tags=tags
    )
    library.impl("compress", _compress, "CompositeExplicitAutograd")
    library.impl("decompress", _decompress, "CompositeExplicitAutograd")
    torch.library.register_fake("hilore::compress", _fake_compress, lib=library)
    torch.library.register_fake("hilore::decompress", _fake_decompress, lib=library)
    return library


_LIBRARY = _register()  # the ops live as long as this object
