"""Records -> rows of the pictures: plain dictionaries, in the order in which they are drawn. Nothing here draws or solves.

The memory rows are timeline.py's exact simulation of the plan, moment by moment: their highest sum is the plan's predicted peak, to the byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hilore_cli.bench_records import BenchReport
from hilore_cli.diff import action_of, unit_risks
from hilore_cli.explain import base_variant, check_profile, unit_nodes
from hilore_cli.frontier import Frontier
from hilore_cli.program import Actions
from hilore_cli.scaling import profile_at
from hilore_cli.schema import MASK_CODEC, FrozenPlan, Pattern, Plan, Profile
from hilore_cli.step_planner import StepPlanner
from hilore_cli.timeline import LayerTimeline, StepMoment, simulate_layer, step_moments

STATIC_PARTS = ("weights", "gradients", "optimizer", "workspaces")
MOVING_PARTS = ("shared", "stored", "compressed", "transient", "head")
PARTS = (*STATIC_PARTS, *MOVING_PARTS)
"""From the bottom of the stack to its top."""
PART_OF = {"weights": "weights", "gradients": "gradients", "optimizer state": "optimizer", "workspaces": "workspaces", "shared inputs": "shared", "loss head": "head"}
LEAST_SHARE = 0.01
"""Of what backward reads of a layer: smaller units that every layer recomputes have no row in the map."""
MOST_RISKS = 14


@dataclass(frozen=True, kw_only=True)
class Story:
    """What a page is about."""

    plan: Plan
    profile: Profile
    frozen: FrozenPlan | None
    frontier: Frontier | None
    benches: tuple[BenchReport, ...]


class Shown:
    """A plan with the exact timelines of its layers. Raises PlanMismatchError when the profile is not the plan's."""

    def __init__(self, story: Story) -> None:
        plan, profile = story.plan, story.profile
        self.story = story
        self.sized = profile_at(profile, tokens=profile.batch.tokens, length=max(row.length for row in profile.micro_batches))
        self.planner = StepPlanner(self.sized, codecs=tuple(plan.budgets.codecs))
        self.actions: list[Actions] = [tuple(sorted(plan.patterns[name].actions.items())) for name in plan.layers]
        check_profile(self.planner, self.actions, profile, plan)
        self.timelines: list[LayerTimeline] = [self.planner.timeline(i, actions) for i, actions in enumerate(self.actions)]
        self.moments = step_moments(self.sized, self.timelines)
        self.gc_moments = step_moments(self.sized, [self.planner.timeline(i, ()) for i in range(len(self.actions))])


# ---------------------------------------------------------------------------------------------------------------- memory


def memory_rows(shown: Shown) -> list[dict[str, Any]]:
    """One row for each moment and part; bytes that are live there."""
    return [{"at": at, "moment": moment.name, "part": part, "order": PARTS.index(part), "nbytes": nbytes} for at, moment in enumerate(shown.moments) for part, nbytes in parts_of(moment).items()]


def moment_rows(shown: Shown) -> list[dict[str, Any]]:
    """One row for each moment: everything together, and the same when every layer is recomputed, as checkpointing does."""
    return [{"at": at, "moment": moment.name, "nbytes": moment.nbytes, "gc_bytes": gc.nbytes} for at, (moment, gc) in enumerate(zip(shown.moments, shown.gc_moments, strict=True))]


def parts_of(moment: StepMoment) -> dict[str, int]:
    """A moment's account by the parts of the picture. A layer at work, the embedding's gradient and the update are transient."""
    parts = dict.fromkeys(PARTS, 0)
    for row in moment.account:
        if row.label.startswith("stored by "):
            parts["stored"] += row.nbytes - moment.compressed_bytes
            parts["compressed"] += moment.compressed_bytes
        else:
            parts[PART_OF.get(row.label, "transient")] += row.nbytes
    return parts


# --------------------------------------------------------------------------------------------------------------- actions


def action_rows(shown: Shown) -> list[dict[str, Any]]:
    """One row for each layer and unit worth a row: what the plan does with it. Units in the order of the graph."""
    rows = []
    profile, plan = shown.sized, shown.story.plan
    classes = {c.name: unit_nodes(c.nodes) for c in profile.classes}
    kept = _units_shown(shown)
    for layer, (row, name) in enumerate(zip(profile.layers, plan.layers, strict=True)):
        for order, unit in enumerate(kept):
            node = classes[row.layer_class].get(unit)
            if node is None or row.fallback is not None:
                continue
            action = action_of(plan.patterns[name], unit)
            rows.append({"layer": layer, "unit": unit, "order": order, "action": "store" if action == f"compress:{MASK_CODEC}" else action.removeprefix("compress:"), "nbytes": node.nbytes})
    return rows


def _units_shown(shown: Shown) -> list[str]:
    """What some layer keeps, and what backward reads and is large enough to be worth keeping."""
    found: dict[str, int] = {}
    named = {unit for pattern in shown.story.plan.patterns.values() for unit in pattern.actions}
    for layer_class in shown.sized.classes:
        nodes = unit_nodes(layer_class.nodes)
        saved = simulate_layer(layer_class, Pattern(default="store"), payload_bytes=lambda unit, codec: 0).saved
        read = {node.storage for node in layer_class.nodes if node.name in saved}  # a view is saved for its base
        total = sum(node.nbytes for node in nodes.values() if node.index in read)
        for unit, node in nodes.items():
            if unit in named or (node.index in read and node.nbytes >= LEAST_SHARE * total):
                found.setdefault(unit, node.index)
    return sorted(found, key=lambda unit: found[unit])


