"""Why a plan treats a unit, or a layer's units, as it does: what each action costs, at the prices that the budgets set.

    explainer = Explainer(profile, plan)
    for row in explainer.explain(find_target(profile, "gate_proj")): row.chosen, row.choices["store"].worth_us

Two kinds of figures, never mixed up:
* exact: bytes, recomputation, codec time and risk of one unit under each action, all else as planned (timeline.py's simulation);
* priced: `worth_us` = time saved - codec time - bytes x price of memory - rho2 x price of risk, against recomputing. The prices are
  the shadow prices of the linear relaxation at the plan's budgets (ilp.bound_layers), with the risks that the plan's own patterns
  bring (a unit from which a matrix product is recomputed is charged for that). A plan is whole-numbered and has few patterns: it may
  differ from what the prices say.
`resolve_nearby` solves again at other budgets: what it says is found, not priced.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.ilp import STORE, Bound, Prices, bound_layers, live_bytes
from hilore_cli.program import Actions, LayerProgram
from hilore_cli.scaling import profile_at
from hilore_cli.schema import INPUT_UNIT, MASK_CODEC, GraphNode, Plan, PlannedVariant, Profile, variant_for
from hilore_cli.step_planner import NEGLIGIBLE_OF_STEP, StepPlanner
from hilore_cli.timeline import combine_layers

MIB = float(2**20)
MOST_NEAR = 5
"""Names that an error offers."""
CAP_STEPS = (-0.02, 0.02, 0.05, 0.1, 0.2)
"""Caps that `resolve_nearby` tries, relative to the plan's own, in checkpointing's peaks; and that of no checkpointing."""
RISK_FACTORS = (0.0, 0.5, 2.0)
"""Risks that it tries, relative to the plan's own."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be explained: some units of some layers."""

    text: str
    units: tuple[str, ...]
    layers: tuple[int, ...]
    is_layer: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One action on one unit of one layer, all else as planned; bytes and times are what the unit adds to recomputing it."""

    kept_bytes: int
    saved_us: float
    codec_us: float
    rho2: float
    worth_us: float


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """A unit of a layer: what the plan does with it, and what every action that it allows would do."""

    layer: int
    unit: str
    nbytes: int
    chosen: str
    best: str
    """the action of most worth at the prices; the plan's own unless another is worth more by NEGLIGIBLE_OF_STEP"""
    choices: dict[str, Choice]


@dataclass(frozen=True, kw_only=True)
class MomentPrice:
    """What one more MiB costs at a moment that the cap binds."""

    moment: str
    us_per_mib: float


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """The target's units in a plan that was solved for another budget."""

    cap_vs_gc: float
    risk: float
    actions: dict[str, dict[str, int]] | None
    """unit -> action -> number of layers; None: no plan keeps these budgets"""


# --------------------------------------------------------------------------------------------------------------- targets


def find_target(profile: Profile, text: str) -> Target:
    """A layer by number or name, or a unit by its name or an unambiguous part of it. Raises UsageError with near names."""
    layers = {row.fqn: row.index for row in profile.layers}
    if match := re.fullmatch(r"(?:layer[ .-]?)?(\d+)", text.strip(), re.IGNORECASE):
        index = int(match[1])
        if index >= len(profile.layers):
            raise UsageError(f"layer {index}: the profile has layers 0 to {len(profile.layers) - 1}")
        return _layer_target(profile, text, index)
    owners = _owners(profile)
    if text in owners:
        return Target(text=text, units=(text,), layers=tuple(owners[text]), is_layer=False)
    named = [fqn for fqn in layers if fqn == text or fqn.endswith(f".{text}")]
    if len(named) == 1:
        return _layer_target(profile, text, layers[named[0]])
    parts = [unit for unit in owners if text.lower() in unit.lower()]
    if len(parts) == 1:
        return Target(text=parts[0], units=(parts[0],), layers=tuple(owners[parts[0]]), is_layer=False)
    if parts:
        raise UsageError(f"unit {text!r} is ambiguous: {_some(parts)}")
    near = _near(text, [*owners, *layers])
    raise UsageError(f"no unit or layer is called {text!r}; {f'near: {_some(near)}' if near else f'units: {_some(list(owners))}'}; layers: 0 to {len(profile.layers) - 1}")


