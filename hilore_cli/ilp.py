"""The integer programs over plain arrays: which values each layer stores, compresses or recomputes, and which layers share a pattern.

Layers (`solve_layers`). For layer i, value t (one storage of the forward), codec k, operator o:
    h[i,t], l[i,t,k] in {0,1}   stored exactly / compressed by codec k;   s[i,t] = h[i,t] + sum_k l[i,t,k]
    r[i,o] in [0,1]             operator o runs again in backward (continuous: integral at an optimum, times are >= 0)
    c[i] >= 0                   bytes stored by layers 0..i
  minimise   sum time_o r[i,o] + sum codec_time_tk l[i,t,k]
  one        s[i,t] <= 1; = 1 for the layer's input, which has no producer      add_one_action_per_value
  need       s[i,t] + r[i,producer(t)] >= 1 for each t that backward reads      add_backward_needs
  inputs     s[i,u] + r[i,producer(u)] >= r[i,o] for each input u of o          add_operator_inputs
  stored     c[i] = c[i-1] + sum_t bytes_t h[i,t] + sum_tk payload_tk l[i,t,k]  add_stored_bytes
  phase      fixed + c[i-1] + live(i,p) <= cap for each phase p of layer i      add_memory_timeline
  head       fixed + c[last] + head <= cap                                      add_memory_timeline
  spread     e[i,t,k] = l[i,t,k] where a product that runs again reads t, directly or through      add_spread
             values that are not kept: y[i,t] >= l - e, e <= l; y[i,u] >= y[i,v] - s[i,u] for u made of v;
             y[i,v] + r[i,o] <= 1 for each product o that reads v
  risk       sum rho2_tk l[i,t,k] + (replayed_rho2_tk - rho2_tk) e[i,t,k] <= risk   add_risk_budget
live(i,p) is what is surely live at backward operator p: its own temporaries, every value between its first and its last
read, and what is stored but not read yet. It never exceeds the truth, so the relaxation's objective bounds every plan.

Prices (`solve_priced`): the same program for one layer, memory and risk moved into the objective at given prices. It makes
the patterns that a few prices call for.

Assignment (`assign_patterns`). Over patterns q whose bytes and peaks timeline.py has simulated exactly:
    z[i,q] in {0,1}  layer i takes pattern q;   y[q] in {0,1}  pattern q is used by some layer
  minimise   sum cost_iq z[i,q]
  one pattern  sum_q z[i,q] = 1, z[i,q] <= y[q]            add_one_pattern_per_layer
  few          sum_q y[q] <= P                             add_pattern_limit
  memory       c[i] as above; fixed + c[i-1] + peak_iq z <= cap in forward and backward; head as above
  risk         sum rho2_iq z[i,q] <= risk
The same rows with another objective answer infeasible budgets: least peak (the cap is a variable) and least risk.

Bytes are scaled to MiB and nanoseconds to milliseconds for the solver (big coefficients make CBC call feasible models
infeasible); every answer is rounded and checked again in integers here, whatever status the solver reports. Variables are
named by index: PuLP folds different names into one. CBC runs with one thread, fixed seeds and a node limit, so that the
same input gives the same plan; the wall limit is an emergency brake that is reported.
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pulp

from hilore_cli.errors import SolverError

MIB = float(2**20)
NS_PER_MS = 1e6
SECONDS_LIMIT = 60.0
LOG = logging.getLogger("hilore")
STORE = 0
"""Choice of a value: -1 recompute, 0 store, k + 1 codec k."""


@dataclass(frozen=True, kw_only=True)
class CodecModel:
    """One value under one codec."""

    payload_bytes: int
    time_ns: int
    rho2: float
    replayed_rho2: float
    """where a matmul-like operator that runs again reads it: its error spreads further"""


@dataclass(frozen=True, kw_only=True)
class ValueModel:
    """One storage of a layer's forward."""

    nbytes: int
    producer: int
    """operator index; -1 for the layer's input"""
    first_read: int | None
    """position of the first backward operator that reads it; None if backward does not"""
    last_read: int | None
    held_until: int
    """position up to which a stored copy is surely kept: the first read of anything that is computed from it"""
    storable: bool
    codecs: dict[int, CodecModel]
    """codec index -> figures"""


