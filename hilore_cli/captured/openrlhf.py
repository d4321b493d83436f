"""OpenRLHF 0.11: the fields of `Experience` that `ActorPPOTrainer.training_step` gets.

Sequences (B,S), padded on either side. Action arrays (B,A) are those of predictions: column a belongs to token column S-A+a
(OpenRLHF takes `log_probs[:, -A:]` of the S-1 predictions; since 0.9 A is S-1). Advantages are left as computed off the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hilore_cli.batches import MicroBatch, from_rows
from hilore_cli.captured import rows
from hilore_cli.errors import ProfileError

SIGNATURES = ({"sequences", "action_mask"},)
REQUIRED = {"sequences", "action_mask", "attention_mask", "advantages"}
LOGPS = {"old_logps": "action_log_probs", "ref_logps": "base_action_log_probs", "sampling_logps": "rollout_log_probs"}
KNOWN = {*LOGPS.values(), "values", "returns", "kl", "rewards", "scores", "response_length", "truncated", "total_length", "index", "prompts", "labels", "info"}

RECIPE = '''\
# OpenRLHF 0.11: append these lines to openrlhf/trainer/ray/ppo_actor.py, which the Ray workers import.
# Rank 0 saves the micro-batches of its first update as captured.pt (better: a path from the root, in the last line), for:
#   hilore profile --batch captured.pt
import torch
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.loss_utils import get_loss_batch_info

INPUTS = """sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs advantages rewards
total_length""".split()


def record(trainer_class, path):
    steps, training_step = [], trainer_class.training_step

    def recorded(self, experience, kl_ctl, step, loss_batch_info=None):
        args, buffer, dynamic = self.args, self.replay_buffer, self.args.train.dynamic_batch_enable
        update = sum(buffer.dynamic_optimizer_step[:step]) if dynamic else step // self.strategy.accumulated_gradient
        if self.strategy.is_rank_0() and update == 0 and len(steps) == step:
            info = loss_batch_info or get_loss_batch_info(
                self.strategy, experience.action_mask, replay_buffer=buffer, step=step, dynamic_batch=dynamic
            )
            loss = {
                "policy_loss_type": args.actor.policy_loss_type,
                "eps_clip_low_high": list(args.actor.eps_clip_low_high),
                "dual_clip": args.actor.dual_clip,
                "token_level_loss": self.actor_loss_fn.token_level_loss,
                "is_correction_enable": args.algo.advantage.is_correction_enable,
                "is_correction_type": args.algo.advantage.is_correction_type,
                "is_correction_threshold": list(args.algo.advantage.is_correction_threshold),
                "dp_size": int(info["dp_size"]),
                "batch_num_tokens": float(info["batch_num_tokens"]),
                "global_batch_size": float(info["global_batch_size"]),
                "use_kl_loss": args.algo.kl.use_loss and args.algo.kl.init_coef > 0,
                "kl_coef": float(kl_ctl),
                "kl_estimator": args.algo.kl.estimator,
                "entropy_coef": args.actor.entropy_coef,
                "aux_loss_coef": args.actor.aux_loss_coef,
                "temperature": args.rollout.temperature,
            }
            fields = {name: getattr(experience, name) for name in INPUTS}
            tensors = {name: value.detach().cpu() for name, value in fields.items() if value is not None}
            steps.append({"inputs": tensors, "loss": loss, "meta": {"packing_samples": args.ds.packing_samples}})
            torch.save({"hilore_capture": 1, "trainer": "openrlhf", "steps": steps}, path)
        return training_step(self, experience, kl_ctl, step, loss_batch_info)

    trainer_class.training_step = recorded


record(ActorPPOTrainer, "captured.pt")
'''


def read(inputs: Mapping[str, Any], *, loss: Mapping[str, Any] | None, meta: dict[str, Any]) -> list[MicroBatch]:
    """One micro-batch; packed where `packing_samples` is recorded in meta. Raises ProfileError."""
    rows.check_keys(inputs, trainer="openrlhf", required=REQUIRED, known=KNOWN)
    sequences = rows.token_ids(rows.table(inputs, "sequences"), "sequences")
    action_columns = rows.table(inputs, "action_mask").shape[1]
    before = sequences.shape[1] - action_columns
    if before < 1:
        raise ProfileError(f"action_mask has {action_columns} columns and sequences {sequences.shape[1]}; actions are predictions, one column fewer at least: save experience.action_mask")
    attention_mask = rows.mask(inputs, "attention_mask", like=sequences)
    action_mask = rows.mask(inputs, "action_mask", like=sequences, width=action_columns)
    values = {"advantages": rows.advantage_table(inputs, action_mask)}
    values |= {name: rows.table(inputs, key, like=sequences, width=action_columns) for name, key in LOGPS.items() if inputs.get(key) is not None}
    _check_lengths(inputs, attention_mask.sum(1).tolist())
    packed = bool(meta.get("packing_samples"))
    unpadded = rows.rows_of(
        sequences,
        attention_mask,
        rows.shifted(action_mask, before),
        rewards=rows.per_row(inputs, "rewards", len(sequences)),
        **{name: rows.shifted(value.float(), before) for name, value in values.items()},
    )
    return [
        from_rows(
            [row | {"padding": 0} for row in unpadded] if packed else unpadded,
            loss=rows.loss_of("openrlhf", loss),
            layout="packed" if packed else "positions",
            width=max(len(row["ids"]) for row in unpadded) if packed else sequences.shape[1],
            meta={key: value for key, value in meta.items() if key != "packing_samples"},
        )
    ]


def _check_lengths(inputs: Mapping[str, Any], tokens: list[int]) -> None:
    lengths = rows.per_row(inputs, "total_length", len(tokens))
    for i, (total, count) in enumerate(zip([] if lengths is None else lengths.tolist(), tokens, strict=False)):
        if int(total) != count:
            raise ProfileError(f"row {i}: total_length is {int(total)}, its attention mask counts {count}; they must be of the same experience")
