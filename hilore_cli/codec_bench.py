"""Codecs by themselves: GB/s of each codec, dtype and size beside a plain copy, and what recomputing would cost instead.

    hilore bench --codecs all --threads 1

For one dtype and size everything takes turns within a repeat: of each codec a clone of the tensor, compress and decompress; then products x @ W
into a tensor of that size, of several inner widths K, on which time = fixed + K * per width is fitted. Where that line crosses the time of compress and
decompress together is the codec's break-even width: a product of a smaller K is recomputed in less time than it is compressed and restored.

What it does NOT do: judge errors (codecs/bounds.py, risk.py); measure a codec inside an update, on its own activations (profiler.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilore_cli.bench import paired_interval
from hilore_cli.bench_records import CodecBenchReport, CodecBenchRow, CodecPace, ProductTimes
from hilore_cli.codecs import Codec, compress, decompress, get_codec
from hilore_cli.codecs.formats import FLOATS, RowwiseCodec
from hilore_cli.errors import UsageError
from hilore_cli.identities import describe_machine
from hilore_cli.sizes import format_bytes
from hilore_cli.workbench import Progress

EACH_KIND = "all"
"""As the name of a codec: `codecs_of_each_kind`."""

MIB = 2**20
DTYPES = (*FLOATS, torch.bool)
SPARE_BYTES = 512 * MIB
"""For what codecs hold while they work through a tensor part by part, and for the matrix that keeps a GPU busy."""
HEAP_RESULTS = 4
"""Results of the tensor's size that a CPU's heap comes to hold before it settles (malloc.py), though one lives at a time: 256 MiB grew it by 2.2 GiB in all."""
ROWWISE_BYTES_PER_ELEMENT = 64
"""What the fbgemm codecs hold beside a tensor where they run in plain torch, all at once: fp32 and float64 copies."""

WIDTH_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 4, 1)
"""Inner widths of the products that are measured, of the tensor's columns."""
FEWEST_WIDTHS = 3
LONGEST_PRODUCT_US = 1e6
"""No wider product is measured than the first that takes so long, but for the fewest widths."""

SAMPLE_US = 5e3
MOST_CALLS = 20
"""One sample is as many calls as fill SAMPLE_US, this many at most."""
BUSY_WIDTH = 8192

Run = Callable[[], Any]


def codecs_of_each_kind(device: torch.device) -> tuple[str, ...]:
    """One codec of each kind, those to the nearest first; the fbgemm ones where they have a kernel."""
    own = ("fbgemm-int8", "fbgemm-int4") if device.type == "cpu" else ()
    return (*own, "int8", "int8-asym", "int4", "int4-asym", "e4m3", "bf16", "mask", "int8-sr", "int4-sr", "e4m3-sr", "bf16-sr")


def default_sizes(device: torch.device) -> tuple[int, ...]:
    """Bytes: within the caches of one core or of a GPU, and far beyond."""
    return (2 * MIB, 16 * MIB, 64 * MIB) if device.type == "cpu" else (16 * MIB, 256 * MIB, 1024 * MIB)


def columns_of(device: torch.device) -> int:
    """Columns of every tensor that is measured: about those of the models that are trained on such a device."""
    return 1024 if device.type == "cpu" else 4096


def bench_codecs(names: Sequence[str], *, device: torch.device, sizes: Sequence[int], repeats: int, progress: Progress) -> CodecBenchReport:
    """Each named codec on each dtype that it takes and each of `sizes` (bytes, rounded down to whole rows).

    `all` among the names stands for one codec of each kind. Raises UsageError for an unknown codec and, before anything is measured, for a
    size that does not fit.
    """
    expanded = [part for name in names for part in (codecs_of_each_kind(device) if name == EACH_KIND else (name,))]
    chosen = [get_codec(name) for name in dict.fromkeys(expanded)]
    if not chosen:
        raise UsageError(f"no codec is named; give {EACH_KIND}, or names such as int8,e4m3")
    ordered = sorted(set(sizes))
    check_sizes(ordered, chosen, device=device)
    stopwatch = Stopwatch(device)
    cases = [(dtype, nbytes) for dtype in DTYPES for nbytes in ordered if any(dtype in codec.dtypes for codec in chosen)]

    def tell(label: str, before: int, done: int) -> None:
        progress(label, before + done, len(cases) * (repeats + 1))

    rows: list[CodecBenchRow] = []
    products: list[ProductTimes] = []
    for position, (dtype, nbytes) in enumerate(cases):
        takers = [codec for codec in chosen if dtype in codec.dtypes]
        tick = partial(tell, f"{_name(dtype)}, {format_bytes(nbytes)}", position * (repeats + 1))
        measured, product = measure_case(takers, dtype, nbytes, stopwatch=stopwatch, repeats=repeats, tick=tick)
        rows += measured
        products += [product] if product else []
    rank = {codec.name: place for place, codec in enumerate(chosen)}
    return CodecBenchReport(
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(device),
        repeats=repeats,
        clock=stopwatch.clock,
        rows=sorted(rows, key=lambda row: rank[row.codec]),
        products=products,
    )


