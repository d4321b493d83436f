"""Profile + budgets -> Plan: variants for the micro-batches of an update, under one cap and one risk budget for the whole of it.

    plan = solve_plan(profile, cap=parse_cap("1.1x-gc"), risk=0.015, codecs=["fbgemm-int8"], name="smollm2-math")

Errors of micro-batches are independent, so squares add, and what counts is the update's gradient g = sum of g_m:

    |error|^2 / |g|^2 = sum over m of share_m * eps_m^2,   share_m = |g_m|^2 / |g|^2

A micro-batch with a small gradient may be compressed harder, and a short one has room under the cap that a long one lacks.
|g_m| is not known before the forward; its exposure is: share_m is taken in proportion to the micro-batch's weight (schema:
ExposureRule). How: micro-batches are sorted into sizes (by tokens) and classes (by weight relative to the update's mean); for
each size the step planner gives the fastest plan at several risks; the choice of one risk for each size and class with the
least time of the profiled update, under the budget, is exact (dynamic programming over a grid of the budget).

Shares are never taken below those of orthogonal gradients: that micro-batches pull the same way is luck that an update may lack.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hilore_cli.errors import UsageError
from hilore_cli.program import Actions
from hilore_cli.records import digest_of
from hilore_cli.scaling import profile_at
from hilore_cli.schema import (
    Budgets,
    ExposureRule,
    MicroBatchRow,
    Pattern,
    Plan,
    PlannedVariant,
    Prediction,
    Profile,
    UpdatePrediction,
)
from hilore_cli.sizes import Cap
from hilore_cli.step_planner import FEW_PATTERNS, Solution, StepPlanner

SIZES = (0.4, 0.6, 0.8)
"""Of the largest micro-batch's tokens: the smaller sizes that get variants of their own, where the update has such micro-batches."""
MAX_PATTERNS = 8
"""Distinct patterns of a variant, unless something else is asked for."""
CLASSES = 3
"""Exposure classes, of equally many micro-batches."""
FEWEST = 2 * CLASSES
"""Micro-batches of an update that is divided into sizes and classes; fewer tell too little of what training will bring."""
LEVELS = (0.0, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.8, 4.0)
"""Risks that variants are solved for, in units of the risk that all micro-batches could have alike."""
HIGHEST_LEVEL = 0.1
"""Relative error above which errors do not add up as squares any more: no variant may bring more into a micro-batch."""
NOT_BINDING = 0.8
"""Share of its risk below which a plan is taken not to be held back by it: more risk would give no other one."""
GRID = 4096
"""Steps of the risk budget in the choice of levels; a level's use is rounded up."""


