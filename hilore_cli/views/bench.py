"""Benchmarks: methods side by side, and codecs by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes, format_gain, format_us
from hilore_cli.views.layout import (
    error_figure,
    figure,
    gain_interval,
    lines,
    machine_words,
    make_table,
    percent,
    stack,
    threads_words,
)

if TYPE_CHECKING:
    from hilore_cli.bench_records import BenchReport, CodecBenchReport, CodecPace

CLONE_GOAL = 0.5
"""What a codec is to reach of the speed of a clone on a CPU."""
BANDWIDTH_GOAL = 0.8
"""What a codec that rounds to the nearest is to reach of the bandwidth of a clone on a GPU."""


def bench_view(report: BenchReport) -> RenderableType:
    """The methods of a benchmark side by side, and predicted against measured. At one thread of a CPU the ratios are of CPU time, which is steadier."""
    one_thread = report.clock == "cpu"
    head = lines(
        f"plan {report.plan} on {machine_words(report.machine)}, torch {report.machine.torch}, {report.date}",
        f"{_batches(report)}; {report.repeats} interleaved repeats, ratios of {'CPU time' if one_thread else 'wall time'} paired",
    )
    table = make_table("method", "step >", "vs GC >", "(interval) >", "recovered >", "peak >", "x GC >", "grad error >")
    gc_peak = {row.name: row.peak_bytes for row in report.methods}["gc"]
    for row in report.methods:
        gain, low, high = (row.cpu_speedup_vs_gc, row.cpu_speedup_low, row.cpu_speedup_high) if one_thread else (row.speedup_vs_gc, row.speedup_low, row.speedup_high)
        table.add_row(row.name, format_us(row.wall_us), format_gain(gain), gain_interval(low, high), f"{row.recovered:.2f}", format_bytes(row.peak_bytes), f"{row.peak_bytes / gc_peak:.3f}", error_figure(row.rel_error))
    outcome = make_table("the plan", "step >", "vs GC >", "peak >", "grad error >")
    for label, figures in (("predicted", report.predicted), ("measured", report.measured)):
        outcome.add_row(label, format_us(figures.step_us), format_gain(figures.speedup_vs_gc), format_bytes(figures.peak_bytes), f"{figures.rel_error:.2e}")
    summary = lines(f"{format_gain(report.speedup_vs_gc)} against GC of {format_gain(report.ceiling_vs_gc)} possible, {percent(report.recovered)} recovered, at {report.peak_vs_gc:.3f} x GC's peak; gradient error {report.rel_error:.2e}")
    return stack(head, table, outcome, summary)


def _batches(report: BenchReport) -> str:
    first, count = report.batches[0], len(report.batches)
    return f"micro-batch {first.source}: {first.tokens} tokens" if count == 1 else f"update of {count} micro-batches, {sum(b.tokens for b in report.batches)} tokens"


def codec_bench_view(report: CodecBenchReport) -> RenderableType:
    """GB/s of each codec, beside a plain copy and the products that would be recomputed instead."""
    on_gpu = report.clock == "device"
    clock = {"cpu": "CPU time", "wall": "wall time", "device": "CUDA events"}[report.clock]
    place = report.machine.device if on_gpu else f"{report.machine.cpu}, {threads_words(report.machine.threads)}"
    head = lines(f"codecs on {place}, torch {report.machine.torch}, {report.date}; {clock}, {report.repeats} interleaved repeats")
    table = make_table("codec", "of", "size >", "in GB/s >", "x copy >", "out GB/s >", "x copy >", "K >")
    for row in report.rows:
        (into, into_copy), (out, out_copy) = ((figure(pace.gb_per_s), f"{_of_copy(pace, on_gpu):.2f}") for pace in (row.compress, row.decompress))
        table.add_row(row.codec, row.dtype, format_bytes(row.nbytes), into, into_copy, out, out_copy, "-" if row.break_even_width is None else str(row.break_even_width))
    compared = "bytes moved a second, tensor and payload," if on_gpu else "speed"
    words = lines(
        "in, out: bytes of the tensor over the time to compress it, to restore it.",
        f"x copy: {compared} against a plain copy of the same tensor in the same repeat.",
        "K: where the tensor is a product x @ W of an inner width below K, recomputing it takes less time than compressing and restoring it; '-' where no product makes it.",
        _goal_words(report, on_gpu),
    )
    return stack(head, table, words, *_products_view(report))


def _of_copy(pace: CodecPace, on_gpu: bool) -> float:
    """What the goals are about: of the copy's bandwidth on a GPU, of its speed on a CPU."""
    return pace.bandwidth_of_clone if on_gpu else pace.of_clone


def _goal_words(report: CodecBenchReport, on_gpu: bool) -> str:
    """In how many rows the goal is met, and which codecs miss it."""
    judged = [row for row in report.rows if not (on_gpu and row.stochastic)]
    goal, words = (BANDWIDTH_GOAL, "of a copy's bandwidth, codecs that round to the nearest") if on_gpu else (CLONE_GOAL, "of a copy's speed")
    missed = [row.codec for row in judged if min(_of_copy(pace, on_gpu) for pace in (row.compress, row.decompress)) < goal]
    named = ", ".join(f"{codec} ({missed.count(codec)})" for codec in dict.fromkeys(missed))
    return f"Goal, {percent(goal)} {words}, in and out: met in {len(judged) - len(missed)} of {len(judged)} rows" + (f"; missed by {named}." if missed else ".")


def _products_view(report: CodecBenchReport) -> list[RenderableType]:
    if not report.products:
        return []
    table = make_table("product into", "size >", "widths", "fixed >", "per 100 of K >", "TFLOP/s >", "off by >", title="products: time = fixed + K x per width; wider ones are extrapolated")
    for row in report.products:
        speed = figure(2 * row.rows * row.columns / row.us_per_width / 1e6) if row.us_per_width > 0 else "-"
        table.add_row(row.dtype, format_bytes(row.nbytes), f"{row.widths[0]}-{row.widths[-1]}", format_us(row.fixed_us), format_us(100 * row.us_per_width), speed, percent(row.largest_deviation))
    return [table]
