"""hilore explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilore_cli.commands.options import Json, Quiet, complete_plans
from hilore_cli.commands.reading import read_plan_files
from hilore_cli.views.console import Reporter
from hilore_cli.views.explain import explain_view

if TYPE_CHECKING:
    from hilore_cli.explain import Explainer, Nearby, Target, UnitChoice


def explain_command(
    name: Annotated[str, typer.Argument(metavar="UNIT|LAYER", help="A unit (mlp.gate_proj.mm, or a part of its name), or a layer by number or name.")],
    plan: Annotated[Path | None, typer.Argument(help="Plan or frozen plan. Default: the newest in plans/.", show_default=False, autocompletion=complete_plans)] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made from. Default: the one that it names, in profiles/.", show_default=False)] = None,
    resolve: Annotated[bool, typer.Option("--resolve/--no-resolve", help="Also solve again at other caps and risks, to see what would change it (seconds).")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Why a plan stores, compresses or recomputes a unit, or all units of a layer, and what would change it."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    files = read_plan_files(plan, profile=profile, reporter=reporter)
    from hilore_cli.explain import Explainer, find_target

    target = find_target(files.profile, name)
    explainer = Explainer(files.profile, files.plan)
    rows = explainer.explain(target)
    nearby: list[Nearby] = []
    if resolve:
        with reporter.progress() as progress:
            nearby = explainer.resolve_nearby(target, progress=progress)
    reporter.result(explain_view(explainer, target, rows, nearby), lambda: explain_document(explainer, target, rows, nearby))


def explain_document(explainer: Explainer, target: Target, rows: list[UnitChoice], nearby: list[Nearby]) -> dict[str, Any]:
    from dataclasses import asdict

    plan = explainer.plan
    return {
        "format": "hilore-explanation",
        "plan": plan.name,
        "estimated": plan.estimate is not None,
        "target": {"units": list(target.units), "layers": list(target.layers)},
        "cap_bytes": plan.budgets.cap_bytes,
        "risk": explainer.risk,
        "prices": {
            "moments": [asdict(price) for price in explainer.moment_prices()],
            "us_per_rho2": explainer.risk_price_us,
            "source": "shadow prices of the linear relaxation at the plan's budgets",
        },
        "units": [asdict(row) for row in rows],
        "planned": explainer.planned_actions(target),
        "resolved": [asdict(point) for point in nearby],
    }
