"""AblationReport: what each idea of a plan is worth. Written by ablation_bench.py, read by tables and people."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hilore_cli.provenance import BatchId, Machine, ModelId
from hilore_cli.records import Strict
from hilore_cli.schema import Prediction, UpdatePrediction

ABLATION_VERSION = 1


class AblationMeasurement(Strict):
    """One plan run beside the others. Ratios are medians of pairs within a repeat, from the report's clock, with their interval."""

    step_us: float = Field(description="median, from the report's clock")
    peak_bytes: int
    rel_error: float = Field(description="relative gradient error against no checkpointing; 0 means bitwise equal")
    speedup_vs_gc: float
    speedup_low: float
    speedup_high: float
    recovered: float = Field(description="(T_gc - T) / (T_gc - T_none)")


class AblationRow(Strict):
    """The plan, or the plan without one of its ideas."""

    name: str
    patterns: int = Field(description="distinct patterns of layers")
    predicted: Prediction
    fits: bool = Field(description="whether the predicted peak is under the cap")
    within_risk: bool = Field(description="whether the predicted gradient error is within the risk")
    measured: AblationMeasurement | None = Field(description="None where nothing was run")


class AblationReport(Strict):
    """Plans for the largest micro-batch of one profile under one cap and one risk, each solved without one idea."""

    format: Literal["hilore-ablation"] = "hilore-ablation"
    version: int = ABLATION_VERSION
    date: str
    profile: str
    model: ModelId
    estimated: bool = Field(description="whether the profile was made without its device")
    machine: Machine | None = Field(description="that the plans were run on")
    batches: list[BatchId] = Field(description="micro-batches of the update that was run")
    cap_bytes: int = Field(gt=0)
    risk: float
    codecs: list[str]
    repeats: int
    clock: Literal["wall", "cpu"] = Field(description="CPU time at one thread, wall time at more")
    gc_us: float = Field(description="profiled step of checkpointing")
    none_us: float
    rows: list[AblationRow] = Field(min_length=1)
    update: dict[str, UpdatePrediction] = Field(description="the whole update by exposure and size, by size alone, with one variant; empty for few micro-batches")
