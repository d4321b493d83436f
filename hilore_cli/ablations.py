"""The plan without one of its ideas at a time: what each of them is worth, under one cap and one risk.

    for ablation in solve_ablations(profile, cap_bytes=cap, risk=0.015, codecs=["fbgemm-int8"]): ...

    plan            the plan itself
    exact only      nothing is compressed
    risk ignored    anything may be compressed, whatever error that brings
    bytes summed    a step's peak is taken for checkpointing's plus what is stored on top, instead of the timeline's
    greedy          no solver: unit after unit, by time saved for each byte, in as many layers as have room for it
    whole layers    each layer stores, compresses or recomputes all of its units
    random          units in random order, stored until as many bytes are stored as by the plan

All are of the profile's largest micro-batch, one variant each. Figures are those of the exact simulation, so that a plan that believed something
else is seen to miss its cap. Exposure tells micro-batches of an update apart, so its worth shows in the whole update (`solve_updates`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hilore_cli.ilp import STORE, LayerModel, Prices, evaluate_layer, solve_priced, stored_bytes
from hilore_cli.planner import FEWEST, MAX_PATTERNS, check_measured, solve_plan
from hilore_cli.program import Actions, LayerProgram, actions_of_choices
from hilore_cli.schema import Prediction, Profile, UpdatePrediction
from hilore_cli.sizes import Cap
from hilore_cli.step_planner import RESOLVES, StepPlanner
from hilore_cli.timeline import LayerTimeline, combine_layers

SEEDS = 5
"""Random plans that are drawn; the one of the median time is told."""

Progress = Callable[[str, int, int], None]
Choices = list[int]
"""Of one layer, by value, as in ilp.py."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One plan: the actions of each layer, and what the exact simulation says of it."""

    name: str
    layers: tuple[Actions, ...]
    predicted: Prediction


def solve_ablations(profile: Profile, *, cap_bytes: int, risk: float, codecs: Sequence[str], progress: Progress) -> list[Ablation]:
    """The plan, then the others; one that finds no plan under the cap is not there. Raises InfeasibleError where the plan itself is not, UsageError for an unknown codec."""
    check_measured(profile, codecs)
    planner = StepPlanner(profile, codecs=tuple(codecs) if risk > 0 else ())
    solution = planner.simplify(planner.solve(cap_bytes=cap_bytes, risk=risk, max_patterns=MAX_PATTERNS), cap_bytes=cap_bytes, risk=risk)
    budgets = {"cap_bytes": cap_bytes, "max_patterns": MAX_PATTERNS}
    ways: dict[str, Callable[[], Sequence[Actions] | None]] = {
        "plan": lambda: planner.actions_of(solution.assignment),
        "exact only": partial(_solve, StepPlanner(profile, codecs=()), risk=0.0, **budgets),
        "risk ignored": partial(_solve, planner, risk=math.inf, **budgets),
        "bytes summed": partial(_solve, SummingPlanner(profile, codecs=planner.codecs), risk=risk, **budgets),
        "greedy": partial(choose_greedily, planner, cap_bytes=cap_bytes, risk=risk),
        "whole layers": partial(choose_whole_layers, profile, codecs=planner.codecs, risk=risk, **budgets),
        "random": lambda: choose_randomly(planner, nbytes=planner.predict(solution.assignment).stored_bytes),
    }
    found = []
    for position, (name, choose) in enumerate(ways.items()):
        progress(f"solving: {name}", position, len(ways))
        if (layers := choose()) is not None:
            found.append(Ablation(name=name, layers=tuple(layers), predicted=planner.predict_actions(layers)))
    return found


def solve_updates(profile: Profile, *, cap: Cap, risk: float, codecs: Sequence[str], progress: Progress) -> dict[str, UpdatePrediction]:
    """What exposure is worth: the whole update by exposure and size, by size alone, and with one variant. Empty where there are too few micro-batches."""
    if len(profile.micro_batches) < FEWEST:
        return {}
    ways = {"exposure and size": {}, "size alone": {"rule": "tokens"}, "one variant": {"variants": False}}
    found = {}
    for position, (name, options) in enumerate(ways.items()):
        progress(f"solving the update: {name}", position, len(ways))
        found[name] = solve_plan(profile, cap=cap, risk=risk, codecs=codecs, name="ablation", **options).update
    return found


def _solve(planner: StepPlanner, *, cap_bytes: int, risk: float, max_patterns: int) -> Sequence[Actions] | None:
    solution = planner.try_solve(cap_bytes=cap_bytes, risk=risk, max_patterns=max_patterns, resolves=RESOLVES, last=True)
    return None if solution is None else planner.actions_of(solution.assignment)


class SummingPlanner(StepPlanner):
    """Knows one moment only: what all layers store, on top of what checkpointing's peak holds beside that."""

    def __init__(self, profile: Profile, *, codecs: tuple[str, ...]) -> None:
        exact = StepPlanner(profile, codecs=())
        recomputed = combine_layers(profile, [exact.timeline(i, ()) for i in range(len(exact.classes))])
        beside = recomputed.peak_bytes - exact.fixed_bytes() - recomputed.stored_bytes
        super().__init__(profile.model_copy(update={"account": profile.account.model_copy(update={"head_bytes": beside})}), codecs=codecs)

    def timeline(self, layer: int, actions: Actions) -> LayerTimeline | None:
        timeline = super().timeline(layer, actions)
        return None if timeline is None else replace(timeline, forward_peak_bytes=0, backward_peak_bytes=0)

    def program(self, layer: int, budget: float, codecs: tuple[str, ...]) -> LayerProgram:
        program = super().program(layer, budget, codecs)
        return replace(program, model=replace(program.model, phases=()))