# ----------------------------------------------------------------------------------------------------------------- risks


def risk_rows(shown: Shown) -> list[dict[str, Any]]:
    """One row for each unit and codec: predicted gradient error in all layers, and the part that the plan brings in; riskiest first."""
    brought: dict[tuple[str, str], float] = {}
    layers: dict[tuple[str, str], int] = {}
    for layer, actions in enumerate(shown.actions):
        if shown.planner.classes[layer] is None:
            continue
        replayed = shown.planner.replayed_units(layer, actions)
        for unit, action in actions:
            codec = action.removeprefix("compress:")
            if action.startswith("compress:") and codec != MASK_CODEC:
                row = shown.planner.units[layer][unit, codec]
                brought[unit, codec] = brought.get((unit, codec), 0.0) + (row.replayed_rho2 if unit in replayed else row.rho2)
                layers[unit, codec] = layers.get((unit, codec), 0) + 1
    risks = {key: value for key, value in unit_risks(shown.sized).items() if value > 0}
    ordered = sorted(risks, key=lambda key: (key not in brought, -risks[key], key))[:MOST_RISKS]
    return [
        {"unit": unit, "codec": codec, "label": unit if len(shown.sized.codecs) == 1 else f"{unit}, {codec}", "in_all": risks[unit, codec], "in_plan": math.sqrt(brought[unit, codec]) if (unit, codec) in brought else None, "layers": layers.get((unit, codec), 0)}
        for unit, codec in sorted(ordered, key=lambda key: (-risks[key], key))
    ]


# -------------------------------------------------------------------------------------------------------------- frontier


def frontier_rows(frontier: Frontier) -> list[dict[str, Any]]:
    return [{"cap": p.cap_vs_gc, "risk": risk_label(p.risk), "gain": 100 * (p.speedup_vs_gc - 1), "recovered": p.recovered, "rel_error": p.rel_error} for p in frontier.points if p.speedup_vs_gc is not None]


def risk_label(risk: float) -> str:
    return "exact gradients" if risk == 0 else f"gradient error up to {risk:g}"


# ------------------------------------------------------------------------------------------------ predicted and measured


def pair_rows(story: Story) -> list[dict[str, Any]]:
    """Predicted against measured gradient errors: the profile's calibration, the dry run, benchmarks."""
    rows = [
        {"kind": f"calibration, {pair.codec}", "what": f"{pair.plan}; {pair.micro_batch}{'' if pair.heldout else ' (profiled)'}", "predicted": story.profile.predicted_error(pair), "measured": pair.measured_rel_error}
        for pair in story.profile.calibration
    ]
    measured = story.frozen.measured if story.frozen is not None else None
    if measured is not None:
        rows.append({"kind": "this plan", "what": "dry run of hilore apply", "predicted": story.plan.update.rel_error, "measured": measured.rel_error})
    rows += [{"kind": "this plan", "what": f"benchmark of {bench.date}", "predicted": bench.predicted.rel_error, "measured": bench.measured.rel_error} for bench in story.benches]
    return [row for row in rows if row["predicted"] > 0 and row["measured"] > 0]


def outcome_rows(story: Story) -> list[dict[str, Any]]:
    """Peaks, steps and errors that were measured, each beside its prediction."""
    plan, rows = story.plan, []
    measured = story.frozen.measured if story.frozen is not None else None
    if measured is not None:
        where = f"dry run, {measured.date[:10]}"
        rows.append({"where": where, "figure": "peak", "unit": "bytes", "predicted": plan.predicted.peak_bytes, "measured": measured.peak_bytes})
        rows.append({"where": where, "figure": "GC's peak", "unit": "bytes", "predicted": plan.predicted.gc_peak_bytes, "measured": measured.gc_peak_bytes})
        rows.append({"where": where, "figure": "gradient error", "unit": "error", "predicted": plan.update.rel_error, "measured": measured.rel_error})
    for bench in story.benches:
        where = f"benchmark, {bench.date[:10]}"
        for figure, unit in (("peak_bytes", "bytes"), ("step_us", "us"), ("speedup_vs_gc", "gain"), ("rel_error", "error")):
            label = {"peak_bytes": "peak", "step_us": "step", "speedup_vs_gc": "against GC", "rel_error": "gradient error"}[figure]
            rows.append({"where": where, "figure": label, "unit": unit, "predicted": getattr(bench.predicted, figure), "measured": getattr(bench.measured, figure)})
    return rows


def binding(shown: Shown) -> tuple[int, StepMoment]:
    """The moment of the peak, and its place in the step."""
    at = max(range(len(shown.moments)), key=lambda i: shown.moments[i].nbytes)
    return at, shown.moments[at]


def risk_of(plan: Plan) -> float:
    """Gradient error that the plan may bring into the profiled micro-batch."""
    return base_variant(plan).risk


def which_variant(plan: Plan) -> str:
    """Of a plan with several variants the page shows that of the largest micro-batches and any exposure."""
    return f", for micro-batches of up to {base_variant(plan).max_tokens} tokens (the largest of {len(plan.variants)} variants)" if len(plan.variants) > 1 else ""
