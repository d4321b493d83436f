"""Rollouts on a tiny random model, and the recorded ones that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hilore_cli import batches
from hilore_cli.batches import load_micro_batch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.grpo import GrpoConfig, gradients, token_logps
from hilore_cli.identities import batch_identity
from hilore_cli.models import load_model
from hilore_cli.profiler import ordered_update
from hilore_cli.rollout import generate_rollouts
from hilore_cli.tasks import Task

PROFILES = Path(__file__).parent.parent / "profiles"
RECORDED = ("smollm2-math", "smollm2-math-calibration-0", "smollm2-math-calibration-1", "smollm2-math-heldout")


@pytest.fixture
def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(94))])}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def even_words(answer, item) -> float:
    """A reward that a random model gets half of the time: the last word's number is even."""
    return float(answer[-1:] in "02468" and answer != "")


def task_of(scorer, prompts: int = 6) -> Task:
    items = [
        {
            "question": " ".join(f"w{j}" for j in range(2 + i % 3)),
            "answer": "word",
            "metadata": {"source_dataset": "tiny"},
        }
        for i in range(prompts)
    ]
    return Task(name="tiny", seed=0, items=tuple(items), _scorers={"tiny": scorer})


def roll(model, tokenizer, task, **changes):
    sizes = {"prompts": 6, "group_size": 4, "max_new_tokens": 5, "temperature": 1.0, "seed": 7}
    return generate_rollouts(model, tokenizer, task, **{**sizes, **changes})


def test_rollouts_are_whole_valid_groups(tiny_llama, tokenizer):
    model, task = tiny_llama(), task_of(even_words)
    before = torch.random.get_rng_state()
    batches = roll(model, tokenizer, task, rows_per_micro_batch=8)
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    kept = sum(mb.rows for mb in batches) // 4
    meta = batches[0].meta
    assert (meta["groups_sampled"], meta["groups_mixed"], meta["groups_dropped"]) == (6, kept, 6 - kept)
    assert kept >= 3
    for mb in batches:
        mb.validate()
        assert mb.loss.num_items_in_batch == sum(b.loss_tokens for b in batches)
        rewards = mb.rewards.view(-1, 4)
        assert (rewards.min(1).values < rewards.max(1).values).all()
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(mb.advantages, expected.flatten()[:, None] * mb.loss_mask)
        for row, keep in zip(mb.input_ids, mb.loss_mask.bool(), strict=True):
            ids = row[keep].tolist()
            assert 2 not in ids[:-1]
            assert ids[-1] == 2 or len(ids) == 5


def test_rollouts_are_seeded(tiny_llama, tokenizer):
    model, task = tiny_llama(), task_of(even_words)
    first, same, other = (roll(model, tokenizer, task, seed=seed, mixed_only=False)[0] for seed in (1, 1, 2))
    assert torch.equal(first.input_ids, same.input_ids)
    assert first.input_ids.shape != other.input_ids.shape or not torch.equal(first.input_ids, other.input_ids)
    assert first.rows == 24


def test_long_prompts_are_dropped_and_counted(tiny_llama, tokenizer):
    batches = roll(tiny_llama(), tokenizer, task_of(even_words), max_prompt_tokens=3, mixed_only=False)
    assert batches[0].meta["prompts_too_long"] == 2
    assert batches[0].rows == 16
    assert batches[0].prompt_lengths.tolist() == [2] * 4 + [3] * 4 + [2] * 4 + [3] * 4
    assert batches[0].input_ids.shape == (16, 3 + 5)


