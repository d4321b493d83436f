"""The benchmark against every peer, on a tiny model with plans made by hand: rows, cap, candidates, files, picture, refusals."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
from conftest import build_tiny
from rich.console import Console
from steps_for_tests import hand_made_plan
from typer.testing import CliRunner

from hilore_cli import suite
from hilore_cli.batches import save_micro_batch, synthetic_micro_batch
from hilore_cli.bench import apply_plan
from hilore_cli.cli import app
from hilore_cli.errors import UsageError
from hilore_cli.files import save_json
from hilore_cli.models import decoder_layers
from hilore_cli.peers import PeerBench
from hilore_cli.schema import Pattern, freeze
from hilore_cli.sizes import parse_cap
from hilore_cli.suite import FIXED, PEERS, most_that_fits, run_suite
from hilore_cli.suite_records import SuiteReport
from hilore_cli.views.suite import suite_view

LAYERS = 4
TINY = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 160}
BATCH = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=16, completion_tokens=32, group_size=4, seed=0)
PATTERNS = {"A": Pattern(actions={"mlp.gate_proj.mm": "compress:int8"}), "B": Pattern(default="store")}
CAP = parse_cap("1.35x-gc")
BUDGETS = (0.1, 0.5)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def planned():
    torch.set_num_threads(1)
    model = build_tiny("llama", **TINY)
    bold, exact = (apply_plan(model, hand_made_plan(model, BATCH, PATTERNS, layers, head="chunked"), [BATCH], emit_anyway=False, progress=silent, name=name) for name, layers in (("bold", ["A"] * LAYERS), ("exact", ["B"] * LAYERS)))
    return model, {"bold": bold, "exact": exact}


@pytest.fixture(scope="module")
def report(planned) -> SuiteReport:
    model, plans = planned
    with patch.object(suite, "MEMORY_BUDGETS", BUDGETS):  # each is compiled
        found = run_suite(model, plans, [("synthetic", BATCH)], cap=CAP, heads=("full", "chunked"), peers=PEERS, repeats=2, progress=silent)
    assert not any("forward" in vars(layer) or "_hilore" in vars(layer) for _, layer in decoder_layers(model)), "nothing stays patched"
    return found


def rows_of(report: SuiteReport, head: str) -> dict:
    return {row.method: row for row in report.rows if row.head == head}


@pytest.mark.parametrize(
    ("peak", "cap", "most_measured"),
    [
        (lambda n: 1000 + 40 * n, 1000 + 40 * 7 + 5, 2),
        (lambda n: 1000 + 40 * n, 1000 + 40 * 29, 2),
        (lambda n: 1000 + 40 * n, 5000, 1),
        (lambda n: 1000 + 40 * n, 999, 1),
        (lambda n: 1000 + max(0, 40 * n - 300), 1200, 7),
        (lambda n: 1000 + n**3, 1000 + 11**3, 7),
        (lambda n: 1000 + (n == 30) * 500, 1000, 7),
    ],
    ids=["linear", "the last", "all fit", "none fits", "flat at first", "cubic", "flat"],
)
def test_the_most_layers_that_fit(peak, cap: int, most_measured: int) -> None:
    """Against trying all of them."""
    measured = []

    def measure(stored: int) -> int:
        assert 0 < stored < 30
        measured.append(stored)
        return peak(stored)

    found = most_that_fits(measure, layers=30, cap_bytes=cap, gc_peak=peak(0), none_peak=peak(30))
    assert found == max((n for n in range(30) if peak(n) <= cap), default=0)
    assert len(measured) == len(set(measured)) <= most_measured


def test_every_method_is_a_row_of_every_head(report) -> None:
    assert [row.method for row in report.rows if row.head == "full"] == list(PEERS)
    assert [row.method for row in report.rows if row.head == "chunked"] == [*PEERS, "bold", "exact"], "plans run under their own head"
    assert report.left_out == {}
    assert report.plans.keys() == {"bold", "exact"}
    for head in ("full", "chunked"):
        rows = rows_of(report, head)
        assert report.cap_bytes < rows["none"].peak_bytes
        assert all(row.fits == (row.peak_bytes <= report.cap_bytes) for row in rows.values())
        assert not rows["none"].fits
        assert rows["gc"].fits
        assert rows["gc"].speedup_vs_gc == rows["gc"].speedup_low == 1.0
        assert {name for name, row in rows.items() if row.rel_error == 0} - {"paper-dp"} == {"none", "gc", "sac-attention", "sac-half-mm", "sac-mm", "partial-gc"} | ({"exact"} if head == "chunked" else set())
        assert all(row.speedup_low <= row.speedup_vs_gc <= row.speedup_high for row in rows.values())
        best = [name for name, row in rows.items() if row.vs_best_peer == row.vs_best_peer_low == row.vs_best_peer_high == 1.0]
        assert len(best) == 1
        assert rows[best[0]].fits
        assert not rows[best[0]].ours
    assert report.cap_bytes == int(1.35 * rows_of(report, "chunked")["gc"].peak_bytes), "of the plan's head"


def test_scanned_methods_keep_the_most_that_fits(report) -> None:
    for head in ("full", "chunked"):
        tried = {method: [one for one in report.candidates if (one.method, one.head) == (method, head)] for method in ("partial-gc", "membudget", "paper-dp")}
        assert len(tried["membudget"]) == len(BUDGETS)
        for method, candidates in tried.items():
            kept = [one for one in candidates if one.chosen]
            assert len(kept) == 1
            row = rows_of(report, head)[method]
            assert (row.setting, row.peak_bytes, row.fits) == (kept[0].setting, kept[0].peak_bytes, kept[0].fits)
            timed = [one for one in candidates if one.step_us is not None]
            assert all(one.fits for one in timed)
            assert kept[0].step_us == min((one.step_us for one in timed), default=None)
        peaks = {one.setting: one.peak_bytes for one in tried["partial-gc"]}
        fitting = [one for one in tried["partial-gc"] if one.fits]
        assert fitting
        assert len(peaks) == len(tried["partial-gc"]), "each is measured once"
        assert rows_of(report, head)["paper-dp"].fits


def test_the_tables_fit_eighty_columns(report) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(suite_view(report))
    shown = console.file.getvalue().splitlines()
    assert max(map(len, shown)) <= 80
    assert all(any(line.startswith(f"{name} ") for line in shown) for name in (*PEERS, "bold *")), "no name is broken"


def test_record_comes_back(report, tmp_path) -> None:
    save_json(report, tmp_path / "suite.json")
    assert SuiteReport.model_validate_json((tmp_path / "suite.json").read_text()) == report


def test_a_method_that_cannot_run_is_left_out_with_its_reason() -> None:
    model = build_tiny("phi3", num_hidden_layers=2)
    plan = apply_plan(model, hand_made_plan(model, BATCH, {"B": Pattern()}, ["B", "B"]), [BATCH], emit_anyway=False, progress=silent)
    found = run_suite(model, {"p": plan}, [("synthetic", BATCH)], cap=None, heads=["chunked"], peers=["int8-mlp", "paper-dp"], repeats=1, progress=silent)
    assert found.left_out == {"int8-mlp": "layer 0 has no gate_proj and up_proj", "paper-dp": "layer 0 has no up_proj"}
    assert [row.method for row in found.rows] == ["none", "gc", "p"]
    assert found.cap_bytes == plan.budgets.cap_bytes
    assert all(row.fits for row in found.rows)


def test_an_interrupted_suite_goes_on_where_it_stopped(planned, tmp_path) -> None:
    """Stopped in the second of three repeats: what was measured stays, two repeats run, and whatever compiles does so before it is timed."""
    model, plans = planned
    run = partial(run_suite, model, plans, [("synthetic", BATCH)], cap=CAP, heads=("chunked",), peers=("membudget", "int8-mlp"), repeats=3, progress=silent, unfinished=tmp_path / "unfinished")
    repeats_run = 0

    def time_updates(self, names, *, repeats, progress):
        nonlocal repeats_run
        assert self._compiled >= set(names)
        if repeats == 1:
            repeats_run += 1
            if stop and repeats_run == 2:
                raise KeyboardInterrupt
        return {name: [(float(i + 1), float(i + 1))] * repeats for i, name in enumerate(names)}

    with patch.object(suite, "MEMORY_BUDGETS", BUDGETS), patch.object(PeerBench, "time_updates", time_updates):
        stop = True
        with pytest.raises(KeyboardInterrupt):
            run()
        stop, repeats_run = False, 0
        with patch.object(PeerBench, "peak_bytes", side_effect=AssertionError("measured again")):
            report = run()
    assert repeats_run == 2
    assert {row.method for row in report.rows} == {"none", "gc", "membudget", "int8-mlp", *plans}
    assert {row.method: row.rel_error for row in report.rows}["bold"] > 0


def test_under_a_cap_that_nothing_keeps_the_smallest_is_shown(planned) -> None:
    model, plans = planned
    found = run_suite(model, {"bold": plans["bold"]}, [("synthetic", BATCH)], cap=parse_cap("1KiB"), heads=["chunked"], peers=["partial-gc"], repeats=1, progress=silent)
    assert not any(row.fits for row in found.rows)
    assert all(row.vs_best_peer is None for row in found.rows)
    kept = next(one for one in found.candidates if one.chosen)
    assert kept.peak_bytes == min(one.peak_bytes for one in found.candidates)


@pytest.mark.parametrize(("changed", "words"), [({"heads": ["half"]}, "head 'half': unknown"), ({"heads": []}, "no loss head"), ({"peers": ["magic"]}, "method 'magic' is not known"), ({"heads": ["full"]}, "made for loss head chunked"), ({"name": "gc"}, "named like a method")])
def test_refusals(planned, changed: dict, words: str) -> None:
    model, plans = planned
    changed = dict(changed)
    named = {changed.pop("name", "bold"): plans["bold"]}
    with pytest.raises(UsageError, match=words):
        run_suite(model, named, [("synthetic", BATCH)], cap=None, repeats=1, progress=silent, **{"heads": ["chunked"], "peers": list(FIXED), **changed})


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_all_it_is_asked_for(planned, tmp_path, monkeypatch) -> None:
    model, plans = planned
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("tiny")
    save_micro_batch("batch.parquet", BATCH)
    for name, plan in plans.items():
        save_json(freeze(plan.model_copy(update={"sources": ["batch.parquet"]})), tmp_path / f"{name}.json")
    arguments = ["bench", "--suite", "bold.json", "--against", "exact.json", "--batch", "batch.parquet", "--model", "./tiny", "--mem-cap", "1.35x-gc", "--heads", "chunked", "--peers", "partial-gc,int8-mlp", "--repeats", "1", "--threads", "1"]
    finished = CliRunner().invoke(app, [*arguments, "--json", "-o", "suite.json", "--csv", "suite.csv", "--parquet", "suite.parquet", "--png", "suite.png"])
    assert finished.exit_code == 0, finished.output
    document = json.loads(finished.stdout)
    assert document == json.loads((tmp_path / "suite.json").read_text())
    methods = ["none", "gc", "int8-mlp", "partial-gc", "bold", "exact"]
    assert [row["method"] for row in document["rows"]] == methods
    assert [row["method"] for row in csv.DictReader((tmp_path / "suite.csv").open())] == methods
    table = pq.read_table(tmp_path / "suite.parquet")
    assert table["peak_bytes"].to_pylist() == [row["peak_bytes"] for row in document["rows"]]
    assert json.loads(table.schema.metadata[b"hilore-suite"])["cap_bytes"] == document["cap_bytes"]
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    shown = " ".join(finished.stderr.split())
    for words in ("chunked head, under the cap", "chunked head, over the cap", "bold *", "settings that were tried"):
        assert words in shown


def test_a_wrong_name_is_told_before_the_model_is_loaded(planned, tmp_path) -> None:
    save_json(freeze(planned[1]["bold"]), tmp_path / "bold.json")
    save_micro_batch(tmp_path / "batch.parquet", BATCH)
    error = CliRunner().invoke(app, ["bench", "--suite", str(tmp_path / "bold.json"), "--batch", str(tmp_path / "batch.parquet"), "--model", "./nowhere", "--heads", "chunked", "--peers", "magic"]).exception
    assert isinstance(error, UsageError)
    assert "method 'magic' is not known" in str(error)


@pytest.mark.parametrize(("arguments", "words"), [(["--mem-cap", "1GiB"], "--mem-cap belongs to the comparison"), (["--suite", "--also", "store"], "leave out --also"), (["--codecs", "all", "--suite"], "leave out --suite")])
def test_options_that_do_not_go_together(arguments: list[str], words: str) -> None:
    error = CliRunner().invoke(app, ["bench", *arguments]).exception
    assert isinstance(error, UsageError)
    assert words in str(error)
