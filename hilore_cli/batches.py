"""Recorded micro-batches: what one forward and backward of a GRPO trainer gets, whichever trainer, and our own file of it.

B rows (sequences), S columns. Every per-token array is [B,S] and aligned to the token itself: the value at column s belongs
to `input_ids[:, s]`, which the position before it predicts. A row's tokens are one run; padding may stand on either side.

A file is Parquet: one row per sequence, without padding; the header (JSON in the schema) holds width, layout and loss, so that a
load gives back the very tensors. `hilore_cli.captured` reads what trainers record. Nothing here is pickled.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hilore_cli import exposure as losses
from hilore_cli.errors import HiloreError, ProfileError, UsageError, first_line
from hilore_cli.exposure import Loss, LossInputs, Readiness, TrlLoss
from hilore_cli.files import write_atomic
from hilore_cli.schema import ExposureRule

Layout = Literal["padded", "positions", "packed"]
LAYOUTS = ("padded", "positions", "packed")
"""How the trainer hands rows to the model: `padded` with a mask alone (TRL: positions count the left padding), `positions` with a
mask and position ids that do not (verl, OpenRLHF), `packed` as one row with restarting position ids and no mask."""

FILE_VERSION = 2
HEADER_KEY = b"hilore"
HEADER_FIELDS = {"kind", "version", "width", "pad_token_id", "layout", "loss", "meta"}
PER_TOKEN = ("old_logps", "ref_logps", "sampling_logps", "is_weights", "normaliser")
"""Optional [B,S] fields, each a list column of the file where it is there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One micro-batch. `old_logps` None: on-policy, every ratio is 1.

    `meta`: where it comes from (model, task, seed, group_size = completions per prompt, date).
    """

    input_ids: Tensor  # (B,S) int64
    attention_mask: Tensor  # (B,S) int64, one run of ones per row
    loss_mask: Tensor  # (B,S) int64, 1 on tokens that the loss counts
    advantages: Tensor  # (B,S) float32, 0 off the loss mask
    group_ids: Tensor  # (B,) int64, equal for the completions of one prompt
    loss: Loss
    layout: Layout = "padded"
    rewards: Tensor | None = None  # (B,) float32
    old_logps: Tensor | None = None  # (B,S) float32, and so the next four
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    is_weights: Tensor | None = None
    normaliser: Tensor | None = None  # z of each token, instead of the loss's own rule
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """B, the sequences."""
        return self.input_ids.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of what the model computes on: (1, real tokens) when packed."""
        return (1, self.real_tokens) if self.layout == "packed" else tuple(self.input_ids.shape)

    @property
    def tokens(self) -> int:
        """What the model computes on, padding counted."""
        return self.shape[0] * self.shape[1]

    @property
    def real_tokens(self) -> int:
        """Padding not counted."""
        return int(self.attention_mask.sum())

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def prompt_lengths(self) -> Tensor:
        """(B,) tokens before a row's first loss token; the whole row where there is none."""
        before = self.loss_mask.cumsum(1) == 0
        return (before & self.attention_mask.bool()).sum(1)

    @property
    def zero_rows(self) -> int:
        """Rows that can be skipped exactly; 0 where the loss has terms that reach every row."""
        try:
            return int(zero_exposure_rows(self).sum())
        except UsageError:
            return 0

    @property
    def has_gradient(self) -> bool:
        """Whether any token has a coefficient; a group of equal rewards has none."""
        return losses.reaches_zero_advantages(self.loss) or bool((self.advantages != 0).any())

    def model_inputs(self) -> dict[str, Tensor]:
        """What the decoder is called with."""
        positions = (self.attention_mask.cumsum(1) - 1).clamp(min=0)
        if self.layout == "packed":
            real = self.attention_mask.bool()
            return {"input_ids": self.input_ids[real][None], "position_ids": positions[real][None]}
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return inputs | ({"position_ids": positions} if self.layout == "positions" else {})

    def predicting_positions(self) -> Tensor:
        """(N,) for each loss token, in row-major order, the flat index of the hidden state that predicts it."""
        if self.layout != "packed":
            row, column = self.loss_mask.nonzero(as_tuple=True)
            return row * self.input_ids.shape[1] + column - 1
        flat = self.attention_mask.flatten().cumsum(0) - 1
        return flat[self.loss_mask.flatten().bool()] - 1

    def loss_inputs(self, *, logps: Tensor | None = None, entropies: Tensor | None = None, dtype: torch.dtype = torch.float64) -> LossInputs:
        """What the loss sees; `logps` and `entropies` (N,) of the loss tokens in row-major order, where the forward has been run."""
        dtype = dtype if logps is None else logps.dtype
        optional = {name: None if (x := getattr(self, name)) is None else x.to(dtype) for name in PER_TOKEN}
        return LossInputs(mask=self.loss_mask.to(dtype), advantages=self.advantages.to(dtype), logps=self._on_tokens(logps), entropies=self._on_tokens(entropies), **optional)

    def _on_tokens(self, values: Tensor | None) -> Tensor | None:
        """(N,) -> (B,S), zero off the loss mask."""
        if values is None:
            return None
        full = torch.zeros(self.loss_mask.shape, dtype=values.dtype, device=values.device)
        full[self.loss_mask.bool()] = values
        return full

    @property
    def readiness(self) -> Readiness:
        """How early the exposure is known."""
        return losses.readiness(self.loss, self.loss_inputs())

    def exposure(self, *, logps: Tensor | None = None, entropies: Tensor | None = None) -> Tensor:
        """c (B,S) = dL/dlogp of each token; without `logps` as far as it is known before the forward (exposure.estimate)."""
        if logps is None:
            return losses.estimate(self.loss, self.loss_inputs(), xp=torch)
        return losses.exposure(self.loss, self.loss_inputs(logps=logps, entropies=entropies), xp=torch)

    @cached_property
    def known_exposure(self) -> Tensor:
        """(N,) c of the loss tokens, as known before the forward."""
        return self.exposure()[self.loss_mask.bool()]

    @property
    def known_logps(self) -> Tensor | None:
        """(N,) log-probabilities of the loss tokens that were recorded before the forward: `old_logps`, or the sampler's."""
        values = self.old_logps if self.old_logps is not None else self.sampling_logps
        return None if values is None else values[self.loss_mask.bool()]

    def weight(self, rule: ExposureRule) -> float | None:
        """What the squared gradient is taken to go with (schema.ExposureRule); None where the rule needs what was not recorded."""
        if rule == "tokens":
            return float(losses.normaliser(self.loss, self.loss_inputs(), xp=torch).square().sum())
        if rule == "logits" and self.known_logps is None:
            return None
        return losses.weight_of(self.known_exposure, rule, logps=self.known_logps, xp=torch)

    def to(self, device: torch.device | str) -> MicroBatch:
        return self._changed(lambda x: x.to(device))

    def take_rows(self, chosen: Tensor) -> MicroBatch:
        """Some of the rows (indices or a boolean mask), padded as before."""
        return self._changed(lambda x: x[chosen])

    def _changed(self, change: Any) -> MicroBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(x) for name, x in values.items() if isinstance(x, Tensor)})

    def validate(self) -> None:
        """Raise ProfileError, one line, for shapes that disagree, wrong padding or alignment, or nothing that a loss counts."""
        _check_shapes(self)
        _check_runs(self)
        _check_values(self)
        _check_groups(self)
        if self.loss_tokens == 0:
            raise ProfileError("micro-batch: all completions are masked, so there is no loss; record another one")


