"""Device models: how long an operator would take on a GPU that is not there.

    time = max(flops / (rate * fraction), bytes / (bandwidth * fraction)) + launch

with every input read and every output written once. The rates are the vendors'; which share of them libraries reach is a field, taken
from publications, or fitted to a measured profile of that device (`calibrated`), which also tells the error: of each operator, by
fractions from the others. What this does NOT know: clocks under load, caches, overlap of kernels, or a multi-GPU step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median
from typing import Literal

from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.schema import GraphNode, Profile

GIB = 2**30
MIB = 2**20
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
LEAST_SAMPLES = 3
"""Operators of a kind below which its fraction is not fitted."""

Kind = Literal["matmul", "attention", "other"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one operator does: floating-point operations on the matrix units at a dtype, and bytes read and written."""

    kind: Kind
    flops: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One operator that was measured."""

    work: Work
    time_us: float


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """One GPU's dense rates and what libraries make of them. `reported_as`: part of the name that torch gives it."""

    name: str
    reported_as: str
    half_tflops: float
    """bf16 and fp16 with fp32 accumulation, without sparsity"""
    single_tflops: float
    """fp32 as eager torch multiplies by default: without TF32"""
    bandwidth_gbs: float
    memory_bytes: int
    workspace_bytes: int
    """what cuBLAS (hipBLAS) keeps: one workspace for each of the two threads that multiply matrices, forward's and backward's"""
    launch_us: float
    matrix_fraction: float
    attention_fraction: float
    bandwidth_fraction: float
    source: str
    fractions_from: str = field(default="published measurements of library kernels at training sizes; not measured by hilore")

    def time_us(self, work: Work) -> float:
        """Microseconds of one operator."""
        return self._busy_us(work) + self.launch_us

    def copy_us(self, nbytes: int) -> float:
        """Microseconds of moving so many bytes, read and written counted."""
        return self.time_us(Work(kind="other", flops=0, nbytes=nbytes, dtype=""))

    def _busy_us(self, work: Work) -> float:
        return max(self._compute_us(work), self._memory_us(work))

    def _limit_us(self, work: Work) -> float:
        """What the kind is fitted by: products and attention by their operations, all else by bytes."""
        return self._compute_us(work) if work.flops else self._memory_us(work)

    def _compute_us(self, work: Work) -> float:
        fraction = self.attention_fraction if work.kind == "attention" else self.matrix_fraction
        return 1e6 * work.flops / (self._rate(work.dtype) * fraction)

    def _memory_us(self, work: Work) -> float:
        return 1e6 * work.nbytes / (self.bandwidth_gbs * 1e9 * self.bandwidth_fraction)

    def _rate(self, dtype: str) -> float:
        return 1e12 * (self.half_tflops if dtype in ("bfloat16", "float16") else self.single_tflops)


_CUBLAS = "workspaces: torch's defaults, 32 MiB on compute capability 9.0, else 8.125 MiB, times two threads; launch: an eager operator of torch on a current host"

