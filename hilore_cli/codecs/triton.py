"""The codecs as Triton kernels, for GPUs; in Triton's interpreter they run on a CPU, for the tests.

Bit for bit `reference.py` (tests/test_kernels.py): what a kernel computes is decided by integers wherever hardware, interpreter and torch differ (bf16 and e4m3
conversions, NaN in maxima), divisions are correctly rounded and multiplications are not fused with additions. Each byte is read once and written once, with
one launch for a tensor. One program takes `NG` groups; a group is four quarters of group / 4 elements, so that neither packing two codes to a byte nor the
four words of a Philox call moves anything between threads.

What it does NOT do: other layouts than a flat tensor (codecs/__init__.py sees to that); tuning at run time.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from hilore_cli.codecs.formats import Bf16Codec, Codec, GroupedCodec, MaskCodec
from hilore_cli.codecs.reference import BF16_GROUP, regions

NUMEL = 4096
"""Elements of one program: 32 a thread, of 4 warps."""
NUMEL_INTERPRETED = 2**16
"""The interpreter's time goes by programs."""
REGISTERS = 112
"""That a thread may have where ptxas takes 96 by itself and spills two of them (sm_100: int4-asym-g64-fp32-sr of bf16)."""
WORDS = 512
"""16-bit words of a bit mask in one program."""

INT: tl.constexpr = tl.constexpr(0)
E4M3: tl.constexpr = tl.constexpr(1)
BF16: tl.constexpr = tl.constexpr(2)


