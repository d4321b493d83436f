"""Plans against enumeration, budgets swept, infeasible budgets, determinism, speed."""

from __future__ import annotations

import itertools
import json
import time

import pulp
import pytest
from profiles_for_tests import MIB, chain_class, make_profile

from hilore_cli import ilp
from hilore_cli.commands.documents import infeasible_document
from hilore_cli.errors import InfeasibleError, ProfileError, UsageError
from hilore_cli.planner import solve_plan
from hilore_cli.program import replayed_units
from hilore_cli.schema import Pattern, Plan, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.step_planner import GAP_OF_STEP, time_scale
from hilore_cli.timeline import simulate_layer, simulate_step


def plan_of(profile: Profile, *, cap: str = "1.1x-gc", risk: float = 0.015, codecs: tuple[str, ...] = ("int8",), **rest: int) -> Plan:
    return solve_plan(profile, cap=parse_cap(cap), risk=risk, codecs=list(codecs), name="test", **rest)


def patterns_in(plan: Plan) -> list[Pattern]:
    return [plan.patterns[name] for name in plan.layers]


def check_plan(profile: Profile, plan: Plan) -> None:
    """What every plan must keep, found again from the profile alone."""
    step = simulate_step(profile, patterns_in(plan))
    assert step.peak_bytes == plan.predicted.peak_bytes <= plan.budgets.cap_bytes
    assert step.binding_moment == plan.predicted.binding_moment
    units = {(u.layer, u.unit, u.codec): u for u in profile.units}
    used = [units[i, unit, action.removeprefix("compress:")] for i, p in enumerate(patterns_in(plan)) for unit, action in p.actions.items() if action.startswith("compress:")]
    least, most = ((profile.kappa("int8") * sum(getattr(u, field) for u in used)) ** 0.5 for field in ("rho2", "replayed_rho2"))
    assert least * (1 - 1e-9) <= plan.predicted.rel_error <= most * (1 + 1e-9)
    assert plan.predicted.rel_error <= plan.budgets.risk * (1 + 1e-6)
    codec_us = sum(u.compress_us + u.decompress_us for u in used)
    assert plan.predicted.step_us == pytest.approx(profile.times.none_us + time_scale(profile) * step.recompute_us + codec_us)
    assert len(plan.patterns) <= plan.budgets.max_patterns
    assert plan.solver.bound_us <= plan.solver.objective_us + 1e-3


@pytest.mark.parametrize(("cap", "risk"), [("1.0x-gc", 0.0), ("1.1x-gc", 0.0), ("1.2x-gc", 0.004), ("1.3x-gc", 0.002), ("0.9x-gc", 0.02)])
def test_plan_equals_enumeration(cap: str, risk: float) -> None:
    """Two layers, all pairs of patterns, simulated exactly: nothing beats the plan by more than the gap."""
    profile = make_profile(layers=2, layer_class=chain_class(), head_bytes=8 * MIB, static_bytes=16 * MIB)
    plan = plan_of(profile, cap=cap, risk=risk)
    check_plan(profile, plan)
    best = min(cost for cost in enumerate_costs(profile, plan.budgets.cap_bytes, risk) if cost is not None)
    assert plan.predicted.step_us - profile.times.none_us <= best + GAP_OF_STEP * plan.predicted.step_us


def enumerate_costs(profile: Profile, cap_bytes: int, risk: float):
    names = ("input", "norm", "u-0", "u_0")
    options = [["store", "recompute", *(["compress:int8"] if risk else [])]] * 4
    patterns = [Pattern(actions={n: a for n, a in zip(names, actions, strict=True) if a != "recompute"}) for actions in itertools.product(*options)]
    units = {(u.layer, u.unit, u.codec): u for u in profile.units}
    for pair in itertools.product(patterns, repeat=2):
        used = [units[i, u, "int8"] for i, p in enumerate(pair) for u, a in p.actions.items() if a == "compress:int8"]
        replayed = [chain_replays(p, u.unit) for p, u in ((pair[u.layer], u) for u in used)]
        if profile.kappa("int8") * sum(u.replayed_rho2 if r else u.rho2 for u, r in zip(used, replayed, strict=True)) > risk**2:
            continue
        step = simulate_step(profile, pair)
        if step.peak_bytes <= cap_bytes:
            yield time_scale(profile) * step.recompute_us + sum(u.compress_us + u.decompress_us for u in used)


