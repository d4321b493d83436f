"""hilore explain: figures against the simulation, prices against the relaxation itself, names, and what other budgets change."""

from __future__ import annotations

import json

import pytest
from profiles_for_tests import MIB, chain_class, make_profile
from reading_for_tests import solved, write_files
from test_cli import here  # noqa: F401

from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.explain import Explainer, find_target
from hilore_cli.ilp import bound_layers
from hilore_cli.schema import Pattern, Plan, Profile
from hilore_cli.step_planner import time_scale
from hilore_cli.timeline import simulate_layer, simulate_step


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(layers=6)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solved(profile, cap="1.04x-gc")


def test_figures_are_those_of_the_simulation(profile: Profile, plan: Plan) -> None:
    """Bytes, recomputation, codec time and risk of every action of every unit of a layer, found again without the planner."""
    explainer = Explainer(profile, plan)
    layer_class, pattern = profile.classes[0], plan.patterns[plan.layers[2]]
    units = {(u.unit, u.codec): u for u in profile.units if u.layer == 2}
    kappa = profile.kappa("int8")

    def simulated(unit: str, action: str):
        actions = {**pattern.actions, unit: action}
        timeline = simulate_layer(layer_class, Pattern(actions=actions), payload_bytes=lambda u, codec: units[u, codec].payload_bytes)
        codec_us = sum(units[u, "int8"].compress_us + units[u, "int8"].decompress_us for u, a in actions.items() if a == "compress:int8")
        return timeline.stored_bytes, time_scale(profile) * timeline.recompute_us, codec_us

    rows = explainer.explain(find_target(profile, "2"))
    assert {row.unit for row in rows} >= {"mlp.gate_proj.mm", "self_attn.sdpa.lse", "input"}
    compared = 0
    for row in rows:
        base = simulated(row.unit, next(iter(row.choices)))
        for action, choice in row.choices.items():
            kept, replay_us, codec_us = (a - b for a, b in zip(simulated(row.unit, action), base, strict=True))
            assert (choice.kept_bytes, choice.saved_us, choice.codec_us) == (kept, pytest.approx(-replay_us, abs=1e-6), pytest.approx(codec_us, abs=1e-6))
            compared += 1
    assert compared > 40
    gate = next(row for row in rows if row.unit == "mlp.gate_proj.mm")
    unit = units["mlp.gate_proj.mm", "int8"]
    change = gate.choices["compress:int8"].rho2 - gate.choices["store"].rho2
    assert change == pytest.approx(kappa * unit.rho2) or change == pytest.approx(kappa * unit.replayed_rho2)


def test_chosen_is_what_the_plan_says(profile: Profile, plan: Plan) -> None:
    rows = Explainer(profile, plan).explain(find_target(profile, "gate_proj"))
    assert [row.layer for row in rows] == list(range(6))
    assert [row.chosen for row in rows] == [plan.patterns[name].actions.get("mlp.gate_proj.mm", "recompute") for name in plan.layers]


