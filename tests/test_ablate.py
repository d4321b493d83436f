"""hilore ablate: each plan lacks what it says it lacks, and none of those that keep both budgets beats the plan."""

from __future__ import annotations

import io
import json

import pytest
from plans_for_tests import small_profile
from plans_for_tests import solved as small_plan
from profiles_for_tests import MIB, chain_class, make_profile
from reading_for_tests import write_files
from rich.console import Console
from test_variants import profile_of

from hilore_cli.ablation_bench import run_ablations
from hilore_cli.ablation_records import AblationReport, AblationRow
from hilore_cli.ablations import Draft, SummingPlanner, choose_greedily, choose_whole_layers
from hilore_cli.ilp import STORE
from hilore_cli.planner import solve_plan
from hilore_cli.schema import Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.step_planner import GAP_OF_STEP, StepPlanner
from hilore_cli.timeline import combine_layers
from hilore_cli.views.ablate import ablation_view

NAMES = ["plan", "exact only", "risk ignored", "bytes summed", "greedy", "whole layers", "random"]
CAP, RISK = parse_cap("1.1x-gc"), 0.012


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Six layers of SmolLM2; the head is small, so that the peak lies in a layer's backward."""
    return make_profile(layers=6, head_bytes=4 * MIB, static_bytes=64 * MIB)


@pytest.fixture(scope="module")
def report(profile: Profile) -> AblationReport:
    return run_ablations(profile, cap=CAP, risk=RISK, codecs=["int8", "int4"], progress=silent)


def rows_of(report: AblationReport) -> dict[str, AblationRow]:
    return {row.name: row for row in report.rows}


def test_every_idea_has_a_row(report) -> None:
    assert [row.name for row in report.rows] == NAMES
    assert all(row.measured is None for row in report.rows)
    assert report.machine is None
    assert rows_of(report)["plan"].fits
    assert rows_of(report)["plan"].within_risk


def test_the_plan_is_the_one_that_hilore_plan_makes(profile, report) -> None:
    plan = solve_plan(profile, cap=CAP, risk=RISK, codecs=["int8", "int4"], name="same")
    assert rows_of(report)["plan"].predicted == plan.predicted
    assert rows_of(report)["plan"].patterns == len(plan.patterns)


def test_no_plan_that_keeps_both_budgets_is_faster(report) -> None:
    plan = rows_of(report)["plan"].predicted
    kept = [row for row in report.rows if row.fits and row.within_risk]
    assert {"plan", "exact only", "greedy", "whole layers"} <= {row.name for row in kept}
    assert min(row.predicted.step_us for row in kept) >= plan.step_us * (1 - 2 * GAP_OF_STEP)


def test_each_lacks_its_idea(profile, report) -> None:
    rows = rows_of(report)
    assert rows["exact only"].predicted.rel_error == rows["exact only"].predicted.codec_us == 0
    assert rows["plan"].predicted.compressed_bytes > 0
    assert rows["risk ignored"].predicted.rel_error > RISK
    assert rows["risk ignored"].predicted.step_us < rows["plan"].predicted.step_us
    assert rows["greedy"].predicted.step_us > rows["exact only"].predicted.step_us * 0.9
    assert rows["random"].predicted.stored_bytes <= rows["plan"].predicted.stored_bytes
    assert rows["random"].predicted.rel_error == 0
    for actions in choose_whole_layers(profile, codecs=("int8", "int4"), cap_bytes=report.cap_bytes, risk=RISK, max_patterns=8):
        assert len({action for _, action in actions if action not in ("store", "compress:mask")}) <= 1


