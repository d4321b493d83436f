"""The online guard: measures a plan's gradient error in training, and leaves the plan when it is over the budget.

    with attach(model, plan) as handle:
        guard = handle.guard(every=100)
        train()
        guard.history

A plan's risk was measured on the profiled micro-batches; activations may drift, or grow outliers that a codec cannot carry. Of every
`every` micro-batches one is measured (gradient_error.py): the planned gradient that the trainer gets, beside the exact one. The first of
all is, so that what cannot be measured shows at once; then another place in each (`is_sampled`), since trainers repeat an order in
every update.

What is held against the budget is the plan's own promise (planner.py), the error of a whole update, whose micro-batches' squared
errors add:

    E^2 = sum of |planned - exact|^2 / sum of |exact|^2    over the last n samples, n: micro-batches of the profiled update

(over the ranks, too), with samples that are still to come counted as exact ones of mean size. One micro-batch may be worse than E
where its gradient is small: a plan with variants by exposure does that on purpose. For a plan made of one micro-batch, n is 1.
When E is over the budget, a warning says so, with the layer in which most of the gradient is lost, and from the next micro-batch on
every layer is recomputed, which is exact and never over checkpointing's peak, until `guard.reset()`.

What it does NOT do: find another plan; say that the micro-batches in between were as the sampled ones; or know better than one
sample in twenty, since a plan that uses its budget up is over it on about 5 % of micro-batches (kappa is a 95 % limit): give a
larger `budget` where that is not worth leaving the plan. On a GPU the error contains what backward's kernels change from run to run.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hilore_cli.choice import VariantChoice
from hilore_cli.codecs import get_codec
from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.gradient_error import NO_BACKWARD, NO_GRADIENT, GradientError, LayerCall, LayerError, Measured
from hilore_cli.schema import Pattern

LOG = logging.getLogger("hilore")

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True)
class GuardRecord:
    """One measured micro-batch. Errors are relative gradient errors: norm of planned minus exact over norm of exact."""

    step: int
    """Number of the micro-batch since the guard was set, from 1."""
    rel_error: float
    """Of this micro-batch (on this rank); inf where the planned gradient is not finite."""
    update_error: float
    """Of the update, as far as the samples tell: what is held against the budget."""
    budget: float
    predicted: float | None
    """By the plan, for the profiled update; None for patterns attached without a plan."""
    tripped: bool
    variant: str
    layers: tuple[LayerError, ...]
    """Lowest first."""

    @property
    def worst(self) -> LayerError:
        """The layer in which most of the gradient is lost."""
        return max(self.layers, key=lambda layer: layer.lost)


class Guard:
    """Measures every so many micro-batches of one attached plan. Holds no reference that keeps the model alive."""

    def __init__(self, model: nn.Module, *, layers: Sequence[tuple[str, nn.Module]], choice: VariantChoice, every: int, budget: float | None, predicted: float | None, fallback: bool, on_measure: Callable[[GuardRecord], object] | None) -> None:
        """Raises UsageError for figures that mean nothing, PlanMismatchError for a model whose layers share parameters."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"guard: every must be a number of micro-batches, 1 or more, not {every!r}")
        if budget is None or not (math.isfinite(budget) and budget >= 0):
            raise UsageError(f"guard: budget must be a relative gradient error of 0 or more, such as 0.015, not {budget}" + ("; these patterns come without a plan that has one" if budget is None else ""))
        _refuse_shared(model, layers, name=choice.name)
        self.every = every
        self.budget = budget
        self.history: list[GuardRecord] = []
        self.fallen_back = False
        self._model = weakref.ref(model)
        self._fqns = [fqn for fqn, _ in layers]
        self._choice = choice
        self._predicted = predicted
        self._fallback = fallback
        self._on_measure = on_measure
        self._recent: deque[tuple[float, float]] = deque(maxlen=choice.micro_batches)
        self._count, self._last_layer, self._sampled = 0, -1, 0
        self._running: GradientError | None = None
        self._found: Measured | None = None
        self._warned: set[str] = set()

    def reset(self) -> None:
        """Go on with the plan, and forget what was measured before; the history stays."""
        self.fallen_back = self._choice.exact_only = False
        self._recent.clear()
        self._warned.clear()

    def drop(self) -> None:
        """Leave the micro-batch that is being measured, if one is, with nothing left on the model."""
        if self._running is not None:
            self._running.close()
        self._running, self._found, self._last_layer, self._sampled = None, None, -1, 0

    def watch(self, layer: nn.Module, *, fqn: str, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
        """Called by the runtime before each layer's training forward; None unless this micro-batch is being measured."""
        if index <= self._last_layer or self._last_layer < 0:
            self._begin()
        self._last_layer = index
        return None if self._running is None else self._running.watch(layer, fqn=fqn, args=args, kwargs=kwargs)

    # ------------------------------------------------------------------------------------------------------- micro-batches

    def _begin(self) -> None:
        """A new micro-batch: close the last one, agree on it with the other ranks, and see whether this one is measured."""
        if self._running is not None:
            self._running.close()
            self._tell_unmeasured(NO_BACKWARD)
            self._running = None
        if self._sampled:
            self._settle()
        self._count += 1
        if not self.fallen_back and is_sampled(self._count, every=self.every) and (model := self._model()) is not None:
            self._sampled = self._count
            self._running = GradientError(model, layers=self._fqns, name=self._choice.name, on_done=self._end)

    def _end(self, measured: Measured | None, problem: str) -> None:
        """The measured micro-batch's backward is over. Other ranks are asked at the next forward: within backward they may be busy with other collectives."""
        self._running, self._found = None, measured
        if measured is None:
            self._tell_unmeasured(problem)
        if self._choice.alone:
            self._settle()

    def _settle(self) -> None:
        """Hold the sample against the budget, alike on all ranks; where one has none, nobody has."""
        found, step = self._found, self._sampled
        self._found, self._sampled = None, 0
        most, mean = self._choice.agree([1.0, 0.0, 0.0] if found is None else [0.0, found.change2, found.gradient2])
        if most[0]:
            return
        self._recent.append((mean[1], mean[2]))
        error = self._update_error()
        over = not error <= self.budget
        record = GuardRecord(step=step, rel_error=found.rel_error, update_error=error, budget=self.budget, predicted=self._predicted, tripped=over, variant=self._choice.label, layers=found.layers)
        self.history.append(record)
        LOG.info("plan %s: micro-batch %d: gradient error %.3g, of the update %.3g (budget %.3g)", self._choice.name, step, record.rel_error, error, self.budget)
        if over:
            self._trip(record)
        if self._on_measure is not None:
            self._on_measure(record)

    def _update_error(self) -> float:
        """E of the module's head."""
        changes, gradients = (sum(values) for values in zip(*self._recent, strict=True))
        return math.sqrt(changes / (gradients / len(self._recent) * self._recent.maxlen))

    def _trip(self, record: GuardRecord) -> None:
        self.fallen_back = self._choice.exact_only = self._fallback
        remedy = "every layer is recomputed from the next micro-batch on, exactly, until guard.reset()" if self._fallback else "the plan goes on (fallback=False)"
        predicted = "" if self._predicted is None else f", predicted {self._predicted:.3g}"
        share = record.worst.lost / (sum(layer.lost for layer in record.layers) or 1.0)
        over = f"gradient error {record.update_error:.3g} is over the budget of {self.budget:.3g}{predicted}: micro-batch {record.step} has {record.rel_error:.3g}, most of it from {record.worst.fqn} ({share:.0%})"
        self._warn_once("over", f"{over}; {remedy}. Profile micro-batches like these, and plan anew")

    def _tell_unmeasured(self, problem: str) -> None:
        """Once for each reason; a micro-batch whose gradient is zero is nothing to warn of."""
        if problem == NO_GRADIENT:
            LOG.info("plan %s: micro-batch %d was not measured: %s", self._choice.name, self._sampled, problem)
        else:
            self._warn_once(problem, f"micro-batch {self._sampled} was not measured: {problem}")

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"plan {self._choice.name}: guard: {text}", stacklevel=2)


def is_sampled(count: int, *, every: int) -> bool:
    """Whether the count-th micro-batch, from 1, is measured: one of every `every`, at places that multiples of the golden ratio spread evenly."""
    window, place = divmod(count - 1, every)
    return place == int(window * GOLDEN % 1 * every)


def compresses(pattern: Pattern) -> bool:
    """Whether a layer's gradient under the pattern may differ from the exact one."""
    codecs = (action.removeprefix("compress:") for action in pattern.actions.values() if action.startswith("compress:"))
    return any(not get_codec(codec).exact for codec in codecs)


def _refuse_shared(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], *, name: str) -> None:
    """A shared parameter's gradient is the sum of what its users send: squares of the parts are not the square of it."""
    users: dict[int, tuple[str, str]] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        layer = next((fqn for fqn, _ in layers if module_fqn == fqn or module_fqn.startswith(f"{fqn}.")), "")
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            fqn = f"{module_fqn}.{parameter_name}".removeprefix(".")
            first, first_layer = users.setdefault(id(parameter), (fqn, layer))
            if first_layer != layer:
                raise PlanMismatchError(f"plan {name}: the guard cannot tell apart the gradients of {first} and {fqn}, which are one parameter; train without the guard")