def test_micro_batches_that_part_groups_are_the_same_update(tiny_llama, tokenizer):
    """Rows, advantages of the whole group and the count of loss tokens, whatever a micro-batch takes; padding is its own."""

    def rows(batches) -> list[tuple]:
        return [
            (mb.input_ids[i][mb.attention_mask[i].bool()].tolist(), mb.group_ids[i].item(), mb.rewards[i].item(), mb.advantages[i][mb.loss_mask[i].bool()].tolist())
            for mb in batches
            for i in range(mb.rows)
        ]

    model, task = tiny_llama(), task_of(even_words)
    (whole,) = roll(model, tokenizer, task)
    parted = roll(model, tokenizer, task, rows_per_micro_batch=3)
    assert [mb.rows for mb in parted] == [3] * (whole.rows // 3) + [whole.rows % 3] * (whole.rows % 3 > 0)
    assert len(parted) > 3
    assert rows(parted) == rows([whole])
    assert {mb.loss.num_items_in_batch for mb in parted} == {whole.loss_tokens}
    questions = whole.meta["questions"]
    assert all(mb.meta["questions"] == [questions[i] for i in mb.group_ids.unique()] for mb in parted)
    assert len({mb.shape[1] for mb in roll(model, tokenizer, task, rows_per_micro_batch=1)}) > 1


@pytest.fixture
def sampled_here(here, tiny_llama, tokenizer, tmp_path, monkeypatch):
    """`hilore rollout` of a tiny model, whose answers get a reward half of the time."""
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr("hilore_cli.tasks.load_task", lambda name, *, seed, size, **options: task_of(even_words, prompts=size))
    return lambda *arguments: here("rollout", "--model", "./tiny", "--prompts", "6", "--group-size", "4", "--max-new-tokens", "5", *arguments)


def test_one_micro_batch_or_an_update_from_the_command_line(sampled_here, here, tmp_path):
    code, out, err = sampled_here("-o", "one.parquet", "--json")
    one = load_micro_batch(tmp_path / "one.parquet")
    assert (code, json.loads(out)["rows"]) == (0, one.rows)
    assert "--batch one.parquet" in err

    code, out, err = sampled_here("-o", "update", "--rows", "1", "--json")
    files = sorted((tmp_path / "update").iterdir())
    assert [file.name for file in files] == [f"{i:02}.parquet" for i in range(one.rows)]
    assert [row["rows"] for row in json.loads(out)] == [1] * one.rows
    assert "--batch update" in err
    assert {load_micro_batch(file).loss.num_items_in_batch for file in files} == {one.loss_tokens}

    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.parquet", "tiny", "update"]


@pytest.mark.parametrize(
    ("output", "arguments", "said"),
    [
        ("held", ("--rows", "2"), "held: exists, and an update wants a folder of its own"),
        ("file", ("--rows", "2"), "file: exists"),
        ("file/update", ("--rows", "2"), "file/update: in file is a file where a folder would have to be"),
        ("held", (), "held: is a folder, and one micro-batch is a file; give held/batch.parquet, or --rows"),
        ("new", ("--rows", "2", "--tokens", "512"), "--rows and --tokens both say how large a micro-batch is"),
    ],
)
def test_where_rollouts_cannot_go_is_said_before_sampling(sampled_here, tmp_path, monkeypatch, output, arguments, said):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "note.txt").touch()
    (tmp_path / "file").touch()
    monkeypatch.setattr("hilore_cli.rollout.generate_rollouts", lambda *_, **__: pytest.fail("sampled"))
    code, _, err = sampled_here("-o", output, *arguments)
    assert (code, said in " ".join(err.split())) == (2, True), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "held", "tiny"]


def test_an_update_is_written_whole_or_not_at_all(tiny_llama, tokenizer, tmp_path, monkeypatch):
    parted = roll(tiny_llama(), tokenizer, task_of(even_words), rows_per_micro_batch=4)
    (tmp_path / "update").mkdir()
    written = batches.save_micro_batch

    def fail_at_the_second(path, micro_batch) -> None:
        if path.name != "0.parquet":
            raise OSError(28, "No space left on device")
        written(path, micro_batch)

    monkeypatch.setattr(batches, "save_micro_batch", fail_at_the_second)
    with pytest.raises(ProfileError, match=r"update: cannot be written \(No space left"):
        batches.save_update(tmp_path / "update", parted)
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]
    monkeypatch.undo()
    assert batches.save_update(tmp_path / "update", parted) == [f"{i}.parquet" for i in range(len(parted))]


def test_equal_completions_of_a_prompt_are_micro_batches_of_their_own(tiny_llama, tokenizer, tmp_path):
    """One row each, one token each: some are equal, and each is a part of the update; a file that is given twice, or copied, is not."""
    parted = roll(tiny_llama(), tokenizer, task_of(even_words), rows_per_micro_batch=1, max_new_tokens=1, group_size=48)
    assert len({batch_identity(mb, source="").digest for mb in parted}) < len(parted)
    named = [(f"{i}.parquet", mb) for i, mb in enumerate(parted)]
    assert len(ordered_update(named)) == len(parted)
    assert len(ordered_update([(f"capture.pt#{i}", replace(mb, meta={})) for i, mb in enumerate(parted)])) == len(parted)
    for twice in (named[0], ("copy.parquet", parted[0])):
        with pytest.raises(ProfileError, match="are the same; give each once"):
            ordered_update([*named, twice])