def chain_replays(pattern: Pattern, unit: str) -> bool:
    """In the chain x -> norm -> u-0 -> u_0 only u-0 is a matrix product: it runs again when nothing from the unit up to it is kept."""
    between = {"input": ("norm", "u-0"), "norm": ("u-0",)}.get(unit)
    return between is not None and not any(name in pattern.actions for name in between)


def test_recomputing_a_product_from_a_compressed_unit_is_charged() -> None:
    """The planner's rho2 is the replayed one exactly when a product is recomputed from the unit."""
    layer_class = chain_class()
    for actions in ({"norm": "compress:int8"}, {"norm": "compress:int8", "u-0": "store"}, {"input": "compress:int8"}, {"input": "compress:int8", "norm": "store"}, {"u-0": "compress:int8"}):
        recomputed = simulate_layer(layer_class, Pattern(actions=actions), payload_bytes=lambda unit, codec: 1).recomputed
        unit = next(name for name, action in actions.items() if action.startswith("compress"))
        assert (unit in replayed_units(layer_class, recomputed, tuple(sorted(actions.items())))) == chain_replays(Pattern(actions=actions), unit)


@pytest.mark.parametrize("risk", [0.0, 0.01])
def test_mm05_peak_and_time_over_caps(risk: float) -> None:
    """Over growing caps the simulated peak stays under each and the step gets no slower (beyond the gap)."""
    profile = make_profile(layers=6, head_bytes=40 * MIB, static_bytes=100 * MIB)
    slowest = float("inf")
    for cap in ("1.0x-gc", "1.1x-gc", "1.5x-gc", "2.2x-gc"):
        plan = plan_of(profile, cap=cap, risk=risk)
        check_plan(profile, plan)
        assert plan.predicted.step_us <= slowest * (1 + GAP_OF_STEP)
        slowest = min(slowest, plan.predicted.step_us)
    assert plan.predicted.step_us < profile.times.recompute_us


def test_generous_cap_stores_everything() -> None:
    profile = make_profile(layers=4, head_bytes=40 * MIB, static_bytes=100 * MIB)
    plan = plan_of(profile, cap="40GiB", risk=0.0)
    assert plan.predicted.recompute_us < 1e-4 * plan.predicted.step_us
    assert plan.predicted.compressed_bytes == 0


def test_risk_zero_compresses_nothing() -> None:
    profile = make_profile(layers=6)
    plan = plan_of(profile, risk=0.0)
    assert plan.predicted.rel_error == 0.0
    assert not any(action.startswith("compress") for pattern in plan.patterns.values() for action in pattern.actions.values())


def test_unmeasured_units_are_not_compressed() -> None:
    profile = make_profile(layers=4)
    measured = [u for u in profile.units if u.unit == "mlp.up_proj.mm"]
    plan = plan_of(profile.model_copy(update={"units": measured}), risk=0.5)
    compressed = {unit for pattern in plan.patterns.values() for unit, action in pattern.actions.items() if action.startswith("compress")}
    assert compressed <= {"mlp.up_proj.mm"}


def test_pinned_units_are_neither_recomputed_nor_compressed() -> None:
    profile = make_profile(layers=2, layer_class=chain_class(pinned=True), head_bytes=8 * MIB, static_bytes=16 * MIB)
    plan = plan_of(profile, risk=0.05)
    check_plan(profile, plan)
    assert all(not pattern.actions.get("norm", "store").startswith("compress") for pattern in plan.patterns.values())


