"""The folder of an experiment: the starting weights, and every run that is finished.

    warm-up.safetensors      the weights that all runs start from, with the digest of their setting
    profile/, <arm>.json     planning.py
    runs.json                QualityRuns: written anew, whole, after every run

Runs of another setting, plan, version or machine are never mixed: they are refused, with what differs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.files import save_json, write_atomic
from hilore_cli.quality.game import Game, Weights, copy_weights, trainable
from hilore_cli.quality.settings import Setting
from hilore_cli.quality_records import QUALITY_RUNS_VERSION, ArmRun, QualityRuns, RunsIdentity
from hilore_cli.workbench import Progress

SETTING_KEY = "hilore-quality-setting"


class Archive:
    """What is finished of one experiment."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "runs.json"
        self._record = _read(self._path) if self._path.exists() else None

    @property
    def runs(self) -> list[ArmRun]:
        return [] if self._record is None else self._record.runs

    def check(self, **expected: object) -> None:
        """Raise UsageError that names the first field of the identity in which the folder's runs are others."""
        if self._record is None:
            return
        for field, value in expected.items():
            found = getattr(self._record.identity, field)
            if found != value:
                raise UsageError(f"{self._path.parent}: its runs are of {_words(field)} {found}, this is {value}; go on as they were made (the same --setting and --problems), or give another --folder")

    def begin(self, identity: RunsIdentity) -> None:
        """Say what the runs are; those that are there must be the same."""
        self.check(**dict(identity))
        if self._record is None:
            self._record = QualityRuns(identity=identity, runs=[])

    def find(self, pair: int, arm: str) -> ArmRun | None:
        return next((run for run in self.runs if (run.pair, run.arm) == (pair, arm)), None)

    def add(self, run: ArmRun) -> None:
        self._record = self._record.model_copy(update={"runs": [*self._record.runs, run]})
        save_json(self._record, self._path)


def _read(path: Path) -> QualityRuns:
    remedy = "give another --folder, or delete it to begin again"
    try:
        document = json.loads(path.read_text())
        if document.get("version") != QUALITY_RUNS_VERSION:
            raise UsageError(f"{path}: is of version {document.get('version')}, this hilore goes on with {QUALITY_RUNS_VERSION}; {remedy}")
        return QualityRuns.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ProfileError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {remedy}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); {remedy}") from error


def _words(field: str) -> str:
    return field.replace("_", " ")


# --------------------------------------------------------------------------------------------------------- starting weights


def starting_weights(game: Game, setting: Setting, folder: Path, *, progress: Progress) -> Weights:
    """The weights that all runs start from: those kept in the folder, else of a warm-up, which are then kept."""
    path = folder / "warm-up.safetensors"
    if not path.exists():
        game.warm_up(progress)
        weights = {name: value.cpu() for name, value in copy_weights(game.model).items()}
        write_atomic(path, save(weights, metadata={SETTING_KEY: setting.digest}))
    return read_weights(path, game.model, setting_digest=setting.digest)


def read_weights(path: Path, model: nn.Module, *, setting_digest: str) -> Weights:
    """Raises ProfileError for a damaged file, UsageError for one of another setting."""
    device = next(model.parameters()).device
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(SETTING_KEY)
            weights: dict[str, torch.Tensor] = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118, it is no dictionary
    except (SafetensorError, OSError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); delete it to warm up again") from error
    if found != setting_digest or weights.keys() != trainable(model).keys():
        raise UsageError(f"{path}: holds starting weights of another setting, or of another number of --problems ({found}, this is {setting_digest}); go on as they were made, or give another --folder")
    return weights