def require_gradient(batches: Sequence[MicroBatch]) -> None:
    """Raise ProfileError where no micro-batch has a gradient at all."""
    if not any(batch.has_gradient for batch in batches):
        raise ProfileError("micro-batch: all advantages are zero (every group has equal rewards), so the gradient is zero; record one with mixed rewards")


def from_rows(
    rows: Sequence[dict[str, Any]],
    *,
    loss: Loss,
    layout: Layout,
    width: int,
    pad_token_id: int = 0,
    meta: dict[str, Any] | None = None,
) -> MicroBatch:
    """Build a micro-batch from rows without padding: `ids`, `loss_mask`, `advantages` and any of PER_TOKEN as lists of the row's
    length, `padding` (columns on the left), `group` and `reward` (None: unknown). Groups that are unknown come from equal prompts.

    Raises ProfileError for lists of differing lengths or rows longer than `width`.
    """
    shape = (len(rows), width)
    tensors = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "loss_mask": torch.zeros(shape, dtype=torch.int64),
        "advantages": torch.zeros(shape, dtype=torch.float32),
    }
    tensors |= {name: torch.zeros(shape, dtype=torch.float32) for name in PER_TOKEN if rows and rows[0].get(name) is not None}
    for i, row in enumerate(rows):
        count, start = len(row["ids"]), row.get("padding", 0)
        if start < 0 or start + count > width:
            raise ProfileError(f"micro-batch: row {i} has {count} tokens after {start} columns of padding, the width is {width}")
        span = slice(start, start + count)
        values = {"input_ids": row["ids"], "attention_mask": [1] * count, **{name: row.get(name) for name in tensors if name not in ("input_ids", "attention_mask")}}
        for name, value in values.items():
            if value is None or len(value) != count:
                raise ProfileError(f"micro-batch: row {i} has {count} tokens and {'no' if value is None else len(value)} {name}")
            tensors[name][i, span] = torch.as_tensor(value).to(tensors[name].dtype)
    for name in ("advantages", *(n for n in PER_TOKEN if n in tensors)):
        tensors[name] = torch.where(tensors["loss_mask"] == 1, tensors[name], 0.0)  # trainers leave anything off the mask
    groups = [row.get("group") for row in rows]
    rewards = [row.get("reward") for row in rows]
    return MicroBatch(
        **tensors,
        group_ids=torch.tensor(_groups_of(rows) if None in groups else groups, dtype=torch.int64),
        rewards=None if None in rewards else torch.tensor(rewards, dtype=torch.float32),
        loss=loss,
        layout=layout,
        meta=meta or {},
    )


