"""CheckReport: what `hilore check` found out about committed plans. Written by check.py, read by CI."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hilore_cli.records import Strict

CHECK_VERSION = 1

Status = Literal["passed", "failed", "skipped"]


class Check(Strict):
    """One question about one file."""

    name: str
    status: Status
    detail: str = Field(description="the figures that decided; for what failed the remedy, for what was skipped the reason")


class Limits(Strict):
    """How far a figure may grow over the committed one, as a share of it."""

    peak_growth: float = Field(default=0.01, ge=0)
    step_growth: float = Field(default=0.01, ge=0)
    risk_growth: float = Field(default=0.1, ge=0, description="of gradient errors: measured ones differ between machines by the order of their sums")


class FileChecks(Strict):
    """All that was asked about one plan."""

    path: str
    kind: Literal["plan", "frozen plan", "unreadable"]
    profile: str | None = Field(description="name of the profile that it was planned from, where it is known")
    estimated: bool = Field(description="whether its profile was computed without the device")
    checks: list[Check] = Field(min_length=1)


class CheckReport(Strict):
    """Plans, frozen plans and their profiles, as they were found."""

    format: Literal["hilore-check"] = "hilore-check"
    version: int = CHECK_VERSION
    date: str
    hilore: str
    solver: str
    limits: Limits
    passed: int
    failed: int
    skipped: int
    files: list[FileChecks] = Field(min_length=1)
