"""What every record of a file is: frozen, strict, with a digest.

Knows no record of its own: provenance.py, schema.py and the *_records.py hold those.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base of all records: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)


def digest_of(record: Strict) -> str:
    """sha256 (16 hex digits) of a record's canonical JSON, without the fields named in its UNDIGESTED, and those of LATER at their default:
    files from before such a field was there keep their digest.
    """
    return digest_of_document(digested(record))


def digested(record: Strict) -> dict[str, Any]:
    """What a record's digest covers."""
    left_out = _at_default(record) | dict.fromkeys(getattr(type(record), "UNDIGESTED", ()), True)
    return record.model_dump(mode="json", exclude=left_out)


def _at_default(record: Strict) -> dict[str, Any]:
    """Fields of LATER at their default, of a record and of those in it, as pydantic leaves them out: name -> True, or the same of that record."""
    later = {name for name in getattr(type(record), "LATER", ()) if getattr(record, name) == type(record).model_fields[name].default}
    inner = {name: _at_default(value) for name, value in record if isinstance(value, Strict)}
    return {name: fields for name, fields in inner.items() if fields} | dict.fromkeys(later, True)


def digest_of_document(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]