def solve_plan(profile: Profile, *, cap: Cap, risk: float, codecs: Sequence[str], name: str, max_patterns: int = MAX_PATTERNS, variants: bool = True, rule: ExposureRule | None = None) -> Plan:
    """The plan with the shortest predicted update under the cap and the risk budget.

    `variants` False: one variant for all micro-batches. `rule`: how micro-batches are weighed before their forward;
    by default `logits` where log-probabilities were recorded, else `squared`.
    Raises UsageError for an unknown codec or a bad budget, InfeasibleError (least peaks, least risk, binding moment),
    SolverError when CBC is missing or wrong.
    """
    check_measured(profile, codecs)
    if not (math.isfinite(risk) and risk >= 0):
        raise UsageError(f"risk must be a relative gradient error of 0 or more, such as 0.015, not {risk}")
    if max_patterns < 1:
        raise UsageError(f"at least one pattern is needed, not {max_patterns}")
    cap_bytes = cap.resolve(gc_bytes=profile.peaks.gc_bytes, none_bytes=profile.peaks.none_bytes)
    if rule is None:
        rule = "squared" if any(row.logits is None for row in profile.micro_batches) else "logits"
    update = Update(profile, rule=rule, divided=variants)
    alike = risk / math.sqrt(update.total_share)
    levels = sorted({alike * f for f in LEVELS if alike * f <= max(alike, HIGHEST_LEVEL)}) if variants and len(update.groups) > 1 else [alike]
    planners: dict[int, StepPlanner] = {}
    options: dict[int, list[Option]] = {}
    for tokens in sorted({group.max_tokens for group in update.groups}, reverse=True):
        sized = profile_at(profile, tokens=tokens, length=update.max_length)
        planners[tokens] = StepPlanner(sized, codecs=tuple(codecs) if risk > 0 else ())
        options[tokens] = solve_levels(planners[tokens], levels, alike=alike, cap_bytes=cap_bytes, max_patterns=max_patterns if len(update.groups) == 1 else min(max_patterns, FEW_PATTERNS))
    chosen = choose_levels(update.groups, options, budget=risk**2)
    if len(update.groups) == 1:
        chosen = [simplified(planners[profile.batch.tokens], option, cap_bytes=cap_bytes) for option in chosen]
    if codecs and 0 < alike <= profile.rounding_error and not any(option.predicted.rel_error for option in chosen):
        warnings.warn(f"in {profile.model.dtype} any change of what backward reads changes roundings below by {profile.rounding_error:.2g} of the gradient, which leaves nothing of --risk {risk:g}: the plan is exact; a higher --risk may compress", stacklevel=2)
    names = PatternNames()
    largest = planners[profile.batch.tokens]
    base = next(o for g, o in zip(update.groups, chosen, strict=True) if g.max_tokens == profile.batch.tokens and g.max_exposure is None)
    layers = names.of(base.actions)
    planned = [planned_variant(group, option, names, max_length=update.max_length) for group, option in merged(update.groups, chosen)]
    return Plan(
        name=name,
        profile=profile.name,
        profile_digest=digest_of(profile),
        model=profile.model,
        batch=profile.batch,
        sources=profile.sources,
        estimate=profile.estimate,
        graph_digests=profile.graph_digests,
        fallback=profile.fallback,
        head=profile.head,
        budgets=Budgets(mem_cap=cap.text, cap_bytes=cap_bytes, risk=risk, codecs=list(codecs), max_patterns=max_patterns, exposure_rule=rule),
        patterns=names.patterns(),
        layers=layers,
        variants=planned,
        predicted=base.predicted,
        update=update.predict(chosen),
        solver=largest.record(base.solution),
        alternatives=largest.alternatives(risk=base.level, cap_bytes=cap_bytes, max_patterns=max_patterns),
    )


def check_measured(profile: Profile, codecs: Sequence[str]) -> None:
    """Raise UsageError for a codec that the profile has no figures of."""
    if unknown := [codec for codec in codecs if codec not in profile.codecs]:
        raise UsageError(f"codec {unknown[0]!r} is not in profile {profile.name}; it has {', '.join(profile.codecs) or 'none'}")


# ------------------------------------------------------------------------------------------------------------ the update


@dataclass(frozen=True, kw_only=True)
class Group:
    """Micro-batches of one size and one exposure class, and their part in the update."""

    max_tokens: int
    max_exposure: float | None
    members: tuple[MicroBatchRow, ...]
    share: float
    """Sum of the members' share_m."""


