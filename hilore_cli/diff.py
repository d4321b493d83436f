"""What differs between two plans (solved or frozen) or two profiles: settings, figures, actions, risks.

Plans are compared on the profiled micro-batch; a solved and a frozen plan may be compared with each other. Pure functions of records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hilore_cli.records import Strict
from hilore_cli.schema import INPUT_UNIT, FrozenPlan, Pattern, Plan, Profile, variant_for

AnyPlan = Plan | FrozenPlan
Unit = Literal["bytes", "us", "ratio", "error", "count"]

MOVED = 0.01
"""Relative change below which a risk is not listed."""
REST = "(the rest)"
"""Stands for the units that neither plan names, where the two plans' patterns treat them differently."""


@dataclass(frozen=True, kw_only=True)
class SettingDiff:
    """Something that was asked for or recorded, in words."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class FigureDiff:
    name: str
    unit: Unit
    a: float | None
    b: float | None


@dataclass(frozen=True, kw_only=True)
class ActionDiff:
    """Layers and units that one plan treats as `a` and the other as `b`."""

    layers: tuple[int, ...]
    units: tuple[str, ...]
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    settings: tuple[SettingDiff, ...]
    figures: tuple[FigureDiff, ...]
    actions: tuple[ActionDiff, ...] | None
    """None: the plans have different numbers of layers"""
    variants: tuple[SettingDiff, ...]
    """of sizes and exposures that one of the two has alone, or treats otherwise"""
    estimated: tuple[bool, bool]
    """of A and of B: whether its figures were computed without the device"""

    @property
    def is_empty(self) -> bool:
        changed = any(figure.a != figure.b for figure in self.figures)
        return not (self.settings or changed or self.actions or self.actions is None or self.variants)


@dataclass(frozen=True, kw_only=True)
class RiskDiff:
    """One unit under one codec, over all layers: the gradient error that it brings, calibrated. None: not measured there."""

    unit: str
    codec: str
    a: float | None
    b: float | None

    @property
    def size(self) -> float:
        """How far apart, as |log ratio|; infinite where one of the two is missing or 0."""
        return abs(math.log(self.b / self.a)) if self.a and self.b else math.inf


@dataclass(frozen=True, kw_only=True)
class ProfileDiff:
    settings: tuple[SettingDiff, ...]
    figures: tuple[FigureDiff, ...]
    risks: tuple[RiskDiff, ...]
    """by size, the largest change first"""
    estimated: tuple[bool, bool]
    """of A and of B: whether its figures were computed without the device"""

    @property
    def is_empty(self) -> bool:
        return not (self.settings or self.risks or any(figure.a != figure.b for figure in self.figures))


# ----------------------------------------------------------------------------------------------------------------- plans


def diff_plans(a: AnyPlan, b: AnyPlan) -> PlanDiff:
    """Budgets and identity, predicted figures, and layers x units whose actions differ."""
    first, second = a.predicted, b.predicted
    figures = [
        FigureDiff(name="step", unit="us", a=first.step_us, b=second.step_us),
        FigureDiff(name="speed-up vs GC", unit="ratio", a=first.speedup_vs_gc, b=second.speedup_vs_gc),
        FigureDiff(name="recovered", unit="ratio", a=first.recovered, b=second.recovered),
        FigureDiff(name="peak", unit="bytes", a=first.peak_bytes, b=second.peak_bytes),
        FigureDiff(name="GC's peak", unit="bytes", a=first.gc_peak_bytes, b=second.gc_peak_bytes),
        FigureDiff(name="gradient error", unit="error", a=first.rel_error, b=second.rel_error),
        FigureDiff(name="recomputation", unit="us", a=first.recompute_us, b=second.recompute_us),
        FigureDiff(name="codecs", unit="us", a=first.codec_us, b=second.codec_us),
        FigureDiff(name="kept for backward", unit="bytes", a=first.stored_bytes, b=second.stored_bytes),
        FigureDiff(name="of it compressed", unit="bytes", a=first.compressed_bytes, b=second.compressed_bytes),
        FigureDiff(name="update's step", unit="us", a=a.update.step_us, b=b.update.step_us),
        FigureDiff(name="update's error", unit="error", a=a.update.rel_error, b=b.update.rel_error),
    ]
    mine, theirs = layers_of(a), layers_of(b)
    same_depth = len(mine) == len(theirs)
    return PlanDiff(
        settings=tuple(_changed(_plan_settings(a), _plan_settings(b))),
        figures=tuple(figures),
        actions=tuple(_action_diffs([a.patterns[n] for n in mine], [b.patterns[n] for n in theirs])) if same_depth else None,
        variants=tuple(_variant_diffs(a, b)) if same_depth else (),
        estimated=(a.estimate is not None, b.estimate is not None),
    )


def layers_of(plan: AnyPlan) -> list[str]:
    """Pattern name of each layer on the profiled micro-batch, for the highest exposure."""
    if isinstance(plan, Plan):
        return plan.layers
    found = variant_for(plan.variants, tokens=plan.batch.tokens, length=plan.batch.length)
    return (found or max(plan.variants, key=lambda v: v.max_tokens)).layers


def action_of(pattern: Pattern, unit: str) -> str:
    """What a pattern does with a unit. The layer's input is stored unless it is named: no operator makes it again."""
    return pattern.actions.get(unit, "store" if unit == INPUT_UNIT else pattern.default)


