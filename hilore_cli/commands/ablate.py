"""hilore ablate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilore_cli import malloc
from hilore_cli.commands.inputs import (
    check_risk,
    choose_profile,
    load_batches,
    load_planned_model,
    set_threads,
    split_names,
)
from hilore_cli.commands.options import (
    BatchFiles,
    Codecs,
    Device,
    Json,
    MemCap,
    ProfileFolder,
    Quiet,
    Threads,
    check_writable,
    complete_models,
)
from hilore_cli.errors import UsageError
from hilore_cli.sizes import parse_cap
from hilore_cli.views.ablate import ablation_view
from hilore_cli.views.console import Reporter


def ablate_command(
    profile: ProfileFolder = None,
    mem_cap: MemCap = "1.1x-gc",
    risk: Annotated[float, typer.Option(help="Largest relative gradient error.")] = 0.015,
    codecs: Codecs = None,
    repeats: Annotated[int, typer.Option(min=0, help="Interleaved timed updates of each plan; 0: predictions alone, without the model.")] = 0,
    batch: BatchFiles = None,
    model: Annotated[str | None, typer.Option("--model", help="Preset, folder or hub id. Default: the profile's.", show_default=False, autocompletion=complete_models)] = None,
    threads: Threads = None,
    device: Device = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the report as a JSON file, too.", show_default=False, callback=check_writable)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What each idea of a plan is worth: the plan beside plans that are solved without compression, risk, timeline, solver, units or exposure."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    cap = parse_cap(mem_cap)
    check_risk(risk)
    if not repeats and (given := [option for option, value in {"--batch": batch, "--model": model}.items() if value]):
        raise UsageError(f"{given[0]}: nothing is run without --repeats; give how often, such as --repeats 5")
    profile = choose_profile(profile, reporter=reporter)
    malloc.steady_malloc()
    from hilore_cli.ablation_bench import run_ablations
    from hilore_cli.files import load_profile, save_json

    measured = load_profile(profile)
    set_threads(threads)
    run = {}
    if repeats:
        batches = load_batches([str(path) for path in batch]) if batch else [one for one in load_batches(measured.sources) if one[0] == measured.batch.source]
        run = {"model": load_planned_model(model or measured.model.source, measured, device=device), "batches": batches, "repeats": repeats}
    with reporter.progress() as progress:
        report = run_ablations(measured, cap=cap, risk=risk, codecs=list(measured.codecs) if codecs is None else split_names(codecs), progress=progress, **run)
    if output is not None:
        save_json(report, output)
    reporter.result(ablation_view(report), lambda: report.model_dump(mode="json"))
