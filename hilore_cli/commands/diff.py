"""hilore diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hilore_cli.commands.options import Json, Quiet, complete_files
from hilore_cli.commands.reading import read_plan
from hilore_cli.errors import UsageError
from hilore_cli.views.console import Reporter
from hilore_cli.views.diff import equal_view, plan_diff_view, profile_diff_view


def diff_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan, a frozen plan, or the folder of a profile.", autocompletion=complete_files)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one: plans of both kinds compare with each other, profiles with profiles.", autocompletion=complete_files)],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What differs between two plans, or between two profiles."""
    reporter = Reporter(as_json=as_json, quiet=quiet or as_json)
    first, second = (_is_profile(path) for path in (a, b))
    if first != second:
        raise UsageError(f"{a} is a {'profile' if first else 'plan'}, {b} is a {'profile' if second else 'plan'}; give two plans or two profiles")
    from hilore_cli.diff import diff_plans, diff_profiles, same_content

    if first:
        from hilore_cli.files import load_profile

        records = [load_profile(path if path.is_dir() else path.parent) for path in (a, b)]
        found, view = diff_profiles(*records), profile_diff_view
    else:
        records = [read_plan(path) for path in (a, b)]
        found, view = diff_plans(*records), plan_diff_view
    equal = records[0] == records[1] or (found.is_empty and same_content(*records))
    if equal or found.is_empty:
        but = "" if records[0] == records[1] else ", but for their names and dates" if equal else ", as far as both say: one is frozen" if type(records[0]) is not type(records[1]) else ", but for what is not compared"
        result = equal_view(str(a), str(b), but=but)
    else:
        result = view(found, str(a), str(b))
    reporter.result(result, lambda: diff_document(found, a, b, equal=equal))


def _is_profile(path: Path) -> bool:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give a plan, a frozen plan or the folder of a profile")
    if path.is_dir() and not (path / "profile.json").is_file():
        raise UsageError(f"{path}: a folder without a profile.json; give a plan, a frozen plan or the folder of a profile")
    return path.is_dir() or path.name == "profile.json"


def diff_document(found: Any, a: Path, b: Path, *, equal: bool) -> dict[str, Any]:
    from dataclasses import asdict

    return {"format": "hilore-diff", "a": str(a), "b": str(b), "equal": equal, **asdict(found)}