def test_bad_rollouts(tiny_llama, tokenizer):
    model = tiny_llama()
    with pytest.raises(ProfileError, match="none of 6 groups has mixed rewards"):
        roll(model, tokenizer, task_of(lambda answer, item: 0.0))
    with pytest.raises(ProfileError, match="all 6 prompts are longer than 1 token"):
        roll(model, tokenizer, task_of(even_words), max_prompt_tokens=1)
    with pytest.raises(UsageError, match=r"a group of 1 completion\(s\) has no advantage"):
        roll(model, tokenizer, task_of(even_words), group_size=1)
    with pytest.raises(UsageError, match="9 prompts"):
        roll(model, tokenizer, task_of(even_words), prompts=9)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_micro_batches(name):
    mb = load_micro_batch(PROFILES / f"{name}.parquet")
    assert 960 <= mb.tokens <= 1088
    assert mb.meta["group_size"] == 8
    assert mb.loss.num_items_in_batch == mb.loss_tokens == int(mb.loss_mask.sum())
    assert mb.layout == "padded"
    assert mb.weight("logits") > 0, "log-probabilities were recorded at sampling"
    rewards = mb.rewards.view(-1, 8)
    assert (rewards.min(1).values < rewards.max(1).values).all()


def test_sampling_logps_are_those_of_the_model_that_sampled(tiny_llama, tokenizer):
    """In eval mode and at the temperature of sampling, against a whole forward; zero where no loss token is."""
    model = tiny_llama(attention_dropout=0.5)
    (mb,) = roll(model, tokenizer, task_of(even_words), temperature=0.7, mixed_only=False)
    assert model.training
    with torch.no_grad():
        logits = model.eval()(input_ids=mb.input_ids, attention_mask=mb.attention_mask).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(2, mb.input_ids[:, 1:, None]).squeeze(2) * mb.loss_mask[:, 1:]
    assert mb.loss.temperature == 0.7
    torch.testing.assert_close(mb.sampling_logps[:, 1:], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(mb.known_logps, mb.sampling_logps[mb.loss_mask.bool()])


def test_the_held_out_prompts_are_in_no_profiled_ones():
    *profiled, held_out = (load_micro_batch(PROFILES / f"{name}.parquet") for name in RECORDED)
    for mb in profiled:
        assert not set(mb.meta["questions"]) & set(held_out.meta["questions"])
        assert mb.meta["task_seed"] != held_out.meta["task_seed"]


def test_the_recorded_update_is_one_update():
    """The micro-batches of one generation batch: their losses count the tokens of all of them, and some rows have no gradient."""
    update = [load_micro_batch(path) for path in sorted((PROFILES / "smollm2-update").glob("*.parquet"))]
    assert len(update) == 16
    assert {mb.loss.num_items_in_batch for mb in update} == {sum(mb.loss_tokens for mb in update)}
    assert len({mb.tokens for mb in update}) > 4
    assert any(mb.zero_rows for mb in update)
    assert all(mb.has_gradient for mb in update)


@pytest.mark.realmodel
def test_the_recorded_text_is_likely_under_the_model_that_sampled_it(real_model_dir):
    """Sampled ids with the right template: a mean log-probability that no other tokenizer or template gives, and the recorded one."""
    mb = load_micro_batch(PROFILES / f"{RECORDED[0]}.parquet").take_rows(torch.arange(4))
    model = load_model(real_model_dir)
    with torch.no_grad():
        logps = token_logps(model, mb, GrpoConfig())
    assert -2.5 < float(logps.mean()) < -0.2
    torch.testing.assert_close(logps, mb.known_logps, atol=1e-3, rtol=1e-3)
    grads = gradients(model, [mb], GrpoConfig())
    assert all(bool(torch.isfinite(grad).all()) and bool(grad.any()) for grad in grads.values())
