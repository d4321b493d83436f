"""Reading and writing the records of schema.py: JSON, and Parquet tables beside profile.json.

A reader, a crash or a full disk sees the old file or the new one, never a part; whatever cannot be read is named with its remedy.
Training loads plans through this file: it imports no torch, solver or pandas (pyarrow only when a profile is read or written).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hilore_cli.errors import HiloreError, PlanMismatchError, ProfileError
from hilore_cli.records import Strict, digest_of_document, digested
from hilore_cli.schema import FROZEN_VERSION, FrozenPlan, GraphNode, Plan, Profile, freeze

Record = TypeVar("Record", bound=Strict)

PREDICTED = "predicted_rel_error"
"""Column of the calibration table for plots: what follows from kappa and predicted_rho2 is not read back."""

ADDED: dict[tuple[str, int], dict[str, Any]] = {
    ("hilore-profile", 4): {"estimate": None},
    ("hilore-plan", 4): {"estimate": None},
    ("hilore-frozen-plan", 4): {"estimate": None},
}
"""(format, version) -> the keys that this version added, with what files of the version before it meant by leaving them out. Such files
are read through this table. A version that changed anything else has no entry: what is older is refused.
"""


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a reader, a crash or a full disk sees the old content or the new, never a part."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise HiloreError(f"{path}: cannot be written ({error.strerror}); the old file, if any, is untouched") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def save_json(record: Strict, path: Path) -> None:
    """Write a plan or frozen plan as indented JSON, atomically."""
    write_atomic(path, (record.model_dump_json(indent=1) + "\n").encode())


def save_rows(report: Strict, rows: str, path: Path) -> None:
    """Write a report as Parquet: one row for each of its field `rows`, the rest as JSON in the file's metadata, under its format."""
    rest = {report.format: report.model_dump_json(exclude={rows})}
    write_atomic(path, _parquet_bytes([row.model_dump() for row in getattr(report, rows)], metadata=rest))


def load_plan_file(path: Path | str) -> Plan:
    """Read plans/<name>.plan.json. Raises PlanMismatchError."""
    return _load(Path(path), Plan, PlanMismatchError, remedy="make it again with `hilore plan`")


def load_frozen_plan(path: Path | str, *, remedy: str = "make it again with `hilore apply`") -> FrozenPlan:
    """Read a frozen plan and check its digest, which is that of the version it was written in. Raises PlanMismatchError that ends in `remedy`."""
    path = Path(path)
    document = _read_document(path, PlanMismatchError, remedy)
    version = document.get("version")
    plan = _validate(_migrated(document, FrozenPlan, path, PlanMismatchError, remedy), FrozenPlan, path, PlanMismatchError, remedy)
    if plan.digest != digests_of(plan)[FROZEN_VERSION - version]:
        raise PlanMismatchError(f"{path}: digest {plan.digest or '(none)'} does not match the content; a frozen plan is not edited by hand: {remedy}")
    return freeze(plan)


def digests_of(record: Strict) -> list[str]:
    """Its digest, then those that older versions gave to the same content: files that were made with them name it by theirs."""
    document = digested(record)
    found = [digest_of_document(document)]
    while (added := ADDED.get((document["format"], document["version"]))) is not None and all(document[key] == value for key, value in added.items()):
        document = {key: value for key, value in document.items() if key not in added} | {"version": document["version"] - 1}
        found.append(digest_of_document(document))
    return found


def load_report(path: Path | str, report: type[Record], *, command: str) -> Record:
    """Read what a command kept with `-o`: BenchReport, CheckReport, SuiteReport and the like. Raises PlanMismatchError."""
    return _load(Path(path), report, PlanMismatchError, remedy=f"make it again with `{command}`")


