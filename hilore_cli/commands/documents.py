"""JSON documents of --json that are no records of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilore_cli.commands.options import (
    EXPOSURE_RULES,
)
from hilore_cli.errors import InfeasibleError

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch


def profile_document(folder: Path) -> dict[str, Any]:
    """profile.json as it is on disk; the tables that it names lie beside it."""
    return json.loads((folder / "profile.json").read_text(encoding="utf-8")) | {"path": str(folder)}


def batch_document(micro_batch: MicroBatch) -> dict[str, Any]:
    from hilore_cli.exposure import to_dict

    return {
        "format": "hilore-micro-batch",
        "rows": micro_batch.rows,
        "length": micro_batch.shape[1],
        "layout": micro_batch.layout,
        "tokens": micro_batch.tokens,
        "real_tokens": micro_batch.real_tokens,
        "loss_tokens": micro_batch.loss_tokens,
        "rewards": None if micro_batch.rewards is None else micro_batch.rewards.tolist(),
        "largest_advantages": [float(row[row.abs().argmax()]) for row in micro_batch.advantages],
        "loss": to_dict(micro_batch.loss),
        "readiness": micro_batch.readiness.value,
        "weights": {rule: micro_batch.weight(rule) for rule in EXPOSURE_RULES},
        "meta": micro_batch.meta,
    }


def infeasible_document(error: InfeasibleError) -> dict[str, Any]:
    return {
        "error": str(error),
        "exit_code": error.exit_code,
        "least_peak_bytes": error.least_peak_bytes,
        "least_peak_at_risk_bytes": error.least_peak_at_risk_bytes,
        "least_risk": error.least_risk,
        "binding_moment": error.binding_moment,
        "heaviest": [{"row": label, "nbytes": nbytes} for label, nbytes in error.heaviest],
    }
