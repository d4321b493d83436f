"""Ablations, solved and then run side by side: one process, one update, interleaved, as in bench.py.

    report = run_ablations(profile, cap=cap, risk=0.015, codecs=codecs, model=model, batches=batches, repeats=5, progress=progress)

Without a model nothing is run: figures are then the predictions alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hilore_cli.ablation_records import AblationMeasurement, AblationReport, AblationRow
from hilore_cli.ablations import Ablation, solve_ablations, solve_updates
from hilore_cli.batches import MicroBatch, require_gradient
from hilore_cli.bench import clock_of, compare_methods, today
from hilore_cli.bench_records import MethodRow
from hilore_cli.capture import model_identity
from hilore_cli.grpo import GrpoConfig
from hilore_cli.identities import batch_identity, describe_machine
from hilore_cli.planner import PatternNames
from hilore_cli.runtime import check_identity
from hilore_cli.schema import Profile, Variant
from hilore_cli.sizes import Cap
from hilore_cli.workbench import UNLIMITED_TOKENS, Progress, Workbench


def run_ablations(
    profile: Profile,
    *,
    cap: Cap,
    risk: float,
    codecs: Sequence[str],
    model: nn.Module | None = None,
    batches: Sequence[tuple[str, MicroBatch]] = (),
    repeats: int = 0,
    progress: Progress,
) -> AblationReport:
    """Solve each, and where there is a model run each on the micro-batches. Raises InfeasibleError, PlanMismatchError, UsageError."""
    if model is not None:
        require_gradient([batch for _, batch in batches])
        check_identity(model_identity(model, source=profile.model.source), profile.model, name=profile.name)
    cap_bytes = cap.resolve(gc_bytes=profile.peaks.gc_bytes, none_bytes=profile.peaks.none_bytes)
    found = solve_ablations(profile, cap_bytes=cap_bytes, risk=risk, codecs=codecs, progress=progress)
    bench = None if model is None else Workbench(model, [batch for _, batch in batches], GrpoConfig(head=profile.head))
    clock = "wall" if bench is None else clock_of(bench.device)
    measured = {} if bench is None else measure_ablations(bench, profile, found, repeats=repeats, clock=clock, progress=progress)
    return AblationReport(
        date=today(),
        profile=profile.name,
        model=profile.model,
        estimated=profile.estimate is not None,
        machine=None if bench is None else describe_machine(bench.device),
        batches=[batch_identity(batch, source=source) for source, batch in batches],
        cap_bytes=cap_bytes,
        risk=risk,
        codecs=list(codecs),
        repeats=repeats,
        clock=clock,
        gc_us=profile.times.gc_us,
        none_us=profile.times.none_us,
        rows=[
            AblationRow(
                name=one.name,
                patterns=len(set(one.layers)),
                predicted=one.predicted,
                fits=one.predicted.peak_bytes <= cap_bytes,
                within_risk=one.predicted.rel_error <= risk * (1 + 1e-9),
                measured=measured.get(one.name),
            )
            for one in found
        ],
        update=solve_updates(profile, cap=cap, risk=risk, codecs=codecs, progress=progress),
    )


def measure_ablations(bench: Workbench, profile: Profile, ablations: Sequence[Ablation], *, repeats: int, clock: str, progress: Progress) -> dict[str, AblationMeasurement]:
    """Each as a plan beside none and gc (bench.py)."""
    for one in ablations:
        names = PatternNames()
        layers = names.of(one.layers)
        bench.add_plan(one.name, names.patterns(), [Variant(max_tokens=UNLIMITED_TOKENS, layers=layers)], fallback=profile.fallback, graph_digests=profile.graph_digests)
    rows = compare_methods(bench, ["none", "gc", *(one.name for one in ablations)], repeats=repeats, clock=clock, progress=progress)
    return {one.name: _measurement(rows[one.name], clock=clock) for one in ablations}


def _measurement(row: MethodRow, *, clock: str) -> AblationMeasurement:
    """What the report's clock says."""
    step_us, gain, low, high = (row.cpu_us, row.cpu_speedup_vs_gc, row.cpu_speedup_low, row.cpu_speedup_high) if clock == "cpu" else (row.wall_us, row.speedup_vs_gc, row.speedup_low, row.speedup_high)
    return AblationMeasurement(step_us=step_us, peak_bytes=row.peak_bytes, rel_error=row.rel_error, speedup_vs_gc=gain, speedup_low=low, speedup_high=high, recovered=row.recovered)
