"""PEFT's adapters inside planned layers: made traceable, and noticed when they come after the plan.

DoRA asks whether a weight is quantised in a way that torch cannot trace (`type(weight).__module__.startswith(...)`, PEFT 0.21).
While a layer runs under a plan that question is answered from the weight's type; quantised weights still go PEFT's own way.
What this does NOT do: adapters other than LoRA and its variants, which are traced as they are or refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor, nn

from hilore_cli.errors import PlanMismatchError

Dequantize = Callable[[nn.Module], Tensor]


@contextmanager
def traceable_adapters() -> Iterator[None]:
    """Context in which DoRA's layers can be traced; nothing happens where PEFT is not imported, or has no such function."""
    dora = sys.modules.get("peft.tuners.lora.dora")
    theirs = vars(dora).get("dequantize_module_weight") if dora is not None else None
    if theirs is None or theirs.__module__ == __name__:
        yield
        return
    dora.dequantize_module_weight = _plain_or(theirs)
    try:
        yield
    finally:
        dora.dequantize_module_weight = theirs


@cache
def _plain_or(theirs: Dequantize) -> Dequantize:
    """One function for each of theirs: torch guards on which one it traced."""

    def weight_of(module: nn.Module) -> Tensor:
        return module.weight if type(module.weight) in (nn.Parameter, Tensor) else theirs(module)

    return weight_of


def idle_adapters(model: nn.Module) -> frozenset[str]:
    """Names of the adapters that a PEFT model holds besides the active ones."""
    adapters = getattr(model, "peft_config", {})
    if not adapters:
        return frozenset()
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters  # transformers' own adapters: a method
    return frozenset(adapters) - frozenset(active)


def parameter_names(layer: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in layer.named_parameters())


def refuse_other_parameters(layer: nn.Module, *, attached_to: frozenset[str]) -> None:
    """Raise PlanMismatchError for a layer that has gained or lost parameters since a plan was attached to it."""
    changed = sorted(parameter_names(layer) ^ attached_to)
    if changed:
        raise PlanMismatchError(f"parameters came or went after the plan was attached ({changed[0]}, {len(changed)} in all): adapters were added, removed or merged; do that first, then attach a plan that was made for the result")