@dataclass(frozen=True, kw_only=True)
class OperatorModel:
    time_ns: int
    inputs: tuple[int, ...]
    pinned: bool
    matmul: bool


@dataclass(frozen=True, kw_only=True)
class PhaseModel:
    """A backward operator at which memory is counted."""

    position: int
    fixed_bytes: int
    """the layer's own backward temporaries and gradients live there"""


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    values: tuple[ValueModel, ...]
    operators: tuple[OperatorModel, ...]
    phases: tuple[PhaseModel, ...]


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """All layers and the budgets."""

    layers: tuple[LayerModel, ...]
    fixed_bytes: int
    head_bytes: int
    cap_bytes: int
    risk: float
    """bound on the sum of rho2"""
    gap_ns: int


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a layer pays per stored byte, per live byte at each phase, and per unit of rho2, in ns."""

    stored: float
    phases: tuple[float, ...]
    rho2: float


@dataclass(frozen=True, kw_only=True)
class LayersSolution:
    choices: tuple[tuple[int, ...], ...]
    """per layer and value"""
    objective_ns: int
    reproducible: bool


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The relaxation: no plan costs less; and its prices, layer by layer."""

    objective_ns: float
    prices: tuple[Prices, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One pattern on one layer, simulated exactly."""

    cost_ns: int
    stored_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    rho2: float


@dataclass(frozen=True, kw_only=True)
class AssignmentProblem:
    columns: tuple[dict[int, Column], ...]
    """per layer: pattern index -> column, for the patterns that fit the layer's class"""
    fixed_bytes: int
    head_bytes: int
    floor_bytes: int
    """peak of the moments that no pattern changes"""
    cap_bytes: int | None
    """None: the cap is what is minimised"""
    risk: float | None
    """None: risk is unlimited, or what is minimised"""
    max_patterns: int
    gap_ns: int


@dataclass(frozen=True, kw_only=True)
class Assignment:
    pattern_of: tuple[int, ...]
    cost_ns: int
    peak_bytes: int
    rho2: float
    reproducible: bool


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass
class _Block:
    """The variables of one layer."""

    model: LayerModel
    store: dict[int, pulp.LpVariable] = field(default_factory=dict)
    compress: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    rerun: dict[int, pulp.LpVariable] = field(default_factory=dict)
    spread: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)

    def kept(self, value: int) -> pulp.LpAffineExpression:
        variables = [self.store[value]] if value in self.store else []
        return pulp.lpSum(variables + [x for (t, _), x in self.compress.items() if t == value])

    def available(self, value: int) -> pulp.LpAffineExpression:
        producer = self.model.values[value].producer
        return self.kept(value) + self.rerun[producer] if producer in self.rerun else self.kept(value)

    def stored_mib(self) -> pulp.LpAffineExpression:
        values = self.model.values
        exact = [x * (values[t].nbytes / MIB) for t, x in self.store.items()]
        return pulp.lpSum(exact + [x * (values[t].codecs[k].payload_bytes / MIB) for (t, k), x in self.compress.items()])

    def live_mib(self, phase: PhaseModel) -> pulp.LpAffineExpression:
        values, position = self.model.values, phase.position
        constant = phase.fixed_bytes + sum(v.nbytes for v in values if v.first_read is not None and v.first_read <= position <= v.last_read)
        terms = [x * (values[t].nbytes / MIB) for t, x in self.store.items() if position < values[t].held_until]
        terms += [x * (values[t].codecs[k].payload_bytes / MIB) for (t, k), x in self.compress.items() if position < values[t].held_until and _is_unread(values[t], position)]
        return pulp.lpSum(terms) + constant / MIB

    def cost_ms(self) -> pulp.LpAffineExpression:
        values, operators = self.model.values, self.model.operators
        replay = [x * (operators[o].time_ns / NS_PER_MS) for o, x in self.rerun.items()]
        return pulp.lpSum(replay + [x * (values[t].codecs[k].time_ns / NS_PER_MS) for (t, k), x in self.compress.items()])

    def rho2(self, unit: float) -> pulp.LpAffineExpression:
        codecs = {(t, k): self.model.values[t].codecs[k] for t, k in self.compress}
        least = [x * (codecs[key].rho2 / unit) for key, x in self.compress.items()]
        return pulp.lpSum(least + [x * ((codecs[key].replayed_rho2 - codecs[key].rho2) / unit) for key, x in self.spread.items()])

    def choices(self) -> tuple[int, ...]:
        found = [-1] * len(self.model.values)
        for t, x in self.store.items():
            if _rounded(x):
                found[t] = STORE
        for (t, k), x in self.compress.items():
            if _rounded(x):
                found[t] = k + 1
        return tuple(found)


