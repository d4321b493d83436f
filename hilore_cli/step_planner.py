"""One micro-batch of one size + cap and risk -> a pattern for each layer.

How: (1) the relaxation of the layers' program (ilp.py) gives a bound and prices of memory and risk; (2) a few prices around
them give candidate patterns, each simulated exactly (timeline.py); (3) the assignment program gives every layer a pattern,
with exact bytes, under the cap, the risk budget and the limit on distinct patterns; (4) when that is further from the bound
than 0.1 % of the step, the layers' program is solved as integers, its patterns join the candidates, and (3) runs again.
Every plan therefore keeps the simulated cap to the byte, and its distance to the bound is known.

What it does NOT do: measure anything, or trust the solver (ilp.py checks every row again in integers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hilore_cli.errors import InfeasibleError, ProfileError, SolverError
from hilore_cli.ilp import (
    Assignment,
    AssignmentProblem,
    Bound,
    CapExceededError,
    Column,
    Prices,
    StepModel,
    assign_patterns,
    bound_layers,
    solve_layers,
    solve_priced,
    solver_version,
)
from hilore_cli.program import Actions, LayerProgram, actions_of_choices, build_layer_program, replayed_units
from hilore_cli.schema import MASK_CODEC, Alternative, Pattern, Prediction, Profile, SolverRecord, UnitRow
from hilore_cli.sizes import format_bytes
from hilore_cli.timeline import (
    LayerTimeline,
    StepTimeline,
    class_of_layer,
    combine_layers,
    fallback_timeline,
    simulate_layer,
)

GAP_OF_STEP = 1e-3
NEGLIGIBLE_OF_STEP = 1e-6
RESOLVES = 3
HEAVIEST = 3
"""Rows of the account that an infeasible answer names."""
FEW_PATTERNS = 4
"""Each distinct pattern is compiled in the first training step (seconds): fewer are taken when they cost next to nothing; up to so many are tried."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    assignment: Assignment
    bound_ns: float
    resolves: int
    reproducible: bool


def time_scale(profile: Profile) -> float:
    """Microseconds of the step for each microsecond of node time: T_recompute - T_none over all replayed node times, those of
    layers that are left to checkpoint among them.

    1 when the measured steps do not tell (recompute-all not slower than no checkpointing: noise on a tiny model).
    """
    replay_us = {c.name: simulate_layer(c, Pattern(), payload_bytes=_no_payload).recompute_us for c in profile.classes}
    replayed = sum(replay_us.get(row.layer_class, 0.0) for row in profile.layers)
    span = profile.times.recompute_us - profile.times.none_us
    return span / replayed if replayed > 0 and span > 0 else 1.0


# ------------------------------------------------------------------------------------------------------------- planner


