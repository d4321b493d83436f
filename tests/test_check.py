"""hilore check: each fault in committed files fails the check that is about it and no other; the committed references hold."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from conftest import build_tiny
from plans_for_tests import frozen_of, small_profile, solved
from profiles_for_tests import MIB, make_profile
from steps_for_tests import capture, hand_made_plan
from test_cli import here, record_batch, save_tiny  # noqa: F401

from hilore_cli import check, ilp
from hilore_cli.batches import load_micro_batch, synthetic_micro_batch
from hilore_cli.bench import apply_plan
from hilore_cli.capture import model_identity
from hilore_cli.check import check_files, evaluate_plan, find_plans
from hilore_cli.check_model import (
    build_on_meta,
    config_here,
    fingerprint_check,
    measured_peak_check,
    measured_risk_check,
    run_checks,
)
from hilore_cli.check_records import Check, CheckReport, FileChecks, Limits
from hilore_cli.errors import CheckError, PlanMismatchError, UsageError
from hilore_cli.files import load_frozen_plan, load_plan_file, load_report, save_json, save_profile
from hilore_cli.identities import batch_identity
from hilore_cli.models import load_config, load_model
from hilore_cli.provenance import Lora
from hilore_cli.schema import Estimate, Measurement, Pattern, Plan, freeze
from hilore_cli.views.check import junit_xml, summary_words

ROOT = Path(__file__).parent.parent
PLAN_CHECKS = ("file", "profile", "budgets", "peak", "step", "risk", "solve")


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Path:
    """A folder with profiles/synthetic, plans/p.plan.json and plans/p.json; tests work on copies."""
    folder = tmp_path_factory.mktemp("committed")
    profile = small_profile()
    save_profile(profile, folder / "profiles" / profile.name)
    plan = solved(profile)
    assert any(action.startswith("compress") for pattern in plan.patterns.values() for action in pattern.actions.values())
    save_json(plan, folder / "plans" / "p.plan.json")
    save_json(frozen_of(plan), folder / "plans" / "p.json")
    return folder


@pytest.fixture
def copy(committed, tmp_path) -> Path:
    return shutil.copytree(committed, tmp_path / "copy")


def checked(folder: Path, limits: Limits | None = None) -> CheckReport:
    return check_files(find_plans([folder / "plans"]), profiles=folder / "profiles", limits=limits or Limits())


def statuses(file: FileChecks) -> dict[str, str]:
    return {row.name: row.status for row in file.checks}


def edit(folder: Path, change: Callable[[Plan], Plan]) -> None:
    path = folder / "plans" / "p.plan.json"
    save_json(change(load_plan_file(path)), path)


def detail(report: CheckReport, name: str) -> str:
    return next(row.detail for file in report.files for row in file.checks if row.name == name)


# ------------------------------------------------------------------------------------------------------- plan and profile


def test_what_was_just_made_holds(copy) -> None:
    report = checked(copy)
    frozen, plan = report.files
    assert statuses(plan) == dict.fromkeys(PLAN_CHECKS, "passed")
    assert statuses(frozen) == {"file": "passed", "digest": "passed", "plan": "passed"}
    assert (report.passed, report.failed, report.skipped) == (10, 0, 0)
    assert "as committed" in detail(report, "peak")
    assert "byte for byte" in detail(report, "solve")


@pytest.mark.parametrize("variants", [True, False], ids=["variants", "one variant"])
def test_a_whole_update_holds(tmp_path, variants: bool) -> None:
    """Variants by size and exposure: every one is evaluated at its own size, and the update's figures are found again."""
    profile = small_profile(micro_batches=[(1024, 0.2, 0.5), (1024, 3.0, 1.5), (600, 0.1, 0.2), (600, 1.0, 0.9), (300, 2.0, 1.2), (300, 0.3, 0.4)])
    plan = solved(profile, variants=variants)
    assert (len(plan.variants) > 1) == variants
    found = evaluate_plan(plan, profile)
    for now, then in [*zip(found.variants, plan.variants, strict=True), (found.base, plan.predicted)]:
        assert now.peak_bytes == then.peak_bytes
        assert (now.step_us, now.rel_error) == pytest.approx((then.step_us, then.rel_error), rel=1e-12)
    assert (found.update_step_us, found.update_rel_error) == pytest.approx((plan.update.step_us, plan.update.rel_error), rel=1e-12)
    save_profile(profile, tmp_path / "profiles" / profile.name)
    save_json(plan, tmp_path / "plans" / "p.plan.json")
    assert statuses(checked(tmp_path).files[0]) == dict.fromkeys(PLAN_CHECKS, "passed")


