"""All that needs a GPU, in one command and under eight minutes: `make gpu`, or in a bare checkout `python tests/run_on_gpu.py`.

    card      what it is, driver and versions, which packages are missing
    kernels   tests/test_kernels.py on the GPU: Triton against the reference, bit for bit
    codecs    `hilore bench --codecs all`: GB/s, and the share of a copy's bandwidth against its goal
    update    tests/update_on_gpu.py: exactness, profile, plans, dry runs and benchmark of a model of 1.2 billion weights in bf16

Each stage is a process of its own with a budget: one that fails, hangs or takes the GPU down loses neither the results of the others nor
its own so far. Everything is in gpu-results.json and, to read, gpu-results.md, in the folder $OUT or ./gpu-results. Without a GPU it says
so and exits 0; `--rehearse` runs every stage on a CPU with tiny sizes. What it does NOT do: install anything, or use the network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
TOTAL_S = 470
REHEARSAL_PATIENCE = 4
"""Times as much for a rehearsal: the cores of a CPU may be shared."""
BANDWIDTH_GOAL = 0.8
"""Of a copy's, for codecs that round to the nearest."""
NEEDED = ("torch", "triton", "transformers", "pytest", "numpy", "pandas", "pyarrow", "pydantic", "pulp", "rich", "safetensors", "typer")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch's deterministic mode asks for it
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

CARD = """
import importlib.metadata, importlib.util, json, os, platform, sys
needed = sys.argv[1].split(",")
found = {"python": platform.python_version(), "cores": os.cpu_count(), "missing": [name for name in needed if importlib.util.find_spec(name) is None]}
for name in ("torch", "triton", "transformers"):
    if name not in found["missing"]:
        found[name] = importlib.metadata.version(name)
if "torch" not in found["missing"]:
    import torch
    found["torch"] = torch.__version__
    found["has_gpu"] = torch.cuda.is_available()
    if found["has_gpu"]:
        card = torch.cuda.get_device_properties(0)
        found |= {"name": card.name, "gib": round(card.total_memory / 2**30, 1), "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1), "multiprocessors": card.multi_processor_count, "capability": f"{card.major}.{card.minor}", "cuda": torch.version.cuda or torch.version.hip}
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of all stages. `out` keeps results and logs; `work` is thrown away."""

    out: Path
    work: Path
    rehearse: bool
    deadline: float

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a stage's process ended: its exit code (None: it ran out of time and was ended), and what it said."""

    code: int | None
    seconds: float
    log: str

    @property
    def status(self) -> str:
        return "ok" if self.code == 0 else "out of time" if self.code is None else "failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes, to see that the script runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hilore-gpu-") as work:
        run = Run(out=arguments.out.resolve(), work=Path(work), rehearse=arguments.rehearse, deadline=time.monotonic() + TOTAL_S * (REHEARSAL_PATIENCE if arguments.rehearse else 1))
        card = look_at_card(run)
        if not card["result"]:
            print(f"the GPU cannot be looked at: {(card.get('said') or [card['status']])[-1]}")
            return 1
        if not run.rehearse and not card["result"].get("has_gpu"):
            reason = card["result"].get("torch") and f"torch {card['result']['torch']} sees none"
            print(f"no GPU here ({reason or 'torch is not installed'}): nothing was run; see it run on a CPU with --rehearse")
            return 0
        return run_stages(run, card)


def run_stages(run: Run, card: dict[str, Any]) -> int:
    """Write the results after each stage; 1 when one of them failed."""
    run.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    document: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "rehearsal": run.rehearse, "stages": {"card": card}}
    stages = {"kernels": check_kernels, "codecs": bench_codecs, "update": run_update}
    write_results(run, document)
    for name, stage in stages.items():
        print(f"{name} ...", flush=True)
        document["stages"][name] = stage(run)
        document["seconds"] = round(time.monotonic() - began)
        write_results(run, document)
        print(f"{name}: {document['stages'][name]['status']}, {document['stages'][name]['seconds']} s", flush=True)
    print((run.out / "gpu-results.md").read_text())
    return int(any(stage["status"] != "ok" for stage in document["stages"].values()))