def _is_unread(value: ValueModel, position: int) -> bool:
    """A payload is gone once the value is restored; held_until is a lower bound of that moment."""
    return value.first_read is None or position < value.first_read


def solve_layers(step: StepModel, *, max_nodes: int = 500) -> LayersSolution | None:
    """The whole program; None when no choice keeps the rows. Raises SolverError when CBC's answer does not hold."""
    problem, blocks, _ = _build_layers(step, relax=False)
    run = run_cbc(problem, gap_ms=step.gap_ns / NS_PER_MS, max_nodes=max_nodes)
    if not run.has_solution:
        return None
    choices = tuple(block.choices() for block in blocks)
    objective_ns = check_layers(step, choices)
    return LayersSolution(choices=choices, objective_ns=objective_ns, reproducible=run.reproducible)


def bound_layers(step: StepModel) -> Bound | None:
    """The relaxation's objective and prices; None when even the relaxation is infeasible."""
    problem, _, rows = _build_layers(step, relax=True)
    run = run_cbc(problem, gap_ms=0.0, max_nodes=None)
    if not run.has_solution:
        return None
    price = {key: max(0.0, -(problem.constraints[name].pi or 0.0)) * NS_PER_MS for key, name in rows.items()}
    risk_price = price.get(("risk",), 0.0) / max(step.risk, 1e-300)
    prices = []
    for i, layer in enumerate(step.layers):
        above = sum(p for key, p in price.items() if key[0] == "phase" and key[1] > i) + price.get(("head",), 0.0)
        phases = tuple(price.get(("phase", i, p), 0.0) / MIB for p in range(len(layer.phases)))
        prices.append(Prices(stored=above / MIB, phases=phases, rho2=risk_price))
    return Bound(objective_ns=pulp.value(problem.objective) * NS_PER_MS, prices=tuple(prices))


def solve_priced(blocks: Sequence[tuple[LayerModel, Prices]], *, gap_ns: int) -> list[tuple[int, ...]]:
    """Each layer's best choices at its prices; independent blocks, solved in one call."""
    problem = pulp.LpProblem("prices", pulp.LpMinimize)
    built = [_add_block(problem, i, layer, relax=False) for i, (layer, _) in enumerate(blocks)]
    objective = []
    for block, (layer, prices) in zip(built, blocks, strict=True):
        objective.append(block.cost_ms() + block.stored_mib() * (prices.stored * MIB / NS_PER_MS) + block.rho2(1.0) * (prices.rho2 / NS_PER_MS))
        objective += [block.live_mib(phase) * (price * MIB / NS_PER_MS) for phase, price in zip(layer.phases, prices.phases, strict=True) if price > 0]
    problem.setObjective(pulp.lpSum(objective))
    run = run_cbc(problem, gap_ms=gap_ns / NS_PER_MS, max_nodes=500)
    if not run.has_solution:
        raise SolverError("CBC found no pattern at given prices, although recomputing everything is one: the solver build is broken")
    return [block.choices() for block in built]


