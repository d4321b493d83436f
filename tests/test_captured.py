"""Readers of recorded micro-batches: every trainer's format made of the same known rows, and the ways in which they go wrong."""

from __future__ import annotations

import fractions
import json
import pickle
import random
import sys
import types
import warnings
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_cli.batches import from_rows, save_micro_batch
from hilore_cli.captured import TRAINERS, read_micro_batches, recipe, save_safetensors
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import OpenRlhfLoss, TrlLoss, VerlLoss, to_dict

VALUES = ("old_logps", "ref_logps", "sampling_logps", "is_weights")
PAD = 3


def known_rows(seed: int, *, groups: int = 2, holes: bool = True) -> list[dict]:
    """Rows of a few groups: ids with the prompt first, loss mask with holes, everything else drawn per token."""
    rng, rows = random.Random(seed), []
    for group in range(groups):
        prompt = [rng.randrange(4, 50) for _ in range(rng.randint(1, 5))] + [50 + group]
        for _ in range(rng.randint(2, 3)):
            response = rng.randint(1, 6)
            mask = [int(not holes or i == 0 or rng.random() < 0.7) for i in range(response)]
            advantage = rng.uniform(0.5, 2) * rng.choice([-1, 1])
            row = {"ids": prompt + [rng.randrange(4, 50) for _ in range(response)], "prompt": len(prompt), "group": group}
            row["loss_mask"] = [0] * len(prompt) + mask
            row["advantages"] = [0.0] * len(prompt) + [advantage * m for m in mask]
            row |= {name: [0.0] * len(prompt) + [rng.uniform(-3, -0.1) if name != "is_weights" else rng.uniform(0.5, 2) for _ in mask] for name in VALUES}
            rows.append(row)
    return rows


def responses(rows: list[dict], name: str) -> list[list]:
    return [row[name][row["prompt"] :] for row in rows]


def right(lists: list[list], *, width: int | None = None, fill=0) -> torch.Tensor:
    width = width or max(map(len, lists))
    return torch.tensor([values + [fill] * (width - len(values)) for values in lists])


def left(lists: list[list], *, width: int | None = None, fill=0) -> torch.Tensor:
    width = width or max(map(len, lists))
    return torch.tensor([[fill] * (width - len(values)) + values for values in lists])


def jagged(lists: list[list]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(values) for values in lists], layout=torch.jagged)


def total(rows: list[dict]) -> int:
    return sum(sum(row["loss_mask"]) for row in rows)


# --- the same rows as each trainer records them

TRL_LOSS = {"loss_type": "dapo", "epsilon": 0.2, "steps_per_generation": 2, "current_gradient_accumulation_steps": 2}
VERL_LOSS = {"loss_mode": "vanilla", "clip_ratio_c": 3.0, "dp_size": 2, "batch_num_tokens": 500, "global_batch_size": 64}
OPENRLHF_LOSS = {"policy_loss_type": "ppo", "eps_clip_low_high": [0.2, 0.3], "batch_num_tokens": 4.5, "global_batch_size": 2.0, "dp_size": 1}


def trl_inputs(rows: list[dict]) -> dict:
    prompts, answers = [row["ids"][: row["prompt"]] for row in rows], responses(rows, "ids")
    wide = max(map(len, answers)) + 2  # TRL's width is of the whole generation batch
    return {
        "prompt_ids": left(prompts, fill=PAD),
        "prompt_mask": left([[1] * len(prompt) for prompt in prompts]),
        "completion_ids": right(answers, width=wide, fill=PAD),
        "completion_mask": right([[1] * len(answer) for answer in answers], width=wide),
        "tool_mask": right(responses(rows, "loss_mask"), width=wide, fill=1),
        "advantages": torch.tensor([next(a for a in row["advantages"] if a) for row in rows]),
        "num_items_in_batch": torch.tensor(4 * total(rows)),
        "old_per_token_logps": right(responses(rows, "old_logps"), width=wide, fill=0.0),
        "ref_per_token_logps": right(responses(rows, "ref_logps"), width=wide, fill=float("nan")),
        "sampling_per_token_logps": right(responses(rows, "sampling_logps"), width=wide, fill=float("nan")),
        "importance_sampling_ratio": right(responses(rows, "is_weights"), width=wide, fill=1.0),
    }


VERL_KEYS = {"response_mask": "loss_mask", "advantages": "advantages", "old_log_probs": "old_logps", "ref_log_prob": "ref_logps", "rollout_log_probs": "sampling_logps", "rollout_is_weights": "is_weights"}