def _plan_settings(plan: AnyPlan) -> dict[str, str]:
    budgets = plan.budgets
    model = plan.model
    return {
        "model": f"{model.source}, {model.layers} layers, {model.dtype}, {model.attn_implementation}" + (f", {model.lora}" if model.lora else ""),
        "model's fingerprint": f"{model.config_digest} {model.trainable_digest}",
        "graphs": ", ".join(plan.graph_digests),
        "micro-batch": f"{plan.batch.source}, {plan.batch.rows} x {plan.batch.length} tokens, {plan.batch.digest}",
        "profile": f"{plan.profile} {plan.profile_digest}" if isinstance(plan, Plan) else "",
        "estimated": plan.estimate.device if plan.estimate is not None else "no",
        "head": plan.head,
        "memory cap": budgets.mem_cap,
        "memory cap in bytes": str(budgets.cap_bytes),
        "risk": f"{budgets.risk:g}",
        "codecs": ", ".join(budgets.codecs) or "none",
        "most patterns": str(budgets.max_patterns),
        "weighed by": budgets.exposure_rule,
        "binding moment": plan.predicted.binding_moment,
        "left to checkpoint": ", ".join(plan.fallback) or "none",
    }


def _changed(a: dict[str, str], b: dict[str, str]) -> list[SettingDiff]:
    """Entries that both know (a frozen plan has no profile) and that differ."""
    return [SettingDiff(name=name, a=a[name], b=b[name]) for name in a if name in b and a[name] and b[name] and a[name] != b[name]]


def _action_diffs(mine: Sequence[Pattern], theirs: Sequence[Pattern]) -> list[ActionDiff]:
    """Grouped twice: a unit's layers with the same change, then units whose layers are the same."""
    layers: dict[tuple[str, str, str], list[int]] = {}
    for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
        changes = {unit: (action_of(p, unit), action_of(q, unit)) for unit in sorted({*p.actions, *q.actions})} | {REST: (p.default, q.default)}
        for unit, (a, b) in changes.items():
            if a != b:
                layers.setdefault((unit, a, b), []).append(i)
    units: dict[tuple[tuple[int, ...], str, str], list[str]] = {}
    for (unit, a, b), members in layers.items():
        units.setdefault((tuple(members), a, b), []).append(unit)
    found = [ActionDiff(layers=members, units=tuple(sorted(names)), a=a, b=b) for (members, a, b), names in units.items()]
    return sorted(found, key=lambda d: (d.layers, d.units))


def _variant_diffs(a: AnyPlan, b: AnyPlan) -> list[SettingDiff]:
    """Variants beside the one of the profiled micro-batch, by size and exposure."""
    mine, theirs = ({v.label: [plan.patterns[n] for n in v.layers] for v in plan.variants} for plan in (a, b))
    if len(mine) == len(theirs) == 1 and list(mine) == list(theirs):
        return []
    found = []
    for label in dict.fromkeys((*mine, *theirs)):
        if label not in mine or label not in theirs:
            found.append(SettingDiff(name=label, a="there" if label in mine else "none", b="there" if label in theirs else "none"))
        elif changed := sum(p != q for p, q in zip(mine[label], theirs[label], strict=True)):
            found.append(SettingDiff(name=label, a="", b=f"{changed} of {len(mine[label])} layers differ"))
    return found


