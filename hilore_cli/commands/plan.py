"""hilore plan and hilore apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli import malloc
from hilore_cli.commands.documents import infeasible_document
from hilore_cli.commands.inputs import (
    check_risk,
    choose_profile,
    file_name,
    load_batches,
    load_planned_model,
    newest,
    set_threads,
    split_names,
)
from hilore_cli.commands.options import (
    EXPOSURE_RULES,
    PLANS,
    SHIPPED_BATCHES,
    SHIPPED_HELDOUT,
    BatchFiles,
    Codecs,
    Device,
    Json,
    MemCap,
    ModelName,
    ProfileFolder,
    Quiet,
    Threads,
    check_writable,
    complete_plans,
)
from hilore_cli.errors import InfeasibleError, PlanMismatchError, UsageError
from hilore_cli.sizes import parse_cap
from hilore_cli.views.console import Reporter
from hilore_cli.views.plan import frozen_view, plan_view


def plan_command(
    profile: ProfileFolder = None,
    mem_cap: MemCap = "1.1x-gc",
    risk: Annotated[float, typer.Option(help="Largest relative gradient error; 0 gives an exact plan.")] = 0.015,
    codecs: Codecs = None,
    max_patterns: Annotated[int, typer.Option(min=1, help="Most distinct patterns of a variant; each is compiled once.")] = 8,
    variants: Annotated[bool, typer.Option("--variants/--one-variant", help="Variants by size and exposure of the micro-batch, where the profile has several; or one for all.")] = True,
    weigh: Annotated[str | None, typer.Option(help="What a micro-batch's part in the update is taken to go with: logits (sum of (c (1 - p))^2), squared (sum of c^2), scalar ((sum of |c|)^2), tokens (exposure ignored). Default: logits where log-probabilities were recorded, else squared.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the plan. Default: the profile's.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: plans/<name>.plan.json.", show_default=False, callback=check_writable)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Solve for the fastest step under a memory cap and a gradient-error budget. Writes plans/<name>.plan.json."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    cap = parse_cap(mem_cap)
    check_risk(risk)
    profile = choose_profile(profile, reporter=reporter)
    if weigh is not None and weigh not in EXPOSURE_RULES:
        raise UsageError(f"weigh {weigh!r}: unknown; use one of {', '.join(EXPOSURE_RULES)}")
    from hilore_cli.files import load_profile, save_json
    from hilore_cli.planner import solve_plan

    measured = load_profile(profile)
    chosen = list(measured.codecs) if codecs is None else split_names(codecs)
    try:
        plan = solve_plan(measured, cap=cap, risk=risk, codecs=chosen, name=file_name(name or measured.name), max_patterns=max_patterns, variants=variants, rule=weigh)
    except InfeasibleError as error:
        if as_json:
            print(json.dumps(infeasible_document(error), indent=1))
        raise
    path = output or PLANS / f"{plan.name}.plan.json"
    save_json(plan, path)
    gained = {"speedup_vs_gc": plan.predicted.speedup_vs_gc, "recovered": plan.predicted.recovered, "path": str(path)}
    reporter.result(plan_view(plan), lambda: plan.model_dump(mode="json") | gained)
    reporter.note(f"written: {path}; next: hilore apply {path}")


def apply_command(
    plan: Annotated[Path | None, typer.Argument(help="File that hilore plan wrote. Default: the newest in plans/.", show_default=False, autocompletion=complete_plans)] = None,
    model: ModelName = None,
    batch: BatchFiles = None,
    heldout: Annotated[list[Path] | None, typer.Option(help="Micro-batches that were not profiled, to judge the gradient error on. May be repeated.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the frozen plan. Default: the plan's.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: plans/<name>.json.", show_default=False, callback=check_writable)] = None,
    emit_anyway: Annotated[bool, typer.Option("--emit-anyway", help="Write the plan even if the dry run misses its cap or risk.")] = False,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bind a plan to a model: dry-run it, compare with the prediction, freeze it. Writes plans/<name>.json."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    malloc.steady_malloc()
    if plan is None:
        plan = newest(PLANS, "*.plan.json", PlanMismatchError, "make one with `hilore plan`")
        reporter.note(f"plan: the newest, {plan}")
    from hilore_cli.files import load_plan_file, save_json

    solved = load_plan_file(plan)
    name = None if name is None else file_name(name)
    sources = [str(path) for path in batch] if batch else solved.sources
    judges = [str(path) for path in heldout or []]
    if not judges and sources == list(SHIPPED_BATCHES):
        judges = [SHIPPED_HELDOUT]
        reporter.note(f"gradient error: judged on {SHIPPED_HELDOUT}, which was not profiled")
    batches = [micro_batch for _, micro_batch in load_batches(sources)]
    unseen = [micro_batch for _, micro_batch in load_batches(judges)]
    from hilore_cli.bench import apply_plan

    set_threads(threads)
    loaded = load_planned_model(model or solved.model.source, solved, device=device)
    with reporter.progress() as progress:
        frozen = apply_plan(loaded, solved, batches, heldout=unseen, emit_anyway=emit_anyway, progress=progress, name=name)
    path = output or PLANS / f"{frozen.name}.json"
    save_json(frozen, path)
    reporter.result(frozen_view(frozen, path=str(path), patterns=False), lambda: frozen.model_dump(mode="json") | {"path": str(path)})
    reporter.note(f"written: {path}; next: hilore bench {path}")
