"""What trainers record, as micro-batches; and the lines that record it.

    micro_batches = read_micro_batches("captured.pt")     # TRL, verl, OpenRLHF, slime, or own tensors; Parquet, safetensors
    print(recipe("trl"))                                  # what to paste so that captured.pt gets written

A trainer's file is torch's, of plain values only: {"hilore_capture": 1, "trainer": "trl", "inputs": {...}, "loss": {...}, "meta": {...}},
or "steps": [{"inputs": ..., "loss": ..., "meta": ...}, ...] in place of the last three; a bare dict of inputs is recognised by its keys.
Nothing is ever unpickled: `torch.load(weights_only=True)` reads tensors, numbers, strings, lists and dicts, and refuses the rest.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hilore_cli.batches import MicroBatch, load_micro_batch
from hilore_cli.captured import openrlhf, own, slime, tensor_file, trl, verl
from hilore_cli.captured.tensor_file import save_safetensors
from hilore_cli.errors import ProfileError, UsageError

__all__ = ["TRAINERS", "read_micro_batches", "recipe", "save_safetensors"]

TRAINERS = ("trl", "verl", "openrlhf", "slime", "own")
MODULES = dict(zip(TRAINERS, (trl, verl, openrlhf, slime, own), strict=True))
CAPTURE_VERSION = 1
STEP_KEYS = {"inputs", "loss", "meta"}
DAMAGED = (RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError)
"""What torch.load raises for files that are cut off, or no torch files."""


def recipe(trainer: str) -> str:
    """The lines that make a trainer record. Raises UsageError."""
    if trainer not in MODULES:
        raise UsageError(f"trainer {trainer!r}: unknown; use one of {', '.join(TRAINERS)}")
    return MODULES[trainer].RECIPE


def read_micro_batches(path: str | Path) -> list[MicroBatch]:
    """The micro-batches of a file, validated, in the order of recording; those without loss tokens are left out with a warning.

    Raises ProfileError, one line with file, micro-batch and remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"micro-batch {path}: no such file; record one with: hilore capture TRAINER, or hilore rollout")
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(b"PAR1"):
        return [load_micro_batch(path)]
    try:
        if head[8:9] == b"{":
            found = _read_safetensors(path)
        else:
            found = [mb for trainer, step in _steps(_load_torch(path, head)) for mb in _read_step(trainer, step)]
        return _with_loss(path, found)
    except (ProfileError, UsageError) as error:
        raise ProfileError(f"micro-batch {path}: {str(error).removeprefix('micro-batch: ')}") from error


def _read_safetensors(path: Path) -> list[MicroBatch]:
    tensors, header = tensor_file.load(path)
    return _read_step("own", {"inputs": tensors}) if header is None else [tensor_file.micro_batch_of(tensors, header)]


def _load_torch(path: Path, head: bytes) -> Any:
    remedy = "save plain tensors, numbers and lists instead: hilore capture TRAINER prints the lines (of verl: hilore capture verl, not DataProto.save_to_disk)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch on pickle protocols: refused below, in one line
            return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        if head.startswith(b"PK"):
            raise ProfileError(f"holds {_foreign_objects(path)}, which only unpickling could read, and hilore does not because a pickle runs code; {remedy}") from error
        if head.startswith(b"\x80") or path.suffix in (".pkl", ".pickle"):
            raise ProfileError(f"is a pickle, and hilore opens none because a pickle runs code; {remedy}") from error
        raise ProfileError(f"is no torch, safetensors or Parquet file; {remedy}") from error
    except DAMAGED as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ProfileError(f"is damaged, or no torch, safetensors or Parquet file ({reason[:100]}); record it again") from error


def _foreign_objects(path: Path) -> str:
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))[:3]) or "an object"
    except (*DAMAGED, pickle.UnpicklingError):
        return "an object"


