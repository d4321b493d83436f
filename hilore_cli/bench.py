"""Methods side by side, and the dry run that binds a plan to a model.

Everything is measured in one process on one micro-batch: peaks from allocator events, gradients against gradients, times
interleaved and compared in pairs. What it does NOT do: choose methods to flatter a plan; checkpointing is Hugging Face's own,
with torch's early stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from math import comb
from statistics import median

import torch
from torch import Tensor, nn

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import model_identity
from hilore_cli.errors import PlanMismatchError
from hilore_cli.grpo import config_of, relative_error
from hilore_cli.models import decoder_layers
from hilore_cli.profiler import batch_identity, describe_machine
from hilore_cli.runtime import check_identity
from hilore_cli.schema import BenchReport, FrozenPlan, Measurement, MethodRow, Outcome, Plan, Variant, digest_of, freeze
from hilore_cli.sizes import format_bytes
from hilore_cli.workbench import Progress, Workbench

UNIFORM_METHODS = ("store", "recompute")
SMALLEST_ERROR = 1e-300
"""What an error that rounds to zero is reported as when gradients are not bitwise equal."""


def apply_plan(model: nn.Module, plan: Plan, micro_batch: MicroBatch, *, heldout: MicroBatch | None, emit_anyway: bool, progress: Progress, name: str | None = None) -> FrozenPlan:
    """Bind a plan to a model: check the fingerprint, run one update under it, compare with the prediction, freeze.

    The peak is measured on `micro_batch`; the gradient error on `heldout` when there is one. Raises PlanMismatchError with
    the figures when the dry run misses the cap or the risk budget, unless `emit_anyway`.
    """
    check_identity(model_identity(model, source=plan.model.source), plan.model, name=plan.name)
    fqns = [fqn for fqn, _ in decoder_layers(model)]
    variant = Variant(max_tokens=plan.batch.tokens, max_length=plan.batch.length, layers=plan.layers)
    judge = heldout or micro_batch
    for batch in (micro_batch, judge):
        batch.validate()
        layers_for(plan.name, [variant], batch)
    bench = Workbench(model, micro_batch, config_of(micro_batch, head=plan.head))
    bench.method("plan", plan.patterns, plan.layers)
    progress("dry run: gradients", 0, 3)
    bench.micro_batch = judge
    exact = bench.gradients_by("gc")
    error = gradient_error(bench.gradients_by("plan"), exact)
    del exact
    bench.micro_batch = micro_batch
    progress("dry run: peak of the plan", 1, 3)
    peak = bench.peak_bytes("plan")
    progress("dry run: peak of checkpointing", 2, 3)
    profiled = batch_identity(micro_batch, source="", task="").digest == plan.batch.digest
    gc_peak = plan.predicted.gc_peak_bytes if profiled else bench.peak_bytes("gc")  # the profile measured it on this very update
    measured = Measurement(peak_bytes=peak, gc_peak_bytes=gc_peak, rel_error=error, batch_digest=batch_identity(judge, source="", task="").digest, date=_today())
    if not emit_anyway:
        _refuse_miss(plan, measured)
    return freeze(
        FrozenPlan(
            name=name or plan.name,
            plan_digest=digest_of(plan),
            model=plan.model,
            batch=plan.batch,
            graph_digests=plan.graph_digests,
            head=plan.head,
            budgets=plan.budgets,
            patterns=plan.patterns,
            layer_fqns=fqns,
            variants=[variant],
            predicted=plan.predicted,
            measured=measured,
        )
    )


def run_bench(model: nn.Module, plan: FrozenPlan, micro_batch: MicroBatch, *, source: str, task: str, repeats: int, progress: Progress, also: Sequence[str] = ()) -> BenchReport:
    """none, gc, the plan and `also` ("store", "recompute": the runtime's two uniform plans): gradient errors, peaks, then `repeats`
    interleaved updates of each. Raises PlanMismatchError.
    """
    check_identity(model_identity(model, source=plan.model.source), plan.model, name=plan.name)
    micro_batch.validate()
    bench = Workbench(model, micro_batch, config_of(micro_batch, head=plan.head))
    bench.method("plan", plan.patterns, layers_for(plan.name, plan.variants, micro_batch), plan.fallback)
    methods = ("none", "gc", *also, "plan")
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
    rows = {name: _method_row(name, samples, peak=peaks[name], error=errors[name]) for name in methods}
    ours = rows["plan"]
    clock = "cpu" if torch.get_num_threads() == 1 else "wall"
    gain = {name: row.cpu_speedup_vs_gc if clock == "cpu" else row.speedup_vs_gc for name, row in rows.items()}
    predicted = plan.predicted
    return BenchReport(
        plan=plan.name,
        plan_digest=plan.digest,
        date=_today(),
        machine=describe_machine(bench.device),
        batch=batch_identity(micro_batch, source=source, task=task),
        head=plan.head,
        repeats=repeats,
        clock=clock,
        methods=[rows[name] for name in methods],
        speedup_vs_gc=gain["plan"],
        ceiling_vs_gc=gain["none"],
        recovered=recovered_share(gain["plan"], gain["none"]),
        peak_vs_gc=ours.peak_bytes / rows["gc"].peak_bytes,
        rel_error=ours.rel_error,
        predicted=Outcome(peak_bytes=predicted.peak_bytes, step_us=predicted.step_us, rel_error=predicted.rel_error, speedup_vs_gc=predicted.speedup_vs_gc),
        measured=Outcome(peak_bytes=ours.peak_bytes, step_us=ours.wall_us, rel_error=ours.rel_error, speedup_vs_gc=gain["plan"]),
    )


def layers_for(plan: str, variants: Sequence[Variant], micro_batch: MicroBatch) -> list[str]:
    """The patterns of the variant that a micro-batch runs under. Raises PlanMismatchError when it is above the largest."""
    length = micro_batch.input_ids.shape[1]
    for variant in sorted(variants, key=lambda v: v.max_tokens):
        if variant.holds(tokens=micro_batch.tokens, length=length):
            return variant.layers
    largest = max(variants, key=lambda v: v.max_tokens)
    raise PlanMismatchError(f"plan {plan}: holds for up to {largest.max_tokens} tokens in rows of up to {largest.max_length}, the micro-batch has {micro_batch.tokens} in rows of {length}; above it every layer is recomputed. Profile a micro-batch of this size")


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


def _refuse_miss(plan: Plan, measured: Measurement) -> None:
    budgets = plan.budgets
    if measured.peak_bytes > budgets.cap_bytes:
        raise PlanMismatchError(
            f"plan {plan.name}: the dry run peaked at {format_bytes(measured.peak_bytes)}, over its cap of {format_bytes(budgets.cap_bytes)} "
            f"(predicted {format_bytes(plan.predicted.peak_bytes)}); plan again with a lower --mem-cap, or emit it with --emit-anyway"
        )
    if measured.rel_error > budgets.risk:
        raise PlanMismatchError(
            f"plan {plan.name}: the dry run's gradient error is {measured.rel_error:.3g}, over its risk budget of {budgets.risk:.3g} "
            f"(predicted {plan.predicted.rel_error:.3g}); plan again with a lower --risk, or emit it with --emit-anyway"
        )


def _method_row(name: str, samples: dict[str, list[tuple[float, float]]], *, peak: int, error: float) -> MethodRow:
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
    )


def recovered_share(plan_gain: float, none_gain: float) -> float:
    """(T_gc - T_plan) / (T_gc - T_none) from the two speed-ups over T_gc; 0 where checkpointing cost nothing."""
    return (1 - 1 / plan_gain) / (1 - 1 / none_gain) if none_gain > 1 else 0.0


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
