"""Micro-batches: validation, the Parquet file, and what happens to damaged ones."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hilore_cli import batches
from hilore_cli.batches import HEADER_KEY, load_micro_batch, save_micro_batch, synthetic_micro_batch
from hilore_cli.errors import ProfileError


def tiny(**changes):
    mb = synthetic_micro_batch(vocab_size=50, rows=8, prompt_tokens=7, completion_tokens=9, group_size=4, seed=3)
    return replace(mb, **changes)


def same(a, b) -> bool:
    return all(
        torch.equal(x, getattr(b, name)) if isinstance(x, torch.Tensor) else x == getattr(b, name)
        for name, x in vars(a).items()
    )


def test_synthetic_is_valid_and_seeded():
    mb = tiny()
    mb.validate()
    assert mb.tokens == 8 * 16
    assert mb.real_tokens == int(mb.attention_mask.sum()) < mb.tokens
    assert mb.input_ids.shape == mb.attention_mask.shape == (8, 16)
    assert same(mb, tiny())
    grouped = mb.rewards.view(2, 4)
    assert (grouped.min(1).values < grouped.max(1).values).all()


@pytest.mark.parametrize("off_policy", [False, True])
def test_round_trip(tmp_path, off_policy):
    mb = tiny()
    if off_policy:
        mb = replace(mb, old_logps=-torch.rand(8, 9) * mb.completion_mask)
    save_micro_batch(tmp_path / "a.parquet", mb)
    assert same(load_micro_batch(tmp_path / "a.parquet"), mb)
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_padded_widths_and_pad_id_come_back(tmp_path):
    mb = tiny()
    wide = torch.full((8, 2), 5)
    mb = replace(
        mb,
        prompt_ids=torch.cat([wide, mb.prompt_ids.where(mb.prompt_mask == 1, 5)], 1),
        prompt_mask=torch.cat([wide * 0, mb.prompt_mask], 1),
        completion_ids=mb.completion_ids.where(mb.completion_mask == 1, 5),
    )
    save_micro_batch(tmp_path / "a.parquet", mb)
    assert same(load_micro_batch(tmp_path / "a.parquet"), mb)


def swapped(mask):
    return mask.flip(1)


BAD = {
    "all completions are masked": lambda mb: replace(mb, completion_mask=mb.completion_mask * 0),
    "all advantages are zero": lambda mb: replace(mb, advantages=mb.advantages * 0),
    "advantages hold NaN": lambda mb: replace(
        mb, advantages=mb.advantages.index_fill(0, torch.tensor([1]), float("nan"))
    ),
    "advantages hold NaN or inf": lambda mb: replace(mb, advantages=mb.advantages / 0),
    "rewards hold NaN": lambda mb: replace(mb, rewards=mb.rewards * float("nan")),
    "old_logps hold NaN": lambda mb: replace(mb, old_logps=torch.full((8, 9), float("nan"))),
    r"advantages has shape \(7,\)": lambda mb: replace(mb, advantages=mb.advantages[:-1]),
    "completion_mask has shape": lambda mb: replace(mb, completion_mask=mb.completion_mask[:, 1:]),
    "completion_ids has shape": lambda mb: replace(mb, completion_ids=mb.completion_ids[1:]),
    "prompt_mask has shape": lambda mb: replace(mb, prompt_mask=mb.prompt_mask.T),
    "prompt_mask is not left padded": lambda mb: replace(mb, prompt_mask=swapped(mb.prompt_mask)),
    "completion_mask is not right padded": lambda mb: replace(mb, completion_mask=swapped(mb.completion_mask)),
    "completion_mask is not right": lambda mb: replace(mb, completion_mask=mb.completion_mask * 2),
    "is empty": lambda mb: replace(mb, prompt_ids=mb.prompt_ids[:0]),
    "a row has no prompt": lambda mb: replace(mb, prompt_mask=mb.prompt_mask * (torch.arange(8) > 0)[:, None]),
    "loss_tokens 3": lambda mb: replace(mb, loss_tokens=3),
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


def test_an_advantage_on_a_masked_row_gives_no_gradient():
    mb = tiny()
    mask = mb.completion_mask.clone()
    mask[0] = 0
    advantages = torch.zeros(8)
    advantages[0] = 1.0
    with pytest.raises(ProfileError, match="zero"):
        replace(mb, completion_mask=mask, advantages=advantages).validate()


def rewrite(path, *, change_header=None, change_table=None):
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[HEADER_KEY])
    if change_header:
        change_header(header)
    if change_table:
        table = change_table(table)
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: json.dumps(header).encode()}), path)


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("version 2", {"change_header": lambda h: h.update(version=2)}),
        ("surprise", {"change_header": lambda h: h.update(surprise=1)}),
        ("loss_tokens", {"change_header": lambda h: h.pop("loss_tokens")}),
        ("wrong type", {"change_header": lambda h: h.update(prompt_tokens="7")}),
        ("NaN", {"change_header": lambda h: h.update(loss_tokens=float("nan"))}),
        ("another kind", {"change_header": lambda h: h.update(kind="plan")}),
        ("its header allows 6", {"change_header": lambda h: h.update(prompt_tokens=6)}),
        ("column extra", {"change_table": lambda t: t.append_column("extra", pa.array([1] * 8))}),
        ("column reward", {"change_table": lambda t: t.drop_columns(["reward"])}),
        (
            "advantages hold NaN",
            {"change_table": lambda t: t.set_column(2, "advantage", pa.array([float("nan")] * 8, pa.float32()))},
        ),
        ("a cell is empty", {"change_table": lambda t: t.set_column(4, "reward", pa.array([None] * 8, pa.float32()))}),
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
    with pytest.raises(ProfileError, match="did not write"):
        load_micro_batch(path)


def test_the_old_file_survives_a_failed_write(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    save_micro_batch(path, tiny())
    before = path.read_bytes()

    def disk_full(table, stream, **_):
        stream.write(b"PAR1 and then")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(batches.pq, "write_table", disk_full)
    with pytest.raises(ProfileError, match="No space left"):
        save_micro_batch(path, tiny(loss_tokens=999))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
