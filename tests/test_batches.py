"""Micro-batches: validation, what they say of themselves, the Parquet file, and what happens to damaged ones."""

from __future__ import annotations

import errno
import json
from dataclasses import fields, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hilore_cli import batches
from hilore_cli.batches import (
    HEADER_KEY,
    LAYOUTS,
    PER_TOKEN,
    from_rows,
    load_micro_batch,
    require_gradient,
    save_micro_batch,
    synthetic_micro_batch,
)
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import OpenRlhfLoss, Readiness, TrlLoss, VerlLoss

LOSSES = {
    "trl": TrlLoss(num_items_in_batch=500, epsilon_high=0.28),
    "verl": VerlLoss(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", dp_size=2, global_batch_size=12.0),
    "openrlhf": OpenRlhfLoss(eps_clip_low_high=(0.2, 0.3), dual_clip=3.0, batch_num_tokens=4.5),
}


def tiny(**changes):
    mb = synthetic_micro_batch(vocab_size=50, rows=8, prompt_tokens=7, completion_tokens=9, group_size=4, seed=3)
    return replace(mb, **changes)


def same(a, b) -> bool:
    """Equal in every field, tensors bit for bit and of one dtype."""
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y for x, y in pairs)


def drawn(mb, seed: int = 0):
    """Random float32 values on the loss tokens."""
    return -torch.rand(mb.input_ids.shape, generator=torch.Generator().manual_seed(seed)) * mb.loss_mask


def test_synthetic_is_valid_and_seeded():
    mb = tiny()
    mb.validate()
    assert mb.tokens == 8 * 16
    assert mb.real_tokens == int(mb.attention_mask.sum()) < mb.tokens
    assert mb.input_ids.shape == mb.attention_mask.shape == mb.loss_mask.shape == mb.advantages.shape == (8, 16)
    assert mb.loss.num_items_in_batch == mb.loss_tokens == int(mb.loss_mask.sum())
    assert same(mb, tiny())
    grouped = mb.rewards.view(2, 4)
    assert (grouped.min(1).values < grouped.max(1).values).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("off_policy", [False, True])
def test_round_trip(tmp_path, layout, loss, off_policy):
    mb = tiny(layout=layout, loss=LOSSES[loss])
    if off_policy:
        mb = replace(mb, **{name: drawn(mb, i) for i, name in enumerate(PER_TOKEN)})
    else:
        mb = replace(mb, rewards=None)
    save_micro_batch(tmp_path / "a.parquet", mb)
    assert same(load_micro_batch(tmp_path / "a.parquet"), mb)
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_padded_widths_and_pad_id_come_back(tmp_path):
    mb = tiny()
    ids = mb.input_ids.where(mb.attention_mask == 1, 5)
    pad = torch.nn.functional.pad
    mb = replace(mb, input_ids=pad(ids, (2, 3), value=5), **{name: pad(getattr(mb, name), (2, 3)) for name in ("attention_mask", "loss_mask", "advantages")})
    save_micro_batch(tmp_path / "a.parquet", mb)
    assert same(load_micro_batch(tmp_path / "a.parquet"), mb)


# ------------------------------------------------------------------------------------------------- what they say of themselves


