"""hilore schema."""

from __future__ import annotations

from typing import Annotated

import typer

from hilore_cli.commands.options import Json, Quiet


def schema_command(
    name: Annotated[str | None, typer.Argument(help="profile, plan, frozen-plan, bench, codec-bench, suite, ablation, quality, quality-runs or check. Default: all of them, by name.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the JSON Schema of one of hilore's files (JSON with and without --json)."""
    import json

    from hilore_cli.json_schemas import RECORDS, read_schema

    text = read_schema(name) if name is not None else json.dumps({known: json.loads(read_schema(known)) for known in RECORDS}, indent=1) + "\n"
    print(text, end="")
