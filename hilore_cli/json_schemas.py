"""JSON Schemas of hilore's files, made from the records and published in the package (data/schemas/), for other tools and editors.

    hilore schema plan > plan.schema.json
    python -c "from hilore_cli.json_schemas import write_schemas; write_schemas()"     # after a record has changed; a test compares

What a schema does NOT say: that a pattern which a layer names exists, or that a frozen plan's digest is right. Reading a file does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hilore_cli.ablation_records import AblationReport
from hilore_cli.bench_records import BenchReport, CodecBenchReport
from hilore_cli.check_records import CheckReport
from hilore_cli.errors import UsageError
from hilore_cli.files import write_atomic
from hilore_cli.quality_records import QualityReport, QualityRuns
from hilore_cli.records import Strict
from hilore_cli.schema import FrozenPlan, Plan, Profile
from hilore_cli.suite_records import SuiteReport

SCHEMAS = Path(__file__).parent / "data" / "schemas"
RECORDS: dict[str, type[Strict]] = {
    "profile": Profile,
    "plan": Plan,
    "frozen-plan": FrozenPlan,
    "bench": BenchReport,
    "codec-bench": CodecBenchReport,
    "check": CheckReport,
    "suite": SuiteReport,
    "quality": QualityReport,
    "quality-runs": QualityRuns,
    "ablation": AblationReport,
}
TABLES = ("nodes", "units", "calibration")
"""What profile.json holds as the names of Parquet files beside it."""


def read_schema(name: str) -> str:
    """The published schema of a file, as text. Raises UsageError for a name that there is none of."""
    if name not in RECORDS:
        raise UsageError(f"schema {name!r}: unknown; use one of {', '.join(RECORDS)}")
    return (SCHEMAS / f"{name}.json").read_text(encoding="utf-8")


def write_schemas(folder: Path = SCHEMAS) -> None:
    """Publish the schemas of all records."""
    for name in RECORDS:
        write_atomic(folder / f"{name}.json", (json.dumps(make_schema(name), indent=1) + "\n").encode())


def make_schema(name: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a file as this hilore writes it: its format and version are fixed."""
    model = RECORDS[name]
    schema = model.model_json_schema()
    if name == "profile":
        schema = _without_tables(schema)
    version = model.model_fields["version"].default
    schema["properties"]["version"] = {"const": version}
    schema["required"] = ["format", "version", *schema["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:hilore:{name}:{version}", **schema}


def _without_tables(schema: dict[str, Any]) -> dict[str, Any]:
    """profile.json names its tables instead of holding their rows."""
    properties, layer_class = dict(schema["properties"]), dict(schema["$defs"]["LayerClass"])
    for table in ("units", "calibration"):
        del properties[table]
    layer_class["properties"] = {key: value for key, value in layer_class["properties"].items() if key != "nodes"}
    layer_class["required"] = [key for key in layer_class["required"] if key != "nodes"]
    names = {table: {"type": "string", "pattern": rf"^{table}\.[0-9a-f]{{8}}\.parquet$"} for table in TABLES}
    properties["tables"] = {"type": "object", "description": "Parquet files beside profile.json", "properties": names, "required": list(TABLES), "additionalProperties": False}
    kept = {key: value for key, value in schema["$defs"].items() if key not in ("GraphNode", "UnitRow", "CalibrationPair")}
    required = [key for key in schema["required"] if key not in TABLES]
    return schema | {"properties": properties, "required": [*required, "tables"], "$defs": kept | {"LayerClass": layer_class}}
