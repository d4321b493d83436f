"""The files: whole or refused. Round trips, digests, damaged content, and writes that fail half-way."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from profiles_for_tests import make_profile

from hilore_cli.errors import HiloreError, PlanMismatchError, ProfileError
from hilore_cli.files import (
    ADDED,
    digests_of,
    load_frozen_plan,
    load_plan_file,
    load_profile,
    save_json,
    save_profile,
    write_atomic,
)
from hilore_cli.records import digest_of, digest_of_document, digested
from hilore_cli.schema import (
    FROZEN_VERSION,
    PLAN_VERSION,
    PROFILE_VERSION,
    Budgets,
    Estimate,
    FrozenPlan,
    Pattern,
    Plan,
    PlannedVariant,
    Prediction,
    Profile,
    SolverRecord,
    UpdatePrediction,
    Variant,
    freeze,
    variant_for,
)

LAYERS = 4


@pytest.fixture(scope="module")
def profile():
    return make_profile(layers=LAYERS)


@pytest.fixture(scope="module")
def plan(profile):
    predicted = Prediction(peak_bytes=90, binding_moment="loss head", step_us=10.0, gc_us=12.0, none_us=9.0, gc_peak_bytes=80, none_peak_bytes=120, rel_error=0.01, recompute_us=1.0, codec_us=0.5, stored_bytes=30, compressed_bytes=5)
    solver = SolverRecord(solver="CBC", status="optimal", objective_us=1.5, bound_us=1.4, gap_of_step=0.01, candidates=3, resolves=0, reproducible=True)
    budgets = Budgets(mem_cap="1.1x-gc", cap_bytes=88, risk=0.015, codecs=["int8"], max_patterns=8)
    return Plan(
        name="p",
        profile=profile.name,
        profile_digest=digest_of(profile),
        model=profile.model,
        batch=profile.batch,
        sources=profile.sources,
        graph_digests=["0" * 16],
        head="chunked",
        budgets=budgets,
        patterns={"A": Pattern(actions={"mlp.up_proj.mm": "compress:int8"})},
        layers=["A"] * LAYERS,
        variants=[PlannedVariant(max_tokens=1024, layers=["A"] * LAYERS, micro_batches=1, risk=0.015, step_us=10.0, peak_bytes=90, rel_error=0.01)],
        predicted=predicted,
        update=UpdatePrediction(micro_batches=1, step_us=10.0, gc_us=12.0, none_us=9.0, rel_error=0.01),
        solver=solver,
        alternatives=[],
    )


@pytest.fixture(scope="module")
def frozen(plan):
    return freeze(
        FrozenPlan(
            name="p",
            plan_digest=digest_of(plan),
            model=plan.model,
            batch=plan.batch,
            sources=plan.sources,
            graph_digests=plan.graph_digests,
            head=plan.head,
            budgets=plan.budgets,
            patterns=plan.patterns,
            layer_fqns=[f"model.layers.{i}" for i in range(LAYERS)],
            variants=[Variant(max_tokens=1024, layers=plan.layers)],
            micro_batches=1,
            predicted=plan.predicted,
            update=plan.update,
            measured=None,
        )
    )


def test_round_trips(tmp_path, profile, plan, frozen):
    save_profile(profile, tmp_path / "profile")
    assert load_profile(tmp_path / "profile") == profile
    save_json(plan, tmp_path / "p.plan.json")
    assert load_plan_file(tmp_path / "p.plan.json") == plan
    save_json(frozen, tmp_path / "p.json")
    assert load_frozen_plan(tmp_path / "p.json") == frozen


def test_the_same_record_gives_the_same_bytes(tmp_path, profile, plan):
    for folder in ("a", "b"):
        save_profile(profile, tmp_path / folder)
        save_json(plan, tmp_path / folder / "p.plan.json")
    contents = [{path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("a", "b")]
    assert contents[0] == contents[1]


def test_pandas_reads_the_tables(tmp_path, profile):
    import pandas

    save_profile(profile, tmp_path)
    tables = json.loads((tmp_path / "profile.json").read_text())["tables"]
    assert len(pandas.read_parquet(tmp_path / tables["units"])) == len(profile.units)
    assert len(pandas.read_parquet(tmp_path / tables["nodes"])) == sum(len(c.nodes) for c in profile.classes)
    pairs = pandas.read_parquet(tmp_path / tables["calibration"])
    assert len(pairs) == len(profile.calibration)
    assert {"predicted_rel_error", "measured_rel_error"} <= set(pairs)


def test_saving_again_leaves_no_stale_table(tmp_path, profile):
    save_profile(profile, tmp_path)
    save_profile(profile.model_copy(update={"units": profile.units[1:]}), tmp_path)
    assert len(load_profile(tmp_path).units) == len(profile.units) - 1
    assert len(list(tmp_path.iterdir())) == 4


# ------------------------------------------------------------------------------------------------------- damaged content


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _edit(**changes):
    def edit(text: str) -> str:
        return json.dumps(json.loads(text) | changes)

    return edit


def _nan(key: str):
    """The first number under a key becomes NaN, as Python's json would write it."""

    def edit(text: str) -> str:
        document = json.loads(text)
        holder = document if key in document else next(v for v in document.values() if isinstance(v, dict) and key in v)
        holder[key] = float("nan")
        return json.dumps(document)

    return edit


