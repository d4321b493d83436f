"""BenchReport and CodecBenchReport: what `hilore bench` and `hilore bench --codecs` measured. Written by bench.py and codec_bench.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hilore_cli.provenance import BatchId, Machine
from hilore_cli.records import Strict

BENCH_VERSION = 2
CODEC_BENCH_VERSION = 1


class MethodRow(Strict):
    """One method of a benchmark. Times are medians over the repeats; speed-ups are medians of ratios paired within a repeat."""

    name: str
    wall_us: float
    cpu_us: float = Field(description="CPU time of all threads")
    peak_bytes: int
    rel_error: float = Field(description="relative gradient error against no checkpointing; 0 means bitwise equal")
    speedup_vs_gc: float
    speedup_low: float = Field(description="interval of the paired ratios: 95 % by order statistics from 6 repeats on, else the range")
    speedup_high: float
    cpu_speedup_vs_gc: float = Field(description="the same from CPU time; the steadier figure at one thread")
    cpu_speedup_low: float
    cpu_speedup_high: float
    recovered: float = Field(description="(T_gc - T) / (T_gc - T_none), median over the repeats, from the report's clock")
    recovered_low: float
    recovered_high: float


class Outcome(Strict):
    """The same four figures, predicted by the plan or measured by the benchmark."""

    peak_bytes: int
    step_us: float
    rel_error: float
    speedup_vs_gc: float


class BenchReport(Strict):
    """none, checkpointing, the plan and whatever else was asked for, interleaved in one process on one update."""

    format: Literal["hilore-bench"] = "hilore-bench"
    version: int = BENCH_VERSION
    plan: str
    plan_digest: str
    date: str
    machine: Machine
    batches: list[BatchId] = Field(min_length=1, description="micro-batches of the update")
    head: str
    repeats: int
    clock: Literal["wall", "cpu"] = Field(description="what the four figures below are taken from: CPU time at one thread, wall time at more")
    methods: list[MethodRow]
    speedup_vs_gc: float
    ceiling_vs_gc: float = Field(description="speed-up of no checkpointing over checkpointing")
    recovered: float = Field(description="(T_gc - T_plan) / (T_gc - T_none)")
    peak_vs_gc: float
    rel_error: float
    predicted: Outcome
    measured: Outcome


class CodecPace(Strict):
    """One direction of a codec. Fractions are medians of ratios paired within a repeat with a clone of the same tensor."""

    us: float = Field(gt=0, description="median of the repeats")
    gb_per_s: float = Field(description="bytes of the tensor, in 10^9, over that time")
    of_clone: float = Field(description="time of the clone over that of the codec")
    of_clone_low: float = Field(description="interval of the paired ratios: 95 % by order statistics from 6 repeats on, else the range")
    of_clone_high: float
    bandwidth_of_clone: float = Field(description="the same of bytes moved a second: tensor and payload once each, against reading and writing the tensor")


class CodecBenchRow(Strict):
    """One codec on one tensor."""

    codec: str
    stochastic: bool
    dtype: str
    nbytes: int = Field(gt=0)
    payload_bytes: int = Field(gt=0)
    clone_us: float = Field(gt=0)
    clone_gb_per_s: float
    compress: CodecPace
    decompress: CodecPace
    break_even_width: int | None = Field(description="a product of a smaller inner width is recomputed in less time than the tensor is compressed and restored; None for masks, which no product makes, and where the products' times do not grow with their width")


class ProductTimes(Strict):
    """Times of x @ W into [rows, columns] at several inner widths, and the line fitted to them."""

    dtype: str
    nbytes: int = Field(gt=0)
    rows: int
    columns: int
    widths: list[int]
    us: list[float] = Field(description="medians of the repeats, one a width")
    fixed_us: float = Field(description="time = fixed_us + us_per_width * inner width, by least squares of relative deviations")
    us_per_width: float
    largest_deviation: float = Field(ge=0, description="of the line from a measured time, relative to it")

    @model_validator(mode="after")
    def _one_time_a_width(self) -> ProductTimes:
        if len(self.widths) != len(self.us):
            raise ValueError(f"{len(self.widths)} widths have {len(self.us)} times")
        return self


class CodecBenchReport(Strict):
    """Codecs by themselves, each beside a plain copy, and the products whose recomputation they compete with."""

    format: Literal["hilore-codec-bench"] = "hilore-codec-bench"
    version: int = CODEC_BENCH_VERSION
    date: str
    machine: Machine
    repeats: int
    clock: Literal["wall", "cpu", "device"] = Field(description="CPU time at one thread, wall time at more, CUDA events on a GPU")
    rows: list[CodecBenchRow] = Field(min_length=1)
    products: list[ProductTimes]
