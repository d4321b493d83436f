"""What codecs there are: their names, which dtypes they take and how many bytes they store.

A name says all that there is to know of a grouped codec:

    int8 | int4 | e4m3   codes of 8 or 4 bits; e4m3 is fp8 with 4 bits of exponent and 3 of mantissa
    -asym                integers from the group's least value on (scale and low), instead of around zero (scale alone)
    -g32 | -g64          elements that share a scale; without it 128
    -fp32                scale (and low) in fp32; without it bf16
    -sr                  stochastic rounding: unbiased, and about 1.4 times the error; without it to the nearest

Beside them `bf16` (of fp32 tensors; also -sr), `mask` (bools, eight to a byte, exact), and the CPU's own `fbgemm-int8` and `fbgemm-int4`, which are codecs
apart: another layout, another rounding, another risk (`rowwise.py`). A plan made with one cannot be carried out by the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from hilore_cli.errors import UsageError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 128
LEAST = 2.0**-100
"""A group whose largest magnitude (asymmetric: whose range) is below this has scale 0."""


@dataclass(frozen=True, kw_only=True)
class GroupedCodec:
    """`bits` a code, `group` elements to a scale; a payload is all codes, then all scales, then all lows."""

    kind: str
    """int8, int4 or e4m3"""
    group: int = DEFAULT_GROUP
    asymmetric: bool = False
    wide: bool = False
    """scale and low in fp32, not bf16"""
    stochastic: bool = False

    dtypes = FLOATS
    exact = False

    @property
    def name(self) -> str:
        parts = (self.kind, "asym" * self.asymmetric, f"g{self.group}" if self.group != DEFAULT_GROUP else "", "fp32" * self.wide, "sr" * self.stochastic)
        return "-".join(part for part in parts if part)

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    @property
    def top(self) -> float:
        """The largest code: of a magnitude, or, asymmetric, above low."""
        if self.kind == "e4m3":
            return 448.0
        return 2.0**self.bits - 1 if self.asymmetric else 2.0 ** (self.bits - 1) - 1

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one group."""
        return self.group * self.bits // 8

    @property
    def meta_bytes(self) -> int:
        """Bytes of one scale or low."""
        return 4 if self.wide else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one group: codes, scale and, asymmetric, low."""
        return self.code_bytes + self.meta_bytes * (2 if self.asymmetric else 1)

    def groups(self, numel: int) -> int:
        return (numel + self.group - 1) // self.group

    def payload_bytes(self, numel: int) -> int:
        return self.groups(numel) * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Bf16Codec:
    """Each fp32 element rounded to bf16: two bytes, no metadata."""

    stochastic: bool = False

    dtypes = (torch.float32,)
    exact = False

    @property
    def name(self) -> str:
        return "bf16-sr" if self.stochastic else "bf16"

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel


@dataclass(frozen=True, kw_only=True)
class MaskCodec:
    """Bools, element i in bit i % 8 of byte i // 8; comes back exactly. The payload's length is even."""

    name = "mask"
    stochastic = False
    dtypes = (torch.bool,)
    exact = True

    def payload_bytes(self, numel: int) -> int:
        return (numel + 15) // 16 * 2


@dataclass(frozen=True, kw_only=True)
class RowwiseCodec:
    """torch's row-wise embedding quantizers: `bits` a code, rows of codes, scale and low. Fast on a CPU; see `rowwise.py`."""

    bits: int
    group: int = 32

    stochastic = False
    dtypes = FLOATS
    exact = False

    @property
    def name(self) -> str:
        return f"fbgemm-int{self.bits}" + (f"-g{self.group}" if self.group != 32 else "")

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

    def payload_bytes(self, numel: int) -> int:
        return (numel + self.group - 1) // self.group * self.row_bytes


Codec = GroupedCodec | Bf16Codec | MaskCodec | RowwiseCodec

_GROUPED = [
    GroupedCodec(kind=kind, asymmetric=asymmetric, group=group, wide=wide, stochastic=stochastic)
    for (kind, asymmetric), group, wide, stochastic in product(
        (("int8", False), ("int8", True), ("int4", False), ("int4", True), ("e4m3", False)), (128, 64, 32), (False, True), (False, True)
    )
]
_ROWWISE = [RowwiseCodec(bits=bits, group=group) for bits in (8, 4) for group in GROUPS]
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*_GROUPED, Bf16Codec(), Bf16Codec(stochastic=True), MaskCodec(), *_ROWWISE)}


def get_codec(name: str) -> Codec:
    """The codec of that name, or UsageError that says which names there are."""
    if name not in CODECS:
        raise UsageError(f"codec {name!r} does not exist; there are int8, int4 (both also -asym) and e4m3, each with -g32 or -g64, -fp32, -sr in this order; bf16 (also -sr), mask, fbgemm-int8 and fbgemm-int4 (also -g64, -g128)")
    return CODECS[name]


def default_codecs(device: torch.device) -> tuple[str, ...]:
    """What is profiled when nobody chooses: the kernels of a GPU, or the CPU's own."""
    return ("fbgemm-int8", "fbgemm-int4") if device.type == "cpu" else ("int8", "int4")


def payload_bytes(codec: Codec, numel: int) -> int:
    """The exact length of a payload. `numel` may be a SymInt: nothing is guarded, the answer is an expression."""
    return codec.payload_bytes(numel)