DAMAGES = {
    "cut short": (_cut, "not a whole JSON document"),
    "empty": (lambda text: "", "not a whole JSON document"),
    "unknown key": (_edit(surprise=1), "surprise"),
    "another version": (_edit(version=99), "version 99"),
    "no version": (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "version"}), "version None"),
    "another kind": (_edit(format="hilore-poem"), "hilore-poem"),
    "wrong type": (_edit(name=5), "name"),
    "not an object": (lambda text: "[1, 2]", "a JSON object is expected"),
}
NAN_KEYS = {"profile": "none_us", "plan": "step_us", "frozen": "step_us"}
ERRORS = {"profile": ProfileError, "plan": PlanMismatchError, "frozen": PlanMismatchError}


@pytest.mark.parametrize("damage", [*DAMAGES, "NaN"])
@pytest.mark.parametrize("kind", ["profile", "plan", "frozen"])
def test_damaged_files_are_refused_by_name(tmp_path, profile, plan, frozen, kind, damage):
    path = tmp_path / ("profile.json" if kind == "profile" else "p.json")
    load = {"profile": lambda: load_profile(tmp_path), "plan": lambda: load_plan_file(path), "frozen": lambda: load_frozen_plan(path)}[kind]
    if kind == "profile":
        save_profile(profile, tmp_path)
    else:
        save_json({"plan": plan, "frozen": frozen}[kind], path)
    edit, named = (_nan(NAN_KEYS[kind]), "NaN") if damage == "NaN" else DAMAGES[damage]
    path.write_text(edit(path.read_text()))
    with pytest.raises(ERRORS[kind]) as error:
        load()
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("damage", ["missing", "cut short", "NaN", "extra column"])
def test_damaged_tables_are_refused_by_name(tmp_path, profile, damage):
    save_profile(profile, tmp_path)
    (units,) = tmp_path.glob("units.*.parquet")
    if damage == "missing":
        units.unlink()
    elif damage == "cut short":
        units.write_bytes(units.read_bytes()[:-200])
    else:
        column = {"NaN": "rho2", "extra column": "surprise"}[damage]
        rows = [row | {column: math.nan if damage == "NaN" else 1.0} for row in pyarrow.parquet.read_table(units).to_pylist()]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), units)
    with pytest.raises(ProfileError) as error:
        load_profile(tmp_path)
    message = str(error.value)
    assert ("surprise" if damage == "extra column" else units.name) in message
    assert "hilore profile" in message
    assert "\n" not in message


@pytest.mark.parametrize("change", [{"name": "q"}, {"digest": ""}, {"digest": "0" * 16}])
def test_an_edited_frozen_plan_is_refused(tmp_path, frozen, change):
    path = tmp_path / "p.json"
    save_json(frozen.model_copy(update=change), path)
    with pytest.raises(PlanMismatchError, match=r"digest .* does not match.*hilore apply"):
        load_frozen_plan(path)


