"""Every peer and our plans side by side: one process, one update, one optimizer, one absolute cap.

    report = run_suite(model, {"first": plan, "exact": other}, batches, cap_bytes=cap, heads=("full", "chunked"), ...)

In this order: gradients and peaks of what has no settings; of a method with settings every candidate's measured peak, then two short timings of
those under the cap, and the fastest is kept; gradients of the kept ones; then interleaved repeats of all. A method of which nothing fits is shown
with its smallest setting, marked. Our plans run under the loss head that they were made for.

Where more of a setting means more memory (how many layers store), the largest that fits is found by bisection; budgets of torch's partitioner are
not monotone (pytorch#197838), so all are measured. Whatever was measured is kept as it comes (stages.py), timings by whole repeats, so that an
interrupted suite goes on where it stopped. int8 is the codec that is fastest on the device, for peers as for plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hilore_cli import paper_dp
from hilore_cli.batches import MicroBatch, require_gradient
from hilore_cli.bench import add_plans, clock_of, gradient_error, paired_interval, recovered_share, today
from hilore_cli.capture import model_identity
from hilore_cli.errors import HiloreError, PlanMismatchError, UsageError
from hilore_cli.grpo import HEADS, GrpoConfig
from hilore_cli.identities import batch_identity, describe_machine
from hilore_cli.peers import (
    HEAD_MARK,
    UNSCALED,
    PeerBench,
    Wrap,
    all_but_spread,
    checkpoint_ops,
    checkpoint_some,
    compile_within,
    every_kth,
    pack_all,
    pack_inputs,
    pack_mlp,
    packing_of,
)
from hilore_cli.schema import FrozenPlan
from hilore_cli.sizes import Cap
from hilore_cli.stages import Stages, key_of
from hilore_cli.suite_records import Candidate, SuiteReport, SuiteRow
from hilore_cli.workbench import Progress

FIXED: dict[str, Callable[[torch.device], Wrap]] = {
    "sac-attention": lambda _: checkpoint_ops("none"),
    "sac-half-mm": lambda _: checkpoint_ops("half"),
    "sac-mm": lambda _: checkpoint_ops("all"),
    "fp8-all": lambda _: pack_all(packing_of("e4m3")),
    "gc+fp8-boundary": lambda _: pack_inputs(packing_of("e4m3")),
    "int8-mlp": lambda device: pack_mlp(packing_of("fbgemm-int8" if device.type == "cpu" else "int8")),
}
SCANNED = ("partial-gc", "membudget", "paper-dp")
CANDIDATES = ("first-", "spread-", "every-", "membudget-", "paper-")
"""How the names of settings that are tried begin."""
BASELINES = ("none", "gc")
PEERS = (*BASELINES, *FIXED, *SCANNED)
MEMORY_BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
EVERY = (2, 3, 4)
GUESSES = 2
SHORT_REPEATS = 2
NOT_FINITE = "not finite"
Samples = Sequence[tuple[float, float]]
"""(wall us, CPU us) of each repeat."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One candidate: its method's name on the bench, and what it is, in words."""

    name: str
    words: str
    wrap: Wrap


