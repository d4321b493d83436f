"""What the readers of all trainers share: keys, tables, loss options, and the way from padded tables to rows.

B rows, S columns. A table is (B,S) or (B,R), R response columns; a row is a dict as `batches.from_rows` takes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilore_cli import exposure as losses
from hilore_cli.batches import PER_TOKEN
from hilore_cli.errors import ProfileError, first_line
from hilore_cli.exposure import Loss

IMAGES = {
    "image_grid_thw", "image_position_ids", "image_sizes", "images", "mm_token_type_ids", "mm_train_inputs", "multi_modal_inputs",
    "multimodal_train_inputs", "num_images", "num_tiles", "pixel_attention_mask", "pixel_values", "spatial_shapes", "token_type_ids",
}  # fmt: skip
"""Keys under which trainers hand pictures to the model."""


def check_keys(inputs: Mapping[str, Any], *, trainer: str, required: set[str], known: set[str]) -> None:
    """Raise ProfileError that lists what is missing, or unknown. Keys that hold None count as absent."""
    present = {key for key, value in inputs.items() if value is not None}
    if missing := sorted(required - present):
        raise ProfileError(f"{trainer} inputs lack {', '.join(missing)}; record them with: hilore capture {trainer}")
    if images := sorted(key for key in present & IMAGES if not _is_empty(inputs[key])):
        raise ProfileError(f"{trainer} inputs hold pictures ({', '.join(images)}), hilore reads text alone; record a batch of text")
    if unknown := sorted(map(str, present - required - known - IMAGES)):
        raise ProfileError(f"{trainer} inputs hold unknown keys {', '.join(unknown)}; remove them if the loss does not need them, or record with: hilore capture {trainer}")


def _is_empty(value: Any) -> bool:
    """Batches of text hold lists of None, or of empty dicts."""
    return isinstance(value, (list, tuple)) and all(item is None or (isinstance(item, Mapping) and not item) for item in value)


def loss_of(trainer: str, options: Mapping[str, Any] | None, **recorded: Any) -> Loss:
    """The loss of a trainer's own options, and of values `recorded` elsewhere (None: not recorded). Without options the
    trainer's defaults, and a warning that says so. Raises UsageError for unknown options and wrong values."""
    if options is None:
        assume(trainer, "no loss options were recorded", f"{trainer}'s defaults")
    given = {name: scalar(value) for name, value in (options or {}).items()}
    return losses.from_dict({"trainer": trainer, **given, **{name: scalar(value) for name, value in recorded.items() if value is not None}})


def assume(trainer: str, missing: str, assumed: str) -> None:
    warnings.warn(f"{trainer}: {missing}, so hilore assumes {assumed}; hilore capture {trainer} shows how to record it", stacklevel=3)