def verl_inputs(rows: list[dict]) -> dict:
    """What the trainer has: prompts left, responses right."""
    prompts, answers = [row["ids"][: row["prompt"]] for row in rows], responses(rows, "ids")
    mask = torch.cat([left([[1] * len(prompt) for prompt in prompts]), right([[1] * len(answer) for answer in answers])], 1)
    return {
        "prompts": left(prompts, fill=PAD),
        "responses": right(answers, fill=PAD),
        "input_ids": torch.cat([left(prompts, fill=PAD), right(answers, fill=PAD)], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "uid": [f"prompt-{row['group']}" for row in rows],
        **{key: right(responses(rows, name)) for key, name in VERL_KEYS.items()},
    }


def verl_worker_inputs(rows: list[dict], *, form=jagged) -> dict:
    """What the workers of verl 0.9 have: jagged sequences beside padded responses."""
    sequences = [row["ids"] for row in rows]
    return verl_inputs(rows) | {"input_ids": form(sequences), "position_ids": form([list(range(len(ids))) for ids in sequences])}


def verl_jagged_inputs(rows: list[dict]) -> dict:
    """Everything jagged, and no attention mask."""
    inputs = verl_worker_inputs(rows) | {key: jagged(responses(rows, name)) for key, name in VERL_KEYS.items()}
    return {key: value for key, value in inputs.items() if key not in ("prompts", "attention_mask")} | {"responses": jagged(responses(rows, "ids"))}


def openrlhf_inputs(rows: list[dict], *, pad=right) -> dict:
    """Action column a is the prediction of token column a + 1."""
    shifted = {"action_log_probs": "old_logps", "base_action_log_probs": "ref_logps", "rollout_log_probs": "sampling_logps", "advantages": "advantages"}
    return {
        "sequences": pad([row["ids"] for row in rows], fill=PAD),
        "attention_mask": pad([[1] * len(row["ids"]) for row in rows]),
        "action_mask": pad([row["loss_mask"] for row in rows])[:, 1:].bool(),
        "total_length": torch.tensor([float(len(row["ids"])) for row in rows]),
        **{key: pad([row[name] for row in rows])[:, 1:] for key, name in shifted.items()},
    }


SLIME_KEYS = {"loss_masks": "loss_mask", "advantages": "advantages", "log_probs": "old_logps", "ref_log_probs": "ref_logps", "rollout_log_probs": "sampling_logps"}


def slime_columns(rows: list[dict]) -> dict:
    return {
        "tokens": [torch.tensor(row["ids"]) for row in rows],
        "total_lengths": [len(row["ids"]) for row in rows],
        "response_lengths": [len(row["ids"]) - row["prompt"] for row in rows],
        **{key: [torch.tensor(values) for values in responses(rows, name)] for key, name in SLIME_KEYS.items()},
    }


def slime_dump(rows: list[dict]) -> dict:
    """Format 2 of two ranks: the rows alternate between them, in micro-batches of one sample, rank 1 in reverse order."""
    columns, samples, shards = slime_columns(rows), [], []
    for i in range(len(rows)):
        samples.append({"data_parallel_rank": i % 2, "rollout_position": i, **{key: values[i] for key, values in columns.items()}})
    for rank in (0, 1):
        partition = list(range(rank, len(rows), 2))[:: -1 if rank else 1]
        single = [[k] for k in range(len(partition))]
        shards.append({"rank": rank, "data_parallel_rank": rank, "partition": partition, "micro_batch_indices": single, "num_microbatches": [len(single)], "global_batch_sizes": [len(rows)]})
    return {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": shards}


def own_inputs(rows: list[dict], *, pad=right) -> dict:
    return {
        "input_ids": pad([row["ids"] for row in rows], fill=PAD),
        "attention_mask": pad([[1] * len(row["ids"]) for row in rows]),
        "group_ids": torch.tensor([row["group"] for row in rows]),
        **{name: pad([row[name] for row in rows]) for name in ("loss_mask", "advantages", *VALUES)},
    }


def packed_inputs(rows: list[dict], *, boundaries: str | None = "cu_seqlens") -> dict:
    flat = {name: torch.tensor([[value for row in rows for value in row[name]]]) for name in ("ids", "loss_mask", "advantages", *VALUES)}
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    inputs = {"input_ids": flat.pop("ids"), **flat}
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return inputs if boundaries is None else inputs | {boundaries: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()}


def capture(trainer: str, inputs: dict, loss: dict | None = None, **meta) -> dict:
    return {"hilore_capture": 1, "trainer": trainer, "inputs": inputs, "loss": loss or {}, "meta": meta}


def read(document, folder, name="captured.pt"):
    torch.save(document, folder / name)
    return read_micro_batches(folder / name)


def assert_rows(mb, rows: list[dict], *, values=VALUES) -> None:
    assert mb.rows == len(rows)
    for i, row in enumerate(rows):
        real = mb.attention_mask[i].bool()
        assert mb.input_ids[i][real].tolist() == row["ids"]
        counted = mb.loss_mask[i][real]
        assert counted.tolist() == row["loss_mask"]
        for name in ("advantages", *values):
            assert torch.equal(getattr(mb, name)[i][real], torch.tensor(row[name]) * counted), name
    groups = mb.group_ids.tolist()
    assert [groups.index(g) for g in groups] == [[row["group"] for row in rows].index(row["group"]) for row in rows]


FORMATS = {
    "trl": lambda rows: (capture("trl", trl_inputs(rows), TRL_LOSS), "padded", VALUES),
    "verl": lambda rows: (capture("verl", verl_inputs(rows), VERL_LOSS, use_remove_padding=False), "positions", VALUES),
    "verl, no padding": lambda rows: (capture("verl", verl_inputs(rows), VERL_LOSS, use_remove_padding=True), "packed", VALUES),
    "verl worker": lambda rows: (capture("verl", verl_worker_inputs(rows), VERL_LOSS, use_remove_padding=True), "packed", VALUES),
    "verl worker, lists": lambda rows: (capture("verl", verl_worker_inputs(rows, form=lambda x: [torch.tensor(v) for v in x]), VERL_LOSS, use_remove_padding=False), "positions", VALUES),
    "verl worker, values and offsets": lambda rows: (capture("verl", verl_worker_inputs(rows, form=lambda x: {"values": jagged(x).values(), "offsets": jagged(x).offsets()}), VERL_LOSS, use_remove_padding=True), "packed", VALUES),
    "verl, all jagged": lambda rows: (capture("verl", verl_jagged_inputs(rows), VERL_LOSS, use_remove_padding=True), "packed", VALUES),
    "openrlhf": lambda rows: (capture("openrlhf", openrlhf_inputs(rows), OPENRLHF_LOSS), "positions", VALUES[:3]),
    "openrlhf, padded left": lambda rows: (capture("openrlhf", openrlhf_inputs(rows, pad=left), OPENRLHF_LOSS, packing_samples=False), "positions", VALUES[:3]),
    "openrlhf, packed": lambda rows: (capture("openrlhf", openrlhf_inputs(rows), OPENRLHF_LOSS, packing_samples=True), "packed", VALUES[:3]),
    "slime": lambda rows: (capture("slime", {"rollout_id": 0, "rank": 0, "rollout_data": slime_columns(rows)}, {"global_batch_size": 8}), "packed", VALUES[:3]),
    "own": lambda rows: (capture("own", own_inputs(rows), to_dict(TrlLoss(num_items_in_batch=10**4))), "padded", VALUES),
    "own, padded left": lambda rows: (capture("own", own_inputs(rows, pad=left) | {"layout": "positions"}, to_dict(VerlLoss())), "positions", VALUES),
    "own, packed": lambda rows: (capture("own", packed_inputs(rows), to_dict(OpenRlhfLoss())), "packed", VALUES),
    "own, positions alone": lambda rows: (capture("own", packed_inputs(rows, boundaries=None), to_dict(VerlLoss())), "packed", VALUES),
    "own, boundaries of transformers": lambda rows: (capture("own", packed_inputs(rows, boundaries="cu_seq_lens_q"), to_dict(VerlLoss())), "packed", VALUES),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 3))
def test_each_format_gives_the_rows_back(form, tmp_path_factory, seed, groups):
    rows = known_rows(seed, groups=groups)
    document, layout, values = FORMATS[form](rows)
    [mb] = read(document, tmp_path_factory.getbasetemp())
    assert mb.layout == layout
    assert_rows(mb, rows, values=values)
    assert mb.meta["trainer"] == document["trainer"]


def test_widths_and_padding_are_the_trainers_own(tmp_path):
    rows = known_rows(1)
    inputs = trl_inputs(rows)
    [mb] = read(capture("trl", inputs, TRL_LOSS), tmp_path)
    assert mb.input_ids.shape[1] == inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
    assert torch.equal(mb.input_ids, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1))
    inputs = verl_inputs(rows)
    [mb] = read(capture("verl", inputs, VERL_LOSS, use_remove_padding=False), tmp_path)
    assert torch.equal(mb.attention_mask, inputs["attention_mask"])
    [mb] = read(capture("verl", verl_worker_inputs(rows), VERL_LOSS, use_remove_padding=False), tmp_path)
    assert mb.input_ids.shape[1] == max(len(row["ids"]) for row in rows)


