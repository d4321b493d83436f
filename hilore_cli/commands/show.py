"""hilore show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from hilore_cli.commands.documents import batch_document, profile_document
from hilore_cli.commands.inputs import load_batches
from hilore_cli.commands.options import Json, Quiet, complete_files
from hilore_cli.commands.reading import format_of
from hilore_cli.errors import UsageError
from hilore_cli.views.ablate import ablation_view
from hilore_cli.views.bench import bench_view, codec_bench_view
from hilore_cli.views.check import check_view
from hilore_cli.views.console import Reporter
from hilore_cli.views.plan import frozen_view, plan_view
from hilore_cli.views.profile import batches_view, profile_view
from hilore_cli.views.quality import quality_runs_view, quality_view
from hilore_cli.views.suite import suite_view

SHOWN = "a profile folder, a plan, a frozen plan, a micro-batch, or what hilore bench, ablate or check kept"
REPORTS: dict[str, tuple[str, Callable[[Any], RenderableType]]] = {
    "bench": ("hilore bench", bench_view),
    "codec-bench": ("hilore bench --codecs", codec_bench_view),
    "suite": ("hilore bench --suite", suite_view),
    "quality": ("hilore bench --quality", quality_view),
    "quality-runs": ("hilore bench --quality", quality_runs_view),
    "ablation": ("hilore ablate", ablation_view),
    "check": ("hilore check", check_view),
}
"""Name of a report's schema -> the command that makes it, its view."""


def show_command(
    path: Annotated[Path, typer.Argument(help=f"{SHOWN[0].upper()}{SHOWN[1:]}.", autocompletion=complete_files)],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print any of hilore's files."""
    reporter = Reporter(as_json=as_json, quiet=quiet or as_json)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give {SHOWN}")
    if (path.is_dir() and (path / "profile.json").exists()) or path.name == "profile.json":
        from hilore_cli.files import load_profile

        folder = path if path.is_dir() else path.parent
        profile = load_profile(folder)
        reporter.result(profile_view(profile), lambda: profile_document(folder))
    elif path.suffix == ".json":
        show_json(path, reporter)
    elif path.is_dir() and not any(path.glob("*.parquet")):
        files = sorted(file.name for file in path.glob("*.json"))
        raise UsageError(f"{path}: a folder that holds neither a profile nor micro-batches; give one file of it{': ' + ', '.join(files) if files else ''}")
    else:
        batches = load_batches([str(path)])
        reporter.result(batches_view(batches), lambda: [batch_document(micro_batch) for _, micro_batch in batches])


def show_json(path: Path, reporter: Reporter) -> None:
    """A plan, frozen plan or report by the `format` it names. Raises PlanMismatchError, UsageError."""
    from hilore_cli.files import load_frozen_plan, load_plan_file, load_report
    from hilore_cli.json_schemas import RECORDS

    kind = format_of(path)
    if kind == "hilore-plan":
        record = load_plan_file(path)
        view = plan_view(record)
    elif kind == "hilore-frozen-plan":
        record = load_frozen_plan(path)
        view = frozen_view(record, path=str(path), patterns=True)
    elif kind is not None and (name := kind.removeprefix("hilore-")) in REPORTS:
        command, make_view = REPORTS[name]
        record = load_report(path, RECORDS[name], command=command)
        view = make_view(record)
    else:
        raise UsageError(f"{path}: none of hilore's files that can be shown{f' (format {kind!r})' if kind else ''}; give {SHOWN}")
    reporter.result(view, lambda: record.model_dump(mode="json"))