def test_a_summed_peak_knows_no_moment(profile) -> None:
    """What it takes for the peak of recomputing everything is right; of storing everything it sees the stored bytes alone."""
    exact, summing = StepPlanner(profile, codecs=()), SummingPlanner(profile, codecs=())
    layers = range(len(profile.layers))
    recomputed = [[planner.timeline(i, ()) for i in layers] for planner in (exact, summing)]
    assert combine_layers(exact.profile, recomputed[0]).peak_bytes == combine_layers(summing.profile, recomputed[1]).peak_bytes
    stored = (("mlp.gate_proj.mm", "store"), ("mlp.up_proj.mm", "store"))
    more = sum(exact.timeline(i, stored).stored_bytes - exact.timeline(i, ()).stored_bytes for i in layers)
    believed, before = (combine_layers(summing.profile, [summing.timeline(i, actions) for i in layers]).peak_bytes for actions in (stored, ()))
    assert believed - before == more
    assert combine_layers(exact.profile, [exact.timeline(i, stored) for i in layers]).peak_bytes < believed, "what the last layer needs in backward is no more than before"


def test_greed_takes_what_saves_most_for_each_byte() -> None:
    """Of two products of equal bytes the dearer one is stored first, in as many layers as fit."""
    profile = make_profile(layers=4, layer_class=chain_class(blocks=2), head_bytes=64 * MIB, static_bytes=16 * MIB, codecs=())
    planner = StepPlanner(profile, codecs=())
    draft = Draft(planner, budget=0.0)
    rates = {unit: draft.rate(unit, STORE) for unit in ("u-0", "u-1")}
    assert rates["u-1"] > rates["u-0"] > 0
    room = combine_layers(profile, [planner.timeline(i, ()) for i in range(4)]).peak_bytes
    best = max(draft.moves(), key=lambda move: draft.rate(*move))
    layers = choose_greedily(planner, cap_bytes=room + 2 * 10 * MIB, risk=0.0)
    assert [best[0] in dict(actions) for actions in layers] == [True, True, False, False]
    assert choose_greedily(planner, cap_bytes=room, risk=0.0) == [()] * 4


def test_exposure_shows_in_the_update(report) -> None:
    update = run_ablations(profile_of(0), cap=parse_cap("1.05x-gc"), risk=0.004, codecs=["int8"], progress=silent).update
    assert list(update) == ["exposure and size", "size alone", "one variant"]
    assert update["exposure and size"].step_us < update["one variant"].step_us
    assert all(one.rel_error <= 0.004 for one in update.values())
    assert report.update == {}, "of one micro-batch"


@pytest.mark.parametrize("estimated", [False, True])
def test_every_table_says_what_its_figures_are(report, estimated: bool) -> None:
    whole = report.model_copy(update={"estimated": estimated, "update": {"one variant": small_plan(small_profile()).update}})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(ablation_view(whole))
    text, words = console.export_text(), ("predicted", "estimated")
    assert all(heading in text for heading in (f"{words[estimated]}: GC", f"{words[estimated]}  ", f"whole update, {words[estimated]}"))
    assert words[not estimated] not in text


def test_the_command(here, tmp_path, monkeypatch) -> None:
    write_files(tmp_path, layers=3)
    code, out, err = here("ablate", "profiles/synthetic", "--codecs", "int8", "-o", "ablations.json")
    assert code == 0, err
    assert all(name in out for name in NAMES)
    assert max(map(len, out.splitlines())) <= 80
    assert AblationReport.model_validate_json((tmp_path / "ablations.json").read_text()).profile == "synthetic"
    monkeypatch.setenv("HILORE_THREADS", "1")
    code, out, _ = here("ablate", "profiles/synthetic", "--codecs", "int8", "--json")
    assert json.loads(out)["format"] == "hilore-ablation"
    code, out, _ = here("show", "ablations.json")
    assert (code, "whole layers" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mem-cap", "0.5x-gc"], "no plan keeps"),
        (["--risk", "-1"], "risk -1.0: must be"),
        (["--model", "tiny"], "--model: nothing is run without --repeats"),
        (["--codecs", "int3"], "int3"),
    ],
)
def test_refusals(here, tmp_path, arguments: list[str], words: str) -> None:
    write_files(tmp_path, layers=2)
    code, out, err = here("ablate", "profiles/synthetic", *arguments)
    assert code > 0
    assert out == ""
    assert words in " ".join(err.split())
