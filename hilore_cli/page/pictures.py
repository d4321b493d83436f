"""Rows -> charts. Every picture is drawn for a width: the page holds a wide and a narrow one and shows what fits.

Nothing is told by colour alone: what the plan does differs in lightness, lines in dash, points in shape, and all of it has a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from hilore_cli.page.rows import (
    MOVING_PARTS,
    PARTS,
    STATIC_PARTS,
    Shown,
    action_rows,
    binding,
    frontier_rows,
    memory_rows,
    moment_rows,
    pair_rows,
    parts_of,
    risk_label,
    risk_of,
    risk_rows,
    which_variant,
)
from hilore_cli.page.theme import Theme
from hilore_cli.sizes import format_bytes

WIDE, NARROW = 860, 340
LEAST_LETTERS = 13
"""Pixels of a cell of the map from which on it carries its letter."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
PART_LABELS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer state", "workspaces": "library workspaces", "shared": "shared inputs", "stored": "stored", "compressed": "compressed", "transient": "transient", "head": "loss head"}
PART_COLOURS = {"stored": "store", "compressed": "compress"}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture of the page: `draw(theme, width)` makes the chart."""

    key: str
    title: str
    caption: str
    draw: Callable[[Theme, int], Any]
    table: tuple[Sequence[str], Sequence[Sequence[str]]]
    """heads and rows: the same figures for who cannot see the picture"""


# ---------------------------------------------------------------------------------------------------------------- memory


def memory_picture(shown: Shown) -> Picture:
    """Two panels over one axis: all of the step's memory, and what is above weights, gradients and optimizer state."""
    plan = shown.story.plan
    _, peak = binding(shown)
    moments = moment_rows(shown)
    gc = max(row["gc_bytes"] for row in moments)
    caption = (
        f"Bytes live at each moment of one update{which_variant(plan)}: the plan peaks at {format_bytes(peak.nbytes)} ({peak.name}), under the cap of {format_bytes(plan.budgets.cap_bytes)}; "
        f"with every layer recomputed, as checkpointing does, the peak is {format_bytes(gc)}."
    )
    heads = ["moment", *(PART_LABELS[part] for part in PARTS), "together", "all recomputed"]
    rows = [[moment.name, *(format_bytes(n) for n in parts_of(moment).values()), format_bytes(moment.nbytes), format_bytes(other.nbytes)] for moment, other in zip(shown.moments, shown.gc_moments, strict=True)]

    def draw(theme: Theme, width: int) -> Any:
        wide = width > NARROW
        static = sum(parts_of(shown.moments[0])[part] for part in STATIC_PARTS)
        legend = {"orient": "bottom", "columns": 9 if wide else 3, "title": None, "columnPadding": 20, "symbolLimit": 0}
        whole = _memory_panel(shown, theme, width, height=130, parts=PARTS, above=0, title=alt.TitleParams("All of the update's memory", subtitle="dashed: every layer recomputed, as checkpointing does; line: the cap" if wide else ["dashed: every layer recomputed (GC);", "line: the cap"]), axis=False, legend=legend)
        moving = _memory_panel(shown, theme, width, height=260 if wide else 220, parts=MOVING_PARTS, above=static, title="Above weights, gradients and optimizer state: what the plan moves" if wide else "Above weights, gradients, optimizer", axis=True, legend=legend)
        return theme.configure(alt.vconcat(whole, moving, spacing=18).resolve_scale(x="shared", color="shared"))

    return Picture(key="memory", title="Memory through one update", caption=caption, draw=draw, table=(heads, rows))