def save_profile(profile: Profile, folder: Path) -> None:
    """Write profiles/<name>/: profile.json and three Parquet tables that pandas reads.

    The tables are named by their content and profile.json, which names them, is replaced last: at any moment the
    folder holds one whole profile.
    """
    nodes = [{"layer_class": c.name, **_parquet_row(n)} for c in profile.classes for n in c.nodes]
    units = [u.model_dump() for u in profile.units]
    pairs = [{**pair.model_dump(), PREDICTED: profile.predicted_error(pair)} for pair in profile.calibration]
    tables = {"nodes": _parquet_bytes(nodes), "units": _parquet_bytes(units), "calibration": _parquet_bytes(pairs)}
    names = {key: f"{key}.{hashlib.sha256(content).hexdigest()[:8]}.parquet" for key, content in tables.items()}
    for key, content in tables.items():
        write_atomic(folder / names[key], content)
    document = profile.model_dump(mode="json", exclude={"units": True, "calibration": True, "classes": {"__all__": {"nodes"}}})
    document["tables"] = names
    write_atomic(folder / "profile.json", (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    for stale in folder.glob("*.parquet"):
        if stale.name not in names.values() and stale.name.split(".")[0] in names:
            stale.unlink()


def load_profile(folder: Path | str) -> Profile:
    """Read profiles/<name>/. Raises ProfileError that names the file and what is wrong with it."""
    folder = Path(folder)
    path = folder / "profile.json"
    remedy = "measure it again with `hilore profile`"
    document = _read_document(path, ProfileError, remedy)
    document = _migrated(document, Profile, path, ProfileError, remedy)
    tables = document.pop("tables", None)
    if not isinstance(tables, dict) or set(tables) != {"nodes", "units", "calibration"}:
        raise ProfileError(f"{path}: key 'tables' must name the nodes, units and calibration tables; {remedy}")
    nodes = _read_table(folder / str(tables["nodes"]), remedy)
    document["units"] = _read_table(folder / str(tables["units"]), remedy)
    pairs = _read_table(folder / str(tables["calibration"]), remedy)
    document["calibration"] = [{key: value for key, value in pair.items() if key != PREDICTED} for pair in pairs]
    try:
        for layer_class in document["classes"]:
            layer_class["nodes"] = [_node_of(row) for row in nodes if row["layer_class"] == layer_class["name"]]
    except (KeyError, TypeError, ValueError) as cause:
        raise ProfileError(f"{path}: its classes and its nodes table do not belong together ({cause!r}); {remedy}") from cause
    return _validate(document, Profile, path, ProfileError, remedy)


def _load(path: Path, model: type[Record], error: type[HiloreError], *, remedy: str) -> Record:
    document = _migrated(_read_document(path, error, remedy), model, path, error, remedy)
    return _validate(document, model, path, error, remedy)


def _read_document(path: Path, error: type[HiloreError], remedy: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise error(f"{path}: no such file; {remedy}") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        raise error(f"{path}: not a whole JSON document ({cause}); {remedy}") from cause
    if not isinstance(document, dict):
        raise error(f"{path}: a JSON object is expected, this is a {type(document).__name__}; {remedy}")
    return document


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _migrated(document: dict[str, Any], model: type[Strict], path: Path, error: type[HiloreError], remedy: str) -> dict[str, Any]:
    """The document as this version of its format holds it. Raises `error` for another format, and for versions that ADDED does not lead from."""
    kind, current = (model.model_fields[key].default for key in ("format", "version"))
    if document.get("format") != kind:
        hint = "; bind it first with `hilore apply`" if document.get("format") == "hilore-plan" else f"; {remedy}"
        raise error(f"{path}: format is {document.get('format')!r}, {kind!r} is expected{hint}")
    version = document.get("version")
    steps = [(kind, newer) for newer in range(version + 1, current + 1)] if type(version) is int else []
    added = {key: value for step in steps for key, value in ADDED.get(step, {}).items()}
    if type(version) is not int or version > current or not all(step in ADDED for step in steps) or added.keys() & document.keys():
        oldest = min((newer - 1 for name, newer in ADDED if name == kind), default=current)
        readable = f"version {current}" if oldest == current else f"versions {oldest} to {current}"
        raise error(f"{path}: version {version!r} of {kind}, this hilore reads {readable}; {remedy}")
    return document | added | {"version": current}


def _validate(document: dict[str, Any], model: type[Record], path: Path, error: type[HiloreError], remedy: str) -> Record:
    try:
        return model.model_validate_json(json.dumps(document, allow_nan=False), strict=True)
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise error(f"{path}: {where}: {first['msg']}; {remedy}") from cause
    except ValueError as cause:
        raise error(f"{path}: {cause}; {remedy}") from cause


def _parquet_row(node: GraphNode) -> dict[str, Any]:
    row = node.model_dump()
    row["nbytes_terms"] = json.dumps(row["nbytes_terms"], sort_keys=True)
    return row


def _node_of(row: dict[str, Any]) -> dict[str, Any]:
    node = {key: value for key, value in row.items() if key != "layer_class"}
    return node | {"nbytes_terms": json.loads(node["nbytes_terms"])}


def _parquet_bytes(rows: list[dict[str, Any]], *, metadata: dict[str, str] | None = None) -> bytes:
    import pyarrow  # kept out of training's import time: only profiles are tables
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, metadata=metadata), sink)
    return sink.getvalue().to_pybytes()


def _read_table(path: Path, remedy: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; {remedy}") from None
    except (OSError, pyarrow.ArrowException) as cause:
        raise ProfileError(f"{path}: not a readable Parquet table ({cause}); {remedy}") from cause
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ProfileError(f"{path}: column {key} holds {value}; {remedy}")
    return rows
