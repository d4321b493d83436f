"""All together: starting weights, plans, the runs of every pair, and what they show.

    report = run_quality(setting, pairs=8, folder=folder, device=device, minutes=None, progress=progress, note=print)

Every finished run is kept at once; run again, it goes on where it stopped. Pairs are judged whole: of a pair in progress nothing is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers

import hilore_cli
from hilore_cli.bench import today
from hilore_cli.capture import model_identity
from hilore_cli.errors import HiloreError
from hilore_cli.identities import describe_machine
from hilore_cli.quality.archive import Archive, starting_weights
from hilore_cli.quality.arms import Arm, make_arms
from hilore_cli.quality.chars import CharGame
from hilore_cli.quality.game import Accuracy, Game, Weights, restore_weights, trainable, weights_digest
from hilore_cli.quality.planning import describe_plan, make_plans
from hilore_cli.quality.settings import MARGIN_POINTS, CharGameSpec, Setting
from hilore_cli.quality.statistics import has_power, is_within, is_worse, summarise_arm, trend_of
from hilore_cli.quality.text import TextGame
from hilore_cli.quality.training import train
from hilore_cli.quality_records import ArmRun, QualityReport, RunsIdentity
from hilore_cli.schema import FrozenPlan
from hilore_cli.workbench import Progress

FEWEST_PAIRS = 2
REFERENCE, OURS, CONTROL = "gc", "hilore", "int2"


def run_quality(setting: Setting, *, pairs: int, folder: Path, device: torch.device, minutes: float | None, progress: Progress, note: Callable[[str], None]) -> QualityReport:
    """Run what is missing of `pairs` pairs, as far as `minutes` allow, and report on those that are whole.

    Raises UsageError for a folder of another experiment, PlanMismatchError for plans that compress nothing, HiloreError where the time allowed
    fewer than two pairs.
    """
    stop_at = None if minutes is None else time.monotonic() + 60 * minutes
    archive = Archive(folder)
    known = known_identity(setting, device)
    archive.check(**known)
    game = make_game(setting, device)
    start = starting_weights(game, setting, folder, progress=progress)
    plans = make_plans(game, setting, start=start, folder=folder, progress=progress)
    archive.begin(RunsIdentity(**known, checkpoint_digest=weights_digest(start), plan_digests={name: plan.digest for name, plan in plans.items()}))
    restore_weights(game.model, start)
    before = game.evaluate()
    note(f"start: greedy {100 * before.greedy:.2f} %, sampled {100 * before.sampled:.2f} %")
    run_pairs(game, make_arms(game.model, setting.arms, plans), setting, archive, pairs=pairs, start=start, stop_at=stop_at, progress=progress, note=note)
    return make_report(game, setting, archive, plans, start=start, before=before, pairs=pairs)


def known_identity(setting: Setting, device: torch.device) -> dict[str, str | int]:
    """What is known of the experiment before anything is loaded."""
    machine = describe_machine(device)
    return {"setting": setting.name, "setting_digest": setting.digest, "hilore": hilore_cli.__version__, "torch": torch.__version__, "transformers": transformers.__version__, "device": machine.device, "threads": machine.threads}


def make_game(setting: Setting, device: torch.device) -> Game:
    return CharGame(setting, device=device) if isinstance(setting.game, CharGameSpec) else TextGame(setting, device=device)


# ------------------------------------------------------------------------------------------------------------------- runs


def run_pairs(game: Game, arms: list[Arm], setting: Setting, archive: Archive, *, pairs: int, start: Weights, stop_at: float | None, progress: Progress, note: Callable[[str], None]) -> None:
    """Run whatever the archive lacks, pair by pair. Stops before a run that would end too late, taking it to last as long as the longest yet."""
    for pair in range(pairs):
        for arm in arms:
            if archive.find(pair, arm.name) is not None:
                continue
            longest = max((run.seconds for run in archive.runs), default=0.0)
            if stop_at is not None and time.monotonic() + longest > stop_at:
                note("the time is over; run again to go on")
                return
            run = run_arm(game, arm, setting, pair=pair, start=start, progress=progress)
            archive.add(run)
            note(f"pair {pair + 1}, {arm.name}: greedy {100 * run.greedy:.2f} %, sampled {100 * run.sampled:.2f} % ({run.seconds:.0f} s)")


def run_arm(game: Game, arm: Arm, setting: Setting, *, pair: int, start: Weights, progress: Progress) -> ArmRun:
    """Train and judge."""
    began = time.monotonic()
    trained = train(game, arm, setting, pair=pair, start=start, progress=progress)
    reached = game.evaluate() if trained.diverged_at is None else Accuracy(greedy=0.0, sampled=0.0)
    return ArmRun(
        pair=pair,
        arm=arm.name,
        greedy=reached.greedy,
        sampled=reached.sampled,
        rewards=trained.rewards,
        errors=trained.errors,
        diverged_at=trained.diverged_at,
        weights_digest=weights_digest(trainable(game.model)),
        seconds=time.monotonic() - began,
    )


# ----------------------------------------------------------------------------------------------------------------- report


def make_report(game: Game, setting: Setting, archive: Archive, plans: Mapping[str, FrozenPlan], *, start: Weights, before: Accuracy, pairs: int) -> QualityReport:
    """Judge the whole pairs among the first `pairs`. Raises HiloreError where they are fewer than two."""
    whole = [pair for pair in range(pairs) if all(archive.find(pair, arm) is not None for arm in setting.arms)]
    if len(whole) < FEWEST_PAIRS:
        raise HiloreError(f"quality: {len(whole)} of {pairs} pairs are finished, and two are the least that tell anything; run the same command again to go on (more --minutes)")
    runs = {arm: [archive.find(pair, arm) for pair in whole] for arm in setting.arms}
    arms = {arm: summarise_arm(of_arm, runs[REFERENCE]) for arm, of_arm in runs.items()}
    errors = [point.rel_error for run in runs[OURS] for point in run.errors]
    predicted = plans[OURS].predicted.rel_error
    return QualityReport(
        date=today(),
        machine=describe_machine(next(game.model.parameters()).device),
        model=model_identity(game.model, source=game.source),
        setting=setting.values(),
        checkpoint_digest=weights_digest(start),
        start_greedy=before.greedy,
        start_sampled=before.sampled,
        pairs=len(whole),
        problems=setting.problems,
        margin_points=MARGIN_POINTS,
        plans=[describe_plan(arm, plan) for arm, plan in plans.items()],
        arms=list(arms.values()),
        within_margin=is_within(arms[OURS], MARGIN_POINTS),
        has_power=has_power(arms[OURS], MARGIN_POINTS, problems=setting.problems),
        control_failed=is_worse(arms[CONTROL], MARGIN_POINTS),
        trend=trend_of([run.errors for run in runs[OURS]], steps=setting.recipe.steps),
        covered=sum(error <= predicted for error in errors) / len(errors) if errors else None,
        runs=[run for pair in whole for arm in setting.arms for run in (archive.find(pair, arm),)],
    )