def run_suite(model: nn.Module, plans: Mapping[str, FrozenPlan], batches: Sequence[tuple[str, MicroBatch]], *, cap: Cap | None, heads: Sequence[str], peers: Collection[str], repeats: int, progress: Progress, unfinished: Path | None = None) -> SuiteReport:
    """Measure the peers and the plans (by row name; the first gives cap, unless there is one, and risk). Raises UsageError, PlanMismatchError.

    `unfinished`: folder in which parts are kept, for whoever keeps the report to remove.
    """
    first = next(iter(plans.values()))
    require_gradient([batch for _, batch in batches])
    check_names(plans, heads, peers)
    bench = PeerBench(model, [batch for _, batch in batches], GrpoConfig(head=first.head))
    add_plans(bench, plans)
    identity = model_identity(model, source=first.model.source)
    identities = [batch_identity(batch, source=source) for source, batch in batches]
    machine = describe_machine(bench.device)
    key = key_of([machine.model_dump(), identity.model_dump(), [row.model_dump() for row in identities], {name: plan.digest for name, plan in plans.items()}, str(cap), list(heads), sorted(peers)])
    stages = None if unfinished is None else Stages(unfinished, key=key)
    suite = _Suite(bench, plans=plans, heads=heads, peers=[name for name in PEERS if name in {*peers, *BASELINES}], risk=first.budgets.risk, stages=stages, progress=progress)
    suite.measure_simple()
    suite.cap_bytes = first.budgets.cap_bytes if cap is None else cap.resolve(gc_bytes=suite.peaks[f"gc{HEAD_MARK}{first.head}"], none_bytes=suite.peaks[f"none{HEAD_MARK}{first.head}"])
    suite.choose_settings()
    samples = suite.time_rows(repeats)
    return SuiteReport(
        date=today(),
        machine=machine,
        model=identity,
        batches=identities,
        cap_bytes=suite.cap_bytes,
        risk=suite.risk,
        plans={name: plan.digest for name, plan in plans.items()},
        repeats=repeats,
        clock="cpu" if suite.clock else "wall",
        rows=suite.rows(samples),
        candidates=suite.candidates,
        left_out=suite.left_out,
    )


def check_names(plans: Mapping[str, FrozenPlan], heads: Sequence[str], peers: Collection[str]) -> None:
    """Raise UsageError for names that are unknown, or taken."""
    if not heads or (unknown := [head for head in heads if head not in HEADS]):
        raise UsageError(f"head {unknown[0]!r}: unknown; use one of {', '.join(HEADS)}" if heads else "no loss head is named")
    if unknown := [name for name in peers if name not in PEERS]:
        raise UsageError(f"method {unknown[0]!r} is not known; --peers takes {', '.join(PEERS)}")
    if taken := [name for name in plans if name in (*PEERS, "store", "recompute") or HEAD_MARK in name or "+" in name or name.startswith(CANDIDATES)]:
        raise UsageError(f"plan {taken[0]!r}: is named like a method of the suite; rename the file")
    if missing := [name for name, plan in plans.items() if plan.head not in heads]:
        raise UsageError(f"plan {missing[0]!r}: was made for loss head {plans[missing[0]].head}; add that to --heads")


@dataclass(frozen=True, kw_only=True)
class Scan:
    """All candidates of a method under one head, and those of them that may be the fastest (a setting that stores more is faster)."""

    tried: list[Setting]
    contenders: list[Setting]