# -------------------------------------------------------------------------------------------------------------- profiles


def diff_profiles(a: Profile, b: Profile) -> ProfileDiff:
    """What was profiled where, times, peaks and account, kappas, and the units whose risk moved."""
    figures = [FigureDiff(name=label, unit="us", a=getattr(a.times, key), b=getattr(b.times, key)) for key, label in (("none_us", "no checkpointing"), ("gc_us", "checkpointing (GC)"), ("recompute_us", "all recomputed"))]
    figures.append(FigureDiff(name="GC over none", unit="ratio", a=a.times.gc_us / a.times.none_us, b=b.times.gc_us / b.times.none_us))
    figures += [FigureDiff(name=label, unit="bytes", a=getattr(a.peaks, key), b=getattr(b.peaks, key)) for key, label in (("none_bytes", "peak, none"), ("gc_bytes", "peak, GC"))]
    figures += [FigureDiff(name=key.removesuffix("_bytes"), unit="bytes", a=value, b=getattr(b.account, key)) for key, value in a.account.model_dump().items()]
    kappas = [{k.codec: k.value for k in profile.kappas} for profile in (a, b)]
    figures += [FigureDiff(name=f"kappa of {codec}", unit="count", a=kappas[0].get(codec), b=kappas[1].get(codec)) for codec in dict.fromkeys((*kappas[0], *kappas[1]))]
    figures += [
        FigureDiff(name="gradient norm", unit="count", a=a.gradient_norm, b=b.gradient_norm),
        FigureDiff(name="micro-batches", unit="count", a=len(a.micro_batches), b=len(b.micro_batches)),
        FigureDiff(name="graph nodes", unit="count", a=sum(len(c.nodes) for c in a.classes), b=sum(len(c.nodes) for c in b.classes)),
    ]
    mine, theirs = unit_risks(a), unit_risks(b)
    risks = [RiskDiff(unit=unit, codec=codec, a=mine.get((unit, codec)), b=theirs.get((unit, codec))) for unit, codec in dict.fromkeys((*mine, *theirs))]
    moved = [risk for risk in risks if risk.size > MOVED and risk.a != risk.b]
    return ProfileDiff(
        settings=tuple(_changed(_profile_settings(a), _profile_settings(b))),
        figures=tuple(figures),
        risks=tuple(sorted(moved, key=lambda r: (-r.size, r.unit, r.codec))),
        estimated=(a.estimate is not None, b.estimate is not None),
    )


def unit_risks(profile: Profile) -> dict[tuple[str, str], float]:
    """(unit, codec) -> predicted relative gradient error when the unit is compressed in all layers; masks are exact and left out."""
    kappa = {k.codec: k.value for k in profile.kappas}
    sums: dict[tuple[str, str], float] = {}
    for row in profile.units:
        if row.codec in kappa:
            sums[row.unit, row.codec] = sums.get((row.unit, row.codec), 0.0) + row.rho2 * kappa[row.codec]
    return {key: math.sqrt(value) for key, value in sums.items()}


def _profile_settings(profile: Profile) -> dict[str, str]:
    machine, model, batch = profile.machine, profile.model, profile.batch
    return {
        "model": f"{model.source}, {model.layers} layers, {model.dtype}, {model.attn_implementation}" + (f", {model.lora}" if model.lora else ""),
        "model's fingerprint": f"{model.config_digest} {model.trainable_digest}",
        "graphs": ", ".join(sorted(c.graph_digest or f"{c.name} (left to checkpoint)" for c in profile.classes)),
        "micro-batch": f"{batch.source}, {batch.rows} x {batch.length} tokens, {batch.digest}",
        "machine": f"{machine.device}, {machine.cpu}, {machine.threads} threads",
        "torch": machine.torch,
        "transformers": machine.transformers,
        "hilore": machine.hilore,
        "estimated": profile.estimate.device if profile.estimate is not None else "no",
        "head": profile.head,
        "codecs": ", ".join(profile.codecs) or "none",
        "repeats": str(profile.times.repeats),
        "seed": str(profile.seed),
    }


def same_content(a: Strict, b: Strict) -> bool:
    """Whether two records say the same, but for their names and dates."""
    names = {"name", "created", "digest", "plan_digest", "profile", "profile_digest"}
    return type(a) is type(b) and a.model_dump(exclude=names) == b.model_dump(exclude=names)
