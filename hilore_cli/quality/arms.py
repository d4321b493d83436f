"""The arms of a pair: ways to run the same training, which differ only in what backward reads.

    gc           Hugging Face's own checkpointing, the reference
    hilore       the plan, frozen and attached as in anybody's trainer
    noise        gc, from starting weights off by 1e-6 of themselves: how far chance alone drives two runs apart
    risk-0.15    a plan at ten times the risk
    int2         all that layers save in two bits: the negative control, which has to fail

int2 alone is no plan: hilore has no 2-bit codec, so that nobody plans with one. It rounds what torch's saved-tensor hooks see, and saves no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hilore_cli.models import decoder_layers
from hilore_cli.peers import Packing, pack_all, wrapped
from hilore_cli.runtime import Handle, attach
from hilore_cli.schema import FrozenPlan
from hilore_cli.workbench import checkpointing

NOISE = 1e-6
"""Relative, on the starting weights."""
INT2_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run a training."""

    name: str
    running: Callable[[], AbstractContextManager[Handle | None]]
    """Context in which steps run this way; gives the handle of an attached plan."""
    lossy: bool
    """Whether its gradients may differ from the exact ones."""
    noise: float = 0.0


def make_arms(model: nn.Module, names: Sequence[str], plans: Mapping[str, FrozenPlan]) -> list[Arm]:
    """The arms of these names; those in `plans` attach theirs. A plan is compiled once, whatever the number of runs."""
    return [_make_arm(model, name, plans.get(name)) for name in names]


def _make_arm(model: nn.Module, name: str, plan: FrozenPlan | None) -> Arm:
    if plan is not None:
        handle = attach(model, plan)
        handle.detach()
        return Arm(name=name, running=lambda: handle, lossy=True)
    match name:
        case "gc":
            return Arm(name=name, running=lambda: _no_handle(checkpointing(model)), lossy=False)
        case "noise":
            return Arm(name=name, running=lambda: _no_handle(checkpointing(model)), lossy=False, noise=NOISE)
        case "int2":
            return Arm(name=name, running=lambda: _no_handle(wrapped(decoder_layers(model), pack_all(INT2))), lossy=True)
    raise ValueError(f"arm {name!r} has no plan")


@contextmanager
def _no_handle(context: AbstractContextManager[object]) -> Iterator[None]:
    with context:
        yield None


def round_to_int2(flat: Tensor) -> Tensor:
    """(n,) -> (n,): groups of INT2_GROUP elements, each to the nearest of -a, 0 and a, a its group's largest magnitude."""
    missing = -flat.numel() % INT2_GROUP
    rows = torch.cat((flat, flat.new_zeros(missing))).view(-1, INT2_GROUP)
    largest = rows.abs().amax(1, keepdim=True)
    return (torch.where(largest > 0, rows / largest, 0.0).round() * largest).flatten()[: flat.numel()]


INT2 = Packing(encode=round_to_int2, decode=lambda rounded, _dtype, _numel: rounded)