def _memory_panel(shown: Shown, theme: Theme, width: int, *, height: int, parts: Sequence[str], above: int, title: Any, axis: bool, legend: dict[str, Any]) -> Any:
    """A stack with checkpointing's line, the cap and the peak; bytes are counted from `above` on."""
    count, plan = len(shown.moments), shown.story.plan
    scale = 2**30 if max(m.nbytes for m in shown.moments) >= 2**30 else 2**20
    unit = "GiB" if scale == 2**30 else "MiB"
    present = {row["part"] for row in memory_rows(shown) if row["nbytes"]}
    used = [part for part in PARTS if part in present]
    stacked = [_stretch(row, scale=scale, above=0) for row in memory_rows(shown) if row["part"] in parts and row["part"] in present]
    stacked += [{**row, "at": count} for row in stacked if row["at"] == count - 1]
    totals = [{**row, "size": (row["nbytes"] - above) / scale, "gc": (row["gc_bytes"] - above) / scale, "words": _moment_words(shown, row["at"])} for row in moment_rows(shown)]
    lines = [*totals, {**totals[-1], "at": count}]
    cap = (plan.budgets.cap_bytes - above) / scale
    at, peak = binding(shown)
    top = 1.04 * max(cap, *(row["size"] for row in totals), *(row["gc"] for row in totals))
    x = alt.X("at:Q", scale=alt.Scale(domain=[0, count], nice=False), axis=_step_axis(shown, width) if axis else None)
    y_scale = alt.Scale(domain=[0, top], nice=False)
    y = alt.Y("size:Q", title=unit, stack="zero", scale=y_scale, axis=alt.Axis(tickCount=4 if height < 200 else 6, titleAnchor="end", titleAngle=0, titleAlign="left", titleX=0, titleY=-8))
    colour = alt.Color("label:N", scale=alt.Scale(domain=[PART_LABELS[p] for p in used], range=[theme.colour(PART_COLOURS.get(p, p)) for p in used]), legend=alt.Legend(**legend))
    areas = alt.Chart(alt.Data(values=stacked)).mark_area(aria=False, interpolate="step-after", line=False, stroke=theme.colour("surface"), strokeWidth=0.6).encode(x=x, y=y, color=colour, order=alt.Order("order:Q"))
    checkpointing = alt.Chart(alt.Data(values=lines)).mark_line(aria=False, interpolate="step-after", color=theme.colour("ink"), strokeDash=[5, 3], strokeWidth=1.3).encode(x="at:Q", y=alt.Y("gc:Q", scale=y_scale))
    rule = alt.Chart(alt.Data(values=[{"size": cap}])).mark_rule(aria=False, color=theme.colour("accent"), strokeWidth=1.8).encode(y=alt.Y("size:Q", scale=y_scale))
    layers = [areas, checkpointing, rule]
    if axis:
        note = [{"at": 0.5, "size": cap, "text": f"cap {plan.budgets.mem_cap}"}]
        layers.append(alt.Chart(alt.Data(values=note)).mark_text(aria=False, align="left", baseline="bottom", dy=-3, color=theme.colour("accent"), fontWeight=600).encode(x="at:Q", y=alt.Y("size:Q", scale=y_scale), text="text:N"))
        mark = [{"at": at + 0.5, "size": (peak.nbytes - above) / scale}]
        layers.append(alt.Chart(alt.Data(values=mark)).mark_point(aria=False, shape="triangle-down", size=60, filled=True, yOffset=-5, color=theme.colour("ink"), opacity=1).encode(x="at:Q", y=alt.Y("size:Q", scale=y_scale)))
    if not theme.png:  # what the pointer finds: one column a moment, with its whole account
        layers.append(alt.Chart(alt.Data(values=[{**row, "end": row["at"] + 1} for row in totals])).mark_rect(opacity=0).encode(x="at:Q", x2="end:Q", y=alt.value(0), y2=alt.value(height), description="words:N"))
    return alt.layer(*layers).properties(width=width - 60, height=height, title=title)


def _stretch(row: dict[str, Any], *, scale: int, above: int) -> dict[str, Any]:
    return {"at": row["at"], "label": PART_LABELS[row["part"]], "order": row["order"], "size": (row["nbytes"] - above) / scale}


