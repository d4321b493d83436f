"""The codecs in plain torch. This file IS the specification: the CPU path and the Triton kernels agree with it bit for bit, payload and values.

A tensor is cut, in storage order, into groups of `group` elements. Its payload is one flat uint8 tensor: the codes of all groups, then their scales, then,
asymmetric, their lows, all in native byte order. The last group, if short, is filled up (its filling has code 0).

    code of element j of a group    8 bits: byte j.   4 bits: byte j mod group/2, the first half of the group in the low half of the byte
    symmetric                       a = max |x|;  scale = up(a / top);  code = round(x * fl(1 / scale));  x' = code * scale
    asymmetric                      low = down(min x);  a = max x - low;  scale = up(a / top);  code = round((x - low) * fl(1 / scale));  x' = code * scale + low
    top                             int8 127, int4 7, e4m3 448; asymmetric 255, 15

Every operation is fp32 with a rounding of its own (no fused multiply-add); `up` adds 4 units in the last place and then, for bf16, rounds up, so that no code
exceeds top, whatever the rounding of the reciprocal; `down` is towards minus infinity (fp32: as it is). Integers are two's complement.

* A group of zeros comes back exactly zero; one whose a is below 2^-100 has scale 0: it comes back as zero, asymmetric as low.
* A group that holds NaN or inf comes back NaN as a whole: scale is NaN (0x7fc0), low 0, its codes 0. Its neighbours are untouched. Asymmetric, so does one whose a
  is not below 2^127: code * scale, up to half a step beyond a, could overflow before low, of the other sign, is added. And one whose
  low, rounded down, is minus infinity (bf16 metadata: min x below -3.3895e38).
* x' is clamped to the largest finite number of the dtype before it is rounded to the dtype, to the nearest.

`-sr`: round(y) = floor(y) + (u < y - floor(y)), for e4m3 and bf16 the same between the two neighbours, with u uniform on a grid of 2^-24 (e4m3's normal numbers
2^-20, bf16 2^-16): the chance of going up is y - floor(y) rounded up to that grid, so the mean is off by less than a step of it. The random words are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed (64 bits),
counter = (n, n >> 32, stream, 0), n = g * group / 4 + j for the elements j, j + group/4, j + group/2 and j + 3 group/4 of group g, which take the four words.
So the same seed gives the same bits, however the work is cut. bf16 and its words count in groups of 128.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hilore_cli.codecs.formats import LEAST, Bf16Codec, Codec, GroupedCodec, MaskCodec

NAN_BITS = 0x7FC00000
INF_BITS = 0x7F800000
BF16_MAX_BITS = 0x7F7F0000
ULPS_UP = 4
LIMIT = 2.0**127
BF16_GROUP = 128
WORD = 0xFFFFFFFF


def compress(flat: Tensor, codec: Codec, *, seed: int = 0, stream: int = 0) -> Tensor:
    """`flat` [numel], contiguous, of one of the codec's dtypes -> uint8 [payload_bytes]."""
    payload = flat.new_empty(codec.payload_bytes(flat.numel()), dtype=torch.uint8)
    compress_into(payload, flat, codec, start=0, numel=flat.numel(), seed=seed, stream=stream)
    return payload


