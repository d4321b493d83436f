"""The command line: the whole chain in subprocesses, and every bad input as one line, an exit code and nothing written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pulp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import build_tiny

from hilore_cli import attach, cli, load_plan, malloc
from hilore_cli.batches import save_micro_batch, synthetic_micro_batch
from hilore_cli.captured import TRAINERS, recipe
from hilore_cli.commands import inputs, options
from hilore_cli.errors import PlanMismatchError, ProfileError
from hilore_cli.files import load_frozen_plan, load_profile
from hilore_cli.schema import Pattern
from hilore_cli.views.plan import pattern_words, ranges

VOCABULARY = 128
TINY = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": VOCABULARY}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PROFILE = ["profile", "--model", "./tiny", "--batch", "batch.parquet", "--codecs", "int8", "--repeats", "1"]


def hilore(*arguments: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `hilore` in a process of its own."""
    finished = subprocess.run([sys.executable, "-m", "hilore_cli", *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == code, finished.stderr
    return finished


def save_tiny(folder: Path, **overrides) -> None:
    build_tiny("llama", **{**TINY, **overrides}).save_pretrained(folder)


def record_batch(path: Path, *, seed: int = 0, completion_tokens: int = 24, rows: int = 4, scale: float = 1.0) -> None:
    """Its advantages times `scale`; the last row has none."""
    micro_batch = synthetic_micro_batch(vocab_size=VOCABULARY, rows=rows, prompt_tokens=8, completion_tokens=completion_tokens, group_size=2, seed=seed)
    kept = (torch.arange(rows) < rows - 1)[:, None]
    save_micro_batch(path, replace(micro_batch, advantages=micro_batch.advantages * kept * scale))


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    """A folder in which profile, plan and apply have run on a tiny model and an update of six micro-batches, one from a file and
    five from a folder; tests do not change it. With the three results.
    """
    folder = tmp_path_factory.mktemp("chain")
    save_tiny(folder / "tiny")
    save_tiny(folder / "other", hidden_size=32, intermediate_size=80)
    save_tiny(folder / "deeper", num_hidden_layers=3)
    record_batch(folder / "batch.parquet")
    record_batch(folder / "heldout.parquet", seed=1)
    for number, (completion_tokens, scale) in enumerate([(6, 0.3), (24, 0.1), (6, 1.0), (24, 1.0), (24, 0.4)]):
        record_batch(folder / "more" / f"{number}.parquet", seed=2 + number, completion_tokens=completion_tokens, scale=scale)
    results = {
        "profile": hilore(*PROFILE, "--batch", "more", "--name", "tiny", "--json", folder=folder),
        # on so small a model the cap may fall anywhere between the few storages: 1.3 leaves room to the dry run
        "plan": hilore("plan", "--mem-cap", "1.3x-gc", "--risk", "0.05", "--json", folder=folder),
        "apply": hilore("apply", "--heldout", "heldout.parquet", "--json", folder=folder),
    }
    return folder, results


# ------------------------------------------------------------------------------------------------------- the whole chain


@pytest.mark.slow
def test_chain(chain):
    folder, results = chain
    documents = {name: json.loads(result.stdout) for name, result in results.items()}
    assert {name: document["format"] for name, document in documents.items()} == {"profile": "hilore-profile", "plan": "hilore-plan", "apply": "hilore-frozen-plan"}
    assert sorted(path.name for path in (folder / "plans").iterdir()) == ["tiny.json", "tiny.plan.json"]
    assert not (folder / "profiles" / "tiny" / "unfinished").exists()
    plan, frozen = documents["plan"], documents["apply"]
    assert plan["predicted"]["peak_bytes"] <= plan["budgets"]["cap_bytes"]
    assert frozen["measured"]["peak_bytes"] <= plan["budgets"]["cap_bytes"]
    assert frozen["measured"]["rel_error"] <= 0.05
    assert documents["profile"]["sources"] == plan["sources"] == frozen["sources"] == ["batch.parquet", "more"]
    rows = documents["profile"]["micro_batches"]
    assert {row["source"] for row in rows} == {"batch.parquet", *(f"more/{i}.parquet" for i in range(5))}
    sizes = [(row["tokens"], row["loss_tokens"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True), "the largest is profiled in full, of equals the one whose head needs most"
    assert {pair.micro_batch for pair in load_profile(folder / "profiles" / "tiny").calibration} == {row["source"] for row in rows}
    assert plan["update"]["micro_batches"] == frozen["micro_batches"] == sum(v["micro_batches"] for v in plan["variants"]) == 6
    assert plan["budgets"]["exposure_rule"] == "squared", "no log-probabilities were recorded"
    assert all(v["peak_bytes"] <= plan["budgets"]["cap_bytes"] for v in plan["variants"])
    assert {v["max_tokens"] for v in plan["variants"]} == {77, 128}
    assert "nan" not in results["profile"].stderr
    assert "profile: the newest, profiles/tiny" in results["plan"].stderr
    assert "plan: the newest, plans/tiny.plan.json" in results["apply"].stderr
    assert "load_plan(" in results["apply"].stderr
    for result in results.values():  # torch's and transformers' own chatter
        assert not any(noise in result.stderr for noise in ("USDT", "Warning", "WARNING", "Memory block", "Traceback"))


@pytest.mark.slow
def test_bench_and_show(chain, tmp_path):
    folder, _ = chain
    report = json.loads(hilore("bench", "plans/tiny.json", "--repeats", "2", "--json", "-o", str(tmp_path / "bench.json"), folder=folder).stdout)
    for key in ("speedup_vs_gc", "ceiling_vs_gc", "recovered", "peak_vs_gc", "rel_error", "predicted", "measured"):
        assert key in report
    assert [row["name"] for row in report["methods"]] == ["none", "gc", "plan"]
    assert [batch["source"] for batch in report["batches"]] == ["batch.parquet", *(f"more/{i}.parquet" for i in range(5))]
    assert json.loads((tmp_path / "bench.json").read_text()) == report


@pytest.mark.slow
def test_one_variant_against_several(chain, here, tmp_path):
    """A second plan with one variant, beside the first in one benchmark, and both without the rows that have no gradient."""
    folder, _ = chain
    code, out, _ = here("plan", "profiles/tiny", "--mem-cap", "1.3x-gc", "--risk", "0.05", "--one-variant", "--weigh", "tokens", "--json", "-o", str(tmp_path / "one.plan.json"), folder=folder)
    plan = json.loads(out)
    assert (code, len(plan["variants"]), plan["variants"][0]["max_exposure"], plan["budgets"]["exposure_rule"]) == (0, 1, None, "tokens")
    assert here("apply", str(tmp_path / "one.plan.json"), "-o", str(tmp_path / "one.json"), "--heldout", "heldout.parquet", "--heldout", "more", "-q", folder=folder)[0] == 0
    code, out, _ = here("bench", "plans/tiny.json", "--against", str(tmp_path / "one.json"), "--skip-zero-rows", "--repeats", "1", "--batch", "more", "--batch", "batch.parquet", "--json", folder=folder)
    report = json.loads(out)
    assert code == 0
    assert [row["name"] for row in report["methods"]] == ["none", "gc", "plan", "one", "gc+skip", "plan+skip"]
    assert [batch["source"] for batch in report["batches"]] == [*(f"more/{i}.parquet" for i in range(5)), "batch.parquet"]
    errors = {row["name"]: row["rel_error"] for row in report["methods"]}
    assert errors["gc+skip"] < 1e-6


@pytest.mark.slow
def test_ablations_run_side_by_side(chain, here):
    """Measured peaks are near the predicted ones; what is exact is bitwise; what keeps its risk when predicted keeps it when measured."""
    folder, _ = chain
    code, out, err = here("ablate", "profiles/tiny", "--mem-cap", "1.3x-gc", "--risk", "0.05", "--repeats", "1", "--threads", "1", "--json", folder=folder)
    assert code == 0, err
    report = json.loads(out)
    rows = {row["name"]: row for row in report["rows"]}
    assert {"plan", "exact only", "risk ignored", "greedy", "random"} <= rows.keys()
    assert [batch["source"] for batch in report["batches"]] == [report_source(folder)]
    for row in rows.values():
        assert row["measured"]["peak_bytes"] == pytest.approx(row["predicted"]["peak_bytes"], rel=0.005), row["name"]  # on so small a model a few tensors of a kilobyte
    assert rows["exact only"]["measured"]["rel_error"] == rows["random"]["measured"]["rel_error"] == 0
    for row in rows.values():  # what a plan says of compression is what it does
        assert (row["measured"]["rel_error"] > 0) == (row["predicted"]["compressed_bytes"] > 0), row["name"]
    assert rows["plan"]["measured"]["rel_error"] <= 0.05
    assert set(report["update"]) == {"exposure and size", "size alone", "one variant"}


def report_source(folder: Path) -> str:
    return load_profile(folder / "profiles" / "tiny").batch.source


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("profiles/tiny", ["units by risk", "memory account", "kappa", "hilore, all recomputed", "the update's micro-batches", "1.parquet"]),
        ("profiles/tiny/profile.json", ["units by risk"]),
        ("plans/tiny.plan.json", ["recovered", "pattern", "CBC", "the cap binds at", "up to 77 tokens"]),
        ("plans/tiny.json", ["predicted", "measured", "load_plan(", "up to 77 tokens"]),
        ("batch.parquet", ["loss tokens", "exact before the forward", "rows without gradient", "sum of c^2"]),
    ],
)
def test_show(chain, here, file, words):
    folder, _ = chain
    code, out, err = here("show", file, folder=folder)
    assert (code, err) == (0, "")
    assert all(word in out for word in words)
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = here("show", file, "--json", folder=folder)
    assert (code, err) == (0, "")
    assert json.loads(out)


@pytest.mark.slow
def test_profile_goes_on_after_ctrl_c(chain, tmp_path):
    """Finished layers are not measured again: what the first run kept is in the second run's profile."""
    save_tiny(tmp_path / "tiny", num_hidden_layers=6)
    record_batch(tmp_path / "batch.parquet")
    command = [sys.executable, "-m", "hilore_cli", *PROFILE, "--name", "p"]
    running = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = tmp_path / "profiles" / "p" / "unfinished" / "layer-0.json"
    deadline = time.monotonic() + 120
    while not first.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.startswith("hilore: interrupted")
    assert err.count("\n") == 1
    assert first.exists()
    assert not (tmp_path / "profiles" / "p" / "profile.json").exists()
    kept = json.loads(first.read_text())
    kept["row"]["grad_norm"] = 12345.0
    first.write_text(json.dumps(kept))
    document = json.loads(hilore(*PROFILE, "--name", "p", "--json", folder=tmp_path).stdout)
    assert document["layers"][0]["grad_norm"] == 12345.0
    assert len(document["layers"]) == 6
    assert not first.parent.exists()


# ------------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def here(monkeypatch, capfd):
    """Run `hilore` in this process: exit code, stdout, stderr."""

    def run(*arguments: str, folder: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(malloc, "steady_malloc", lambda: True)
        monkeypatch.setattr(sys, "argv", ["hilore", *arguments])
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "80")
        for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
            monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def refused(here):
    """Run a command that must fail: one line on stderr with all the words, that exit code, and no file touched."""

    def run(*arguments: str, folder: Path, code: int, words: list[str]) -> None:
        before = listing(folder)
        found, out, err = here(*arguments, folder=folder)
        assert (found, out) == (code, ""), err
        # torch reads the levels that silence these (cli.main) once, and here it was loaded before
        lines = [line for line in err.splitlines() if not line.startswith(("STAGE:", "USDT:", "[W"))]
        assert len(lines) == 1, err
        assert lines[0].startswith("hilore: ")
        assert all(word in lines[0] for word in words), err
        assert listing(folder) == before

    return run


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--nonsense"], ["--nonsense", "hilore plan --help"]),
        (["plane"], ["plane", "hilore --help"]),
        (["profile"], ["--model", "hilore profile --help"]),
        (["profile", "--model", "./tiny", "--tokens", "many"], ["--tokens", "integer"]),
        (["profile", "--model", "./nothing"], ["./nothing", "no such folder", "preset or a hub id"]),
        (["profile", "--model", "smollm2-135"], ["smollm2-135", "did you mean smollm2-135m"]),
        (["profile", "--model", "llama-8b"], ["llama-8b", "not on this machine", "--device h100", "--device cpu"]),
        (["profile", "--model", "./tiny", "--task", "mathh"], ["mathh", "did you mean"]),
        (["profile", "--model", "./tiny", "--batch", "batch.parquet", "--codecs", "int8,int3"], ["int3", "int8"]),
        (["profile", "--model", "./tiny", "--batch", "batch.parquet", "--head", "heavy"], ["heavy", "chunked"]),
        (["profile", "--model", "./tiny", "--batch", "batch.parquet", "--dtype", "int8"], ["int8", "float32"]),
        (["profile", "--model", "./tiny", "--batch", "batch.parquet", "--name", "../up"], ["../up", "letters"]),
        (["plan", "--codecs", "int3"], ["int3", "int8"]),
        (["plan", "--weigh", "loudness"], ["'loudness'", "logits, squared, scalar, tokens"]),
        (["plan", "--weigh", "logits"], ["micro-batch batch.parquet", "no log-probabilities", "--weigh squared"]),
        (["plan", "--risk", "-1"], ["-1", "0.015"]),
        (["plan", "--risk", "nan"], ["nan", "0.015"]),
        *((["plan", "--mem-cap", cap], [repr(cap), "1.1x-gc"]) for cap in ("1.1", "1.1gc", "x-gc", "0x-gc", "40", "-1GiB", "1.1x-all", "")),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--task", "mathh"], ["mathh", "did you mean"]),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--temperature", "0"], ["temperature", "above 0"]),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--task-option", "max_digits"], ["'max_digits'", "NAME=VALUE"]),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--task-option", "seed=1"], ["'seed=1'", "--seed"]),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--task-option", "digits=1"], ["digits", "max_digits"]),
        (["rollout", "--model", "./tiny", "-o", "r.parquet", "--task-option", "max_digits=many"], ["chain_sum", "'max_digits': 'many'", "change the options"]),
        (["show", "nothing.json"], ["nothing.json", "no such file"]),
        (["show", "tiny/config.json"], ["config.json", "none of hilore's"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in {"plan", "plane", "profile", "rollout", "show"} else "",
)
def test_bad_arguments(chain, refused, arguments, words):
    pytest.importorskip("reasoning_gym")
    refused(*arguments, "-q" if arguments[0] in ("plan", "profile") and "--nonsense" not in arguments else "--json", folder=chain[0], code=2, words=words)


def test_tensors_that_are_no_micro_batch(chain, refused):
    refused("show", "tiny/model.safetensors", "--json", folder=chain[0], code=4, words=["model.safetensors", "lack advantages, input_ids, loss_mask", "hilore capture own"])


def test_nothing_to_take(refused, tmp_path):
    refused("plan", folder=tmp_path, code=4, words=["profiles/", "hilore profile"])
    refused("apply", folder=tmp_path, code=6, words=["plans/", "hilore plan"])
    refused("bench", folder=tmp_path, code=6, words=["plans/", "hilore apply"])


@pytest.mark.parametrize("damage", ["cut", "config", "no weights", "no config", "missing tensor"])
def test_damaged_model(chain, refused, tmp_path, damage):
    save_tiny(tmp_path / "tiny")
    record_batch(tmp_path / "batch.parquet")
    config, weights = tmp_path / "tiny" / "config.json", tmp_path / "tiny" / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "config":
        config.write_text(config.read_text()[:50])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    words = {"cut": ["model.safetensors", "damaged", "copy it again"], "config": ["config.json", "damaged"], "no weights": ["tiny", "safetensors"], "no config": ["config.json"], "missing tensor": ["model.layers.2", "copy the model again"]}
    refused(*PROFILE, "-q", folder=tmp_path, code=2, words=words[damage])


def test_cap_below_the_least_feasible(chain, refused, here):
    words = ["no plan keeps", "least feasible peak", "bound by", "raise --mem-cap"]
    refused("plan", "profiles/tiny", "--mem-cap", "0.5x-gc", folder=chain[0], code=5, words=words)
    code, out, err = here("plan", "profiles/tiny", "--mem-cap", "0.5x-gc", "--json", folder=chain[0])
    document = json.loads(out)
    assert (code, document["exit_code"], err.count("\n")) == (5, 5, 1)
    assert document["least_peak_at_risk_bytes"] >= document["least_peak_bytes"] > 0
    assert document["binding_moment"] in document["error"]


DAMAGES = {
    "cut short": lambda text: text[: len(text) // 2],
    "unknown key": lambda text: json.dumps(json.loads(text) | {"surprise": 1}),
    "NaN": lambda text: json.dumps(json.loads(text) | {"name": float("nan")}),
    "another version": lambda text: json.dumps(json.loads(text) | {"version": 99}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("command", "file", "code"),
    [
        (["plan", "profiles/tiny", "-q"], "profiles/tiny/profile.json", 4),
        (["apply", "plans/tiny.plan.json", "-q"], "plans/tiny.plan.json", 6),
        (["bench", "plans/tiny.json", "-q"], "plans/tiny.json", 6),
    ],
    ids=["profile", "plan", "frozen plan"],
)
def test_damaged_json(chain, refused, tmp_path, command, file, code, damage):
    copy(chain[0], tmp_path, "profiles/tiny", "plans")
    path = tmp_path / file
    path.write_text(DAMAGES[damage](path.read_text()))
    named = {"cut short": "whole JSON", "unknown key": "surprise", "NaN": "NaN", "another version": "version 99"}[damage]
    refused(*command, folder=tmp_path, code=code, words=[file, named, "again"])


@pytest.mark.parametrize("command", ["apply", "bench"])
@pytest.mark.parametrize(("model", "words"), [("./other", ["parameters"]), ("./deeper", ["decoder layers 2", "has 3"])])
def test_plan_of_another_model(chain, refused, command, model, words):
    file = {"apply": "plans/tiny.plan.json", "bench": "plans/tiny.json"}[command]
    refused(command, file, "--model", model, "--batch", "batch.parquet", "-q", folder=chain[0], code=6, words=["plan tiny", *words, "profile and plan this model"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"dtype": torch.bfloat16}, "dtype float32, this model has bfloat16"),
        ({"attn_implementation": "eager"}, "attention implementation sdpa, this model has eager"),
        ({"num_hidden_layers": 3}, "number of decoder layers 2, this model has 3"),
        ({"vocab_size": 64}, "number of parameters"),
        ({"rms_norm_eps": 1e-3}, "configuration digest"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attach_refuses_another_model(chain, overrides, words):
    plan = load_plan(chain[0] / "plans" / "tiny.json")
    model = build_tiny("llama", **{**TINY, **overrides})
    with pytest.raises(PlanMismatchError, match=words):
        attach(model, plan)
    assert not any("_hilore" in vars(layer) for layer in model.model.layers)


@pytest.mark.slow
def test_apply_refuses_a_plan_that_misses(chain, refused, here, tmp_path):
    copy(chain[0], tmp_path, "tiny", "batch.parquet", "plans/tiny.plan.json")
    path = tmp_path / "plans" / "tiny.plan.json"
    document = json.loads(path.read_text())
    document["budgets"]["cap_bytes"] = 1000
    path.write_text(json.dumps(document))
    command = ("apply", "plans/tiny.plan.json", "--batch", "batch.parquet", "-q")
    refused(*command, folder=tmp_path, code=6, words=["peaked at", "over its cap of 1000 B", "--emit-anyway"])
    assert here(*command, "--emit-anyway", folder=tmp_path)[0] == 0
    assert load_frozen_plan(tmp_path / "plans" / "tiny.json").measured.peak_bytes > 1000


BATCHES = {
    "missing": (None, ["no such file", "hilore rollout"]),
    "cut short": ("cut", ["damaged", "record it again"]),
    "all masked": (lambda columns: columns | {"loss_mask": [[0] * len(row) for row in columns["loss_mask"]]}, ["all completions are masked"]),
    "zero advantages": (lambda columns: columns | {"advantages": [[0.0] * len(row) for row in columns["advantages"]]}, ["all advantages are zero", "mixed rewards"]),
    "NaN advantage": (lambda columns: columns | {"advantages": [[float("nan")] * len(row) for row in columns["advantages"]]}, ["batch.parquet", "advantages hold NaN"]),
    "shapes disagree": (lambda columns: columns | {"ids": [[1] * 99, *columns["ids"][1:]]}, ["batch.parquet", "row 0 has 99 tokens"]),
    "empty cell": (lambda columns: columns | {"reward": [None, *columns["reward"][1:]]}, ["batch.parquet", "a cell is empty"]),
    "unknown column": (lambda columns: columns | {"surprise": [1] * len(columns["reward"])}, ["surprise"]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_bad_micro_batch(refused, tmp_path, case):
    change, words = BATCHES[case]
    save_tiny(tmp_path / "tiny")
    path = tmp_path / "batch.parquet"
    record_batch(path)
    if change is None:
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        table = pq.read_table(path)
        columns = change({name: table.column(name).to_pylist() for name in table.schema.names})
        schema = table.schema if "surprise" not in columns else table.schema.append(pa.field("surprise", pa.int64()))
        pq.write_table(pa.table(columns, schema=schema), path)
    refused(*PROFILE, "-q", folder=tmp_path, code=4, words=words)


def test_solver_missing(chain, refused, monkeypatch):
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "available", lambda self: False)
    refused("plan", "profiles/tiny", "-q", folder=chain[0], code=8, words=["CBC is missing", "pulp>=3.3,<4"])


def test_full_disk_while_writing_a_plan(chain, refused, tmp_path, monkeypatch):
    copy(chain[0], tmp_path, "profiles/tiny", "plans")
    old = (tmp_path / "plans" / "tiny.plan.json").read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused("plan", "profiles/tiny", "-q", folder=tmp_path, code=1, words=["tiny.plan.json", "No space left", "untouched"])
    assert (tmp_path / "plans" / "tiny.plan.json").read_bytes() == old


def test_writing_where_one_cannot(chain, refused):
    refused("plan", "profiles/tiny", "-q", "-o", "batch.parquet/p.json", folder=chain[0], code=2, words=["batch.parquet", "give another path"])


# ---------------------------------------------------------------------------------------------------------------- pieces


def test_newest_breaks_ties_by_name(tmp_path):
    for name in ("b", "c", "a"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, ns=(1, 1))
    assert inputs.newest(tmp_path, "*", PlanMismatchError, "make one").name == "c"
    os.utime(tmp_path / "a", ns=(2, 2))
    assert inputs.newest(tmp_path, "*", PlanMismatchError, "make one").name == "a"


def test_names():
    assert inputs.file_safe("HuggingFaceTB/SmolLM2 135M-math") == "HuggingFaceTB-SmolLM2-135M-math"
    assert inputs.split_names("int8, int4,,int8") == ["int8", "int4"]
    assert inputs.split_names("") == []


@pytest.mark.parametrize("tokens", [64, 1000, 1024, 4096, 16384])
def test_sampled_rows_fill_about_the_tokens_asked_for(tokens):
    room = inputs.row_room(tokens, group_size=8)
    filled = room["rows_per_micro_batch"] * (room["max_prompt_tokens"] + room["max_new_tokens"])
    assert room["rows_per_micro_batch"] % 8 == 0
    assert 0.9 * tokens <= filled <= tokens


def test_the_shipped_micro_batches_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = inputs.load_batches([*options.SHIPPED_BATCHES, options.SHIPPED_HELDOUT])
    assert [source for source, _ in found] == [*options.SHIPPED_BATCHES, options.SHIPPED_HELDOUT]
    assert all(900 <= micro_batch.tokens <= 1200 for _, micro_batch in found)


def test_the_shipped_micro_batches_are_in_the_wheel():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {f"hilore_cli/data/{name}" for name in (*options.SHIPPED_BATCHES, options.SHIPPED_HELDOUT)} <= set(included.values())


def test_micro_batches_of_files_and_folders(tmp_path, monkeypatch):
    """A folder's files by name, hidden ones left out; the micro-batches of one file are numbered."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("b.parquet", "a.parquet", ".hidden")):
        record_batch(tmp_path / "some" / name, seed=number)
    ids, mask = torch.arange(1, 9).view(2, 4), torch.tensor([[0, 0, 1, 1]] * 2)
    step = {"inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask, "advantages": mask * torch.tensor([[1.0], [-1.0]])}, "loss": {"trainer": "trl", "num_items_in_batch": 8}}
    torch.save({"hilore_capture": 1, "trainer": "own", "steps": [step, step]}, tmp_path / "captured.pt")
    found = inputs.load_batches(["captured.pt", "some"])
    assert [source for source, _ in found] == ["captured.pt#0", "captured.pt#1", "some/a.parquet", "some/b.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProfileError, match="empty: an empty folder"):
        inputs.load_batches(["empty"])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_capture_prints_the_recipe(here, tmp_path, trainer):
    assert here("capture", trainer, folder=tmp_path) == (0, recipe(trainer).strip() + "\n", "")


def test_capture_of_an_unknown_trainer(refused, tmp_path):
    refused("capture", "nobody", folder=tmp_path, code=2, words=["'nobody'", "trl, verl"])


def test_words():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""
    pattern = Pattern(actions={"mlp.up.mm": "compress:int8", "mlp.gate.mm": "compress:int8", "add": "store"})
    assert pattern_words(pattern) == "int8: mlp (gate.mm, up.mm); store: add; recompute: the rest"
    assert pattern_words(Pattern()) == "recompute: everything"


def copy(source: Path, target: Path, *names: str) -> None:
    for name in names:
        for path in [source / name] if (source / name).is_file() else (source / name).rglob("*"):
            if path.is_file():
                to = target / path.relative_to(source)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(path.read_bytes())