def test_evaluation_asks_no_solver(monkeypatch) -> None:
    profile = small_profile()
    plan = solved(profile)

    def refuse(*_: object) -> None:
        raise AssertionError("the solver was called")

    monkeypatch.setattr(ilp, "call_solver", refuse)
    assert evaluate_plan(plan, profile).base == plan.predicted


def recompute_all(plan: Plan) -> Plan:
    """Feasible, exact and slow: what a plan is before anything is planned."""
    return plan.model_copy(update={"patterns": {name: Pattern() for name in plan.patterns}})


def lower_cap(plan: Plan) -> Plan:
    return plan.model_copy(update={"budgets": plan.budgets.model_copy(update={"cap_bytes": plan.predicted.peak_bytes - 1})})


def lower_risk(plan: Plan) -> Plan:
    return plan.model_copy(update={"variants": [plan.variants[0].model_copy(update={"risk": plan.predicted.rel_error * 0.99})]})


def brag(**figures: float) -> Callable[[Plan], Plan]:
    """Committed figures that are this much of what the patterns give."""

    def change(plan: Plan) -> Plan:
        better = {key: type(getattr(plan.predicted, key))(getattr(plan.predicted, key) * share) for key, share in figures.items()}
        return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=better)})

    return change


def unknown_codec(plan: Plan) -> Plan:
    return plan.model_copy(update={"budgets": plan.budgets.model_copy(update={"codecs": []})})


def unreadable_cap(plan: Plan) -> Plan:
    return plan.model_copy(update={"budgets": plan.budgets.model_copy(update={"mem_cap": "lots"})})


@pytest.mark.parametrize(
    ("change", "fails", "words"),
    [
        (unreadable_cap, {"budgets", "solve"}, "memory cap 'lots' is not understood"),
        (recompute_all, {"step", "solve"}, "plan again with `hilore plan`"),
        (lower_cap, {"budgets", "solve"}, "1 over the cap"),
        (lower_risk, {"budgets", "solve"}, "gradient error"),
        (brag(peak_bytes=0.98), {"peak", "solve"}, "1 % allowed"),
        (brag(step_us=0.98), {"step", "solve"}, "1 % allowed"),
        (brag(rel_error=0.85), {"risk", "solve"}, "10 % allowed"),
        (brag(peak_bytes=0.995, step_us=0.995, rel_error=0.95), {"solve"}, "predicted.peak_bytes"),
        (unknown_codec, {"budgets", "solve"}, "compresses by int8, which its budgets do not name"),
    ],
)
def test_an_edited_plan_fails_by_what_was_edited(copy, change, fails: set[str], words: str) -> None:
    edit(copy, change)
    frozen, plan = checked(copy).files
    assert {name for name, status in statuses(plan).items() if status == "failed"} == fails
    assert words in "; ".join(row.detail for row in plan.checks if row.status == "failed")
    assert statuses(frozen)["plan"] == "failed"


def test_limits_decide_what_may_grow(copy) -> None:
    edit(copy, brag(peak_bytes=0.98, step_us=0.98, rel_error=0.85))
    generous = statuses(checked(copy, Limits(peak_growth=0.05, step_growth=0.05, risk_growth=0.3)).files[1])
    strict = statuses(checked(copy, Limits(peak_growth=0.001, step_growth=0.001, risk_growth=0.001)).files[1])
    assert [generous[name] for name in ("peak", "step", "risk")] == ["passed"] * 3
    assert [strict[name] for name in ("peak", "step", "risk")] == ["failed"] * 3