def test_the_digest_covers_every_field_but_itself(frozen):
    assert digest_of(frozen) == digest_of(frozen.model_copy(update={"digest": "other"}))
    assert digest_of(frozen) != digest_of(frozen.model_copy(update={"head": "full"}))


# ------------------------------------------------------------------------------------------------------- older versions

DATA = Path(__file__).parent / "data"


def as_version_3(record) -> dict:
    """What version 3 wrote, but for a digest: it did not know of estimates, nor of what came later."""
    return {key: value for key, value in digested(record).items() if key != "estimate"} | {"version": 3}


def test_files_of_version_3_are_read_as_measured(tmp_path, profile, plan, frozen):
    save_profile(profile, tmp_path)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "estimate"} | {"version": 3}))
    assert load_profile(tmp_path) == profile
    path = tmp_path / "p.json"
    path.write_text(json.dumps(as_version_3(plan)))
    assert load_plan_file(path) == plan
    old = as_version_3(frozen)
    path.write_text(json.dumps(old | {"digest": digest_of_document(old)}))
    assert load_frozen_plan(path) == frozen, "with the digest of this version"


def test_real_files_of_version_3(tmp_path):
    plan, frozen = load_plan_file(DATA / "plan_version_3.json"), load_frozen_plan(DATA / "frozen_version_3.json")
    assert (plan.version, plan.estimate, frozen.estimate) == (4, None, None)
    assert frozen.digest == digest_of(frozen)
    assert frozen.plan_digest in digests_of(plan)[1:], "it names the plan by the digest of version 3"
    save_json(frozen, tmp_path / "p.json")
    assert load_frozen_plan(tmp_path / "p.json") == frozen


@pytest.mark.parametrize("change", [{"head": "full"}, {"digest": "0" * 16}, {"estimate": None}], ids=lambda change: next(iter(change)))
def test_an_edited_frozen_plan_of_version_3_is_refused(tmp_path, change):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads((DATA / "frozen_version_3.json").read_text()) | change))
    with pytest.raises(PlanMismatchError, match=r"version 3 of|does not match the content"):
        load_frozen_plan(path)


@pytest.mark.parametrize("version", [2, 5, 4.0, True, "4", None])
def test_versions_that_nothing_leads_from_are_refused_by_name(tmp_path, plan, version):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(as_version_3(plan) | {"version": version}))
    with pytest.raises(PlanMismatchError, match=rf"version {version!r} of hilore-plan, this hilore reads versions 3 to 4; make it again with `hilore plan`"):
        load_plan_file(path)


def test_a_version_is_known_to_lead_to_the_next():
    """Whoever raises a version says what it added, or says nothing and refuses what is older."""
    current = {"hilore-profile": PROFILE_VERSION, "hilore-plan": PLAN_VERSION, "hilore-frozen-plan": FROZEN_VERSION}
    models = {"hilore-profile": Profile, "hilore-plan": Plan, "hilore-frozen-plan": FrozenPlan}
    for (kind, version), added in ADDED.items():
        assert version <= current[kind]
        assert added.keys() <= models[kind].model_fields.keys()


def test_an_estimated_record_never_was_one_of_version_3(plan):
    estimate = Estimate(device="h100", time_error=None, relative="small", relative_digest="0" * 16)
    assert len(digests_of(plan)) == 2
    assert digests_of(plan.model_copy(update={"estimate": estimate})) == [digest_of(plan.model_copy(update={"estimate": estimate}))]


# ------------------------------------------------------------------------------------------------------------- variants


def variant(tokens: int, exposure: float | None = None, *, length: int | None = None, name: str = "A") -> Variant:
    return Variant(max_tokens=tokens, max_length=length, max_exposure=exposure, layers=[name] * LAYERS)


