"""A recorded micro-batch at another size: more rows, or longer ones, for a profile without the device.

Real: which row is how long relative to the others, how much of it is completion, the advantages of its group, the loss. Invented: the
lengths themselves (each column is repeated) and the rows beyond the recorded ones (whole groups again). Token ids mean nothing in it.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from hilore_cli.batches import MicroBatch
from hilore_cli.errors import UsageError


def stretch(micro_batch: MicroBatch, *, rows: int, length: int) -> MicroBatch:
    """The micro-batch with `rows` rows of `length` columns. Raises UsageError for fewer columns than were recorded, or packed rows.

    Counts of the loss (num_items_in_batch) grow with its tokens.
    """
    here = micro_batch.input_ids.shape[1]
    if micro_batch.layout == "packed":
        raise UsageError("micro-batch: packed rows cannot be stretched; record one of the size you mean")
    if length < here:
        raise UsageError(f"micro-batch: the recorded rows have {here} columns, which is more than the {length} asked for; ask for more --tokens, or fewer --rows")
    chosen = torch.arange(rows) % micro_batch.rows
    columns = torch.arange(length) * here // length
    tensors = {f.name: value for f in fields(micro_batch) if isinstance(value := getattr(micro_batch, f.name), Tensor)}
    changed = {name: value[chosen][:, columns] if value.ndim == 2 else value[chosen] for name, value in tensors.items()}
    changed["group_ids"] = changed["group_ids"] + (torch.arange(rows) // micro_batch.rows) * (int(micro_batch.group_ids.max()) + 1)
    counted = getattr(micro_batch.loss, "num_items_in_batch", None)
    loss = micro_batch.loss
    if counted is not None:
        loss = replace(loss, num_items_in_batch=max(int(changed["loss_mask"].sum()), round(counted * rows * length / (micro_batch.rows * here))))
    result = replace(micro_batch, **changed, loss=loss, meta={**micro_batch.meta, "stretched_from": f"{micro_batch.rows} x {here}"})
    result.validate()
    return result


def size_for(micro_batch: MicroBatch, *, tokens: int, rows: int | None) -> tuple[int, int]:
    """Rows and length of about so many tokens; the recorded rows, without `rows`. Raises UsageError."""
    rows = rows or micro_batch.rows
    if tokens < rows:
        raise UsageError(f"{tokens} tokens in {rows} rows: less than one a row; ask for more --tokens, or fewer --rows")
    return rows, tokens // rows
