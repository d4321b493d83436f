"""Calibration: whole plans on an update's micro-batches, others than the profiled one above all; predicted against measured error, and kappa.

Each pair is one plan run on one micro-batch: sum of rho^2 as the profile has it, against the squared error of the micro-batch's own
gradient. kappa is the upper prediction limit of a further pair's ratio, taken as log-normal:

    log kappa = mean + t(0.95, n - 1) * sd * sqrt(1 + 1/n)      over the log ratios of n pairs

(the textbook prediction interval of a normal sample; t by Cornish and Fisher's expansion, Abramowitz and Stegun 26.7.5). Plain
quantiles of 8 to 16 pairs would be their maximum, which one pair in n exceeds again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

import torch
from torch import Tensor

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import INPUT_UNIT
from hilore_cli.choice import RECOMPUTE_ALL
from hilore_cli.grpo import relative_error
from hilore_cli.norms import squared_norm
from hilore_cli.schema import CalibrationPair, Kappa, LayerClass, LayerRow, Pattern, UnitRow
from hilore_cli.workbench import Progress, Workbench

QUANTILE = 0.95
PAIRS = 8
"""Least number of pairs for each codec."""
ON_PROFILED = 4
"""Most pairs on the profiled micro-batch itself."""
LARGEST_ERROR = 0.05
"""Calibration plans are thinned to a predicted error below this: above, squared errors stop adding up (and no budget is there)."""
RISKY = 4.0
"""A unit whose rho^2 is more than so many times the median of its codec is not one of the calm ones."""


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """A plan to try: pattern name of each layer, and its predicted sum of rho^2."""

    words: str
    codec: str
    layers: list[str]
    rho2: float


def trial_plans(units: Sequence[UnitRow], classes: Sequence[LayerClass], layers: Sequence[LayerRow], *, codec: str) -> tuple[dict[str, Pattern], list[TrialPlan]]:
    """Eight different plans of one codec, or as many as there are: calm units, all units, or the layers' inputs, on all, every second,
    the upper or lower layers.

    `calm` leaves the riskiest units out; `input` recomputes everything from the compressed input. Layers are dropped, riskiest
    first, from a plan that is predicted to be worse than LARGEST_ERROR.
    """
    rows = [row for row in units if row.codec == codec]
    if not rows:
        return {}, []
    typical = median(row.rho2 for row in rows)
    risky = {row.unit for row in rows if row.rho2 > RISKY * typical} | {INPUT_UNIT}
    patterns, costs = {}, {}
    for layer_class in classes:
        measured = {row.unit for row in rows if layers[row.layer].layer_class == layer_class.name}
        kept = {node.unit: "store" for node in layer_class.nodes if node.unit and node.unit != INPUT_UNIT and (node.unit in measured or not node.compressible) and node.side == "forward"}
        compressed = {"calm": measured - risky, "all": measured - {INPUT_UNIT}}
        for kind, chosen in compressed.items():
            patterns[f"{codec}-{kind}-{layer_class.name}"] = Pattern(actions=kept | {unit: f"compress:{codec}" for unit in chosen})
        patterns[f"{codec}-input-{layer_class.name}"] = Pattern(actions={INPUT_UNIT: f"compress:{codec}"})
    for row in layers:
        mine = [unit for unit in rows if unit.layer == row.index]
        costs["calm", row.index] = sum(unit.rho2 for unit in mine if unit.unit not in risky)
        costs["all", row.index] = sum(unit.rho2 for unit in mine if unit.unit != INPUT_UNIT)
        costs["input", row.index] = sum(unit.replayed_rho2 for unit in mine if unit.unit == INPUT_UNIT)
    middle = len(layers) // 2
    where: dict[str, Callable[[int], bool]] = {"every layer": lambda i: True, "every second layer": lambda i: i % 2 == 1, "the upper layers": lambda i: i >= middle, "the lower layers": lambda i: i < middle}
    choices = [("calm", "every layer"), ("input", "every second layer"), ("all", "the upper layers"), ("calm", "the lower layers"), ("input", "every layer"), ("all", "every second layer"), ("calm", "the upper layers"), ("input", "the lower layers")]
    choices += [("calm", "every second layer"), ("input", "the upper layers"), ("all", "the lower layers"), ("all", "every layer")]  # where thinning leaves some of those alike
    plans = []
    for kind, place in choices:
        chosen, total = set(), 0.0
        for cost, index in sorted((costs[kind, row.index], row.index) for row in layers if where[place](row.index)):
            if cost > 0 and total + cost <= LARGEST_ERROR**2:
                chosen.add(index)
                total += cost
        if chosen:
            names = [f"{codec}-{kind}-{row.layer_class}" if row.index in chosen else RECOMPUTE_ALL for row in layers]
            if len(plans) < PAIRS and all(plan.layers != names for plan in plans):  # a pair must not count twice
                plans.append(TrialPlan(words=f"{kind} units, {len(chosen)} of {place}", codec=codec, layers=names, rho2=total))
    if not plans:  # a wild codec: its calmest layer is tried whatever it costs
        cost, kind, index = min((cost, kind, index) for (kind, index), cost in costs.items() if cost > 0)
        names = [f"{codec}-{kind}-{row.layer_class}" if row.index == index else RECOMPUTE_ALL for row in layers]
        plans.append(TrialPlan(words=f"{kind} units of layer {index}", codec=codec, layers=names, rho2=cost))
    return patterns, plans


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What the micro-batches showed: each one's gradient norm, that of all together, and the pairs."""

    gradient_norms: list[float]
    update_gradient_norm: float
    pairs: list[CalibrationPair]


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A micro-batch and how many plans are tried on it."""

    source: str
    batch: MicroBatch
    heldout: bool
    plans: int


def _trials(profiled: tuple[str, MicroBatch], others: Sequence[tuple[str, MicroBatch]]) -> list[_Trial]:
    """At least PAIRS on micro-batches that were not profiled, and some on the profiled one: it is one of the update as well, and its own errors
    were a tenth above those of two others. Without another its halves.
    """
    source, batch = profiled
    if not others:
        halves = halves_of(batch)
        return [_Trial(source=f"part {i + 1} of {source}", batch=half, heldout=False, plans=math.ceil(PAIRS / len(halves))) for i, half in enumerate(halves)]
    each = math.ceil(PAIRS / len(others))
    return [_Trial(source=name, batch=other, heldout=True, plans=each) for name, other in others] + [_Trial(source=source, batch=batch, heldout=False, plans=min(each, ON_PROFILED))]


def try_plans(bench: Workbench, batches: Sequence[tuple[str, MicroBatch]], *, units: Sequence[UnitRow], classes: Sequence[LayerClass], layers: Sequence[LayerRow], codecs: Sequence[str], exact: dict[str, Tensor], progress: Progress) -> Tried:
    """Exact gradients of all micro-batches, and trial plans on those with a gradient; `exact` is the gradient of the first, profiled one.
    Where there is no other, its halves are tried, which says less: no pair is `heldout`.
    """
    patterns: dict[str, Pattern] = {}
    plans: list[list[TrialPlan]] = []
    for codec in codecs:
        more, of_codec = trial_plans(units, classes, layers, codec=codec)
        patterns |= more
        plans += [of_codec] if of_codec else []
    profiled = batches[0]
    trials = _trials(profiled, [other for other in batches[1:] if other[1].has_gradient])
    norms = {id(profiled[1]): gradient_norm(exact)}
    total, pairs = {name: grad.clone() for name, grad in exact.items()} if trials[0].heldout else exact, []
    whole, tried = bench.batches, 0
    try:
        for position, trial in enumerate(trials):
            progress("checking the risk against whole plans", position, len(trials))
            bench.batches = [trial.batch]
            reference = exact if trial.batch is profiled[1] else bench.gradients_by("recompute")
            norms[id(trial.batch)] = gradient_norm(reference)
            if trial.heldout:
                for name, grad in reference.items():
                    total[name].add_(grad)
            if norms[id(trial.batch)] == 0:
                continue
            for of_codec in plans:
                for plan in (of_codec[(tried + k) % len(of_codec)] for k in range(min(trial.plans, len(of_codec)))):
                    with bench.assigned(patterns, plan.layers, graph_digests=[c.graph_digest for c in classes]):
                        error = relative_error(bench.gradients(), reference)
                    if error == 0:
                        continue  # the micro-batch's layers trace to another graph, which is recomputed whole
                    pairs.append(CalibrationPair(codec=plan.codec, plan=plan.words, micro_batch=trial.source, heldout=trial.heldout, predicted_rho2=plan.rho2, measured_rel_error=error))
            tried += trial.plans
    finally:
        bench.batches = whole
    return Tried(gradient_norms=[norms.get(id(batch), 0.0) for _, batch in batches], update_gradient_norm=gradient_norm(total), pairs=pairs)


def kappas_of(pairs: Sequence[CalibrationPair], codecs: Sequence[str], *, rounding_error: float = 0.0) -> list[Kappa]:
    """Calibration of each codec that has pairs; fewer than PAIRS, or none on other micro-batches, are worth a warning."""
    found = []
    for codec in codecs:
        mine = [pair for pair in pairs if pair.codec == codec and pair.measured_rel_error > 0]
        if mine:
            batches = sorted({pair.micro_batch for pair in mine})
            elsewhere = any(pair.heldout for pair in mine)
            if len(mine) < PAIRS or not elsewhere:
                warnings.warn(f"codec {codec}: calibrated on {len(mine)} pairs of plan and micro-batch{'' if elsewhere else ', none of them on another micro-batch than the profiled one'}; give more micro-batches (--batch) for a surer risk", stacklevel=2)
            found.append(Kappa(codec=codec, value=prediction_limit([pair.ratio(rounding_error) for pair in mine]), quantile=QUANTILE, pairs=len(mine), micro_batches=len(batches), coverage=_coverage(mine, batches, rounding_error)))
    return found


def prediction_limit(ratios: Sequence[float]) -> float:
    """Upper limit of a further ratio, log-normal; of one ratio, twice it."""
    if len(ratios) < 2:
        return 2 * ratios[0]
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    return math.exp(fmean(logs) + t_quantile(QUANTILE, n - 1) * stdev(logs) * math.sqrt(1 + 1 / n))


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t (Abramowitz and Stegun 26.7.5; exact forms for 1 and 2 degrees of freedom)."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)


def _coverage(pairs: Sequence[CalibrationPair], batches: Sequence[str], rounding_error: float) -> float:
    """Share of pairs that stay below the limit of the pairs on other micro-batches; with one micro-batch, of the other pairs."""
    below = 0
    for pair in pairs:
        others = [p.ratio(rounding_error) for p in pairs if (p.micro_batch != pair.micro_batch if len(batches) > 1 else p is not pair)]
        below += bool(others) and pair.ratio(rounding_error) <= prediction_limit(others)
    return below / len(pairs)


def halves_of(micro_batch: MicroBatch) -> tuple[MicroBatch, ...]:
    """The micro-batch as two, each with a gradient: by groups where both sides have advantages, else by every second row by size of
    advantage; whole where no cut does.
    """
    size = micro_batch.advantages.abs().amax(1)
    _, group = torch.unique(micro_batch.group_ids, return_inverse=True)
    rank = torch.argsort(torch.argsort(size, descending=True, stable=True))
    for sides in (group % 2 == 0, rank % 2 == 0):
        if all(bool((size[side] != 0).any()) for side in (sides, ~sides)):
            return tuple(micro_batch.take_rows(side) for side in (sides, ~sides))
    return (micro_batch,)


def gradient_norm(gradient: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all parameters."""
    return sum(map(squared_norm, gradient.values())) ** 0.5
