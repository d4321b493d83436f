"""A plan inside OpenRLHF's actor (0.11: `openrlhf/trainer/ray/ppo_actor.py: ActorPPOTrainer`, DeepSpeed ZeRO 0 to 2).

One line at the end of `PolicyModelActor.init_model_from_pretrained`, which the Ray workers run (and an import above it):

    from hilore_cli.integrations.openrlhf import use_plan
    use_plan(self.trainer, "/plans/math.json")

with --actor.gradient_checkpointing_enable left out. OpenRLHF draws its micro-batches while it runs them, so a micro-batch is
compared with the last ones, as many as the profiled update had; until then it gets the most careful variant.

What it does NOT do: ZeRO-3 (weights are empty while backward recomputes), DeepCompile, ring attention, tensor parallelism
(refused, in words).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist

from hilore_cli.batches import MicroBatch
from hilore_cli.captured.openrlhf import LOGPS, REQUIRED, read
from hilore_cli.errors import PlanMismatchError, ProfileError, UsageError
from hilore_cli.integrations.clashes import OPENRLHF
from hilore_cli.runtime import Handle, attach, load_plan
from hilore_cli.schema import FrozenPlan

INPUTS = REQUIRED | set(LOGPS.values())
"""Fields of an Experience that the loss needs."""


def use_plan(trainer: Any, plan: FrozenPlan | Path | str, *, group: dist.ProcessGroup | None = None) -> Handle:
    """Attach a plan to the model inside an ActorPPOTrainer's DeepSpeed engine, and tell it of each micro-batch's exposure where its variants ask for that.

    `group`: as in `attach`. Returns the handle; `handle.detach()` takes the plan off again. Raises PlanMismatchError for a
    trainer whose settings clash with a plan, and for a model that is not the plan's.
    """
    frozen = plan if isinstance(plan, FrozenPlan) else load_plan(plan)
    refuse_settings(trainer, name=frozen.name)
    handle = attach(trainer.actor.model.module, frozen, group=group)
    if handle.program.choice.has_classes:
        trainer.training_step = AnnouncedStep(trainer, handle)
    return handle


def refuse_settings(trainer: Any, *, name: str) -> None:
    """Raise PlanMismatchError for the first setting of OpenRLHF under which a plan would not be what it says."""
    args, strategy = trainer.args, trainer.strategy
    if args.actor.gradient_checkpointing_enable:
        raise PlanMismatchError(f"plan {name}: {OPENRLHF['gradient_checkpointing_enable']}")
    if strategy.stage == 3:
        raise PlanMismatchError(f"plan {name}: {OPENRLHF['ZeRO-3']}")
    if strategy.deepcompile:
        raise PlanMismatchError(f"plan {name}: {OPENRLHF['DeepCompile']}")
    if strategy.ring_attn_size > 1 or strategy.ds_tensor_parallel_size > 1:
        raise PlanMismatchError(f"plan {name}: {OPENRLHF['ring attention, tensor parallelism']}")


class AnnouncedStep:
    """`trainer.training_step` that first tells the plan of the micro-batch; its size is seen."""

    def __init__(self, trainer: Any, handle: Handle) -> None:
        self._trainer = trainer
        self._handle = handle
        self._training_step: Callable[..., Any] = trainer.training_step

    def __call__(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Mapping[str, Any] | None = None) -> Any:
        info = loss_batch_info or batch_info(self._trainer, step)
        self._handle.microbatch(exposure=weight_of(experience, loss_options(self._trainer, kl_ctl, info), self._handle, packed=self._trainer.args.ds.packing_samples))
        return self._training_step(experience, kl_ctl, step, loss_batch_info)


def weight_of(experience: Any, loss: dict[str, Any], handle: Handle, *, packed: bool) -> float:
    """The weight of a micro-batch under the plan's rule. Raises ProfileError, which says what is wrong with it."""
    if not bool(experience.action_mask.any()):
        return 0.0  # every response is masked: no loss, no gradient
    try:
        weight = micro_batch_of(experience, loss, packed=packed).weight(handle.exposure_rule)
    except (ProfileError, UsageError) as error:
        raise ProfileError(f"plan {handle.program.name}: OpenRLHF micro-batch: {error}; or make the plan with --one-variant, which needs no exposure") from error
    if weight is None:
        raise ProfileError(f"plan {handle.program.name}: weighs micro-batches by {handle.exposure_rule}, and this one has no action_log_probs; plan with --weigh squared")
    return weight


def micro_batch_of(experience: Any, loss: dict[str, Any], *, packed: bool) -> MicroBatch:
    """What `training_step` gets, as a micro-batch on the CPU."""
    fields = {name: getattr(experience, name) for name in INPUTS}
    inputs = {name: value.detach().cpu() for name, value in fields.items() if isinstance(value, Tensor)}
    return read(inputs, loss=loss, meta={"packing_samples": packed})[0]


def batch_info(trainer: Any, step: int) -> dict[str, Any]:
    """What `get_loss_batch_info` gives with dynamic batches: the counts of the optimizer step, over all ranks."""
    buffer, mesh = trainer.replay_buffer, trainer.strategy.ds_device_mesh
    return {"dp_size": mesh["dp"].size(), "batch_num_tokens": buffer.dynamic_batch_num_tokens[step], "global_batch_size": buffer.dynamic_global_batch_size[step]}


def loss_options(trainer: Any, kl_ctl: float, info: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's loss as `captured.openrlhf` reads it; without the temperature, which scales all weights alike."""
    args, correction = trainer.args, trainer.args.algo.advantage
    return {
        "policy_loss_type": args.actor.policy_loss_type,
        "eps_clip_low_high": list(args.actor.eps_clip_low_high),
        "dual_clip": args.actor.dual_clip,
        "token_level_loss": trainer.actor_loss_fn.token_level_loss,
        "is_correction_enable": correction.is_correction_enable,
        "is_correction_type": correction.is_correction_type,
        "is_correction_threshold": list(correction.is_correction_threshold),
        "dp_size": int(info["dp_size"]),
        "batch_num_tokens": float(info["batch_num_tokens"]),
        "global_batch_size": float(info["global_batch_size"]),
        "use_kl_loss": args.algo.kl.use_loss and args.algo.kl.init_coef > 0,
        "kl_coef": float(kl_ctl),
        "kl_estimator": args.algo.kl.estimator,
        "entropy_coef": args.actor.entropy_coef,
        "aux_loss_coef": args.actor.aux_loss_coef,
    }
