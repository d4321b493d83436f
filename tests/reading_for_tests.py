"""Files that reading commands are tested on: a synthetic profile of SmolLM2's layer, two plans, a frozen one and a benchmark of it."""

from __future__ import annotations

from pathlib import Path

from profiles_for_tests import make_profile

from hilore_cli.bench_records import BenchReport, MethodRow, Outcome
from hilore_cli.files import save_json, save_profile
from hilore_cli.planner import solve_plan
from hilore_cli.records import digest_of
from hilore_cli.schema import Estimate, FrozenPlan, Measurement, Plan, Profile, Variant, freeze
from hilore_cli.sizes import parse_cap

ESTIMATE = Estimate(device="h100", time_error=None, relative="smaller", relative_digest="0" * 16)


def solved(profile: Profile, *, cap: str = "1.1x-gc", risk: float = 0.015, codecs: tuple[str, ...] = ("int8",), name: str = "roomy") -> Plan:
    return solve_plan(profile, cap=parse_cap(cap), risk=risk, codecs=list(codecs), name=name)


def frozen_of(plan: Plan, *, measured: bool = True) -> FrozenPlan:
    """What `hilore apply` would write, its dry run a little off the prediction."""
    outcome = Measurement(peak_bytes=plan.predicted.peak_bytes - 4096, gc_peak_bytes=plan.predicted.gc_peak_bytes, rel_error=0.8 * plan.update.rel_error, batch_digest=plan.batch.digest, date="2026-01-02T00:00:00Z")
    same = {name: getattr(plan, name) for name in ("name", "model", "batch", "sources", "estimate", "graph_digests", "head", "budgets", "patterns", "fallback", "predicted", "update")}
    return freeze(
        FrozenPlan(
            **same,
            plan_digest=digest_of(plan),
            layer_fqns=[f"model.layers.{i}" for i in range(len(plan.layers))],
            variants=[Variant(**{key: getattr(v, key) for key in Variant.model_fields}) for v in plan.variants],
            micro_batches=plan.update.micro_batches,
            measured=outcome if measured else None,
        )
    )


def bench_of(frozen: FrozenPlan, profile: Profile) -> BenchReport:
    predicted = Outcome(peak_bytes=frozen.predicted.peak_bytes, step_us=frozen.predicted.step_us, rel_error=frozen.update.rel_error, speedup_vs_gc=frozen.predicted.speedup_vs_gc)
    measured = predicted.model_copy(update={"step_us": 1.04 * predicted.step_us, "speedup_vs_gc": 0.97 * predicted.speedup_vs_gc, "rel_error": 0.7 * predicted.rel_error})
    method = MethodRow(name="gc", wall_us=1.0, cpu_us=1.0, peak_bytes=1, rel_error=0.0, **{f"{stem}{end}": 1.0 for stem in ("speedup", "cpu_speedup", "recovered") for end in ("_low", "_high")}, speedup_vs_gc=1.0, cpu_speedup_vs_gc=1.0, recovered=1.0)
    return BenchReport(
        plan=frozen.name, plan_digest=frozen.digest, date="2026-01-03", machine=profile.machine, batches=[profile.batch], head=profile.head, repeats=3, clock="wall", methods=[method.model_copy(update={"name": name}) for name in ("none", "gc", "plan")], speedup_vs_gc=1.1, ceiling_vs_gc=1.2, recovered=0.5, peak_vs_gc=1.1, rel_error=0.01, predicted=predicted, measured=measured
    )


def write_files(folder: Path, *, layers: int = 6, estimated: bool = False) -> tuple[Profile, Plan]:
    """profiles/synthetic, plans/roomy.plan.json, plans/roomy.json, plans/tight.plan.json, bench.json. Returns the profile and the roomy plan."""
    profile = make_profile(layers=layers)
    if estimated:
        profile = profile.model_copy(update={"estimate": ESTIMATE})
    roomy, tight = solved(profile), solved(profile, cap="1.02x-gc", name="tight")
    frozen = frozen_of(roomy)
    save_profile(profile, folder / "profiles" / profile.name)
    for name, record in (("plans/roomy.plan.json", roomy), ("plans/tight.plan.json", tight), ("plans/roomy.json", frozen), ("bench.json", bench_of(frozen, profile))):
        save_json(record, folder / name)
    return profile, roomy