def test_sv03_units_that_differ_by_a_sign() -> None:
    """'u-0' and 'u_0' are the same name to PuLP; both get their own action."""
    profile = make_profile(layers=3, layer_class=chain_class(), head_bytes=8 * MIB, static_bytes=16 * MIB)
    plan = plan_of(profile, cap="2x-gc", risk=0.0)
    check_plan(profile, plan)
    actions = {unit for pattern in plan.patterns.values() for unit in pattern.actions}
    assert {"u-0", "u_0"} <= actions


def test_two_layer_classes() -> None:
    """A pattern of one class is not given to a layer of another that lacks its units."""
    first = make_profile(layers=6, layer_class=chain_class(name="chain"), head_bytes=8 * MIB, static_bytes=64 * MIB)
    second = make_profile(layers=6, layer_class=chain_class(blocks=2, name="double"), head_bytes=8 * MIB, static_bytes=64 * MIB)
    layers = [(first if i % 2 else second).layers[i] for i in range(6)]
    units = [u for u in first.units if u.layer % 2] + [u for u in second.units if not u.layer % 2]
    profile = first.model_copy(update={"layers": layers, "classes": first.classes + second.classes, "units": units})
    plan = plan_of(profile, cap="1.5x-gc")
    check_plan(profile, plan)


def test_fallback_layers_keep_checkpointing() -> None:
    profile = make_profile(layers=4, head_bytes=40 * MIB, static_bytes=100 * MIB)
    layers = [row.model_copy(update={"fallback": "graph break"}) if row.index == 1 else row for row in profile.layers]
    plan = plan_of(profile.model_copy(update={"layers": layers}), cap="1.5x-gc")
    assert len(plan.layers) == 4
    assert plan.patterns[plan.layers[1]] == Pattern()
    everything = [row.model_copy(update={"fallback": "graph break"}) for row in profile.layers]
    plan = plan_of(profile.model_copy(update={"layers": everything}), cap="1.5x-gc")
    assert plan.patterns == {"A": Pattern()}


def test_pattern_limit() -> None:
    profile = make_profile(layers=12)
    for limit in (1, 2):
        plan = plan_of(profile, max_patterns=limit)
        check_plan(profile, plan)
        assert len(plan.patterns) <= limit


def test_infeasible_cap_says_what_would_do() -> None:
    profile = make_profile(layers=6, head_bytes=40 * MIB, static_bytes=100 * MIB)
    with pytest.raises(InfeasibleError, match=r"least feasible peak at this risk.*bound by the") as caught:
        plan_of(profile, cap="0.5x-gc")
    error = caught.value
    assert error.least_peak_bytes <= error.least_peak_at_risk_bytes
    assert error.least_risk is None
    assert error.binding_moment
    assert f"raise --mem-cap to {-(-error.least_peak_at_risk_bytes // MIB)}MiB" in str(error)
    plan = plan_of(profile, cap=f"{error.least_peak_at_risk_bytes}B")
    assert plan.predicted.peak_bytes <= error.least_peak_at_risk_bytes


def test_infeasible_risk_says_the_least_risk() -> None:
    """Under GC's own peak something must be compressed: at a tiny risk that fails, at the risk named it works."""
    profile = make_profile(layers=6, head_bytes=300 * MIB, static_bytes=100 * MIB, codecs=("int8",))
    with pytest.raises(InfeasibleError, match="least risk at this cap") as caught:
        plan_of(profile, cap="0.99x-gc", risk=1e-5)
    named = float(str(caught.value).rsplit("--risk to ", 1)[1])
    assert caught.value.least_risk <= named <= caught.value.least_risk * 1.02
    plan = plan_of(profile, cap="0.99x-gc", risk=named)
    check_plan(profile, plan)


def test_infeasible_exact() -> None:
    profile = make_profile(layers=4, head_bytes=40 * MIB, static_bytes=100 * MIB)
    with pytest.raises(InfeasibleError) as caught:
        plan_of(profile, cap="0.5x-gc", risk=0.0)
    assert caught.value.least_peak_at_risk_bytes <= profile.peaks.gc_bytes


