"""Does what is committed still hold? Plans and frozen plans against their profiles, this hilore and the installed solver.

    report = check_files(find_plans([]), profiles=Path("profiles"), limits=Limits())

For each plan: the file reads; its profile is there and is the one it was planned from; its patterns, evaluated again in integers without
the solver, keep cap and risk, and the figures have not grown over the committed ones; and solving again gives the same plan, byte for
byte. Another build of the solver may take another of several equally good plans: there the bound of the relaxation must be the same,
and the new plan no slower than the committed one by more than the gap. A frozen plan is compared with the plan that it was made from.
What needs the model (its fingerprint, a dry run) is in check_model.py: this file loads no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hilore_cli
from hilore_cli.check_records import Check, CheckReport, FileChecks, Limits
from hilore_cli.errors import HiloreError, PlanMismatchError, ProfileError, UsageError
from hilore_cli.files import digests_of, load_frozen_plan, load_plan_file, load_profile
from hilore_cli.ilp import solver_version
from hilore_cli.planner import FEWEST, Update, solve_plan
from hilore_cli.scaling import profile_at
from hilore_cli.schema import MASK_CODEC, FrozenPlan, Pattern, Plan, Prediction, Profile, variant_for
from hilore_cli.sizes import format_bytes, format_gain, format_us, parse_cap
from hilore_cli.step_planner import GAP_OF_STEP, StepPlanner
from hilore_cli.timeline import simulate_step

BOUND_TOLERANCE = 1e-6
"""Relative difference of the relaxation's objective between two solvers."""
ROUNDING = 1e-9
"""Relative difference of floats below which figures are called equal: sums in another order."""