def check_layers(step: StepModel, choices: Sequence[Sequence[int]]) -> int:
    """Every row again, in integers, without the solver. Returns the objective in ns; raises SolverError."""
    objective, stored, rho2 = 0, 0, 0.0
    for i, (layer, chosen) in enumerate(zip(step.layers, choices, strict=True)):
        cost = evaluate_layer(layer, chosen)
        if cost is None:
            raise SolverError(f"CBC's answer leaves a value of layer {i} that backward reads neither kept nor recomputed")
        for p, phase in enumerate(layer.phases):
            live = step.fixed_bytes + stored + live_bytes(layer, chosen, phase)
            if live > step.cap_bytes + _TOLERANCE_BYTES:
                raise SolverError(f"CBC's answer exceeds the cap by {live - step.cap_bytes} bytes at phase {p} of layer {i}")
        stored += stored_bytes(layer, chosen)
        rho2 += layer_rho2(layer, chosen)
        objective += cost
    if step.fixed_bytes + stored + step.head_bytes > step.cap_bytes + _TOLERANCE_BYTES:
        raise SolverError(f"CBC's answer exceeds the cap by {step.fixed_bytes + stored + step.head_bytes - step.cap_bytes} bytes at the loss head")
    if rho2 > step.risk * (1 + _TOLERANCE):
        raise SolverError(f"CBC's answer exceeds the risk budget: {rho2:.6g} > {step.risk:.6g}")
    return objective


_TOLERANCE = 1e-6
"""CBC's own feasibility tolerance, on rows scaled to MiB: about one byte per MiB of cap. Only candidates pass through it;
the assignment that makes the plan is held to the byte."""
_TOLERANCE_BYTES = 4096


def evaluate_layer(layer: LayerModel, chosen: Sequence[int]) -> int | None:
    """Recompute and codec time in ns of a layer's choices; None when a needed value can be neither kept nor recomputed."""
    rerun = rerun_operators(layer, chosen)
    if rerun is None:
        return None
    codec_ns = sum(layer.values[t].codecs[c - 1].time_ns for t, c in enumerate(chosen) if c > 0)
    return sum(layer.operators[o].time_ns for o in rerun) + codec_ns


def rerun_operators(layer: LayerModel, chosen: Sequence[int]) -> set[int] | None:
    """The operators that run again; None as above."""
    rerun: set[int] = set()
    stack = [t for t, v in enumerate(layer.values) if v.first_read is not None and chosen[t] < 0]
    while stack:
        producer = layer.values[stack.pop()].producer
        if producer < 0 or layer.operators[producer].pinned:
            return None
        if producer not in rerun:
            rerun.add(producer)
            stack.extend(u for u in layer.operators[producer].inputs if chosen[u] < 0)
    if any(v.producer < 0 and chosen[t] < 0 for t, v in enumerate(layer.values)):
        return None
    return rerun


def layer_rho2(layer: LayerModel, chosen: Sequence[int]) -> float:
    """Risk of a layer's choices, with what is behind each compressed value stored or running again as chosen."""
    rerun = rerun_operators(layer, chosen) or set()
    total = 0.0
    for t, choice in enumerate(chosen):
        if choice > 0:
            codec = layer.values[t].codecs[choice - 1]
            total += codec.replayed_rho2 if _feeds_product(layer, chosen, t, rerun) else codec.rho2
    return total


def _feeds_product(layer: LayerModel, chosen: Sequence[int], value: int, rerun: set[int]) -> bool:
    reached = {value}
    for o in sorted(rerun):  # operators are in the order of the graph
        if reached.intersection(layer.operators[o].inputs):
            if layer.operators[o].matmul:
                return True
            reached.update(t for t, other in enumerate(layer.values) if other.producer == o and chosen[t] < 0)
    return False


def stored_bytes(layer: LayerModel, chosen: Sequence[int]) -> int:
    return sum(0 if c < 0 else v.nbytes if c == STORE else v.codecs[c - 1].payload_bytes for v, c in zip(layer.values, chosen, strict=True))


