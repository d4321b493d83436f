"""What a profile, a plan or a bench was made on: micro-batches by digest and shape, machine and versions."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
import transformers
from torch import Tensor

import hilore_cli
from hilore_cli import exposure as losses
from hilore_cli.batches import MicroBatch
from hilore_cli.provenance import BatchId, Machine
from hilore_cli.schema import MicroBatchRow


def batch_identity(micro_batch: MicroBatch, *, source: str, task: str = "") -> BatchId:
    """What was profiled: a digest over all tensors, layout and loss, and the shape that the plan will hold for. `task`: where the micro-batch names none."""
    tensors = {f.name: value for f in fields(micro_batch) if isinstance(value := getattr(micro_batch, f.name), Tensor)}
    told = json.dumps([micro_batch.layout, losses.to_dict(micro_batch.loss), list(tensors)], sort_keys=True)
    digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors.values()) + told.encode()).hexdigest()[:16]
    _, counts = torch.unique(micro_batch.group_ids, return_counts=True)
    rows, length = micro_batch.shape
    return BatchId(source=source, digest=digest, task=str(micro_batch.meta.get("task") or task), rows=rows, length=length, tokens=micro_batch.tokens, loss_tokens=micro_batch.loss_tokens, group_size=int(counts.max()))


def micro_batch_row(source: str, micro_batch: MicroBatch, *, gradient_norm: float) -> MicroBatchRow:
    identity = batch_identity(micro_batch, source=source, task="")
    shared = {name: getattr(identity, name) for name in ("source", "digest", "rows", "length", "tokens", "loss_tokens")}
    return MicroBatchRow(**shared, logits=micro_batch.weight("logits"), squared=micro_batch.weight("squared"), scalar=micro_batch.weight("scalar"), uniform=micro_batch.weight("tokens"), gradient_norm=gradient_norm)


def update_digest(batches: Sequence[MicroBatch]) -> str:
    """One micro-batch's digest, or one over those of several."""
    digests = [batch_identity(batch, source="").digest for batch in batches]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def describe_machine(device: torch.device) -> Machine:
    """Device, processor and versions that figures depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Machine(device=name, cpu=_cpu_name(), threads=torch.get_num_threads(), torch=torch.__version__, transformers=transformers.__version__, python=sys.version.split()[0], hilore=hilore_cli.__version__)


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