ModelChecks = Callable[["Committed"], list[Check]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A file that was read, and of a frozen plan the plan that it was made from, where it is at hand."""

    path: Path
    record: Plan | FrozenPlan
    plan: Plan | None


def passed(name: str, detail: str) -> Check:
    return Check(name=name, status="passed", detail=detail)


def failed(name: str, detail: str) -> Check:
    return Check(name=name, status="failed", detail=detail)


def skipped(name: str, detail: str) -> Check:
    return Check(name=name, status="skipped", detail=detail)


# ---------------------------------------------------------------------------------------------------------------- files


def find_plans(paths: Sequence[Path]) -> list[Path]:
    """Plans and frozen plans: files as they are named, and those in folders (whatever else lies there is left out).

    Raises UsageError for a path that does not exist, PlanMismatchError where there is no plan.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder; give plans, or a folder of them")
        found += [path] if path.is_file() else [file for file in sorted(path.glob("*.json")) if is_plan_file(file)]
    if not found:
        raise PlanMismatchError(f"{', '.join(map(str, paths))}: no plans to check; make one with `hilore plan`")
    return list(dict.fromkeys(found))


def is_plan_file(path: Path) -> bool:
    """False for JSON of another format, such as a benchmark; what cannot be read is for the check to say."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(document, dict) or document.get("format", "hilore-plan") in ("hilore-plan", "hilore-frozen-plan")


def check_files(paths: Sequence[Path], *, profiles: Path, limits: Limits, model_checks: ModelChecks | None = None, progress: Progress = lambda what, done, total: None) -> CheckReport:
    """Every check of every file. `profiles`: folder that holds a folder for each profile. Raises nothing for a file that does not hold."""
    files = []
    for position, path in enumerate(paths):
        progress(f"checking {path.name}", position, len(paths))
        files.append(check_file(path, profiles=profiles, limits=limits, model_checks=model_checks))
    count = {status: sum(check.status == status for file in files for check in file.checks) for status in ("passed", "failed", "skipped")}
    return CheckReport(date=datetime.now(UTC).date().isoformat(), hilore=hilore_cli.__version__, solver=solver_version(), limits=limits, files=files, **count)


def check_file(path: Path, *, profiles: Path, limits: Limits, model_checks: ModelChecks | None = None) -> FileChecks:
    """All checks of one plan or frozen plan."""
    try:
        committed = read_committed(path)
    except HiloreError as error:
        return FileChecks(path=str(path), kind="unreadable", profile=None, estimated=False, checks=[failed("file", str(error))])
    record, plan = committed.record, committed.plan
    checks = [passed("file", f"{record.format}, read by version {record.version}")]
    if isinstance(record, FrozenPlan):
        checks += frozen_checks(committed)
    else:
        checks += plan_checks(record, profiles=profiles, limits=limits)
    if model_checks is not None:
        checks += model_checks(committed)
    kind = "frozen plan" if isinstance(record, FrozenPlan) else "plan"
    return FileChecks(path=str(path), kind=kind, profile=plan.profile if plan else None, estimated=record.estimate is not None, checks=checks)


def read_committed(path: Path) -> Committed:
    """A plan by its format, a frozen plan with the plan beside it. Raises PlanMismatchError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        frozen = isinstance(document, dict) and document.get("format") == "hilore-frozen-plan"
    except (OSError, ValueError):
        frozen = False  # load_plan_file says what is wrong
    if not frozen:
        plan = load_plan_file(path)
        return Committed(path=path, record=plan, plan=plan)
    record = load_frozen_plan(path)
    return Committed(path=path, record=record, plan=next((plan for plan in plans_beside(path) if record.plan_digest in digests_of(plan)), None))


def plans_beside(path: Path) -> Iterator[Plan]:
    """Plans in a frozen plan's folder, as far as they can be read; each is checked by itself."""
    for file in sorted(path.parent.glob("*.plan.json")):
        try:
            yield load_plan_file(file)
        except PlanMismatchError:
            continue


def frozen_beside(committed: Committed) -> Path | None:
    """The frozen plan in a solved plan's folder that was made from it."""
    if isinstance(committed.record, FrozenPlan):
        return None
    known = digests_of(committed.record)
    for file in sorted(set(committed.path.parent.glob("*.json")) - set(committed.path.parent.glob("*.plan.json"))):
        try:
            if load_frozen_plan(file).plan_digest in known:
                return file
        except PlanMismatchError:
            continue
    return None


def frozen_checks(committed: Committed) -> Iterator[Check]:
    """Its digest, which reading has verified, and the plan that it was made from."""
    record = committed.record
    yield passed("digest", f"{record.digest} covers the content")
    if committed.plan is not None:
        yield passed("plan", f"made from plan {committed.plan.name}, {record.plan_digest}")
    elif any(plan.name == record.name for plan in plans_beside(committed.path)):
        yield failed("plan", f"{record.name}.plan.json is not the plan that it was made from ({record.plan_digest}); make it again with `hilore apply`")
    else:
        yield skipped("plan", f"no plan beside it has digest {record.plan_digest}; commit the plan that it was made from")


# ----------------------------------------------------------------------------------------------------------------- plans


def plan_checks(plan: Plan, *, profiles: Path, limits: Limits) -> Iterator[Check]:
    """Everything that plan and profile alone tell."""
    try:
        profile = load_profile(profiles / plan.profile)
    except ProfileError as error:
        yield failed("profile", str(error))
        yield from (skipped(name, "its profile cannot be read") for name in ("budgets", "peak", "step", "risk", "solve"))
        return
    known = digests_of(profile)
    same = plan.profile_digest in known
    if same:
        yield passed("profile", f"{profile.name}, {plan.profile_digest}")
    else:
        yield failed("profile", f"{profiles / plan.profile} has changed: the plan was made from {plan.profile_digest}, this is {known[0]}; plan again with `hilore plan`")
    try:
        found = evaluate_plan(plan, profile)
    except HiloreError as error:
        yield failed("budgets", str(error))
        yield from (skipped(name, "its patterns cannot be evaluated on the profile") for name in ("peak", "step", "risk"))
    else:
        yield budgets_check(plan, profile, found)
        yield from growth_checks(plan, found, limits)
    yield solve_check(plan, profile) if same else skipped("solve", "its profile has changed")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A plan's figures, found again from the profile and the patterns."""

    base: Prediction
    """of the profiled micro-batch"""
    variants: tuple[Prediction, ...]
    update_step_us: float
    update_rel_error: float


def evaluate_plan(plan: Plan, profile: Profile) -> Evaluation:
    """Without the solver: bytes in integers. Raises PlanMismatchError, ProfileError for what the profile cannot tell."""
    update = Update(profile, rule=plan.budgets.exposure_rule, divided=len(plan.variants) > 1)
    sized = {tokens: profile_at(profile, tokens=tokens, length=update.max_length) for tokens in {v.max_tokens for v in plan.variants}}
    variants = tuple(evaluate_patterns(plan, sized[variant.max_tokens], variant.layers) for variant in plan.variants)
    step_us, error2 = 0.0, 0.0
    for group in update.groups:
        variant = variant_for(plan.variants, tokens=group.max_tokens, length=update.max_length, exposure=group.max_exposure)
        if variant is None:
            raise PlanMismatchError(f"plan {plan.name}: has no variant for micro-batches of {group.max_tokens} tokens in rows of {update.max_length}, which its profile holds; plan again with `hilore plan`")
        predicted = variants[plan.variants.index(variant)]
        step_us += sum(predicted.step_us * row.tokens / variant.max_tokens for row in group.members)
        error2 += group.share * predicted.rel_error**2
    return Evaluation(base=evaluate_patterns(plan, profile, plan.layers), variants=variants, update_step_us=step_us, update_rel_error=math.sqrt(error2))


def evaluate_patterns(plan: Plan, profile: Profile, layers: Sequence[str]) -> Prediction:
    """One pattern for each layer on a profile of one size. Raises PlanMismatchError, ProfileError."""
    if len(layers) != len(profile.layers):
        raise PlanMismatchError(f"plan {plan.name}: is for {len(layers)} layers, profile {profile.name} has {len(profile.layers)}; plan again with `hilore plan`")
    patterns = [plan.patterns[name] for name in layers]
    codecs = sorted({action.removeprefix("compress:") for pattern in patterns for action in pattern.actions.values() if action.startswith("compress:")} - {MASK_CODEC})
    if unknown := set(codecs) - set(plan.budgets.codecs):
        raise PlanMismatchError(f"plan {plan.name}: compresses by {sorted(unknown)[0]}, which its budgets do not name; plan again with `hilore plan`")
    step = simulate_step(profile, patterns)
    planner = StepPlanner(profile, codecs=tuple(codecs))
    costs = [planner.codec_cost(row.index, _actions(pattern)) for row, pattern in zip(profile.layers, patterns, strict=True) if row.fallback is None]
    return planner.prediction(step, costs)


def _actions(pattern: Pattern) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pattern.actions.items()))