def live_bytes(layer: LayerModel, chosen: Sequence[int], phase: PhaseModel) -> int:
    """live(i,p) of the module's head, in integers."""
    live = phase.fixed_bytes
    for value, choice in zip(layer.values, chosen, strict=True):
        if value.first_read is not None and value.first_read <= phase.position <= value.last_read:
            live += value.nbytes
        elif choice >= 0 and phase.position < value.held_until and _is_unread(value, phase.position):
            live += value.nbytes if choice == STORE else value.codecs[choice - 1].payload_bytes
    return live


def _build_layers(step: StepModel, *, relax: bool) -> tuple[pulp.LpProblem, list[_Block], dict[tuple, str]]:
    problem = pulp.LpProblem("layers", pulp.LpMinimize)
    blocks = [_add_block(problem, i, layer, relax=relax) for i, layer in enumerate(step.layers)]
    problem.setObjective(pulp.lpSum([block.cost_ms() for block in blocks]))
    cumulative = add_stored_bytes(problem, [block.stored_mib() for block in blocks])
    rows = add_memory_timeline(problem, step, blocks, cumulative)
    rows |= add_risk_budget(problem, [block.rho2(max(step.risk, 1e-300)) for block in blocks if block.compress])
    return problem, blocks, rows


def _add_block(problem: pulp.LpProblem, i: int, layer: LayerModel, *, relax: bool) -> _Block:
    kind = "Continuous" if relax else "Binary"
    block = _Block(model=layer)
    for t, value in enumerate(layer.values):
        if value.storable:
            block.store[t] = pulp.LpVariable(f"h{i}_{t}", 0, 1, kind)
        for k in value.codecs:
            block.compress[t, k] = pulp.LpVariable(f"l{i}_{t}_{k}", 0, 1, kind)
    for o, operator in enumerate(layer.operators):
        if not operator.pinned:
            block.rerun[o] = pulp.LpVariable(f"r{i}_{o}", 0, 1)
    add_one_action_per_value(problem, i, block)
    add_backward_needs(problem, i, block)
    add_operator_inputs(problem, i, block)
    add_spread(problem, i, block)
    return block


def add_one_action_per_value(problem: pulp.LpProblem, i: int, block: _Block) -> None:
    for t, value in enumerate(block.model.values):
        if value.producer < 0:
            problem.addConstraint(block.kept(t) == 1, f"one{i}_{t}")
        elif value.storable or value.codecs:
            problem.addConstraint(block.kept(t) <= 1, f"one{i}_{t}")


def add_backward_needs(problem: pulp.LpProblem, i: int, block: _Block) -> None:
    for t, value in enumerate(block.model.values):
        if value.first_read is not None and value.producer >= 0:
            problem.addConstraint(block.available(t) >= 1, f"need{i}_{t}")


def add_operator_inputs(problem: pulp.LpProblem, i: int, block: _Block) -> None:
    for o, rerun in block.rerun.items():
        for u in block.model.operators[o].inputs:
            if block.model.values[u].producer >= 0:  # the layer's input is always kept
                problem.addConstraint(block.available(u) - rerun >= 0, f"in{i}_{o}_{u}")


def add_spread(problem: pulp.LpProblem, i: int, block: _Block) -> None:
    """y[t]: t, or what is recomputed of it, holds an error that was charged as if no product read it."""
    values, operators = block.model.values, block.model.operators
    sources = {t for t, k in block.compress if values[t].codecs[k].replayed_rho2 > values[t].codecs[k].rho2}
    outputs: dict[int, list[int]] = {o: [] for o in block.rerun}
    for t, value in enumerate(values):
        if value.producer in outputs:
            outputs[value.producer].append(t)
    reached = set(sources)
    for o in sorted(block.rerun):  # operators are in the order of the graph
        if not operators[o].matmul and reached.intersection(operators[o].inputs):
            reached.update(outputs[o])
    lossy = {t: pulp.LpVariable(f"y{i}_{t}", 0, 1) for t in sorted(reached)}
    for t in sorted(sources):
        keys = [(t, k) for k, codec in values[t].codecs.items() if codec.replayed_rho2 > codec.rho2]
        block.spread |= {key: pulp.LpVariable(f"e{i}_{t}_{key[1]}", 0, 1) for key in keys}
        problem.addConstraint(lossy[t] - pulp.lpSum([block.compress[key] - block.spread[key] for key in keys]) >= 0, f"lossy{i}_{t}")
        for key in keys:
            problem.addConstraint(block.spread[key] - block.compress[key] <= 0, f"own{i}_{t}_{key[1]}")  # else one codec's would pay for another's
    for o, rerun in block.rerun.items():
        for v in dict.fromkeys(operators[o].inputs):
            if v not in lossy:
                continue
            if operators[o].matmul:
                problem.addConstraint(lossy[v] + rerun <= 1, f"spread{i}_{o}_{v}")
            else:
                for u in outputs[o]:
                    problem.addConstraint(lossy[u] - lossy[v] + block.kept(u) >= 0, f"passed{i}_{v}_{u}")