def _near(text: str, names: Sequence[str]) -> list[str]:
    """Names that resemble a text, or one of whose parts does: the nearest first."""

    def likeness(name: str) -> float:
        return max(difflib.SequenceMatcher(None, text.lower(), part.lower()).ratio() for part in (name, *re.split(r"[._]", name), *name.split(".")))

    ordered = sorted(names, key=lambda name: -likeness(name))
    return [name for name in ordered if likeness(name) >= 0.6]


def _layer_target(profile: Profile, text: str, index: int) -> Target:
    row = profile.layers[index]
    if row.fallback is not None:
        raise UsageError(f"layer {row.fqn} is left to torch's checkpoint, nothing in it is for the plan to choose: {row.fallback}")
    units = tuple(unit for unit, members in _owners(profile).items() if index in members)
    return Target(text=row.fqn, units=units, layers=(index,), is_layer=True)


def _owners(profile: Profile) -> dict[str, list[int]]:
    """Unit -> layers that have it, in graph order; units of layers that are left to checkpoint are none."""
    rows = {c.name: list(unit_nodes(c.nodes)) for c in profile.classes}
    found: dict[str, list[int]] = {}
    for layer in profile.layers:
        if layer.fallback is None:
            for unit in rows[layer.layer_class]:
                found.setdefault(unit, []).append(layer.index)
    return found


def unit_nodes(nodes: Sequence[GraphNode]) -> dict[str, GraphNode]:
    return {node.unit: node for node in nodes if node.unit is not None and node.side == "forward"}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NEAR]) + (f" and {len(names) - MOST_NEAR} more" if len(names) > MOST_NEAR else "")


# -------------------------------------------------------------------------------------------------------------- explainer