def compress_into(payload: Tensor, part: Tensor, codec: Codec, *, start: int, numel: int, seed: int, stream: int) -> None:
    """Write the codes of the elements from `start` on, a multiple of 128, into the payload of a tensor of `numel` elements."""
    if not part.numel():
        return
    if isinstance(codec, MaskCodec):
        packed = pack_bits(part)
        payload[start // 8 : start // 8 + packed.numel()] = packed
    elif isinstance(codec, Bf16Codec):
        first = start // BF16_GROUP
        payload.view(torch.bfloat16)[start : start + part.numel()] = round_to_bf16(part, codec, first=first, seed=seed, stream=stream)
    else:
        first, rows = start // codec.group, _rows(part, codec.group)
        code, scale, low = encode(rows, codec, first=first, seed=seed, stream=stream)
        if part.numel() < rows.numel():
            code.view(-1)[part.numel() :] = 0
        codes, *metas = regions(payload, codec, numel)
        codes[first : first + rows.shape[0]] = code if codec.bits == 8 else _pack_nibbles(code)
        for region, meta in zip(metas, (scale, low), strict=False):
            region[first : first + rows.shape[0]] = meta


def decompress(payload: Tensor, codec: Codec, *, dtype: torch.dtype, numel: int) -> Tensor:
    """uint8 [payload_bytes] -> [numel] of `dtype`, contiguous."""
    flat = payload.new_empty(numel, dtype=dtype)
    decompress_into(flat, payload, codec, start=0, numel=numel)
    return flat


def decompress_into(part: Tensor, payload: Tensor, codec: Codec, *, start: int, numel: int) -> None:
    """Restore the elements from `start` on, a multiple of 128, of a tensor of `numel` elements."""
    if not part.numel():
        return
    if isinstance(codec, MaskCodec):
        part.copy_(unpack_bits(payload[start // 8 : (start + part.numel() + 7) // 8])[: part.numel()])
    elif isinstance(codec, Bf16Codec):
        part.copy_(payload.view(torch.bfloat16)[start : start + part.numel()])
    else:
        first, last = start // codec.group, codec.groups(start + part.numel())
        codes, *metas = (region[first:last] for region in regions(payload, codec, numel))
        code = codes if codec.bits == 8 else _unpack_nibbles(codes, signed=not codec.asymmetric)
        largest = torch.finfo(part.dtype).max
        values = decode(code, codec, *metas).clamp_(-largest, largest)
        part.copy_(values.view(-1)[: part.numel()])


def regions(payload: Tensor, codec: GroupedCodec, numel: int) -> list[Tensor]:
    """Views of a payload: codes uint8 [groups, code_bytes], scale [groups] and, asymmetric, low [groups], bf16 or fp32."""
    groups = codec.groups(numel)
    cuts = [groups * codec.code_bytes] + [groups * codec.meta_bytes] * (2 if codec.asymmetric else 1)
    codes, *metas = payload.split(cuts)
    return [codes.view(groups, codec.code_bytes), *(meta.view(torch.float32 if codec.wide else torch.bfloat16) for meta in metas)]


def encode(rows: Tensor, codec: GroupedCodec, *, first: int, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [g, group], the first of them number `first` of its tensor -> codes uint8 [g, group], scale [g], low [g] (zeros if symmetric)."""
    least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)  # aminmax is 12 times slower
    if codec.asymmetric:
        low = least if codec.wide else _bits(least, _down_to_bf16)
        low = torch.where(low == 0, 0.0, low)  # no minus zero
        reach = most - low
        shifted = rows - low
    else:
        low, reach, shifted = torch.zeros_like(least), torch.maximum(most, -least), rows
    finite = reach < LIMIT if codec.asymmetric else reach.isfinite()
    scale = _bits(reach / reach.new_full((), codec.top), lambda bits: _up(bits, wide=codec.wide))  # by a tensor: torch may turn a division by a number into a product
    scale = torch.where(finite, torch.where(reach < LEAST, 0.0, scale), torch.nan)
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)
    y = shifted * inverse
    if not finite.all():
        y, low = torch.where(finite, y, 0.0), torch.where(finite, low, 0.0)
    words = random_words(rows.shape[0], codec.group, first=first, seed=seed, stream=stream, device=rows.device) if codec.stochastic else None
    code = _round_to_e4m3(y, words) if codec.kind == "e4m3" else _round_to_integers(y, words, codec)
    return code, _meta(scale, codec), _meta(low, codec)


def decode(code: Tensor, codec: GroupedCodec, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """uint8 [g, group], [g], [g] -> fp32 [g, group]."""
    if codec.kind == "e4m3":
        values = code.view(torch.float8_e4m3fn).float()
    elif codec.asymmetric:
        values = code.float()
    else:
        values = code.view(torch.int8).float()
    values *= scale.float()[:, None]
    return values if low is None else values.add_(low.float()[:, None])


def round_to_bf16(flat: Tensor, codec: Bf16Codec, *, first: int, seed: int, stream: int) -> Tensor:
    """fp32 [n] -> bf16 [n], the first element in group `first`. inf stays inf; finite values that would become inf become the largest finite number."""
    bits = flat.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    if codec.stochastic:
        rows = -(-flat.numel() // BF16_GROUP)
        words = random_words(rows, BF16_GROUP, first=first, seed=seed, stream=stream, device=flat.device).view(-1)[: flat.numel()]
        rounded = magnitude + (words >> 16).int()
    else:
        rounded = magnitude + 0x7FFF + (magnitude >> 16 & 1)
    finite = (rounded & -0x10000).clamp(max=BF16_MAX_BITS)
    rounded = torch.where(magnitude < INF_BITS, finite, torch.where(magnitude == INF_BITS, magnitude, NAN_BITS))
    return ((rounded | bits & -0x80000000) >> 16).to(torch.int16).view(torch.bfloat16)


def pack_bits(mask: Tensor) -> Tensor:
    """bool [n] -> uint8, an even number of bytes."""
    filled = torch.cat((mask, mask.new_zeros(-mask.numel() % 16))).view(-1, 8)
    return (filled.to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 [n] -> bool [8 n]."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).bool().view(-1)


def random_words(rows: int, group: int, *, first: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """int64 [rows, group] in [0, 2^32): the words of the elements of `rows` groups, the first of them number `first`."""
    n = torch.arange(first * (group // 4), (first + rows) * (group // 4), device=device)
    return torch.stack(philox(n & WORD, n >> 32, stream & WORD, 0, seed=seed), dim=1).view(rows, group // 4, 4).transpose(1, 2).reshape(rows, group)


def philox(c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int, *, seed: int) -> tuple[Tensor | int, ...]:
    """Philox4x32-10: four words of a counter, each 32 bits held in int64 or int, to four random ones."""
    key = [seed & WORD, seed >> 32 & WORD]
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits, modulo 2^64: the words are right whatever the sign
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ key[0], b & WORD, (a >> 32 & WORD) ^ c3 ^ key[1], a & WORD
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return c0, c1, c2, c3


def _rows(flat: Tensor, group: int) -> Tensor:
    """[n] -> fp32 [groups, group]; the last group is filled with copies of its last element, which leaves its range alone."""
    missing = -flat.numel() % group
    filled = torch.cat((flat, flat[-1:].expand(missing))) if missing else flat
    return filled.float().view(-1, group)


def _round_to_integers(y: Tensor, words: Tensor | None, codec: GroupedCodec) -> Tensor:
    if words is None:
        code = y.round_()
    else:
        code = y.floor()
        code += _uniform(words) < y - code
    return code.to(torch.uint8) if codec.asymmetric else code.to(torch.int8).view(torch.uint8)


def _round_to_e4m3(y: Tensor, words: Tensor | None) -> Tensor:
    """|y| <= 448 -> the bits of float8_e4m3fn."""
    if words is None:
        return y.to(torch.float8_e4m3fn).view(torch.uint8)
    bits = y.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + (words >> 12).int() >> 20) - (120 << 3)
    steps = magnitude.view(torch.float32) * 512.0  # of the least subnormal, 2^-9
    floor = steps.floor()
    subnormal = floor.int() + (_uniform(words) < steps - floor)
    return (torch.where(steps < 8.0, subnormal, normal) | bits >> 24 & 0x80).to(torch.uint8)


def _uniform(words: Tensor) -> Tensor:
    """[0, 1) in steps of 2^-24."""
    return (words >> 8).float() * 2.0**-24


def _pack_nibbles(code: Tensor) -> Tensor:
    half = code.shape[1] // 2
    return code[:, :half] & 15 | code[:, half:] << 4


def _unpack_nibbles(packed: Tensor, *, signed: bool) -> Tensor:
    code = torch.cat((packed & 15, packed >> 4), dim=1)
    return (code ^ 8) - 8 if signed else code


def _meta(values: Tensor, codec: GroupedCodec) -> Tensor:
    """fp32 [g, 1] -> [g]; the cut to bf16 is exact, and made on bits because torch's own changes those of NaN."""
    values = values.reshape(-1)
    return values if codec.wide else (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _bits(values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(values.view(torch.int32)).view(torch.float32)


def _up(bits: Tensor, *, wide: bool) -> Tensor:
    """Bits of positive finite numbers."""
    bits = bits + ULPS_UP
    return bits if wide else bits + 0xFFFF & -0x10000


def _down_to_bf16(bits: Tensor) -> Tensor:
    """Towards minus infinity."""
    return torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000