def _moment_words(shown: Shown, at: int) -> str:
    moment, other = shown.moments[at], shown.gc_moments[at]
    parts = ", ".join(f"{PART_LABELS[part]} {format_bytes(nbytes)}" for part, nbytes in reversed(parts_of(moment).items()) if nbytes)
    return f"{moment.name}: {format_bytes(moment.nbytes)} ({parts}); all recomputed {format_bytes(other.nbytes)}"


def _step_axis(shown: Shown, width: int) -> Any:
    """Names of the step's parts, under their middles."""
    layers = len(shown.actions)
    short = width <= NARROW
    places = {layers / 2: "forward" if short else f"forward, layers 0 to {layers - 1}", layers + 0.5: "head", 1.5 * layers + 1: "backward" if short else f"backward, layers {layers - 1} to 0", 2.0 * layers + 2: "" if short else "rest"}
    expression = " : ".join(f"datum.value == {place} ? '{words}'" for place, words in places.items()) + " : ''"
    return alt.Axis(values=list(places), labelExpr=expression, labelAngle=0, title=None, ticks=False, grid=False, labelFlush=False, labelOverlap=False)


# --------------------------------------------------------------------------------------------------------------- actions


def action_picture(shown: Shown) -> Picture:
    """Layers x units, one cell each; on a narrow page turned, so that the cells stay large."""
    rows = action_rows(shown)
    plan = shown.story.plan
    units = list(dict.fromkeys(row["unit"] for row in sorted(rows, key=lambda row: row["order"])))
    codecs = sorted({row["action"] for row in rows} - {"store", "recompute"})
    counts = {action: sum(row["action"] == action for row in rows) for action in ("store", *codecs, "recompute")}
    caption = f"What backward gets in each layer{which_variant(plan)}: {counts['store']} of {len(rows)} values are stored, {sum(counts[c] for c in codecs)} compressed, {counts['recompute']} recomputed; small values that every layer recomputes are left out."

    def draw(theme: Theme, width: int) -> Any:
        wide, layers = width > NARROW, len(plan.layers)
        domain = ["store", *codecs, "recompute"]
        colours = theme.colours("store", *(["compress", "compress-2"] * len(codecs))[: len(codecs)], "recompute")
        cell = (width - 230) / layers if wide else (width - 70) / max(len(units), 1)
        across = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap=True)) if wide else alt.X("unit:N", title=None, sort=units, axis=alt.Axis(orient="top", labelAngle=-60, ticks=False, domain=False, labelLimit=130, labelOverlap=False))
        down = alt.Y("unit:N", title=None, sort=units, axis=alt.Axis(ticks=False, domain=False, labelOverlap=False)) if wide else alt.Y("layer:O", title="layer", axis=alt.Axis(ticks=False, domain=False))
        colour = alt.Color("action:N", scale=alt.Scale(domain=domain, range=colours), legend=alt.Legend(orient="bottom" if wide else "top", title=None, columns=0 if wide else 2, columnPadding=20))
        values = [{**row, "words": f"layer {row['layer']}, {row['unit']}: {row['action']} ({format_bytes(row['nbytes'])})", "letter": {"store": "S", "recompute": ""}.get(row["action"], "C")} for row in rows]
        base = alt.Chart(alt.Data(values=values)).encode(x=across, y=down)
        cells = base.mark_rect(stroke=theme.colour("surface"), strokeWidth=1).encode(color=colour, description="words:N")
        parts = [cells]
        if cell >= LEAST_LETTERS:
            parts += [base.transform_filter(alt.datum.letter == letter).mark_text(aria=False, fontSize=10, color=theme.colour(colour)).encode(text="letter:N") for letter, colour in (("S", "on-store"), ("C", "on-compress"))]
        height = {"step": 20} if wide else {"step": max(8, 420 // layers)}
        return theme.configure(alt.layer(*parts).properties(width=width - 230 if wide else width - 70, height=alt.Step(height["step"])))

    words = {"store": "stored", "recompute": "recomputed"}
    table = (["unit", *(words.get(action, action) for action in counts)], [[unit, *(str(sum(row["unit"] == unit and row["action"] == action for row in rows)) for action in counts)] for unit in units])
    return Picture(key="actions", title="What each layer keeps", caption=caption, draw=draw, table=table)


# -------------------------------------------------------------------------------------------------------------- frontier


def frontier_picture(shown: Shown) -> Picture | None:
    """Speed-up against the cap, a line for each risk."""
    frontier, plan = shown.story.frontier, shown.story.plan
    if frontier is None:
        return None
    rows = frontier_rows(frontier)
    risks = [risk_label(risk) for risk in frontier.risks]
    own = {"cap": plan.predicted.peak_bytes / frontier.gc_peak_bytes, "gain": 100 * (plan.update.gc_us / plan.update.step_us - 1), "text": "this plan"}
    caption = f"{'Estimated' if frontier.estimated else 'Predicted'} speed-up of the update over checkpointing for each cap on its memory; without checkpointing it would be {100 * (frontier.ceiling - 1):+.1f} %, at {frontier.none_peak_bytes / frontier.gc_peak_bytes:.2f} times checkpointing's peak."

    def draw(theme: Theme, width: int) -> Any:
        wide = width > NARROW
        top = 1.06 * max(100 * (frontier.ceiling - 1), own["gain"], *(row["gain"] for row in rows))
        low = min(0.0, own["gain"], *(row["gain"] for row in rows))
        first, last = min(frontier.caps[0], own["cap"]), max(frontier.caps[-1], own["cap"])
        scale = alt.Scale(domain=[low - 0.05 * (top - low), top], zero=False, nice=False)
        x = alt.X("cap:Q", title="cap on the peak, times that of checkpointing", scale=alt.Scale(domain=[first - 0.03 * (last - first), last + 0.03 * (last - first)] if last > first else [first - 0.1, last + 0.1], zero=False, nice=False), axis=alt.Axis(format=".2f", grid=False, tickCount=8 if wide else 4))
        y = alt.Y("gain:Q", title="faster than checkpointing, %", scale=scale, axis=alt.Axis(tickCount=6, titleAnchor="end", titleAngle=0, titleAlign="left", titleX=0, titleY=-10))
        legend = alt.Legend(orient="bottom", title=None, columns=0 if wide else 1, columnPadding=24, symbolStrokeWidth=0)
        shades = theme.colours(*(["quiet", "accent", "ink", "head", "transient"] * len(risks))[: len(risks)])
        base = alt.Chart(alt.Data(values=[{**row, "words": f"cap {row['cap']:.3f}x-gc, {row['risk']}: {row['gain']:+.1f} %, {100 * row['recovered']:.0f} % recovered, error {row['rel_error']:.2e}"} for row in rows]))
        colour = alt.Color("risk:N", sort=risks, scale=alt.Scale(domain=risks, range=shades), legend=legend)
        line = base.mark_line(aria=False, strokeWidth=1.8).encode(x=x, y=y, color=colour, strokeDash=alt.StrokeDash("risk:N", sort=risks, scale=alt.Scale(domain=risks, range=[list(DASHES[i % len(DASHES)]) for i in range(len(risks))]), legend=None))
        points = base.mark_point(filled=True, size=48, opacity=1).encode(x=x, y=y, color=colour, shape=alt.Shape("risk:N", sort=risks, scale=alt.Scale(domain=risks, range=[SHAPES[i % len(SHAPES)] for i in range(len(risks))]), legend=legend), description="words:N")
        ceiling = alt.Chart(alt.Data(values=[{"gain": 100 * (frontier.ceiling - 1), "cap": last, "text": "no checkpointing"}]))
        published = alt.Chart(alt.Data(values=[{"cap": frontier.published, "gain": low, "text": f"{frontier.published:.2f}x, the published setting"}]))
        mine = alt.Chart(alt.Data(values=[own]))
        quiet, ink, accent = theme.colours("quiet", "ink", "accent")
        layers = [
            ceiling.mark_rule(aria=False, color=quiet, strokeDash=[2, 3]).encode(y=y),
            ceiling.mark_text(aria=False, align="right", baseline="bottom", dy=-3, color=quiet).encode(x=x, y=y, text="text:N"),
        ]
        if first <= frontier.published <= last:
            layers += [published.mark_rule(aria=False, color=quiet).encode(x=x), published.mark_text(aria=False, align="left", baseline="bottom", dx=6, dy=-4, color=quiet).encode(x=x, y=y, text="text:N")]
        layers += [line, points, mine.mark_point(aria=False, shape="diamond", size=170, filled=False, strokeWidth=2.4, color=accent, opacity=1).encode(x=x, y=y), mine.mark_text(aria=False, align="left", dx=12, dy=12, fontWeight=600, color=ink).encode(x=x, y=y, text="text:N")]
        return theme.configure(alt.layer(*layers).properties(width=width - 60, height=320 if wide else 260))

    table = (["cap", *risks], [[f"{cap:.3f}x-gc", *(_gain(frontier.at(cap, risk).speedup_vs_gc) for risk in frontier.risks)] for cap in frontier.caps])
    return Picture(key="frontier", title="Other budgets", caption=caption, draw=draw, table=table)


def _gain(speedup: float | None) -> str:
    return "no plan" if speedup is None else f"{100 * (speedup - 1):+.1f} %"


# ----------------------------------------------------------------------------------------------------------------- risks


def risk_picture(shown: Shown) -> Picture | None:
    """Gradient error of each unit and codec, on a logarithmic axis; filled where the plan compresses it."""
    rows = risk_rows(shown)
    if not rows:
        return None
    risk = risk_of(shown.story.plan)
    used = [row for row in rows if row["in_plan"] is not None]
    caption = f"Predicted relative gradient error if a unit is compressed in all {len(shown.actions)} layers (open), and what this plan brings in by compressing it where it does (filled): {len(used)} of the {len(rows)} shown are used, within a budget of {risk:.3g} together."

    def draw(theme: Theme, width: int) -> Any:
        wide = width > NARROW
        order = [row["label"] for row in rows]
        values = [{"label": row["label"], "kind": "in all layers", "error": row["in_all"], "words": f"{row['label']}: {row['in_all']:.2e} in all layers"} for row in rows]
        values += [{"label": row["label"], "kind": "in this plan", "error": row["in_plan"], "words": f"{row['label']}: {row['in_plan']:.2e} in this plan, compressed in {row['layers']} layers"} for row in used if row["in_plan"] > 0]
        errors = [row["error"] for row in values] + ([risk] if risk > 0 else [])
        scale = alt.Scale(type="log", domain=[min(errors) / 1.5, max(errors) * 1.5], nice=False)
        x = alt.X("error:Q", title="relative gradient error", scale=scale, axis=alt.Axis(format=".0e", tickCount=5 if wide else 3))
        y = alt.Y("label:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=250 if wide else 140, labelOverlap=False, grid=True))
        kinds = ["in all layers", "in this plan"]
        legend = alt.Legend(orient="bottom", title=None, columnPadding=20)
        accent, quiet = theme.colours("accent", "quiet")
        layers = []
        if risk > 0:
            budget = alt.Chart(alt.Data(values=[{"error": risk, "text": f"budget {risk:.3g}"}]))
            layers += [budget.mark_rule(aria=False, color=accent, strokeWidth=1.6).encode(x=alt.X("error:Q", scale=scale)), budget.mark_text(aria=False, color=accent, align="left", baseline="bottom", dx=4, dy=-2, fontWeight=600).encode(x=alt.X("error:Q", scale=scale), y=alt.value(0), text="text:N")]
        layers.append(
            alt.Chart(alt.Data(values=values))
            .mark_point(size=80, strokeWidth=1.8, opacity=1)
            .encode(x=x, y=y, description="words:N", shape=alt.Shape("kind:N", scale=alt.Scale(domain=kinds, range=["circle", "square"]), legend=legend), fill=alt.Fill("kind:N", scale=alt.Scale(domain=kinds, range=["transparent", accent]), legend=legend), stroke=alt.Stroke("kind:N", scale=alt.Scale(domain=kinds, range=[quiet, accent]), legend=legend))
        )
        return theme.configure(alt.layer(*layers).properties(width=width - (230 if wide else 160), height=alt.Step(24)))

    heads = ["unit, codec", "in all layers", "in this plan", "layers"]
    table = (heads, [[row["label"], f"{row['in_all']:.2e}", "-" if row["in_plan"] is None else f"{row['in_plan']:.2e}", str(row["layers"])] for row in rows])
    return Picture(key="risks", title="Risk by unit", caption=caption, draw=draw, table=table)


# ------------------------------------------------------------------------------------------------ predicted and measured


def pair_picture(shown: Shown) -> Picture | None:
    """Predicted against measured gradient errors, both logarithmic; on the diagonal they agree."""
    rows = pair_rows(shown.story)
    if not rows:
        return None
    below = sum(row["measured"] <= row["predicted"] for row in rows)
    caption = f"Each point is one plan run on one micro-batch: its gradient error as predicted and as measured; {below} of {len(rows)} lie below the diagonal, measured no worse than predicted."

    def draw(theme: Theme, width: int) -> Any:
        wide = width > NARROW
        size = 380 if wide else width - 70
        kinds = list(dict.fromkeys(row["kind"] for row in rows))
        kinds = [k for k in kinds if k != "this plan"] + [k for k in kinds if k == "this plan"]
        errors = [row[key] for row in rows for key in ("predicted", "measured")]
        scale = alt.Scale(type="log", domain=[min(errors) / 1.3, max(errors) * 1.3], nice=False)
        ends = [{"predicted": edge, "measured": edge} for edge in (min(errors) / 1.3, max(errors) * 1.3)]
        x = alt.X("predicted:Q", title="predicted", scale=scale, axis=alt.Axis(format=".0e", tickCount=4))
        y = alt.Y("measured:Q", title="measured", scale=scale, axis=alt.Axis(format=".0e", tickCount=4, titleAnchor="end", titleAngle=0, titleAlign="left", titleX=0, titleY=-10))
        legend = alt.Legend(orient="right" if wide else "bottom", title=None, columns=1)
        values = [{**row, "words": f"{row['kind']}; {row['what']}: predicted {row['predicted']:.2e}, measured {row['measured']:.2e}"} for row in rows]
        names = [("accent" if kind == "this plan" else ("quiet", "head", "transient")[i % 3]) for i, kind in enumerate(kinds)]
        shapes = ["diamond" if kind == "this plan" else ("circle", "square", "triangle-up")[i % 3] for i, kind in enumerate(kinds)]
        diagonal = alt.Chart(alt.Data(values=ends)).mark_line(aria=False, color=theme.colour("quiet"), strokeDash=[3, 3], strokeWidth=1.2).encode(x=x, y=y)
        points = alt.Chart(alt.Data(values=values)).mark_point(filled=True, size=80, opacity=0.9).encode(x=x, y=y, color=alt.Color("kind:N", sort=kinds, scale=alt.Scale(domain=kinds, range=theme.colours(*names)), legend=legend), shape=alt.Shape("kind:N", sort=kinds, scale=alt.Scale(domain=kinds, range=shapes), legend=legend), description="words:N")
        return theme.configure(alt.layer(diagonal, points).properties(width=size, height=size))

    table = (["kind", "plan and micro-batch", "predicted", "measured"], [[row["kind"], row["what"], f"{row['predicted']:.2e}", f"{row['measured']:.2e}"] for row in rows])
    return Picture(key="measured", title="Predicted and measured", caption=caption, draw=draw, table=table)


def all_pictures(shown: Shown) -> list[Picture]:
    """In the order of the page; left out is what the records say nothing about."""
    found = [memory_picture(shown), action_picture(shown), frontier_picture(shown), risk_picture(shown), pair_picture(shown)]
    return [picture for picture in found if picture is not None]
