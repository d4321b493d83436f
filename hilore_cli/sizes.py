"""Parse and print bytes, times and caps. "40GiB" and "1.1x-gc" are parsed once, at the CLI; inside there are integer bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hilore_cli.errors import UsageError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*((?:[KMGT]I?)?B)\s*$", re.IGNORECASE)
_RATIO = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*x-(gc|none)\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A memory cap as the user wrote it: a ratio to a measured peak, or a number of bytes."""

    text: str
    ratio: float | None
    reference: str | None  # "gc" or "none"
    nbytes: int | None

    def resolve(self, *, gc_bytes: int, none_bytes: int) -> int:
        """Integer bytes of the cap, given the measured peaks of checkpointing and of no checkpointing."""
        if self.nbytes is not None:
            return self.nbytes
        return math.floor(self.ratio * {"gc": gc_bytes, "none": none_bytes}[self.reference])


def parse_cap(text: str) -> Cap:
    """Read "1.1x-gc", "0.9x-none" or a size such as "40GiB". Raises UsageError."""
    if match := _RATIO.match(text):
        ratio = float(match[1])
        if 0 < ratio < 1e6:
            return Cap(text=text.strip(), ratio=ratio, reference=match[2].lower(), nbytes=None)
    elif _SIZE.match(text):
        return Cap(text=text.strip(), ratio=None, reference=None, nbytes=parse_bytes(text))
    raise UsageError(f"memory cap {text!r} is not understood; write 1.1x-gc, 0.9x-none or a size such as 40GiB")


def parse_bytes(text: str) -> int:
    """Read "40GiB", "1.5 GB", "100MiB". Raises UsageError."""
    match = _SIZE.match(text)
    if not match or not 0 < float(match[1]) < 1e18:
        raise UsageError(f"size {text!r} is not understood; write a positive number with a unit, such as 40GiB or 500MB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(nbytes: float) -> str:
    """1536 -> '1.5 KiB'; four significant digits."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"


def format_us(us: float) -> str:
    """1500 -> '1.5 ms'."""
    for limit, divisor, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if abs(us) < limit:
            return f"{us / divisor:.4g} {unit}"
    raise UsageError(f"a duration must be finite, not {us}")


def format_gain(ratio: float) -> str:
    """1.135 -> '+13.5 %'."""
    return f"{(ratio - 1) * 100:+.1f} %"
