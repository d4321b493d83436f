"""TRL 1.16: what `GRPOTrainer.compute_loss` gets. P prompt columns, padded left; T completion columns, padded right; S = P + T.

`sampling_per_token_logps` hold NaN where vLLM gave none. With importance weights such a token has the weight 1 (TRL: the difference
to the old log-prob counts as zero), so the old log-prob stands in; without them the NaN is an error on a loss token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hilore_cli.batches import MicroBatch, from_rows
from hilore_cli.captured import rows
from hilore_cli.errors import ProfileError

SIGNATURES = ({"prompt_ids", "completion_ids"},)
REQUIRED = {"prompt_ids", "completion_ids", "prompt_mask", "completion_mask", "advantages"}
LOGPS = {"old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps", "sampling_logps": "sampling_per_token_logps"}
KNOWN = {"num_items_in_batch", "importance_sampling_ratio", "tool_mask", *LOGPS.values()}

OPTIONS = """loss_type epsilon epsilon_high delta beta importance_sampling_level use_bias_correction_kl max_completion_length
steps_per_generation temperature top_entropy_quantile off_policy_mask_threshold use_adaptive_entropy
sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"""
"""Fields of GRPOConfig that decide the loss."""

RECIPE = '''\
# TRL: put these lines after `trainer = GRPOTrainer(...)` and before `trainer.train()`.
# They save the micro-batches of the first update of rank 0 as captured.pt, for: hilore profile --batch captured.pt
import torch

OPTIONS = """OPTIONS_HERE""".split()
INPUTS = """prompt_ids prompt_mask completion_ids completion_mask advantages num_items_in_batch old_per_token_logps
ref_per_token_logps sampling_per_token_logps importance_sampling_ratio tool_mask""".split()


def record(trainer, path="captured.pt"):
    steps, compute_loss, first = [], trainer.compute_loss, []

    def recorded(model, inputs, *args, **kwargs):
        first[:1] = first[:1] or [trainer.state.global_step]  # not before: train() may resume from a checkpoint
        if trainer.accelerator.is_main_process and model.training and trainer.state.global_step == first[0]:
            loss = {name: getattr(trainer.args, name) for name in OPTIONS}
            loss["current_gradient_accumulation_steps"] = trainer.current_gradient_accumulation_steps
            loss["num_processes"] = trainer.accelerator.num_processes
            loss["entropy_coef"] = float(trainer.entropy_coef)
            loss["router_aux_loss_coef"] = float(trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0)
            tensors = {name: inputs[name].detach().cpu() for name in INPUTS if inputs.get(name) is not None}
            steps.append({"inputs": tensors, "loss": loss, "meta": {"group_size": trainer.num_generations}})
            torch.save({"hilore_capture": 1, "trainer": "trl", "steps": steps}, path)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded


record(trainer)
'''.replace("OPTIONS_HERE", OPTIONS)


def read(inputs: Mapping[str, Any], *, loss: Mapping[str, Any] | None, meta: dict[str, Any]) -> list[MicroBatch]:
    """One micro-batch, in TRL's own widths. Raises ProfileError."""
    rows.check_keys(inputs, trainer="trl", required=REQUIRED, known=KNOWN)
    prompt_ids, completion_ids = (rows.token_ids(rows.table(inputs, name), name) for name in ("prompt_ids", "completion_ids"))
    if len(prompt_ids) != len(completion_ids):
        raise ProfileError(f"{len(prompt_ids)} prompts and {len(completion_ids)} completions; they must be of the same micro-batch")
    completion_mask = rows.mask(inputs, "completion_mask", like=completion_ids)
    counted = completion_mask
    if inputs.get("tool_mask") is not None:
        counted = counted * rows.mask(inputs, "tool_mask", like=completion_ids)
    attention_mask = torch.cat([rows.mask(inputs, "prompt_mask", like=prompt_ids), completion_mask], 1)
    values = {"advantages": rows.advantage_table(inputs, counted)}
    values |= {name: rows.table(inputs, key, like=completion_ids) for name, key in LOGPS.items() if inputs.get(key) is not None}
    if inputs.get("importance_sampling_ratio") is not None:
        values["is_weights"] = _importance_weights(inputs, completion_ids)
    _fill_missing_sampling_logps(values, counted)
    prompt_columns = prompt_ids.shape[1]
    chosen = rows.rows_of(
        torch.cat([prompt_ids, completion_ids], 1),
        attention_mask,
        rows.shifted(counted, prompt_columns),
        **{name: rows.shifted(value.float(), prompt_columns) for name, value in values.items()},
    )
    items = None if inputs.get("num_items_in_batch") is None else rows.number(inputs, "num_items_in_batch")
    return [
        from_rows(
            chosen,
            loss=rows.loss_of("trl", loss, num_items_in_batch=None if items is None else int(items)),
            layout="padded",
            width=attention_mask.shape[1],
            pad_token_id=_pad_token_id(prompt_ids, attention_mask),
            meta=meta,
        )
    ]


def _importance_weights(inputs: Mapping[str, Any], completion_ids: Tensor) -> Tensor:
    """(B,T) from one weight per token, or one per row (the sequence modes)."""
    ratio = inputs["importance_sampling_ratio"]
    per_row = isinstance(ratio, Tensor) and tuple(ratio.shape) == (len(completion_ids), 1)
    return rows.table(inputs, "importance_sampling_ratio", like=completion_ids, width=1 if per_row else None).expand(completion_ids.shape)


def _fill_missing_sampling_logps(values: dict[str, Tensor], counted: Tensor) -> None:
    sampling = values.get("sampling_logps")
    if sampling is None or not bool((missing := torch.isnan(sampling) & (counted == 1)).any()):
        return
    row, column = missing.nonzero()[0].tolist()
    if "is_weights" not in values or "old_logps" not in values:
        raise ProfileError(
            f"sampling_per_token_logps are NaN on a loss token (row {row}, completion column {column}) and there is no importance_sampling_ratio that says what TRL made of it; "
            "record importance_sampling_ratio and old_per_token_logps too, or leave the sampling log-probs out"
        )
    values["sampling_logps"] = torch.where(missing, values["old_logps"].to(sampling.dtype), sampling)


def _pad_token_id(prompt_ids: Tensor, attention_mask: Tensor) -> int:
    padding = prompt_ids[attention_mask[:, : prompt_ids.shape[1]] == 0]
    return int(padding[0]) if len(padding) else 0
