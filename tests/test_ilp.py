"""The integer programs: small problems solved twice, and solvers that lie."""

from __future__ import annotations

import itertools
import random
import stat

import pulp
import pytest
from profiles_for_tests import MIB, chain_class, make_profile

from hilore_cli import ilp
from hilore_cli.errors import SolverError
from hilore_cli.ilp import (
    AssignmentProblem,
    Column,
    LayerModel,
    StepModel,
    assign_patterns,
    bound_layers,
    check_layers,
    evaluate_layer,
    layer_rho2,
    live_bytes,
    solve_layers,
    solve_priced,
    stored_bytes,
)
from hilore_cli.program import actions_of_choices, build_layer_program, prune_values
from hilore_cli.schema import UnitRow
from hilore_cli.step_planner import StepPlanner


def chain_models(*, layers: int, codecs: tuple[str, ...], seed: int, blocks: int = 1, prune: bool = True) -> list[LayerModel]:
    profile = make_profile(layers=layers, layer_class=chain_class(blocks=blocks), seed=seed, head_bytes=0, static_bytes=0)
    units: list[list[UnitRow]] = [[u for u in profile.units if u.layer == i] for i in range(layers)]
    models = [build_layer_program(profile.classes[0], rows, codecs=codecs, scale=1.0, risk_budget=1.0).model for rows in units]
    assert models[0] == prune_values(models[0])
    return models


def choices_of(model: LayerModel) -> list[tuple[int, ...]]:
    options = [[-1, *([0] if v.storable else []), *(k + 1 for k in v.codecs)] for v in model.values]
    return [chosen for chosen in itertools.product(*options) if evaluate_layer(model, chosen) is not None]


def enumerate_step(step: StepModel) -> int | None:
    best = None
    for combination in itertools.product(*(choices_of(model) for model in step.layers)):
        try:
            cost = check_layers(step, combination)
        except SolverError:
            continue
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_layers_program_equals_enumeration(seed: int) -> None:
    """Two layers, every combination: the same objective, feasible or not, and the bound below it."""
    rng = random.Random(seed)
    layers = chain_models(layers=2, codecs=("int8",), seed=seed)
    everything = sum(v.nbytes for model in layers for v in model.values)
    step = StepModel(layers=tuple(layers), fixed_bytes=7 * MIB, head_bytes=rng.choice([0, 30 * MIB]), cap_bytes=7 * MIB + round(everything * rng.uniform(0.4, 1.1)), risk=rng.choice([1e-6, 1e-5, 1e-4]), gap_ns=0)
    expected = enumerate_step(step)
    found = solve_layers(step)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.objective_ns == expected
        assert check_layers(step, found.choices) == expected
        assert bound_layers(step).objective_ns <= expected * (1 + 1e-6) + 10


