"""SuiteReport: what `hilore bench --suite` measured. Written by suite.py, read by tables, pictures and people."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hilore_cli.provenance import BatchId, Machine, ModelId
from hilore_cli.records import Strict

SUITE_VERSION = 1


class SuiteRow(Strict):
    """One method under one loss head. Ratios are medians of pairs within a repeat, from the report's clock, each with its interval (95 % by
    order statistics from 6 repeats on, else the range).
    """

    method: str
    head: str
    setting: str = Field(description="what was chosen of a method that has settings, in words")
    ours: bool
    fits: bool = Field(description="whether the measured peak is under the cap")
    wall_us: float
    cpu_us: float = Field(description="CPU time of all threads")
    peak_bytes: int
    rel_error: float = Field(description="relative gradient error against no checkpointing with the same head; 0 means bitwise equal")
    speedup_vs_gc: float = Field(description="over checkpointing with the same head")
    speedup_low: float
    speedup_high: float
    vs_best_peer: float | None = Field(description="speed-up over the fastest peer with the same head that fits; None where no peer fits")
    vs_best_peer_low: float | None
    vs_best_peer_high: float | None
    recovered: float = Field(description="(T_gc - T) / (T_gc - T_none), same head")
    recovered_low: float
    recovered_high: float


class Candidate(Strict):
    """One setting of a method that was tried; times are medians of two short timings, None where it did not fit or was the only one that did."""

    method: str
    head: str
    setting: str
    peak_bytes: int
    fits: bool
    step_us: float | None
    chosen: bool


class SuiteReport(Strict):
    """All methods side by side, interleaved in one process on one update, under one absolute cap."""

    format: Literal["hilore-suite"] = "hilore-suite"
    version: int = SUITE_VERSION
    date: str
    machine: Machine
    model: ModelId
    batches: list[BatchId] = Field(min_length=1, description="micro-batches of the update")
    cap_bytes: int = Field(gt=0)
    risk: float = Field(description="what paper-dp was allowed, that of the first plan")
    plans: dict[str, str] = Field(description="digest of each of our rows' plan")
    repeats: int
    clock: Literal["wall", "cpu"] = Field(description="CPU time at one thread, wall time at more")
    rows: list[SuiteRow] = Field(min_length=1)
    candidates: list[Candidate]
    left_out: dict[str, str] = Field(description="methods that cannot run on this model, with the reason")
