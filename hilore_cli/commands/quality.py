"""What `hilore bench --quality` does: train in pairs, keep, print, and fail where the negative control did not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hilore_cli.commands.inputs import set_threads
from hilore_cli.errors import HiloreError, UsageError
from hilore_cli.views.console import Reporter
from hilore_cli.views.quality import quality_view


def bench_quality(name: str, *, pairs: int | None, problems: int | None, minutes: float | None, folder: Path | None, threads: int | None, device: str | None, output: Path | None, parquet: Path | None, reporter: Reporter) -> None:
    """Run a setting by name; what is not given is the setting's own. Raises HiloreError where int2 is not shown to be worse."""
    from hilore_cli.files import save_json, save_rows
    from hilore_cli.models import choose_device
    from hilore_cli.quality.experiment import run_quality
    from hilore_cli.quality.settings import setting_of

    setting = setting_of(name)
    setting = setting if problems is None else replace(setting, problems=problems)
    set_threads(threads)
    place = choose_device(device)
    folder = Path("quality") / name if folder is None else folder
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--folder {folder}: is a file; name a folder, which is made where there is none")
    reporter.note(f"folder: {folder}/ (run again to go on where it stopped)")
    with reporter.progress() as progress:
        report = run_quality(setting, pairs=pairs or setting.pairs, folder=folder, device=place, minutes=minutes, progress=progress, note=reporter.note)
    if output is not None:
        save_json(report, output)
    if parquet is not None:
        save_rows(report, "runs", parquet)
    reporter.result(quality_view(report), lambda: report.model_dump(mode="json"))
    if not report.control_failed:
        raise HiloreError(f"quality {name}: int2, which has to fail, is not shown worse than checkpointing by {report.margin_points:g} points, so this experiment proves nothing; run more --pairs, or another setting")
