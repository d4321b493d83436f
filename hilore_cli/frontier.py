"""What other budgets would give: the predicted step against the cap, for several risks.

    for point in solve_frontier(profile, codecs=["fbgemm-int8"], risks=(0.0, 0.015, 0.1), progress=progress): ...

Every point is a plan of `planner.solve_plan`, none is interpolated. Caps are solved from the largest down and risks from the largest
down, because one plan often answers several points: under a cap c it peaks at p, so it is the best under every cap between p and c,
and likewise for its error. What it does NOT do: read a finished plan's own figures (they stand in the plan).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hilore_cli.errors import InfeasibleError, UsageError
from hilore_cli.planner import solve_plan
from hilore_cli.schema import Plan, Profile
from hilore_cli.sizes import Cap

PUBLISHED = 1.10
"""Cap, relative to checkpointing's peak, at which the published figures of such plans are given."""
STEPS = 8
"""Caps from checkpointing's peak to that of no checkpointing."""
HIGHEST_RISK = 0.1
"""Above it errors do not add up as squares any more (planner.HIGHEST_LEVEL)."""


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """The fastest plan under one cap and one risk; step, peak and error are None where none keeps them."""

    cap_bytes: int
    cap_vs_gc: float
    risk: float
    step_us: float | None
    speedup_vs_gc: float | None
    recovered: float | None
    peak_bytes: int | None
    rel_error: float | None
    solved: bool
    """False: the plan of a larger budget keeps this one, too, and was taken over"""


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The points, by risk and then by cap; figures are of the whole profiled update."""

    profile: str
    estimated: bool
    gc_us: float
    none_us: float
    gc_peak_bytes: int
    none_peak_bytes: int
    codecs: tuple[str, ...]
    caps: tuple[float, ...]
    risks: tuple[float, ...]
    points: tuple[FrontierPoint, ...]
    published: float = PUBLISHED

    def at(self, cap: float, risk: float) -> FrontierPoint:
        return next(p for p in self.points if p.cap_vs_gc == cap and p.risk == risk)

    @property
    def ceiling(self) -> float:
        """Speed-up of no checkpointing over checkpointing: no plan is faster."""
        return self.gc_us / self.none_us


def default_caps(profile: Profile) -> tuple[float, ...]:
    """From 1.0 x checkpointing's peak to that of no checkpointing, denser at the low end, with the published setting in place of the cap next to it."""
    top = math.ceil(1000 * profile.peaks.none_bytes / profile.peaks.gc_bytes) / 1000
    if top <= 1.0:
        return (1.0,)
    caps = [round(1.0 + (top - 1.0) * (i / (STEPS - 1)) ** 1.5, 3) for i in range(STEPS)]
    inner = range(1, STEPS - 1)
    if caps[0] < PUBLISHED < caps[-1]:
        caps[min(inner, key=lambda i: abs(caps[i] - PUBLISHED))] = PUBLISHED
    return tuple(sorted(set(caps)))


def solve_frontier(profile: Profile, *, codecs: Sequence[str], risks: Sequence[float], caps: Sequence[float] | None = None, max_patterns: int = 8, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> Frontier:
    """Plans over a grid of caps (times checkpointing's peak) and risks. Raises UsageError, SolverError."""
    caps = tuple(sorted(set(caps))) if caps is not None else default_caps(profile)
    risks = tuple(sorted(set(risks)))
    if not caps or not risks:
        raise UsageError("a frontier needs at least one cap and one risk")
    if bad := [c for c in caps if not 0 < c < 1e6]:
        raise UsageError(f"cap {bad[0]:g}: must be a positive multiple of checkpointing's peak, such as 1.1")
    gc_bytes = profile.peaks.gc_bytes
    solved: list[_Solved] = []
    points: dict[tuple[float, float], FrontierPoint] = {}
    base: Plan | None = None
    for risk in reversed(risks):
        for cap in reversed(caps):
            progress(f"solve: {cap:.2f}x-gc, risk {risk:g}", len(points), len(caps) * len(risks))
            budget = Cap(text=f"{cap:g}x-gc", ratio=cap, reference="gc", nbytes=None)
            cap_bytes = budget.resolve(gc_bytes=gc_bytes, none_bytes=profile.peaks.none_bytes)
            entry = next((s for s in solved if s.answers(cap_bytes, risk)), None)
            taken_over = entry is not None
            if entry is None:
                try:
                    plan = solve_plan(profile, cap=budget, risk=risk, codecs=codecs, name="frontier", max_patterns=max_patterns)
                    base = plan
                except InfeasibleError:
                    plan = None
                entry = _Solved(cap_bytes=cap_bytes, risk=risk, plan=plan)
                solved.append(entry)
            points[cap, risk] = _point(entry.plan, cap_bytes=cap_bytes, cap=cap, risk=risk, solved=not taken_over)
    if base is None:
        raise UsageError(f"profile {profile.name}: no plan keeps any of these caps at any of these risks; raise the largest cap above {caps[-1]:g}")
    return Frontier(
        profile=profile.name,
        estimated=profile.estimate is not None,
        gc_us=base.update.gc_us,
        none_us=base.update.none_us,
        gc_peak_bytes=gc_bytes,
        none_peak_bytes=profile.peaks.none_bytes,
        codecs=tuple(codecs),
        caps=caps,
        risks=risks,
        points=tuple(points[cap, risk] for risk in risks for cap in caps),
    )


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """What one call of the planner answers."""

    cap_bytes: int
    risk: float
    plan: Plan | None

    def answers(self, cap_bytes: int, risk: float) -> bool:
        """Best among all that larger budgets allow, and within the smaller ones; what larger budgets cannot do, smaller ones cannot."""
        if cap_bytes > self.cap_bytes or risk > self.risk:
            return False
        if self.plan is None:
            return True
        return all(v.peak_bytes <= cap_bytes for v in self.plan.variants) and self.plan.update.rel_error <= risk


def _point(plan: Plan | None, *, cap_bytes: int, cap: float, risk: float, solved: bool) -> FrontierPoint:
    if plan is None:
        return FrontierPoint(cap_bytes=cap_bytes, cap_vs_gc=cap, risk=risk, step_us=None, speedup_vs_gc=None, recovered=None, peak_bytes=None, rel_error=None, solved=solved)
    update = plan.update
    return FrontierPoint(
        cap_bytes=cap_bytes,
        cap_vs_gc=cap,
        risk=risk,
        step_us=update.step_us,
        speedup_vs_gc=update.gc_us / update.step_us,
        recovered=update.recovered,
        peak_bytes=max(v.peak_bytes for v in plan.variants),
        rel_error=update.rel_error,
        solved=solved,
    )
