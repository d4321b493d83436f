"""Why a plan treats a unit or a layer as it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from hilore_cli.sizes import format_bytes, format_us
from hilore_cli.views.layout import lines, make_table, stack
from hilore_cli.views.plan import estimate_words, ranges

if TYPE_CHECKING:
    from hilore_cli.explain import Choice, Explainer, Nearby, Target, UnitChoice

MOST_ROWS = 12
FIGURES = ("kept >", "saves >", "codec >", "error >", "worth >")


def explain_view(explainer: Explainer, target: Target, rows: Sequence[UnitChoice], nearby: Sequence[Nearby]) -> RenderableType:
    """What the plan does, what each action would cost, the prices, and what other budgets would change."""
    plan = explainer.plan
    where = f"layer {target.layers[0]} ({target.text})" if target.is_layer else f"unit {target.text} in {len(target.layers)} layers"
    head = lines(f"{where}, plan {plan.name}: cap {plan.budgets.mem_cap} = {format_bytes(plan.budgets.cap_bytes)}, risk {explainer.risk:.3g}", *estimate_words(plan.estimate))
    body = _layer_view(rows) if target.is_layer else _unit_view(explainer, rows)
    return stack(head, *body, _price_lines(explainer), *_nearby_view(explainer, target, nearby))


def _unit_view(explainer: Explainer, rows: Sequence[UnitChoice]) -> list[RenderableType]:
    """What is done in which layers, and each action in all layers that allow it."""
    planned = make_table("planned", "in layers", *FIGURES)
    for action in dict.fromkeys(row.chosen for row in rows):
        members = [row for row in rows if row.chosen == action]
        planned.add_row(short_action(action), ranges([row.layer for row in members]), *_sums([row.choices[action] for row in members]))
    table = make_table("if all", "layers >", *FIGURES, "would exceed")
    for action in dict.fromkeys(a for row in rows for a in row.choices):
        members = [row for row in rows if action in row.choices]
        table.add_row(short_action(action), str(len(members)), *_sums([row.choices[action] for row in members]), ", ".join(explainer.broken_budgets(rows, action)))
    return [planned, table, lines(*_judgement(rows))]


def _layer_view(rows: Sequence[UnitChoice]) -> list[RenderableType]:
    """What is kept, and what is recomputed with what keeping it would bring; those that matter most first."""
    kept = [row for row in rows if row.chosen != "recompute"]
    left = [row for row in rows if row.chosen == "recompute" and len(row.choices) > 1]
    first = make_table("unit, kept", "as", *FIGURES)
    for row in sorted(kept, key=lambda row: -abs(row.choices[row.chosen].worth_us)):
        first.add_row(_broken_name(row.unit), short_action(row.chosen) + ("" if row.best == row.chosen else " *"), *_sums([row.choices[row.chosen]]))
    second = make_table("unit, recomputed", "if kept as", *FIGURES)
    ordered = sorted(((row, max((a for a in row.choices if a != "recompute"), key=lambda a: row.choices[a].worth_us)) for row in left), key=lambda pair: -abs(pair[0].choices[pair[1]].worth_us))
    for row, other in ordered[:MOST_ROWS]:
        second.add_row(_broken_name(row.unit), short_action(other) + ("" if row.best == row.chosen else " *"), *_sums([row.choices[other]]))
    rest = len(ordered) - MOST_ROWS
    words = [f"and {rest} units that matter less"] if rest > 0 else []
    return [first, second, lines(*words, *_judgement(rows))]


def _sums(choices: Sequence[Choice]) -> tuple[str, ...]:
    """Kept MiB, saved and codec milliseconds, gradient error and worth in milliseconds, together."""
    rho2 = sum(choice.rho2 for choice in choices)
    error = "0" if rho2 == 0 else f"{'-' if rho2 < 0 else ''}{math.sqrt(abs(rho2)):.1e}".replace("e-0", "e-")
    saved, codec, worth = (f"{sum(getattr(c, key) for c in choices) / 1000:.2f}" for key in ("saved_us", "codec_us", "worth_us"))
    return (f"{sum(c.kept_bytes for c in choices) / 2**20:.2f}", saved, codec, error, worth.replace("-0.00", "0.00"))


def _broken_name(unit: str) -> str:
    """A long name over two lines, at its last dot."""
    return unit if len(unit) <= 27 else ".\n  ".join(unit.rsplit(".", 1))


def _judgement(rows: Sequence[UnitChoice]) -> list[str]:
    """What the columns mean, whether the plan does what the prices say, and why it may not."""
    words = [
        "kept in MiB, times in ms, error of the gradient: what the unit alone adds against recomputing it (or storing, where it cannot be recomputed), all else as planned; simulated. Below 0: recomputing would spread another unit's error.",
        "worth: saves - codec - kept x price of memory - error^2 x price of risk.",
    ]
    off = [row for row in rows if row.best != row.chosen]
    if not off:
        return [*words, "Nowhere would another action be worth more."]
    lost = sum(row.choices[row.best].worth_us - row.choices[row.chosen].worth_us for row in off)
    return [*words, f"In {len(off)} of {len(rows)} another action would be worth more, {format_us(lost)} together: a plan is made of whole actions and of few patterns that many layers share, and prices hold for small changes only." + (" They are marked *." if len({row.layer for row in rows}) == 1 else "")]


def _price_lines(explainer: Explainer) -> RenderableType:
    """Shadow prices, and what they are."""
    prices = explainer.moment_prices()
    total = sum(price.us_per_mib for price in prices)
    words = ["prices (of the linear relaxation at the plan's budgets):"]
    if prices:
        named = ", ".join(f"{price.moment} ({figure_us(price.us_per_mib)})" for price in prices[:3])
        more = f" and {len(prices) - 3} more" if len(prices) > 3 else ""
        words.append(f"  memory: {figure_us(total)} for a MiB that is kept through all moments that bind: {named}{more}")
    else:
        words.append("  memory: free, the cap does not bind")
    risk = explainer.risk_price_us
    if risk > 0:
        step = 0.01 * explainer.budget * risk
        words.append(f"  risk: {risk:.4g} us for a unit of squared gradient error; 1 % of the squared budget is {format_us(step)}")
    else:
        words.append("  risk: free, the budget does not bind" if explainer.budget > 0 else "  risk: none allowed" if explainer.risk == 0 else "  risk: all of it is taken up by rounding")
    return lines(*words)


def _nearby_view(explainer: Explainer, target: Target, nearby: Sequence[Nearby]) -> list[RenderableType]:
    """The same units at other budgets, solved again."""
    if not nearby:
        return []
    planned, own_cap = explainer.planned_actions(target), explainer.plan.budgets.cap_bytes / explainer.profile.peaks.gc_bytes
    table = make_table("cap >", "risk >", "planned there, where it differs")
    for point in nearby:
        table.add_row(f"{point.cap_vs_gc:.3f}x-gc", f"{point.risk:.3g}", _change_words(planned, point, is_layer=target.is_layer))
    words = _first_change(planned, [point for point in nearby if point.risk == explainer.risk and point.cap_vs_gc > own_cap], own_cap)
    return [Group(lines("solved again at other budgets (from candidate patterns, without the last refinement):"), table), *([lines(words)] if words else [])]


def _change_words(planned: dict[str, dict[str, int]], point: Nearby, *, is_layer: bool) -> str:
    if point.actions is None:
        return "no plan keeps this"
    changed = {unit: counts for unit, counts in point.actions.items() if counts != planned[unit]}
    if not changed:
        return "-"
    if not is_layer:
        return "; ".join(_count_words(counts) for counts in changed.values())
    shown = [f"{unit}: {short_action(next(iter(counts)))}" for unit, counts in list(changed.items())[:3]]
    return "; ".join(shown) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")


def _first_change(planned: dict[str, dict[str, int]], points: Sequence[Nearby], own: float) -> str | None:
    """Between which of the budgets that were tried something changes; None where nothing does."""
    below = own
    for point in points:
        if point.actions is not None and point.actions != planned:
            return f"With more memory it first changes above a cap of {below:.3f}x-gc and by {point.cap_vs_gc:.3f}x-gc, of the caps that were solved."
        below = point.cap_vs_gc
    return None


def _count_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{short_action(action)} in {count}" for action, count in sorted(counts.items(), key=lambda item: -item[1]))


def short_action(action: str) -> str:
    """compress:int8 -> int8"""
    return action.removeprefix("compress:")


def figure_us(us: float) -> str:
    """Three digits, in microseconds whatever the size: prices are compared with each other."""
    return f"{us:.3g} us" if us < 1000 else f"{us:.0f} us"