def budgets_check(plan: Plan, profile: Profile, found: Evaluation) -> Check:
    """Cap, risk and number of patterns, as they were asked for."""
    budgets, over = plan.budgets, []
    try:
        cap = parse_cap(budgets.mem_cap)
    except UsageError as error:
        return failed("budgets", str(error))
    cap_bytes = cap.resolve(gc_bytes=profile.peaks.gc_bytes, none_bytes=profile.peaks.none_bytes)
    if cap_bytes != budgets.cap_bytes:
        over.append(f"{budgets.mem_cap} of this profile is {cap_bytes} bytes, the plan says {budgets.cap_bytes}")
    for variant, predicted in zip(plan.variants, found.variants, strict=True):
        if predicted.peak_bytes > budgets.cap_bytes:
            over.append(f"{variant.label}: peak {predicted.peak_bytes} bytes, {predicted.peak_bytes - budgets.cap_bytes} over the cap, at {predicted.binding_moment}")
        if predicted.rel_error > variant.risk * (1 + BOUND_TOLERANCE):
            over.append(f"{variant.label}: gradient error {predicted.rel_error:.6g}, its risk is {variant.risk:.6g}")
        if (used := len(set(variant.layers))) > budgets.max_patterns:
            over.append(f"{variant.label}: {used} patterns, at most {budgets.max_patterns} were asked for")
    if found.update_rel_error > budgets.risk * (1 + BOUND_TOLERANCE):
        over.append(f"gradient error of the update {found.update_rel_error:.6g}, the budget is {budgets.risk:g}")
    if over:
        return failed("budgets", f"{'; '.join(over)}; plan again with `hilore plan`")
    peak = max(predicted.peak_bytes for predicted in found.variants)
    return passed("budgets", f"evaluated again: peak {format_bytes(peak)} of {format_bytes(budgets.cap_bytes)}, gradient error {found.update_rel_error:.3g} of {budgets.risk:g}")


