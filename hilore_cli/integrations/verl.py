"""A plan inside verl's FSDP workers (0.9.1: `verl/workers/engine/fsdp/transformer_impl.py: FSDPEngine`).

    # hilore_plan.py, where the workers' PYTHONPATH finds it
    from verl.workers import engine_workers
    from hilore_cli.integrations.verl import use_plan

    class PlannedWorker(engine_workers.TrainingWorker):
        def reset(self):                                   # builds the model and shards it
            super().reset()
            use_plan(self.engine, "/plans/math.json")

    engine_workers.ActorRolloutRefWorker.actor_worker_cls = PlannedWorker

and start training with
    actor_rollout_ref.model.external_lib=hilore_plan
    actor_rollout_ref.model.enable_gradient_checkpointing=False     # verl's default is True
    actor_rollout_ref.actor.strategy=fsdp2                          # verl's default is FSDP1

The reference policy and the critic keep verl's own worker. verl makes its micro-batches while it runs them, so a micro-batch is
compared with the last ones, as many as the profiled update had; until then it gets the most careful variant.

What it does NOT do: FSDP1, Ulysses sequence parallelism, activation offload, Megatron and the other engines (refused, in words).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from hilore_cli.batches import MicroBatch
from hilore_cli.captured.verl import NUMBERS, REQUIRED, VALUES, read
from hilore_cli.errors import PlanMismatchError, ProfileError, UsageError
from hilore_cli.exposure import VerlLoss
from hilore_cli.integrations.clashes import VERL
from hilore_cli.runtime import Handle, attach, load_plan
from hilore_cli.schema import FrozenPlan

INPUTS = REQUIRED | set(VALUES.values()) | {"attention_mask"}
"""What of a micro-batch the loss needs, and how long its rows are."""
OF_UPDATE = NUMBERS - {"temperature"}
"""Numbers that the engine puts beside the tensors: of the whole mini-batch, over all ranks."""
OF_POLICY_LOSS = {"loss_mode", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"}
"""Options that verl keeps in actor.policy_loss, not in actor itself."""


def use_plan(engine: Any, plan: FrozenPlan | Path | str, *, group: dist.ProcessGroup | None = None) -> Handle:
    """Attach a plan to an initialized FSDPEngine's model, and tell it of each micro-batch's exposure where its variants ask for that.

    `group`: the ranks that must take the same variant; by default the engine's data-parallel ones. Returns the handle;
    `handle.detach()` takes the plan off again. Raises PlanMismatchError for an engine whose settings clash with a plan, and
    for a model that is not the plan's.
    """
    frozen = plan if isinstance(plan, FrozenPlan) else load_plan(plan)
    refuse_settings(engine, name=frozen.name)
    handle = attach(engine.module, frozen, group=engine.get_data_parallel_group() if group is None else group)
    if handle.program.choice.has_classes:
        engine.forward_step = AnnouncedStep(engine.forward_step, handle)
    return handle


def refuse_settings(engine: Any, *, name: str) -> None:
    """Raise PlanMismatchError for the first setting of verl under which a plan would not be what it says."""
    model, sharding = engine.model_config, engine.engine_config
    if getattr(engine, "module", None) is None:
        raise PlanMismatchError(f"plan {name}: the engine has no model yet; call use_plan after engine.initialize() (TrainingWorker.reset)")
    if sharding.forward_only:
        raise PlanMismatchError(f"plan {name}: the engine is forward_only (a reference policy), which has no backward to plan; call use_plan on the actor's engine")
    if model.enable_gradient_checkpointing:
        raise PlanMismatchError(f"plan {name}: {VERL['enable_gradient_checkpointing']}")
    if model.enable_activation_offload:
        raise PlanMismatchError(f"plan {name}: {VERL['enable_activation_offload']}")
    if isinstance(engine.module, FullyShardedDataParallel):
        raise PlanMismatchError(f"plan {name}: {VERL['FSDP1']}")
    if engine.ulysses_sequence_parallel_size > 1:
        raise PlanMismatchError(f"plan {name}: {VERL['Ulysses']}")


class AnnouncedStep:
    """`engine.forward_step` that first tells the plan of a micro-batch to train on; its size is seen, padding buckets included."""

    def __init__(self, forward_step: Callable[..., Any], handle: Handle) -> None:
        self._forward_step = forward_step
        self._handle = handle

    def __call__(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if not forward_only:
            self._handle.microbatch(exposure=weight_of(micro_batch, loss_function, self._handle))
        return self._forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)


def weight_of(data: Any, loss_function: Any, handle: Handle) -> float:
    """The weight of a worker's micro-batch under the plan's rule. Raises ProfileError, which says what is wrong with it."""
    present = set(data.keys())
    inputs = {name: _on_cpu(data[name]) for name in INPUTS & present}
    packed = bool(data["use_remove_padding"]) if "use_remove_padding" in present else True
    if "response_mask" in inputs and not any(bool(row.any()) for row in inputs["response_mask"].unbind()):
        return 0.0  # every response is masked: no loss, no gradient
    try:
        weight = micro_batch_of(inputs, loss_options(loss_function, data), packed=packed).weight(handle.exposure_rule)
    except (ProfileError, UsageError) as error:
        raise ProfileError(f"plan {handle.program.name}: verl micro-batch: {error}; or make the plan with --one-variant, which needs no exposure") from error
    if weight is None:
        raise ProfileError(f"plan {handle.program.name}: weighs micro-batches by {handle.exposure_rule}, and this one has no old_log_probs; plan with --weigh squared")
    return weight


def micro_batch_of(inputs: dict[str, Any], loss: dict[str, Any], *, packed: bool) -> MicroBatch:
    """What `forward_step` gets, without the advantages off the mask that gae leaves there: they do not enter verl's loss."""
    mask, advantages = inputs.get("response_mask"), inputs.get("advantages")
    if isinstance(mask, Tensor) and isinstance(advantages, Tensor) and not (mask.is_nested or advantages.is_nested) and mask.shape == advantages.shape:
        inputs = inputs | {"advantages": advantages * mask}
    return read(inputs, loss=loss, meta={"use_remove_padding": packed})[0]


def loss_options(loss_function: Any, data: Any) -> dict[str, Any]:
    """The loss as `captured.verl` reads it, from `functools.partial(ppo_loss, config=...)` and the numbers of the mini-batch.

    Without the temperature, which scales all weights alike.
    """
    given = getattr(loss_function, "keywords", {})
    if "config" not in given or "distillation_config" in given:
        raise UsageError("the loss function is not functools.partial(ppo_loss, config=...), so its options are not known")
    config = given["config"]
    of_actor = {field.name for field in fields(VerlLoss)} - NUMBERS - OF_POLICY_LOSS
    options = {name: getattr(config, name) for name in of_actor} | {name: getattr(config.policy_loss, name) for name in OF_POLICY_LOSS}
    return options | {name: data[name] for name in OF_UPDATE}


def _on_cpu(values: Any) -> Any:
    return values.detach().cpu() if isinstance(values, Tensor) else values