def scalar(value: Any) -> Any:
    """A tensor of one element as a number; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def numbers(inputs: Mapping[str, Any], name: str) -> Tensor:
    """inputs[name] as a tensor on the CPU, whatever its shape; a jagged one is refused."""
    value = inputs[name]
    try:
        value = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(f"{name} is no table of numbers ({first_line(error)}); save it as a tensor") from error
    if value.is_nested:
        raise ProfileError(f"{name} is jagged where a filled table is expected; save it padded")
    return value


def number(inputs: Mapping[str, Any], name: str) -> float:
    """inputs[name] as one finite number."""
    value = numbers(inputs, name)
    if value.numel() != 1 or not bool(torch.isfinite(value).all()):
        raise ProfileError(f"{name} is no single finite number; save the one that the trainer used")
    return float(value)


def whole_numbers(inputs: Mapping[str, Any], name: str) -> list[int]:
    """inputs[name] as a flat list of integers."""
    value = numbers(inputs, name).flatten()
    if not bool(torch.isfinite(value).all()) or bool((value != value.round()).any()):
        raise ProfileError(f"{name} are no whole numbers; save them as integers")
    return value.long().tolist()


def table(inputs: Mapping[str, Any], name: str, *, like: Tensor | None = None, width: int | None = None) -> Tensor:
    """inputs[name] as a tensor of two dimensions; `like` and `width` say which shape it must have."""
    value = numbers(inputs, name)
    if value.ndim != 2 or value.numel() == 0:
        raise ProfileError(f"{name} has shape {tuple(value.shape)} where a filled table of rows and columns is expected")
    expected = None if like is None else (like.shape[0], like.shape[1] if width is None else width)
    if expected is not None and tuple(value.shape) != expected:
        raise ProfileError(f"{name} has shape {tuple(value.shape)} where the ids ask for {expected}; were they recorded at the same place?")
    return value


def token_ids(ids: Tensor, name: str) -> Tensor:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ProfileError(f"{name} are of {ids.dtype}; token ids are integers")
    return ids


def per_row(inputs: Mapping[str, Any], name: str, rows: int) -> Tensor | None:
    """inputs[name] as (B,) numbers, None where it was not recorded."""
    if inputs.get(name) is None:
        return None
    value = numbers(inputs, name).flatten()
    if len(value) != rows:
        raise ProfileError(f"{name}: {len(value)} for {rows} rows; they must be of the same micro-batch")
    return value


def mask(inputs: Mapping[str, Any], name: str, *, like: Tensor, width: int | None = None) -> Tensor:
    """inputs[name] as an int64 table of zeros and ones; recorded as bool, integer or float."""
    return zeros_and_ones(table(inputs, name, like=like, width=width), name)


def zeros_and_ones(value: Tensor, name: str) -> Tensor:
    wrong = (value != 0) & (value != 1)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ProfileError(f"{name} holds {value[tuple(place)].item()} at {place}; a mask holds zeros and ones")
    return value.to(torch.int64)


def advantage_table(inputs: Mapping[str, Any], loss_mask: Tensor, *, name: str = "advantages") -> Tensor:
    """Advantages of shape (B,), (B,1) or as `loss_mask`, spread over the loss tokens."""
    value = numbers(inputs, name).float()
    if tuple(value.shape) in {loss_mask.shape[:1], (loss_mask.shape[0], 1)}:
        return torch.where(loss_mask == 1, value.reshape(-1, 1), 0.0)
    if value.shape != loss_mask.shape:
        raise ProfileError(f"{name} have shape {tuple(value.shape)}; they are one per row {tuple(loss_mask.shape[:1])} or one per token {tuple(loss_mask.shape)}")
    return value


def check_zero_off_mask(values: Tensor, loss_mask: Tensor, *, name: str, cause: str) -> None:
    """For trainers that promise zeros there: anything else says that one of the two is shifted."""
    outside = (values != 0) & (loss_mask == 0)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise ProfileError(f"{name} are not zero off the loss mask (row {row}, column {column}); {cause}")


def shifted(value: Tensor, columns: int) -> Tensor:
    """The same table with empty columns on the left: (B,R) -> (B,columns+R)."""
    return pad(value, (columns, 0))


def rows_of(ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, *, groups: Sequence[Any] | None = None, rewards: Tensor | None = None, **values: Tensor | None) -> list[dict[str, Any]]:
    """Rows without padding from (B,S) tables; `values` are advantages and any of PER_TOKEN.

    Raises ProfileError, naming row and column, for holes in the attention mask and for loss tokens that cannot be.
    """
    check_runs(attention_mask)
    outside = (loss_mask == 1) & (attention_mask == 0)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise ProfileError(f"row {row}, column {column}: a loss token on padding; is the loss mask shifted, or the padding on the other side?")
    first = pad(attention_mask, (1, 0)).diff(dim=1) == 1
    if bool((first & (loss_mask == 1)).any()):
        row, column = (first & (loss_mask == 1)).nonzero()[0].tolist()
        raise ProfileError(f"row {row}, column {column}: the first token of a row is a loss token, and no position predicts it; is the loss mask shifted by one, or the prompt missing?")
    numbered = None if groups is None else group_numbers(groups, len(ids))
    real, tables = attention_mask.bool(), {name: value.float() for name, value in values.items() if value is not None}
    assert set(tables) <= {"advantages", *PER_TOKEN}
    return [
        {
            "ids": ids[i][keep].tolist(),
            "loss_mask": loss_mask[i][keep].tolist(),
            "padding": int(keep.int().argmax()),
            **{name: value[i][keep] for name, value in tables.items()},
            "group": None if numbered is None else numbered[i],
            "reward": None if rewards is None else float(rewards[i]),
        }
        for i, keep in enumerate(real)
    ]


def check_runs(attention_mask: Tensor) -> None:
    """Each row is one run of ones, so that its padding is on the left, on the right, or both."""
    steps = pad(attention_mask, (1, 1)).diff(dim=1)
    broken = (steps == 1).sum(1) > 1
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        column = int((steps[row] == -1).nonzero()[0])
        raise ProfileError(f"row {row}, column {column}: the attention mask has a hole between tokens; pad on the left or on the right, and mask tool results in the loss mask only")


def group_numbers(groups: Sequence[Any] | Tensor, rows: int) -> list[int]:
    """Numbers 0, 1, ... in order of appearance for group ids of any kind (verl's are strings)."""
    groups = groups.flatten().tolist() if isinstance(groups, Tensor) and not groups.is_nested else groups
    if not isinstance(groups, (list, tuple)) or len(groups) != rows:
        raise ProfileError(f"{len(groups) if isinstance(groups, (list, tuple)) else 'no list of'} group ids for {rows} rows; record one a row, at the same place")
    groups = list(map(str, groups))
    known: dict[Any, int] = {}
    return [known.setdefault(group, len(known)) for group in groups]


def check_count(own: int, *, of_update: float | None, name: str) -> None:
    """The loss tokens of the whole update are no fewer than the micro-batch's `own`; None: not recorded."""
    if of_update is not None and of_update < own:
        raise ProfileError(f"{name} {of_update:g} is below the {own} loss tokens of this micro-batch; it must count those of the whole update")


def ragged(inputs: Mapping[str, Any], name: str) -> list[Tensor] | None:
    """The rows of a jagged tensor, of {"values", "offsets"}, or of a list with one entry a row; None for a dense table."""
    value = inputs[name]
    if isinstance(value, Tensor):
        return [row.detach().cpu() for row in value.unbind()] if value.is_nested else None
    if isinstance(value, Mapping) and {"values", "offsets"} <= set(value):
        flat, offsets = numbers(value, "values"), numbers(value, "offsets")
        lengths = offsets.diff()
        if offsets.ndim != 1 or bool((lengths < 0).any()) or int(lengths.sum()) != len(flat):
            raise ProfileError(f"{name}: its offsets do not end at its {len(flat)} values; record both of one tensor")
        return list(flat.split(lengths.tolist()))
    if not isinstance(value, (list, tuple)):
        raise ProfileError(f"{name} is a {type(value).__name__} where a tensor, or a list of one tensor a row, is expected")
    return [numbers({name: row}, name) for row in value]
