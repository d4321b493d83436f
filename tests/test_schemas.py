"""JSON Schemas: published as the records are, and every file of hilore, committed or just written, is valid under its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from plans_for_tests import frozen_of, small_profile, solved

from hilore_cli import cli, json_schemas
from hilore_cli.ablation_bench import run_ablations
from hilore_cli.bench_records import (
    BenchReport,
    CodecBenchReport,
    CodecBenchRow,
    CodecPace,
    MethodRow,
    Outcome,
    ProductTimes,
)
from hilore_cli.check import check_files
from hilore_cli.check_records import Limits
from hilore_cli.files import load_plan_file, save_json, save_profile
from hilore_cli.json_schemas import RECORDS, make_schema, read_schema, write_schemas
from hilore_cli.quality_records import (
    ArmRun,
    ArmSummary,
    Difference,
    ErrorPoint,
    QualityPlan,
    QualityReport,
    QualityRuns,
    RunsIdentity,
    Trend,
)
from hilore_cli.records import Strict
from hilore_cli.schema import Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.suite_records import SuiteReport, SuiteRow

ROOT = Path(__file__).parent.parent
FORMATS = {model.model_fields["format"].default: name for name, model in RECORDS.items()}


def validate(document: dict) -> None:
    """By the schema of the format that the document names."""
    schema = json.loads(read_schema(FORMATS[document["format"]]))
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, dict]:
    """One file of each kind as hilore writes it, by the name of its schema."""
    folder = tmp_path_factory.mktemp("written")
    profile = small_profile()
    save_profile(profile, folder / "profiles" / profile.name)
    plan = solved(profile)
    gauge = dict.fromkeys(MethodRow.model_fields, 1.0) | {"name": "gc", "peak_bytes": 1}
    outcome = Outcome(peak_bytes=1, step_us=1.0, rel_error=0.0, speedup_vs_gc=1.0)
    bench = BenchReport(plan="p", plan_digest="0" * 16, date="2026-01-01", machine=profile.machine, batches=[profile.batch], head="full", repeats=1, clock="cpu", methods=[MethodRow(**gauge)], speedup_vs_gc=1.0, ceiling_vs_gc=1.0, recovered=0.5, peak_vs_gc=1.0, rel_error=0.0, predicted=outcome, measured=outcome)
    pace = CodecPace(**dict.fromkeys(CodecPace.model_fields, 1.0))
    row = CodecBenchRow(codec="int8", stochastic=False, dtype="float32", nbytes=8, payload_bytes=2, clone_us=1.0, clone_gb_per_s=1.0, compress=pace, decompress=pace, break_even_width=None)
    product = ProductTimes(dtype="float32", nbytes=8, rows=1, columns=2, widths=[8], us=[1.0], fixed_us=0.5, us_per_width=0.1, largest_deviation=0.0)
    save_json(plan, folder / "p.plan.json")
    records = {"plan": plan, "frozen-plan": frozen_of(plan), "bench": bench, "codec-bench": CodecBenchReport(date="2026-01-01", machine=profile.machine, repeats=1, clock="cpu", rows=[row], products=[product])}
    records["check"] = check_files([folder / "p.plan.json"], profiles=folder / "profiles", limits=Limits())
    row = SuiteRow(**dict.fromkeys(SuiteRow.model_fields, 1.0) | {"method": "gc", "head": "full", "setting": "", "ours": False, "fits": True, "peak_bytes": 1})
    records["suite"] = SuiteReport(date="2026-01-01", machine=profile.machine, model=profile.model, batches=[profile.batch], cap_bytes=1, risk=0.0, plans={"p": "0" * 16}, repeats=1, clock="cpu", rows=[row], candidates=[], left_out={})
    records["ablation"] = run_ablations(profile, cap=parse_cap("1.3x-gc"), risk=0.01, codecs=[], progress=lambda *_: None)
    records |= quality_records(profile)
    for name, record in records.items():
        save_json(record, folder / f"{name}.json")
    documents = {name: json.loads((folder / f"{name}.json").read_text()) for name in records}
    return documents | {"profile": json.loads((folder / "profiles" / profile.name / "profile.json").read_text())}


def quality_records(profile: Profile) -> dict[str, Strict]:
    """Of one pair of one arm."""
    run = ArmRun(pair=0, arm="gc", greedy=0.5, sampled=0.5, rewards=[0.5], errors=[ErrorPoint(step=0, rel_error=0.1)], diverged_at=None, weights_digest="0" * 16, seconds=1.0)
    difference = Difference(**dict.fromkeys(Difference.model_fields, 1.0))
    arm = ArmSummary(arm="gc", greedy=0.5, sampled=0.5, greedy_difference=difference, sampled_difference=None, diverged=0, median_rel_error=0.1, largest_rel_error=None)
    plan = QualityPlan(arm="hilore", digest="0" * 16, mem_cap="1.1x-gc", risk=0.1, predicted_rel_error=0.1, measured_rel_error=0.1, stored_bytes=1, compressed_bytes=1, compressed={"input:int8": 1})
    report = QualityReport(date="2026-01-01", machine=profile.machine, model=profile.model, setting={"name": "tiny", "shows": "", "recipe": {"steps": 1, "prompts": 1, "group_size": 8, "updates": 1}}, checkpoint_digest="0" * 16, start_greedy=0.5, start_sampled=0.5, pairs=2, problems=1, margin_points=0.6, plans=[plan], arms=[arm], within_margin=True, has_power=True, control_failed=True, trend=Trend(slope=0.1, low=0.0, high=0.2), covered=None, runs=[run])
    identity = RunsIdentity(setting="tiny", setting_digest="0" * 16, hilore="0", torch="0", transformers="0", device="cpu", threads=1, checkpoint_digest="0" * 16, plan_digests={})
    return {"quality": report, "quality-runs": QualityRuns(identity=identity, runs=[run])}


@pytest.mark.parametrize("name", RECORDS)
def test_schemas_are_published_as_the_records_are(name: str) -> None:
    published = json.loads(read_schema(name))
    assert published == make_schema(name), "run: python -c 'from hilore_cli.json_schemas import write_schemas; write_schemas()'"
    jsonschema.Draft202012Validator.check_schema(published)
    assert published["additionalProperties"] is False


def test_publishing_writes_all_of_them(tmp_path) -> None:
    write_schemas(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {path.name: path.read_text() for path in json_schemas.SCHEMAS.iterdir()}


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_written_is_valid(written, name: str) -> None:
    validate(written[name])


def test_what_is_committed_is_valid() -> None:
    files = [*(ROOT / "plans").glob("*.json"), *(ROOT / "profiles").glob("*/profile.json")]
    assert {file.name for file in files} >= {"profile.json"}
    for file in files:
        validate(json.loads(file.read_text()))


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("damage", ["unknown key", "another version", "no format", "missing key", "wrong type"])
def test_what_reading_refuses_is_invalid(written, name: str, damage: str) -> None:
    document = dict(written[name])
    last = list(document)[-1] if name != "frozen-plan" else "name"
    changed = {
        "unknown key": document | {"surprise": 1},
        "another version": document | {"version": document["version"] + 1},
        "no format": {key: value for key, value in document.items() if key != "format"},
        "missing key": {key: value for key, value in document.items() if key != last},
        "wrong type": document | {last: 5.5},
    }[damage]
    schema = json.loads(read_schema(name))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(changed)


def test_tables_are_named_and_not_held(written) -> None:
    schema = json.loads(read_schema("profile"))
    assert not {"units", "calibration"} & schema["properties"].keys()
    with pytest.raises(jsonschema.ValidationError):
        validate(written["profile"] | {"tables": written["profile"]["tables"] | {"units": "units.parquet"}})


def test_files_of_the_version_before_are_valid_once_they_are_read(tmp_path) -> None:
    old = Path(__file__).parent / "data" / "plan_version_3.json"
    with pytest.raises(jsonschema.ValidationError):
        validate(json.loads(old.read_text()))
    save_json(load_plan_file(old), tmp_path / "new.json")
    validate(json.loads((tmp_path / "new.json").read_text()))


@pytest.mark.parametrize("name", sorted(RECORDS.keys() - {"profile"}))
def test_all_of_them_can_be_shown(written, here, tmp_path, name: str) -> None:
    """hilore show says that it prints any of hilore's files; profiles are folders, and tested in test_views.py."""
    (tmp_path / "file.json").write_text(json.dumps(written[name]))
    code, out, err = here("show", "file.json")
    assert (code, err) == (0, "")
    assert 0 < max(map(len, out.splitlines())) <= 80


def test_all_of_them_are_named() -> None:
    """By the command's help and by the README."""
    (argument,) = [parameter for parameter in cli.build_command().commands["schema"].params if parameter.name == "name"]
    assert set(re.findall(r"[a-z-]+", argument.help.split(".")[0])) - {"or"} == set(RECORDS)
    sentence = re.search(r"`hilore schema NAME` prints the JSON Schema of (.*?) files", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    assert set(re.findall(r"`(.+?)`", sentence)) == set(RECORDS)


def hilore(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hilore_cli", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_the_command_prints_them() -> None:
    assert json.loads(hilore("schema", "plan").stdout) == make_schema("plan")
    assert json.loads(hilore("schema").stdout).keys() == RECORDS.keys()
    unknown = hilore("schema", "poem")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "use one of profile, plan" in unknown.stderr
