"""What `hilore bench --suite` does: measure every peer beside our plans, keep, print."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hilore_cli.commands.inputs import load_planned_model, set_threads, split_names
from hilore_cli.errors import UsageError
from hilore_cli.sizes import parse_cap
from hilore_cli.views.console import Reporter
from hilore_cli.views.suite import suite_view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hilore_cli.batches import MicroBatch
    from hilore_cli.schema import FrozenPlan
    from hilore_cli.suite_records import SuiteReport


def bench_suite(plans: Mapping[str, FrozenPlan], batches: Sequence[tuple[str, MicroBatch]], *, model: str | None, mem_cap: str | None, heads: str, peers: str | None, repeats: int, threads: int | None, device: str | None, output: Path | None, as_csv: Path | None, parquet: Path | None, png: Path | None, reporter: Reporter) -> None:
    """`plans`: by the name of their row, the first gives model, cap and risk. Pictures and tables are asked for before anything is measured."""
    cap = None if mem_cap is None else parse_cap(mem_cap)
    draw = None if png is None else picture_writer()
    from hilore_cli.files import save_json, save_rows
    from hilore_cli.suite import PEERS, check_names, run_suite

    first = next(iter(plans.values()))
    names = {"heads": split_names(heads), "peers": PEERS if peers is None else split_names(peers)}
    check_names(plans, **names)  # a wrong one is told before the model is loaded
    set_threads(threads)
    loaded = load_planned_model(model or first.model.source, first, device=device)
    unfinished = None if output is None else output.with_name(f"{output.name}.unfinished")
    with reporter.progress() as progress:
        report = run_suite(loaded, plans, batches, cap=cap, **names, repeats=repeats, progress=progress, unfinished=unfinished)
    if output is not None:
        save_json(report, output)
        shutil.rmtree(unfinished)
    if as_csv is not None:
        write_csv(report, as_csv)
    if parquet is not None:
        save_rows(report, "rows", parquet)
    if draw is not None:
        draw(report, png)
    reporter.result(suite_view(report), lambda: report.model_dump(mode="json"))


def picture_writer() -> Callable[[SuiteReport, Path], None]:
    """Raises UsageError where the drawing libraries are not installed."""
    try:
        from hilore_cli.page.suite import write_suite_picture
    except ModuleNotFoundError as error:
        raise UsageError(f"--png draws with altair and vl-convert-python, and {error.name} is not installed; install them with: pip install 'hilore[report]'") from error
    return write_suite_picture


def write_csv(report: SuiteReport, path: Path) -> None:
    """One line a row of the report."""
    from hilore_cli.files import write_atomic

    rows = [row.model_dump() for row in report.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())
