"""Finding: one line of `hilore doctor`. Made by doctor.py and trainer_settings.py, shown by views/doctor.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was looked at, how it is, and the figures or the remedy."""

    subject: str
    name: str
    status: Status
    detail: str


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """Those that block."""
    return [finding for finding in findings if finding.status == "problem"]