def test_variant_of_the_smallest_size_and_the_least_exposure():
    small, low, high, large = variant(100, length=50), variant(200, 0.5, length=50), variant(200, length=50), variant(400)
    variants = [large, high, small, low]

    def of(tokens: int, length: int = 10, exposure: float | None = None) -> Variant | None:
        return variant_for(variants, tokens=tokens, length=length, exposure=exposure)

    assert [of(1), of(100), of(101), of(200), of(201), of(400)] == [small, small, high, high, large, large]
    assert of(401) is None
    assert [of(150, exposure=e) for e in (0.0, 0.5, 0.51, 1e9, None)] == [low, low, high, high, high]
    assert of(50, length=51) is large, "rows that are too long for the smaller sizes"
    assert of(150, length=51, exposure=0.1) is large
    assert [v.label for v in variants] == ["up to 400 tokens", "up to 200 tokens", "up to 100 tokens", "up to 200 tokens, exposure up to 0.5"]


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ([variant(10, name="B")], "names pattern 'B'"),
        ([variant(10), variant(20, 0.5)], "variants of 20 tokens need exactly one without max_exposure"),
        ([variant(10), variant(10)], "variants of 10 tokens need exactly one without max_exposure"),
        ([], "at least 1 item"),
    ],
)
def test_variants_that_leave_a_micro_batch_without_one_are_refused(tmp_path, plan, frozen, variants, words):
    path = tmp_path / "p.json"
    save_json(freeze(frozen.model_copy(update={"variants": variants})), path)
    with pytest.raises(PlanMismatchError, match=words):
        load_frozen_plan(path)
    more = {"micro_batches": 1, "risk": 0.1, "step_us": 1.0, "peak_bytes": 1, "rel_error": 0.0}
    save_json(plan.model_copy(update={"variants": [PlannedVariant(**v.model_dump(), **more) for v in variants]}), path)
    with pytest.raises(PlanMismatchError, match=words):
        load_plan_file(path)


def test_recovered_is_nothing_where_checkpointing_is_free(plan):
    assert plan.predicted.recovered == pytest.approx(2 / 3)
    assert plan.update.recovered == pytest.approx(2 / 3)
    free = {"gc_us": 9.0, "none_us": 9.0}
    assert plan.update.model_copy(update=free).recovered == plan.predicted.model_copy(update=free).recovered == 0.0


# ------------------------------------------------------------------------------------------------- writes that go wrong


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("old", [None, b"old"], ids=["new file", "old file"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, call, old):
    path = tmp_path / "plan.json"
    if old is not None:
        path.write_bytes(old)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(HiloreError, match=r"cannot be written.*No space left") as error:
        write_atomic(path, b"new")
    assert str(path) in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else ["plan.json"])
    assert old is None or path.read_bytes() == old


def test_a_full_disk_leaves_the_old_profile(tmp_path, monkeypatch, profile):
    save_profile(profile, tmp_path)
    real, left = os.fsync, iter(range(2))

    def full(handle):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)  # the tables still fit, profile.json does not
    with pytest.raises(HiloreError, match="cannot be written"):
        save_profile(profile.model_copy(update={"name": "new", "units": profile.units[1:]}), tmp_path)
    assert load_profile(tmp_path) == profile


KILLED = """
import sys
from pathlib import Path
from hilore_cli.files import write_atomic
path, size = Path(sys.argv[1]), 2_000_000
write_atomic(path, b"a" * size)
print("ready", flush=True)
while True:
    for letter in (b"a", b"b"):
        write_atomic(path, letter * size)
"""


def test_killed_while_writing_leaves_a_whole_file(tmp_path):
    path = tmp_path / "plan.json"
    for attempt in range(4):
        writer = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.1 + 0.037 * attempt)
        writer.kill()
        writer.wait()
        content = path.read_bytes()
        assert content in (b"a" * 2_000_000, b"b" * 2_000_000)


def test_an_unwritable_folder_is_an_error_of_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises((HiloreError, OSError)) as error:
        write_atomic(blocked / "plan.json", b"new")
    assert str(blocked) in str(error.value)
    assert blocked.read_text() == "not a folder"
