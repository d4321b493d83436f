"""Sums of squares in float64 without a copy of the tensor in it: of an 8B model's embedding that would be 4 GB, beside a card that is full."""

from __future__ import annotations

from torch import Tensor

PART_NUMEL = 2**24
"""Elements at a time: 128 MiB in float64."""


def squared_norm(tensor: Tensor) -> float:
    """||x||^2."""
    return sum(float(part.double().square().sum()) for part in tensor.reshape(-1).split(PART_NUMEL))


def squared_distance(a: Tensor, b: Tensor) -> float:
    """||a - b||^2, subtracted in float64."""
    parts = zip(a.reshape(-1).split(PART_NUMEL), b.reshape(-1).split(PART_NUMEL), strict=True)
    return sum(float((x.double() - y.double()).square().sum()) for x, y in parts)
