"""A plan inside TRL's GRPOTrainer.

    from hilore_cli.integrations.trl import use_plan
    trainer = GRPOTrainer(...)                      # gradient_checkpointing=False in its GRPOConfig: TRL's default is True
    use_plan(trainer, "plans/math.json")            # after the trainer is built, before trainer.train(); guard_every=100 measures

The trainer's model is what it trains, adapters included, so the plan is attached to it as it will run. TRL switches checkpointing
off and on around every generation, when it was on: the runtime looks at each layer's flag at every call and refuses.

What it does NOT do: drop rows of zero advantage, run under DeepSpeed ZeRO-3 (weights are empty while backward recomputes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hilore_cli.batches import MicroBatch
from hilore_cli.captured.trl import KNOWN, OPTIONS, REQUIRED, read
from hilore_cli.errors import HiloreError, PlanMismatchError, ProfileError
from hilore_cli.integrations.clashes import ON_LAYERS, TRL
from hilore_cli.models import decoder_layers
from hilore_cli.runtime import Handle, attach, load_plan
from hilore_cli.schema import FrozenPlan

Inputs = Mapping[str, Any]
"""What `GRPOTrainer.compute_loss` gets of one micro-batch."""
GRAD_ERROR = "hilore/grad_error"
"""The guard's figure in the trainer's log."""


def use_plan(trainer: Any, plan: FrozenPlan | Path | str, *, group: dist.ProcessGroup | None = None, guard_every: int | None = None) -> Handle:
    """Attach a plan to a GRPOTrainer's model, and tell it of each micro-batch's exposure where its variants ask for that.

    `group`: as in `attach`. `guard_every`: of one of every so many micro-batches the true gradient error is measured, and over the
    plan's risk the plan is left (guard.py); GRPOTrainer logs it as hilore/grad_error. Returns the handle; `handle.detach()` takes the plan
    off again. Raises PlanMismatchError for a trainer that checkpoints by itself, that runs DeepSpeed ZeRO-3, that hands over no GRPO
    micro-batches to a plan that asks for them, or whose model is not the plan's.
    """
    frozen = plan if isinstance(plan, FrozenPlan) else load_plan(plan)
    clash = find_clash(trainer)
    if clash is not None:
        raise PlanMismatchError(f"plan {frozen.name}: {clash}")
    by_exposure = any(variant.max_exposure is not None for variant in frozen.variants)
    if by_exposure and not is_grpo(trainer):
        raise PlanMismatchError(f"plan {frozen.name}: has variants by exposure, which are read from GRPOTrainer's micro-batches, and this is a {type(trainer).__name__}; attach(trainer.model, plan) and tell them with handle.microbatch, or plan with --one-variant")
    handle = attach(trainer.model, frozen, group=group)
    if by_exposure:
        trainer.compute_loss = AnnouncedLoss(trainer, handle)
    if guard_every is not None:
        set_guard(trainer, handle, every=guard_every)
    return handle


def set_guard(trainer: Any, handle: Handle, *, every: int) -> None:
    """Guard the plan; what cannot be guarded is detached again."""
    try:
        handle.guard(every=every, on_measure=(lambda record: trainer._metrics["train"][GRAD_ERROR].append(record.rel_error)) if is_grpo(trainer) else None)
    except HiloreError:
        handle.detach()
        raise


def is_grpo(trainer: Any) -> bool:
    """Whether it has GRPOTrainer's micro-batches and log; by name, so that TRL need not be imported."""
    return any(each.__name__ == "GRPOTrainer" for each in type(trainer).__mro__)


def find_clash(trainer: Any) -> str | None:
    """What of the trainer's settings a plan cannot run beside, with the remedy; None when there is nothing."""
    arguments, state = trainer.args, trainer.accelerator.state
    if arguments.gradient_checkpointing:
        return TRL["gradient_checkpointing"]
    if any(layer.gradient_checkpointing for _, layer in decoder_layers(trainer.model)):
        return ON_LAYERS
    if trainer.is_fsdp_enabled and state.fsdp_plugin.activation_checkpointing:
        return TRL["activation_checkpointing"]
    if trainer.is_deepspeed_enabled and state.deepspeed_plugin.zero_stage == 3:
        return TRL["ZeRO-3"]
    return None


