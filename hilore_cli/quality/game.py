"""What is learnt, as one run of training sees it: a model to train, rollouts, and held-out problems to judge it by.

Two kinds: CharGame (chars.py) and TextGame (text.py). Whatever is random comes from the seed of a call, in a fixed number of draws, so that two
runs with the same seeds differ only by their weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from hilore_cli.batches import MicroBatch
from hilore_cli.exposure import TrlLoss
from hilore_cli.quality.settings import Recipe
from hilore_cli.workbench import Progress

Weights = dict[str, Tensor]
"""Trainable parameters by name."""
STREAM = 1_000_000
"""Seeds of one stream: streams are the warm-up and the profile (0), and the pairs."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One step's sampled completions, as micro-batches of its updates."""

    updates: list[list[MicroBatch]]
    reward: float
    """mean of all completions"""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Shares of the held-out problems that are solved."""

    greedy: float
    sampled: float


class Game(Protocol):
    """Model and problems of a setting."""

    model: nn.Module
    source: str
    """of the model and task, in words"""

    def warm_up(self, progress: Progress) -> None:
        """Bring the model's initial weights to where all runs start."""

    def sample(self, seed: int) -> Rollout:
        """Completions of training problems by the model as it is."""

    def evaluate(self) -> Accuracy:
        """How many of the held-out problems the model solves."""


def seed_of(stream: int, step: int) -> int:
    """The seed of one step of a pair (streams from 1 on), or of what comes before training (stream 0)."""
    return stream * STREAM + step


def loss_of(recipe: Recipe, *, tokens: int, temperature: float = 1.0) -> TrlLoss:
    """TRL's default loss: the mean over the loss tokens of an update, where updates have equally many. `tokens`: of all updates together."""
    per_generation = recipe.micro_batches * recipe.updates
    return TrlLoss(epsilon=recipe.clip, num_items_in_batch=tokens, current_gradient_accumulation_steps=recipe.micro_batches, steps_per_generation=per_generation, temperature=temperature)


def split_updates(micro_batches: list[MicroBatch], recipe: Recipe) -> list[list[MicroBatch]]:
    """Micro-batches in order -> those of each update."""
    return [micro_batches[start : start + recipe.micro_batches] for start in range(0, len(micro_batches), recipe.micro_batches)]


def widen(micro_batch: MicroBatch, width: int) -> MicroBatch:
    """Pad the columns on the right up to `width`: every micro-batch of a run then has the size that was profiled."""
    missing = width - micro_batch.input_ids.shape[1]
    columns = {f.name: value for f in fields(micro_batch) if isinstance(value := getattr(micro_batch, f.name), Tensor) and value.ndim == 2}
    return replace(micro_batch, **{name: torch.nn.functional.pad(value, (0, missing)) for name, value in columns.items()})


def trainable(model: nn.Module) -> Weights:
    """The very parameters, not copies."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copy_weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}


@torch.no_grad()
def restore_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """In place: compiled graphs and attached plans stay as they are."""
    for name, parameter in trainable(model).items():
        parameter.copy_(weights[name])
        parameter.grad = None


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Of names, shapes and all bits."""
    seen = hashlib.sha256()
    for name, value in sorted(weights.items()):
        seen.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        seen.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]