def growth_checks(plan: Plan, found: Evaluation, limits: Limits) -> Iterator[Check]:
    """What is predicted now against what was committed, for the worst variant."""
    pairs = list(zip(found.variants, plan.variants, strict=True))
    peaks = [(now.peak_bytes, then.peak_bytes) for now, then in pairs] + [(found.base.peak_bytes, plan.predicted.peak_bytes)]
    steps = [(now.step_us, then.step_us) for now, then in pairs] + [(found.base.step_us, plan.predicted.step_us), (found.update_step_us, plan.update.step_us)]
    errors = [(now.rel_error, then.rel_error) for now, then in pairs] + [(found.base.rel_error, plan.predicted.rel_error), (found.update_rel_error, plan.update.rel_error)]
    yield growth_check("peak", peaks, limit=limits.peak_growth, words=format_bytes)
    yield growth_check("step", steps, limit=limits.step_growth, words=format_us)
    yield growth_check("risk", errors, limit=limits.risk_growth, words=lambda error: f"{error:.3g}")


def growth_check(name: str, pairs: Sequence[tuple[float, float]], *, limit: float, words: Callable[[float], str], what: str = "predicted") -> Check:
    """`pairs`: figures now and committed; the one that grew most decides."""
    now, then = max(pairs, key=lambda pair: growth_of(*pair))
    growth = growth_of(now, then)
    if abs(growth) <= ROUNDING:
        return passed(name, f"{what} {words(now)}, as committed")
    detail = f"{what} {words(now)}, committed {words(then)}: {format_gain(1 + growth) if math.isfinite(growth) else 'was 0'}, {100 * limit:g} % allowed"
    return passed(name, detail) if growth <= limit + ROUNDING else failed(name, detail)


def growth_of(now: float, then: float) -> float:
    """As a share of what was."""
    return now / then - 1 if then > 0 else (math.inf if now > 0 else 0.0)


# ----------------------------------------------------------------------------------------------------------------- solve


def solve_check(plan: Plan, profile: Profile) -> Check:
    """Solve again with the plan's own budgets."""
    try:
        for variants in (True, False):  # a plan does not say whether it was asked for one variant
            if variants or (len(plan.variants) == 1 and len(profile.micro_batches) >= FEWEST):
                solved = solve_again(plan, profile, variants=variants)
                if solved.model_dump_json() == plan.model_dump_json():
                    return passed("solve", f"the same plan, byte for byte, by {solver_version()}")
    except HiloreError as error:
        return failed("solve", str(error))
    if plan.solver.solver == solver_version() and plan.solver.reproducible and solved.solver.reproducible:
        return failed("solve", f"another plan by the same solver, {solver_version()}: {', '.join(differences(plan, solved)[:3])}; plan again with `hilore plan`")
    return bound_check(plan, solved)


def solve_again(plan: Plan, profile: Profile, *, variants: bool) -> Plan:
    """The plan of the committed budgets. Its profile is named by the digest that the committed plan knows it by. Raises HiloreError."""
    budgets = plan.budgets
    solved = solve_plan(profile, cap=parse_cap(budgets.mem_cap), risk=budgets.risk, codecs=budgets.codecs, name=plan.name, max_patterns=budgets.max_patterns, variants=variants, rule=budgets.exposure_rule)
    return solved.model_copy(update={"profile_digest": plan.profile_digest})


def bound_check(plan: Plan, solved: Plan) -> Check:
    """Under another build of the solver: the same bound, and no slower than the committed plan by more than the gap."""
    then, now = plan.solver, solved.solver
    builds = f"{now.solver}, planned by {then.solver}"
    if not math.isclose(now.bound_us, then.bound_us, rel_tol=BOUND_TOLERANCE, abs_tol=1.0):
        return failed("solve", f"the relaxation's bound is {now.bound_us:.3f} us, committed {then.bound_us:.3f} us ({builds}); plan again with `hilore plan`")
    slower = [(solved.predicted.step_us, plan.predicted.step_us), (solved.update.step_us, plan.update.step_us)]
    if any(mine > theirs * (1 + GAP_OF_STEP) for mine, theirs in slower):
        return failed("solve", f"solved again the step takes {format_us(slower[0][0])}, the update {format_us(slower[1][0])}; committed {format_us(slower[0][1])}, {format_us(slower[1][1])} ({builds})")
    return passed("solve", f"the same bound, {format_us(now.bound_us)}, and a plan within {100 * GAP_OF_STEP:g} % of the step ({builds})")


def differences(a: Plan, b: Plan) -> list[str]:
    """Where two plans differ, as paths of their JSON."""
    return list(_different(a.model_dump(mode="json"), b.model_dump(mode="json"), ""))


def _different(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _different(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        short = not isinstance(a, list) and not isinstance(b, list)
        yield f"{where} {a} -> {b}" if short else where
