"""hilore check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilore_cli import malloc
from hilore_cli.commands.inputs import load_batches, load_planned_model, set_threads
from hilore_cli.commands.options import (
    PLANS,
    PROFILES,
    SHIPPED_BATCHES,
    SHIPPED_HELDOUT,
    BatchFiles,
    Device,
    Json,
    ModelName,
    Quiet,
    Threads,
    check_writable,
    complete_plans,
)
from hilore_cli.errors import CheckError, HiloreError, UsageError
from hilore_cli.views.check import check_view, junit_xml, summary_words
from hilore_cli.views.console import Progress, Reporter

if TYPE_CHECKING:
    from hilore_cli.check import Committed
    from hilore_cli.check_records import Check, Limits


def check_command(
    paths: Annotated[list[Path] | None, typer.Argument(help="Plans, frozen plans, or folders of them. Default: plans/.", show_default=False, autocompletion=complete_plans)] = None,
    profiles: Annotated[Path, typer.Option(help="Folder of the profiles that plans were made from.")] = PROFILES,
    max_peak_growth: Annotated[float, typer.Option(min=0, help="Most that a peak may be over the committed one, as a share of it.")] = 0.01,
    max_step_growth: Annotated[float, typer.Option(min=0, help="The same for the predicted step.")] = 0.01,
    max_risk_growth: Annotated[float, typer.Option(min=0, help="The same for the gradient error.")] = 0.1,
    measure: Annotated[bool, typer.Option("--measure", help="Also run each plan once on this machine, as hilore apply does, and compare with the committed measurement.")] = False,
    model: ModelName = None,
    batch: BatchFiles = None,
    heldout: Annotated[list[Path] | None, typer.Option(help="With --measure: the micro-batches that the committed gradient error was judged on. May be repeated.", show_default=False)] = None,
    threads: Threads = None,
    device: Device = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the results as JUnit XML, which CI systems show.", show_default=False, callback=check_writable)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the report as a JSON file, too.", show_default=False, callback=check_writable)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Do committed plans still hold? Schema, digest, profile, budgets, solving again, the model's fingerprint. For CI."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    if not measure and (given := [name for name, value in (("--batch", batch), ("--heldout", heldout)) if value]):
        raise UsageError(f"{given[0]} names what a dry run is made on; give --measure, too")
    if measure:
        malloc.steady_malloc()
    from hilore_cli.check import check_files, find_plans
    from hilore_cli.check_records import Limits
    from hilore_cli.files import save_json, write_atomic

    limits = Limits(peak_growth=max_peak_growth, step_growth=max_step_growth, risk_growth=max_risk_growth)
    found = find_plans(paths or [PLANS])
    set_threads(threads)
    with reporter.progress() as progress:

        def model_checks(committed: Committed) -> list[Check]:
            from hilore_cli.check_model import fingerprint_check

            checks = [fingerprint_check(committed.record, source=model)]
            if measure and checks[0].status != "failed":
                checks += measure_committed(committed, model=model, batch=batch or [], heldout=heldout or [], device=device, limits=limits, progress=progress)
            return checks

        report = check_files(found, profiles=profiles, limits=limits, model_checks=model_checks, progress=progress)
    if output is not None:
        save_json(report, output)
    if junit is not None:
        write_atomic(junit, junit_xml(report))
    reporter.result(check_view(report), lambda: report.model_dump(mode="json"))
    if report.failed:
        raise CheckError(summary_words(report))


def measure_committed(committed: Committed, *, model: str | None, batch: list[Path], heldout: list[Path], device: str | None, limits: Limits, progress: Progress) -> list[Check]:
    """The dry run of a file on its own micro-batches. A solved plan whose frozen plan lies beside it is measured there."""
    from hilore_cli.check import failed, frozen_beside, skipped
    from hilore_cli.check_model import run_checks

    plan = committed.record
    if (frozen := frozen_beside(committed)) is not None:
        return [skipped("measured peak", f"{frozen.name}, made from it, is measured")]
    sources = [str(path) for path in batch] or plan.sources
    judges = [str(path) for path in heldout] or ([SHIPPED_HELDOUT] if sources == list(SHIPPED_BATCHES) else [])
    try:
        batches, unseen = ([micro_batch for _, micro_batch in load_batches(names)] for names in (sources, judges))
        loaded = load_planned_model(model or plan.model.source, plan, device=device)
        return run_checks(loaded, plan, batches, heldout=unseen, limits=limits, progress=progress)
    except HiloreError as error:
        return [failed("measured peak", str(error))]