@pytest.mark.parametrize("form", ["trl", "verl", "openrlhf", "own"])
def test_dtypes_of_trainers_are_converted(tmp_path, form):
    document, _, _ = FORMATS[form](known_rows(2))
    [exact] = read(document, tmp_path)
    smaller = {torch.int64: torch.int32, torch.float32: torch.bfloat16}
    document["inputs"] = {
        key: value.bool() if "mask" in key else value.to(smaller.get(value.dtype, value.dtype)) if torch.is_tensor(value) else value
        for key, value in document["inputs"].items()
    }
    [mb] = read(document, tmp_path)
    assert (mb.input_ids.dtype, mb.loss_mask.dtype, mb.advantages.dtype, mb.old_logps.dtype) == (torch.int64, torch.int64, torch.float32, torch.float32)
    assert torch.equal(mb.input_ids, exact.input_ids)
    assert torch.equal(mb.loss_mask, exact.loss_mask)
    assert torch.equal(mb.old_logps, exact.old_logps.bfloat16().float())


# --- losses


def test_loss_options_come_through(tmp_path):
    rows = known_rows(3)
    [mb] = read(capture("trl", trl_inputs(rows), TRL_LOSS), tmp_path)
    assert mb.loss == TrlLoss(**TRL_LOSS, num_items_in_batch=4 * total(rows))
    [mb] = read(capture("verl", verl_inputs(rows), VERL_LOSS, use_remove_padding=True), tmp_path)
    assert mb.loss == VerlLoss(**VERL_LOSS, loss_scale_factor=max(map(len, responses(rows, "ids"))))
    [mb] = read(capture("openrlhf", openrlhf_inputs(rows), OPENRLHF_LOSS), tmp_path)
    assert mb.loss == OpenRlhfLoss(**{**OPENRLHF_LOSS, "eps_clip_low_high": (0.2, 0.3)})
    [mb] = read(capture("slime", slime_columns(rows), {"eps_clip": 0.1, "eps_clip_c": 4.0, "global_batch_size": 16}), tmp_path)
    assert mb.loss == TrlLoss(loss_type="grpo", epsilon=0.1, delta=4.0, use_bias_correction_kl=False)


def test_slime_weighs_tokens_by_sample_and_update(tmp_path):
    rows = known_rows(4)
    [mb] = read(capture("slime", slime_columns(rows), {"global_batch_size": 16}), tmp_path)
    expected = mb.loss_mask / mb.loss_mask.sum(1, keepdim=True) / 16
    assert torch.allclose(mb.normaliser, expected)
    sums = slime_columns(rows) | {"rollout_mask_sums": [10] * len(rows)}
    [mb] = read(capture("slime", sums, {"global_batch_size": 16}), tmp_path)
    assert torch.allclose(mb.normaliser, mb.loss_mask / 160)


def test_slime_without_the_size_of_an_update(tmp_path):
    rows = known_rows(4)
    with pytest.warns(UserWarning, match=f"global_batch_size was not recorded, so hilore assumes that an update has the {len(rows)} samples"):
        [mb] = read(capture("slime", slime_columns(rows)), tmp_path)
    assert float(mb.normaliser.sum()) == pytest.approx(1.0)