def test_a_profile_that_changed_is_told_and_the_plan_judged_on_it(copy) -> None:
    profile = small_profile()
    slower = [row.model_copy(update={"compress_us": row.compress_us * 30}) for row in profile.units]
    save_profile(profile.model_copy(update={"units": slower}), copy / "profiles" / profile.name)
    plan = checked(copy).files[1]
    assert statuses(plan) == dict.fromkeys(PLAN_CHECKS, "passed") | {"profile": "failed", "step": "failed", "solve": "skipped"}
    assert "has changed" in plan.checks[1].detail


def test_a_profile_that_is_missing_or_damaged_is_told(copy) -> None:
    (table,) = (copy / "profiles" / "synthetic").glob("units.*")
    table.write_bytes(table.read_bytes()[:100])
    assert "not a readable Parquet table" in checked(copy).files[1].checks[1].detail
    shutil.rmtree(copy / "profiles")
    plan = checked(copy).files[1]
    assert statuses(plan) == dict.fromkeys(PLAN_CHECKS, "skipped") | {"file": "passed", "profile": "failed"}
    assert "no such file" in plan.checks[1].detail


# ---------------------------------------------------------------------------------------------------------------- solver


def test_another_build_of_the_solver_is_held_to_bound_and_gap(copy, monkeypatch) -> None:
    """Where the build differs another plan of the same worth passes; a wrong bound, and a slower plan, do not."""
    path = copy / "plans" / "p.plan.json"
    plan = load_plan_file(path)
    another = plan.model_copy(update={"patterns": dict(reversed(list(plan.patterns.items()))), "solver": plan.solver.model_copy(update={"solver": "CBC of another build"})})

    def result(change: dict[str, object], **of_solver: float) -> Check:
        edited = another.model_copy(update={"solver": another.solver.model_copy(update=of_solver), **change})
        return check.solve_check(edited, small_profile())

    fine = result({})
    assert (fine.status, "the same bound" in fine.detail, "CBC of another build" in fine.detail) == ("passed", True, True)
    assert result({}, bound_us=plan.solver.bound_us * (1 + 1e-5) + 2).status == "failed"
    assert result({}, bound_us=plan.solver.bound_us * (1 + 1e-8)).status == "passed"
    faster = {"predicted": plan.predicted.model_copy(update={"step_us": plan.predicted.step_us * 0.998})}
    assert result(faster).status == "failed"
    slower = {"predicted": plan.predicted.model_copy(update={"step_us": plan.predicted.step_us * 1.5})}
    assert result(slower).status == "passed", "a better plan than the committed one is no fault"

    def missing(*_: object) -> None:
        raise ilp.SolverError("CBC is missing")

    monkeypatch.setattr(ilp, "call_solver", missing)
    assert result({}) == Check(name="solve", status="failed", detail="CBC is missing")


def test_the_recorded_build_names_the_platform(committed) -> None:
    """Binaries for other platforms may find other plans."""
    recorded = load_plan_file(committed / "plans" / "p.plan.json").solver.solver
    assert recorded == ilp.solver_version()
    assert sys.platform in recorded


# ---------------------------------------------------------------------------------------------------------------- files


def test_frozen_plans_are_compared_with_their_plan(copy) -> None:
    frozen_path, plan_path = copy / "plans" / "p.json", copy / "plans" / "p.plan.json"
    plan_path.rename(copy / "elsewhere")
    (only,) = checked(copy).files
    assert statuses(only) == {"file": "passed", "digest": "passed", "plan": "skipped"}
    (copy / "elsewhere").rename(copy / "plans" / "renamed.plan.json")
    assert statuses(checked(copy).files[0])["plan"] == "passed", "found by its digest"
    frozen_path.write_text(frozen_path.read_text().replace('"chunked"', '"full"').replace('"head": "full"', '"head": "one-pass"'))
    damaged = checked(copy).files[0]
    assert (damaged.kind, statuses(damaged)) == ("unreadable", {"file": "failed"})
    assert "does not match the content" in damaged.checks[0].detail


