"""Recorded micro-batches: what one forward and backward of a GRPO trainer gets, in TRL's form, and its Parquet file.

A file holds one row per sequence, ids without padding; the header (JSON in the Parquet schema) holds the padded widths,
so that a load gives back the very tensors. Nothing here is pickled.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hilore_cli.errors import ProfileError

FILE_VERSION = 1
HEADER_KEY = b"hilore"
HEADER_FIELDS = {"kind", "version", "loss_tokens", "prompt_tokens", "completion_tokens", "pad_token_id", "meta"}
COLUMNS = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int64())),
        ("completion_ids", pa.list_(pa.int64())),
        ("advantage", pa.float32()),
        ("group_id", pa.int64()),
        ("reward", pa.float32()),
    ]
)
OLD_LOGPS_COLUMN = pa.field("old_logps", pa.list_(pa.float32()))


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """B sequences of P prompt and T completion tokens.

    `old_logps` None: on-policy, every ratio is 1. `loss_tokens`: loss tokens of the whole update, all its micro-batches
    together. `meta`: where it comes from (model, task, seed, temperature, group_size = completions per prompt, date).
    """

    prompt_ids: torch.Tensor  # (B,P) int64, left padded
    prompt_mask: torch.Tensor  # (B,P) int64
    completion_ids: torch.Tensor  # (B,T) int64, right padded
    completion_mask: torch.Tensor  # (B,T) int64, 1 on loss tokens
    advantages: torch.Tensor  # (B,) float32
    group_ids: torch.Tensor  # (B,) int64, equal for the completions of one prompt
    rewards: torch.Tensor  # (B,) float32
    old_logps: torch.Tensor | None = None  # (B,T) float32
    loss_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def input_ids(self) -> torch.Tensor:
        """(B,P+T)"""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """(B,P+T)"""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    @property
    def rows(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def tokens(self) -> int:
        """B * (P+T), padding counted: what the model computes on."""
        return self.rows * (self.prompt_ids.shape[1] + self.completion_ids.shape[1])

    @property
    def real_tokens(self) -> int:
        """Padding not counted."""
        return int(self.prompt_mask.sum() + self.completion_mask.sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in moved.items() if isinstance(x, torch.Tensor)})

    def validate(self) -> None:
        """Raise ProfileError, one line, for shapes that disagree, wrong padding, or a gradient that cannot be."""
        _check_shapes(self)
        _check_padding(self)
        if int(self.completion_mask.sum()) == 0:
            raise ProfileError("micro-batch: all completions are masked, so there is no loss; record another one")
        for name in ("advantages", "rewards", "old_logps"):
            value = getattr(self, name)
            value = value[self.completion_mask.bool()] if name == "old_logps" and value is not None else value
            if value is not None and not bool(torch.isfinite(value).all()):
                raise ProfileError(f"micro-batch: {name} hold NaN or infinity; record another one")
        if bool((self.advantages[self.completion_mask.any(1)] == 0).all()):
            raise ProfileError(
                "micro-batch: all advantages are zero (every group has equal rewards), so the gradient is zero; "
                "record one with mixed rewards"
            )
        if self.loss_tokens < int(self.completion_mask.sum()):
            raise ProfileError(
                f"micro-batch: loss_tokens {self.loss_tokens} is below its own {int(self.completion_mask.sum())} loss tokens; "
                "it must count those of the whole update"
            )


def save_micro_batch(path: str | Path, micro_batch: MicroBatch) -> None:
    """Write a micro-batch as Parquet; atomic: an old file survives a failed write. Raises ProfileError."""
    micro_batch.validate()
    path = Path(path)
    header = {
        "kind": "micro-batch",
        "version": FILE_VERSION,
        "loss_tokens": micro_batch.loss_tokens,
        "prompt_tokens": micro_batch.prompt_ids.shape[1],
        "completion_tokens": micro_batch.completion_ids.shape[1],
        "pad_token_id": _pad_token_id(micro_batch),
        "meta": micro_batch.meta,
    }
    try:
        text = json.dumps(header, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"micro-batch {path}: its meta cannot be written as JSON ({error})") from error
    table = _to_table(micro_batch)
    _write_atomically(path, table.replace_schema_metadata({HEADER_KEY: text.encode()}))


def load_micro_batch(path: str | Path) -> MicroBatch:
    """Read and validate a micro-batch. Raises ProfileError: missing, damaged, another version, unknown columns."""
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"micro-batch {path}: no such file; record one with: hilore rollout")
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ProfileError(f"micro-batch {path}: is damaged ({str(error).splitlines()[0]}); record it again") from error
    header = _read_header(path, table.schema)
    known = {f.name: f.type for f in COLUMNS}
    if OLD_LOGPS_COLUMN.name in table.schema.names:
        known[OLD_LOGPS_COLUMN.name] = OLD_LOGPS_COLUMN.type
    found = {f.name: f.type for f in table.schema}
    wrong = [name for name in sorted(known.keys() | found.keys()) if known.get(name) != found.get(name)]
    if wrong:
        raise ProfileError(
            f"micro-batch {path}: unknown, missing or retyped column {wrong[0]}; it is not of this version of hilore"
        )
    try:
        micro_batch = _from_table(table, header)
        micro_batch.validate()
    except ProfileError as error:
        raise ProfileError(str(error).replace("micro-batch:", f"micro-batch {path}:", 1)) from error
    return micro_batch


def synthetic_micro_batch(
    *, vocab_size: int, rows: int, prompt_tokens: int, completion_tokens: int, group_size: int, seed: int
) -> MicroBatch:
    """A micro-batch of random ids for random models: mixed rewards, shared prompts, uneven lengths.

    At least one prompt and one completion fill their width. `group_size` = completions per prompt; it divides `rows`.
    """
    if group_size < 2 or rows % group_size:
        raise ProfileError(f"micro-batch: {rows} rows are not whole groups of {group_size} (at least 2)")
    rng = torch.Generator().manual_seed(seed)
    groups = rows // group_size

    def lengths(count: int, longest: int) -> torch.Tensor:
        drawn = torch.randint(max(1, longest // 2), longest + 1, (count,), generator=rng)
        drawn[int(torch.randint(count, (1,), generator=rng))] = longest
        return drawn[:, None]

    prompt_ids = torch.randint(vocab_size, (groups, prompt_tokens), generator=rng).repeat_interleave(group_size, 0)
    prompt_lengths = lengths(groups, prompt_tokens).repeat_interleave(group_size, 0)
    prompt_mask = (torch.arange(prompt_tokens) >= prompt_tokens - prompt_lengths).long()
    completion_ids = torch.randint(vocab_size, (rows, completion_tokens), generator=rng)
    completion_mask = (torch.arange(completion_tokens) < lengths(rows, completion_tokens)).long()
    rewards = torch.randint(2, (groups, group_size), generator=rng).float()
    rewards[:, 0], rewards[:, 1] = 0.0, 1.0
    return MicroBatch(
        prompt_ids=prompt_ids * prompt_mask,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids * completion_mask,
        completion_mask=completion_mask,
        advantages=group_advantages(rewards.flatten(), group_size=group_size),
        group_ids=torch.arange(groups).repeat_interleave(group_size),
        rewards=rewards.flatten(),
        loss_tokens=int(completion_mask.sum()),
        meta={"task": "synthetic", "seed": seed, "group_size": group_size, "temperature": 1.0},
    )


def group_advantages(rewards: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """(R - mean) / (std + 1e-4) in each group of consecutive rows, the unbiased std, as TRL does."""
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


# --- validation


def _check_shapes(mb: MicroBatch) -> None:
    if (
        mb.prompt_ids.ndim != 2
        or mb.completion_ids.ndim != 2
        or 0 in mb.prompt_ids.shape
        or 0 in mb.completion_ids.shape
    ):
        raise ProfileError(
            f"micro-batch: is empty or not two-dimensional (prompt_ids {tuple(mb.prompt_ids.shape)}, "
            f"completion_ids {tuple(mb.completion_ids.shape)})"
        )
    rows = mb.prompt_ids.shape[0]
    expected = {
        "prompt_mask": tuple(mb.prompt_ids.shape),
        "completion_ids": (rows, mb.completion_ids.shape[1]),
        "completion_mask": (rows, mb.completion_ids.shape[1]),
        "advantages": (rows,),
        "group_ids": (rows,),
        "rewards": (rows,),
        "old_logps": (rows, mb.completion_ids.shape[1]),
    }
    for name, shape in expected.items():
        value = getattr(mb, name)
        if value is not None and tuple(value.shape) != shape:
            raise ProfileError(f"micro-batch: {name} has shape {tuple(value.shape)} where the ids ask for {shape}")


def _check_padding(mb: MicroBatch) -> None:
    for name, mask, step in (("prompt_mask", mb.prompt_mask, 1), ("completion_mask", mb.completion_mask, -1)):
        binary = bool(((mask == 0) | (mask == 1)).all())
        if not binary or bool((mask.diff(dim=1) * step < 0).any()):
            side = "left" if step == 1 else "right"
            raise ProfileError(f"micro-batch: {name} is not {side} padded (prompts pad left, completions right)")
    if not bool(mb.prompt_mask.any(1).all()):
        raise ProfileError("micro-batch: a row has no prompt token; every completion needs a prompt")


# --- Parquet


def _pad_token_id(mb: MicroBatch) -> int:
    padding = torch.cat([mb.prompt_ids[mb.prompt_mask == 0], mb.completion_ids[mb.completion_mask == 0]])
    return int(padding[0]) if len(padding) else 0


def _to_table(mb: MicroBatch) -> pa.Table:
    def unpadded(values: torch.Tensor, mask: torch.Tensor) -> list[list]:
        return [row[keep].tolist() for row, keep in zip(values, mask.bool(), strict=True)]

    columns = [
        unpadded(mb.prompt_ids, mb.prompt_mask),
        unpadded(mb.completion_ids, mb.completion_mask),
        mb.advantages.tolist(),
        mb.group_ids.tolist(),
        mb.rewards.tolist(),
    ]
    schema = COLUMNS
    if mb.old_logps is not None:
        columns.append(unpadded(mb.old_logps, mb.completion_mask))
        schema = schema.append(OLD_LOGPS_COLUMN)
    return pa.table([pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)], schema=schema)


def _from_table(table: pa.Table, header: dict[str, Any]) -> MicroBatch:
    column = {name: table.column(name).to_pylist() for name in table.schema.names}
    if any(value is None for values in column.values() for value in values):
        raise ProfileError("micro-batch: a cell is empty; record it again")
    prompt_ids, prompt_mask = _padded(column["prompt_ids"], header["prompt_tokens"], header["pad_token_id"], left=True)
    completion_ids, completion_mask = _padded(
        column["completion_ids"], header["completion_tokens"], header["pad_token_id"], left=False
    )
    old_logps = None
    if "old_logps" in column:
        if [len(row) for row in column["old_logps"]] != [len(row) for row in column["completion_ids"]]:
            raise ProfileError("micro-batch: old_logps and completion_ids differ in length; record it again")
        old_logps, _ = _padded(column["old_logps"], header["completion_tokens"], 0.0, left=False)
    return MicroBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        advantages=torch.tensor(column["advantage"], dtype=torch.float32),
        group_ids=torch.tensor(column["group_id"], dtype=torch.int64),
        rewards=torch.tensor(column["reward"], dtype=torch.float32),
        old_logps=old_logps,
        loss_tokens=header["loss_tokens"],
        meta=header["meta"],
    )


def _padded(rows: list[list], width: int, fill: float, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists to (rows,width) values and mask."""
    dtype = torch.int64 if isinstance(fill, int) else torch.float32
    values = torch.full((len(rows), width), fill, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        if len(row) > width:
            raise ProfileError(
                f"micro-batch: row {i} has {len(row)} tokens, its header allows {width}; record it again"
            )
        span = slice(width - len(row), width) if left else slice(0, len(row))
        values[i, span] = torch.tensor(row, dtype=dtype)
        mask[i, span] = 1
    return values, mask


def _read_header(path: Path, schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(HEADER_KEY)
    if raw is None:
        raise ProfileError(
            f"micro-batch {path}: is a Parquet file that hilore did not write; record one with: hilore rollout"
        )
    try:
        header = json.loads(raw, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ProfileError(f"micro-batch {path}: its header is damaged ({error}); record it again") from error
    if not isinstance(header, dict) or header.get("kind") != "micro-batch":
        raise ProfileError(f"micro-batch {path}: is another kind of hilore file; give one that hilore rollout wrote")
    if header.get("version") != FILE_VERSION:
        raise ProfileError(
            f"micro-batch {path}: is of version {header.get('version')}, this hilore reads {FILE_VERSION}; record it again"
        )
    if wrong := sorted(set(header) ^ HEADER_FIELDS):
        raise ProfileError(f"micro-batch {path}: unknown or missing header key {wrong[0]}; record it again")
    counts = [header[key] for key in ("loss_tokens", "prompt_tokens", "completion_tokens", "pad_token_id")]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(header["meta"], dict):
        raise ProfileError(f"micro-batch {path}: a header value has the wrong type; record it again")
    return header


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON knows")


def _write_atomically(path: Path, table: pa.Table) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            pq.write_table(table, stream, compression="zstd")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ProfileError(
            f"micro-batch {path}: cannot be written ({error.strerror or error}); nothing was changed"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
