"""hilore frontier."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilore_cli.commands.inputs import choose_profile, split_names
from hilore_cli.commands.options import (
    Codecs,
    Json,
    ProfileFolder,
    Quiet,
    complete_plans,
)
from hilore_cli.errors import UsageError
from hilore_cli.views.console import Reporter, print_view
from hilore_cli.views.frontier import frontier_view

if TYPE_CHECKING:
    from hilore_cli.frontier import Frontier
    from hilore_cli.schema import FrozenPlan, Plan, Profile

RISKS = "0,0.015,0.1"


def frontier_command(
    profile: ProfileFolder = None,
    caps: Annotated[str | None, typer.Option(help="Caps as multiples of checkpointing's peak, comma-separated. Default: eight, from 1.0 to the peak of no checkpointing.", show_default=False)] = None,
    risks: Annotated[str, typer.Option(help="Relative gradient errors, comma-separated.")] = RISKS,
    codecs: Codecs = None,
    plan: Annotated[Path | None, typer.Option(help="A plan or frozen plan of this profile: its own point is marked.", show_default=False, autocompletion=complete_plans)] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="The points as CSV on stdout; tables go to stderr.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The predicted speed-up against the cap on memory, for several risks: what other budgets would give."""
    if as_csv and as_json:
        raise UsageError("--csv and --json both want stdout; give one of them")
    reporter = Reporter(as_json=as_json, quiet=quiet)
    asked_caps = None if caps is None else read_numbers("--caps", caps)
    asked_risks = read_numbers("--risks", risks)
    from hilore_cli.commands.reading import read_plan, read_plan_files
    from hilore_cli.files import load_profile

    own = None if plan is None else read_plan(plan)
    if profile is None and plan is not None:
        profile = read_plan_files(plan, profile=None, reporter=reporter).profile_path
        reporter.note(f"profile: the plan's, {profile}")
    measured = load_profile(choose_profile(profile, reporter=reporter))
    if own is not None:
        check_own(own, measured, plan)
    from hilore_cli.frontier import solve_frontier

    with reporter.progress() as progress:
        found = solve_frontier(measured, codecs=list(measured.codecs) if codecs is None else split_names(codecs), risks=asked_risks, caps=asked_caps, progress=progress)
    view = frontier_view(found, own)
    if as_csv:
        if not quiet:
            print_view(view, to_stderr=True)
        write_csv(found)
        return
    document = {"format": "hilore-frontier", **asdict(found), "ceiling_vs_gc": found.ceiling}
    if own is not None:
        document["plan"] = {"name": own.name, "cap_bytes": own.budgets.cap_bytes, "risk": own.budgets.risk, "peak_bytes": own.predicted.peak_bytes, "speedup_vs_gc": own.update.gc_us / own.update.step_us}
    reporter.result(view, lambda: document)


def read_numbers(option: str, text: str) -> list[float]:
    """ "1.0, 1.1" -> [1.0, 1.1]; a cap may be written 1.1x-gc. Raises UsageError."""
    parts = split_names(text)
    try:
        found = [float(part.removesuffix("x-gc")) for part in parts]
    except ValueError:
        raise UsageError(f"{option} {text!r}: write numbers with commas between, such as 1.0,1.1") from None
    if not found or any(not 0 <= number < 1e6 for number in found):
        raise UsageError(f"{option} {text!r}: write numbers of 0 or more with commas between, such as {'1.0,1.1' if option == '--caps' else RISKS}")
    return found


def check_own(own: Plan | FrozenPlan, profile: Profile, path: Path | None) -> None:
    """Raise UsageError for a plan of another profile: its point would lie in another picture."""
    mine = (own.predicted.gc_peak_bytes, own.predicted.gc_us, own.batch.digest)
    if mine != (profile.peaks.gc_bytes, profile.times.gc_us, profile.batch.digest):
        raise UsageError(f"{path}: was not made from profile {profile.name}; give a plan of this profile, or leave out --plan")


def write_csv(found: Frontier) -> None:
    """One row a point; each says whether it is estimated, as rows are taken out of their table."""
    rows = [asdict(point) | {"estimated": found.estimated} for point in found.points]
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.flush()
