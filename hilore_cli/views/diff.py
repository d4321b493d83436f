"""Two plans or two profiles side by side, as far as they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes, format_us
from hilore_cli.views.layout import lines, make_table, stack
from hilore_cli.views.plan import ranges

if TYPE_CHECKING:
    from hilore_cli.diff import FigureDiff, PlanDiff, ProfileDiff, SettingDiff

MOST_RISKS = 12


def equal_view(a: str, b: str, *, but: str) -> RenderableType:
    return lines(f"{a} and {b} are equal{but}")


def plan_diff_view(found: PlanDiff, a: str, b: str) -> RenderableType:
    """Settings, predicted figures, and the layers and units that are treated otherwise."""
    title = "figure" if any(found.estimated) else "predicted"
    return stack(_head(a, b), *_settings_view(found.settings), _figures_view(title, found.figures, _sides(found, otherwise="predicted")), *_actions_view(found), *_variants_view(found.variants))


def profile_diff_view(found: ProfileDiff, a: str, b: str) -> RenderableType:
    """Settings, measured figures, and the units whose risk moved most."""
    sides = _sides(found, otherwise="measured")
    parts: list[RenderableType] = [_head(a, b), *_settings_view(found.settings), _figures_view("figure", found.figures, sides)]
    if found.risks:
        table = make_table("unit, in all layers", "codec", *sides, "B / A >", title="gradient error of units, those that moved most first")
        for risk in found.risks[:MOST_RISKS]:
            table.add_row(risk.unit, risk.codec, *("-" if value is None else f"{value:.2e}" for value in (risk.a, risk.b)), f"{risk.b / risk.a:.3g}" if risk.a and risk.b is not None else "-")
        rest = len(found.risks) - MOST_RISKS
        parts += [table, *([lines(f"and {rest} that moved less")] if rest > 0 else [])]
    else:
        parts.append(lines("No unit's risk differs by more than 1 %."))
    return stack(*parts)


def _head(a: str, b: str) -> RenderableType:
    return lines(f"A {a}", f"B {b}")


def _sides(found: PlanDiff | ProfileDiff, *, otherwise: str) -> list[str]:
    """Headings of both sides' figures; where a side is estimated, each says what its own are."""
    if not any(found.estimated):
        return ["A >", "B >"]
    return [f"{side}, {'estimated' if estimated else otherwise} >" for side, estimated in zip("AB", found.estimated, strict=True)]


def _settings_view(settings: Sequence[SettingDiff]) -> list[RenderableType]:
    if not settings:
        return []
    table = make_table("setting", "A", "B")
    for setting in settings:
        table.add_row(setting.name, setting.a, setting.b)
    return [table]


def _figures_view(title: str, figures: Sequence[FigureDiff], sides: Sequence[str]) -> RenderableType:
    """Only those that differ; how many are equal is said."""
    changed = [figure for figure in figures if figure.a != figure.b]
    if not changed:
        return lines(f"All {len(figures)} figures are equal.")
    table = make_table(title, *sides, "B - A >", "relative >")
    for figure in changed:
        known = figure.a is not None and figure.b is not None
        relative = f"{(figure.b / figure.a - 1) * 100:+.2f} %" if known and figure.a else "-"
        table.add_row(figure.name, *(_figure(figure, value) for value in (figure.a, figure.b)), _signed(figure, figure.b - figure.a) if known else "-", relative)
    if equal := len(figures) - len(changed):
        table.caption, table.caption_justify, table.caption_style = f"{equal} more are equal", "left", ""
    return table


def _actions_view(found: PlanDiff) -> list[RenderableType]:
    if found.actions is None:
        return [lines("The plans have different numbers of layers: actions are not compared.")]
    if not found.actions:
        return [lines("Every layer treats every unit alike.")]
    table = make_table("layers", "units", "A", "B", title="actions that differ, on the profiled micro-batch")
    for action in found.actions:
        table.add_row(ranges(action.layers), ", ".join(action.units), action.a, action.b)
    return [table]


def _variants_view(variants: Sequence[SettingDiff]) -> list[RenderableType]:
    if not variants:
        return []
    table = make_table("variant", "A", "B")
    for variant in variants:
        table.add_row(variant.name, variant.a, variant.b)
    return [table]


def _figure(figure: FigureDiff, value: float | None) -> str:
    if value is None:
        return "-"
    return {"bytes": format_bytes, "us": format_us, "ratio": "{:.3f}".format, "error": "{:.2e}".format, "count": "{:.4g}".format}[figure.unit](value)


def _signed(figure: FigureDiff, value: float) -> str:
    return ("+" if value > 0 else "") + _figure(figure, value)