# ---------------------------------------------------------------------------------------------------------- what is timed


def measure_case(takers: Sequence[Codec], dtype: torch.dtype, nbytes: int, *, stopwatch: Stopwatch, repeats: int, tick: Callable[[int], None]) -> tuple[list[CodecBenchRow], ProductTimes | None]:
    """All codecs that take a dtype, and the products, on one tensor of that size. `tick` is told the number of rounds done."""
    x = draw_tensor(dtype, nbytes, device=stopwatch.device)
    products = product_runs(x, stopwatch=stopwatch)
    runs = {**codec_runs(x, takers), **{("product", str(width)): run for width, run in products.items()}}
    samples = time_interleaved(runs, repeats=repeats, stopwatch=stopwatch, tick=tick)
    product = product_times(x, {width: median(samples["product", str(width)]) for width in products}) if products else None
    return [codec_row(codec, x, samples, product=product) for codec in takers], product


def draw_tensor(dtype: torch.dtype, nbytes: int, *, device: torch.device) -> Tensor:
    """[rows, columns] of about `nbytes`: normal values; bools that are true nine times in ten, as dropout's are."""
    columns = columns_of(device)
    shape = (nbytes // (columns * dtype.itemsize), columns)
    generator = torch.Generator(device=device).manual_seed(0)
    if dtype == torch.bool:
        return torch.empty(shape, dtype=dtype, device=device).bernoulli_(0.9, generator=generator)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def codec_runs(x: Tensor, takers: Sequence[Codec]) -> dict[tuple[str, str], Run]:
    """A clone, compress and decompress of each codec, in this order; holds one payload of each."""
    runs: dict[tuple[str, str], Run] = {}
    for codec in takers:
        runs[codec.name, "clone"] = x.clone
        runs[codec.name, "compress"] = partial(compress, x, codec)
        runs[codec.name, "decompress"] = partial(decompress, compress(x, codec), codec, dtype=x.dtype, size=x.shape, stride=x.stride())
    return runs


def product_runs(x: Tensor, *, stopwatch: Stopwatch) -> dict[int, Run]:
    """Products into tensors like x by their inner width, up to the first that takes very long; none for bools, which no product makes."""
    runs: dict[int, Run] = {}
    if x.dtype == torch.bool:
        return runs
    rows, columns = x.shape
    for share in WIDTH_SHARES:
        width = int(columns * share)
        left, weight = (x.new_empty(length, width).normal_() for length in (rows, columns))
        runs[width] = partial(torch.mm, left, weight.t())  # a linear layer's weight lies as [columns, width]
        if stopwatch.us_per_call(runs[width]) > LONGEST_PRODUCT_US and len(runs) >= FEWEST_WIDTHS:
            break
    return runs


def time_interleaved(runs: Mapping[tuple[str, str], Run], *, repeats: int, stopwatch: Stopwatch, tick: Callable[[int], None]) -> dict[tuple[str, str], list[float]]:
    """Microseconds a call, one sample of every run in every repeat, after a round that is not counted: it compiles, lets the heap settle, and
    says how many calls make a sample. `tick` is told the number of rounds done."""
    tick(0)
    for run in runs.values():
        run()
    calls = {key: max(1, min(MOST_CALLS, math.ceil(SAMPLE_US / max(stopwatch.us_per_call(run), 1e-3)))) for key, run in runs.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for repeat in range(repeats):
        tick(repeat + 1)
        for key, run in runs.items():
            samples[key].append(stopwatch.us_per_call(run, calls=calls[key]))
    return samples


class Stopwatch:
    """Microseconds a call: of CPU time at one thread, where it is the steadier figure, else of wall time; of CUDA events on a GPU.

    There a product that is not timed goes first and keeps the GPU busy while the calls are being launched, so that the time between launches is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._busy = torch.ones(BUSY_WIDTH, BUSY_WIDTH, dtype=torch.bfloat16, device=device) if device.type == "cuda" else None
        self.clock = "device" if self._busy is not None else "cpu" if torch.get_num_threads() == 1 else "wall"

    def us_per_call(self, run: Run, *, calls: int = 1) -> float:
        if self._busy is not None:
            return self._device_us(run, calls=calls)
        now = time.process_time_ns if self.clock == "cpu" else time.perf_counter_ns
        begin = now()
        for _ in range(calls):
            run()
        return (now() - begin) / 1e3 / calls

    def _device_us(self, run: Run, *, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(self._busy, self._busy)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls


# ------------------------------------------------------------------------------------------------------------- what follows


def codec_row(codec: Codec, x: Tensor, samples: Mapping[tuple[str, str], Sequence[float]], *, product: ProductTimes | None) -> CodecBenchRow:
    """The figures of one codec on one tensor, from the samples (microseconds) of its clone, compress and decompress."""
    nbytes, payload = x.nbytes, codec.payload_bytes(x.numel())
    clones = samples[codec.name, "clone"]
    paces = {side: codec_pace(samples[codec.name, side], clones, nbytes=nbytes, payload_bytes=payload) for side in ("compress", "decompress")}
    return CodecBenchRow(
        codec=codec.name,
        stochastic=codec.stochastic,
        dtype=_name(x.dtype),
        nbytes=nbytes,
        payload_bytes=payload,
        clone_us=median(clones),
        clone_gb_per_s=nbytes / median(clones) / 1e3,
        **paces,
        break_even_width=None if product is None else break_even_width(paces["compress"].us + paces["decompress"].us, fixed_us=product.fixed_us, us_per_width=product.us_per_width),
    )


def codec_pace(own: Sequence[float], clones: Sequence[float], *, nbytes: int, payload_bytes: int) -> CodecPace:
    """One direction of a codec against clones in the same repeats, microseconds both. A clone moves 2 * nbytes, a codec nbytes + payload_bytes."""
    ratios = [clone / us for us, clone in zip(own, clones, strict=True)]
    low, high = paired_interval(ratios)
    of_clone = median(ratios)
    return CodecPace(
        us=median(own),
        gb_per_s=nbytes / median(own) / 1e3,
        of_clone=of_clone,
        of_clone_low=low,
        of_clone_high=high,
        bandwidth_of_clone=of_clone * (nbytes + payload_bytes) / (2 * nbytes),
    )


def product_times(x: Tensor, us: Mapping[int, float]) -> ProductTimes:
    """The line through the times (microseconds) of products into tensors like x, by their inner width."""
    rows, columns = x.shape
    fixed, slope = fit_line(list(us), list(us.values()))
    return ProductTimes(
        dtype=_name(x.dtype),
        nbytes=x.nbytes,
        rows=rows,
        columns=columns,
        widths=list(us),
        us=list(us.values()),
        fixed_us=fixed,
        us_per_width=slope,
        largest_deviation=max(abs(fixed + slope * width - measured) / measured for width, measured in us.items()),
    )


def fit_line(widths: Sequence[int], us: Sequence[float]) -> tuple[float, float]:
    """(fixed, per width) with the least squares of relative deviations: small products count as much as large ones, being nearer to what codecs take."""
    times = np.asarray(us)
    design = np.stack([np.ones(len(widths)), np.asarray(widths, dtype=float)], axis=1) / times[:, None]
    fixed, slope = np.linalg.lstsq(design, np.ones(len(widths)), rcond=None)[0]
    return float(fixed), float(slope)


def break_even_width(codec_us: float, *, fixed_us: float, us_per_width: float) -> int | None:
    """The K from which on a product takes at least as long as the codec, 0 where all do; None where times do not grow with K."""
    if us_per_width <= 0:
        return None
    return max(0, math.ceil(round((codec_us - fixed_us) / us_per_width, 3)))


# -------------------------------------------------------------------------------------------------------------- what fits


def check_sizes(sizes: Sequence[int], chosen: Sequence[Codec], *, device: torch.device) -> None:
    """Raise UsageError for a size that is below one row of every tensor, or that free memory does not hold with all that is measured on it."""
    least = columns_of(device) * max(dtype.itemsize for codec in chosen for dtype in codec.dtypes)
    free = free_bytes(device)
    for size in sizes:
        if size < least:
            raise UsageError(f"size {format_bytes(size)}: below one row of {columns_of(device)} elements, {format_bytes(least)}; give larger --sizes")
        if (needed := needed_bytes(size, chosen, device=device)) > free:
            raise UsageError(f"size {format_bytes(size)}: measuring it takes about {format_bytes(needed)}, and {format_bytes(free)} are free on this {device.type}; give smaller --sizes, such as {format_bytes(default_sizes(device)[0])}")


def needed_bytes(size: int, chosen: Sequence[Codec], *, device: torch.device) -> int:
    """The tensor, its copies, every payload, the operands of all products, and what codecs hold beside them."""
    most = 0
    for dtype in DTYPES:
        takers = [codec for codec in chosen if dtype in codec.dtypes]
        numel = size // dtype.itemsize
        payloads = sum(codec.payload_bytes(numel) for codec in takers)
        whole = any(isinstance(codec, RowwiseCodec) for codec in takers) and device.type != "cpu"
        most = max(most, payloads + numel * ROWWISE_BYTES_PER_ELEMENT * whole)
    results = HEAP_RESULTS if device.type == "cpu" else 1
    return size * (1 + results) + math.ceil(size * sum(WIDTH_SHARES)) + most + SPARE_BYTES


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now, bytes; where the system does not say (no /proc/meminfo), all there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
