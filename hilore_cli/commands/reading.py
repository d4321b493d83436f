"""A plan with what belongs to it: the solved plan that a frozen one was made from, the frozen one beside a solved one, the profile."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hilore_cli.commands.inputs import newest
from hilore_cli.commands.options import PLANS, PROFILES
from hilore_cli.errors import HiloreError, PlanMismatchError, ProfileError, UsageError
from hilore_cli.views.console import Reporter

if TYPE_CHECKING:
    from hilore_cli.schema import FrozenPlan, Plan, Profile


@dataclass(frozen=True, kw_only=True)
class PlanFiles:
    """What is known of one plan. `path` is the file that was named."""

    path: Path
    plan: Plan
    frozen: FrozenPlan | None
    profile: Profile
    profile_path: Path


def read_plan_files(path: Path | None, *, profile: Path | None, reporter: Reporter) -> PlanFiles:
    """The named plan, or the newest in plans/, with its profile. Raises UsageError, PlanMismatchError, ProfileError."""
    if path is None:
        path = newest(PLANS, "*.json", PlanMismatchError, "make one with `hilore plan`")
        reporter.note(f"plan: the newest, {path}")
    from hilore_cli.files import load_profile

    named = read_plan(path)
    solved, frozen = _both(path, named)
    folder = profile or _profile_folder(path, solved)
    return PlanFiles(path=path, plan=solved, frozen=frozen, profile=load_profile(folder), profile_path=folder)


def read_plan(path: Path) -> Plan | FrozenPlan:
    """A solved or a frozen plan, by the format that the file names. Raises UsageError, PlanMismatchError."""
    from hilore_cli.files import load_frozen_plan, load_plan_file

    kind = format_of(path)
    if kind == "hilore-plan":
        return load_plan_file(path)
    if kind == "hilore-frozen-plan":
        return load_frozen_plan(path)
    raise UsageError(f"{path}: format {kind!r} is not that of a plan; give a file that hilore plan or hilore apply wrote")


def format_of(path: Path) -> str | None:
    """What a JSON file says that it is; None when it does not say. Raises UsageError."""
    if not path.exists():
        raise UsageError(f"{path}: no such file; give a file that hilore wrote")
    if path.is_dir():
        raise UsageError(f"{path}: a folder, not a JSON file that hilore wrote")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not a whole JSON document ({error}); it is cut short or not a file of hilore") from error
    return document.get("format") if isinstance(document, dict) else None


def _both(path: Path, named: Plan | FrozenPlan) -> tuple[Plan, FrozenPlan | None]:
    """The solved plan and the frozen one made from it, wherever they lie in the plan's folder."""
    from hilore_cli.schema import Plan

    if isinstance(named, Plan):
        return named, next((other for other in _siblings(path, "hilore-frozen-plan") if _belong(named, other)), None)
    solved = next((other for other in _siblings(path, "hilore-plan") if _belong(other, named)), None)
    if solved is None:
        raise PlanMismatchError(f"{path}: the plan that it was frozen from (digest {named.plan_digest}) is not in {path.parent}/; give the *.plan.json that hilore plan wrote")
    return solved, named


def _belong(plan: Plan, frozen: FrozenPlan) -> bool:
    """By what they say: a digest would also tell apart files of different versions that say the same."""
    return (plan.budgets, plan.patterns, plan.predicted, plan.update, plan.batch) == (frozen.budgets, frozen.patterns, frozen.predicted, frozen.update, frozen.batch)


def _siblings(path: Path, kind: str) -> list[Plan | FrozenPlan]:
    """Readable plans of a format in the same folder, those of nearly the same name first."""
    stem = path.name.removesuffix(".json").removesuffix(".plan")
    files = sorted((p for p in path.parent.glob("*.json") if p != path), key=lambda p: (p.name.removesuffix(".json").removesuffix(".plan") != stem, p.name))
    found = []
    for file in files:
        try:
            if format_of(file) == kind:
                found.append(read_plan(file))
        except (HiloreError, OSError):
            continue  # a damaged neighbour is none of this plan's
    return found


def _profile_folder(path: Path, plan: Plan) -> Path:
    """profiles/<name>, here or beside the plan's folder."""
    places = [PROFILES / plan.profile, path.resolve().parent.parent / PROFILES / plan.profile]
    found = next((place for place in places if (place / "profile.json").is_file()), None)
    if found is None:
        raise ProfileError(f"profile {plan.profile!r} of plan {plan.name} is not in {PROFILES}/; name its folder with --profile")
    return found