# -------------------------------------------------------------------------------------------------------- without a solver


def choose_greedily(planner: StepPlanner, *, cap_bytes: int, risk: float) -> list[Actions]:
    """From all recomputed on: the unit and action that save most time for each byte, in as many layers as the budgets allow, until none saves any."""
    draft = Draft(planner, budget=planner.budget_of(risk))
    dead: set[tuple[str, int]] = set()
    while True:
        rated = {move: rate for move in draft.moves() if move not in dead and (rate := draft.rate(*move)) > 0}
        if not rated:
            return draft.actions()
        move = max(rated, key=rated.__getitem__)
        draft.apply(*move, allowed=lambda figures: figures.peak_bytes <= cap_bytes and figures.rel_error <= risk)
        dead.add(move)


def choose_randomly(planner: StepPlanner, *, nbytes: int) -> list[Actions]:
    """Of SEEDS plans that store units in random order up to so many bytes the one of the median time."""
    found = []
    for seed in range(SEEDS):
        draft = Draft(planner, budget=0.0)
        moves = sorted(move for move in draft.moves() if move[1] == STORE)
        random.Random(seed).shuffle(moves)
        for move in moves:
            draft.apply(*move, allowed=lambda figures: figures.stored_bytes <= nbytes)
        found.append(draft.actions())
    return sorted(found, key=lambda layers: planner.predict_actions(layers).step_us)[SEEDS // 2]


class Draft:
    """Choices for all planned layers, changed unit by unit. A unit is told by its name: layers of several classes may share it."""

    def __init__(self, planner: StepPlanner, *, budget: float) -> None:
        self.planner = planner
        self.programs = {i: planner.program(i, budget, planner.codecs) for i in planner.planned}
        self.choices = {i: _all_recomputed(program.model) for i, program in self.programs.items()}

    def moves(self) -> Iterator[tuple[str, int]]:
        """(unit, choice) that some layer could take, from recomputed to compressed to stored."""
        yield from dict.fromkeys(
            (program.units[t], choice)
            for program in self.programs.values()
            for t, value in enumerate(program.model.values)
            for choice in ([STORE] if value.storable else []) + [k + 1 for k in value.codecs]
        )

    def rate(self, unit: str, choice: int) -> float:
        """ns saved for each byte more, over all layers that could take the move."""
        saved = more = 0
        for i, changed in self._changed(unit, choice).items():
            model = self.programs[i].model
            saved += evaluate_layer(model, self.choices[i]) - evaluate_layer(model, changed)
            more += stored_bytes(model, changed) - stored_bytes(model, self.choices[i])
        return saved / max(more, 1)

    def apply(self, unit: str, choice: int, *, allowed: Callable[[Prediction], bool]) -> None:
        """Take the move in the most of the first layers for which the figures of the whole step are allowed."""
        changed = self._changed(unit, choice)
        order = list(changed)
        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            trial = self.actions(self.choices | {i: changed[i] for i in order[:middle]})
            low, high = (middle, high) if allowed(self.planner.predict_actions(trial)) else (low, middle - 1)
        self.choices |= {i: changed[i] for i in order[:low]}

    def actions(self, choices: dict[int, Choices] | None = None) -> list[Actions]:
        """What the choices come to, layer by layer; layers that are left to checkpoint have none."""
        choices = self.choices if choices is None else choices
        return [actions_of_choices(self.programs[i], choices[i], self.planner.codecs) if i in choices else () for i in range(len(self.planner.classes))]

    def _changed(self, unit: str, choice: int) -> dict[int, Choices]:
        """Choices after the move, of the layers that can take it and keep less of the unit now."""
        changed = {}
        for i, program in self.programs.items():
            t = program.units.index(unit) if unit in program.units else None
            if t is None or self.choices[i][t] == STORE or self.choices[i][t] == choice:
                continue
            value = program.model.values[t]
            if value.storable if choice == STORE else choice - 1 in value.codecs:
                changed[i] = [*self.choices[i][:t], choice, *self.choices[i][t + 1 :]]
        return changed


def _all_recomputed(model: LayerModel) -> Choices:
    """Nothing is kept but the layer's input and what cannot be made again."""
    return [STORE if value.producer < 0 or model.operators[value.producer].pinned else -1 for value in model.values]


def choose_whole_layers(profile: Profile, *, codecs: tuple[str, ...], cap_bytes: int, risk: float, max_patterns: int) -> Sequence[Actions] | None:
    """The best of: all stored, all of that compressed by one codec, all recomputed, for each layer."""
    planner = StepPlanner(profile, codecs=codecs)
    planner.candidates.setdefault(())
    for layer in planner.representatives():
        program = planner.program(layer, math.inf, ())
        free = Prices(stored=0.0, phases=(0.0,) * len(program.model.phases), rho2=0.0)
        stored = actions_of_choices(program, solve_priced([(program.model, free)], gap_ns=1)[0], ())
        planner.candidates.setdefault(stored)
        for codec in codecs:
            packed = {unit: f"compress:{codec}" if action == "store" and (unit, codec) in planner.units[layer] else action for unit, action in stored}
            planner.candidates.setdefault(tuple(sorted(packed.items())))
    found = planner.assign(cap_bytes=cap_bytes, budget=planner.budget_of(risk), max_patterns=max_patterns)
    return None if found is None else planner.actions_of(found)