def compress(flat: Tensor, codec: Codec, *, seed: int = 0, stream: int = 0) -> Tensor:
    """As `reference.compress`."""
    numel = flat.numel()
    payload = flat.new_empty(codec.payload_bytes(numel), dtype=torch.uint8)
    if numel == 0:
        return payload
    if isinstance(codec, MaskCodec):
        _launch(pack_kernel, triton.cdiv(payload.numel() // 2, WORDS), flat.view(torch.int8), payload.view(torch.int16), numel, EVEN=numel % (16 * WORDS) == 0, WORDS=WORDS)
        return payload
    codes, scale, low = _outputs(payload, codec, numel)
    options = kernel_options(codec, flat.dtype, numel, interpreted=_interpreted(encode_kernel))
    crowded = {"maxnreg": REGISTERS} if options["ASYMMETRIC"] and options["WIDE"] and codec.stochastic and torch.version.hip is None and not _interpreted(encode_kernel) else {}  # an option of NVIDIA's only
    _launch(encode_kernel, _programs(numel, options), _as_loaded(flat), codes, scale, low, numel, triton.cdiv(numel, options["G"]), _signed(seed, 64), _signed(stream, 32), **options, STOCHASTIC=codec.stochastic, **crowded)
    return payload


def decompress(payload: Tensor, codec: Codec, *, dtype: torch.dtype, numel: int) -> Tensor:
    """As `reference.decompress`."""
    flat = payload.new_empty(numel, dtype=dtype)
    if numel == 0:
        return flat
    if isinstance(codec, MaskCodec):
        _launch(unpack_kernel, triton.cdiv(payload.numel() // 2, WORDS), payload.view(torch.int16), flat.view(torch.int8), numel, EVEN=numel % (16 * WORDS) == 0, WORDS=WORDS)
        return flat
    codes, scale, low = _outputs(payload, codec, numel)
    options = kernel_options(codec, dtype, numel, interpreted=_interpreted(decode_kernel))
    _launch(decode_kernel, _programs(numel, options), codes, scale, low, _as_loaded(flat), numel, triton.cdiv(numel, options["G"]), **options, MAX=torch.finfo(dtype).max)
    return flat


def kernel_options(codec: GroupedCodec | Bf16Codec, dtype: torch.dtype, numel: int, *, interpreted: bool) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    group = BF16_GROUP if isinstance(codec, Bf16Codec) else codec.group
    groups_each = (NUMEL_INTERPRETED if interpreted else NUMEL) // group
    return {
        "KIND": BF16 if isinstance(codec, Bf16Codec) else E4M3 if codec.kind == "e4m3" else INT,
        "BITS": 16 if isinstance(codec, Bf16Codec) else codec.bits,
        "TOP": 1.0 if isinstance(codec, Bf16Codec) else codec.top,
        "ASYMMETRIC": isinstance(codec, GroupedCodec) and codec.asymmetric,
        "WIDE": isinstance(codec, GroupedCodec) and codec.wide,
        "IS_BF16": dtype == torch.bfloat16,
        "G": group,
        "NG": groups_each,
        "EVEN": numel % (group * groups_each) == 0,
    }


def _programs(numel: int, options: dict[str, Any]) -> int:
    return triton.cdiv(numel, options["G"] * options["NG"])


def _outputs(payload: Tensor, codec: GroupedCodec | Bf16Codec, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and low of a payload as integers; where there is none, the codes stand in."""
    if isinstance(codec, Bf16Codec):
        codes = payload.view(torch.int16)
        return codes, codes, codes
    codes, *metas = regions(payload, codec, numel)
    metas = [meta.view(torch.int32 if codec.wide else torch.int16) for meta in metas]
    return codes, metas[0], metas[-1]


def _as_loaded(flat: Tensor) -> Tensor:
    """bf16 travels as int16 (the interpreter loads its subnormals as 0 and truncates when it stores)."""
    return flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat


def _signed(value: int, bits: int) -> int:
    """The lowest bits as a signed integer."""
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _interpreted(kernel: Any) -> bool:
    return isinstance(kernel, InterpretedFunction)


def _launch(kernel: Any, programs: int, first: Tensor, *arguments: Any, **options: Any) -> None:
    launch = {} if _interpreted(kernel) else {"num_warps": 4, "enable_fp_fusion": False}
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[(programs,)](first, *arguments, **options, **launch)


@triton.jit(do_not_specialize=["seed", "stream"])
def encode_kernel(x_ptr, codes_ptr, scale_ptr, low_ptr, numel, groups, seed, stream, KIND: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, ASYMMETRIC: tl.constexpr, WIDE: tl.constexpr, IS_BF16: tl.constexpr, G: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr, STOCHASTIC: tl.constexpr):
    Q: tl.constexpr = G // 4
    group = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    lane = tl.arange(0, Q)
    first = group[:, None] * G + lane[None, :]
    b0 = _load_bits(x_ptr, first, numel, IS_BF16, EVEN)
    b1 = _load_bits(x_ptr, first + Q, numel, IS_BF16, EVEN)
    b2 = _load_bits(x_ptr, first + 2 * Q, numel, IS_BF16, EVEN)
    b3 = _load_bits(x_ptr, first + 3 * Q, numel, IS_BF16, EVEN)
    w0, w1, w2, w3 = b0, b1, b2, b3  # replaced if they are needed
    if STOCHASTIC:
        n = group[:, None] * Q + lane[None, :]
        w0, w1, w2, w3 = tl.philox(seed, n.to(tl.uint32), (n >> 32).to(tl.uint32), (n * 0 + stream).to(tl.uint32), (n * 0).to(tl.uint32))
    if KIND == BF16:
        _store(codes_ptr, first, _round_bits_to_bf16(b0, w0, STOCHASTIC), first < numel, EVEN)
        _store(codes_ptr, first + Q, _round_bits_to_bf16(b1, w1, STOCHASTIC), first + Q < numel, EVEN)
        _store(codes_ptr, first + 2 * Q, _round_bits_to_bf16(b2, w2, STOCHASTIC), first + 2 * Q < numel, EVEN)
        _store(codes_ptr, first + 3 * Q, _round_bits_to_bf16(b3, w3, STOCHASTIC), first + 3 * Q < numel, EVEN)
    else:
        if ASYMMETRIC:
            least = tl.minimum(tl.minimum(_least(b0, first, numel, EVEN), _least(b1, first + Q, numel, EVEN)), tl.minimum(_least(b2, first + 2 * Q, numel, EVEN), _least(b3, first + 3 * Q, numel, EVEN)))
            most = tl.maximum(tl.maximum(_most(b0, first, numel, EVEN), _most(b1, first + Q, numel, EVEN)), tl.maximum(_most(b2, first + 2 * Q, numel, EVEN), _most(b3, first + 3 * Q, numel, EVEN)))
            low_bits = _ordered(tl.min(least, axis=1))
            most_bits = _ordered(tl.max(most, axis=1))
            is_number = ((low_bits & 0x7FFFFFFF) < 0x7F800000) & ((most_bits & 0x7FFFFFFF) < 0x7F800000)
            if not WIDE:
                low_bits = tl.where(low_bits < 0, low_bits + 0xFFFF, low_bits) & -0x10000
            low_bits = tl.where((low_bits & 0x7FFFFFFF) == 0, 0, low_bits)  # no minus zero
            low = low_bits.to(tl.float32, bitcast=True)
            reach = most_bits.to(tl.float32, bitcast=True) - low
        else:
            largest = tl.maximum(tl.maximum(b0 & 0x7FFFFFFF, b1 & 0x7FFFFFFF), tl.maximum(b2 & 0x7FFFFFFF, b3 & 0x7FFFFFFF))
            reach_bits = tl.max(largest, axis=1)
            is_number = reach_bits < 0x7F800000
            reach = reach_bits.to(tl.float32, bitcast=True)
            low_bits = reach_bits * 0
            low = low_bits.to(tl.float32, bitcast=True)
        finite = is_number & (reach.to(tl.int32, bitcast=True) < (0x7F000000 if ASYMMETRIC else 0x7F800000))  # reach is not negative; reference.LIMIT
        scale_bits = tl.math.div_rn(reach, reach * 0 + TOP).to(tl.int32, bitcast=True) + 4
        if not WIDE:
            scale_bits = (scale_bits + 0xFFFF) & -0x10000
        scale_bits = tl.where(finite, tl.where(reach < 7.888609052210118e-31, 0, scale_bits), 0x7FC00000)  # 2^-100
        scale = scale_bits.to(tl.float32, bitcast=True)
        usable = finite & (scale_bits > 0)
        divisor = tl.where(usable, scale, 1.0)
        inverse = tl.where(usable, tl.math.div_rn(divisor * 0 + 1.0, divisor), 0.0)[:, None]
        low_bits = tl.where(finite, low_bits, 0)
        finite, low = finite[:, None], low[:, None]
        c0 = _code(b0, w0, low, inverse, finite, KIND, ASYMMETRIC, STOCHASTIC)
        c1 = _code(b1, w1, low, inverse, finite, KIND, ASYMMETRIC, STOCHASTIC)
        c2 = _code(b2, w2, low, inverse, finite, KIND, ASYMMETRIC, STOCHASTIC)
        c3 = _code(b3, w3, low, inverse, finite, KIND, ASYMMETRIC, STOCHASTIC)
        if ASYMMETRIC and not EVEN:  # the filling has code 0
            c0 = tl.where(first < numel, c0, 0)
            c1 = tl.where(first + Q < numel, c1, 0)
            c2 = tl.where(first + 2 * Q < numel, c2, 0)
            c3 = tl.where(first + 3 * Q < numel, c3, 0)
        whole = group[:, None] < groups
        if BITS == 8:
            _store(codes_ptr, first, c0, whole, EVEN)
            _store(codes_ptr, first + Q, c1, whole, EVEN)
            _store(codes_ptr, first + 2 * Q, c2, whole, EVEN)
            _store(codes_ptr, first + 3 * Q, c3, whole, EVEN)
        else:
            byte = group[:, None] * (G // 2) + lane[None, :]
            _store(codes_ptr, byte, (c0 & 15) | ((c2 & 15) << 4), whole, EVEN)
            _store(codes_ptr, byte + Q, (c1 & 15) | ((c3 & 15) << 4), whole, EVEN)
        _store(scale_ptr, group, scale_bits if WIDE else scale_bits >> 16, group < groups, EVEN)
        if ASYMMETRIC:
            _store(low_ptr, group, low_bits if WIDE else low_bits >> 16, group < groups, EVEN)


@triton.jit
def decode_kernel(codes_ptr, scale_ptr, low_ptr, x_ptr, numel, groups, KIND: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, ASYMMETRIC: tl.constexpr, WIDE: tl.constexpr, IS_BF16: tl.constexpr, G: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr, MAX: tl.constexpr):
    Q: tl.constexpr = G // 4
    group = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    lane = tl.arange(0, Q)
    first = group[:, None] * G + lane[None, :]
    if KIND == BF16:
        _store(x_ptr, first, _widened(codes_ptr, first, numel, EVEN), first < numel, EVEN)
        _store(x_ptr, first + Q, _widened(codes_ptr, first + Q, numel, EVEN), first + Q < numel, EVEN)
        _store(x_ptr, first + 2 * Q, _widened(codes_ptr, first + 2 * Q, numel, EVEN), first + 2 * Q < numel, EVEN)
        _store(x_ptr, first + 3 * Q, _widened(codes_ptr, first + 3 * Q, numel, EVEN), first + 3 * Q < numel, EVEN)
    else:
        whole = group[:, None] < groups
        scale_bits = _load_meta(scale_ptr, group, groups, WIDE, EVEN)[:, None]
        low = (scale_bits * 0).to(tl.float32, bitcast=True)
        if ASYMMETRIC:
            low = _load_meta(low_ptr, group, groups, WIDE, EVEN)[:, None].to(tl.float32, bitcast=True)
        if BITS == 8:
            c0 = _load(codes_ptr, first, whole, EVEN).to(tl.int32)
            c1 = _load(codes_ptr, first + Q, whole, EVEN).to(tl.int32)
            c2 = _load(codes_ptr, first + 2 * Q, whole, EVEN).to(tl.int32)
            c3 = _load(codes_ptr, first + 3 * Q, whole, EVEN).to(tl.int32)
        else:
            byte = group[:, None] * (G // 2) + lane[None, :]
            here = _load(codes_ptr, byte, whole, EVEN).to(tl.int32)
            after = _load(codes_ptr, byte + Q, whole, EVEN).to(tl.int32)
            c0, c1, c2, c3 = here & 15, after & 15, here >> 4, after >> 4
        _store_value(x_ptr, first, c0, scale_bits, low, numel, KIND, BITS, ASYMMETRIC, IS_BF16, EVEN, MAX)
        _store_value(x_ptr, first + Q, c1, scale_bits, low, numel, KIND, BITS, ASYMMETRIC, IS_BF16, EVEN, MAX)
        _store_value(x_ptr, first + 2 * Q, c2, scale_bits, low, numel, KIND, BITS, ASYMMETRIC, IS_BF16, EVEN, MAX)
        _store_value(x_ptr, first + 3 * Q, c3, scale_bits, low, numel, KIND, BITS, ASYMMETRIC, IS_BF16, EVEN, MAX)


@triton.jit
def pack_kernel(mask_ptr, words_ptr, numel, EVEN: tl.constexpr, WORDS: tl.constexpr):
    """Bools as bytes -> 16 of them in a word."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 16)
    at = word[:, None] * 16 + bit[None, :]
    bools = _load(mask_ptr, at, at < numel, EVEN)
    packed = tl.sum((bools != 0).to(tl.int32) << bit[None, :], axis=1)
    _store(words_ptr, word, packed, word * 16 < numel, EVEN)


@triton.jit
def unpack_kernel(words_ptr, mask_ptr, numel, EVEN: tl.constexpr, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 16)
    at = word[:, None] * 16 + bit[None, :]
    packed = _load(words_ptr, word, word * 16 < numel, EVEN).to(tl.int32)
    _store(mask_ptr, at, (packed[:, None] >> bit[None, :]) & 1, at < numel, EVEN)


@triton.jit
def _load_bits(ptr, at, numel, IS_BF16: tl.constexpr, EVEN: tl.constexpr):
    """Elements as the bits of fp32."""
    x = _load(ptr, at, at < numel, EVEN)
    return x.to(tl.int32) << 16 if IS_BF16 else x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _store(ptr, at, values, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load(ptr, at, inside, EVEN: tl.constexpr):
    return tl.load(ptr + at) if EVEN else tl.load(ptr + at, mask=inside, other=0)


@triton.jit
def _ordered(bits):
    """fp32 bits <-> integers in the same order, NaN outermost; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least(bits, at, numel, EVEN: tl.constexpr):
    return _ordered(bits) if EVEN else tl.where(at < numel, _ordered(bits), 0x7FFFFFFF)


@triton.jit
def _most(bits, at, numel, EVEN: tl.constexpr):
    return _ordered(bits) if EVEN else tl.where(at < numel, _ordered(bits), -0x80000000)


@triton.jit
def _code(bits, words, low, inverse, finite, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr):
    """int32, whose low byte (nibble) is the code."""
    x = bits.to(tl.float32, bitcast=True)
    if ASYMMETRIC:
        x = x - low
    y = tl.where(finite, x * inverse, 0.0)
    if KIND == E4M3:
        code = _to_e4m3(y, words, STOCHASTIC)
    elif STOCHASTIC:
        floor = tl.floor(y)
        code = floor.to(tl.int32) + (_uniform(words) < y - floor).to(tl.int32)
    else:
        code = (y + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: the integer, rounded half to even, is in the low bits
    return code


@triton.jit
def _to_e4m3(y, words, STOCHASTIC: tl.constexpr):
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    if STOCHASTIC:
        normal = (magnitude + (words >> 12).to(tl.int32)) >> 20
        steps = size * 512.0
        floor = tl.floor(steps)
        subnormal = floor.to(tl.int32) + (_uniform(words) < steps - floor).to(tl.int32)
    else:
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14, whose last place is 2^-9
    return tl.where(magnitude < 0x3C800000, subnormal, normal - 960) | ((bits >> 24) & 0x80)  # 2^-6


@triton.jit
def _uniform(words):
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _round_bits_to_bf16(bits, words, STOCHASTIC: tl.constexpr):
    """fp32 bits -> bf16 bits; see `reference.round_to_bf16`."""
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((words >> 16).to(tl.int32) if STOCHASTIC else 0x7FFF + ((magnitude >> 16) & 1))
    rounded = tl.minimum(rounded & -0x10000, 0x7F7F0000)
    rounded = tl.where(magnitude < 0x7F800000, rounded, tl.where(magnitude == 0x7F800000, 0x7F800000, 0x7FC00000))
    return (rounded >> 16) | ((bits >> 16) & 0x8000)


@triton.jit
def _load_meta(ptr, group, groups, WIDE: tl.constexpr, EVEN: tl.constexpr):
    meta = _load(ptr, group, group < groups, EVEN)
    return meta if WIDE else meta.to(tl.int32) << 16


@triton.jit
def _widened(ptr, at, numel, EVEN: tl.constexpr):
    half = _load(ptr, at, at < numel, EVEN)
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_value(ptr, at, code, scale_bits, low, numel, KIND: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr, IS_BF16: tl.constexpr, EVEN: tl.constexpr, MAX: tl.constexpr):
    if KIND == E4M3:
        magnitude = code & 0x7F
        size = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True))  # 2^-9
        value = (size.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    elif ASYMMETRIC:
        value = code.to(tl.float32)
    elif BITS == 8:
        value = ((code << 24) >> 24).to(tl.float32)
    else:
        value = ((code << 28) >> 28).to(tl.float32)
    value = value * scale_bits.to(tl.float32, bitcast=True)
    if ASYMMETRIC:
        value = value + low
    value = tl.minimum(tl.maximum(value, -MAX), MAX)
    is_nan = (scale_bits & 0x7FFFFFFF) > 0x7F800000
    if IS_BF16:
        bits = value.to(tl.int32, bitcast=True)
        result = tl.where(is_nan, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        result = tl.where(is_nan, float("nan"), value)
    _store(ptr, at, result, at < numel, EVEN)