def test_infeasible_names_what_is_heaviest_where_it_binds() -> None:
    """An exact plan of layers that are all recomputed peaks at this head: optimizer state, head and weights are known."""
    profile = make_profile(layers=2, layer_class=chain_class(), head_bytes=700 * MIB, static_bytes=2000 * MIB)
    with pytest.raises(InfeasibleError, match=r"bound by the loss head \(optimizer state 1000 MiB, loss head 700 MiB, weights 500 MiB\); raise") as caught:
        plan_of(profile, cap="0.9x-gc", risk=0.0)
    assert caught.value.heaviest == (("optimizer state", 1000 * MIB), ("loss head", 700 * MIB), ("weights", 500 * MIB))
    stored = caught.value.least_peak_at_risk_bytes - 2700 * MIB
    assert stored == 2 * simulate_layer(chain_class(), Pattern(), payload_bytes=lambda unit, codec: 0).stored_bytes
    document = infeasible_document(caught.value)
    assert document["heaviest"][0] == {"row": "optimizer state", "nbytes": 1000 * MIB}
    assert json.loads(json.dumps(document))["binding_moment"] == "loss head"


def test_bad_arguments_are_named() -> None:
    profile = make_profile(layers=2)
    with pytest.raises(UsageError, match="'int3' is not in profile synthetic; it has int8, int4"):
        plan_of(profile, codecs=("int3",))
    for risk in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="risk"):
            plan_of(profile, risk=risk)
    with pytest.raises(UsageError, match="at least one pattern"):
        plan_of(profile, max_patterns=0)
    damaged = profile.model_copy(update={"layers": [row.model_copy(update={"layer_class": "gone"}) for row in profile.layers]})
    with pytest.raises(ProfileError, match="gone"):
        plan_of(damaged)


def test_same_input_gives_identical_json() -> None:
    profile = make_profile(layers=10)
    first, second = (plan_of(profile).model_dump_json() for _ in range(2))
    assert first == second


def test_solver_that_finds_nothing_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that calls everything infeasible cannot make a plan appear."""

    def refuse(problem: pulp.LpProblem, gap_ms: float, max_nodes: int | None) -> None:
        problem.status, problem.sol_status = pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible

    monkeypatch.setattr(ilp, "call_solver", refuse)
    with pytest.raises(Exception, match="CBC"):
        plan_of(make_profile(layers=2))


@pytest.mark.parametrize("head_mib", [100, 600])
def test_thirty_layers_in_time_and_near_the_bound(head_mib: int) -> None:
    """SmolLM2-135M's layers: 15 s on two cores, and 0.1 % of the step to the relaxation's bound."""
    profile = make_profile(head_bytes=head_mib * MIB)
    started = time.monotonic()
    plan = plan_of(profile, codecs=("int8", "int4"))
    assert time.monotonic() - started < 15
    check_plan(profile, plan)
    assert plan.solver.gap_of_step <= GAP_OF_STEP
    assert plan.predicted.peak_bytes >= 0.99 * plan.budgets.cap_bytes
    assert plan.predicted.step_us < profile.times.gc_us
    assert plan.solver.reproducible
    exact = next(a for a in plan.alternatives if a.label.startswith("exact"))
    assert exact.rel_error == 0
    assert exact.step_us >= plan.predicted.step_us


def test_checkpointed_layers_count_at_the_peak() -> None:
    """A layer left to checkpoint holds the cap with its own backward, and an impossible cap is still explained."""
    profile = make_profile(layers=4, head_bytes=0, static_bytes=100 * MIB)
    layers = [row.model_copy(update={"fallback": "graph break"}) if row.index == 3 else row for row in profile.layers]
    profile = profile.model_copy(update={"layers": layers})
    plan = plan_of(profile, cap="1.05x-gc")
    check_plan(profile, plan)
    with pytest.raises(InfeasibleError, match="backward of layer"):
        plan_of(profile, cap="0.5x-gc")
