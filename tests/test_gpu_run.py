"""`make gpu` without a GPU: what it says, what a failing or hanging stage leaves, and all of it rehearsed on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_on_gpu
import torch
from run_on_gpu import Finished, Run, check_kernels, markdown, run_process, run_stages
from update_on_gpu import REHEARSAL, MissingPartError, Update, run_parts

SCRIPT = Path(run_on_gpu.__file__)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(out=tmp_path / "out", work=tmp_path / "work", rehearse=False, deadline=time.monotonic() + 60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: this would use it for minutes")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, env={**os.environ, "OUT": str(tmp_path / "out")}, capture_output=True, text=True, check=False, timeout=120)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == f"no GPU here (torch {torch.__version__} sees none): nothing was run; see it run on a CPU with --rehearse\n"
    assert list(tmp_path.iterdir()) == []


def test_a_card_that_cannot_be_looked_at_is_a_failure(tmp_path: Path, monkeypatch, capsys) -> None:
    """It is not taken for none."""
    monkeypatch.setattr(run_on_gpu, "run_process", lambda *_, **__: Finished(code=1, seconds=1.0, log="Traceback\nOSError: libcuda.so.1: cannot open"))
    monkeypatch.setattr(sys, "argv", ["run_on_gpu.py", "--out", str(tmp_path / "out")])
    assert run_on_gpu.main() == 1
    assert capsys.readouterr().out == "the GPU cannot be looked at: OSError: libcuda.so.1: cannot open\n"
    assert not (tmp_path / "out").exists()


def test_it_ends_before_eight_minutes() -> None:
    assert run_on_gpu.TOTAL_S < 480


# ----------------------------------------------------------------------------------------------------------- one process

STUBBORN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("child", child.pid, flush=True)
time.sleep(300)
"""


