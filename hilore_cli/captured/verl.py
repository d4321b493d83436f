"""verl 0.9: the trainer's padded dict, and what the workers' loss function gets (jagged ids, no padding).

P prompt columns, padded left; R response columns, padded right. Response arrays are (B,R), column r belonging to token column P+r.
The model sees packed rows with `use_remove_padding` (verl's default, assumed where it is not recorded), else padded rows with
position ids: in the recorded widths where the ids are padded (verl 0.7 and before), right of the longest row where they are jagged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hilore_cli.batches import MicroBatch, from_rows
from hilore_cli.captured import rows
from hilore_cli.errors import ProfileError
from hilore_cli.exposure import Loss

SIGNATURES = ({"responses", "response_mask"},)
REQUIRED = {"responses", "response_mask", "input_ids", "advantages"}
VALUES = {"advantages": "advantages", "old_logps": "old_log_probs", "ref_logps": "ref_log_prob", "sampling_logps": "rollout_log_probs", "is_weights": "rollout_is_weights"}
NUMBERS = {"batch_num_tokens", "global_batch_size", "dp_size", "temperature"}
IGNORED = {  # what verl keeps beside it, of no effect on the actor's loss
    "__num_turns__", "ability", "agent_name", "calculate_entropy", "compute_loss", "data_source", "dataloader_kwargs", "disable_auto_offload",
    "distillation_only", "distillation_use_topk", "dummy_tensor", "entropys", "epochs", "extra_info", "global_steps", "global_token_num",
    "index", "indices", "interaction_kwargs", "max_response_len", "max_seq_len", "max_token_len_per_gpu", "micro_batch_size_per_gpu",
    "mini_batch_size", "multi_turn", "pad_token_id", "prompts", "raw_prompt", "raw_prompt_ids", "returns", "reward_model", "rm_scores",
    "seed", "sp_size", "token_level_rewards", "tools_kwargs", "update_lr_scheduler", "use_dynamic_bsz", "use_fused_kernels", "values",
}  # fmt: skip
KNOWN = {*VALUES.values(), *NUMBERS, *IGNORED, "attention_mask", "position_ids", "loss_mask", "uid", "token_level_scores", "use_remove_padding"}

RECIPE = '''\
# verl 0.9: save these lines as hilore_capture.py where the workers' PYTHONPATH finds it, and start training with
#   actor_rollout_ref.model.external_lib=hilore_capture
# Rank 0 saves the micro-batches of its first update as captured.pt (better: a path from the root, in the last line), for:
#   hilore profile --batch captured.pt
# In code of your own: worker.set_loss_fn(functools.partial(recorded(ppo_loss, "captured.pt"), config=actor_config)).
import sys

import torch

CONFIG = """clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff tau_pos tau_neg
use_kl_loss kl_loss_coef kl_loss_type""".split()
POLICY = ["loss_mode", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"]
INPUTS = """prompts responses input_ids attention_mask position_ids response_mask old_log_probs advantages ref_log_prob
rollout_log_probs rollout_is_weights token_level_scores uid""".split()
NUMBERS = ["batch_num_tokens", "global_batch_size", "dp_size"]


def recorded(ppo_loss, path):
    from verl.utils import tensordict_utils as tu

    steps = []

    def plain(value):  # jagged tensors become lists of rows, which any version of torch loads
        if isinstance(value, torch.Tensor):
            return [row.detach().cpu() for row in value.unbind()] if value.is_nested else value.detach().cpu()
        return [str(item) for item in value]

    def loss_of(config, model_output, data, dp_group=None):
        done, wanted = sum(len(step["inputs"]["responses"]) for step in steps), data["global_batch_size"] // data["dp_size"]
        first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if first_rank and torch.is_grad_enabled() and done < wanted:
            loss = {name: getattr(config, name) for name in CONFIG} | {name: data[name] for name in NUMBERS}
            loss |= {name: config.policy_loss[name] for name in POLICY}
            temperature = tu.get(data, "temperature", 1.0)  # a number, or one a row
            loss["temperature"] = float(temperature.flatten()[0] if torch.is_tensor(temperature) else temperature)
            meta = {"use_remove_padding": bool(tu.get(data, "use_remove_padding", True))}
            inputs = {name: plain(tu.get(data, name)) for name in INPUTS if name in data}
            steps.append({"inputs": inputs, "loss": loss, "meta": meta})
            torch.save({"hilore_capture": 1, "trainer": "verl", "steps": steps}, path)
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)

    return loss_of


workers = sys.modules.get("verl.workers.engine_workers")
if workers is not None:  # the module is imported elsewhere too, where there is no actor
    workers.ppo_loss = recorded(workers.ppo_loss, "captured.pt")
'''


def read(inputs: Mapping[str, Any], *, loss: Mapping[str, Any] | None, meta: dict[str, Any]) -> list[MicroBatch]:
    """One micro-batch. Raises ProfileError."""
    rows.check_keys(inputs, trainer="verl", required=REQUIRED, known=KNOWN)
    inputs = {key: value for key, value in inputs.items() if value is not None}
    layout = _layout(inputs, meta)
    ids, padding, responses = _sequences(inputs)
    _check_positions(inputs, ids)
    masks = [rows.zeros_and_ones(row[None], "response_mask")[0] for row in _responses(inputs, "response_mask", responses)]
    values = {name: _responses(inputs, key, responses) for name, key in VALUES.items() if key in inputs}
    numbers = {name: rows.scalar(inputs[name]) for name in NUMBERS & set(inputs)}
    numbers |= {"temperature": rows.number(inputs, "temperature")} if "temperature" in inputs else {}
    found = _loss(loss, numbers, response_columns=_response_columns(inputs, responses))
    _check_values(masks, values["advantages"], of_update=found.batch_num_tokens)
    scores = _responses(inputs, "token_level_scores", responses) if "token_level_scores" in inputs else None
    groups = rows.group_numbers(inputs["uid"], len(ids)) if "uid" in inputs else None
    as_recorded = layout == "positions" and rows.ragged(inputs, "input_ids") is None
    unpadded = [
        {
            "ids": rows.token_ids(row, "input_ids").tolist(),
            "loss_mask": [0] * prompt + masks[i].tolist(),
            **{name: torch.cat([torch.zeros(prompt), value[i].float()]) for name, value in values.items()},
            "padding": padding[i] if as_recorded else 0,
            "group": None if groups is None else groups[i],
            "reward": None if scores is None else float(scores[i].sum()),
        }
        for i, (row, prompt) in enumerate((row, len(row) - responses[i]) for i, row in enumerate(ids))
    ]
    return [
        from_rows(
            unpadded,
            loss=found,
            layout=layout,
            width=rows.table(inputs, "input_ids").shape[1] if as_recorded else max(map(len, ids)),
            meta={key: value for key, value in meta.items() if key != "use_remove_padding"},
        )
    ]


def _check_values(masks: list[Tensor], advantages: list[Tensor], *, of_update: float | None) -> None:
    counted = sum(int(mask.sum()) for mask in masks)
    if not counted:
        raise ProfileError("response_mask is zero everywhere, so there is no loss; record another micro-batch")
    rows.check_count(counted, of_update=of_update, name="batch_num_tokens")
    cause = "verl's group estimators leave zeros there, so one of the two is shifted (of gae, multiply the advantages by response_mask)"
    for i, (row, mask) in enumerate(zip(advantages, masks, strict=True)):
        rows.check_zero_off_mask(row[None], mask[None], name=f"row {i}: advantages", cause=cause)


def _loss(options: Mapping[str, Any] | None, numbers: Mapping[str, Any], *, response_columns: int) -> Loss:
    """`seq-mean-token-sum-norm` divides by verl's padded response width, which our rows do not have."""
    loss = rows.loss_of("verl", options, **numbers)
    return loss if loss.loss_scale_factor is not None else replace(loss, loss_scale_factor=response_columns)