def zero_exposure_rows(micro_batch: MicroBatch) -> Tensor:
    """(B,) True where a row's coefficients are all zero whatever the forward gives: its gradient is exactly zero.

    Raises UsageError where zero advantages do not make a zero gradient (KL, entropy bonus, auxiliary loss), and where other
    rows' gradients depend on them (an entropy quantile taken over the micro-batch).
    """
    if losses.has_other_terms(micro_batch.loss):
        raise UsageError("rows with zero advantages cannot be skipped: the loss has a KL, entropy or router auxiliary term, which reaches them too; run without skipping")
    if losses.needs_entropies(micro_batch.loss) and micro_batch.loss.entropy_threshold is None:
        raise UsageError("rows with zero advantages cannot be skipped: the entropy quantile is taken over all rows; record entropy_threshold, or run without skipping")
    return ~((micro_batch.advantages != 0) & (micro_batch.loss_mask == 1)).any(1)


def skip_zero_rows(micro_batch: MicroBatch) -> MicroBatch | None:
    """The micro-batch without its rows of zero exposure, each remaining token with the weight it had; None when no row is left.

    Exact: the gradient is the same. Raises UsageError where it would not be (`zero_exposure_rows`).
    """
    zero = zero_exposure_rows(micro_batch)
    if not bool(zero.any()):
        return micro_batch
    if bool(zero.all()):
        return None
    z = losses.normaliser(micro_batch.loss, micro_batch.loss_inputs(), xp=torch)
    return replace(micro_batch, normaliser=z.float() if micro_batch.normaliser is None else micro_batch.normaliser).take_rows(~zero)


# --- files


def save_micro_batch(path: str | Path, micro_batch: MicroBatch) -> None:
    """Write a micro-batch as Parquet; atomic: an old file survives a failed write. Raises ProfileError."""
    micro_batch.validate()
    path = Path(path)
    header = {
        "kind": "micro-batch",
        "version": FILE_VERSION,
        "width": micro_batch.input_ids.shape[1],
        "pad_token_id": _pad_token_id(micro_batch),
        "layout": micro_batch.layout,
        "loss": losses.to_dict(micro_batch.loss),
        "meta": micro_batch.meta,
    }
    try:
        text = json.dumps(header, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"micro-batch {path}: its meta cannot be written as JSON ({error})") from error
    sink = pa.BufferOutputStream()
    pq.write_table(_to_table(micro_batch).replace_schema_metadata({HEADER_KEY: text.encode()}), sink, compression="zstd")
    try:
        write_atomic(path, sink.getvalue().to_pybytes())
    except HiloreError as error:
        raise ProfileError(f"micro-batch {error}") from error