def test_slime_tis_weights(tmp_path):
    rows = known_rows(4)
    options = {"global_batch_size": 16, "use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5}
    [mb] = read(capture("slime", slime_columns(rows), options), tmp_path)
    expected = (mb.old_logps - mb.sampling_logps).exp().clamp(0.5, 1.5) * mb.loss_mask
    assert torch.allclose(mb.is_weights, expected)
    [mb] = read(capture("slime", slime_columns(rows), {"global_batch_size": 16, "use_rollout_logprobs": True}), tmp_path)
    assert torch.equal(mb.old_logps, mb.sampling_logps)


def test_slime_dump_of_all_ranks_gives_their_micro_batches(tmp_path):
    rows = known_rows(5)
    found = read(capture("slime", slime_dump(rows)), tmp_path)
    order = [*range(0, len(rows), 2), *list(range(1, len(rows), 2))[::-1]]
    assert len(found) == len(rows)
    for mb, i in zip(found, order, strict=True):
        assert mb.input_ids[0].tolist() == rows[i]["ids"]
        assert float(mb.normaliser.sum()) == pytest.approx(1 / len(rows))


# --- TRL's special cases


def test_truncated_completions_are_masked_whole(tmp_path):
    rows = known_rows(6, holes=False)
    inputs = trl_inputs(rows)
    inputs["completion_mask"][1] = 0
    [mb] = read(capture("trl", inputs, TRL_LOSS), tmp_path)
    assert mb.attention_mask[1].sum() == rows[1]["prompt"]
    assert not mb.loss_mask[1].any()
    assert not mb.advantages[1].any()
    assert mb.group_ids[1] == mb.group_ids[0]


def test_trl_weights_of_a_row_and_advantages_of_a_token(tmp_path):
    rows = known_rows(7)
    inputs = trl_inputs(rows)
    per_row = torch.rand(len(rows), 1) + 0.5
    per_token = torch.randn(inputs["completion_ids"].shape)
    inputs |= {"importance_sampling_ratio": per_row, "advantages": per_token}
    [mb] = read(capture("trl", inputs, TRL_LOSS), tmp_path)
    assert torch.equal(mb.is_weights, per_row * mb.loss_mask)
    columns = inputs["prompt_ids"].shape[1]
    assert torch.equal(mb.advantages[:, columns:], per_token * mb.loss_mask[:, columns:])


def test_missing_sampling_logps(tmp_path):
    """TRL gives such tokens the weight 1; here the old log-prob stands in. Without weights nobody knows."""
    rows = known_rows(8)
    inputs = trl_inputs(rows)
    inputs["sampling_per_token_logps"][0, 0] = float("nan")
    [mb] = read(capture("trl", inputs, TRL_LOSS), tmp_path)
    column = inputs["prompt_ids"].shape[1]
    assert mb.sampling_logps[0, column] == mb.old_logps[0, column]
    del inputs["importance_sampling_ratio"]
    with pytest.raises(ProfileError, match=r"sampling_per_token_logps are NaN on a loss token \(row 0, completion column 0\)"):
        read(capture("trl", inputs, TRL_LOSS), tmp_path)


# --- verl's special cases


def test_verl_layout_is_packed_unless_recorded(tmp_path):
    with pytest.warns(UserWarning, match="use_remove_padding was not recorded"):
        [mb] = read(capture("verl", verl_inputs(known_rows(9)), VERL_LOSS), tmp_path)
    assert mb.layout == "packed"


def test_verl_trainer_dict_with_everything_in_it(tmp_path):
    rows = known_rows(9)
    extra = {"returns": torch.zeros(1), "data_source": ["math"] * len(rows), "token_level_scores": right([[0.0] * (len(v) - 1) + [float(i)] for i, v in enumerate(responses(rows, "ids"))]), "global_batch_size": 64, "batch_num_tokens": 500, "dp_size": 2, "use_remove_padding": True, "temperature": torch.full((len(rows),), 0.7)[:1]}  # fmt: skip
    with pytest.warns(UserWarning, match="verl: no loss options were recorded"):
        [mb] = read(verl_inputs(rows) | extra, tmp_path)
    assert_rows(mb, rows)
    assert mb.rewards.tolist() == [float(i) for i in range(len(rows))]
    assert (mb.loss.global_batch_size, mb.loss.batch_num_tokens, mb.loss.dp_size) == (64, 500, 2)
    assert mb.loss.temperature == pytest.approx(0.7)


def test_jagged_tensors_load_without_pickle(tmp_path):
    torch.save({"a": jagged([[1, 2], [3]])}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"].is_nested


# --- own tensors


def test_arrays_of_predictions_are_shifted(tmp_path):
    rows = known_rows(10)
    inputs = own_inputs(rows)
    shifted = {name: inputs[name][:, 1:] for name in ("loss_mask", "advantages", *VALUES)}
    [mb] = read(capture("own", inputs | shifted, to_dict(VerlLoss())), tmp_path)
    assert_rows(mb, rows)


def test_own_layouts_from_position_ids(tmp_path):
    rows = known_rows(10)
    inputs = own_inputs(rows, pad=left)
    skipping = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    counting = torch.arange(skipping.shape[1]).expand(skipping.shape)
    for positions, layout in ((skipping, "positions"), (counting, "padded")):
        [mb] = read(capture("own", inputs | {"position_ids": positions}, to_dict(VerlLoss())), tmp_path)
        assert mb.layout == layout
    with pytest.raises(ProfileError, match="position_ids count neither"):
        read(capture("own", inputs | {"position_ids": counting + 1}, to_dict(VerlLoss())), tmp_path)


def test_advantages_and_rewards_of_packed_rows(tmp_path):
    rows = known_rows(11)
    inputs = packed_inputs(rows)
    advantages = torch.tensor([next(a for a in row["advantages"] if a) for row in rows])
    rewards = torch.rand(len(rows))
    groups = torch.tensor([row["group"] for row in rows])
    [mb] = read(capture("own", inputs | {"advantages": advantages, "rewards": rewards, "group_ids": groups}, to_dict(VerlLoss())), tmp_path)
    assert_rows(mb, rows)
    assert torch.equal(mb.rewards, rewards)


# --- files


def test_safetensors_round_trip(tmp_path):
    [mb] = read(capture("own", own_inputs(known_rows(12)) | {"rewards": torch.rand(len(known_rows(12)))}, to_dict(OpenRlhfLoss(dual_clip=3.0))), tmp_path)
    save_safetensors(tmp_path / "a.safetensors", mb)
    [again] = read_micro_batches(tmp_path / "a.safetensors")
    for name, value in vars(mb).items():
        other = getattr(again, name)
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other, name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "captured.pt"]
    damaged = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(damaged[: len(damaged) // 2])
    with pytest.raises(ProfileError, match=r"a.safetensors: is damaged"):
        read_micro_batches(tmp_path / "a.safetensors")


def test_safetensors_of_others(tmp_path):
    from safetensors.torch import save_file

    rows = known_rows(12)
    save_file(own_inputs(rows), tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match="own: no loss options"):
        [mb] = read_micro_batches(tmp_path / "a.safetensors")
    assert_rows(mb, rows)
    header = {"kind": "micro-batch", "version": 99, "layout": "padded", "loss": {}, "meta": {}}
    save_file(own_inputs(rows), tmp_path / "a.safetensors", metadata={"hilore": json.dumps(header)})
    with pytest.raises(ProfileError, match="of version 99"):
        read_micro_batches(tmp_path / "a.safetensors")


def test_our_parquet_is_read_too(tmp_path):
    row = {"ids": [5, 6, 7], "loss_mask": [0, 1, 1], "advantages": [0.0, 1.0, 1.0]}
    mb = from_rows([row], loss=VerlLoss(), layout="packed", width=3)
    save_micro_batch(tmp_path / "a.parquet", mb)
    [again] = read_micro_batches(tmp_path / "a.parquet")
    assert torch.equal(again.input_ids, mb.input_ids)
    assert again.loss == mb.loss


def test_tensors_of_a_gpu_come_to_the_cpu(tmp_path):
    """The file says cuda:0, as torch.save on a GPU writes it."""
    torch.save(capture("trl", trl_inputs(known_rows(12)), TRL_LOSS), tmp_path / "cpu.pt")
    with zipfile.ZipFile(tmp_path / "cpu.pt") as cpu, zipfile.ZipFile(tmp_path / "gpu.pt", "w") as gpu:
        for name in cpu.namelist():
            content = cpu.read(name)
            gpu.writestr(name, content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0") if name.endswith("data.pkl") else content)
        assert b"cuda:0" in gpu.read("cpu/data.pkl")
    [mb] = read_micro_batches(tmp_path / "gpu.pt")
    assert mb.input_ids.device.type == "cpu"
    assert_rows(mb, known_rows(12))


def test_several_steps_and_shared_loss(tmp_path):
    first, second = known_rows(13), known_rows(14)
    steps = [{"inputs": trl_inputs(first), "meta": {"step": 1}}, {"inputs": trl_inputs(second), "loss": {"loss_type": "bnpo"}}]
    found = read({"hilore_capture": 1, "trainer": "trl", "steps": steps, "loss": TRL_LOSS}, tmp_path)
    assert [mb.loss.loss_type for mb in found] == ["dapo", "bnpo"]
    assert [mb.meta for mb in found] == [{"trainer": "trl", "step": 1}, {"trainer": "trl"}]
    for mb, rows in zip(found, (first, second), strict=True):
        assert_rows(mb, rows)


BARE = {"trl": trl_inputs, "verl": verl_inputs, "openrlhf": openrlhf_inputs, "slime": slime_dump, "own": own_inputs}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_bare_dicts_are_recognised(tmp_path, trainer):
    rows = known_rows(15)
    with pytest.warns(UserWarning, match=f"{trainer}: .* hilore capture {trainer}"):
        found = read({"steps": [BARE[trainer](rows)]}, tmp_path)
    assert {mb.meta["trainer"] for mb in found} == {trainer}
    assert sum(mb.rows for mb in found) == len(rows)


def test_micro_batches_without_loss_tokens_are_left_out(tmp_path):
    """Those without gradient stay: they are a part of the update, and other micro-batches are compared with them."""
    rows = known_rows(16)
    inputs = trl_inputs(rows)
    masked = inputs | {"completion_mask": torch.zeros_like(inputs["completion_mask"])}
    flat = inputs | {"advantages": torch.zeros(len(rows))}
    steps = [{"inputs": part, "loss": TRL_LOSS} for part in (masked, flat, inputs)]
    with pytest.warns(UserWarning, match="micro-batches 0 have no loss tokens and are left out"):
        without, mb = read({"hilore_capture": 1, "trainer": "trl", "steps": steps}, tmp_path)
    assert not without.has_gradient
    assert not without.advantages.any()
    assert without.zero_rows == without.rows == len(rows)
    assert_rows(mb, rows)
    with pytest.raises(ProfileError, match="all completions are masked"):
        read({"hilore_capture": 1, "trainer": "trl", "steps": steps[:1]}, tmp_path)


# --- refusals


def test_pickles_are_refused(tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"input_ids": [1]}))
    with pytest.raises(ProfileError, match=r"a.pkl: is a pickle, .* a pickle runs code; .* hilore capture verl"):
        read_micro_batches(tmp_path / "a.pkl")
    with pytest.raises(ProfileError, match=r"holds fractions.Fraction, which only unpickling .* runs code; .* hilore capture verl"):
        read({"batch": fractions.Fraction(1, 2)}, tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b'{"a": 1}', b"\x10" + b"\0" * 7 + b"{broken", b"PAR1nothing"])
def test_other_files_are_one_line_errors(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ProfileError, match=r"a\.pt: is (no|damaged)") as caught:
        read_micro_batches(tmp_path / "a.pt")
    assert "\n" not in str(caught.value)
    with pytest.raises(ProfileError, match="no such file"):
        read_micro_batches(tmp_path / "b.pt")


def without(key):
    return lambda inputs: {name: value for name, value in inputs.items() if name != key}


def put(key, place, value):
    def change(inputs):
        changed = inputs[key].clone()
        changed[place] = value
        return inputs | {key: changed}

    return change


def cut(key, *, rows=0, columns=0):
    return lambda inputs: inputs | {key: inputs[key][: len(inputs[key]) - rows, : inputs[key].shape[1] - columns]}


def longer_response(inputs):
    return inputs | {"response_lengths": [n + 1 for n in inputs["response_lengths"]]}


WRONG = {
    "trl lacks a key": ("trl", without("prompt_mask"), "trl inputs lack prompt_mask; .*hilore capture trl"),
    "trl has an unknown key": ("trl", lambda x: x | {"my_weights": torch.ones(2)}, "unknown keys my_weights"),
    "trl has pictures": ("trl", lambda x: x | {"pixel_values": torch.ones(2, 3)}, "pictures .pixel_values."),
    "trl rows differ": ("trl", lambda x: x | {"completion_ids": x["completion_ids"][1:]}, "prompts and .* completions"),
    "trl widths differ": ("trl", cut("completion_mask", columns=1), "completion_mask has shape"),
    "trl old logps of another width": ("trl", cut("old_per_token_logps", columns=1), "old_per_token_logps has shape"),
    "trl advantages of another batch": ("trl", lambda x: x | {"advantages": x["advantages"][1:]}, "advantages have shape"),
    "trl prompt padded right": ("trl", lambda x: x | {"prompt_mask": x["prompt_mask"].flip(1), "prompt_ids": x["prompt_ids"].flip(1)}, "row [0-9]+, column [0-9]+: .* hole"),
    "trl hole in a completion": ("trl", put("completion_mask", (0, 1), 0), "row 0, column [0-9]+: .* hole"),
    "trl no prompt": ("trl", put("prompt_mask", 0, 0), "row 0, column [0-9]+: the first token"),
    "trl mask of twos": ("trl", put("completion_mask", (0, 0), 2), r"completion_mask holds 2 at \[0, 0\]"),
    "trl old logps NaN": ("trl", put("old_per_token_logps", (0, 0), float("nan")), "old_logps hold NaN or infinity on loss tokens"),
    "trl ref logps infinite": ("trl", put("ref_per_token_logps", (0, 0), -float("inf")), "ref_logps hold NaN or infinity"),
    "trl counts of another batch": ("trl", lambda x: x | {"num_items_in_batch": 1}, "num_items_in_batch 1 is below"),
    "trl ids of labels": ("trl", put("completion_ids", (0, 0), -100), "row 0 has negative ids"),
    "trl ids of floats": ("trl", lambda x: x | {"completion_ids": x["completion_ids"].float()}, "completion_ids are of torch.float32"),
    "verl mrope": ("verl", lambda x: x | {"position_ids": x["position_ids"][:, None].expand(-1, 4, -1)}, "mrope"),
    "verl other positions": ("verl", lambda x: x | {"position_ids": x["position_ids"] + 1}, "row 0: position_ids do not count"),
    "verl advantages off the mask": ("verl", put("response_mask", (0, 1), 0), "row 0: advantages are not zero off the loss mask .* gae"),
    "verl mask of the sequence": ("verl", lambda x: x | {"response_mask": x["attention_mask"]}, "response_mask has as many columns as the whole sequence"),
    "verl mask on padding": ("verl", lambda x: x | {"response_mask": torch.ones_like(x["response_mask"])}, "response_mask counts padding"),
    "verl mask empty": ("verl", lambda x: x | {"response_mask": x["response_mask"] * 0}, "response_mask is zero everywhere"),
    "verl widths differ": ("verl", cut("old_log_probs", columns=1), "old_log_probs has shape"),
    "verl rows differ": ("verl", lambda x: x | {"input_ids": x["input_ids"][1:]}, "input_ids has shape"),
    "verl no attention mask": ("verl", without("attention_mask"), "lack attention_mask"),
    "verl hole": ("verl", put("attention_mask", (0, -1), 1), "row 0, column [0-9]+: .* hole|response has"),
    "verl groups of other prompts": ("verl", lambda x: x | {"uid": ["a"] * len(x["uid"])}, "are of group 0 and have different prompts"),
    "verl groups of another batch": ("verl", lambda x: x | {"uid": x["uid"][1:]}, "group ids for"),
    "verl worker rows of other lengths": ("verl", lambda x: x | {"input_ids": [row[1:] for row in x["input_ids"]]}, "row 0 has ids of shape .* where its attention mask counts"),
    "openrlhf mask of tokens": ("openrlhf", lambda x: x | {"action_mask": torch.nn.functional.pad(x["action_mask"], (1, 0))}, "actions are predictions"),
    "openrlhf widths differ": ("openrlhf", cut("advantages", columns=1), "advantages have shape"),
    "openrlhf actions on padding": ("openrlhf", lambda x: x | {"action_mask": torch.ones_like(x["action_mask"])}, "a loss token on padding"),
    "openrlhf lengths of another batch": ("openrlhf", lambda x: x | {"total_length": x["total_length"] + 1}, "row 0: total_length is"),
    "slime lacks advantages": ("slime", without("advantages"), "lack advantages"),
    "slime other lengths": ("slime", longer_response, "loss_masks have .* values for a response of|do not belong together"),
    "slime fewer entries": ("slime", lambda x: x | {"advantages": x["advantages"][1:]}, "advantages is no list of"),
    "own mask shifted": ("own", lambda x: x | {"loss_mask": x["loss_mask"].roll(-1, 1)}, "the first token of a row is a loss token|advantages are not zero off the loss mask"),
    "own mask at the first token": ("own", put("loss_mask", (0, 0), 1), "row 0, column 0: the first token of a row is a loss token"),
    "own mask on padding": ("own", lambda x: x | {"loss_mask": torch.ones_like(x["loss_mask"]).index_fill(1, torch.tensor([0]), 0)}, "a loss token on padding"),
    "own advantages shifted": ("own", lambda x: x | {"advantages": x["advantages"].roll(-1, 1)}, "advantages are not zero off the loss mask"),
    "own widths differ": ("own", cut("old_logps", columns=2), "old_logps has shape"),
    "own no attention mask": ("own", without("attention_mask"), "lack attention_mask"),
    "own hole": ("own", put("attention_mask", (0, 1), 0), "row 0, column 1: .* hole"),
    "own jagged": ("own", lambda x: x | {"old_logps": [[1.0], [1.0, 2.0]]}, "old_logps is no table of numbers|old_logps has shape"),
    "packed starts late": ("packed", put("cu_seqlens", 0, 1), "boundaries start at 0, increase, and end"),
    "packed ends early": ("packed", lambda x: x | {"cu_seqlens": x["cu_seqlens"][:-1]}, "boundaries start at 0, increase, and end"),
    "packed does not increase": ("packed", lambda x: x | {"cu_seqlens": x["cu_seqlens"].repeat_interleave(2)}, "boundaries start at 0, increase, and end"),
    "packed disagrees with positions": ("packed", lambda x: x | {"cu_seqlens": x["cu_seqlens"][[0, -1]]}, "position_ids and the row boundaries disagree: row 0"),
    "packed predictions": ("packed", lambda x: x | {"old_logps": x["old_logps"][:, 1:]}, "values for .* packed tokens"),
    "packed mask at a row's start": ("packed", put("loss_mask", (0, 0), 1), "the first token of a packed row is a loss token"),
    "packed padding": ("packed", lambda x: x | {"attention_mask": x["loss_mask"]}, "packed rows have no padding"),
}  # fmt: skip

LOSSES = {"trl": TRL_LOSS, "verl": VERL_LOSS, "openrlhf": OPENRLHF_LOSS, "slime": {"global_batch_size": 8}, "own": to_dict(VerlLoss())}
MADE = {"trl": trl_inputs, "verl": verl_inputs, "openrlhf": openrlhf_inputs, "slime": slime_columns, "own": own_inputs, "packed": packed_inputs}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_named(tmp_path, case):
    kind, change, message = WRONG[case]
    rows = known_rows(17, holes=False)
    rows[0] |= {"ids": [*rows[0]["ids"][: rows[0]["prompt"]], 7, 8, 9]}
    for name in ("loss_mask", "advantages", *VALUES):  # row 0 has the shape that the cases expect
        rows[0][name] = rows[0][name][: rows[0]["prompt"]] + [rows[0][name][-1]] * 3
    inputs = change(verl_worker_inputs(rows, form=lambda x: [torch.tensor(v) for v in x]) if case.startswith("verl worker") else MADE[kind](rows))
    trainer = "own" if kind == "packed" else kind
    meta = {"use_remove_padding": True} if kind == "verl" else {}
    with pytest.raises(ProfileError, match=message) as caught:
        read(capture(trainer, inputs, LOSSES[trainer], **meta), tmp_path)
    assert str(caught.value).startswith(f"micro-batch {tmp_path / 'captured.pt'}: ")
    assert "\n" not in str(caught.value)


ENVELOPES = {
    "another version": ({"hilore_capture": 2, "trainer": "trl"}, "was captured in version 2"),
    "unknown trainer": ({"hilore_capture": 1, "trainer": "nemo", "inputs": {}}, "trainer 'nemo' is unknown; it is one of trl, verl"),
    "unknown key": ({"hilore_capture": 1, "trainer": "trl", "inputs": {}, "seed": 1}, "unknown keys seed"),
    "no inputs": ({"hilore_capture": 1, "trainer": "trl"}, "neither inputs and steps"),
    "both": ({"hilore_capture": 1, "trainer": "trl", "inputs": {}, "steps": []}, "both inputs and steps"),
    "steps of numbers": ({"hilore_capture": 1, "trainer": "trl", "steps": [1]}, "steps are not dicts"),
    "bare steps of numbers": ({"steps": [1]}, "steps are not a list of dicts"),
    "no dict": ([1], "holds a list"),
    "keys of nobody": ({"tokens_": [1]}, "keys tokens_ are of no trainer"),
    "keys of nearly TRL": ({"prompt_ids": 1, "prompt_mask": 1, "advantages": 1}, "of trl, which is nearest, completion_ids, completion_mask are missing"),
    "keys of two": ({"prompt_ids": 1, "completion_ids": 1, "sequences": 1, "action_mask": 1}, "are those of trl and of openrlhf"),
    "unknown loss option": (capture("verl", verl_inputs(known_rows(1)), {"clip": 1.0}, use_remove_padding=True), "unknown setting clip"),
    "unknown slime option": (capture("slime", slime_columns(known_rows(1)), {"clip": 1.0}), "slime loss options clip are unknown"),
    "wrong loss value": (capture("trl", trl_inputs(known_rows(1)), {"loss_type": "ppo"}), "loss_type='ppo' is unknown"),
    "meta of objects": (capture("trl", trl_inputs(known_rows(1)), TRL_LOSS, rewards=torch.ones(2)), "meta holds something else"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ENVELOPES)
def test_wrong_documents_are_named(tmp_path, case):
    document, message = ENVELOPES[case]
    with pytest.raises(ProfileError, match=message) as caught:
        read(document, tmp_path)
    assert "\n" not in str(caught.value)


GARBAGE = {"text": "x", "number": 3, "ragged": [[1], [1, 2]], "dict": {"a": 1}, "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 0), "cube": torch.ones(2, 2, 2), "strings": ["a", "b"], "jagged": jagged([[1, 2], [3]])}  # fmt: skip


def places(document, path=()):
    """The paths of all keys, and of the first entry of lists."""
    entries = document.items() if isinstance(document, dict) else list(enumerate(document))[:1] if isinstance(document, list) else []
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(document, path, value):
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*MADE, "slime dump", "verl jagged"])
def test_garbage_anywhere_is_an_error_of_ours(tmp_path, kind):
    """Whatever stands somewhere, the answer is a line, or (where it does not matter) a micro-batch; never a traceback."""
    make = {"slime dump": slime_dump, "verl jagged": verl_jagged_inputs, **MADE}[kind]
    trainer = {"packed": "own", "slime dump": "slime", "verl jagged": "verl"}.get(kind, kind)
    document = capture(trainer, make(known_rows(17)), LOSSES[trainer])
    tried = refused = 0
    for path in places(document):
        for garbage in GARBAGE.values():
            tried += 1
            try:
                read(replaced(document, path, garbage), tmp_path)
            except ProfileError as error:
                refused += "\n" not in str(error)
    assert refused > tried / 3


# --- recipes


@pytest.mark.parametrize("trainer", TRAINERS)
def test_recipes_compile(trainer):
    text = recipe(trainer)
    if trainer == "slime":
        assert "--save-debug-train-data" in text
        text = text.split("<<'END'\n")[1].split("END")[0]
    compile(text, trainer, "exec")


def test_unknown_recipe():
    with pytest.raises(UsageError, match="trainer 'nemo': unknown; use one of trl, verl, openrlhf, slime, own"):
        recipe("nemo")


def module(monkeypatch, name: str, **content) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Config(dict):
    """verl's BaseConfig: attributes and items alike."""

    def __getattr__(self, name):
        return self[name]


def test_verl_recipe(tmp_path, monkeypatch):
    """ppo_loss is called as FSDPEngine.forward_step does, by keyword, on micro-batches of jagged ids."""
    monkeypatch.chdir(tmp_path)
    tu = module(monkeypatch, "verl.utils.tensordict_utils", get=lambda data, key, default=None: data.get(key, default))
    module(monkeypatch, "verl")
    module(monkeypatch, "verl.utils", tensordict_utils=tu)
    calls = []
    workers = module(monkeypatch, "verl.workers.engine_workers", ppo_loss=lambda **given: calls.append(given) or "loss")
    exec(recipe("verl"), {})
    policy = Config(loss_mode="vanilla", kl_cov_ratio=0.0002, ppo_kl_coef=0.1, dro_beta=None)
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, loss_agg_mode="token-mean", loss_scale_factor=None, entropy_coeff=0.0, tau_pos=1.0, tau_neg=1.05, use_kl_loss=False, kl_loss_coef=0.001, kl_loss_type="low_var_kl", policy_loss=policy)  # fmt: skip
    every = [known_rows(18), known_rows(19), known_rows(20)]
    update = 2 * (len(every[0]) + len(every[1]))  # two ranks; the third micro-batch is of the next update
    numbers = {"batch_num_tokens": 10**4, "global_batch_size": update, "dp_size": 2, "temperature": 0.8, "use_remove_padding": True}
    for rows in every:
        given = {"config": config, "model_output": {}, "data": verl_worker_inputs(rows) | numbers, "dp_group": None}
        with torch.no_grad():  # the log-probs of the old policy, which are no update
            assert workers.ppo_loss(**given) == "loss"
        assert workers.ppo_loss(**given) == "loss"
    assert len(calls) == 6
    assert calls[-1]["data"]["temperature"] == 0.8
    found = read_micro_batches(tmp_path / "captured.pt")
    assert len(found) == 2
    for mb, rows in zip(found, every, strict=False):
        assert_rows(mb, rows)
        assert mb.layout == "packed"
        assert (mb.loss.clip_ratio_high, mb.loss.temperature, mb.loss.batch_num_tokens, mb.loss.dp_size) == (0.28, 0.8, 10**4, 2)


