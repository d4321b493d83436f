"""Plans, solved and frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hilore_cli.sizes import format_bytes, format_gain, format_us
from hilore_cli.views.layout import lines, make_table, percent, stack

if TYPE_CHECKING:
    from hilore_cli.schema import Estimate, FrozenPlan, Pattern, Plan, Variant


def plan_view(plan: Plan) -> RenderableType:
    """What the plan gains and pays against checkpointing, its patterns, alternatives, and how good it is known to be."""
    predicted, budgets = plan.predicted, plan.budgets
    head = lines(
        f"plan {plan.name} for {plan.model.source}, from profile {plan.profile}",
        f"cap {budgets.mem_cap} = {format_bytes(budgets.cap_bytes)}, risk {budgets.risk:g}, codecs {', '.join(budgets.codecs) or 'none'}",
        *estimate_words(plan.estimate),
    )
    table = make_table(predicted_word(plan.estimate), "GC >", "plan >", "no checkpointing >")
    table.add_row("step", format_us(predicted.gc_us), f"{format_us(predicted.step_us)} ({format_gain(predicted.speedup_vs_gc)})", f"{format_us(predicted.none_us)} ({format_gain(predicted.gc_us / predicted.none_us)})")
    table.add_row("recovered", "0 %", percent(predicted.recovered), "100 %")
    table.add_row("peak", format_bytes(predicted.gc_peak_bytes), f"{format_bytes(predicted.peak_bytes)} ({predicted.peak_bytes / predicted.gc_peak_bytes:.3f} x)", f"{format_bytes(predicted.none_peak_bytes)} ({predicted.none_peak_bytes / predicted.gc_peak_bytes:.3f} x)")
    table.add_row("gradient error", "0", f"{predicted.rel_error:.2e} (budget {budgets.risk:g})", "0")
    costs = lines(
        f"pays {format_us(predicted.recompute_us)} of recomputation and {format_us(predicted.codec_us)} of codecs; keeps {format_bytes(predicted.stored_bytes)}, of which {format_bytes(predicted.compressed_bytes)} compressed",
        f"the cap binds at: {predicted.binding_moment}",
    )
    solver = plan.solver
    quality = lines(f"{solver.solver}: {solver.status}; {format_us(solver.objective_us)} against a lower bound of {format_us(solver.bound_us)}, a gap of {100 * solver.gap_of_step:.2f} % of the step; {solver.candidates} candidate patterns")
    return stack(head, table, costs, patterns_view(plan.patterns, plan.layers), *variants_view(plan), *_alternatives(plan), quality)


def predicted_word(estimate: Estimate | None) -> str:
    """Heading of figures that a plan foretells."""
    return "predicted" if estimate is None else "estimated"


def estimate_words(estimate: Estimate | None) -> list[str]:
    """What of a record was computed without the device; nothing for one whose profile was measured."""
    if estimate is None:
        return []
    error = "not compared with any measured profile" if estimate.time_error is None else f"median error {percent(estimate.time_error)}"
    return [f"estimated, not measured: times of a {estimate.device} ({error}), risk of {estimate.relative}, scaled; bytes are exact"]


def variants_view(plan: Plan) -> list[RenderableType]:
    """The variants of a plan that has several, and what they do to the profiled update together."""
    if len(plan.variants) < 2:
        return []
    table = make_table("variant for", "micro-batches >", "patterns >", "step >", "peak >", "grad error >", title=f"variants, by tokens and by exposure (rule {plan.budgets.exposure_rule}) relative to the update's mean")
    for variant in plan.variants:
        table.add_row(variant.label, str(variant.micro_batches), str(len(set(variant.layers))), format_us(variant.step_us), format_bytes(variant.peak_bytes), f"{variant.rel_error:.2e}")
    update = plan.update
    words = f"the update's {update.micro_batches} micro-batches: {format_us(update.step_us)} against {format_us(update.gc_us)} with GC ({format_gain(update.gc_us / update.step_us)}), {percent(update.recovered)} recovered, gradient error of the update {update.rel_error:.2e}"
    return [table, lines(words)]


def _alternatives(plan: Plan) -> list[RenderableType]:
    if not plan.alternatives:
        return []
    table = make_table("instead", "step >", "vs GC >", "peak >", "grad error >")
    for other in plan.alternatives:
        table.add_row(other.label, format_us(other.step_us), format_gain(plan.predicted.gc_us / other.step_us), format_bytes(other.peak_bytes), f"{other.rel_error:.2e}")
    return [table]


def patterns_view(patterns: Mapping[str, Pattern], layers: Sequence[str]) -> RenderableType:
    """Which layers follow which pattern, and each pattern in words."""
    table = make_table("pattern", "layers", "what backward gets")
    for name, pattern in patterns.items():
        members = [index for index, used in enumerate(layers) if used == name]
        if members:
            table.add_row(name, f"{ranges(members)} ({len(members)})", pattern_words(pattern))
    return table


def pattern_words(pattern: Pattern) -> str:
    """`int8: mlp (gate_proj.mm, up_proj.mm); store: self_attn (sdpa.lse); recompute: the rest`."""
    units: dict[str, list[str]] = {}
    for unit, action in pattern.actions.items():
        units.setdefault(action.removeprefix("compress:"), []).append(unit)
    parts = [f"{action}: {_by_module(names)}" for action, names in sorted(units.items())]
    return "; ".join([*parts, f"{pattern.default}: {'the rest' if parts else 'everything'}"])


def _by_module(units: Sequence[str]) -> str:
    """["add", "mlp.a", "mlp.b.c"] -> 'add, mlp (a, b.c)'."""
    members: dict[str, list[str]] = {}
    for unit in sorted(units):
        module, _, rest = unit.partition(".")
        members.setdefault(module, []).extend([rest] if rest else [])
    return ", ".join(f"{module} ({', '.join(rests)})" if rests else module for module, rests in members.items())


def ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def frozen_view(frozen: FrozenPlan, *, path: str, patterns: bool) -> RenderableType:
    """Predicted against measured, what the plan is bound to, its patterns if asked for, and how a trainer loads it."""
    predicted, measured, budgets = frozen.predicted, frozen.measured, frozen.budgets
    head = lines(
        f"frozen plan {frozen.name}, digest {frozen.digest}: {frozen.model.architecture}, {frozen.model.layers} layers, {frozen.model.dtype}, {frozen.model.attn_implementation}",
        f"{len(frozen.variants)} variant{'s' if len(frozen.variants) > 1 else ''}, micro-batches of up to {max(v.max_tokens for v in frozen.variants)} tokens; above, every layer is recomputed",
        *estimate_words(frozen.estimate),
    )
    table = make_table("dry run", f"{predicted_word(frozen.estimate)} >", "measured >", "allowed >")
    table.add_row("peak", format_bytes(predicted.peak_bytes), format_bytes(measured.peak_bytes) if measured else "-", f"{format_bytes(budgets.cap_bytes)} ({budgets.mem_cap})")
    table.add_row("GC's peak", format_bytes(predicted.gc_peak_bytes), format_bytes(measured.gc_peak_bytes) if measured else "-", "")
    table.add_row("gradient error", f"{frozen.update.rel_error:.2e}", f"{measured.rel_error:.2e}" if measured else "-", f"{budgets.risk:g}")
    table.add_row("step", f"{format_us(predicted.step_us)} ({format_gain(predicted.speedup_vs_gc)} vs GC)", "hilore bench", "")
    tables = [_variant_patterns(frozen, variant) for variant in frozen.variants] if patterns else []
    return stack(head, table, *tables, trainer_lines(path))


def _variant_patterns(frozen: FrozenPlan, variant: Variant) -> RenderableType:
    view = patterns_view(frozen.patterns, variant.layers)
    return view if len(frozen.variants) == 1 else Group(lines(f"{variant.label}:"), view)


def trainer_lines(path: str) -> RenderableType:
    """The three lines that a trainer needs."""
    return Group(
        lines("in the trainer:"),
        Text(f'    from hilore_cli import attach, load_plan\n    with attach(model, load_plan("{path}")):\n        trainer.train()', style="bold"),
    )
