"""The benchmark against every peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes, format_gain, format_us
from hilore_cli.views.layout import error_figure, gain_interval, lines, machine_words, make_table, stack

if TYPE_CHECKING:
    from hilore_cli.suite_records import SuiteReport


def suite_view(report: SuiteReport) -> RenderableType:
    """A table for each loss head, what was tried of methods with settings, and what could not run."""
    head = lines(
        f"{report.model.source} on {machine_words(report.machine)}, torch {report.machine.torch}, {report.date}",
        f"update of {len(report.batches)} micro-batch{'es' if len(report.batches) > 1 else ''}, {sum(batch.tokens for batch in report.batches)} tokens; cap {format_bytes(report.cap_bytes)} for all; "
        f"{report.repeats} interleaved repeats, ratios of {'CPU time' if report.clock == 'cpu' else 'wall time'} paired",
    )
    heads = list(dict.fromkeys(row.head for row in report.rows))
    tables = [_rows_table(report, name, fits=fits) for name in heads for fits in (True, False) if any(row.head == name and row.fits == fits for row in report.rows)]
    words = lines("* a plan of ours. vs peer: over the fastest of the others that fits under the cap with the same loss head, checkpointing included.")
    return stack(head, *tables, words, *_candidates(report), *([lines(*(f"left out: {name}: {why}" for name, why in report.left_out.items()))] if report.left_out else []))


def _rows_table(report: SuiteReport, head: str, *, fits: bool) -> RenderableType:
    """Those that keep the cap, or those that do not."""
    table = make_table("method", "step >", "vs GC >", "(interval) >", "vs peer >", "peak >", "grad err >", title=f"{head} head, {'under' if fits else 'over'} the cap")
    for row in report.rows:
        if row.head != head or row.fits != fits:
            continue
        beside = "-" if row.vs_best_peer is None else format_gain(row.vs_best_peer)
        step = row.cpu_us if report.clock == "cpu" else row.wall_us
        table.add_row(f"{row.method} *" if row.ours else row.method, format_us(step), format_gain(row.speedup_vs_gc), gain_interval(row.speedup_low, row.speedup_high), beside, format_bytes(row.peak_bytes), error_figure(row.rel_error))
    return table


def _candidates(report: SuiteReport) -> list[RenderableType]:
    if not report.candidates:
        return []
    table = make_table("method", "head", "setting", "peak >", "short timing >", "", title="settings that were tried")
    for one in report.candidates:
        timing = "over the cap" if not one.fits else "-" if one.step_us is None else format_us(one.step_us)
        table.add_row(one.method, one.head, one.setting, format_bytes(one.peak_bytes), timing, "kept" if one.chosen else "")
    return [table]