def test_what_is_no_plan_is_left_out_and_what_cannot_be_read_is_not(copy) -> None:
    plans = copy / "plans"
    (plans / "bench.json").write_text('{"format": "hilore-bench"}')
    (plans / "cut.json").write_text('{"format": "hilore-pl')
    (plans / "old.plan.json").write_text('{"format": "hilore-plan", "version": 1}')
    (plans / "notes.txt").write_text("plans")
    found = find_plans([plans, plans / "p.json"])
    assert [path.name for path in found] == ["cut.json", "old.plan.json", "p.json", "p.plan.json"]
    report = checked(copy)
    assert [file.kind for file in report.files] == ["unreadable", "unreadable", "frozen plan", "plan"]
    assert report.failed == 2
    assert summary_words(report) == f"2 of 12 checks failed: {plans / 'cut.json'}: file; {plans / 'old.plan.json'}: file"
    with pytest.raises(UsageError, match="no such file or folder"):
        find_plans([copy / "gone"])
    with pytest.raises(PlanMismatchError, match="no plans to check"):
        find_plans([copy / "profiles"])


def test_junit_holds_every_check() -> None:
    rows = [Check(name="file", status="passed", detail="fine"), Check(name="solve", status="failed", detail='a < b & "c"\x00\x1b[1m'), Check(name="model", status="skipped", detail="not here")]
    report = CheckReport(date="2026-01-01", hilore="0", solver="CBC", limits=Limits(), passed=1, failed=1, skipped=1, files=[FileChecks(path="plans/p.json", kind="plan", profile=None, estimated=False, checks=rows)])
    root = ElementTree.fromstring(junit_xml(report))
    (suite,) = root
    assert root.attrib["failures"] == suite.attrib["failures"] == "1"
    assert (suite.attrib["tests"], suite.attrib["skipped"], suite.attrib["name"]) == ("3", "1", "plans/p.json")
    assert [(case.attrib["name"], case[0].tag) for case in suite] == [("file", "system-out"), ("solve", "failure"), ("model", "skipped")]
    assert suite[1][0].attrib["message"] == 'a < b & "c"??[1m'
    estimated = report.model_copy(update={"files": [report.files[0].model_copy(update={"estimated": True})]})
    (suite,) = ElementTree.fromstring(junit_xml(estimated))
    assert suite[0].tag == "properties"
    assert suite[0][0].attrib == {"name": "estimated", "value": "true"}


# ---------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}), ("gemma3_text", {}), ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4})])
def test_a_fingerprint_without_weights_is_that_of_the_loaded_model(tmp_path, family: str, overrides: dict[str, object]) -> None:
    build_tiny(family, **overrides).save_pretrained(tmp_path)
    for dtype, lora in (("float32", None), ("bfloat16", None), *([("float32", Lora(rank=4)), ("float32", Lora(rank=2, alpha=2.0, dropout=0.1, targets=("q_proj",)))] if family == "qwen3" else [])):
        identity = model_identity(load_model(tmp_path, dtype=dtype, lora=lora), source="tiny")
        built = build_on_meta(config_here(str(tmp_path)), identity)
        assert model_identity(built, source="tiny") == identity
        assert all(parameter.is_meta for parameter in built.parameters())