@pytest.mark.parametrize("cap", ["1.0x-gc", "1.02x-gc", "1.05x-gc"])
def test_price_of_memory_is_the_slope_of_the_relaxation(profile: Profile, cap: str) -> None:
    """The relaxation's objective is convex in the cap: its fall over half a MiB lies between the prices at both ends."""
    plan = solved(profile, cap=cap, risk=0.0)
    explainer = Explainer(profile, plan)
    model = explainer.planner.step_model(cap_bytes=plan.budgets.cap_bytes, budget=0.0)
    more = explainer.planner.step_model(cap_bytes=plan.budgets.cap_bytes + MIB // 2, budget=0.0)
    price = sum(p.us_per_mib for p in explainer.moment_prices())
    fall_us = (bound_layers(model).objective_ns - bound_layers(more).objective_ns) / 1000
    assert price > 0
    assert fall_us <= price / 2 * (1 + 1e-6)
    roomier = sum(p.stored for p in bound_layers(more).prices[-1:]) * MIB / 1000 + sum(sum(p.phases) for p in bound_layers(more).prices) * MIB / 1000
    assert fall_us >= roomier / 2 * (1 - 1e-6)


def test_worth_is_what_it_says(profile: Profile, plan: Plan) -> None:
    explainer = Explainer(profile, plan)
    assert [p.moment for p in explainer.moment_prices()] == ["loss head"], "else the layers' own phases have a price, too"
    price, risk = explainer.moment_prices()[0].us_per_mib / MIB, explainer.risk_price_us
    for row in explainer.explain(find_target(profile, "4")):
        for choice in row.choices.values():
            assert choice.worth_us == pytest.approx(choice.saved_us - choice.codec_us - choice.kept_bytes * price - choice.rho2 * risk, abs=1e-3)


def test_nothing_costs_where_no_budget_binds(profile: Profile) -> None:
    explainer = Explainer(profile, solved(profile, cap="1.0x-none", risk=0.0))
    assert explainer.moment_prices() == []
    assert explainer.risk_price_us == 0
    assert all(row.best == row.chosen for row in explainer.explain(find_target(profile, "0")))


def test_budgets_that_an_action_would_break(profile: Profile, plan: Plan) -> None:
    """Held against the step's simulation with the unit changed in all layers."""
    explainer = Explainer(profile, plan)
    rows = explainer.explain(find_target(profile, "mlp.gate_proj.mm"))
    for action in ("store", "recompute"):
        patterns = [Pattern(actions={**plan.patterns[name].actions, "mlp.gate_proj.mm": action}) for name in plan.layers]
        over = simulate_step(profile, patterns).peak_bytes > plan.budgets.cap_bytes
        assert ("cap" in explainer.broken_budgets(rows, action)) == over
    assert "cap" in explainer.broken_budgets(rows, "store")


def test_what_would_change_it(profile: Profile, plan: Plan) -> None:
    explainer = Explainer(profile, plan)
    target = find_target(profile, "mlp.gate_proj.mm")
    told: list[str] = []
    nearby = explainer.resolve_nearby(target, progress=lambda what, done, total: told.append(what))
    assert len(told) == len(nearby)
    by_budget = {(round(p.cap_vs_gc, 3), p.risk): p.actions for p in nearby}
    top = max(cap for cap, _ in by_budget)
    assert by_budget[top, 0.015]["mlp.gate_proj.mm"] == {"store": 6}, "with all the memory of no checkpointing"
    exact = next(actions for (_, risk), actions in by_budget.items() if risk == 0)
    assert "compress:int8" not in exact["mlp.gate_proj.mm"]
    assert explainer.planned_actions(target)["mlp.gate_proj.mm"] != {"store": 6}


def test_budgets_that_cannot_be_kept_are_told(profile: Profile) -> None:
    explainer = Explainer(profile, solved(profile, cap="1.0x-gc", risk=0.0))
    nearby = explainer.resolve_nearby(find_target(profile, "0"))
    assert nearby[0].cap_vs_gc == pytest.approx(0.98, abs=1e-3)
    assert nearby[0].actions is None


def test_another_profile_is_refused(profile: Profile, plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match=r"predicts a peak of .* on profile synthetic give .*--profile"):
        Explainer(profile.model_copy(update={"account": profile.account.model_copy(update={"head_bytes": 700 * MIB})}), plan)
    with pytest.raises(PlanMismatchError, match="has 6 layers, profile synthetic has 5"):
        Explainer(make_profile(layers=5), plan)
    with pytest.raises(PlanMismatchError, match="units or codecs that profile synthetic does not hold"):
        Explainer(make_profile(layers=6, layer_class=chain_class()), plan)


@pytest.mark.parametrize(
    ("text", "units", "layers"),
    [("mlp.gate_proj.mm", ["mlp.gate_proj.mm"], 6), ("gate_proj", ["mlp.gate_proj.mm"], 6), ("GATE", ["mlp.gate_proj.mm"], 6), ("add", ["add"], 6), ("3", None, 1), ("layer 3", None, 1), ("model.layers.3", None, 1), ("layers.3", None, 1)],
)
def test_targets(profile: Profile, text: str, units: list[str] | None, layers: int) -> None:
    target = find_target(profile, text)
    assert len(target.layers) == layers
    assert target.is_layer == (units is None)
    assert list(target.units) == units if units else target.layers == (3,)


@pytest.mark.parametrize(
    ("text", "words"),
    [("gat_proj", "near: mlp.gate_proj.mm"), ("proj", "ambiguous: .*self_attn.q_proj.mm.* and .* more"), ("6", "layers 0 to 5"), ("qqqqqq", "units: .* and .* more; layers: 0 to 5")],
)
def test_unknown_names(profile: Profile, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        find_target(profile, text)
    assert "\n" not in str(error.value)


def test_a_layer_left_to_checkpoint_has_nothing_to_explain(profile: Profile) -> None:
    rows = [row.model_copy(update={"fallback": "a graph break"}) if row.index == 1 else row for row in profile.layers]
    left = profile.model_copy(update={"layers": rows})
    with pytest.raises(UsageError, match=r"model\.layers\.1 is left to torch's checkpoint.*a graph break"):
        find_target(left, "1")
    assert find_target(left, "add").layers == (0, 2, 3, 4, 5)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain")
    write_files(path)
    return path


@pytest.mark.parametrize(("name", "plan"), [("gate", "plans/tight.plan.json"), ("2", "plans/roomy.json")])
def test_command(here, folder, name: str, plan: str) -> None:  # noqa: F811
    """A solved and a frozen plan, in 80 columns without colour, and as JSON."""
    code, out, err = here("explain", name, plan, "--no-resolve", folder=folder)
    assert code == 0, err
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    assert all(word in out for word in ("kept", "saves", "worth", "memory:", "risk:"))
    code, out, _ = here("explain", name, plan, "--no-resolve", "--json", "-q", folder=folder)
    document = json.loads(out)
    assert document["format"] == "hilore-explanation"
    assert document["resolved"] == []
    assert len(document["units"]) == len({(row["layer"], row["unit"]) for row in document["units"]}) >= 6


def test_command_solves_again(here, folder) -> None:  # noqa: F811
    code, out, err = here("explain", "gate", "plans/tight.plan.json", folder=folder)
    assert code == 0, err
    assert "solved again at other budgets" in out
    assert "x-gc" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_newest_plan_is_the_default(here, folder) -> None:  # noqa: F811
    assert "plan: the newest, plans/" in here("explain", "gate", "--no-resolve", folder=folder)[2]


def test_bad_input_is_one_line(here, folder, tmp_path) -> None:  # noqa: F811
    alone = tmp_path / "plans"
    alone.mkdir()
    for name in ("roomy.json", "roomy.plan.json"):
        (alone / name).write_bytes((folder / "plans" / name).read_bytes())
    for arguments, code, words in (
        (("gate", "nowhere.json"), 2, "nowhere.json: no such file"),
        (("gate", "profiles/synthetic/profile.json"), 2, "is not that of a plan"),
        (("gatte", "plans/roomy.json"), 2, "near: mlp.gate_proj.mm"),
        (("gate", str(alone / "roomy.plan.json"), "--profile", "profiles/none"), 4, "profiles/none/profile.json: no such file"),
    ):
        got, out, err = here("explain", *arguments, folder=folder)
        assert (got, out, err.count("\n")) == (code, "", 1)
        assert words in err
    (alone / "roomy.plan.json").unlink()
    code, _, err = here("explain", "gate", str(alone / "roomy.json"), folder=folder)
    assert code == 6
    assert "the plan that it was frozen from" in err
