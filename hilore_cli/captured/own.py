"""hilore's own tensors, for any trainer: the fields of `MicroBatch`, padded (B,S) or packed (1,N); and the same as safetensors.

Per-token arrays are aligned to the token itself. Arrays of S-1 columns beside ids of S are taken for predictions (column t predicts
token t+1) and shifted. Packed ids, (1,N) or (N,), come with `cu_seqlens` (K+1 boundaries of K rows) or with position ids that restart
at 0; per-token arrays are (1,N) or (N,), advantages may be one per row (K,). Packed predictions are refused: nothing shows the shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hilore_cli import exposure as losses
from hilore_cli.batches import LAYOUTS, PER_TOKEN, MicroBatch, from_rows
from hilore_cli.captured import rows
from hilore_cli.errors import ProfileError
from hilore_cli.exposure import Loss, TrlLoss

SIGNATURES = ({"input_ids", "loss_mask"},)
REQUIRED = {"input_ids", "loss_mask", "advantages"}
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
KNOWN = {*PER_TOKEN, *BOUNDARIES, "attention_mask", "position_ids", "group_ids", "rewards", "layout"}
RECIPE = '''\
# Any trainer: save what the loss gets of one micro-batch, B rows (sequences) of S columns, then: hilore profile --batch captured.pt
# Values of a token stand at the token itself, not at the position that predicts it; packed rows (1,N) come with cu_seqlens.
import torch

inputs = {
    "input_ids": input_ids,  # (B,S)
    "attention_mask": attention_mask,  # (B,S), padding on the left or on the right; leave out where packed
    "loss_mask": loss_mask,  # (B,S), 1 on the tokens that the loss counts
    "advantages": advantages,  # (B,S) or (B,)
    # where the loss has them, (B,S): "old_logps", "ref_logps", "sampling_logps", "is_weights"; (B,): "group_ids", "rewards"
    # "normaliser" (B,S): the weight of each token in the loss, where none of the losses below is yours
    "layout": "positions",  # "padded": no position ids, "positions": they skip the padding, "packed"
}
# the loss as TRL ("trl"), verl ("verl") or OpenRLHF ("openrlhf") names its options; what is left out has that trainer's default
loss = {"trainer": "trl", "loss_type": "dapo", "epsilon": 0.2, "num_items_in_batch": int(loss_mask.sum())}
inputs = {name: value.detach().cpu() if torch.is_tensor(value) else value for name, value in inputs.items()}
torch.save({"hilore_capture": 1, "trainer": "own", "inputs": inputs, "loss": loss, "meta": {}}, "captured.pt")
'''


def read(inputs: Mapping[str, Any], *, loss: Mapping[str, Any] | None, meta: dict[str, Any]) -> list[MicroBatch]:
    """One micro-batch. Raises ProfileError."""
    rows.check_keys(inputs, trainer="own", required=REQUIRED, known=KNOWN)
    inputs = {key: value for key, value in inputs.items() if value is not None}
    ids = rows.token_ids(rows.numbers(inputs, "input_ids"), "input_ids")
    named = [name for name in BOUNDARIES if name in inputs]
    packed = ids.ndim == 1 or bool(named) or (ids.shape[:1] == (1,) and "attention_mask" not in inputs and "position_ids" in inputs)
    chosen, width = _packed_rows(inputs, ids.reshape(1, -1), named) if packed else _padded_rows(inputs, ids)
    layout = inputs.get("layout", "packed" if packed else _layout(inputs))
    if layout not in LAYOUTS:
        raise ProfileError(f"layout {layout!r} is unknown; it is one of {', '.join(LAYOUTS)}")
    counted = sum(sum(row["loss_mask"]) for row in chosen)
    return [from_rows(chosen, loss=_loss(loss, counted), layout=layout, width=width, pad_token_id=0 if packed else _pad_token_id(inputs, ids), meta=meta)]


def _loss(options: Mapping[str, Any] | None, counted: int) -> Loss:
    if options is None:
        rows.assume("own", "no loss options were recorded", "TRL's defaults, and that the micro-batch is a whole update")
        return TrlLoss(num_items_in_batch=counted)
    return losses.from_dict({name: rows.scalar(value) for name, value in options.items()})


def _padded_rows(inputs: Mapping[str, Any], ids: Tensor) -> tuple[list[dict[str, Any]], int]:
    ids = rows.table({"input_ids": ids}, "input_ids")
    if "attention_mask" not in inputs:
        raise ProfileError("own inputs lack attention_mask (B,S) (or cu_seqlens, where rows are packed into one); save it too")
    attention_mask = rows.mask(inputs, "attention_mask", like=ids)
    loss_mask = rows.zeros_and_ones(_aligned(inputs, "loss_mask", ids), "loss_mask")
    values = {name: _aligned(inputs, name, ids) for name in PER_TOKEN if name in inputs}
    per_row = rows.numbers(inputs, "advantages").ndim == 1
    values["advantages"] = rows.advantage_table(inputs, loss_mask) if per_row else _aligned(inputs, "advantages", ids)
    rows.check_zero_off_mask(values["advantages"], loss_mask, name="advantages", cause="multiply them by the loss mask, and see that both stand at the tokens themselves")
    groups, rewards = (rows.per_row(inputs, name, len(ids)) for name in ("group_ids", "rewards"))
    return rows.rows_of(ids, attention_mask, loss_mask, groups=groups, rewards=rewards, **values), ids.shape[1]


def _aligned(inputs: Mapping[str, Any], name: str, ids: Tensor) -> Tensor:
    """(B,S); a table of S-1 columns is of predictions and moves one column to the right."""
    value = rows.numbers(inputs, name)
    predictions = value.ndim == 2 and value.shape[1] == ids.shape[1] - 1
    value = rows.table(inputs, name, like=ids, width=ids.shape[1] - 1 if predictions else None)
    return rows.shifted(value, 1) if predictions else value


def _layout(inputs: Mapping[str, Any]) -> str:
    """padded, or positions where the recorded position ids skip the padding."""
    if "position_ids" not in inputs:
        return "padded"
    positions = rows.table(inputs, "position_ids")
    attention_mask = rows.mask(inputs, "attention_mask", like=positions)
    skipping = ((attention_mask.cumsum(1) - 1 != positions) & (attention_mask == 1)).any()
    if not bool(skipping):
        return "positions"
    if not bool(((torch.arange(positions.shape[1]) != positions) & (attention_mask == 1)).any()):
        return "padded"
    raise ProfileError("position_ids count neither the tokens of a row nor its columns from 0; hilore would compute another forward than the trainer")


def _packed_rows(inputs: Mapping[str, Any], ids: Tensor, named: list[str]) -> tuple[list[dict[str, Any]], int]:
    count = ids.shape[1]
    lengths = _packed_lengths(inputs, count, named)
    flat = {}
    for name in ("loss_mask", "advantages", *PER_TOKEN):
        if name not in inputs:
            continue
        value = rows.numbers(inputs, name).flatten()
        if name == "advantages" and len(value) == len(lengths) != count:
            value = value.repeat_interleave(torch.tensor(lengths)) * flat["loss_mask"]
        if len(value) != count:
            raise ProfileError(f"{name} has {len(value)} values for {count} packed tokens; align it to the tokens themselves and save one value a token")
        flat[name] = rows.zeros_and_ones(value[None], name)[0] if name == "loss_mask" else value.float()
    rows.check_zero_off_mask(flat["advantages"][None], flat["loss_mask"][None], name="advantages", cause="multiply them by the loss mask, and see that both stand at the tokens themselves")
    pieces = {name: value.split(lengths) for name, value in flat.items()}
    ids_of_rows = ids[0].split(lengths)
    groups, rewards = (rows.per_row(inputs, name, len(lengths)) for name in ("group_ids", "rewards"))
    for i, mask in enumerate(pieces["loss_mask"]):
        if mask[0] == 1:
            raise ProfileError(f"row {i}, column 0: the first token of a packed row is a loss token, and no position of its row predicts it; is the loss mask shifted by one?")
    values = [name for name in flat if name != "loss_mask"]
    return [
        {
            "ids": ids_of_rows[i].tolist(),
            "loss_mask": pieces["loss_mask"][i].tolist(),
            **{name: pieces[name][i] for name in values},
            "group": None if groups is None else int(groups[i]),
            "reward": None if rewards is None else float(rewards[i]),
        }
        for i in range(len(lengths))
    ], max(lengths)


def _packed_lengths(inputs: Mapping[str, Any], count: int, named: list[str]) -> list[int]:
    """Tokens of each packed row. Raises ProfileError for boundaries that are none, or that the position ids contradict."""
    if "attention_mask" in inputs and not bool((rows.numbers(inputs, "attention_mask") == 1).all()):
        raise ProfileError("packed ids come with an attention mask that has zeros; packed rows have no padding: cut it off")
    positions = rows.whole_numbers(inputs, "position_ids") if "position_ids" in inputs else None
    if positions is not None and len(positions) != count:
        raise ProfileError(f"position_ids has {len(positions)} values for {count} packed tokens; save one a token")
    if named:
        boundaries = rows.whole_numbers(inputs, named[0])
    elif positions is not None:
        boundaries = [i for i, position in enumerate(positions) if position == 0] + [count]
    else:
        raise ProfileError("packed ids lack cu_seqlens, which says where rows begin; save it, or position_ids that restart at 0")
    if boundaries[:1] != [0] or boundaries[-1] != count or any(a >= b for a, b in pairwise(boundaries)):
        raise ProfileError(f"{named[0] if named else 'position_ids'}: rows begin at {boundaries[:8]}; boundaries start at 0, increase, and end at the {count} tokens")
    lengths = [b - a for a, b in pairwise(boundaries)]
    if positions is not None and (wrong := [i for i, (a, n) in enumerate(zip(boundaries, lengths, strict=False)) if positions[a : a + n] != list(range(n))]):
        raise ProfileError(f"position_ids and the row boundaries disagree: row {wrong[0]} begins at token {boundaries[wrong[0]]} and its positions do not count from 0")
    return lengths


def _pad_token_id(inputs: Mapping[str, Any], ids: Tensor) -> int:
    padding = ids[rows.numbers(inputs, "attention_mask") == 0]
    return int(padding[0]) if len(padding) else 0