def save_update(folder: str | Path, micro_batches: Sequence[MicroBatch]) -> list[str]:
    """Write the micro-batches of an update as `folder`/0.parquet and on, all or none; returns the files' names. `folder` is not there, or empty. Raises ProfileError."""
    folder = Path(folder)
    width = len(str(len(micro_batches) - 1))
    names = [f"{position:0{width}}.parquet" for position in range(len(micro_batches))]
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as waiting:
            for name, micro_batch in zip(names, micro_batches, strict=True):
                save_micro_batch(Path(waiting, "update", name), micro_batch)
            os.replace(Path(waiting, "update"), folder)
    except OSError as error:
        raise ProfileError(f"micro-batches {folder}: cannot be written ({error.strerror}); give another folder") from error
    return names


def load_micro_batch(path: str | Path) -> MicroBatch:
    """Read and validate our own Parquet file. Raises ProfileError: missing, damaged, another version, unknown columns."""
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"micro-batch {path}: no such file; record one with: hilore rollout")
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ProfileError(f"micro-batch {path}: is damaged ({first_line(error)}); record it again") from error
    header = _read_header(path, table.schema)
    expected = {f.name: f.type for f in COLUMNS} | {name: FLOATS for name in (*PER_TOKEN, "reward") if name in table.schema.names}
    expected |= {"reward": pa.float32()} if "reward" in expected else {}
    found = {f.name: f.type for f in table.schema}
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    if wrong:
        raise ProfileError(f"micro-batch {path}: unknown, missing or retyped column {wrong[0]}; it is not of this version of hilore")
    try:
        micro_batch = _from_table(table, header)
        micro_batch.validate()
    except (ProfileError, UsageError) as error:
        raise ProfileError(f"micro-batch {path}: {str(error).removeprefix('micro-batch: ')}") from error
    return micro_batch