class StepPlanner:
    """One profile and one set of codecs: layer programs, candidate patterns and their exact columns."""

    def __init__(self, profile: Profile, *, codecs: tuple[str, ...]) -> None:
        self.profile = profile
        self.codecs = codecs
        self.scale = time_scale(profile)
        self.classes = [class_of_layer(profile, row.index) for row in profile.layers]
        self.planned = [i for i, layer_class in enumerate(self.classes) if layer_class is not None]
        self.left = {i: fallback_timeline(profile, i) for i, layer_class in enumerate(self.classes) if layer_class is None}
        self.left_ns = sum(round(timeline.recompute_us * self.scale * 1000) for timeline in self.left.values())
        self.units: list[dict[tuple[str, str], UnitRow]] = [{} for _ in profile.layers]
        for unit in profile.units:
            if unit.layer >= len(profile.layers):
                raise ProfileError(f"profile {profile.name}: unit {unit.unit!r} names layer {unit.layer}, the profile has {len(profile.layers)}")
            if unit.codec not in (*codecs, MASK_CODEC):
                continue
            kappa = 1.0 if unit.codec == MASK_CODEC else profile.kappa(unit.codec)  # from here on rho2 is what calibration predicts
            self.units[unit.layer][unit.unit, unit.codec] = unit.model_copy(update={"rho2": unit.rho2 * kappa, "replayed_rho2": unit.replayed_rho2 * kappa})
        self.candidates: dict[Actions, None] = {}
        self._timelines: dict[tuple[str, Actions, tuple[int, ...]], LayerTimeline | None] = {}
        self._programs: dict[tuple[int, float, tuple[str, ...]], LayerProgram] = {}
        self._replayed: dict[tuple[str, Actions], frozenset[str]] = {}

    def solve(self, *, cap_bytes: int, risk: float, max_patterns: int) -> Solution:
        """Steps 1 to 4 of the module's head. Raises InfeasibleError."""
        solution = self.try_solve(cap_bytes=cap_bytes, risk=risk, max_patterns=max_patterns, resolves=RESOLVES, last=True)
        if solution is None:
            raise self.infeasible(cap_bytes=cap_bytes, risk=risk, budget=self.budget_of(risk), max_patterns=max_patterns)
        return solution

    def simplify(self, solution: Solution, *, cap_bytes: int, risk: float) -> Solution:
        """The same with fewer patterns, where that costs next to nothing: each is compiled in the first training step."""
        found = self.with_fewer_patterns(solution.assignment, cap_bytes=cap_bytes, budget=self.budget_of(risk), bound_ns=solution.bound_ns)
        return replace(solution, assignment=found, bound_ns=min(solution.bound_ns, found.cost_ns))

    def try_solve(self, *, cap_bytes: int, risk: float, max_patterns: int, resolves: int = 0, last: bool = False) -> Solution | None:
        """The same; None where no plan is found. `resolves`: of step 4 at most; `last`: look harder before giving up."""
        budget = self.budget_of(risk)
        step = self.step_model(cap_bytes=cap_bytes, budget=budget)
        bound = bound_layers(step) if self.planned else None
        self.add_priced_candidates(step, bound, budget)
        found = self.assign(cap_bytes=cap_bytes, budget=budget, max_patterns=max_patterns)
        bound_ns = self.left_ns + (bound.objective_ns if bound is not None else 0.0)
        pending, done, reproducible = [step], 0, True
        while pending and bound is not None and done < resolves and not self.is_close(found, bound_ns):
            current = pending.pop(0)
            layers = solve_layers(current)
            done += 1
            if layers is None:
                continue
            reproducible = reproducible and layers.reproducible
            timelines, new = self.add_choices(layers.choices, budget)
            if new:
                better = self.assign(cap_bytes=cap_bytes, budget=budget, max_patterns=max_patterns)
                found = better if found is None or (better is not None and better.cost_ns < found.cost_ns) else found
            excess = combine_layers(self.profile, timelines).peak_bytes - cap_bytes
            if excess > 0:
                pending.append(replace(current, cap_bytes=current.cap_bytes - excess))
        if found is None and last:
            self.add_last_candidates(step, budget)
            found = self.assign(cap_bytes=cap_bytes, budget=budget, max_patterns=max_patterns)
        if found is None:
            return None
        return Solution(assignment=found, bound_ns=min(bound_ns, found.cost_ns), resolves=done, reproducible=reproducible and found.reproducible)

    def is_close(self, found: Assignment | None, bound_ns: float) -> bool:
        return found is not None and found.cost_ns - bound_ns <= GAP_OF_STEP * (self.profile.times.none_us * 1000 + found.cost_ns)

    def with_fewer_patterns(self, found: Assignment, *, cap_bytes: int, budget: float, bound_ns: float) -> Assignment:
        """Fewer patterns when that stays within the gap of the bound, or costs less than half of it."""
        for limit in range(1, min(FEW_PATTERNS, len(set(found.pattern_of)) - 1) + 1):
            fewer = self.assign(cap_bytes=cap_bytes, budget=budget, max_patterns=limit)
            if fewer is None:
                continue
            near = fewer.cost_ns - found.cost_ns <= GAP_OF_STEP / 2 * (self.profile.times.none_us * 1000 + found.cost_ns)
            if near or self.is_close(fewer, bound_ns):
                return fewer
        return found

    # ----------------------------------------------------------------------------------------------------------- risk

    def budget_of(self, risk: float) -> float:
        """The sum of rho2 that a plan of this risk may bring. In low precision any inexact value brings the profile's rounding error besides."""
        return max(0.0, risk**2 - self.profile.rounding_error**2)

    def error_of(self, rho2: float) -> float:
        """Relative gradient error of a plan that brings so much."""
        return math.sqrt(rho2 + self.profile.rounding_error**2) if rho2 > 0 else 0.0

    # ------------------------------------------------------------------------------------------------------- programs

    def program(self, layer: int, budget: float, codecs: tuple[str, ...]) -> LayerProgram:
        key = (layer, budget, codecs)
        if key not in self._programs:
            self._programs[key] = build_layer_program(self.classes[layer], self.units[layer].values(), codecs=codecs, scale=self.scale, risk_budget=budget, negligible_ns=round(NEGLIGIBLE_OF_STEP * self.profile.times.none_us * 1000))
        return self._programs[key]

    def fixed_bytes(self) -> int:
        return self.profile.account.static_bytes + self.profile.account.shared_bytes

    def floor_bytes(self) -> int:
        account = self.profile.account
        return max(account.static_bytes + account.shared_bytes + account.tail_bytes, account.static_bytes + account.update_bytes)

    def step_model(self, *, cap_bytes: int, budget: float) -> StepModel:
        """The layers' program. What layers left to checkpoint store is counted at the head only, so that the bound stays one."""
        checkpointed = sum(timeline.stored_bytes for timeline in self.left.values())
        return StepModel(
            layers=tuple(self.program(i, budget, self.codecs).model for i in self.planned),
            fixed_bytes=self.fixed_bytes(),
            head_bytes=self.profile.account.head_bytes + checkpointed,
            cap_bytes=cap_bytes,
            risk=budget,
            gap_ns=self.gap_ns(),
        )

    def gap_ns(self) -> int:
        return round(GAP_OF_STEP * self.profile.times.none_us * 1000)

    # ----------------------------------------------------------------------------------------------------- candidates

    def add_priced_candidates(self, step: StepModel, bound: Bound | None, budget: float) -> None:
        """Patterns that layers take at the relaxation's prices and at a few others, cheap and dear."""
        self.candidates.setdefault(())
        if not self.planned:
            return
        base = _base_prices(step, bound)
        blocks: list[tuple[LayerProgram, Prices, tuple[str, ...]]] = []
        if bound is not None:
            blocks += [(self.program(i, budget, self.codecs), prices, self.codecs) for i, prices in zip(self.planned, bound.prices, strict=True)]
        for layer in self.representatives():
            free = (0.0,) * len(self.program(layer, budget, ()).model.phases)
            for stored in (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 5.0, 1000.0):
                blocks.append((self.program(layer, budget, ()), Prices(stored=base.stored * stored, phases=free, rho2=0.0), ()))
            if self.codecs:
                for stored in (0.1, 0.4, 0.7, 1.0, 1.4, 2.0, 4.0, 100.0):
                    for rho2 in (0.0, 0.3, 1.0, 3.0):
                        program = self.program(layer, budget, self.codecs)
                        free = (0.0,) * len(program.model.phases)
                        blocks.append((program, Prices(stored=base.stored * stored, phases=free, rho2=base.rho2 * rho2), self.codecs))
        unique = list({(id(program), prices): (program, prices, codecs) for program, prices, codecs in blocks}.values())
        gap_ns = max(1, self.gap_ns() // 20)
        for (program, _, codecs), choices in zip(unique, solve_priced([(p.model, prices) for p, prices, _ in unique], gap_ns=gap_ns), strict=True):
            self.candidates.setdefault(actions_of_choices(program, choices, codecs))

    def add_last_candidates(self, step: StepModel, budget: float) -> None:
        """Before a cap is called infeasible: patterns that do not depend on the cap, so that the least feasible peak which one answer
        names is feasible when it is asked for; and, for the least risk, codecs that are over the budget alone.
        """
        self.add_priced_candidates(step, None, budget)
        if self.codecs:
            self.add_priced_candidates(replace(step, layers=self.step_model(cap_bytes=step.cap_bytes, budget=math.inf).layers, risk=math.inf), None, math.inf)

    def representatives(self) -> list[int]:
        """One layer of each class: the one with the median risk."""
        by_class: dict[str, list[tuple[float, int]]] = {}
        for i in self.planned:
            total = sum(u.rho2 for u in self.units[i].values())
            by_class.setdefault(self.classes[i].name, []).append((total, i))
        return [sorted(rows)[len(rows) // 2][1] for rows in by_class.values()]

    def add_choices(self, choices: Sequence[Sequence[int]], budget: float) -> tuple[list[LayerTimeline], int]:
        """Candidates from a solved program; returns the layers' exact timelines under it, and how many patterns are new."""
        before = len(self.candidates)
        timelines = [self.left.get(i) for i in range(len(self.classes))]
        for i, chosen in zip(self.planned, choices, strict=True):
            actions = actions_of_choices(self.program(i, budget, self.codecs), chosen, self.codecs)
            self.candidates.setdefault(actions)
            timeline = self.timeline(i, actions)
            if timeline is None:
                raise SolverError(f"CBC's answer for layer {i} names a unit that the layer does not have")
            timelines[i] = timeline
        return timelines, len(self.candidates) - before

    def timeline(self, layer: int, actions: Actions) -> LayerTimeline | None:
        """Exact simulation of a pattern on a layer; None when the layer lacks one of its units or measurements."""
        layer_class = self.classes[layer]
        if layer_class is None:
            return None if actions else self.left[layer]
        compressed = [(unit, action.removeprefix("compress:")) for unit, action in actions if action.startswith("compress:")]
        if any(key not in self.units[layer] for key in compressed):
            return None
        payloads = tuple(self.units[layer][key].payload_bytes for key in compressed)
        key = (layer_class.name, actions, payloads)
        if key not in self._timelines:
            known = {row.unit for row in layer_class.nodes}
            fits = all(unit in known for unit, _ in actions)
            sizes = dict(zip(compressed, payloads, strict=True))
            self._timelines[key] = simulate_layer(layer_class, Pattern(actions=dict(actions)), payload_bytes=lambda unit, codec: sizes[unit, codec]) if fits else None
        return self._timelines[key]

    # ----------------------------------------------------------------------------------------------------- assignment

    def column(self, layer: int, actions: Actions) -> Column | None:
        """A pattern on a layer; None where it does not fit. A layer left to checkpoint takes the empty pattern only."""
        timeline = self.timeline(layer, actions)
        if timeline is None:
            return None
        codec_us, rho2 = self.codec_cost(layer, actions)
        return Column(
            cost_ns=round(timeline.recompute_us * self.scale * 1000) + round(codec_us * 1000),
            stored_bytes=timeline.stored_bytes,
            forward_peak_bytes=timeline.forward_peak_bytes,
            backward_peak_bytes=timeline.backward_peak_bytes,
            rho2=rho2,
        )

    def codec_cost(self, layer: int, actions: Actions) -> tuple[float, float]:
        """Microseconds and rho2 of a pattern's compressed units on a layer."""
        units = [self.units[layer][unit, action.removeprefix("compress:")] for unit, action in actions if action.startswith("compress:")]
        if not units:
            return 0.0, 0.0
        replayed = self.replayed_units(layer, actions)
        return sum(u.compress_us + u.decompress_us for u in units), sum(u.replayed_rho2 if u.unit in replayed else u.rho2 for u in units)

    def replayed_units(self, layer: int, actions: Actions) -> frozenset[str]:
        """Compressed units from which the pattern recomputes a matmul-like result: their error spreads further."""
        key = (self.classes[layer].name, actions)
        if key not in self._replayed:
            self._replayed[key] = replayed_units(self.classes[layer], self.timeline(layer, actions).recomputed, actions)
        return self._replayed[key]

    def assign(self, *, cap_bytes: int | None, budget: float | None, max_patterns: int, minimise: str = "cost") -> Assignment | None:
        """The assignment over all candidates so far; retried with a lower cap when CBC's tolerance let a few bytes through."""
        columns = []
        for i in range(len(self.classes)):
            found = {q: self.column(i, actions) for q, actions in enumerate(self.candidates) if budget != 0 or is_exact(actions)}
            columns.append({q: column for q, column in found.items() if column is not None})
        kept = _undominated(columns, budget)
        task = AssignmentProblem(columns=tuple(kept), fixed_bytes=self.fixed_bytes(), head_bytes=self.profile.account.head_bytes, floor_bytes=self.floor_bytes(), cap_bytes=cap_bytes, risk=budget, max_patterns=max_patterns, gap_ns=self.gap_ns() // 3)
        if cap_bytes is not None and cap_bytes < self.floor_bytes():
            return None
        try:
            return assign_patterns(task, minimise=minimise)
        except CapExceededError as error:
            return assign_patterns(replace(task, cap_bytes=cap_bytes - error.excess_bytes), minimise=minimise)

    def infeasible(self, *, cap_bytes: int, risk: float, budget: float, max_patterns: int) -> InfeasibleError:
        """What would be feasible, in the order in which a user can give way."""
        least = self.assign(cap_bytes=None, budget=None, max_patterns=max_patterns, minimise="peak")
        at_risk = self.assign(cap_bytes=None, budget=budget, max_patterns=max_patterns, minimise="peak")
        less_risk = self.assign(cap_bytes=cap_bytes, budget=None, max_patterns=max_patterns, minimise="risk")
        peak = combine_layers(self.profile, self.timelines_of(at_risk))
        heaviest = [(row.label, row.nbytes) for row in sorted(peak.account, key=lambda row: -row.nbytes) if row.nbytes][:HEAVIEST]
        named = ", ".join(f"{label} {format_bytes(nbytes)}" for label, nbytes in heaviest)
        least_risk = None if less_risk is None else self.error_of(less_risk.rho2)
        parts = [f"no plan keeps {format_bytes(cap_bytes)} at risk {risk:g}", f"least feasible peak at this risk: {format_bytes(at_risk.peak_bytes)} ({at_risk.peak_bytes} bytes), bound by the {peak.binding_moment} ({named})"]
        if self.codecs:
            parts.append(f"at any risk: {format_bytes(least.peak_bytes)}")
            parts.append(f"least risk at this cap: {least_risk:.3g}" if least_risk is not None else "no risk makes this cap feasible")
        remedy = f"raise --mem-cap to {math.ceil(at_risk.peak_bytes / 2**20)}MiB"
        parts.append(remedy if least_risk is None else f"{remedy}, or --risk to {_round_up(least_risk):g}")
        return InfeasibleError("; ".join(parts), least_peak_bytes=least.peak_bytes, least_peak_at_risk_bytes=at_risk.peak_bytes, least_risk=least_risk, binding_moment=peak.binding_moment, heaviest=heaviest)

    # ------------------------------------------------------------------------------------------------------------ plan

    def actions_of(self, assignment: Assignment) -> list[Actions]:
        known = list(self.candidates)
        return [known[q] for q in assignment.pattern_of]

    def timelines_of(self, assignment: Assignment) -> list[LayerTimeline]:
        return [self.timeline(i, actions) for i, actions in enumerate(self.actions_of(assignment))]

    def predict(self, assignment: Assignment) -> Prediction:
        return self.predict_actions(self.actions_of(assignment))

    def predict_actions(self, layers: Sequence[Actions]) -> Prediction:
        """Exact figures of any actions, one for each layer."""
        step = combine_layers(self.profile, [self.timeline(i, actions) for i, actions in enumerate(layers)])
        return self.prediction(step, [self.codec_cost(i, actions) for i, actions in enumerate(layers)])

    def prediction(self, step: StepTimeline, costs: Sequence[tuple[float, float]]) -> Prediction:
        """From the simulated step, and microseconds and rho2 of each layer's codecs."""
        codec_us = sum(us for us, _ in costs)
        times, peaks = self.profile.times, self.profile.peaks
        return Prediction(
            peak_bytes=step.peak_bytes,
            binding_moment=step.binding_moment,
            step_us=times.none_us + self.scale * step.recompute_us + codec_us,
            gc_us=times.gc_us,
            none_us=times.none_us,
            gc_peak_bytes=peaks.gc_bytes,
            none_peak_bytes=peaks.none_bytes,
            rel_error=self.error_of(sum(rho2 for _, rho2 in costs)),
            recompute_us=self.scale * step.recompute_us,
            codec_us=codec_us,
            stored_bytes=step.stored_bytes,
            compressed_bytes=step.compressed_bytes,
        )

    def record(self, solution: Solution) -> SolverRecord:
        objective_us = solution.assignment.cost_ns / 1000
        return SolverRecord(
            solver=solver_version(),
            status="optimal within the gap" if self.is_close(solution.assignment, solution.bound_ns) else "feasible",
            objective_us=objective_us,
            bound_us=max(0.0, solution.bound_ns / 1000),
            gap_of_step=(objective_us - solution.bound_ns / 1000) / (self.profile.times.none_us + objective_us),
            candidates=len(self.candidates),
            resolves=solution.resolves,
            reproducible=solution.reproducible,
        )

    def alternatives(self, *, risk: float, cap_bytes: int, max_patterns: int) -> list[Alternative]:
        """Other budgets over the patterns found for this plan: a lower bound on what solving for them would give."""
        gc_bytes = self.profile.peaks.gc_bytes
        points = [("1.0x-gc", gc_bytes, risk), ("1.25x-gc", math.floor(1.25 * gc_bytes), risk)]
        if risk > 0:
            points.insert(0, ("exact (risk 0)", cap_bytes, 0.0))
        found = []
        for label, cap, limit in points:
            if cap == cap_bytes and limit == risk:
                continue
            assignment = self.assign(cap_bytes=cap, budget=self.budget_of(limit), max_patterns=max_patterns)
            if assignment is not None:
                predicted = self.predict(assignment)
                found.append(Alternative(label=f"{label}, over the patterns found", cap_bytes=cap, risk=limit, peak_bytes=predicted.peak_bytes, step_us=predicted.step_us, rel_error=predicted.rel_error))
        return found


# --------------------------------------------------------------------------------------------------------------- helpers


def is_exact(actions: Actions) -> bool:
    return all(action in ("store", "recompute", f"compress:{MASK_CODEC}") for _, action in actions)


def _no_payload(unit: str, codec: str) -> int:
    raise ProfileError(f"unit {unit!r} has no payload under {codec!r}")


def _round_up(value: float) -> float:
    """To three significant digits, so that the number that is printed does what it says."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit * (1 + 1e-9)) * unit


def _base_prices(step: StepModel, bound: Bound | None) -> Prices:
    """The relaxation's prices, or where it has none: what storing and compressing everything would save, on average."""
    replay_ns = sum(o.time_ns for layer in step.layers for o in layer.operators)
    needed = sum(v.nbytes for layer in step.layers for v in layer.values if v.first_read is not None)
    rho2 = sum(c.rho2 for layer in step.layers for v in layer.values for c in list(v.codecs.values())[:1])
    stored = max((p.stored for p in bound.prices), default=0.0) if bound is not None else 0.0
    risk = max((p.rho2 for p in bound.prices), default=0.0) if bound is not None else 0.0
    return Prices(stored=stored or replay_ns / max(needed, 1), phases=(), rho2=risk or (replay_ns / rho2 if rho2 > 0 else 0.0))


def _undominated(columns: Sequence[dict[int, Column]], budget: float | None) -> list[dict[int, Column]]:
    """Per layer, without patterns over the risk budget and those that another pattern beats in every respect on every layer."""
    patterns = sorted({q for row in columns for q in row})
    beaten = {q for q in patterns if any(_beats(columns, other, q) for other in patterns if other != q)}
    kept = []
    for row in columns:
        fits = {q: c for q, c in row.items() if q not in beaten and (budget is None or c.rho2 <= budget * (1 + 1e-9))}
        kept.append(fits or {min(row): row[min(row)]})
    return kept


def _beats(columns: Sequence[dict[int, Column]], other: int, q: int) -> bool:
    strict = False
    for row in columns:
        if q not in row:
            continue
        if other not in row:
            return False
        a, b = _figures(row[other]), _figures(row[q])
        if any(x > y for x, y in zip(a, b, strict=True)):
            return False
        strict = strict or a != b
    return strict or other < q


def _figures(column: Column) -> tuple[float, ...]:
    return (column.cost_ns, column.stored_bytes, column.forward_peak_bytes, column.backward_peak_bytes, column.rho2)