def _steps(document: Any) -> list[tuple[str, dict[str, Any]]]:
    """(trainer, {"inputs", "loss"?, "meta"?}) of each micro-batch that was recorded."""
    if not isinstance(document, Mapping):
        raise ProfileError(f"holds a {type(document).__name__} where a dict is expected; record it with: hilore capture TRAINER")
    if "hilore_capture" in document:
        return _recorded_steps(document)
    bare = document["steps"] if set(document) == {"steps"} else [document]
    if not isinstance(bare, list) or not bare or not all(isinstance(inputs, Mapping) for inputs in bare):
        raise ProfileError("steps are not a list of dicts; record them with: hilore capture TRAINER")
    return [(_trainer_of(inputs), {"inputs": inputs}) for inputs in bare]


def _recorded_steps(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    version, trainer = document["hilore_capture"], document.get("trainer")
    if not isinstance(version, int) or version != CAPTURE_VERSION:
        raise ProfileError(f"was captured in version {version}, this hilore reads {CAPTURE_VERSION}; record it again with: hilore capture TRAINER")
    if not isinstance(trainer, str) or trainer not in MODULES:
        raise ProfileError(f"trainer {trainer!r} is unknown; it is one of {', '.join(TRAINERS)}")
    if unknown := sorted(map(str, set(document) - {"hilore_capture", "trainer", "steps"} - STEP_KEYS)):
        raise ProfileError(f"unknown keys {', '.join(unknown)} beside inputs; put them into meta, or record with: hilore capture {trainer}")
    if ("steps" in document) == ("inputs" in document):
        raise ProfileError(f"it has {'both' if 'steps' in document else 'neither'} inputs and steps; record it with: hilore capture {trainer}")
    shared = {key: document[key] for key in ("loss", "meta") if key in document}
    steps = document["steps"] if "steps" in document else [{"inputs": document["inputs"]}]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, Mapping) and isinstance(step.get("inputs"), Mapping) and set(step) <= STEP_KEYS for step in steps):
        raise ProfileError(f"its steps are not dicts of inputs, loss and meta; record it with: hilore capture {trainer}")
    return [(trainer, {**shared, **step}) for step in steps]


def _trainer_of(inputs: Mapping[str, Any]) -> str:
    """Whose keys these are. Own tensors are what no trainer claims: their names are in verl's dict too."""
    keys = set(map(str, inputs))
    claims = [name for name, module in MODULES.items() if name != "own" and any(signature <= keys for signature in module.SIGNATURES)]
    claims = claims or [name for name in ("own",) if own.SIGNATURES[0] <= keys]
    if len(claims) == 1:
        return claims[0]
    named = f"keys {', '.join(sorted(keys)[:12])}" if keys else "no keys"
    if claims:
        raise ProfileError(f"{named} are those of {' and of '.join(claims)}; say which: record with hilore capture {claims[0]}")
    nearest = max(TRAINERS, key=lambda name: len(MODULES[name].REQUIRED & keys))
    missing = ", ".join(sorted(MODULES[nearest].REQUIRED - keys))
    raise ProfileError(f"{named} are of no trainer that hilore knows (of {nearest}, which is nearest, {missing} are missing); record with: hilore capture {nearest}")


def _read_step(trainer: str, step: Mapping[str, Any]) -> list[MicroBatch]:
    loss, meta = step.get("loss"), step.get("meta", {})
    if not isinstance(loss, Mapping | None) or not isinstance(meta, Mapping):
        raise ProfileError(f"loss and meta are dicts; record them with: hilore capture {trainer}")
    meta = {"trainer": trainer, **meta}
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"meta holds something else than numbers, strings and lists ({error}); leave it out") from error
    return MODULES[trainer].read(step["inputs"], loss=loss, meta=meta)


def _with_loss(path: Path, found: list[MicroBatch]) -> list[MicroBatch]:
    """Validated. In an update of several, some may have no loss token at all, and nothing to run."""
    useful = [mb for mb in found if mb.loss_tokens]
    for mb in useful or found:
        mb.validate()
    if len(useful) < len(found):
        left_out = ", ".join(str(i) for i, mb in enumerate(found) if not mb.loss_tokens)
        warnings.warn(f"{path}: micro-batches {left_out} have no loss tokens and are left out", stacklevel=3)
    return useful