def add_stored_bytes(problem: pulp.LpProblem, stored_mib: Sequence[pulp.LpAffineExpression]) -> list[pulp.LpVariable]:
    """c[i]: MiB stored by layers 0..i."""
    cumulative = []
    for i, stored in enumerate(stored_mib):
        c = pulp.LpVariable(f"c{i}", 0)
        problem.addConstraint(stored + (cumulative[-1] if cumulative else 0) - c == 0, f"stored{i}")
        cumulative.append(c)
    return cumulative


def add_memory_timeline(problem: pulp.LpProblem, step: StepModel, blocks: Sequence[_Block], cumulative: Sequence[pulp.LpVariable]) -> dict[tuple, str]:
    """Phase and head rows; those that hold whatever is stored are left out."""
    room = (step.cap_bytes - step.fixed_bytes) / MIB
    rows: dict[tuple, str] = {("head",): "head"}
    problem.addConstraint(cumulative[-1] <= room - step.head_bytes / MIB, "head")
    for i, block in enumerate(blocks):
        below = cumulative[i - 1] if i else 0
        for p, phase in enumerate(block.model.phases):
            everything = sum(v.nbytes for v in block.model.values if v.storable or v.codecs)
            if phase.fixed_bytes + everything <= step.head_bytes:
                continue  # the head row is the stronger one: c[i-1] is at most c[last]
            rows["phase", i, p] = f"mem{i}_{p}"
            problem.addConstraint(block.live_mib(phase) + below <= room, f"mem{i}_{p}")
    return rows


def add_risk_budget(problem: pulp.LpProblem, relative: Sequence[pulp.LpAffineExpression]) -> dict[tuple, str]:
    """`relative`: each layer's rho2 over the budget."""
    if not relative:
        return {}
    problem.addConstraint(pulp.lpSum(relative) <= 1, "risk")
    return {("risk",): "risk"}


# ----------------------------------------------------------------------------------------------------------- assignment


def assign_patterns(task: AssignmentProblem, *, minimise: str = "cost", max_nodes: int = 500) -> Assignment | None:
    """The best pattern for each layer; `minimise` is "cost", "peak" or "risk". None when the rows cannot be kept.

    Raises SolverError when CBC's answer does not hold in integers.
    """
    problem = pulp.LpProblem("assignment", pulp.LpMinimize)
    chosen = [{q: pulp.LpVariable(f"z{i}_{q}", 0, 1, "Binary") for q in columns} for i, columns in enumerate(task.columns)]
    used = {q: pulp.LpVariable(f"y{q}", 0, 1, "Binary") for q in sorted({q for columns in task.columns for q in columns})}
    cap = pulp.LpVariable("cap", task.floor_bytes / MIB) if task.cap_bytes is None else task.cap_bytes / MIB
    add_one_pattern_per_layer(problem, chosen, used)
    add_pattern_limit(problem, used, task.max_patterns)
    add_exact_timeline(problem, task, chosen, cap)
    unit = task.risk if task.risk else max((c.rho2 for columns in task.columns for c in columns.values()), default=0.0) or 1.0
    relative = pulp.lpSum([x * (task.columns[i][q].rho2 / unit) for i, row in enumerate(chosen) for q, x in row.items()])
    if task.risk is not None:
        problem.addConstraint(relative <= (1 if task.risk > 0 else 0), "risk")
    cost = pulp.lpSum([x * (task.columns[i][q].cost_ns / NS_PER_MS) for i, row in enumerate(chosen) for q, x in row.items()])
    problem.setObjective({"cost": cost, "peak": cap, "risk": relative}[minimise] + 0)
    gap = {"cost": task.gap_ns / NS_PER_MS, "peak": task.floor_bytes / MIB * 1e-4 + 1e-6, "risk": 1e-3}[minimise]
    run = run_cbc(problem, gap_ms=gap, max_nodes=max_nodes)
    if not run.has_solution:
        return None
    picked = tuple(next((q for q, x in row.items() if _rounded(x)), -1) for row in chosen)
    return check_assignment(task, picked, reproducible=run.reproducible)