def hand_made(layout: str = "positions"):
    """Two rows: padding on the left of one, on the right of the other, a hole in the loss mask; ids 1 to 8 in reading order."""
    rows = [
        {"ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantages": [0.0, 0.0, 2.0, 2.0], "padding": 2},
        {"ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "advantages": [9.0, -1.0, 9.0, -1.0]},
    ]
    return from_rows(rows, loss=TrlLoss(num_items_in_batch=4), layout=layout, width=6, pad_token_id=9)


def test_rows_are_laid_out():
    mb = hand_made()
    mb.validate()
    assert mb.input_ids.tolist() == [[9, 9, 1, 2, 3, 4], [5, 6, 7, 8, 9, 9]]
    assert mb.advantages.tolist() == [[0, 0, 0, 0, 2, 2], [0, -1, 0, -1, 0, 0]], "what trainers leave off the mask is zeroed"
    assert mb.group_ids.tolist() == [0, 1], "groups come from equal prompts"
    assert mb.prompt_lengths.tolist() == [2, 1]
    with pytest.raises(ProfileError, match=r"row 0 has 4 tokens after 3 columns of padding, the width is 6"):
        from_rows([{"ids": [1] * 4, "padding": 3}], loss=mb.loss, layout="padded", width=6)
    with pytest.raises(ProfileError, match="row 0 has 2 tokens and 1 advantages"):
        from_rows([{"ids": [1, 2], "loss_mask": [0, 1], "advantages": [1.0]}], loss=mb.loss, layout="padded", width=6)


def test_what_the_model_is_called_with():
    """Positions count the left padding where the trainer gives a mask alone, and restart in each row where it packs."""
    padded, positions, packed = (hand_made(layout) for layout in LAYOUTS)
    assert set(padded.model_inputs()) == {"input_ids", "attention_mask"}
    assert positions.model_inputs()["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3]]
    inputs = packed.model_inputs()
    assert {name: x.tolist() for name, x in inputs.items()} == {"input_ids": [[1, 2, 3, 4, 5, 6, 7, 8]], "position_ids": [[0, 1, 2, 3] * 2]}
    assert (packed.shape, packed.tokens, positions.shape, positions.tokens) == ((1, 8), 8, (2, 6), 12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicting_positions_stand_before_their_tokens(layout):
    """Row-major, and never in the row above."""
    mb = hand_made(layout)
    flat = mb.model_inputs()["input_ids"].flatten()
    assert flat[mb.predicting_positions()].tolist() == [2, 3, 5, 7]
    assert flat[mb.predicting_positions() + 1].tolist() == mb.input_ids[mb.loss_mask.bool()].tolist() == [3, 4, 6, 8]


def test_weights_by_hand():
    """c = -A/4 on-policy for a loss of 4 tokens; p is the probability at sampling."""
    mb = hand_made()
    assert mb.readiness is Readiness.EXACT_BEFORE_FORWARD
    assert mb.known_exposure.tolist() == [-0.5, -0.5, 0.25, 0.25]
    assert mb.weight("squared") == pytest.approx(0.625)
    assert mb.weight("scalar") == pytest.approx(1.5**2)
    assert mb.weight("tokens") == pytest.approx(4 / 16)
    assert mb.weight("logits") is None
    assert mb.known_logps is None
    logps = torch.log(torch.tensor([0.5, 1.0, 0.2, 0.5])).float()
    full = torch.zeros(mb.input_ids.shape).masked_scatter(mb.loss_mask.bool(), logps)
    sampled = replace(mb, sampling_logps=full)
    assert sampled.weight("logits") == pytest.approx(0.25**2 + 0.2**2 + 0.125**2)
    before = replace(mb, old_logps=full, sampling_logps=full * 2)
    assert torch.equal(before.known_logps, logps), "the trainer's own come before the sampler's"


def test_a_micro_batch_without_gradient():
    """It is valid, since an update may hold one; an update of none but such is refused."""
    flat = tiny(advantages=torch.zeros(8, 16))
    flat.validate()
    assert not flat.has_gradient
    assert replace(flat, loss=TrlLoss(num_items_in_batch=500, beta=0.1)).has_gradient, "KL reaches it"
    require_gradient([flat, tiny()])
    with pytest.raises(ProfileError, match=r"all advantages are zero .* mixed rewards"):
        require_gradient([flat, flat])


def test_taking_rows():
    mb = tiny(old_logps=drawn(tiny()))
    part = mb.take_rows(torch.tensor([5, 1]))
    assert torch.equal(part.input_ids, mb.input_ids[[5, 1]])
    assert torch.equal(part.old_logps, mb.old_logps[[5, 1]])
    assert part.ref_logps is None
    assert same(mb.take_rows(mb.group_ids == 0), mb.take_rows(torch.arange(4)))


# ------------------------------------------------------------------------------------------------------------------ refusals


def swapped(mask):
    return mask.flip(1)


def masked(mb, *, row: int):
    """The row's first token is a loss token."""
    mask = mb.loss_mask.clone()
    mask[row, int(mb.attention_mask[row].argmax())] = 1
    return mask


def holed(mask):
    mask = mask.clone()
    mask[2, int(mask[2].argmax()) + 2] = 0
    return mask


BAD = {
    "all completions are masked": lambda mb: replace(mb, loss_mask=mb.loss_mask * 0, advantages=mb.advantages * 0),
    "advantages hold NaN": lambda mb: replace(mb, advantages=mb.advantages.masked_fill(mb.loss_mask == 1, float("nan"))),
    "advantages hold NaN or inf": lambda mb: replace(mb, advantages=mb.advantages / 0),
    "advantages are not zero off the loss mask": lambda mb: replace(mb, advantages=mb.advantages.roll(-1, 1)),
    "rewards hold NaN": lambda mb: replace(mb, rewards=mb.rewards * float("nan")),
    "old_logps hold NaN": lambda mb: replace(mb, old_logps=torch.full((8, 16), float("nan"))),
    "is_weights hold NaN": lambda mb: replace(mb, is_weights=torch.full((8, 16), float("inf"))),
    "normaliser hold NaN": lambda mb: replace(mb, normaliser=torch.full((8, 16), float("nan"))),
    r"rewards has shape \(7,\)": lambda mb: replace(mb, rewards=mb.rewards[:-1]),
    r"advantages has shape \(8,\) where the ids ask for \(8, 16\)": lambda mb: replace(mb, advantages=mb.rewards),
    "attention_mask has shape": lambda mb: replace(mb, attention_mask=mb.attention_mask[:, 1:]),
    "loss_mask has shape": lambda mb: replace(mb, loss_mask=mb.loss_mask[1:]),
    "ref_logps has shape": lambda mb: replace(mb, ref_logps=torch.zeros(8, 9)),
    "group_ids has shape": lambda mb: replace(mb, group_ids=mb.group_ids[None]),
    "counts padding as loss tokens": lambda mb: replace(mb, attention_mask=swapped(mb.attention_mask)),
    "row 3 counts its first token": lambda mb: replace(mb, loss_mask=masked(mb, row=3)),
    "row 2 has padding between its tokens": lambda mb: replace(mb, attention_mask=holed(mb.attention_mask)),
    "loss_mask holds other values": lambda mb: replace(mb, loss_mask=mb.loss_mask * 2),
    "attention_mask holds other values": lambda mb: replace(mb, attention_mask=mb.attention_mask * 2),
    "negative ids": lambda mb: replace(mb, input_ids=mb.input_ids.where(mb.loss_mask == 1, -100)),
    "is empty": lambda mb: replace(mb, input_ids=mb.input_ids[:0]),
    "not two-dimensional": lambda mb: replace(mb, input_ids=mb.input_ids[0]),
    "row 0 has no token": lambda mb: replace(mb, **{name: getattr(mb, name) * (torch.arange(8) > 0)[:, None] for name in ("attention_mask", "loss_mask", "advantages")}),
    "num_items_in_batch 3 is below": lambda mb: replace(mb, loss=TrlLoss(num_items_in_batch=3)),
    "layout 'ragged' is unknown": lambda mb: replace(mb, layout="ragged"),
    "rows 0 and 1 are of group 0 and have different prompts": lambda mb: replace(mb, input_ids=mb.input_ids + torch.eye(8, 16, dtype=torch.int64).roll(6, 1) * mb.attention_mask),
}


@pytest.mark.parametrize("words", BAD)
def test_meaningless_micro_batches(words, tmp_path):
    mb = BAD[words](tiny())
    with pytest.raises(ProfileError, match=words) as caught:
        mb.validate()
    assert "\n" not in str(caught.value)
    with pytest.raises(ProfileError):
        save_micro_batch(tmp_path / "a.parquet", mb)
    assert not list(tmp_path.iterdir())


def test_a_row_without_loss_tokens_gives_no_gradient():
    """Its advantage counts nothing: zeroed when rows are read, refused where it is there all the same."""
    mb = tiny()
    mask = mb.loss_mask.clone()
    mask[0] = 0
    with pytest.raises(ProfileError, match="not zero off the loss mask"):
        replace(mb, loss_mask=mask).validate()
    only = replace(mb, loss_mask=mask, advantages=torch.zeros(8, 16))
    only.validate()
    assert not only.has_gradient
    assert only.prompt_lengths[0] == only.attention_mask[0].sum(), "all of the row stands before its first loss token"


# --------------------------------------------------------------------------------------------------------------------- files


def rewrite(path, *, change_header=None, change_table=None):
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[HEADER_KEY])
    if change_header:
        change_header(header)
    if change_table:
        table = change_table(table)
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: json.dumps(header).encode()}), path)