class Update:
    """The profiled update's micro-batches, sorted into groups."""

    def __init__(self, profile: Profile, *, rule: ExposureRule, divided: bool) -> None:
        self.profile = profile
        rows = profile.micro_batches
        orthogonal = sum(row.gradient_norm**2 for row in rows)
        orthogonal_share = max(1.0, orthogonal / profile.update_gradient_norm**2)
        self.max_length = max(row.length for row in rows)
        divided = divided and len(rows) >= FEWEST
        weights = [row.weight(rule) for row in rows]
        if None in weights:
            raise UsageError(f"weigh {rule}: micro-batch {rows[weights.index(None)].source} has no log-probabilities from sampling; record them, or use --weigh squared")
        mean = sum(weights) / len(weights)
        relative = [w / mean if mean > 0 else 1.0 for w in weights]
        edges = _class_edges(relative) if divided else []
        sizes = _sizes(profile) if divided else [profile.batch.tokens]
        members: dict[tuple[int, float | None], list[int]] = {(tokens, edge): [] for tokens in sizes for edge in (*edges, None)}
        for i, row in enumerate(rows):
            tokens = next((t for t in sizes if row.tokens <= t), sizes[-1])  # a larger one without gradient is not profiled
            members[tokens, next((e for e in edges if relative[i] <= e), None)].append(i)
        self.groups = [
            Group(max_tokens=tokens, max_exposure=edge, members=tuple(rows[i] for i in chosen), share=self._share([relative[i] for i in chosen], [rows[i] for i in chosen], orthogonal_share))
            for (tokens, edge), chosen in members.items()
        ]
        self.total_share = sum(group.share for group in self.groups)

    def _share(self, relative: Sequence[float], rows: Sequence[MicroBatchRow], total: float) -> float:
        """What exposure says, and never less than what was measured: terms like KL have a gradient that exposure does not tell."""
        told = sum(relative) / len(self.profile.micro_batches) * total
        measured = sum(row.gradient_norm**2 for row in rows) / self.profile.update_gradient_norm**2
        return max(told, measured)

    def predict(self, chosen: Sequence[Option]) -> UpdatePrediction:
        """Times in proportion to each micro-batch's own tokens; the error from the shares."""
        times, tokens = self.profile.times, self.profile.batch.tokens
        step_us = sum(option.predicted.step_us * row.tokens / group.max_tokens for group, option in zip(self.groups, chosen, strict=True) for row in group.members)
        scale = sum(row.tokens for row in self.profile.micro_batches) / tokens
        error2 = sum(group.share * option.predicted.rel_error**2 for group, option in zip(self.groups, chosen, strict=True))
        return UpdatePrediction(micro_batches=len(self.profile.micro_batches), step_us=step_us, gc_us=times.gc_us * scale, none_us=times.none_us * scale, rel_error=math.sqrt(error2))


def _sizes(profile: Profile) -> list[int]:
    """Sizes by growing tokens, each the largest of some micro-batch: without one there is nothing to weigh it by."""
    largest = profile.batch.tokens
    edges = [math.ceil(largest * share) for share in SIZES if profile.smaller is not None] + [largest]
    used = {next((e for e in edges if row.tokens <= e), largest) for row in profile.micro_batches}
    return sorted(used | {largest})


def _class_edges(relative: Sequence[float]) -> list[float]:
    """Upper edges of all classes but the last: midway between neighbours, where they differ."""
    ordered = sorted(relative)
    places = [i for i in range(1, len(ordered)) if ordered[i - 1] < ordered[i]]
    cuts = {min(places, key=lambda i: abs(i - len(ordered) * k / CLASSES)) for k in range(1, CLASSES)} if places else set()
    return sorted((ordered[c - 1] + ordered[c]) / 2 for c in cuts)


# ---------------------------------------------------------------------------------------------------------------- levels


@dataclass(frozen=True, kw_only=True)
class Option:
    """One size's fastest plan at one risk."""

    level: float
    actions: tuple[Actions, ...]
    predicted: Prediction
    solution: Solution


def solve_levels(planner: StepPlanner, levels: Sequence[float], *, alike: float, cap_bytes: int, max_patterns: int) -> list[Option]:
    """The fastest plan at each risk; at the risk that all could have alike it is solved first, and infeasible where that is.

    Left out: a risk at which the cap cannot be kept, and one whose plan would be another risk's, which did not use its own up.
    """
    found = [_option(planner, planner.solve(cap_bytes=cap_bytes, risk=alike, max_patterns=max_patterns), alike)]
    below, above = [level for level in levels if level < alike], [level for level in levels if level > alike]
    for series in (reversed(below), above):
        last = found[0]
        for level in series:
            exact = last.predicted.rel_error == 0 and last.level <= planner.profile.rounding_error  # its budget was nothing
            if last.predicted.rel_error <= level < last.level or (level > last.level and not exact and last.predicted.rel_error < NOT_BINDING * last.level):
                continue
            solution = planner.try_solve(cap_bytes=cap_bytes, risk=level, max_patterns=max_patterns)
            if solution is None:
                break
            last = _option(planner, solution, level)
            found.append(last)
    return found


def simplified(planner: StepPlanner, option: Option, *, cap_bytes: int) -> Option:
    return _option(planner, planner.simplify(option.solution, cap_bytes=cap_bytes, risk=option.level), option.level)