def add_one_pattern_per_layer(problem: pulp.LpProblem, chosen: Sequence[dict[int, pulp.LpVariable]], used: dict[int, pulp.LpVariable]) -> None:
    for i, row in enumerate(chosen):
        problem.addConstraint(pulp.lpSum(row.values()) == 1, f"one{i}")
        for q, x in row.items():
            problem.addConstraint(x - used[q] <= 0, f"use{i}_{q}")


def add_pattern_limit(problem: pulp.LpProblem, used: dict[int, pulp.LpVariable], limit: int) -> None:
    problem.addConstraint(pulp.lpSum(used.values()) <= limit, "few")


def add_exact_timeline(problem: pulp.LpProblem, task: AssignmentProblem, chosen: Sequence[dict[int, pulp.LpVariable]], cap: pulp.LpVariable | float) -> None:
    stored = [pulp.lpSum([x * (task.columns[i][q].stored_bytes / MIB) for q, x in row.items()]) for i, row in enumerate(chosen)]
    cumulative = add_stored_bytes(problem, stored)
    fixed = task.fixed_bytes / MIB
    problem.addConstraint(cumulative[-1] + (fixed + task.head_bytes / MIB) - cap <= 0, "head")
    for i, row in enumerate(chosen):
        peaks = {q: max(task.columns[i][q].forward_peak_bytes, task.columns[i][q].backward_peak_bytes) for q in row}
        if max(peaks.values()) <= task.head_bytes + min(c.stored_bytes for c in task.columns[i].values()):
            continue  # the head row is the stronger one
        peak = pulp.lpSum([x * (peaks[q] / MIB) for q, x in row.items()])
        problem.addConstraint(peak + (cumulative[i - 1] if i else 0) + fixed - cap <= 0, f"mem{i}")


def check_assignment(task: AssignmentProblem, picked: Sequence[int], *, reproducible: bool) -> Assignment:
    """Every row again, in integers, to the byte. Raises SolverError."""
    if -1 in picked:
        raise SolverError(f"CBC's answer gives layer {list(picked).index(-1)} no pattern")
    columns = [row[q] for row, q in zip(task.columns, picked, strict=True)]
    peak, below = task.floor_bytes, 0
    for column in columns:
        peak = max(peak, task.fixed_bytes + below + max(column.forward_peak_bytes, column.backward_peak_bytes))
        below += column.stored_bytes
    peak = max(peak, task.fixed_bytes + below + task.head_bytes)
    rho2 = sum(column.rho2 for column in columns)
    if task.cap_bytes is not None and peak > task.cap_bytes:
        raise CapExceededError(f"CBC's answer exceeds the cap by {peak - task.cap_bytes} bytes", excess_bytes=peak - task.cap_bytes)
    if task.risk is not None and rho2 > task.risk * (1 + _TOLERANCE):
        raise SolverError(f"CBC's answer exceeds the risk budget: sum of rho2 {rho2:.6g} > {task.risk:.6g}")
    if len(set(picked)) > task.max_patterns:
        raise SolverError(f"CBC's answer uses {len(set(picked))} patterns, at most {task.max_patterns} are allowed")
    return Assignment(pattern_of=tuple(picked), cost_ns=sum(c.cost_ns for c in columns), peak_bytes=peak, rho2=rho2, reproducible=reproducible)


