"""Which variant of a plan a micro-batch runs under: decided once, before its first layer, and alike on all ranks.

A micro-batch's size is seen at the first layer, or told before. Its exposure has to be told: what counts is its weight relative to
the mean of the update's micro-batches, so that neither the loss's normaliser nor its scale matters. The mean is of the weights that
were announced for the update (`expect`), else of the last that were told, as many as the profiled update had; until there are
so many, and wherever no exposure is told, the variant is the one for the highest exposure, which is the most careful.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from hilore_cli.errors import UsageError
from hilore_cli.exposure import weight_of
from hilore_cli.schema import ExposureRule, Variant, variant_for

RECOMPUTE_ALL = "recompute-all"
"""Name of the pattern that micro-batches above the largest variant fall back to: exact, and never over checkpointing's peak."""


class VariantChoice:
    """Which variant a micro-batch runs under: decided once, before its first layer, and alike on all ranks of the group."""

    def __init__(self, *, name: str, variants: Sequence[Variant], micro_batches: int, rule: ExposureRule, group: dist.ProcessGroup | None) -> None:
        self.name = name
        self.variants = list(variants)
        self.current: Variant | None = None
        self.exact_only = False  # a guard has left the plan: every layer is recomputed
        self.micro_batches = micro_batches
        self.served: Counter[str] = Counter()
        self.rule = rule
        self._group = group
        self._seen: deque[float] = deque(maxlen=micro_batches)
        self._announced, self._announced_for = 0.0, 0
        self._told: tuple[int, int, float | None] | None = None
        self._last_layer = -1
        self._warned: set[str] = set()

    def expect(self, weights: Sequence[float]) -> None:
        most, mean = self.agree([len(weights), sum(self._checked(weight) for weight in weights) / max(len(weights), 1)])
        self._announced, self._announced_for = mean[1], int(most[0])

    def tell(self, *, exposure: Tensor | float | None, logps: Tensor | None, tokens: int | None, length: int | None) -> None:
        weight = self._weight(exposure, logps)
        most, mean = self.agree([tokens or 0, length or 0, weight or 0.0, weight is None])
        relative = None
        if not most[3]:  # one rank that does not know makes all of them careful
            reference = self._reference(mean[2])
            relative = None if reference is None else most[2] / reference if reference > 0 else 0.0
        self._told = (int(most[0]), int(most[1]), relative)

    def _reference(self, weight: float) -> float | None:
        """The mean weight of the update's micro-batches: as announced, else of the last that were told; None before there are enough."""
        self._seen.append(weight)
        if self._announced_for > 0:
            self._announced_for -= 1
            return self._announced
        return sum(self._seen) / len(self._seen) if len(self._seen) == self._seen.maxlen else None

    @property
    def has_classes(self) -> bool:
        """Whether exposure matters to any variant."""
        return any(variant.max_exposure is not None for variant in self.variants)

    @property
    def label(self) -> str:
        """Of the variant that the current micro-batch runs under."""
        return RECOMPUTE_ALL if self.current is None else self.current.label

    def at_layer(self, layer: int, *, rows: int, length: int) -> Variant | None:
        """The current variant; a layer not above the last one called begins a new micro-batch."""
        if layer <= self._last_layer or self._last_layer < 0:
            self._decide(rows=rows, length=length)
        self._last_layer = layer
        return self.current

    def _decide(self, *, rows: int, length: int) -> None:
        tokens, longest, exposure = self._told or (0, 0, None)
        self._told = None
        if tokens == 0 or longest == 0:
            (tokens, longest), _ = self.agree([max(tokens, rows * length), max(longest, length)])
        if rows * length > tokens or length > longest:  # told too little: sizes decide about memory, so what is there counts
            self.warn_once("told", f"a micro-batch of {rows} x {length} tokens was announced as {tokens} in rows of {longest}; it runs by its real size, which other ranks may not share. Announce padded sizes")
            tokens, longest = max(tokens, rows * length), max(longest, length)
        self.current = None if self.exact_only else variant_for(self.variants, tokens=int(tokens), length=int(longest), exposure=exposure)
        self.served[self.label] += 1
        if self.current is None and not self.exact_only:
            largest = max(self.variants, key=lambda v: v.max_tokens)
            self.warn_once("size", f"a micro-batch of {int(tokens)} tokens in rows of {int(longest)} is above the plan's largest ({largest.max_tokens} tokens, rows of {largest.max_length or 'any length'}); every layer is recomputed for it. Profile a micro-batch of this size")

    def _weight(self, exposure: Tensor | float | None, logps: Tensor | None) -> float | None:
        if exposure is None:
            return None
        if not isinstance(exposure, Tensor) or exposure.ndim == 0:
            return self._checked(float(exposure))
        if self.rule == "tokens":
            raise UsageError(f"plan {self.name}: was made with exposure ignored (--weigh tokens); give the micro-batch's weight as a number, or no exposure")
        try:
            return self._checked(weight_of(exposure.detach().double(), self.rule, logps=None if logps is None else logps.detach().double(), xp=torch))
        except UsageError as error:
            raise UsageError(f"plan {self.name}: {error}") from error

    def _checked(self, weight: float) -> float:
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"exposure weight {weight}: must be a finite number of 0 or more; is there a NaN among the advantages or log-probabilities?")
        return weight

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self._group) < 2

    def agree(self, values: list[float]) -> tuple[list[float], list[float]]:
        """Greatest and mean of each value over the ranks."""
        if self.alone:
            return values, values
        device = "cuda" if "nccl" in dist.get_backend(self._group) else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(of_ranks, mine, group=self._group)
        together = torch.stack(of_ranks)
        return together.amax(0).tolist(), together.mean(0).tolist()

    def warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(f"plan {self.name}: {text}", stacklevel=5)