def test_a_stage_that_hangs_is_ended_with_its_children(run: Run) -> None:
    finished = run_process([sys.executable, "-c", STUBBORN], run=run, budget_s=3, log=run.out / "x.log")
    assert (finished.code, finished.status) == (None, "out of time")
    assert finished.seconds < 20
    child = int(finished.log.split()[1])
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """A process that ended and that nobody waited for is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_stage_outlives_the_whole_budget(tmp_path: Path) -> None:
    late = Run(out=tmp_path, work=tmp_path, rehearse=False, deadline=time.monotonic())
    finished = run_process([sys.executable, "-c", "import time; time.sleep(60)"], run=late, budget_s=100, log=tmp_path / "x.log")
    assert (finished.code, finished.seconds < 20) == (None, True)


def test_a_stage_finds_the_checkout_and_no_interpreter(run: Run, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os, hilore_cli; print(os.environ.get('TRITON_INTERPRET'), os.environ['CUBLAS_WORKSPACE_CONFIG'], hilore_cli.__file__)"
    finished = run_process([sys.executable, "-c", code], run=run, budget_s=30, log=run.out / "x.log")
    assert finished.log.split() == ["None", ":4096:8", str(run_on_gpu.ROOT / "hilore_cli" / "__init__.py")]


# ---------------------------------------------------------------------------------------------------------------- stages

PLAIN_LOG = """
tests/test_kernels.py::test_a[int8] PASSED                                   [ 25%]
tests/test_kernels.py::test_a[int4] FAILED                                   [ 50%]
tests/test_kernels.py::test_b SKIPPED (no Triton)                            [ 75%]
E   AssertionError: PASSED where FAILED was meant
"""
XDIST_LOG = """
[gw1] [ 33%] PASSED tests/test_kernels.py::test_a[int8]
[gw0] [ 66%] FAILED tests/test_kernels.py::test_a[int4]
[gw1] [100%] SKIPPED tests/test_kernels.py::test_b
"""


@pytest.mark.parametrize("log", [PLAIN_LOG, XDIST_LOG], ids=["plain", "xdist"])
@pytest.mark.parametrize(("code", "status"), [(1, "failed"), (None, "out of time"), (0, "ok")])
def test_tests_are_counted_also_when_time_ran_out(run: Run, monkeypatch, log: str, code: int | None, status: str) -> None:
    monkeypatch.setattr(run_on_gpu, "run_process", lambda *_, **__: Finished(code=code, seconds=1.0, log=log))
    stage = check_kernels(run)
    assert stage["status"] == status
    assert stage["result"]["counts"] == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}
    assert stage["result"]["failed"] == ["tests/test_kernels.py::test_a[int4]"]


def test_a_codec_meets_the_goal_in_both_directions_or_not_at_all(run: Run, monkeypatch) -> None:
    def row(stochastic: bool, compress: float, decompress: float) -> dict[str, object]:
        return {"stochastic": stochastic, "compress": {"bandwidth_of_clone": compress}, "decompress": {"bandwidth_of_clone": decompress}}

    def bench(*_: object, **__: object) -> Finished:
        rows = [row(False, 0.8, 0.9), row(False, 0.9, 0.7), row(False, 0.7, 0.9), row(True, 0.9, 0.9)]
        (run.work / "codecs.json").write_text(json.dumps({"rows": rows}))
        return Finished(code=0, seconds=1.0, log="")

    run.work.mkdir(parents=True)
    monkeypatch.setattr(run_on_gpu, "run_process", bench)
    assert run_on_gpu.bench_codecs(run)["result"]["goal"] == {"of_copy": 0.8, "rows": 3, "met": 1}


def test_nothing_tested_is_a_failure(run: Run, monkeypatch) -> None:
    """pytest ends with 0 where all is skipped."""
    monkeypatch.setattr(run_on_gpu, "run_process", lambda *_, **__: Finished(code=0, seconds=1.0, log="tests/test_kernels.py::test_a SKIPPED\n"))
    assert (check_kernels(run)["status"], check_kernels(run)["problem"]) == ("failed", "no test passed")


def test_a_stage_that_fails_leaves_the_others(run: Run, monkeypatch) -> None:
    """Every process dies, the last one after its first part: all of it is in both files."""

    def die(command: list[str], *, run: Run, budget_s: float, log: Path) -> Finished:
        if command[1].endswith("update_on_gpu.py"):
            run.work.mkdir()
            Path(command[2]).write_text(json.dumps({"model": {"status": "ok", "seconds": 1.0, "result": {"parameters": 7}}, "profile": {"status": "failed", "seconds": 2.0, "error": "OutOfMemoryError: tried to allocate"}}))
        return Finished(code=-11, seconds=1.0, log="a first line\nSegmentation fault")

    monkeypatch.setattr(run_on_gpu, "run_process", die)
    card = {"status": "ok", "seconds": 1.0, "result": {"name": "NVIDIA H200", "torch": "2.13.0"}}
    assert run_stages(run, card) == 1
    document = json.loads((run.out / "gpu-results.json").read_text())
    assert {name: stage["status"] for name, stage in document["stages"].items()} == {"card": "ok", "kernels": "failed", "codecs": "failed", "update": "failed"}
    assert document["stages"]["update"]["result"]["model"]["result"] == {"parameters": 7}
    assert document["stages"]["codecs"]["said"] == ["a first line", "Segmentation fault"]
    written = (run.out / "gpu-results.md").read_text()
    assert written.startswith("# hilore on NVIDIA H200\n")
    for words in ("parts that are not ok: profile", "OutOfMemoryError: tried to allocate", "parameters 7"):
        assert words in written


def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []
    output = tmp_path / "update.json"

    def part(outcome: object):
        def run_part(_update: Update) -> dict[str, object]:
            seen.append({name: entry["status"] for name, entry in json.loads(output.read_text()).items()} if output.exists() else {})
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return run_part

    parts = {"good": part({"x": 1}), "bad": part(ValueError("no\nsuch")), "missed": part({"y": 2, "problem": "over its cap"}), "after": part(MissingPartError("needs bad"))}
    run_parts(Update(scale=REHEARSAL, device=torch.device("cpu"), work=tmp_path), parts, output=output)
    found = json.loads(output.read_text())
    assert [{key: entry[key] for key in entry if key != "seconds"} for entry in found.values()] == [
        {"status": "ok", "result": {"x": 1}},
        {"status": "failed", "error": "ValueError: no"},
        {"status": "failed", "result": {"y": 2, "problem": "over its cap"}},
        {"status": "skipped", "error": "needs bad"},
    ]
    assert seen[3] == {"good": "ok", "bad": "failed", "missed": "failed"}, "written after each part"


# ------------------------------------------------------------------------------------------------------------- rehearsal


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    """Every stage and every part on a CPU, and the same document cut at every part still reads."""
    finished = subprocess.run([sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=1900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    document = json.loads((tmp_path / "gpu-results.json").read_text())
    stages = document["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(["card", "kernels", "codecs", "update"], "ok")
    assert stages["kernels"]["result"]["counts"]["PASSED"] > 20
    assert {(row["codec"], row["dtype"]) for row in stages["codecs"]["result"]["rows"]} >= {("fbgemm-int8", "float32"), ("mask", "bool")}
    parts = stages["update"]["result"]
    assert list(parts) == ["model", "exactness", "profile", "plan first", "plan exact", "bench", "allocator"]
    exact = parts["exactness"]["result"]["kernels"]["deterministic"]
    assert exact == {name: {"differing": 0, "parameters": exact["none"]["parameters"], "rel_error": 0.0} for name in ("none", "gc", "store", "recompute")}
    assert [row["name"] for row in parts["bench"]["result"]["methods"]] == ["none", "gc", "store", "recompute", "plan", "exact"]
    for name in ("plan first", "plan exact"):
        assert abs(parts[name]["result"]["peak_error"]) < 0.03
    measured = {row["name"]: row["peak_bytes"] for row in parts["bench"]["result"]["methods"]}
    for name, nbytes in parts["profile"]["result"]["predicted_bytes"].items():
        assert abs(nbytes / measured[name] - 1) < 0.03
    written = (tmp_path / "gpu-results.md").read_text()
    assert written == markdown(document)
    assert finished.stdout.endswith(written + "\n")
    for words in ("| first | 1.3x-gc |", "| recompute |  |", "## codecs", "| workspace | 0.00 |", "gradients, deterministic kernels"):
        assert words in written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codecs.log", "gpu-results.json", "gpu-results.md", "kernels.log", "update.log"]
    for name in reversed(list(parts)):
        del parts[name]
        markdown(document)