class CapExceededError(SolverError):
    """The solver called an answer feasible that is over the cap: by its tolerance (a few bytes), or because it is wrong."""

    def __init__(self, message: str, *, excess_bytes: int) -> None:
        super().__init__(message)
        self.excess_bytes = excess_bytes


# --------------------------------------------------------------------------------------------------------------- solver


@dataclass(frozen=True, kw_only=True)
class SolverRun:
    """What CBC said, after its status was read; values are on the problem's variables."""

    has_solution: bool
    reproducible: bool


def run_cbc(problem: pulp.LpProblem, *, gap_ms: float, max_nodes: int | None) -> SolverRun:
    """Solve in place, quietly. Raises SolverError when CBC is missing or fails.

    Only an optimal status is an answer: an infeasible model has an objective and values too. A limit with an incumbent
    also says `Optimal` (sol_status 2); it is a feasible answer, and a plan's gap is taken from our own bound anyway.
    A node limit without an incumbent proves nothing: the search goes on without it.
    """
    started = time.monotonic()
    call_solver(problem, gap_ms, max_nodes)
    if max_nodes is not None and problem.status not in (pulp.LpStatusOptimal, pulp.LpStatusInfeasible):
        call_solver(problem, gap_ms, None)
    seconds = time.monotonic() - started
    found = problem.status == pulp.LpStatusOptimal and problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if not found and problem.status != pulp.LpStatusInfeasible:
        raise SolverError(f"CBC found no answer in {seconds:.0f} s (status {pulp.LpStatus[problem.status]}); use fewer codecs or a larger cap")
    return SolverRun(has_solution=found, reproducible=seconds < SECONDS_LIMIT)


def call_solver(problem: pulp.LpProblem, gap_ms: float, max_nodes: int | None) -> None:
    """The only call of CBC; tests put a lying solver here."""
    cbc = pulp.PULP_CBC_CMD(msg=False, gapAbs=gap_ms, maxNodes=max_nodes, timeLimit=SECONDS_LIMIT, options=["randomSeed 1", "randomCbcSeed 1"])
    if not cbc.available():
        raise SolverError(f"CBC is missing or cannot be executed ({cbc.path}); reinstall it with `pip install --force-reinstall 'pulp>=3.3,<4'`")
    started = time.monotonic()
    try:
        problem.solve(cbc)
    except (pulp.PulpSolverError, OSError) as error:
        raise SolverError(f"CBC failed: {error}; reinstall it with `pip install --force-reinstall 'pulp>=3.3,<4'`") from error
    LOG.debug("CBC: %d rows, %d variables: %s in %.2f s", problem.numConstraints(), problem.numVariables(), pulp.LpStatus[problem.status], time.monotonic() - started)


def try_solver() -> None:
    """Solve a program of one variable. Raises SolverError that says why CBC does not."""
    variable = pulp.LpVariable("x", lowBound=0, cat="Integer")
    problem = pulp.LpProblem("one_variable", pulp.LpMinimize)
    problem += variable
    problem += variable >= 1.5
    run_cbc(problem, gap_ms=0.0, max_nodes=None)
    if variable.value() != 2:
        raise SolverError(f"CBC says that the least whole number from 1.5 on is {variable.value()}; reinstall it with `pip install --force-reinstall 'pulp>=3.3,<4'`")


def solver_version() -> str:
    """The build: the wheel has one binary for each platform, and another may find another of several equally good plans."""
    return f"CBC 2.10.3, PuLP {pulp.__version__}, {sys.platform}-{platform.machine()}"


def _rounded(variable: pulp.LpVariable) -> bool:
    value = variable.value()
    if value is None or abs(value - round(value)) > 1e-4:
        raise SolverError(f"CBC's answer gives {variable.name} = {value}, which is not a whole number")
    return round(value) == 1