def with_column(name, values, kind):
    return lambda t: t.set_column(t.schema.names.index(name), name, pa.array(values(t.column(name).to_pylist()), kind))


FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("version 3, this hilore reads 2", {"change_header": lambda h: h.update(version=3)}),
        ("version 1, this hilore reads 2", {"change_header": lambda h: h.update(version=1)}),
        ("surprise", {"change_header": lambda h: h.update(surprise=1)}),
        ("layout", {"change_header": lambda h: h.pop("layout")}),
        ("layout 'ragged'", {"change_header": lambda h: h.update(layout="ragged")}),
        ("wrong type", {"change_header": lambda h: h.update(width="7")}),
        ("wrong type", {"change_header": lambda h: h.update(pad_token_id=-1)}),
        ("wrong type", {"change_header": lambda h: h.update(loss="dapo")}),
        ("NaN", {"change_header": lambda h: h.update(width=float("nan"))}),
        ("another kind", {"change_header": lambda h: h.update(kind="plan")}),
        ("the width is 6", {"change_header": lambda h: h.update(width=6)}),
        ("unknown setting epsilon_up", {"change_header": lambda h: h["loss"].update(epsilon_up=0.1)}),
        ("trainer='nobody' is unknown", {"change_header": lambda h: h["loss"].update(trainer="nobody")}),
        ("num_items_in_batch 3 is below", {"change_header": lambda h: h["loss"].update(num_items_in_batch=3)}),
        ("column extra", {"change_table": lambda t: t.append_column("extra", pa.array([1] * 8))}),
        ("column group", {"change_table": lambda t: t.drop_columns(["group"])}),
        ("column padding", {"change_table": with_column("padding", lambda v: [float(x) for x in v], pa.float32())}),
        ("advantages hold NaN", {"change_table": with_column("advantages", lambda v: [[float("nan")] * len(row) for row in v], FLOATS)}),
        ("a cell is empty", {"change_table": with_column("reward", lambda v: [None] * 8, pa.float32())}),
        (r"row 0 has \d+ tokens and 1 advantages", {"change_table": with_column("advantages", lambda v: [[0.0], *v[1:]], FLOATS)}),
    ],
)
def test_files_that_are_refused(words, how, tmp_path):
    path = tmp_path / "a.parquet"
    save_micro_batch(path, tiny())
    rewrite(path, **how)
    with pytest.raises(ProfileError, match=words) as caught:
        load_micro_batch(path)
    assert "a.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "a.parquet"
    with pytest.raises(ProfileError, match="no such file"):
        load_micro_batch(path)
    save_micro_batch(path, tiny())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ProfileError, match="damaged"):
        load_micro_batch(path)
    path.write_bytes(b"")
    with pytest.raises(ProfileError, match="damaged"):
        load_micro_batch(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ProfileError, match="holds no micro-batch of hilore's"):
        load_micro_batch(path)


def test_meta_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="its meta cannot be written as JSON"):
        save_micro_batch(tmp_path / "a.parquet", tiny(meta={"x": float("nan")}))
    assert not list(tmp_path.iterdir())


def test_the_old_file_survives_a_failed_write(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    save_micro_batch(path, tiny())
    before = path.read_bytes()

    def disk_full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(ProfileError, match="No space left"):
        save_micro_batch(path, tiny(meta={"other": 1}))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_groups_that_are_not_whole_are_refused():
    for rows, size in ((6, 4), (4, 1)):
        with pytest.raises(ProfileError, match=f"{rows} rows are not whole groups of {size}"):
            synthetic_micro_batch(vocab_size=50, rows=rows, prompt_tokens=4, completion_tokens=4, group_size=size, seed=0)


def test_loss_settings_that_do_not_go_together_are_refused():
    with pytest.raises(UsageError, match="needs num_items_in_batch"):
        TrlLoss()
    assert batches.FILE_VERSION == 2