@pytest.mark.parametrize("risk", [1e-6, 3e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_two_codecs_are_each_charged_for_themselves(share: float, risk: float) -> None:
    """One layer, two codecs of very different risk, every combination: neither pays with the other's."""
    [layer] = chain_models(layers=1, codecs=("int8", "int4"), seed=1, blocks=2)
    everything = sum(v.nbytes for v in layer.values)
    step = StepModel(layers=(layer,), fixed_bytes=0, head_bytes=0, cap_bytes=round(everything * share) + max(p.fixed_bytes for p in layer.phases), risk=risk, gap_ns=0)
    expected = enumerate_step(step)
    found = solve_layers(step)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.objective_ns == expected


def test_pruned_values_never_help() -> None:
    """With and without the pruning rule, by enumeration of one layer at every memory level."""
    profile = make_profile(layers=1, layer_class=chain_class(blocks=1), head_bytes=0, static_bytes=0)
    pruned = build_layer_program(profile.classes[0], profile.units, codecs=("int8",), scale=1.0, risk_budget=1.0).model
    values = list(pruned.values)
    full = LayerModel(values=tuple(ilp.ValueModel(**{**vars(v), "storable": True}) for v in values), operators=pruned.operators, phases=pruned.phases)
    for cap in range(10, 60, 5):
        a, b = (enumerate_step(StepModel(layers=(m,), fixed_bytes=0, head_bytes=0, cap_bytes=cap * MIB, risk=1e-5, gap_ns=0)) for m in (pruned, full))
        assert a == b


@pytest.mark.parametrize("codecs", [("int8",), ("int8", "int4")])
def test_priced_patterns_equal_enumeration(codecs: tuple[str, ...]) -> None:
    model = chain_models(layers=1, codecs=codecs, seed=3, blocks=2)[0]
    free = (0.0,) * len(model.phases)
    for stored, rho2 in ((0.0, 0.0), (0.1, 1e9), (1.0, 1e10), (50.0, 1e9), (10.0, 1e9), (100.0, 1e10)):
        prices = ilp.Prices(stored=stored, phases=free, rho2=rho2)

        def cost(chosen: tuple[int, ...], stored: float = stored, rho2: float = rho2) -> float:
            return evaluate_layer(model, chosen) + stored * stored_bytes(model, chosen) + rho2 * layer_rho2(model, chosen)

        [chosen] = solve_priced([(model, prices)], gap_ns=0)
        assert cost(chosen) == pytest.approx(min(cost(c) for c in choices_of(model)), rel=1e-6)


def test_risk_of_the_program_is_that_of_the_simulated_pattern() -> None:
    """Every choice of a layer: what is compressed is charged for the products that really run again from it."""
    profile = make_profile(layers=1, layer_class=chain_class(blocks=2), seed=3, head_bytes=0, static_bytes=0)
    planner = StepPlanner(profile, codecs=("int8",))
    program = planner.program(0, 1.0, ("int8",))
    charged = set()
    for chosen in choices_of(program.model):
        actions = actions_of_choices(program, chosen, ("int8",))
        if sum(action.startswith("compress") for _, action in actions) == sum(c > 0 for c in chosen):  # else some are kept for nobody, and left out
            assert layer_rho2(program.model, chosen) == pytest.approx(planner.codec_cost(0, actions)[1], rel=1e-12)
            charged |= planner.replayed_units(0, actions)
    assert len(charged) > 1, "some units are charged for products behind them"


def random_task(seed: int, *, layers: int = 4, patterns: int = 4, limit: int = 2) -> AssignmentProblem:
    rng = random.Random(seed)
    columns = [
        {q: Column(cost_ns=rng.randrange(10**6, 10**8), stored_bytes=rng.randrange(1, 40) * MIB, forward_peak_bytes=rng.randrange(1, 60) * MIB, backward_peak_bytes=rng.randrange(1, 90) * MIB, rho2=rng.uniform(0, 1e-5)) for q in range(patterns)}
        for _ in range(layers)
    ]
    return AssignmentProblem(columns=tuple(columns), fixed_bytes=100 * MIB, head_bytes=30 * MIB, floor_bytes=110 * MIB, cap_bytes=rng.randrange(170, 260) * MIB, risk=2.5e-5, max_patterns=limit, gap_ns=0)


def enumerate_assignment(task: AssignmentProblem) -> int | None:
    best = None
    for picked in itertools.product(*(sorted(row) for row in task.columns)):
        if len(set(picked)) > task.max_patterns:
            continue
        columns = [row[q] for row, q in zip(task.columns, picked, strict=True)]
        below = [sum(c.stored_bytes for c in columns[:i]) for i in range(len(columns) + 1)]
        peak = max(below[-1] + task.head_bytes, *(b + max(c.forward_peak_bytes, c.backward_peak_bytes) for b, c in zip(below, columns, strict=False)))
        if task.fixed_bytes + peak <= task.cap_bytes and sum(c.rho2 for c in columns) <= task.risk:
            cost = sum(c.cost_ns for c in columns)
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_assignment_equals_enumeration(seed: int) -> None:
    task = random_task(seed, limit=1 + seed % 3)
    found = assign_patterns(task)
    assert (found.cost_ns if found else None) == enumerate_assignment(task)
    if found:
        assert len(set(found.pattern_of)) <= task.max_patterns
        assert found.peak_bytes <= task.cap_bytes


def feasible_task() -> AssignmentProblem:
    return next(task for task in map(random_task, range(50)) if enumerate_assignment(task) is not None)


def lying_solver(values: dict[str, float], status: int = pulp.LpStatusOptimal, sol_status: int = pulp.LpSolutionOptimal):
    def call(problem: pulp.LpProblem, gap_ms: float, max_nodes: int | None) -> None:
        problem.status, problem.sol_status = status, sol_status
        for variable in problem.variables():
            variable.varValue = values.get(variable.name, 0.0)

    return call


def values_of(picked: list[int]) -> dict[str, float]:
    return {f"z{i}_{q}": 1.0 for i, q in enumerate(picked)}


def test_sv05_optimal_but_over_the_cap_by_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    task = feasible_task()
    found = assign_patterns(task)
    over = AssignmentProblem(**{**vars(task), "cap_bytes": found.peak_bytes - 1})
    monkeypatch.setattr(ilp, "call_solver", lying_solver(values_of(list(found.pattern_of))))
    with pytest.raises(SolverError, match="exceeds the cap by 1 bytes"):
        assign_patterns(over)
    assert assign_patterns(AssignmentProblem(**{**vars(task), "cap_bytes": found.peak_bytes})).peak_bytes == found.peak_bytes


def test_sv05_almost_whole_values_are_rounded_and_half_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = feasible_task()
    found = assign_patterns(task)
    monkeypatch.setattr(ilp, "call_solver", lying_solver({name: 0.9999999 for name in values_of(list(found.pattern_of))}))
    assert assign_patterns(task).pattern_of == found.pattern_of
    monkeypatch.setattr(ilp, "call_solver", lying_solver({name: 0.6 for name in values_of(list(found.pattern_of))}))
    with pytest.raises(SolverError, match="not a whole number"):
        assign_patterns(task)


def test_sv05_infeasible_with_values_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = feasible_task()
    monkeypatch.setattr(ilp, "call_solver", lying_solver({"z0_0": 1.67}, pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible))
    assert assign_patterns(task) is None


def test_node_limit_without_an_answer_is_not_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """CBC stopped by the node limit before its first answer is asked again without the limit."""
    task, real = feasible_task(), ilp.call_solver

    def stop_early(problem: pulp.LpProblem, gap_ms: float, max_nodes: int | None) -> None:
        if max_nodes is None:
            real(problem, gap_ms, None)
        else:
            problem.status, problem.sol_status = pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound

    monkeypatch.setattr(ilp, "call_solver", stop_early)
    assert assign_patterns(task).cost_ns == enumerate_assignment(task)


def test_risk_and_pattern_limit_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    task = feasible_task()
    found = assign_patterns(task)
    monkeypatch.setattr(ilp, "call_solver", lying_solver(values_of(list(found.pattern_of))))
    with pytest.raises(SolverError, match="risk"):
        assign_patterns(AssignmentProblem(**{**vars(task), "risk": found.rho2 / 2}))
    if len(set(found.pattern_of)) > 1:
        with pytest.raises(SolverError, match="patterns"):
            assign_patterns(AssignmentProblem(**{**vars(task), "max_patterns": 1}))


def test_layers_answer_is_checked() -> None:
    layers = chain_models(layers=2, codecs=("int8",), seed=0)
    step = StepModel(layers=tuple(layers), fixed_bytes=0, head_bytes=0, cap_bytes=10 * MIB, risk=1e-5, gap_ns=0)
    stored = tuple(0 if v.storable else -1 for v in layers[0].values)
    with pytest.raises(SolverError, match="exceeds the cap"):
        check_layers(step, (stored, stored))
    with pytest.raises(SolverError, match="neither kept nor recomputed"):
        check_layers(step, (tuple(-1 for _ in stored), stored))


def test_live_bytes_is_constant_between_first_and_last_read() -> None:
    model = chain_models(layers=1, codecs=("int8",), seed=0)[0]
    read = next(t for t, v in enumerate(model.values) if v.first_read is not None and v.producer >= 0)
    phase = ilp.PhaseModel(position=model.values[read].first_read, fixed_bytes=0)
    keep, drop = [0] * len(model.values), [0] * len(model.values)
    drop[read] = -1
    assert live_bytes(model, keep, phase) == live_bytes(model, drop, phase)


def test_missing_cbc_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for broken in (False, True):
        path = tmp_path / "cbc"
        path.write_text("not a program")
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if broken else 0))
        monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(path if broken else tmp_path / "none"))
        with pytest.raises(SolverError, match="reinstall"):
            assign_patterns(random_task(0))


def test_solver_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    assign_patterns(random_task(0))
    assert capfd.readouterr().out == ""