DEVICES = {
    device.name: device
    for device in (
        DeviceModel(name="h100", reported_as="H100", half_tflops=989.4, single_tflops=66.9, bandwidth_gbs=3350, memory_bytes=80 * 10**9, workspace_bytes=64 * MIB, launch_us=5.0, matrix_fraction=0.65, attention_fraction=0.35, bandwidth_fraction=0.85, source=f"NVIDIA H100 data sheet, SXM5: 1979 TFLOPS bf16 with sparsity, 67 fp32, 3.35 TB/s, 80 GB; {_CUBLAS}"),
        DeviceModel(name="h200", reported_as="H200", half_tflops=989.4, single_tflops=66.9, bandwidth_gbs=4800, memory_bytes=141 * 10**9, workspace_bytes=64 * MIB, launch_us=5.0, matrix_fraction=0.65, attention_fraction=0.35, bandwidth_fraction=0.85, source=f"NVIDIA H200 data sheet, SXM: 1979 TFLOPS bf16 with sparsity, 67 fp32, 4.8 TB/s, 141 GB; {_CUBLAS}"),
        DeviceModel(name="a100", reported_as="A100", half_tflops=312.0, single_tflops=19.5, bandwidth_gbs=2039, memory_bytes=80 * 10**9, workspace_bytes=2 * 8_519_680, launch_us=5.0, matrix_fraction=0.8, attention_fraction=0.5, bandwidth_fraction=0.85, source=f"NVIDIA A100 data sheet, SXM4 80 GB: 312 TFLOPS bf16, 19.5 fp32, 2039 GB/s; {_CUBLAS}"),
        DeviceModel(name="l40s", reported_as="L40S", half_tflops=362.05, single_tflops=91.6, bandwidth_gbs=864, memory_bytes=48 * 10**9, workspace_bytes=2 * 8_519_680, launch_us=5.0, matrix_fraction=0.65, attention_fraction=0.4, bandwidth_fraction=0.85, source=f"NVIDIA L40S data sheet: 362.05 TFLOPS bf16 without sparsity, 91.6 fp32, 864 GB/s, 48 GB; {_CUBLAS}"),
        DeviceModel(name="rtx4090", reported_as="RTX 4090", half_tflops=165.2, single_tflops=82.6, bandwidth_gbs=1008, memory_bytes=24 * 10**9, workspace_bytes=2 * 8_519_680, launch_us=5.0, matrix_fraction=0.9, attention_fraction=0.7, bandwidth_fraction=0.9, source=f"NVIDIA Ada GPU architecture white paper: 165.2 TFLOPS bf16 with fp32 accumulation, 82.6 fp32, 1008 GB/s, 24 GB; {_CUBLAS}"),
        DeviceModel(name="mi300x", reported_as="MI300X", half_tflops=1307.4, single_tflops=163.4, bandwidth_gbs=5300, memory_bytes=192 * 10**9, workspace_bytes=256 * MIB, launch_us=7.0, matrix_fraction=0.45, attention_fraction=0.25, bandwidth_fraction=0.75, source="AMD Instinct MI300X data sheet: 1307.4 TFLOPS bf16, 163.4 fp32 matrix, 5.3 TB/s, 192 GB; workspaces: torch's default of 128 MiB on gfx94x, times two threads; launch: an eager operator of torch on a current host"),
    )
}

CPU_MODEL = DeviceModel(name="cpu-model", reported_as="cpu", half_tflops=1.0, single_tflops=1.0, bandwidth_gbs=100, memory_bytes=0, workspace_bytes=0, launch_us=0.0, matrix_fraction=1.0, attention_fraction=1.0, bandwidth_fraction=1.0, source="nominal figures; all that counts of them is what calibration makes of them", fractions_from="nothing yet")
"""A CPU has no data sheet that would tell: it is offered only when a measured profile calibrates it."""

NAMES = (*DEVICES, CPU_MODEL.name)


def choose_model(name: str, *, measured: Sequence[Profile]) -> tuple[DeviceModel, float | None]:
    """The device model of that name, calibrated on the measured profiles of that device where there are any; and its median error.

    Raises UsageError for an unknown name, and for a CPU that no profile calibrates.
    """
    if name not in NAMES:
        raise UsageError(f"device {name!r}: unknown; use cpu or cuda to measure, or a model: {', '.join(NAMES)}")
    device = DEVICES.get(name, CPU_MODEL)
    samples = [sample for profile in measured if is_measured_on(profile, device) for sample in samples_of(profile)]
    if not samples:
        if device is CPU_MODEL:
            raise UsageError("device cpu-model: needs a profile measured on this CPU to calibrate it; measure a small model first (hilore profile --device cpu), and name it with --relative")
        return device, None
    return calibrated(device, samples), time_error(device, samples)


def is_measured_on(profile: Profile, device: DeviceModel) -> bool:
    """Whether a profile was measured on that kind of device."""
    return profile.estimate is None and device.reported_as.lower() in profile.machine.device.lower()


