"""What each idea of a plan is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes, format_gain, format_us
from hilore_cli.views.layout import error_figure, gain_interval, lines, machine_words, make_table, stack

if TYPE_CHECKING:
    from hilore_cli.ablation_records import AblationReport


def ablation_view(report: AblationReport) -> RenderableType:
    """Predicted and, where they were run, measured figures of each plan; then the update with and without exposure."""
    word = "estimated" if report.estimated else "predicted"
    head = lines(
        f"plans for {report.model.source}, from profile {report.profile}: cap {format_bytes(report.cap_bytes)}, risk {report.risk:g}, codecs {', '.join(report.codecs) or 'none'}",
        f"{word}: GC {format_us(report.gc_us)}, no checkpointing {format_us(report.none_us)} (+{100 * (report.gc_us / report.none_us - 1):.1f} %)",
    )
    return stack(head, _predicted(report, word), *([_measured(report)] if report.machine is not None else []), *([_update(report, word)] if report.update else []))


def _predicted(report: AblationReport, word: str) -> RenderableType:
    table = make_table(word, "step >", "vs GC >", "recovered >", "peak >", "grad err >", "patterns >", "over")
    for row in report.rows:
        predicted = row.predicted
        recovered = (report.gc_us - predicted.step_us) / (report.gc_us - report.none_us) if report.gc_us > report.none_us else 0.0
        over = ", ".join(word for word, kept in (("cap", row.fits), ("risk", row.within_risk)) if not kept)
        table.add_row(row.name, format_us(predicted.step_us), format_gain(report.gc_us / predicted.step_us), f"{recovered:.2f}", format_bytes(predicted.peak_bytes), error_figure(predicted.rel_error), str(row.patterns), over)
    return table


def _measured(report: AblationReport) -> RenderableType:
    title = f"{machine_words(report.machine)}, torch {report.machine.torch}, {report.date}; {report.repeats} interleaved repeats, ratios of {'CPU time' if report.clock == 'cpu' else 'wall time'} paired"
    table = make_table("measured", "step >", "vs GC >", "(interval) >", "recovered >", "peak >", "grad err >", title=title)
    for row in report.rows:
        if (measured := row.measured) is not None:
            table.add_row(row.name, format_us(measured.step_us), format_gain(measured.speedup_vs_gc), gain_interval(measured.speedup_low, measured.speedup_high), f"{measured.recovered:.2f}", format_bytes(measured.peak_bytes), error_figure(measured.rel_error))
    return table


def _update(report: AblationReport, word: str) -> RenderableType:
    table = make_table(f"whole update, {word}", "step >", "vs GC >", "recovered >", "grad error >")
    for name, update in report.update.items():
        table.add_row(name, format_us(update.step_us), format_gain(update.gc_us / update.step_us), f"{update.recovered:.2f}", error_figure(update.rel_error))
    return table
