"""hilore diff: what is told to differ does, what is not told is equal."""

from __future__ import annotations

import json
import re

import pytest
from profiles_for_tests import make_profile
from reading_for_tests import ESTIMATE, frozen_of, solved, write_files
from test_cli import here  # noqa: F401

from hilore_cli.diff import action_of, diff_plans, diff_profiles, layers_of, unit_risks
from hilore_cli.files import save_profile
from hilore_cli.schema import Pattern, Plan, PlannedVariant, Profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(layers=4)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return solved(profile)


def with_patterns(plan: Plan, patterns: dict[str, Pattern], layers: list[str]) -> Plan:
    variants = [PlannedVariant(**{**v.model_dump(), "layers": layers}) for v in plan.variants]
    return plan.model_copy(update={"patterns": patterns, "layers": layers, "variants": variants})


def test_equal_plans(plan: Plan) -> None:
    assert diff_plans(plan, plan).is_empty
    assert diff_plans(plan, plan.model_copy(update={"name": "other"})).is_empty
    assert diff_plans(plan, frozen_of(plan)).is_empty, "a frozen plan says the same, and has no profile"


def test_actions_are_grouped_by_layers_and_by_change(plan: Plan) -> None:
    a = with_patterns(plan, {"A": Pattern(actions={"mlp.up_proj.mm": "store", "mlp.gate_proj.mm": "store"}), "B": Pattern()}, ["A", "A", "B", "A"])
    b = with_patterns(plan, {"A": Pattern(actions={"mlp.up_proj.mm": "compress:int8", "mlp.gate_proj.mm": "compress:int8", "input": "compress:int8"}), "B": Pattern(default="store")}, ["A", "A", "B", "A"])
    found = diff_plans(a, b)
    assert [(d.layers, d.units, d.a, d.b) for d in found.actions] == [
        ((0, 1, 3), ("input", "mlp.gate_proj.mm", "mlp.up_proj.mm"), "store", "compress:int8"),  # the input is stored unless it is named
        ((2,), ("(the rest)",), "recompute", "store"),
    ]
    assert not found.is_empty


def test_every_differing_action_is_told_once(profile: Profile, plan: Plan) -> None:
    """The groups, taken apart again, are the differences of the two plans and nothing else."""
    other = solved(profile, cap="1.0x-gc")
    told = [(layer, unit) for d in diff_plans(plan, other).actions for layer in d.layers for unit in d.units]
    units = {u for p in (*plan.patterns.values(), *other.patterns.values()) for u in p.actions}
    differing = {(i, u) for i in range(4) for u in units if action_of(plan.patterns[plan.layers[i]], u) != action_of(other.patterns[other.layers[i]], u)}
    assert len(told) == len(set(told))
    assert set(told) == differing != set()


def test_figures_and_budgets(profile: Profile, plan: Plan) -> None:
    other = solved(profile, cap="1.02x-gc", risk=0.01)
    found = diff_plans(plan, other)
    assert {s.name: (s.a, s.b) for s in found.settings}["memory cap"] == ("1.1x-gc", "1.02x-gc")
    assert {s.name: (s.a, s.b) for s in found.settings}["risk"] == ("0.015", "0.01")
    figures = {f.name: f for f in found.figures}
    assert (figures["step"].a, figures["step"].b) == (plan.predicted.step_us, other.predicted.step_us)
    assert (figures["peak"].a, figures["peak"].b) == (plan.predicted.peak_bytes, other.predicted.peak_bytes)


def test_plans_of_other_depth(plan: Plan) -> None:
    found = diff_plans(plan, solved(make_profile(layers=5)))
    assert found.actions is None
    assert "model" in {s.name for s in found.settings}


def test_variants_are_told() -> None:
    """The update's plan with several variants against one for all."""
    profile = make_profile(layers=4, micro_batches=[(512, 0.2, 0.4), (512, 0.1, 0.3), (700, 0.5, 0.7), (900, 0.9, 0.9), (1024, 2.0, 1.4)])
    several = solved(profile, cap="1.02x-gc")
    one = several.model_copy(update={"variants": [max(several.variants, key=lambda v: (v.max_tokens, v.max_exposure is None))]})
    assert len(several.variants) > 1
    told = {v.name: (v.a, v.b) for v in diff_plans(several, one).variants}
    assert told == {v.label: ("there", "none") for v in several.variants if v != one.variants[0]}
    assert layers_of(frozen_of(several)) == several.layers