def test_a_model_that_changed_fails_and_one_that_is_not_here_is_skipped(tmp_path, monkeypatch) -> None:
    model = build_tiny("llama")
    model.save_pretrained(tmp_path / "model")
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=4, completion_tokens=4, group_size=4, seed=0)
    plan = hand_made_plan(model, batch, {"A": Pattern()}, ["A", "A"])

    def of(source: str | Path) -> Check:
        return fingerprint_check(plan, source=str(source))

    assert of(tmp_path / "model").status == "passed"
    build_tiny("llama", intermediate_size=64).save_pretrained(tmp_path / "model")
    assert (of(tmp_path / "model").status, "number of parameters" in of(tmp_path / "model").detail) == ("failed", True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    assert (of(tmp_path / "model").status, "cannot be read" in of(tmp_path / "model").detail) == ("failed", True)
    monkeypatch.setenv("HILORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for source, reason in (("smollm2-135m", "not unpacked here"), ("nobody/nothing", "not in the hub's cache"), (tmp_path / "gone", "no such folder")):
        assert (of(source).status, reason in of(source).detail) == ("skipped", True), source


def test_an_estimated_plan_is_held_to_the_configuration_that_comes_with_hilore(tmp_path, monkeypatch) -> None:
    """llama-8b without network and weights; a measured plan of it, whose configuration came from the hub, is skipped."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=4, completion_tokens=4, group_size=4, seed=0)
    plan = hand_made_plan(build_tiny("llama"), batch, {"A": Pattern()}, ["A", "A"])
    settings = {"source": "llama-8b", "dtype": "bfloat16", "attn_implementation": "sdpa", "lora_rank": None}
    identity = model_identity(build_on_meta(load_config("llama-8b"), plan.model.model_copy(update=settings)), source="llama-8b")
    assert (identity.layers, identity.parameters) == (32, 8_030_261_248)
    estimate = Estimate(device="h100", time_error=None, relative="small", relative_digest="0" * 16)

    def of(**change: object) -> str:
        return fingerprint_check(plan.model_copy(update={"model": identity, "estimate": estimate} | change)).status

    assert of() == "passed"
    assert of(estimate=None) == "skipped"
    assert of(model=identity.model_copy(update={"parameters": 8_030_261_249})) == "failed"


@pytest.mark.realmodel
def test_the_shipped_model_has_the_fingerprint_of_its_plan(real_model_dir) -> None:
    plan = load_plan_file(ROOT / "plans" / "smollm2-135m-math.plan.json")
    assert fingerprint_check(plan).status == "passed"


def test_a_dry_run_is_held_to_the_committed_one() -> None:
    torch.set_num_threads(1)
    model = build_tiny("llama")
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=0)
    plan = hand_made_plan(model, batch, {"A": Pattern(actions={"mlp.gate_proj.mm": "compress:int8"})}, ["A", "A"])

    def silent(*_: object) -> None:
        pass

    frozen = apply_plan(model, plan, [batch], emit_anyway=True, progress=silent)
    again = run_checks(model, frozen, [batch], heldout=[], limits=Limits(), progress=silent)
    assert [(row.name, row.status, row.detail.endswith("as committed")) for row in again] == [("measured peak", "passed", True), ("measured risk", "passed", True)]
    (refused,) = run_checks(build_tiny("llama", num_hidden_layers=3), frozen, [batch], heldout=[], limits=Limits(), progress=silent)
    assert (refused.status, "decoder layers" in refused.detail) == ("failed", True)


@pytest.mark.parametrize(
    ("peak_bytes", "rel_error", "digest", "frozen", "expected"),
    [
        (1000, 0.010, "b", True, ("passed", "passed")),
        (1010, 0.011, "b", True, ("passed", "passed")),
        (1011, 0.010, "b", True, ("failed", "passed")),
        (900, 0.0111, "b", True, ("passed", "failed")),
        (1101, 0.010, "b", True, ("failed", "passed")),
        (1000, 0.5, "other", True, ("passed", "skipped")),
        (1020, 0.015, "b", False, ("passed", "passed")),
        (1031, 0.0151, "b", False, ("failed", "failed")),
    ],
)
def test_measured_figures_against_committed_ones(committed, peak_bytes: int, rel_error: float, digest: str, frozen: bool, expected: tuple[str, str]) -> None:
    """Frozen: 1000 bytes and 0.01 were measured, 1 and 10 % may be added. Solved: 1020 bytes are predicted, and the risk is 0.015."""
    plan = load_plan_file(committed / "plans" / "p.plan.json")
    budgets = plan.budgets.model_copy(update={"cap_bytes": 1100, "risk": 0.015})
    plan = plan.model_copy(update={"budgets": budgets, "predicted": plan.predicted.model_copy(update={"peak_bytes": 1020})})
    then = Measurement(peak_bytes=1000, gc_peak_bytes=1, rel_error=0.01, batch_digest="b", date="2026-01-01")
    record = frozen_of(plan).model_copy(update={"measured": then}) if frozen else plan
    now = then.model_copy(update={"peak_bytes": peak_bytes, "rel_error": rel_error, "batch_digest": digest})
    assert (measured_peak_check(now, record, Limits()).status, measured_risk_check(now, record, Limits()).status) == expected


# --------------------------------------------------------------------------------------------------------- command line


def hilore(*arguments: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """In a process of its own. The references take two CPU minutes to solve again, which a crowded machine makes five of."""
    finished = subprocess.run([sys.executable, "-m", "hilore_cli", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=1200)
    assert finished.returncode == code, finished.stderr + finished.stdout
    return finished


@pytest.fixture(scope="module")
def run_dry(tmp_path_factory) -> Path:
    """A folder with ./tiny, two micro-batches, a profile (its graph is the model's; times, risks and the account are invented), a plan,
    and the plan frozen by a dry run that was judged on the second micro-batch; tests work on copies.
    """
    folder = tmp_path_factory.mktemp("run-dry")
    save_tiny(folder / "tiny")
    model = load_model(folder / "tiny")
    for seed, name in enumerate(("batch.parquet", "heldout.parquet")):
        record_batch(folder / name, rows=16, completion_tokens=56, seed=seed)
    batch, heldout = (load_micro_batch(folder / name) for name in ("batch.parquet", "heldout.parquet"))
    captured = capture(model, batch.input_ids, batch.attention_mask).layer_class
    nodes = [row.model_copy(update={"time_us": 0.0 if row.target == "placeholder" else 500.0}) for row in captured.nodes]
    of_model = {"model": model_identity(model, source="./tiny"), "batch": batch_identity(batch, source="batch.parquet", task="none"), "sources": ["batch.parquet"]}
    profile = make_profile(layers=2, layer_class=captured.model_copy(update={"nodes": nodes}), head_bytes=8 * MIB, static_bytes=16 * MIB).model_copy(update=of_model)
    plan = solved(profile)
    frozen = apply_plan(model, plan, [batch], heldout=[heldout], emit_anyway=False, progress=lambda *_: None)
    assert frozen.measured.rel_error > 0
    save_profile(profile, folder / "profiles" / profile.name)
    save_json(plan, folder / "plans" / "p.plan.json")
    save_json(frozen, folder / "plans" / "p.json")
    return folder


@pytest.fixture
def measure(run_dry, here, tmp_path):  # noqa: F811
    """Run `hilore check --measure` on a copy, after a change of its plans: exit code, stderr, checks by file and name."""

    def run(*arguments: str, change: Callable[[Path], None] = lambda plans: None) -> tuple[int, str, dict[str, dict[str, dict[str, str]]]]:
        folder = shutil.copytree(run_dry, tmp_path / "copy")
        change(folder / "plans")
        code, out, err = here("check", "--measure", "--device", "cpu", "--json", "-q", *arguments, folder=folder)
        return code, err, {Path(file["path"]).name: {row["name"]: row for row in file["checks"]} for file in json.loads(out)["files"]}

    return run


def test_a_dry_run_by_the_command_holds(measure) -> None:
    """The solved plan leaves it to the frozen one beside it."""
    code, err, files = measure("--heldout", "heldout.parquet")
    assert code == 0, err
    assert {name: row["status"] for name, row in files["p.json"].items()} == dict.fromkeys(("file", "digest", "plan", "model", "measured peak", "measured risk"), "passed")
    assert all(files["p.json"][name]["detail"].endswith("as committed") for name in ("measured peak", "measured risk"))
    left = files["p.plan.json"]["measured peak"]
    assert (left["status"], left["detail"]) == ("skipped", "p.json, made from it, is measured")


def brag_measured(plans: Path) -> None:
    """Commit less than was measured, by more than may be added to it, under a digest that covers it."""
    frozen = load_frozen_plan(plans / "p.json")
    better = {"peak_bytes": int(0.98 * frozen.measured.peak_bytes), "rel_error": 0.85 * frozen.measured.rel_error}
    save_json(freeze(frozen.model_copy(update={"measured": frozen.measured.model_copy(update=better)})), plans / "p.json")


def test_a_dry_run_by_the_command_fails_where_less_was_committed(measure) -> None:
    code, err, files = measure("plans/p.json", "--heldout", "heldout.parquet", change=brag_measured)
    assert code == CheckError.exit_code
    assert "2 of 6 checks failed: plans/p.json: measured peak; plans/p.json: measured risk\n" in err
    assert "1 % allowed" in files["p.json"]["measured peak"]["detail"]
    assert "10 % allowed" in files["p.json"]["measured risk"]["detail"]


def test_a_plan_that_was_not_frozen_is_to_be_run_dry_itself(measure) -> None:
    """Micro-batches that are not there fail the check, not the command."""
    code, err, files = measure("--batch", "gone.parquet", change=lambda plans: (plans / "p.json").unlink())
    assert code == CheckError.exit_code
    assert "1 of 9 checks failed: plans/p.plan.json: measured peak\n" in err
    assert "gone.parquet" in files["p.plan.json"]["measured peak"]["detail"]


def test_the_command_writes_what_ci_reads_and_fails_by_its_code(copy) -> None:
    """A profile is missing: exit code 9, one red line, the whole report on stdout, and JUnit all the same."""
    shutil.rmtree(copy / "profiles")
    finished = hilore("check", "--json", "--junit", "out/check.xml", "-o", "check.json", "-q", folder=copy, code=CheckError.exit_code)
    document = json.loads(finished.stdout)
    assert (document["format"], document["failed"]) == ("hilore-check", 1)
    assert load_report(copy / "check.json", CheckReport, command="hilore check").model_dump(mode="json") == document
    assert ElementTree.parse(copy / "out" / "check.xml").getroot().attrib["failures"] == "1"
    assert len(finished.stderr.strip().splitlines()) == 1
    assert "plans/p.plan.json: profile" in finished.stderr
    assert {row["name"] for row in document["files"][1]["checks"]} == {*PLAN_CHECKS, "model"}, "the model is 'invented': skipped"
    assert "--measure" in hilore("check", "--batch", "x.parquet", folder=copy, code=2).stderr


def test_committed_references_hold(tmp_path) -> None:
    """All plans of this repository, against its profiles; the example of the README runs it."""
    plans = [path for path in (ROOT / "plans").glob("*.json")]
    assert plans, "plans/ holds no reference"
    (command,) = [line for line in github_actions_runs() if line.startswith("hilore check")]
    for folder in ("plans", "profiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    finished = hilore(*shlex.split(command)[1:], "--json", folder=tmp_path)
    document = json.loads(finished.stdout)
    assert {Path(file["path"]).name for file in document["files"]} == {path.name for path in plans}
    for file in document["files"]:
        found = {row["name"]: row["status"] for row in file["checks"]}
        wanted = PLAN_CHECKS if file["kind"] == "plan" else ("file", "digest", "plan")
        assert {name: found[name] for name in wanted} == dict.fromkeys(wanted, "passed"), file
    assert ElementTree.parse(tmp_path / "hilore-check.xml").getroot().attrib["failures"] == "0"
    used = {file["profile"] for file in document["files"]}
    assert {path.parent.name for path in (ROOT / "profiles").glob("*/profile.json")} <= used, "a profile without a plan is checked by nobody"


def github_actions_runs() -> list[str]:
    """The commands of the workflow in the README."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    workflow = yaml.safe_load(text)
    assert workflow[True]  # YAML 1.1 reads `on` as a truth value
    (job,) = workflow["jobs"].values()
    return [line for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_growth_is_relative_and_knows_zero() -> None:
    assert check.growth_of(11, 10) == pytest.approx(0.1)
    assert (check.growth_of(0, 0), check.growth_of(1, 0)) == (0, math.inf)
