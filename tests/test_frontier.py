"""hilore frontier: every point is a plan that keeps its budgets, and what is taken over is as good as what would be solved."""

from __future__ import annotations

import csv
import io
import itertools
import json

import pytest
from plans_for_tests import small_profile
from profiles_for_tests import MIB, chain_class, make_profile
from reading_for_tests import ESTIMATE, solved, write_files
from test_cli import here  # noqa: F401

from hilore_cli import frontier
from hilore_cli.errors import UsageError
from hilore_cli.files import save_profile
from hilore_cli.frontier import PUBLISHED, Frontier, default_caps, solve_frontier
from hilore_cli.schema import Profile
from hilore_cli.step_planner import GAP_OF_STEP

CAPS, RISKS = (0.9, 1.0, 1.05, 1.3, 1.6, 1.9), (0.0, 0.004, 0.1)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(layers=3, layer_class=chain_class(blocks=2), head_bytes=8 * MIB, static_bytes=16 * MIB)


@pytest.fixture(scope="module")
def found(profile: Profile) -> Frontier:
    return solve_frontier(profile, codecs=["int8"], caps=CAPS, risks=RISKS)


def test_every_point_keeps_its_budgets_and_equals_a_plan_of_its_own(profile: Profile, found: Frontier) -> None:
    """Also the points that were taken over from a larger budget."""
    assert [(p.cap_vs_gc, p.risk) for p in found.points] == [(c, r) for r in RISKS for c in CAPS]
    assert any(not p.solved for p in found.points)
    for point in (p for p in found.points if p.step_us is not None):
        assert point.peak_bytes <= point.cap_bytes
        assert point.rel_error <= point.risk * (1 + 1e-6)
        own = solved(profile, cap=f"{point.cap_vs_gc:g}x-gc", risk=point.risk)
        assert point.step_us == pytest.approx(own.update.step_us, rel=2 * GAP_OF_STEP)
        assert point.speedup_vs_gc == pytest.approx(found.gc_us / point.step_us)


def test_more_budget_is_never_slower(found: Frontier) -> None:
    for risk in RISKS:
        steps = [found.at(cap, risk).step_us for cap in CAPS if found.at(cap, risk).step_us is not None]
        assert all(b <= a * (1 + 2 * GAP_OF_STEP) for a, b in itertools.pairwise(steps))
    assert max(p.speedup_vs_gc for p in found.points if p.speedup_vs_gc) <= found.ceiling * (1 + 1e-9)


def test_infeasible_points_are_told_and_not_solved_twice(profile: Profile, monkeypatch) -> None:
    calls: list[tuple[float, float]] = []
    solve = frontier.solve_plan
    monkeypatch.setattr(frontier, "solve_plan", lambda profile, **rest: calls.append((rest["cap"].ratio, rest["risk"])) or solve(profile, **rest))
    found = solve_frontier(profile, codecs=["int8"], caps=(0.2, 0.3, 1.2), risks=(0.0, 0.01))
    assert [found.at(cap, risk).step_us is None for cap in (0.2, 0.3, 1.2) for risk in (0.0, 0.01)] == [True] * 4 + [False] * 2
    assert calls == [(1.2, 0.01), (0.3, 0.01), (1.2, 0.0)], "what a larger budget cannot do, a smaller cannot"
    with pytest.raises(UsageError, match=r"no plan keeps any of these caps.*above 0\.3"):
        solve_frontier(profile, codecs=[], caps=(0.2, 0.3), risks=(0.0,))


def test_progress_is_told(profile: Profile) -> None:
    told: list[tuple[str, int, int]] = []
    solve_frontier(profile, codecs=[], caps=(1.0, 1.2), risks=(0.0,), progress=lambda *what: told.append(what))
    assert told == [("solve: 1.20x-gc, risk 0", 0, 2), ("solve: 1.00x-gc, risk 0", 1, 2)]


@pytest.mark.parametrize(("none", "gc"), [(1591, 1000), (1000, 1000), (1049, 1000), (3_890_637_188, 2_445_617_492), (7, 1)])
def test_default_caps(profile: Profile, none: int, gc: int) -> None:
    """From checkpointing's peak to that of no checkpointing, which everything fits; the published setting where it lies between."""
    caps = default_caps(profile.model_copy(update={"peaks": profile.peaks.model_copy(update={"none_bytes": none, "gc_bytes": gc})}))
    assert caps[0] == 1.0
    assert caps[-1] * gc >= none
    assert len(caps) == (8 if none > gc else 1)
    assert (PUBLISHED in caps) == (none / gc > PUBLISHED)
    assert list(caps) == sorted(caps)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("frontier")
    write_files(path, layers=3)
    return path


GRID = ("--caps", "1.0,1.1x-gc", "--risks", "0,0.015")


def test_command(here, folder) -> None:  # noqa: F811
    code, out, err = here("frontier", *GRID, "--plan", "plans/roomy.json", folder=folder)
    assert code == 0, err
    assert "profile: the plan's, profiles/synthetic" in err
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    assert "published" in out
    assert any(line.startswith("1.") and "P" in line for line in out.splitlines()), "the plan's own point is in the chart"


def test_json_and_csv_agree(here, folder) -> None:  # noqa: F811
    document = json.loads(here("frontier", *GRID, "--json", "-q", "--plan", "plans/roomy.plan.json", folder=folder)[1])
    assert document["format"] == "hilore-frontier"
    assert document["plan"]["name"] == "roomy"
    code, out, err = here("frontier", *GRID, "--csv", folder=folder)
    assert code == 0
    assert "x-gc" in err, "the table goes to stderr"
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(float(r["cap_vs_gc"]), float(r["step_us"])) for r in rows] == [(p["cap_vs_gc"], p["step_us"]) for p in document["points"]]
    assert {r["estimated"] for r in rows} == {"False"}


def test_every_row_of_an_estimate_says_so(here, tmp_path) -> None:  # noqa: F811
    profile = small_profile()
    save_profile(profile.model_copy(update={"estimate": ESTIMATE}), tmp_path / "profiles" / profile.name)
    code, out, err = here("frontier", "--caps", "1.1,1.3", "--risks", "0", "--csv", folder=tmp_path)
    assert code == 0, err
    assert [row["estimated"] for row in csv.DictReader(io.StringIO(out))] == ["True"] * 2
    assert "estimated speed-up" in err
    assert "predicted" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--caps", "much"), "--caps 'much'"), (("--risks", "-1"), "--risks '-1'"), (("--risks", ""), "--risks ''"), (("--csv", "--json"), "give one of them"), (("--codecs", "mp3"), "codec 'mp3' is not in profile"), (("--plan", "plans/none.json"), "no such file")],
)
def test_bad_input_is_one_line(here, folder, arguments: tuple[str, ...], words: str) -> None:  # noqa: F811
    code, out, err = here("frontier", "profiles/synthetic", "-q", *arguments, folder=folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_plan_of_another_profile_is_refused(here, folder, tmp_path) -> None:  # noqa: F811
    write_files(tmp_path, layers=4)
    code, _, err = here("frontier", "profiles/synthetic", "--plan", str(tmp_path / "plans" / "roomy.json"), folder=folder)
    assert code == 2
    assert "was not made from profile synthetic" in err