class _Suite:
    """The measurements in their order. Peaks, errors and settings are by the name on the bench with the head (`gc@full`)."""

    def __init__(self, bench: PeerBench, *, plans: Mapping[str, FrozenPlan], heads: Sequence[str], peers: Sequence[str], risk: float, stages: Stages | None, progress: Progress) -> None:
        self.bench, self.plans, self.heads, self.peers, self.risk, self.stages, self.progress = bench, plans, heads, peers, risk, stages, progress
        self.clock = int(clock_of(bench.device) == "cpu")
        """0: wall, 1: CPU time"""
        self.cap_bytes = 0
        self.peaks: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.settings: dict[str, tuple[str, str]] = {}
        """of each row: its method, and its setting in words"""
        self.candidates: list[Candidate] = []
        self.left_out: dict[str, str] = {}

    def measure_simple(self) -> None:
        """Baselines, peers without settings and plans: gradients and peaks. Peers that this model cannot run are left out."""
        for name in [name for name in self.peers if name in FIXED]:
            self._or_leave_out(name, lambda name=name: self.bench.add_peer(name, FIXED[name](self.bench.device)))
        if "paper-dp" in self.peers:
            self._or_leave_out("paper-dp", lambda: self.bench.add_peer(paper_dp.ALL_LOSSY, pack_mlp(UNSCALED, names=paper_dp.LOSSY)))
        simple = [name for name in self.peers if name not in SCANNED and name not in self.left_out]
        for head in self.heads:
            names = [f"{name}{HEAD_MARK}{head}" for name in simple + [name for name, plan in self.plans.items() if plan.head == head]]
            self.settings |= {name: (name.partition(HEAD_MARK)[0], "") for name in names}
            self.compare_gradients(head)
        for position, name in enumerate(self.settings):
            self.progress("measuring peaks", position, len(self.settings))
            self.peaks[name] = self._measured_peak(name)

    def _once(self, part: str, measure: Callable[[], Any]) -> Any:
        """What was measured before, or is now; JSON values."""
        return measure() if self.stages is None else self.stages.recall(part, measure)

    def _measured_peak(self, name: str) -> int:
        return self._once(f"peak of {name}", lambda: self.bench.peak_bytes(name))

    def _times(self, part: str, names: Sequence[str], *, repeats: int, progress: Progress) -> dict[str, Samples]:
        """Interleaved updates of methods that are compiled before."""

        def measure() -> dict[str, Samples]:
            for name in names:
                self.bench.compile(name)
            return self.bench.time_updates(names, repeats=repeats, progress=progress)

        return self._once(part, measure)

    def time_rows(self, repeats: int) -> dict[str, Samples]:
        """All rows, one whole repeat after the other."""
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in self.settings}
        for repeat in range(repeats):

            def tell(what: str, done: int, total: int, before: int = repeat) -> None:
                self.progress(what, before * total + done, repeats * total)

            for name, pairs in self._times(f"repeat {repeat}", list(self.settings), repeats=1, progress=tell).items():
                samples[name] += pairs
        return samples

    def _or_leave_out(self, method: str, do: Callable[[], None]) -> None:
        try:
            do()
        except HiloreError as error:
            self.left_out[method] = str(error)

    def compare_gradients(self, head: str) -> None:
        """Errors of the rows of a head that have none yet; a peer whose gradient is not finite is left out."""
        waiting = [name for name in self.settings if name.endswith(HEAD_MARK + head) and name not in self.errors]
        exact = cache(lambda: self.bench.gradients_by(f"none{HEAD_MARK}{head}"))
        for position, name in enumerate(waiting):
            self.progress(f"comparing gradients, {head} head", position, len(waiting))
            method = self.settings[name][0]
            error = self._once(f"error of {name}", lambda name=name, method=method: self._gradient_error(name, exact, may_fail=method not in self.plans))
            if error == NOT_FINITE:
                self.left_out[method] = "its gradient is not finite"
                del self.settings[name]
            else:
                self.errors[name] = error

    def _gradient_error(self, name: str, exact: Callable[[], dict[str, Tensor]], *, may_fail: bool) -> float | str:
        """NOT_FINITE where that may be. Raises PlanMismatchError where it may not."""
        reference = exact()
        try:
            return gradient_error(self.bench.gradients_by(name), reference)
        except PlanMismatchError:
            if may_fail:
                return NOT_FINITE
            raise

    # --- methods with settings

    def choose_settings(self) -> None:
        """Of each method with settings and each head the fastest that fits, or the smallest; then its gradients."""
        for name in [name for name in self.peers if name in SCANNED and name not in self.left_out]:
            self._or_leave_out(name, lambda name=name: self._scan(name))
        for head in self.heads:
            self.compare_gradients(head)

    def _scan(self, method: str) -> None:
        risks = np.array(self._once("risks of paper-dp", lambda: paper_dp.measure_risks(self.bench, progress=self.progress).tolist())) if method == "paper-dp" else None
        for head in self.heads:
            scan = self._scan_paper(head, risks) if risks is not None else {"partial-gc": self._scan_partial_gc, "membudget": self._scan_membudget}[method](head)
            self._keep(method, head, scan)

    def _try(self, setting: Setting, head: str) -> int:
        """Measured peak of a candidate under a head."""
        name = f"{setting.name}{HEAD_MARK}{head}"
        if name not in self.peaks:
            self.progress(f"trying {setting.words}, {head} head", 0, 1)
            if not self.bench.has_peer(setting.name):
                self.bench.add_peer(setting.name, setting.wrap)
            self.peaks[name] = self._measured_peak(name)
        return self.peaks[name]

    def _scan_partial_gc(self, head: str) -> Scan:
        """The first layers checkpointed; layers that store spread evenly; every k-th checkpointed."""
        layers = len(self.bench.layers)
        if layers < 2:
            raise UsageError("the model has one layer: none can be left out of checkpointing")

        def leading(stored: int) -> Setting:
            return Setting(name=f"first-{layers - stored}", words=f"first {layers - stored} of {layers} layers checkpointed", wrap=checkpoint_some(range(layers - stored)))

        def spread(stored: int) -> Setting:
            return Setting(name=f"spread-{layers - stored}", words=f"{layers - stored} of {layers} layers checkpointed, evenly spread", wrap=checkpoint_some(all_but_spread(layers, stored)))

        scans = [self._most_that_fits(family, layers, head) for family in (leading, spread)]
        periodic = []
        for k in [k for k in EVERY if k < layers]:
            periodic.append(Setting(name=f"every-{k}", words=f"one layer in {k} checkpointed", wrap=checkpoint_some(every_kth(layers, k))))
            if self._try(periodic[-1], head) > self.cap_bytes:
                break  # the others store more
        return Scan(tried=[*scans[0].tried, *scans[1].tried, *periodic], contenders=[*scans[0].contenders, *scans[1].contenders, *periodic])

    def _most_that_fits(self, family: Callable[[int], Setting], layers: int, head: str) -> Scan:
        """The most of the layers that may store."""
        tried: dict[int, Setting] = {}

        def peak(stored: int) -> int:
            tried[stored] = family(stored)
            return self._try(tried[stored], head)

        none_peak, gc_peak = (self.peaks[f"{name}{HEAD_MARK}{head}"] for name in BASELINES)
        stored = most_that_fits(peak, layers=layers, cap_bytes=self.cap_bytes, gc_peak=gc_peak, none_peak=none_peak)
        return Scan(tried=list(tried.values()), contenders=[tried[stored]] if stored else [])

    def _scan_membudget(self, head: str) -> Scan:
        tried = [Setting(name=f"membudget-{budget:g}", words=f"activation memory budget {budget:g}", wrap=compile_within(budget)) for budget in MEMORY_BUDGETS]
        for setting in tried:
            self._try(setting, head)
        return Scan(tried=tried, contenders=tried)

    def _scan_paper(self, head: str, risks: np.ndarray) -> Scan:
        """One solution, and another with less room while the measured peak is over the cap."""
        gc_peak, none_peak = (self.peaks[f"{name}{HEAD_MARK}{head}"] for name in BASELINES[::-1])
        measure = partial(paper_dp.measure_costs, self.bench, head=head, gc_peak=gc_peak, none_peak=none_peak, clock=self.clock, kappa_eps=risks, progress=self.progress)
        kept = self._once(f"costs of paper-dp, {head} head", lambda: {name: array.tolist() for name, array in vars(measure()).items()})
        costs = paper_dp.LayerCosts(**{name: np.array(values) for name, values in kept.items()})

        def setting(actions: str) -> Setting:
            return Setting(name=f"paper-{actions}", words=", ".join(f"{actions.count(letter)} {letter}" for letter in paper_dp.ACTIONS), wrap=paper_dp.run_actions(actions))

        tried = paper_dp.settle_actions(costs, cap_bytes=self.cap_bytes, gc_peak=gc_peak, risk=self.risk, measured_peak=lambda actions: self._try(setting(actions), head))
        return Scan(tried=[setting(actions) for actions, _ in tried], contenders=[setting(tried[-1][0])])

    def _keep(self, method: str, head: str, scan: Scan) -> None:
        """Note the candidates, and make the best a row."""
        peaks = {setting.name: self.peaks[f"{setting.name}{HEAD_MARK}{head}"] for setting in scan.tried}
        fitting = {setting.name: setting for setting in scan.contenders if peaks[setting.name] <= self.cap_bytes}
        step_us: dict[str, float] = {}
        if len(fitting) > 1:
            samples = self._times(f"short timings of {method}, {head} head", [f"{name}{HEAD_MARK}{head}" for name in fitting], repeats=SHORT_REPEATS, progress=self.progress)
            step_us = {name.partition(HEAD_MARK)[0]: median(pair[self.clock] for pair in pairs) for name, pairs in samples.items()}
        chosen = min(step_us, key=step_us.__getitem__) if step_us else next(iter(fitting), min(peaks, key=peaks.__getitem__))
        words = {setting.name: setting.words for setting in scan.tried}
        self.candidates += [Candidate(method=method, head=head, setting=words[name], peak_bytes=peak, fits=peak <= self.cap_bytes, step_us=step_us.get(name), chosen=name == chosen) for name, peak in peaks.items()]
        self.settings[f"{chosen}{HEAD_MARK}{head}"] = (method, words[chosen])

    # --- the result

    def rows(self, samples: Mapping[str, Samples]) -> list[SuiteRow]:
        """By head, in the order peers are named, ours last."""
        order = [*PEERS, *self.plans]
        best = {head: self._best_peer(samples, head) for head in self.heads}
        names = sorted(self.settings, key=lambda name: (self.heads.index(name.partition(HEAD_MARK)[2]), order.index(self.settings[name][0])))
        return [self._row(name, samples, best[name.partition(HEAD_MARK)[2]]) for name in names]

    def _best_peer(self, samples: Mapping[str, Samples], head: str) -> str | None:
        peers = [name for name, (method, _) in self.settings.items() if name.endswith(HEAD_MARK + head) and method not in self.plans and self.peaks[name] <= self.cap_bytes]
        return min(peers, key=lambda name: median(pair[self.clock] for pair in samples[name]), default=None)

    def _row(self, name: str, samples: Mapping[str, Samples], best: str | None) -> SuiteRow:
        method, setting = self.settings[name]
        head = name.partition(HEAD_MARK)[2]
        own, gc, none = ([pair[self.clock] for pair in samples[which]] for which in (name, f"gc{HEAD_MARK}{head}", f"none{HEAD_MARK}{head}"))
        gains = _with_interval([theirs / mine for theirs, mine in zip(gc, own, strict=True)])
        recovered = _with_interval([recovered_share(*times) for times in zip(gc, own, none, strict=True)])
        beside = (None, None, None) if best is None else _with_interval([theirs[self.clock] / mine for theirs, mine in zip(samples[best], own, strict=True)])
        return SuiteRow(
            method=method,
            head=head,
            setting=setting,
            ours=method in self.plans,
            fits=self.peaks[name] <= self.cap_bytes,
            wall_us=median(wall for wall, _ in samples[name]),
            cpu_us=median(cpu for _, cpu in samples[name]),
            peak_bytes=self.peaks[name],
            rel_error=self.errors[name],
            **dict(zip(("speedup_vs_gc", "speedup_low", "speedup_high"), gains, strict=True)),
            **dict(zip(("vs_best_peer", "vs_best_peer_low", "vs_best_peer_high"), beside, strict=True)),
            **dict(zip(("recovered", "recovered_low", "recovered_high"), recovered, strict=True)),
        )


def most_that_fits(peak: Callable[[int], int], *, layers: int, cap_bytes: int, gc_peak: int, none_peak: int) -> int:
    """The most layers, under all of them, that may store instead of being checkpointed; 0 where none may. `peak` measures a number of them.

    Peaks grow by about as much with each layer: guesses lie on the line between what is known; after a few that were wrong, in the middle.
    """
    known = {0: gc_peak, layers: none_peak}
    low, high = 0, layers
    while high - low > 1:
        guess = (low + high) // 2
        if len(known) < 2 + GUESSES and known[high] > known[low]:
            guess = low + (cap_bytes - known[low]) * (high - low) // (known[high] - known[low])
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = peak(guess)
        low, high = (guess, high) if known[guess] <= cap_bytes else (low, guess)
    return low


def _with_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    return (median(ratios), *paired_interval(ratios))