def namespace(**content):
    return types.SimpleNamespace(**{key: namespace(**value) if isinstance(value, dict) else value for key, value in content.items()})


@pytest.mark.parametrize("dynamic", [False, True])
def test_openrlhf_recipe(tmp_path, monkeypatch, dynamic):
    monkeypatch.chdir(tmp_path)

    class ActorPPOTrainer:
        strategy = namespace(accumulated_gradient=2, is_rank_0=lambda: True)
        replay_buffer = namespace(dynamic_optimizer_step=[0, 1, 0])
        actor_loss_fn = namespace(token_level_loss=True)
        args = namespace(
            actor={"policy_loss_type": "ppo", "eps_clip_low_high": (0.2, 0.27), "dual_clip": 10.0, "entropy_coef": None, "aux_loss_coef": 0},
            algo={"advantage": {"is_correction_enable": False, "is_correction_type": "tis", "is_correction_threshold": [0.5, 5.0]}, "kl": {"use_loss": True, "init_coef": 0.01, "estimator": "k3"}},
            train={"dynamic_batch_enable": dynamic},
            rollout={"temperature": 0.9},
            ds={"packing_samples": dynamic},
        )  # fmt: skip

        def training_step(self, experience, kl_ctl, step, loss_batch_info=None):
            return experience, kl_ctl, step, loss_batch_info

    info = {"dp_size": 2, "batch_num_tokens": torch.tensor(40.0), "global_batch_size": torch.tensor(4.0)}
    module(monkeypatch, "openrlhf.trainer.ray.ppo_actor", ActorPPOTrainer=ActorPPOTrainer)
    module(monkeypatch, "openrlhf.utils.loss_utils", get_loss_batch_info=lambda strategy, mask, *, replay_buffer, step, dynamic_batch: info)
    exec(recipe("openrlhf"), {})
    every = [known_rows(21), known_rows(22), known_rows(23)]
    trainer = ActorPPOTrainer()
    for _ in range(2):  # the second epoch starts at step 0 again
        for step, rows in enumerate(every):
            experience = namespace(**openrlhf_inputs(rows) | {"rewards": torch.rand(len(rows))})
            given = (experience, 0.01, step, None if dynamic else info)
            assert trainer.training_step(*given) == given
    found = read_micro_batches(tmp_path / "captured.pt")
    assert len(found) == 2
    for mb, rows in zip(found, every, strict=False):
        assert_rows(mb, rows, values=VALUES[:3])
        assert mb.layout == ("packed" if dynamic else "positions")
        assert mb.rewards.shape == (len(rows),)
        assert mb.loss == OpenRlhfLoss(eps_clip_low_high=(0.2, 0.27), dual_clip=10.0, dp_size=2, batch_num_tokens=40.0, global_batch_size=4.0, use_kl_loss=True, kl_estimator="k3", temperature=0.9)


def test_slime_recipe_puts_the_loss_beside_the_dump(tmp_path, monkeypatch):
    rows = known_rows(24)
    torch.save(slime_dump(rows), tmp_path / "captured_0_0.pt")
    monkeypatch.setattr(sys, "argv", ["-", str(tmp_path / "captured_0_0.pt"), str(tmp_path / "captured.pt")])
    exec(recipe("slime").split("<<'END'\n")[1].split("END")[0], {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_micro_batches(tmp_path / "captured.pt")) == len(rows)


def test_own_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = known_rows(25)
    exec(recipe("own"), own_inputs(rows))
    [mb] = read_micro_batches(tmp_path / "captured.pt")
    assert_rows(mb, rows, values=())
    assert mb.layout == "positions"
