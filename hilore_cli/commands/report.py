"""hilore report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilore_cli.commands.frontier import RISKS, read_numbers
from hilore_cli.commands.options import Json, Quiet, check_writable, complete_plans
from hilore_cli.commands.reading import read_plan_files
from hilore_cli.errors import UsageError
from hilore_cli.views.console import Reporter
from hilore_cli.views.layout import lines

if TYPE_CHECKING:
    from hilore_cli.bench_records import BenchReport
    from hilore_cli.schema import FrozenPlan, Plan


def report_command(
    plan: Annotated[Path | None, typer.Argument(help="Plan or frozen plan. Default: the newest in plans/.", show_default=False, autocompletion=complete_plans)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.", callback=check_writable)] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder to write every picture into, as PNG.", show_default=False)] = None,
    bench: Annotated[list[Path] | None, typer.Option(help="What hilore bench -o wrote for this plan. May be repeated.", show_default=False)] = None,
    profile: Annotated[Path | None, typer.Option(help="The profile that the plan was made from. Default: the one that it names, in profiles/.", show_default=False)] = None,
    frontier: Annotated[bool, typer.Option("--frontier/--no-frontier", help="Solve for other budgets, too (a minute for a large profile).")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained page that shows a plan: memory through the step, actions, other budgets, risks, predicted and measured."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    files = read_plan_files(plan, profile=profile, reporter=reporter)
    try:
        from hilore_cli.page.document import render_page, write_pictures
        from hilore_cli.page.rows import Story
    except ModuleNotFoundError as error:
        raise UsageError(f"hilore report draws with altair, vl-convert-python and jinja2, and {error.name} is not installed; install them with: pip install 'hilore[report]'") from error
    from hilore_cli.bench_records import BenchReport
    from hilore_cli.files import load_report, write_atomic
    from hilore_cli.frontier import solve_frontier

    benches = tuple(load_report(path, BenchReport, command="hilore bench") for path in bench or [])
    check_benches(benches, bench or [], files.plan, files.frozen)
    with reporter.progress() as progress:
        risks = sorted({*read_numbers("risks", RISKS), files.plan.budgets.risk})
        found = solve_frontier(files.profile, codecs=files.plan.budgets.codecs or files.profile.codecs, risks=risks, progress=progress) if frontier else None
        story = Story(plan=files.plan, profile=files.profile, frozen=files.frozen, frontier=found, benches=benches)
        page = render_page(story, progress=progress)
        pictures = [] if png is None else write_pictures(story, png)
    write_atomic(output, page.encode())
    written = [output, *pictures]
    reporter.result(lines(*(str(path) for path in written)), lambda: {"format": "hilore-report", "path": str(output), "bytes": len(page.encode()), "pictures": [str(path) for path in pictures]})
    reporter.note(f"written: {output}, {len(page.encode()) / 1000:.0f} kB, one file that needs no network; open it in a browser")


def check_benches(benches: tuple[BenchReport, ...], paths: list[Path], plan: Plan, frozen: FrozenPlan | None) -> None:
    """Raise UsageError for a benchmark of another plan."""
    for path, bench in zip(paths, benches, strict=True):
        if frozen is None or bench.plan_digest != frozen.digest:
            raise UsageError(f"{path}: a benchmark of plan {bench.plan} (digest {bench.plan_digest}), not of {plan.name}" + ("; its frozen plan is not beside it" if frozen is None else f" (digest {frozen.digest})"))
