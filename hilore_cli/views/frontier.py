"""Predicted speed-up against cap and risk, as a table and a small chart of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes, format_gain
from hilore_cli.views.layout import lines, make_table, percent, stack

if TYPE_CHECKING:
    from hilore_cli.frontier import Frontier
    from hilore_cli.schema import FrozenPlan, Plan

WIDTH = 50
"""Columns of the chart."""
MARKS = "oxv+#%"
"""One a risk, from the lowest on."""
PLAN_MARK = "P"


def frontier_view(found: Frontier, plan: Plan | FrozenPlan | None) -> RenderableType:
    """The speed-up of each cap and risk, the same as a chart, and what the marks are."""
    unit = "estimated" if found.estimated else "predicted"
    head = lines(
        f"profile {found.profile}: {unit} speed-up against checkpointing (GC), codecs {', '.join(found.codecs) or 'none'}",
        f"GC peaks at {format_bytes(found.gc_peak_bytes)}; no checkpointing at {format_bytes(found.none_peak_bytes)} ({found.none_peak_bytes / found.gc_peak_bytes:.3f} x), {format_gain(found.ceiling)}",
    )
    table = make_table("cap", "bytes >", *(f"risk {risk:g} >" for risk in found.risks), "recovered >", "")
    for cap in found.caps:
        points = [found.at(cap, risk) for risk in found.risks]
        best = points[-1].recovered
        table.add_row(f"{cap:.3f}x-gc", format_bytes(points[0].cap_bytes), *("-" if p.speedup_vs_gc is None else format_gain(p.speedup_vs_gc) for p in points), "-" if best is None else percent(best), "published" if abs(cap - found.published) < 1e-9 else "")
    solved = sum(point.solved for point in found.points)
    words = [f"recovered: of GC's cost, at risk {found.risks[-1]:g}. {solved} of {len(found.points)} points were solved; the others are plans of larger budgets that keep theirs, too." + (" '-': no plan keeps the budgets." if any(p.step_us is None for p in found.points) else "")]
    if plan is not None:
        words.append(f"{PLAN_MARK}: plan {plan.name}, peak {plan.predicted.peak_bytes / found.gc_peak_bytes:.3f} x GC's, {format_gain(plan.update.gc_us / plan.update.step_us)}, risk {plan.budgets.risk:g}")
    return stack(head, table, _chart(found, plan), lines(*words))


def _chart(found: Frontier, plan: Plan | FrozenPlan | None) -> RenderableType:
    """One line a cap, from no gain (or the worst loss) to that of no checkpointing; a mark for each risk, the highest on top."""
    known = [p.speedup_vs_gc for p in found.points if p.speedup_vs_gc is not None] + ([] if plan is None else [plan.update.gc_us / plan.update.step_us])
    least, most = min(1.0, *known), max(found.ceiling, *known, 1.0 + 1e-9)
    rows = [(cap, [(mark, found.at(cap, risk).speedup_vs_gc) for mark, risk in zip(_marks(len(found.risks)), found.risks, strict=True)]) for cap in found.caps]
    if plan is not None:
        rows.append((plan.predicted.peak_bytes / found.gc_peak_bytes, [(PLAN_MARK, plan.update.gc_us / plan.update.step_us)]))
    scale = f"{'':9} {format_gain(least):<{WIDTH - 8}}{format_gain(most):>8}"
    drawn = [scale]
    for cap, marks in sorted(rows, key=lambda row: row[0]):
        cells = ["."] * WIDTH
        for mark, speedup in marks:
            if speedup is not None:
                cells[min(WIDTH - 1, max(0, round((speedup - least) / (most - least) * (WIDTH - 1))))] = mark
        drawn.append(f"{cap:.3f}x-gc {''.join(cells)}")
    legend = ", ".join(f"{mark} risk {risk:g}" for mark, risk in zip(_marks(len(found.risks)), found.risks, strict=True))
    return lines(*drawn, f"{'':9} {legend}; a later mark covers an earlier one")


def _marks(count: int) -> str:
    return (MARKS * (count // len(MARKS) + 1))[:count]