def _option(planner: StepPlanner, solution: Solution, level: float) -> Option:
    return Option(level=level, actions=tuple(planner.actions_of(solution.assignment)), predicted=planner.predict(solution.assignment), solution=solution)


def choose_levels(groups: Sequence[Group], options: dict[int, list[Option]], *, budget: float) -> list[Option]:
    """One option for each group: least time of all members together, with sum of share x eps^2 within the budget.

    Exact over a grid of the budget, use rounded up; that every group takes the option at the common risk is always allowed.
    Within a size more exposure never gets more risk, so that the last class holds for exposures that nobody told. A class without
    members takes what the next higher does; the highest without any, at most the common risk.
    """
    best: dict[int, tuple[float, tuple[Option, ...]]] = {0: (0.0, ())}
    for tokens in dict.fromkeys(group.max_tokens for group in groups):
        classes = [group for group in groups if group.max_tokens == tokens]
        following: dict[int, tuple[float, tuple[Option, ...]]] = {}
        for picked in _allowed(classes, options[tokens]):
            use = 0 if budget == 0 else sum(math.ceil(group.share * option.predicted.rel_error**2 / budget * GRID * (1 - 1e-9)) for group, option in zip(classes, picked, strict=True))
            cost = sum(option.predicted.step_us * row.tokens / tokens for group, option in zip(classes, picked, strict=True) for row in group.members)
            for used, (us, before) in best.items():
                total = used + use
                if total <= GRID + len(groups) and (total not in following or us + cost < following[total][0]):
                    following[total] = (us + cost, (*before, *picked))
        best = _pareto(following)
    fitting = [entry for used, entry in best.items() if used <= GRID] or list(best.values())
    return list(min(fitting, key=lambda entry: entry[0])[1])


def _allowed(classes: Sequence[Group], options: Sequence[Option]) -> Iterator[tuple[Option, ...]]:
    """Options for the classes of one size, by growing exposure."""
    for picked in itertools.product(options, repeat=len(classes)):
        falling = all(low.level >= high.level for low, high in itertools.pairwise(picked))
        follows = all(group.members or low is high for group, low, high in zip(classes, picked, picked[1:], strict=False))
        if falling and follows and (classes[-1].members or picked[-1].level <= options[0].level):
            yield picked


def _pareto(entries: dict[int, tuple[float, tuple[Option, ...]]]) -> dict[int, tuple[float, tuple[Option, ...]]]:
    kept, least = {}, math.inf
    for used in sorted(entries):
        if entries[used][0] < least:
            kept[used], least = entries[used], entries[used][0]
    return kept


def merged(groups: Sequence[Group], chosen: Sequence[Option]) -> list[tuple[Group, Option]]:
    """Groups with their options; neighbouring classes of one size with the same plan as one."""
    result: list[tuple[Group, Option]] = []
    for group, option in zip(groups, chosen, strict=True):
        if result and result[-1][0].max_tokens == group.max_tokens and result[-1][1].actions == option.actions:
            lower = result.pop()[0]
            group = replace(group, members=(*lower.members, *group.members), share=lower.share + group.share)
        result.append((group, option))
    return result


def planned_variant(group: Group, option: Option, names: PatternNames, *, max_length: int) -> PlannedVariant:
    return PlannedVariant(
        max_tokens=group.max_tokens,
        max_length=max_length,
        max_exposure=group.max_exposure,
        layers=names.of(option.actions),
        micro_batches=len(group.members),
        risk=option.level,
        step_us=option.predicted.step_us,
        peak_bytes=option.predicted.peak_bytes,
        rel_error=option.predicted.rel_error,
    )


class PatternNames:
    """Names A, B, ... in the order in which layers first use a pattern; equal patterns of all variants share one."""

    def __init__(self) -> None:
        self._names: dict[Actions, str] = {}

    def of(self, actions: Sequence[Actions]) -> list[str]:
        return [self._names.setdefault(a, _letter(len(self._names))) for a in actions]

    def patterns(self) -> dict[str, Pattern]:
        return {name: Pattern(actions=dict(actions)) for actions, name in self._names.items()}


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"P{number}"
