"""The benchmark against every peer as one picture: speed-up over checkpointing against the measured peak, the cap as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt

from hilore_cli.page.theme import Theme, write_png
from hilore_cli.suite_records import SuiteReport

PANEL_WIDTH, PANEL_HEIGHT = 760, 380
MIB = 2**20


def write_suite_picture(report: SuiteReport, path: Path) -> None:
    """One panel a loss head, as PNG. Ours are filled squares, peers rings; what is over the cap lies right of the line."""
    write_png(suite_chart(report, Theme(png=True)), path)


def suite_chart(report: SuiteReport, theme: Theme) -> Any:
    """The chart; its rows carry method, setting, peak in MiB and speed-up in per cent."""
    heads = list(dict.fromkeys(row.head for row in report.rows))
    return theme.configure(alt.vconcat(*(_panel(report, head, theme) for head in heads), spacing=24))


def _panel(report: SuiteReport, head: str, theme: Theme) -> Any:
    rows = [_point(row) for row in report.rows if row.head == head]
    ink, accent, quiet = theme.colours("ink", "accent", "quiet")
    x = alt.X("peak_mib:Q", title="measured peak, MiB", scale=alt.Scale(zero=False, padding=40))
    y = alt.Y("gain:Q", title="speed-up over checkpointing, %", scale=alt.Scale(padding=24))
    kind = alt.condition("datum.ours", alt.value(accent), alt.value(quiet))
    base = alt.Chart(alt.Data(values=rows))
    bars = base.mark_rule().encode(x=x, y=alt.Y("low:Q", title="speed-up over checkpointing, %"), y2="high:Q", color=kind)
    marks = [base.transform_filter(f"datum.ours == {flag}").mark_point(shape=shape, size=90, filled=filled, strokeWidth=2, opacity=1, color=colour).encode(x=x, y=y) for flag, shape, filled, colour in (("false", "circle", False, quiet), ("true", "square", True, accent))]
    names = base.mark_text(align="left", dx=9, dy=-7, fontSize=11).encode(x=x, y=y, text="method:N", color=alt.condition("datum.ours", alt.value(accent), alt.value(ink)))
    cap = alt.Chart(alt.Data(values=[{"cap": report.cap_bytes / MIB}])).mark_rule(strokeDash=[6, 3], color=ink).encode(x=alt.X("cap:Q"))
    return alt.layer(cap, bars, *marks, names).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT, title=alt.TitleParams(f"Loss head: {head}", subtitle="dashed: the cap; squares: hilore; bars: intervals of the paired ratios"))


def _point(row: Any) -> dict[str, Any]:
    gain, low, high = (100 * (ratio - 1) for ratio in (row.speedup_vs_gc, row.speedup_low, row.speedup_high))
    return {"method": row.method, "setting": row.setting, "ours": row.ours, "peak_mib": row.peak_bytes / MIB, "gain": gain, "low": low, "high": high}
