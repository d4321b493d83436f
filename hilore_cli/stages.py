"""Finished parts of a long measurement, kept on disk so that an interrupted one goes on where it stopped.

    stages = Stages(folder, key=key_of([model, batches, options, versions]))
    steps = stages.recall("steps", measure_steps)
    stages.clear()                                       # once the whole result is written
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hilore_cli.errors import UsageError
from hilore_cli.files import write_atomic


class Stages:
    """One atomically written JSON file for each part. Parts that are found are gone on from, those of another measurement (another key)
    thrown away; either is said in a warning.

    Raises UsageError for a folder that is none of ours.
    """

    def __init__(self, folder: Path, *, key: str) -> None:
        self._folder = folder
        stamp = folder / "key"
        if folder.exists() and not stamp.is_file():
            raise UsageError(f"{folder}: is where unfinished parts are kept, and holds something else; give another output, or remove it")
        found = len(list(folder.glob("*.json")))
        if folder.exists() and stamp.read_text() != key:
            if found:
                warnings.warn(f"{folder}: its unfinished parts are of other options, files or versions, and are thrown away", stacklevel=2)
            shutil.rmtree(folder)
        elif found:
            warnings.warn(f"{folder}: an interrupted run is gone on with, {found} of its parts are here; to begin again, remove it", stacklevel=2)
        if not folder.exists():
            write_atomic(stamp, key.encode())

    def load(self, stage: str) -> Any | None:
        path = self._folder / f"{stage}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, stage: str, content: Any) -> None:
        write_atomic(self._folder / f"{stage}.json", json.dumps(content, allow_nan=False).encode())

    def recall(self, stage: str, make: Callable[[], Any]) -> Any:
        """The part as it was kept, or made and kept now; what JSON does not tell apart (tuples, arrays) comes back as lists."""
        if (found := self.load(stage)) is None:
            self.save(stage, found := make())
        return found

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def key_of(parts: Any) -> str:
    """Digest of whatever the measurement depends on; JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