def test_profiles(profile: Profile) -> None:
    assert diff_profiles(profile, profile).is_empty
    riskier = profile.model_copy(update={"units": [u.model_copy(update={"rho2": 4 * u.rho2, "replayed_rho2": 4 * u.replayed_rho2}) if u.unit == "add" and u.codec == "int8" else u for u in profile.units], "times": profile.times.model_copy(update={"gc_us": 1.5 * profile.times.gc_us})})
    found = diff_profiles(profile, riskier)
    assert [(r.unit, r.codec) for r in found.risks] == [("add", "int8")]
    assert found.risks[0].b / found.risks[0].a == pytest.approx(2.0)
    assert {f.name for f in found.figures if f.a != f.b} == {"checkpointing (GC)", "GC over none"}
    fewer = profile.model_copy(update={"units": [u for u in profile.units if u.unit != "add"]})
    assert [(r.unit, r.b) for r in diff_profiles(profile, fewer).risks] == [("add", None)] * 2


def test_unit_risks_are_those_of_the_planner(profile: Profile) -> None:
    """One unit compressed alone, on all layers: sum of kappa x rho^2."""
    expected = sum(profile.kappa("int8") * u.rho2 for u in profile.units if (u.unit, u.codec) == ("mlp.gate_proj.mm", "int8"))
    assert unit_risks(profile)["mlp.gate_proj.mm", "int8"] ** 2 == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("diff")
    write_files(path, layers=4)
    return path


def test_command(here, folder) -> None:  # noqa: F811
    code, out, err = here("diff", "plans/roomy.plan.json", "plans/tight.plan.json", folder=folder)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    assert all(word in out for word in ("memory cap", "1.02x-gc", "peak", "actions that differ"))
    document = json.loads(here("diff", "plans/roomy.plan.json", "plans/tight.plan.json", "--json", folder=folder)[1])
    assert (document["format"], document["equal"]) == ("hilore-diff", False)
    assert document["actions"]


@pytest.fixture(scope="module")
def estimated(tmp_path_factory):
    """The same files of an estimated profile, and another estimated profile."""
    path = tmp_path_factory.mktemp("estimated")
    write_files(path, layers=4, estimated=True)
    other = make_profile(layers=4, seed=1, store_us=1e6).model_copy(update={"estimate": ESTIMATE})
    save_profile(other, path / "profiles" / "other")
    return path


@pytest.mark.parametrize(
    ("a", "b", "tables", "sides"),
    [
        ("plans/roomy.plan.json", "plans/tight.plan.json", ["figure"], ("estimated", "estimated")),
        ("plans/roomy.json", "measured plans/tight.plan.json", ["figure"], ("estimated", "predicted")),
        ("measured plans/roomy.plan.json", "measured plans/tight.plan.json", ["predicted"], None),
        ("profiles/synthetic", "profiles/other", ["figure", "unit, in all layers"], ("estimated", "estimated")),
        ("measured profiles/synthetic", "profiles/other", ["figure", "unit, in all layers"], ("measured", "estimated")),
    ],
)
def test_estimates_are_marked(here, folder, estimated, a: str, b: str, tables: list[str], sides: tuple[str, str] | None) -> None:  # noqa: F811
    """Every table of figures says of each side what its figures are; so does the JSON."""
    paths = [str((folder if path.startswith("measured ") else estimated) / path.removeprefix("measured ")) for path in (a, b)]
    out = here("diff", *paths, folder=estimated)[1]
    heads = [line for line in out.splitlines() if line.startswith(tuple(tables)) and "A" in line and "B" in line]
    assert len(heads) == len(tables), out
    wanted = re.compile("A +B" if sides is None else f"A, {sides[0]} +B, {sides[1]}")
    assert all(wanted.search(head) for head in heads), out
    assert max(len(line) for line in out.splitlines() if "plans/" not in line and "profiles/" not in line) <= 80
    document = json.loads(here("diff", *paths, "--json", folder=estimated)[1])
    assert document["estimated"] == [word == "estimated" for word in sides or ("predicted", "predicted")]


@pytest.mark.parametrize(("a", "b", "words"), [("plans/roomy.json", "plans/roomy.json", "are equal\n"), ("plans/roomy.plan.json", "plans/roomy.json", "one is frozen"), ("profiles/synthetic", "profiles/synthetic/profile.json", "are equal\n")])
def test_equal_files_say_so(here, folder, a: str, b: str, words: str) -> None:  # noqa: F811
    code, out, _ = here("diff", a, b, folder=folder)
    assert code == 0
    assert words in " ".join(out.split(" ")).replace("\nequal", " equal").replace("is\nfrozen", "is frozen")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [("plans/roomy.json", "profiles/synthetic", "give two plans or two profiles"), ("plans/none.json", "plans/roomy.json", "plans/none.json: no such file"), ("plans", "profiles/synthetic", "a folder without a profile.json"), ("bench.json", "plans/roomy.json", "is not that of a plan")],
)
def test_bad_input_is_one_line(here, folder, a: str, b: str, words: str) -> None:  # noqa: F811
    code, out, err = here("diff", a, b, folder=folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