def calibrated(device: DeviceModel, samples: Sequence[Sample]) -> DeviceModel:
    """The device with fractions such that half of the measured operators of each kind were faster, and its shortest one as launch cost.

    A kind with fewer than LEAST_SAMPLES keeps its fraction.
    """
    launch = min(sample.time_us for sample in samples)
    fitted = replace(device, launch_us=launch, fractions_from="measured profiles")
    bandwidth = _fraction(fitted, [s for s in samples if s.work.kind == "other"])
    fitted = fitted if bandwidth is None else replace(fitted, bandwidth_fraction=fitted.bandwidth_fraction * bandwidth)
    for kind, name in (("matmul", "matrix_fraction"), ("attention", "attention_fraction")):
        share = _fraction(fitted, [s for s in samples if s.work.kind == kind], least=1 if kind == "attention" else LEAST_SAMPLES)
        if share is not None:
            fitted = replace(fitted, **{name: getattr(fitted, name) * share})
    return fitted


def time_error(device: DeviceModel, samples: Sequence[Sample]) -> float | None:
    """Median of |computed / measured - 1| over operators, each by the fractions that all the others give; None with too few."""
    if len(samples) <= LEAST_SAMPLES:
        return None
    errors = []
    for i, sample in enumerate(samples):
        others = [s for j, s in enumerate(samples) if j != i]
        errors.append(abs(calibrated(device, others).time_us(sample.work) / sample.time_us - 1))
    return median(errors)


def samples_of(profile: Profile) -> list[Sample]:
    """The measured operators of a profile, with their work read off its rows; products of more than two dimensions are left out.

    A product [M,K] x [K,N] has 2 MNK = 2 sqrt(MK * KN * MN) operations, which the three sizes tell. Attention: 4 S for each element
    of its result, S the length of a row.
    """
    itemsize = ITEMSIZE.get(profile.model.dtype)
    if itemsize is None:
        raise ProfileError(f"profile {profile.name}: dtype {profile.model.dtype} is not one of {', '.join(ITEMSIZE)}")
    found = []
    for layer_class in profile.classes:
        for row in layer_class.nodes:
            if row.side == "forward" and row.time_us > 0 and "getitem" not in row.target and (work := _work_of_row(layer_class.nodes, row, dtype=profile.model.dtype, itemsize=itemsize, length=profile.batch.length)) is not None:
                found.append(Sample(work=work, time_us=row.time_us))
    return found


# --------------------------------------------------------------------------------------------------------------- helpers


def _work_of_row(rows: Sequence[GraphNode], row: GraphNode, *, dtype: str, itemsize: int, length: int) -> Work | None:
    outputs = [row.nbytes, *(r.nbytes for r in rows[row.index + 1 :] if r.inputs == [row.index] and "getitem" in r.target)]
    read = [rows[storage].nbytes for storage in dict.fromkeys(rows[i].storage for i in row.inputs) if storage >= 0]
    nbytes = sum(read) + sum(outputs)
    if "scaled_dot_product" in row.target:
        return Work(kind="attention", flops=4 * length * max(outputs, default=0) // itemsize, nbytes=nbytes, dtype=dtype)
    if row.target in ("aten.mm.default", "aten.addmm.default"):
        sizes = [n // itemsize for n in (*read[-2:], row.nbytes)]
        if len(sizes) < 3:
            return None
        return Work(kind="matmul", flops=round(2 * sqrt(sizes[0] * sizes[1] * sizes[2])), nbytes=nbytes, dtype=dtype)
    return None if row.matmul or not nbytes else Work(kind="other", flops=0, nbytes=nbytes, dtype=dtype)


def _fraction(device: DeviceModel, samples: Iterable[Sample], *, least: int = LEAST_SAMPLES) -> float | None:
    """Median of computed over measured time, launch taken off; None with too few samples."""
    shares = [device._limit_us(s.work) / (s.time_us - device.launch_us) for s in samples if s.time_us > device.launch_us]
    return median(shares) if len(shares) >= least else None


