"""The plans of an experiment, made as anybody's: the starting weights are profiled on real rollouts, kappa calibrated on further ones, the plan
solved under cap and risk, run dry, and frozen.

Codecs are those that `hilore profile` takes by default, the device's fastest. A plan that compresses nothing is refused: training under it would
show nothing. Over characters it would be every one: at a width of 64 a product is made again in less time than its result is packed, so that the
fastest plan recomputes, whatever the cap. Settings of such models plan with codecs that take no time (`free_codecs`), as they nearly do beside a
wide model's products: then the risk is what holds a plan back, and it is used up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hilore_cli.batches import MicroBatch
from hilore_cli.bench import apply_plan
from hilore_cli.codecs import default_codecs
from hilore_cli.errors import PlanMismatchError, ProfileError
from hilore_cli.files import load_frozen_plan, load_profile, save_json
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.quality.game import Game, Weights, restore_weights, seed_of
from hilore_cli.quality.settings import RISKS, Setting
from hilore_cli.quality.training import step_config
from hilore_cli.quality_records import QualityPlan
from hilore_cli.schema import FrozenPlan, Plan, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.workbench import Progress

MICRO_BATCHES = 5
"""One is profiled, the others calibrate."""
ROLLOUTS = 10
"""Tried at most for micro-batches that have a gradient."""


def make_plans(game: Game, setting: Setting, *, start: Weights, folder: Path, progress: Progress) -> dict[str, FrozenPlan]:
    """The plan of each arm that has one, kept as <arm>.json: made when it is not there, as is the profile.

    Raises PlanMismatchError where a plan compresses nothing or its dry run is over the risk, ProfileError where no rollout has a gradient.
    """
    names = [name for name in setting.arms if name in RISKS]
    if missing := [name for name in names if not _file(folder, name).exists()]:
        restore_weights(game.model, start)
        batches = profiled_batches(game)
        profile = _profile(game, setting, batches, folder=folder / "profile", progress=progress)
        for name in missing:
            progress(f"planning {name}", 0, 1)
            plan = choose_plan(profile, setting, name=name)
            frozen = apply_plan(game.model, plan, batches, emit_anyway=True, progress=progress, name=name)  # small models miss a cap by a few KiB
            refuse_risky(frozen)
            save_json(frozen, _file(folder, name))
    return {name: _kept_plan(_file(folder, name)) for name in names}


def _kept_plan(path: Path) -> FrozenPlan:
    return load_frozen_plan(path, remedy="delete it, and it is made again")


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def profiled_batches(game: Game) -> list[MicroBatch]:
    """Micro-batches of rollouts by the starting weights that no run repeats; each from an update of its own. Raises ProfileError."""
    found: list[MicroBatch] = []
    for step in range(ROLLOUTS):
        found += [update[0] for update in game.sample(seed_of(0, step)).updates if update[0].has_gradient]
        if len(found) >= MICRO_BATCHES:
            return found[:MICRO_BATCHES]
    raise ProfileError(f"quality: {ROLLOUTS} rollouts of {game.source} gave {len(found)} micro-batches with mixed rewards, {MICRO_BATCHES} are needed; the starting weights solve too little or all")


def _profile(game: Game, setting: Setting, batches: Sequence[MicroBatch], *, folder: Path, progress: Progress) -> Profile:
    if (folder / "profile.json").exists():
        return load_profile(folder)
    sources = [f"rollout-{i}" for i in range(len(batches))]
    codecs = default_codecs(next(game.model.parameters()).device)
    request = ProfileRequest(name=setting.name, source=game.source, task=setting.name, sources=sources, codecs=codecs, config=step_config(setting.recipe))
    return profile_update(game.model, list(zip(sources, batches, strict=True)), request, folder=folder, progress=progress)


def choose_plan(profile: Profile, setting: Setting, *, name: str) -> Plan:
    """The plan of an arm. Raises PlanMismatchError where it compresses nothing, InfeasibleError where no plan keeps the cap."""
    if setting.free_codecs:
        profile = profile.model_copy(update={"units": [unit.model_copy(update={"compress_us": 0.0, "decompress_us": 0.0}) for unit in profile.units]})
    plan = solve_plan(profile, cap=parse_cap(setting.cap), risk=RISKS[name], codecs=profile.codecs, name=name)
    if plan.predicted.compressed_bytes == 0 or plan.predicted.rel_error == 0:
        raise PlanMismatchError(f"quality {setting.name}: the plan at risk {plan.budgets.risk:g} under {setting.cap} compresses nothing, so training under it would show nothing; lower the setting's cap, or plan with free codecs")
    return plan


def refuse_risky(plan: FrozenPlan) -> None:
    """Raise PlanMismatchError where the dry run's gradient error is over the risk budget: nobody would train under such a plan."""
    if plan.measured.rel_error > plan.budgets.risk:
        raise PlanMismatchError(f"quality: the dry run of plan {plan.name} has a gradient error of {plan.measured.rel_error:.3g}, over its risk budget of {plan.budgets.risk:g}; run again in another --folder, or report the setting")


def describe_plan(arm: str, plan: FrozenPlan) -> QualityPlan:
    """What it does, in figures."""
    largest = max(plan.variants, key=lambda variant: variant.max_tokens)
    compressed = Counter(f"{unit}:{action.removeprefix('compress:')}" for layer in largest.layers for unit, action in plan.patterns[layer].actions.items() if action.startswith("compress:"))
    return QualityPlan(
        arm=arm,
        digest=plan.digest,
        mem_cap=plan.budgets.mem_cap,
        risk=plan.budgets.risk,
        predicted_rel_error=plan.predicted.rel_error,
        measured_rel_error=plan.measured.rel_error,
        stored_bytes=plan.predicted.stored_bytes,
        compressed_bytes=plan.predicted.compressed_bytes,
        compressed=dict(sorted(compressed.items())),
    )