def write_results(run: Run, document: Mapping[str, Any]) -> None:
    (run.out / "gpu-results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (run.out / "gpu-results.md").write_text(markdown(document), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------- stages


def look_at_card(run: Run) -> dict[str, Any]:
    finished = run_process([sys.executable, "-c", CARD, ",".join(NEEDED)], run=run, budget_s=120, log=run.work / "card.log")
    found = last_json(finished.log)
    if found.get("has_gpu"):
        found["driver"] = driver_version()
    missing = found.get("missing", [])
    return entry(finished, found, problem=f"missing: {', '.join(missing)}" if missing else "")


def check_kernels(run: Run) -> dict[str, Any]:
    """Counts from the log, line by line, so that they are there also when time runs out."""
    several = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") and not run.rehearse else []
    tests = TESTS / ("test_sizes.py" if run.rehearse else "test_kernels.py")
    # -rN: no summary, which would name failures twice
    command = [sys.executable, "-m", "pytest", str(tests), "-v", "-rN", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "--color=no", *several]
    finished = run_process(command, run=run, budget_s=110, log=run.out / "kernels.log")
    outcomes = [(found[1], line) for line in finished.log.splitlines() if "::" in line and (found := OUTCOME.search(line))]
    counts = Counter(outcome for outcome, _ in outcomes)
    failed = [re.sub(r"^.*?(\S+::\S+).*$", r"\1", line) for outcome, line in outcomes if outcome in ("FAILED", "ERROR")]
    return entry(finished, {"tests": tests.name, "counts": dict(counts), "failed": failed}, problem="" if counts["PASSED"] else "no test passed")


def bench_codecs(run: Run) -> dict[str, Any]:
    """The command as a user gives it."""
    report = run.work / "codecs.json"
    sizes = ["--codecs", "fbgemm-int8,mask", "--sizes", "1MiB", "--repeats", "1", "--device", "cpu"] if run.rehearse else ["--codecs", "all", "--repeats", "5", "--device", "cuda"]
    finished = run_process([sys.executable, "-m", "hilore_cli", "bench", *sizes, "-o", str(report)], run=run, budget_s=90, log=run.out / "codecs.log")
    if not report.exists():
        return entry(finished, {}, problem="no report")
    found = json.loads(report.read_text(encoding="utf-8"))
    judged = [row for row in found["rows"] if not row["stochastic"]]
    met = [row for row in judged if min(row[side]["bandwidth_of_clone"] for side in ("compress", "decompress")) >= BANDWIDTH_GOAL]
    return entry(finished, found | {"goal": {"of_copy": BANDWIDTH_GOAL, "rows": len(judged), "met": len(met)}})


def run_update(run: Run) -> dict[str, Any]:
    """All the time that is left."""
    report = run.work / "update.json"
    command = [sys.executable, str(TESTS / "update_on_gpu.py"), str(report), "--work", str(run.work), *(["--rehearse"] if run.rehearse else [])]
    finished = run_process(command, run=run, budget_s=TOTAL_S, log=run.out / "update.log")
    parts = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    failed = [name for name, part in parts.items() if part["status"] != "ok"]
    return entry(finished, parts, problem=f"parts that are not ok: {', '.join(failed)}" if failed else "" if parts else "no part was finished")


def entry(finished: Finished, result: dict[str, Any], *, problem: str = "") -> dict[str, Any]:
    """What is kept of a stage; of one that went wrong also the last lines that it said."""
    status = finished.status if finished.status != "ok" or not problem else "failed"
    kept = {"status": status, "seconds": round(finished.seconds, 1), "result": result}
    return kept if status == "ok" else kept | {"problem": problem or f"exit code {finished.code}", "said": finished.log.strip().splitlines()[-12:]}


# ------------------------------------------------------------------------------------------------------------- processes


def run_process(command: Sequence[str], *, run: Run, budget_s: float, log: Path) -> Finished:
    """Run a stage in a process group of its own, its output in a file; the group is ended when its budget or the whole time is spent."""
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    environment.pop("TRITON_INTERPRET", None)
    code: int | None = None
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=max(1.0, min(budget_s * (REHEARSAL_PATIENCE if run.rehearse else 1), run.left_s())))
        finally:
            end_group(process)
    return Finished(code=code, seconds=time.monotonic() - started, log=log.read_text(encoding="utf-8", errors="replace"))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a stage: itself and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_json(log: str) -> dict[str, Any]:
    """The last line that is a JSON object; empty where there is none."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {}


def driver_version() -> str:
    try:
        found = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (found.stdout.strip().splitlines() or ["unknown"])[0]


def commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


# -------------------------------------------------------------------------------------------------------------- Markdown


def markdown(document: Mapping[str, Any]) -> str:
    """The results to read. Every part stands alone: what a stage did not reach is left out."""
    stages = document["stages"]
    card = stages["card"]["result"]
    lines = [
        f"# hilore on {card.get('name', 'a CPU (rehearsal: these figures mean nothing)')}",
        "",
        f"{document['date']}, commit {document['commit']}; " + ", ".join(f"{key} {card[key]}" for key in ("driver", "cuda", "torch", "triton", "transformers", "python") if key in card),
        "",
        *table(["stage", "status", "seconds", "problem"], [[name, stage["status"], stage["seconds"], stage.get("problem", "")] for name, stage in stages.items()]),
    ]
    writers = {"kernels": kernel_lines, "codecs": codec_lines, "update": update_lines}
    for name, write in writers.items():
        if stages.get(name, {}).get("result"):
            lines += ["", f"## {name}", "", *write(stages[name]["result"])]
    return "\n".join(lines) + "\n"


def kernel_lines(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(result["counts"].items()))
    return [f"{result['tests']}: {counts or 'no test was finished'}", *(f"* failed: `{name}`" for name in result["failed"][:20])]


def codec_lines(result: Mapping[str, Any]) -> list[str]:
    if not result.get("rows"):
        return []
    goal = result["goal"]
    rows = [
        [row["codec"], row["dtype"], f"{row['nbytes'] / 2**20:.0f}", *(text for side in ("compress", "decompress") for text in (f"{row[side]['gb_per_s']:.0f}", f"{row[side]['bandwidth_of_clone']:.2f}")), row["break_even_width"], f"{row['clone_gb_per_s']:.0f}"]
        for row in result["rows"]
    ]
    return [
        f"Bandwidth of a copy, tensor and payload counted; goal {goal['of_copy']:.0%} of it for rounding to the nearest: met in {goal['met']} of {goal['rows']} rows.",
        "",
        *table(["codec", "of", "MiB", "in GB/s", "of copy", "out GB/s", "of copy", "break-even K", "clone GB/s"], rows),
    ]


def update_lines(parts: Mapping[str, Any]) -> list[str]:
    lines = table(["part", "status", "seconds", "problem"], [[name, part["status"], part["seconds"], part.get("error") or part.get("result", {}).get("problem", "")] for name, part in parts.items()])
    results = {name: part["result"] for name, part in parts.items() if part.get("result")}
    if "model" in results:
        lines += ["", ", ".join(f"{key} {value}" for key, value in results["model"].items())]
    for kernels, rows in results.get("exactness", {}).get("kernels", {}).items():
        lines += ["", *table([f"gradients, {kernels} kernels", "differing", "of", "rel_error"], [[name, row["differing"], row["parameters"], f"{row['rel_error']:.2e}"] for name, row in rows.items()])]
    if "profile" in results:
        lines += ["", *table(["account", "MiB"], [[key.removesuffix("_bytes"), f"{value / 2**20:.2f}"] for key, value in results["profile"]["account"].items()])]
    plans = {name.removeprefix("plan "): result for name, result in results.items() if name.startswith("plan ")}
    lines += ["", *peak_lines(plans, results)]
    if "bench" in results:
        bench = results["bench"]
        rows = [[row["name"], f"{row['wall_us'] / 1e3:.1f}", f"{100 * (row['speedup_vs_gc'] - 1):+.1f} %", f"{100 * (row['speedup_low'] - 1):+.1f} .. {100 * (row['speedup_high'] - 1):+.1f}", f"{row['recovered']:.2f}", f"{row['rel_error']:.2e}"] for row in bench["methods"]]
        lines += ["", f"{bench['repeats']} interleaved updates, wall time between synchronisations, ratios paired:", "", *table(["method", "ms", "vs GC", "interval", "recovered", "gradient error"], rows)]
    if "none" in results.get("allocator", {}) and "gc" in results["allocator"]:
        rows = [[name, *(f"{row[which] / 2**20:.0f}" for which in ("requested", "allocated", "reserved"))] for name, row in results["allocator"].items() if name != "static"]
        lines += ["", *table(["allocator's peaks, MiB", "requested", "allocated", "reserved"], rows)]
    return lines


def peak_lines(plans: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """Predicted against measured bytes: of the dry runs, and of the runtime's uniform plans."""
    rows = [[name, plan["cap"], plan["predicted"]["peak_bytes"], plan["measured"]["peak_bytes"], f"{plan['measured']['rel_error']:.2e} of {plan['risk']:g}", f"{plan['predicted']['recovered']:.2f}"] for name, plan in plans.items()]
    measured = {row["name"]: row for row in results.get("bench", {}).get("methods", [])}
    predicted = results.get("profile", {}).get("predicted_bytes", {})
    rows += [[name, "", nbytes, measured[name]["peak_bytes"], f"{measured[name]['rel_error']:.2e}", ""] for name, nbytes in predicted.items() if name in measured]
    return table(["peak of", "cap", "predicted bytes", "measured bytes", "off by", "gradient error", "recovered (predicted)"], [[*row[:4], f"{100 * (row[2] / row[3] - 1):+.3f} %", *row[4:]] for row in rows])


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)] if rows else []


if __name__ == "__main__":
    sys.exit(main())