# --- made up


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

    def lengths(count: int, longest: int) -> list[int]:
        drawn = torch.randint(max(1, longest // 2), longest + 1, (count,), generator=rng)
        drawn[int(torch.randint(count, (1,), generator=rng))] = longest
        return drawn.tolist()

    prompts = [torch.randint(vocab_size, (n,), generator=rng).tolist() for n in lengths(groups, prompt_tokens)]
    completions = [torch.randint(vocab_size, (n,), generator=rng).tolist() for n in lengths(rows, completion_tokens)]
    rewards = torch.randint(2, (groups, group_size), generator=rng).float()
    rewards[:, 0], rewards[:, 1] = 0.0, 1.0
    return sampled_micro_batch(
        prompts=[prompts[i // group_size] for i in range(rows)],
        completions=completions,
        rewards=rewards.flatten(),
        advantages=group_advantages(rewards.flatten(), group_size=group_size),
        group_ids=[i // group_size for i in range(rows)],
        loss=TrlLoss(num_items_in_batch=sum(map(len, completions))),
        meta={"task": "synthetic", "seed": seed, "group_size": group_size},
    )


def sampled_micro_batch(
    *,
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    rewards: Tensor,
    advantages: Tensor,
    group_ids: Sequence[int],
    loss: Loss,
    meta: dict[str, Any],
    pad_token_id: int = 0,
) -> MicroBatch:
    """Prompts and completions of (B,) rewards and advantages in TRL's form: prompts padded left, completions right."""
    widest = max(map(len, prompts))
    rows = [
        {
            "ids": prompt + completion,
            "loss_mask": [0] * len(prompt) + [1] * len(completion),
            "advantages": [0.0] * len(prompt) + [advantage] * len(completion),
            "padding": widest - len(prompt),
            "group": group,
            "reward": reward,
        }
        for prompt, completion, advantage, reward, group in zip(prompts, completions, advantages.tolist(), rewards.tolist(), group_ids, strict=True)
    ]
    return from_rows(rows, loss=loss, layout="padded", width=widest + max(map(len, completions)), pad_token_id=pad_token_id, meta=meta)


def group_advantages(rewards: Tensor, *, group_size: int) -> Tensor:
    """(R - mean) / (std + 1e-4) in each group of consecutive rows, the unbiased std, as TRL does."""
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


# --- validation


def _check_shapes(mb: MicroBatch) -> None:
    if mb.input_ids.ndim != 2 or 0 in mb.input_ids.shape:
        raise ProfileError(f"micro-batch: is empty or not two-dimensional (input_ids {tuple(mb.input_ids.shape)})")
    if mb.layout not in LAYOUTS:
        raise ProfileError(f"micro-batch: layout {mb.layout!r} is unknown; it is one of {', '.join(LAYOUTS)}")
    per_row = {"group_ids", "rewards"}
    for name in ("attention_mask", "loss_mask", "advantages", *per_row, *PER_TOKEN):
        value = getattr(mb, name)
        expected = (mb.rows,) if name in per_row else tuple(mb.input_ids.shape)
        if value is not None and tuple(value.shape) != expected:
            raise ProfileError(f"micro-batch: {name} has shape {tuple(value.shape)} where the ids ask for {expected}")


def _check_runs(mb: MicroBatch) -> None:
    """Each row is one run of tokens; loss tokens lie in it and have a token before them."""
    for name in ("attention_mask", "loss_mask"):
        mask = getattr(mb, name)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ProfileError(f"micro-batch: {name} holds other values than 0 and 1")
    starts = torch.nn.functional.pad(mb.attention_mask, (1, 0)).diff(dim=1) == 1
    if bool((starts.sum(1) > 1).any()):
        raise ProfileError(f"micro-batch: row {int((starts.sum(1) > 1).nonzero()[0])} has padding between its tokens; pad on the left or on the right only")
    if not bool(mb.attention_mask.any(1).all()):
        raise ProfileError(f"micro-batch: row {int((~mb.attention_mask.any(1)).nonzero()[0])} has no token; every completion needs a prompt")
    outside = (mb.loss_mask == 1) & (mb.attention_mask == 0)
    if bool(outside.any()):
        raise ProfileError(f"micro-batch: row {int(outside.any(1).nonzero()[0])} counts padding as loss tokens; is the loss mask aligned to the tokens themselves?")
    first = (mb.loss_mask == 1) & starts
    if bool(first.any()):
        raise ProfileError(f"micro-batch: row {int(first.any(1).nonzero()[0])} counts its first token, which no position predicts; every completion needs a prompt, and is the loss mask shifted?")


def _check_values(mb: MicroBatch) -> None:
    if bool((mb.input_ids < 0).any()):
        raise ProfileError(f"micro-batch: row {int((mb.input_ids < 0).any(1).nonzero()[0])} has negative ids; save token ids, not labels")
    counted = mb.loss_mask.bool()
    for name in ("advantages", *PER_TOKEN):
        value = getattr(mb, name)
        if value is not None and not bool(torch.isfinite(value[counted]).all()):
            raise ProfileError(f"micro-batch: {name} hold NaN or infinity on loss tokens; record another one")
    if bool((mb.advantages[~counted] != 0).any()):
        raise ProfileError("micro-batch: advantages are not zero off the loss mask; is one of them shifted?")
    if mb.rewards is not None and not bool(torch.isfinite(mb.rewards).all()):
        raise ProfileError("micro-batch: rewards hold NaN or infinity; record another one")
    counted_of_update = getattr(mb.loss, "num_items_in_batch", None)
    if mb.normaliser is None and counted_of_update is not None and counted_of_update < mb.loss_tokens:
        raise ProfileError(f"micro-batch: num_items_in_batch {counted_of_update} is below its own {mb.loss_tokens} loss tokens; it must count those of the whole update")


def _check_groups(mb: MicroBatch) -> None:
    """Rows of one group share their prompt. A prompt ends before the first loss token, so that rows without one tell nothing."""
    seen: dict[int, tuple[int, list[int]]] = {}
    lengths = mb.prompt_lengths.tolist()
    for i, (group, length) in enumerate(zip(mb.group_ids.tolist(), lengths, strict=True)):
        if not bool(mb.loss_mask[i].any()):
            continue
        prompt = mb.input_ids[i][mb.attention_mask[i].bool()][:length].tolist()
        row, other = seen.setdefault(group, (i, prompt))
        shared = min(len(prompt), len(other))  # a masked first completion token looks like a longer prompt
        if prompt[:shared] != other[:shared]:
            raise ProfileError(f"micro-batch: rows {row} and {i} are of group {group} and have different prompts; are the group ids of another order?")


def _groups_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Group numbers from equal prompts, in order of appearance."""
    known: dict[tuple[int, ...], int] = {}
    prompts = (tuple(row["ids"][: list(row["loss_mask"]).index(1)] if 1 in row["loss_mask"] else row["ids"]) for row in rows)
    return [known.setdefault(prompt, len(known)) for prompt in prompts]


# --- Parquet

FLOATS = pa.list_(pa.float32())
COLUMNS = pa.schema(
    [
        ("ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int8())),
        ("advantages", FLOATS),
        ("padding", pa.int64()),
        ("group", pa.int64()),
    ]
)


def _pad_token_id(mb: MicroBatch) -> int:
    padding = mb.input_ids[mb.attention_mask == 0]
    return int(padding[0]) if len(padding) else 0


def _to_table(mb: MicroBatch) -> pa.Table:
    real = mb.attention_mask.bool()

    def unpadded(values: Tensor) -> list[list]:
        return [row[keep].tolist() for row, keep in zip(values, real, strict=True)]

    columns: dict[str, tuple[list, Any]] = {
        "ids": (unpadded(mb.input_ids), COLUMNS.field("ids").type),
        "loss_mask": (unpadded(mb.loss_mask), COLUMNS.field("loss_mask").type),
        "advantages": (unpadded(mb.advantages), FLOATS),
        "padding": (real.int().argmax(1).tolist(), pa.int64()),
        "group": (mb.group_ids.tolist(), pa.int64()),
    }
    columns |= {name: (unpadded(value), FLOATS) for name in PER_TOKEN if (value := getattr(mb, name)) is not None}
    columns |= {} if mb.rewards is None else {"reward": (mb.rewards.tolist(), pa.float32())}
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def _from_table(table: pa.Table, header: dict[str, Any]) -> MicroBatch:
    rows = table.to_pylist()
    if any(value is None for row in rows for value in row.values()):
        raise ProfileError("micro-batch: a cell is empty; record it again")
    return from_rows(rows, loss=losses.from_dict(header["loss"]), layout=header["layout"], width=header["width"], pad_token_id=header["pad_token_id"], meta=header["meta"])


def _read_header(path: Path, schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(HEADER_KEY)
    if raw is None:
        raise ProfileError(f"micro-batch {path}: is a Parquet file that holds no micro-batch of hilore's (a report's is read by pandas; hilore show takes its JSON file); record one with: hilore rollout, or hilore capture")
    try:
        header = json.loads(raw, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ProfileError(f"micro-batch {path}: its header is damaged ({error}); record it again") from error
    if not isinstance(header, dict) or header.get("kind") != "micro-batch":
        raise ProfileError(f"micro-batch {path}: is another kind of hilore file; give one that hilore rollout wrote")
    if header.get("version") != FILE_VERSION:
        raise ProfileError(f"micro-batch {path}: is of version {header.get('version')}, this hilore reads {FILE_VERSION}; record it again")
    if wrong := sorted(set(header) ^ HEADER_FIELDS):
        raise ProfileError(f"micro-batch {path}: unknown or missing header key {wrong[0]}; record it again")
    counts = [header[key] for key in ("width", "pad_token_id")]
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(header["meta"], dict) or not isinstance(header["loss"], dict):
        raise ProfileError(f"micro-batch {path}: a header value has the wrong type; record it again")
    return header


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON knows")
