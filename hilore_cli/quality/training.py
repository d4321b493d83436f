"""One GRPO run: sampling, rewards, clipped updates, AdamW with linear decay, under one way to keep activations.

    trained = train(game, arm, setting, pair=0, start=weights, progress=progress)

Between updates, where it is due, the gradient of the next micro-batch is taken twice, by the arm and exactly: that leaves no trace in the run.
A step whose gradient is not finite ends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hilore_cli.batches import MicroBatch
from hilore_cli.grpo import BeforeForward, GrpoConfig, actor_update, gradients, make_optimizer, relative_error
from hilore_cli.quality.arms import Arm
from hilore_cli.quality.game import Game, Rollout, Weights, restore_weights, seed_of, trainable
from hilore_cli.quality.settings import Recipe, Setting
from hilore_cli.quality_records import ErrorPoint
from hilore_cli.runtime import Handle
from hilore_cli.workbench import Progress, announce, checkpointing


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run showed; the trained weights are in the model."""

    rewards: list[float]
    errors: list[ErrorPoint]
    diverged_at: int | None


def train(game: Game, arm: Arm, setting: Setting, *, pair: int, start: Weights, progress: Progress) -> Trained:
    """Train the game's model from `start` for the recipe's steps. Runs of one pair draw the same random numbers."""
    recipe, model = setting.recipe, game.model
    config = step_config(recipe)
    restore_weights(model, start)
    if arm.noise:
        perturb(trainable(model), scale=arm.noise, seed=seed_of(1 + pair, recipe.steps))
    optimizer = make_optimizer(model, config)
    total = recipe.steps * recipe.updates
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / total)
    rewards: list[float] = []
    errors: list[ErrorPoint] = []
    for step in range(recipe.steps):
        progress(f"pair {pair + 1}, {arm.name}", step, recipe.steps)
        with arm.running():
            rollout = game.sample(seed_of(1 + pair, step))
        rewards.append(rollout.reward)
        if arm.lossy and step % setting.measure_every == 0:
            errors += measure_error(model, rollout, arm, config, step=step)
        with arm.running() as handle:
            for update in rollout.updates:
                norm = actor_update(model, optimizer, update, config, before=announced(handle, update))
                schedule.step()
                if not math.isfinite(norm):
                    return Trained(rewards=rewards, errors=errors, diverged_at=step)
    return Trained(rewards=rewards, errors=errors, diverged_at=None)


def step_config(recipe: Recipe) -> GrpoConfig:
    """The recipe's update, with the learning rate that it begins with."""
    return GrpoConfig(learning_rate=recipe.learning_rate, max_grad_norm=recipe.max_grad_norm, head=recipe.head)


def measure_error(model: nn.Module, rollout: Rollout, arm: Arm, config: GrpoConfig, *, step: int) -> list[ErrorPoint]:
    """Relative error of the gradient of the step's first micro-batch that has one; nothing where none has, and where it is not finite."""
    batch = next((batch for update in rollout.updates for batch in update if batch.has_gradient), None)
    if batch is None:
        return []
    with checkpointing(model):
        exact = gradients(model, [batch], config)
    with arm.running() as handle:
        own = gradients(model, [batch], config, before=announced(handle, [batch]))
    error = relative_error(own, exact)
    return [ErrorPoint(step=step, rel_error=error)] if math.isfinite(error) else []


def announced(handle: Handle | None, batches: Sequence[MicroBatch]) -> BeforeForward | None:
    """What tells an attached plan of each of an update's micro-batches; None without a plan."""
    return None if handle is None else announce(handle, [batch.weight(handle.exposure_rule) for batch in batches])


@torch.no_grad()
def perturb(weights: dict[str, Tensor], *, scale: float, seed: int) -> None:
    """Multiply each weight by 1 + scale x N(0, 1), in place."""
    rng = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        weight.mul_(1 + scale * torch.randn(weight.shape, generator=rng).to(weight))