class AnnouncedLoss:
    """`trainer.compute_loss` that first tells the plan of the micro-batch, and at an update's first one of all that are known."""

    def __init__(self, trainer: Any, handle: Handle) -> None:
        self._trainer = trainer
        self._handle = handle
        self._compute_loss = trainer.compute_loss
        self._update, self._done = -1, 0
        self._announced: list[tuple[Inputs, float | None]] = []

    def __call__(self, model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        if self._handle.attached and model.training and torch.is_grad_enabled():
            self._announce(inputs)
        return self._compute_loss(model, inputs, *args, **kwargs)

    def _announce(self, inputs: Inputs) -> None:
        """Ranks call `expect` and `microbatch` alike: TRL generates, accumulates and updates on all of them at once."""
        update = self._trainer.state.global_step
        if self._update != update or self._done == self._trainer.current_gradient_accumulation_steps:  # the same step again: train() was called again
            self._update, self._done, self._announced = update, 0, []
        if not any(each is inputs for each, _ in self._announced):
            coming = self._coming()
            known = coming if coming[0] is inputs else [inputs]
            self._announced = [(each, self._weight(each)) for each in known]
            if known is coming:  # a subclass may hand over inputs of its own; those are compared with the last ones
                self._handle.expect([weight for _, weight in self._announced if weight is not None])
        weight = next(weight for each, weight in self._announced if each is inputs)
        rows, columns = len(inputs["prompt_ids"]), inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        self._handle.microbatch(exposure=weight, tokens=rows * columns, length=columns)
        self._done += 1

    def _coming(self) -> list[Inputs]:
        """This micro-batch and the rest of its update, as far as they are generated."""
        arguments, step, held = self._trainer.args, self._trainer._step, self._trainer._buffered_inputs
        generated = arguments.steps_per_generation * arguments.num_iterations
        count = min(self._trainer.current_gradient_accumulation_steps - self._done, generated - step % generated)
        return [held[(step + i) % len(held)] for i in range(count)]

    def _weight(self, inputs: Inputs) -> float | None:
        """None, with one warning, for a micro-batch whose exposure cannot be read: it gets the most careful variant."""
        rule, choice = self._handle.exposure_rule, self._handle.program.choice
        try:
            weight = micro_batch_of(self._trainer, inputs).weight(rule)
        except ProfileError as error:
            choice.warn_once("unread", f"{error}; micro-batches like it run under the variant for the highest exposure")
            return None
        if weight is None:
            raise PlanMismatchError(f"plan {choice.name}: weighs micro-batches by {rule}, which needs log-probabilities from sampling, and TRL has none (it records them with num_iterations > 1 or vLLM's); plan with --weigh squared")
        return weight


def micro_batch_of(trainer: Any, inputs: Inputs) -> MicroBatch:
    """What `compute_loss` gets, as a micro-batch on the CPU. Raises ProfileError that names what is wrong with it."""
    known = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in inputs.items() if name in REQUIRED | KNOWN}
    try:
        return read(known, loss=loss_options(trainer), meta={"group_size": trainer.num_generations})[0]
    except ProfileError as error:
        raise ProfileError(f"TRL micro-batch: {error}") from error


def loss_options(trainer: Any) -> dict[str, Any]:
    """The trainer's loss as `captured.trl` reads it."""
    return {name: getattr(trainer.args, name) for name in OPTIONS.split()} | {
        "current_gradient_accumulation_steps": trainer.current_gradient_accumulation_steps,
        "num_processes": trainer.accelerator.num_processes,
        "entropy_coef": float(trainer.entropy_coef),
        "router_aux_loss_coef": float(trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0),
    }
