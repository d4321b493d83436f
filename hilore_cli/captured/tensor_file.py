"""A micro-batch as safetensors: the tensors of `MicroBatch` by field name, the rest as JSON under the metadata key `hilore`.

Other people's safetensors hold the same tensors without our metadata, and are read as own tensors (`own.py`).
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from hilore_cli import exposure as losses
from hilore_cli.batches import MicroBatch
from hilore_cli.errors import HiloreError, ProfileError, first_line
from hilore_cli.files import write_atomic

KEY = "hilore"
KIND, VERSION = "micro-batch", 1
HEADER_FIELDS = {"kind", "version", "layout", "loss", "meta"}


def save_safetensors(path: str | Path, micro_batch: MicroBatch) -> None:
    """Write a micro-batch; atomic: an old file survives a failed write. Raises ProfileError."""
    micro_batch.validate()
    values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    header = {"kind": KIND, "version": VERSION, "layout": micro_batch.layout, "loss": losses.to_dict(micro_batch.loss), "meta": micro_batch.meta}
    try:
        text = json.dumps(header, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"micro-batch {path}: its meta cannot be written as JSON ({error})") from error
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    try:
        write_atomic(Path(path), safetensors.torch.save(tensors, metadata={KEY: text}))
    except HiloreError as error:
        raise ProfileError(str(error)) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors, and the header where the file is ours. Raises ProfileError: damaged, or another version."""
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = (file.metadata() or {}).get(KEY)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ProfileError(f"is damaged ({first_line(error)}); record it again") from error
    if text is None:
        return tensors, None
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"its header is damaged ({error}); record it again") from error
    if not isinstance(header, dict) or set(header) != HEADER_FIELDS or header["kind"] != KIND:
        raise ProfileError("its header is damaged or of another kind of file; record it again")
    if header["version"] != VERSION:
        raise ProfileError(f"is of version {header['version']}, this hilore reads {VERSION}; record it again")
    return tensors, header


def micro_batch_of(tensors: dict[str, Tensor], header: dict[str, Any]) -> MicroBatch:
    """Raises ProfileError for tensors that are missing or of no field."""
    known = {f.name for f in fields(MicroBatch)} - HEADER_FIELDS
    required = {"input_ids", "attention_mask", "loss_mask", "advantages", "group_ids"}
    if wrong := sorted((set(tensors) - known) | (required - set(tensors))):
        raise ProfileError(f"unknown or missing tensors {', '.join(wrong)}; record it again")
    if not isinstance(header["loss"], dict) or not isinstance(header["meta"], dict):
        raise ProfileError("a header value has the wrong type; record it again")
    return MicroBatch(**tensors, layout=header["layout"], loss=losses.from_dict(header["loss"]), meta=header["meta"])