def _response_columns(inputs: Mapping[str, Any], lengths: list[int]) -> int:
    """R: of the padded response mask, else as recorded, else the longest response."""
    padded = rows.ragged(inputs, "response_mask") is None
    return inputs["response_mask"].shape[1] if padded else int(rows.scalar(inputs.get("max_response_len", max(lengths))))


def _layout(inputs: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    removed = meta.get("use_remove_padding", inputs.get("use_remove_padding"))
    if removed is None:
        rows.assume("verl", "use_remove_padding was not recorded", "that it is on, as verl's default is")
        return "packed"
    return "packed" if removed else "positions"


def _sequences(inputs: Mapping[str, Any]) -> tuple[list[Tensor], list[int], list[int]]:
    """Each row's ids without padding, its columns of padding on the left, and how many of its tokens are of the response."""
    ids = rows.ragged(inputs, "input_ids")
    if "attention_mask" in inputs and rows.ragged(inputs, "attention_mask") is None:
        attention_mask = rows.zeros_and_ones(rows.table(inputs, "attention_mask"), "attention_mask")
        rows.check_runs(attention_mask)
        prompt_columns = attention_mask.shape[1] - rows.table(inputs, "response_mask").shape[1]
        if prompt_columns < 1:
            raise ProfileError(f"response_mask has as many columns as the whole sequence ({attention_mask.shape[1]}); save response_mask, not a mask of the sequence")
        if ids is None:
            ids = [row[keep] for row, keep in zip(rows.table(inputs, "input_ids", like=attention_mask), attention_mask.bool(), strict=True)]
        padding, responses = attention_mask.argmax(1).tolist(), attention_mask[:, prompt_columns:].sum(1).tolist()
        counts = attention_mask.sum(1).tolist()
    else:
        jagged = rows.ragged(inputs, "responses")
        if ids is None or jagged is None:
            raise ProfileError("verl inputs lack attention_mask, which says how long padded rows are; record it too")
        padding, responses, counts = [0] * len(ids), [len(row) for row in jagged], [len(row) for row in ids]
    if len(ids) != len(responses):
        raise ProfileError(f"input_ids have {len(ids)} rows, the responses {len(responses)}; they must be of the same micro-batch")
    for i, (row, count, response) in enumerate(zip(ids, counts, responses, strict=True)):
        if row.ndim != 1 or len(row) != count:
            raise ProfileError(f"row {i} has ids of shape {tuple(row.shape)} where its attention mask counts {count}; they must be of the same micro-batch")
        if count <= response:
            raise ProfileError(f"row {i} has {count} tokens, all of them of the response; record the prompt too")
    return ids, padding, responses


def _responses(inputs: Mapping[str, Any], name: str, lengths: list[int]) -> list[Tensor]:
    """Each row's response values, jagged or cut from a padded (B,R) table."""
    found = rows.ragged(inputs, name)
    if found is None:
        dense = rows.table(inputs, name)
        if rows.ragged(inputs, "response_mask") is None:
            dense = rows.table(inputs, name, like=rows.table(inputs, "response_mask"))
        found = [row[:length] for row, length in zip(dense, lengths, strict=False)]
        counted = [int((row[length:] != 0).sum()) for row, length in zip(dense, lengths, strict=False)]
        if name == "response_mask" and any(counted):
            raise ProfileError(f"row {next(i for i, count in enumerate(counted) if count)}: response_mask counts padding; is the mask shifted, or the padding on the left?")
    if len(found) != len(lengths):
        raise ProfileError(f"{name} has {len(found)} rows, input_ids have {len(lengths)}; they must be of the same micro-batch")
    for i, (row, length) in enumerate(zip(found, lengths, strict=True)):
        if row.ndim != 1 or len(row) != length:
            raise ProfileError(f"{name}: row {i} has shape {tuple(row.shape)} where its response has {length} tokens; record both at the same place")
    return found


def _check_positions(inputs: Mapping[str, Any], ids: list[Tensor]) -> None:
    """hilore makes the position ids itself: they must count each row's tokens."""
    if "position_ids" not in inputs:
        return
    found = rows.ragged(inputs, "position_ids")
    if found is None and rows.numbers(inputs, "position_ids").ndim == 2:
        positions = rows.table(inputs, "position_ids")
        keep = rows.table(inputs, "attention_mask", like=positions).bool() if "attention_mask" in inputs else torch.ones_like(positions).bool()
        found = [row[k] for row, k in zip(positions, keep, strict=True)]
    if found is None or any(row.ndim != 1 for row in found):
        raise ProfileError("position_ids are of mrope, several for each token (pictures); hilore reads text alone: record a batch of a text model")
    for i, (row, sequence) in enumerate(zip(found, ids, strict=False)):
        if row.tolist() != list(range(len(sequence))):
            raise ProfileError(f"row {i}: position_ids do not count its tokens from 0; hilore would compute another forward than verl")