class Explainer:
    """A plan through the eyes of the step planner that made it. Raises PlanMismatchError when the profile is not the plan's."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.plan = plan
        self.profile = profile_at(profile, tokens=profile.batch.tokens, length=max(row.length for row in profile.micro_batches))
        self.risk = base_variant(plan).risk
        self.planner = StepPlanner(self.profile, codecs=tuple(plan.budgets.codecs) if self.risk > self.profile.rounding_error else ())
        self.actions: list[Actions] = [tuple(sorted(plan.patterns[name].actions.items())) for name in plan.layers]
        check_profile(self.planner, self.actions, profile, plan)
        self.budget = self.planner.budget_of(self.risk)
        bound = bound_layers(self.planner.step_model(cap_bytes=plan.budgets.cap_bytes, budget=self.budget)) if self.planner.planned else None
        if bound is None:
            raise PlanMismatchError(f"plan {plan.name}: its budgets have no prices: the relaxation is infeasible, or no layer is planned; make it again with `hilore plan`")
        self.bound: Bound = bound
        self.prices: dict[int, Prices] = dict(zip(self.planner.planned, bound.prices, strict=True))

    def explain(self, target: Target) -> list[UnitChoice]:
        """One row for each unit of each layer; units that no backward operator can need are left out."""
        rows = [self._unit_choice(layer, unit) for layer in target.layers for unit in target.units]
        found = [row for row in rows if row is not None]
        if not found:
            raise UsageError(f"{target.text}: backward needs none of its values in this plan, nothing is kept or recomputed for it")
        return found

    def moment_prices(self) -> list[MomentPrice]:
        """Where the cap binds in the relaxation, the dearest moment first."""
        last = self.bound.prices[-1].stored  # above the last layer there is only the loss head
        found = [MomentPrice(moment="loss head", us_per_mib=last * MIB / 1000)] if last > 0 else []
        found += [MomentPrice(moment=f"backward of layer {layer}", us_per_mib=sum(p.phases) * MIB / 1000) for layer, p in self.prices.items() if sum(p.phases) > 0]
        return sorted(found, key=lambda price: -price.us_per_mib)

    @property
    def risk_price_us(self) -> float:
        """Microseconds for a unit of rho2: of squared relative gradient error."""
        return max((p.rho2 for p in self.bound.prices), default=0.0) / 1000

    def broken_budgets(self, rows: Sequence[UnitChoice], action: str) -> list[str]:
        """Which of "cap" and "risk" the plan would break if these units took an action wherever they can, all else as planned."""
        swapped = {row.layer: self._swap(row, action) for row in rows if action in row.choices}
        actions = [swapped.get(layer, planned) for layer, planned in enumerate(self.actions)]
        peak = combine_layers(self.profile, [self.planner.timeline(layer, pattern) for layer, pattern in enumerate(actions)]).peak_bytes
        rho2 = sum(self.planner.codec_cost(layer, pattern)[1] for layer, pattern in enumerate(actions))
        return ["cap"] * (peak > self.plan.budgets.cap_bytes) + ["risk"] * (rho2 > self.budget * (1 + 1e-6))

    def _swap(self, row: UnitChoice, action: str) -> Actions:
        masks = self.planner.program(row.layer, self.budget, self.planner.codecs).masks
        return _with_action(self.actions[row.layer], row.unit, action, masks=masks)

    def _unit_choice(self, layer: int, unit: str) -> UnitChoice | None:
        planned = self.actions[layer]
        node = unit_nodes(self.planner.classes[layer].nodes)[unit]
        program = self.planner.program(layer, self.budget, self.planner.codecs)
        if unit not in program.units:
            return None
        chosen = dict(planned).get(unit, "store" if unit == INPUT_UNIT else "recompute")
        if chosen.removeprefix("compress:") == MASK_CODEC:
            chosen = "store"  # bits, exactly
        allowed = list(dict.fromkeys([*self._allowed(layer, node, program), chosen]))
        figures = {action: self._figures(layer, program, _with_action(planned, unit, action, masks=program.masks)) for action in allowed}
        base = figures[allowed[0]]
        choices = {action: self._choice(layer, of, base) for action, of in figures.items()}
        best = max(choices, key=lambda action: choices[action].worth_us)
        if choices[best].worth_us - choices[chosen].worth_us <= NEGLIGIBLE_OF_STEP * self.profile.times.none_us:
            best = chosen
        return UnitChoice(layer=layer, unit=unit, nbytes=node.nbytes, chosen=chosen, best=best, choices=choices)

    def _allowed(self, layer: int, node: GraphNode, program: LayerProgram) -> list[str]:
        """Actions that the unit's rows allow; what the others are compared with comes first."""
        value = program.model.values[program.units.index(node.unit)]
        found = [] if node.pinned or value.producer < 0 else ["recompute"]
        found.append("store")
        if node.compressible and not node.pinned:
            found += [f"compress:{codec}" for (unit, codec), row in self.planner.units[layer].items() if unit == node.unit and codec != MASK_CODEC and row.payload_bytes < row.nbytes]
        return found

    def _figures(self, layer: int, program: LayerProgram, actions: Actions) -> _Figures:
        """The whole layer under a pattern."""
        timeline = self.planner.timeline(layer, actions)
        codec_us, rho2 = self.planner.codec_cost(layer, actions)
        choices = _choices_of(program, actions, self.planner.codecs)
        live = tuple(live_bytes(program.model, choices, phase) for phase in program.model.phases)
        return _Figures(recompute_us=timeline.recompute_us * self.planner.scale, codec_us=codec_us, stored_bytes=timeline.stored_bytes, rho2=rho2, live_bytes=live)

    def _choice(self, layer: int, figures: _Figures, base: _Figures) -> Choice:
        prices = self.prices[layer]
        kept, rho2 = figures.stored_bytes - base.stored_bytes, figures.rho2 - base.rho2
        saved_us, codec_us = base.recompute_us - figures.recompute_us, figures.codec_us - base.codec_us
        own = sum(price * (a - b) for price, a, b in zip(prices.phases, figures.live_bytes, base.live_bytes, strict=True))
        worth_us = saved_us - codec_us - (kept * prices.stored + own + rho2 * prices.rho2) / 1000
        return Choice(kept_bytes=kept, saved_us=saved_us, codec_us=codec_us, rho2=rho2, worth_us=worth_us)

    # -------------------------------------------------------------------------------------------------------- re-solving

    def resolve_nearby(self, target: Target, *, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> list[Nearby]:
        """The target's units in plans for other caps at this risk, and for other risks under this cap."""
        peaks = self.profile.peaks
        own = self.plan.budgets.cap_bytes / peaks.gc_bytes
        top = peaks.none_bytes / peaks.gc_bytes
        caps = sorted({round(own + step, 4) for step in CAP_STEPS if 0 < own + step < top} | ({math.ceil(top * 1e4) / 1e4} if top > own else set()))
        risks = [self.risk * factor for factor in RISK_FACTORS] if self.risk > 0 else []
        planner = StepPlanner(self.profile, codecs=self.planner.codecs)
        budgets = [(cap, self.risk) for cap in caps] + [(own, risk) for risk in risks]
        found = []
        for done, (cap, risk) in enumerate(budgets):
            progress(f"solve again: {cap:.3g}x-gc, risk {risk:.3g}", done, len(budgets))
            cap_bytes = self.plan.budgets.cap_bytes if cap == own else math.floor(cap * peaks.gc_bytes)
            solution = planner.try_solve(cap_bytes=cap_bytes, risk=risk, max_patterns=self.plan.budgets.max_patterns)
            actions = None if solution is None else _count_actions(planner.actions_of(solution.assignment), target)
            found.append(Nearby(cap_vs_gc=cap, risk=risk, actions=actions))
        return found

    def planned_actions(self, target: Target) -> dict[str, dict[str, int]]:
        """The same counts, of the plan itself."""
        return _count_actions(self.actions, target)


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """A layer under one pattern."""

    recompute_us: float
    codec_us: float
    stored_bytes: int
    rho2: float
    live_bytes: tuple[int, ...]
    """at each phase of its program"""


def base_variant(plan: Plan) -> PlannedVariant:
    """The variant of the profiled micro-batch at the highest exposure: the one that `predicted` and `layers` are about."""
    found = variant_for(plan.variants, tokens=plan.batch.tokens, length=plan.batch.length)
    return found if found is not None else max(plan.variants, key=lambda v: v.max_tokens)


def check_profile(planner: StepPlanner, actions: Sequence[Actions], profile: Profile, plan: Plan) -> None:
    """Raise PlanMismatchError unless the plan's predicted peak follows from the profile: another one would explain another plan."""
    remedy = "name the profile that it was made from with --profile, or make the plan again"
    if len(actions) != len(profile.layers):
        raise PlanMismatchError(f"plan {plan.name} has {len(actions)} layers, profile {profile.name} has {len(profile.layers)}; {remedy}")
    timelines = [planner.timeline(i, pattern) for i, pattern in enumerate(actions)]
    if missing := [i for i, timeline in enumerate(timelines) if timeline is None]:
        raise PlanMismatchError(f"plan {plan.name}: layer {missing[0]} has actions on units or codecs that profile {profile.name} does not hold; {remedy}")
    peak = combine_layers(planner.profile, timelines).peak_bytes
    if peak != plan.predicted.peak_bytes:
        raise PlanMismatchError(f"plan {plan.name} predicts a peak of {plan.predicted.peak_bytes} bytes, its actions on profile {profile.name} give {peak}; {remedy}")


def _with_action(actions: Actions, unit: str, action: str, *, masks: frozenset[str]) -> Actions:
    """A pattern with one unit treated otherwise; what is there by default is not named."""
    named = dict(actions)
    named.pop(unit, None)
    if action != ("store" if unit == INPUT_UNIT else "recompute"):
        named[unit] = f"compress:{MASK_CODEC}" if action == "store" and unit in masks else action
    return tuple(sorted(named.items()))


def _choices_of(program: LayerProgram, actions: Actions, codecs: Sequence[str]) -> list[int]:
    """A pattern as the program's choices: the inverse of program.actions_of_choices."""
    named = dict(actions)
    found = []
    for unit, value in zip(program.units, program.model.values, strict=True):
        action = named.get(unit, "store" if value.producer < 0 else "recompute")
        codec = action.removeprefix("compress:")
        k = codecs.index(codec) if codec in codecs else -1
        # a codec that alone is over the budget is no choice of the program: its bytes are counted as stored ones, which is more
        found.append(-1 if action == "recompute" else k + 1 if k >= 0 and k in value.codecs else STORE)
    return found


def _count_actions(actions: Sequence[Actions], target: Target) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {unit: Counter() for unit in target.units}
    for layer in target.layers:
        named = dict(actions[layer])
        for unit in target.units:
            action = named.get(unit, "store" if unit == INPUT_UNIT else "recompute")
            counts[unit]["store" if action == f"compress:{MASK_CODEC}" else action] += 1
    return {unit: dict(sorted(count.items())) for unit, count in counts.items()}
