"""Methods side by side, and the dry run that binds a plan to a model.

Everything is measured in one process on the micro-batches of one update: peaks from allocator events, gradients against gradients, times
interleaved and compared in pairs. What it does NOT do: choose methods to flatter a plan; checkpointing is Hugging Face's own,
with torch's early stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import comb
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from hilore_cli.batches import MicroBatch, require_gradient, skip_zero_rows
from hilore_cli.bench_records import BenchReport, MethodRow, Outcome
from hilore_cli.capture import model_identity
from hilore_cli.errors import PlanMismatchError
from hilore_cli.grpo import GrpoConfig, relative_error
from hilore_cli.identities import batch_identity, describe_machine, update_digest
from hilore_cli.models import decoder_layers
from hilore_cli.records import digest_of
from hilore_cli.runtime import check_identity
from hilore_cli.schema import FrozenPlan, Measurement, Plan, Variant, freeze, variant_for
from hilore_cli.sizes import format_bytes
from hilore_cli.workbench import SKIP, Progress, Workbench

SMALLEST_ERROR = 1e-300
"""What an error that rounds to zero is reported as when gradients are not bitwise equal."""


def apply_plan(model: nn.Module, plan: Plan, batches: Sequence[MicroBatch], *, heldout: Sequence[MicroBatch] = (), emit_anyway: bool, progress: Progress, name: str | None = None) -> FrozenPlan:
    """Bind a plan to a model: check the fingerprint, run one update under it (`dry_run`), compare with the prediction, freeze.

    Raises PlanMismatchError with the figures when the dry run misses the cap or the risk budget, unless `emit_anyway`.
    """
    check_identity(model_identity(model, source=plan.model.source), plan.model, name=plan.name)
    measured, noise = dry_run(model, plan, batches, heldout=heldout, progress=progress)
    if not emit_anyway:
        whole = len(heldout or batches) >= plan.update.micro_batches or len(plan.variants) == 1
        _refuse_miss(plan, measured, allowed=2 * noise + (plan.budgets.risk if whole else max(variant.risk for variant in plan.variants)))
    return freeze(
        FrozenPlan(
            name=name or plan.name,
            plan_digest=digest_of(plan),
            model=plan.model,
            batch=plan.batch,
            sources=plan.sources,
            estimate=plan.estimate,
            graph_digests=plan.graph_digests,
            head=plan.head,
            budgets=plan.budgets,
            patterns=plan.patterns,
            layer_fqns=[fqn for fqn, _ in decoder_layers(model)],
            fallback=plan.fallback,
            variants=_bare(plan.variants),
            micro_batches=plan.update.micro_batches,
            predicted=plan.predicted,
            update=plan.update,
            measured=measured,
        )
    )


def dry_run(model: nn.Module, plan: Plan | FrozenPlan, batches: Sequence[MicroBatch], *, heldout: Sequence[MicroBatch] = (), progress: Progress) -> tuple[Measurement, float]:
    """One update under a plan: its peak on `batches`, the micro-batches of one update; the gradient error of all together on
    `heldout` when there are any. With the relative difference of exact gradients from one time to the next (0 on a CPU).
    """
    judges = list(heldout) or list(batches)
    require_gradient(judges)
    for batch in (*batches, *judges):
        batch.validate()
        check_size(plan.name, plan.variants, batch)
    bench = Workbench(model, batches, GrpoConfig(head=plan.head))
    bench.add_plan("plan", plan.patterns, _bare(plan.variants), fallback=plan.fallback, graph_digests=plan.graph_digests, micro_batches=plan.update.micro_batches, rule=plan.budgets.exposure_rule)
    progress("dry run: gradients", 0, 3)
    bench.batches = judges
    exact = bench.gradients_by("gc")
    error = gradient_error(bench.gradients_by("plan"), exact)
    noise = 0.0 if bench.device.type == "cpu" else gradient_error(bench.gradients_by("gc"), exact)
    del exact
    bench.batches = list(batches)
    progress("dry run: peak of the plan", 1, 3)
    peak = bench.peak_bytes("plan")
    progress("dry run: peak of checkpointing", 2, 3)
    profiled = plan.batch.digest in {batch_identity(batch, source="").digest for batch in batches}
    gc_peak = plan.predicted.gc_peak_bytes if profiled else bench.peak_bytes("gc")  # the profile measured it on its largest micro-batch
    return Measurement(peak_bytes=peak, gc_peak_bytes=gc_peak, rel_error=error, batch_digest=update_digest(judges), date=today()), noise


def _bare(variants: Sequence[Variant]) -> list[Variant]:
    """Without what is predicted of them."""
    return [Variant(**variant.model_dump(include=set(Variant.model_fields))) for variant in variants]


def run_bench(model: nn.Module, plan: FrozenPlan, batches: Sequence[tuple[str, MicroBatch]], *, repeats: int, progress: Progress, also: Sequence[str] = (), others: Mapping[str, FrozenPlan] | None = None, skip: bool = False) -> BenchReport:
    """none, gc, the plan and more, on one update of the micro-batches (with their sources): gradient errors, peaks, then `repeats`
    interleaved updates of each.

    `also`: "store", "recompute" (the runtime's two uniform plans); `others`: further plans by the name of their row; `skip`: gc and
    the plan once more without the rows of zero exposure. Raises PlanMismatchError, and UsageError where skipping is not exact.
    """
    require_gradient([batch for _, batch in batches])
    plans = {"plan": plan, **(others or {})}
    bench = Workbench(model, [batch for _, batch in batches], GrpoConfig(head=plan.head))
    add_plans(bench, plans)
    methods = ["none", "gc", *also, *plans, *([f"gc{SKIP}", f"plan{SKIP}"] if skip else [])]
    if skip:
        bench.skipping = skipped(bench.batches)
    clock = clock_of(bench.device)
    rows = compare_methods(bench, methods, repeats=repeats, clock=clock, progress=progress)
    ours = rows["plan"]
    gain = {name: row.cpu_speedup_vs_gc if clock == "cpu" else row.speedup_vs_gc for name, row in rows.items()}
    predicted = plan.predicted
    several = len(batches) > 1
    step_us, gc_us, rel_error = (plan.update.step_us, plan.update.gc_us, plan.update.rel_error) if several else (predicted.step_us, predicted.gc_us, predicted.rel_error)
    return BenchReport(
        plan=plan.name,
        plan_digest=plan.digest,
        date=today(),
        machine=describe_machine(bench.device),
        batches=[batch_identity(batch, source=source) for source, batch in batches],
        head=plan.head,
        repeats=repeats,
        clock=clock,
        methods=[rows[name] for name in methods],
        speedup_vs_gc=gain["plan"],
        ceiling_vs_gc=gain["none"],
        recovered=ours.recovered,
        peak_vs_gc=ours.peak_bytes / rows["gc"].peak_bytes,
        rel_error=ours.rel_error,
        predicted=Outcome(peak_bytes=predicted.peak_bytes, step_us=step_us, rel_error=rel_error, speedup_vs_gc=gc_us / step_us),
        measured=Outcome(peak_bytes=ours.peak_bytes, step_us=ours.wall_us, rel_error=ours.rel_error, speedup_vs_gc=gain["plan"]),
    )


def compare_methods(bench: Workbench, methods: Sequence[str], *, repeats: int, clock: str, progress: Progress) -> dict[str, MethodRow]:
    """Gradients against those of the first method, peaks, then interleaved updates; none and gc must be among them. `clock`: of what is recovered."""
    errors, peaks = {}, {}
    exact: dict[str, Tensor] = {}
    for position, name in enumerate(methods):
        progress("comparing gradients", position, len(methods))
        gradient = bench.gradients_by(name)
        exact = exact or gradient
        errors[name] = gradient_error(gradient, exact)
    del exact, gradient
    for position, name in enumerate(reversed(methods)):
        progress("measuring peaks", position, len(methods))
        peaks[name] = bench.peak_bytes(name)
    samples = bench.time_updates(methods, repeats=repeats, progress=progress)
    return {name: _method_row(name, samples, peak=peaks[name], error=errors[name], clock=clock) for name in methods}


def clock_of(device: torch.device) -> Literal["wall", "cpu"]:
    """Whose ratios are told: those of CPU time where one thread runs, which are steadier."""
    return "cpu" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"


def add_plans(bench: Workbench, plans: Mapping[str, FrozenPlan]) -> None:
    """Make frozen plans methods of a bench, by the name of their row. Raises PlanMismatchError for another model, and for larger micro-batches."""
    for name, one in plans.items():
        check_identity(model_identity(bench.model, source=one.model.source), one.model, name=one.name)
        for batch in bench.batches:
            batch.validate()
            check_size(one.name, one.variants, batch)
        bench.add_plan(name, one.patterns, one.variants, fallback=one.fallback, graph_digests=one.graph_digests, micro_batches=one.micro_batches, rule=one.budgets.exposure_rule)


def check_size(plan: str, variants: Sequence[Variant], micro_batch: MicroBatch) -> None:
    """Raise PlanMismatchError for a micro-batch above the plan's largest variant: every layer would be recomputed. One without
    any gradient, which no profile can measure, may be.
    """
    length = micro_batch.shape[1]
    if micro_batch.has_gradient and variant_for(variants, tokens=micro_batch.tokens, length=length) is None:
        largest = max(variants, key=lambda v: v.max_tokens)
        raise PlanMismatchError(f"plan {plan}: holds for up to {largest.max_tokens} tokens in rows of up to {largest.max_length}, the micro-batch has {micro_batch.tokens} in rows of {length}; above it every layer is recomputed. Profile a micro-batch of this size")


def skipped(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches without their rows of zero exposure, those without any left out. Raises UsageError where that is not exact."""
    return [kept for batch in batches if (kept := skip_zero_rows(batch)) is not None]


def gradient_error(gradient: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error over all parameters; exactly 0 only when every gradient is bitwise equal."""
    if all(torch.equal(gradient[name], exact[name]) for name in exact):
        return 0.0
    error = relative_error(gradient, exact)
    if not math.isfinite(error):
        raise PlanMismatchError("the plan's gradient is not finite where the exact one is; a codec cannot hold what this micro-batch puts into it: plan with other --codecs, or with --risk 0")
    return max(error, SMALLEST_ERROR)


def paired_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Interval of the median: order statistics with at least 95 % confidence from 6 samples on (sign test), else the range."""
    ordered = sorted(ratios)
    n, k = len(ordered), 0
    while k + 1 < n / 2 and 1 - 2 * sum(comb(n, i) for i in range(k + 2)) / 2**n >= 0.95:
        k += 1
    return ordered[k], ordered[n - 1 - k]


def _refuse_miss(plan: Plan, measured: Measurement, *, allowed: float) -> None:
    """`allowed`: the risk budget is that of an update; judged on a part of one, a variant may bring its own risk. On a GPU whose exact
    gradients differ from one time to the next, twice that is let through."""
    budgets = plan.budgets
    if measured.peak_bytes > budgets.cap_bytes:
        raise PlanMismatchError(
            f"plan {plan.name}: the dry run peaked at {format_bytes(measured.peak_bytes)}, over its cap of {format_bytes(budgets.cap_bytes)} "
            f"(predicted {format_bytes(plan.predicted.peak_bytes)}); plan again with a lower --mem-cap, or emit it with --emit-anyway"
        )
    if measured.rel_error > allowed:
        raise PlanMismatchError(
            f"plan {plan.name}: the dry run's gradient error is {measured.rel_error:.3g}, over its risk budget of {allowed:.3g} "
            f"(predicted {plan.update.rel_error:.3g}); plan again with a lower --risk, or emit it with --emit-anyway"
        )


def _method_row(name: str, samples: dict[str, list[tuple[float, float]]], *, peak: int, error: float, clock: str) -> MethodRow:
    which = 1 if clock == "cpu" else 0
    recovered = [recovered_share(gc[which], own[which], none[which]) for gc, own, none in zip(samples["gc"], samples[name], samples["none"], strict=True)]
    ratios = [gc / own for (gc, _), (own, _) in zip(samples["gc"], samples[name], strict=True)]
    cpu_ratios = [gc / own for (_, gc), (_, own) in zip(samples["gc"], samples[name], strict=True)]
    low, high = paired_interval(ratios)
    cpu_low, cpu_high = paired_interval(cpu_ratios)
    return MethodRow(
        name=name,
        wall_us=median(wall for wall, _ in samples[name]),
        cpu_us=median(cpu for _, cpu in samples[name]),
        peak_bytes=peak,
        rel_error=error,
        speedup_vs_gc=median(ratios),
        speedup_low=low,
        speedup_high=high,
        cpu_speedup_vs_gc=median(cpu_ratios),
        cpu_speedup_low=cpu_low,
        cpu_speedup_high=cpu_high,
        recovered=median(recovered),
        recovered_low=paired_interval(recovered)[0],
        recovered_high=paired_interval(recovered)[1],
    )


def recovered_share(gc: float, own: float, none: float) -> float:
    """(T_gc - T_plan) / (T_gc - T_none); 0 where checkpointing cost nothing."""
    return (gc - own) / (gc - none) if gc > none else 0.0


def today() -> str:
    return datetime.now(UTC).date().isoformat()
