"""Whole layers under two budgets: a re-implementation of HiLoRe's published method from its description, to compare with.

Each layer gets one of three actions: H keeps all that it saves, L is H with one large MLP tensor (up_proj's output) cast to float8 e4m3 without a
scale, R replays the layer. Costs add up over layers, and a knapsack over 1024 memory bins x 1024 risk bins picks the actions:

    maximise    sum_l seconds(l, a_l)           time saved over replaying
    subject to  sum_l bytes(l, a_l) <= cap - peak with all layers on R        bytes: marginal peak of one layer
                sum_l kappa_l * eps_l * exposure <= risk                       on L alone

kappa comes from non-negative least squares of the measured gradient error of 16 updates with random layers on L; eps_l is the relative error of the
cast; exposure is sum |omega| of the micro-batch, relative to the update's mean, equal for all layers.

Executed by saved-tensor hooks (L) and torch's checkpoint (R), not by hilore's runtime. Departures: marginal peaks and times are those of the whole
stack (all layers on one action), shared out by the bytes that each layer holds, instead of one run a layer; the cast saturates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hilore_cli.errors import HiloreError
from hilore_cli.grpo import relative_error
from hilore_cli.peers import HEAD_MARK, UNSCALED, Forward, Packing, PeerBench, Wrap, checkpoint_some, pack_mlp, wrapped
from hilore_cli.workbench import Progress

ACTIONS = ("H", "L", "R")
BINS = 1024
PROBES = 16
LOSSY = ("up_proj",)
ALL_LOSSY = "paper-all-L"


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Of H and L on each layer, against R: bytes [layers, 2], microseconds saved [layers, 2], risk of L [layers]."""

    nbytes: np.ndarray
    saved_us: np.ndarray
    risk: np.ndarray


def choose_actions(costs: LayerCosts, *, room_bytes: int, risk: float, bins: int = BINS) -> str:
    """The knapsack by dynamic programming, costs rounded up to whole bins: one letter a layer."""
    layers = len(costs.risk)
    weights = np.zeros((layers, 3, 2), dtype=np.int64)
    weights[:, :2, 0] = _in_bins(costs.nbytes, room_bytes, bins)
    weights[:, 1, 1] = _in_bins(costs.risk, risk, bins)
    best = np.zeros((bins + 1, bins + 1))  # [memory, risk] still to spend
    choices = np.full((layers, bins + 1, bins + 1), 2, dtype=np.int8)
    for layer in range(layers):
        found = best.copy()  # R costs and saves nothing
        for action in (0, 1):
            memory, error = weights[layer, action]
            gain = costs.saved_us[layer, action]
            if memory > bins or error > bins:
                continue
            with_it = np.full_like(best, -np.inf)
            with_it[memory:, error:] = best[: bins + 1 - memory, : bins + 1 - error] + gain
            better = with_it > found
            found[better] = with_it[better]
            choices[layer][better] = action
        best = found
    memory, error, letters = bins, bins, []
    for layer in reversed(range(layers)):
        action = int(choices[layer, memory, error])
        letters.append(ACTIONS[action])
        memory, error = memory - weights[layer, action, 0], error - weights[layer, action, 1]
    return "".join(reversed(letters))


def _in_bins(costs: np.ndarray, budget: float, bins: int) -> np.ndarray:
    """Whole bins of budget / bins, rounded up; more than all of them where there is no budget to take from."""
    if budget <= 0:
        return np.where(costs > 0, bins + 1, 0)
    return np.minimum(np.ceil(np.maximum(costs, 0) * (bins / budget)), bins + 1).astype(np.int64)


def run_actions(actions: str) -> Wrap:
    """The layers under one letter each."""
    lossy, replay = pack_mlp(UNSCALED, names=LOSSY), checkpoint_some(range(len(actions)))
    return lambda position, layer: {"H": lambda: None, "L": lambda: lossy(position, layer), "R": lambda: replay(position, layer)}[actions[position]]()


def measure_costs(bench: PeerBench, *, head: str, gc_peak: int, none_peak: int, clock: int, kappa_eps: np.ndarray, progress: Progress) -> LayerCosts:
    """Marginal peaks and times of H and L under one loss head (`kappa_eps`: what `measure_risks` gave). `clock`: 0 wall, 1 CPU time.

    Adds the method ALL_LOSSY to the bench if it is not there.
    """
    mark = HEAD_MARK + head
    lossy_peak = bench.peak_bytes(ALL_LOSSY + mark)
    samples = bench.time_updates([f"{name}{mark}" for name in ("gc", "none", ALL_LOSSY)], repeats=2, progress=progress)
    gc_us, none_us, lossy_us = (median(pair[clock] for pair in times) for times in samples.values())
    share = held_bytes(bench)
    share = share / share.sum()
    peaks, times = np.array([none_peak - gc_peak, lossy_peak - gc_peak]), np.array([gc_us - none_us, gc_us - lossy_us])
    exposure = 1.0  # of an update relative to its own mean
    return LayerCosts(nbytes=np.outer(share, peaks), saved_us=np.outer(share, times), risk=kappa_eps * exposure)


def held_bytes(bench: PeerBench) -> np.ndarray:
    """[layers]: bytes of distinct memory that a layer saves for backward on the first micro-batch, its parameters left out."""
    held = np.zeros(len(bench.layers))

    def counted(position: int, layer: nn.Module) -> Forward:
        run, seen = layer.forward, {p.untyped_storage()._cdata: p for p in layer.parameters()}

        def count(x: Tensor) -> Tensor:
            if (key := x.untyped_storage()._cdata) not in seen:
                seen[key] = x  # held, so that no address comes twice
                held[position] += x.untyped_storage().nbytes()
            return x

        def forward(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(count, lambda x: x):
                return run(*args, **kwargs)

        return forward

    batches = bench.batches
    try:
        bench.batches = batches[:1]
        with wrapped(bench.layers, counted):
            bench.gradients()
    finally:
        bench.batches = batches
    return held


def measure_risks(bench: PeerBench, *, progress: Progress, seed: int = 0) -> np.ndarray:
    """[layers]: kappa_l * eps_l, the gradient error that L on a layer adds to a micro-batch of the mean exposure."""
    batches, layers = bench.batches, len(bench.layers)
    graded = [batch for batch in batches if batch.has_gradient]
    exposures = {id(batch): batch.weight("scalar") ** 0.5 for batch in graded}
    mean = sum(exposures.values()) / len(graded)
    generator, rows, errors = random.Random(seed), [], []
    try:
        exact: dict[int, dict[str, Tensor]] = {}
        for probe in range(PROBES):
            progress("paper-dp: gradient errors", probe, PROBES)
            batch = graded[probe * len(graded) // PROBES]  # one after the other, so that one exact gradient is held
            bench.batches = [batch]
            if id(batch) not in exact:
                exact = {id(batch): bench.gradients()}
            chosen = set(generator.sample(range(layers), max(1, layers // 2)))
            eps = np.zeros(layers)
            with wrapped(bench.layers, _measured(chosen, eps)):
                found = bench.gradients()
            rows.append(eps * exposures[id(batch)] / mean)
            errors.append(relative_error(found, exact[id(batch)]))
            if not math.isfinite(errors[-1]):
                raise HiloreError("paper-dp: its cast to float8 made a gradient that is not finite; leave it out")
    finally:
        bench.batches = batches
    design = np.array(rows)  # [probes, layers]
    return non_negative_least_squares(design, np.array(errors)) * np.array([column[column > 0].mean() if (column > 0).any() else 0.0 for column in design.T])


def _measured(chosen: set[int], eps: np.ndarray) -> Wrap:
    """L on the chosen layers, noting the cast's relative error."""

    def wrap(position: int, layer: nn.Module) -> Forward | None:
        def encode(flat: Tensor) -> Tensor:
            payload = UNSCALED.encode(flat)
            eps[position] = float((payload.float() - flat.float()).norm() / flat.float().norm().clamp_min(torch.finfo(torch.float32).tiny))
            return payload

        return pack_mlp(Packing(encode=encode, decode=UNSCALED.decode), names=LOSSY)(position, layer) if position in chosen else None

    return wrap


def non_negative_least_squares(design: np.ndarray, target: np.ndarray, *, sweeps: int = 2000) -> np.ndarray:
    """argmin_x |design @ x - target|, x >= 0, by coordinate descent; of several minima the one reached from equal entries."""
    squares = (design**2).sum(0)
    x = np.full(design.shape[1], target.sum() / max(design.sum(), 1e-300))
    rest = target - design @ x
    for _ in range(sweeps):
        for j in np.flatnonzero(squares):
            step = max(x[j] + design[:, j] @ rest / squares[j], 0.0) - x[j]
            x[j] += step
            rest -= step * design[:, j]
    return x


def settle_actions(costs: LayerCosts, *, cap_bytes: int, gc_peak: int, risk: float, measured_peak: Callable[[str], int]) -> Sequence[tuple[str, int]]:
    """Actions and their measured peaks, tried in turn: where additive costs promised too much, the room shrinks by the miss; the last is to be used."""
    room, tried = cap_bytes - gc_peak, []
    for _ in range(4):
        actions = choose_actions(costs, room_bytes=room, risk=risk)
        peak = measured_peak(actions)
        tried.append((actions, peak))
        if peak <= cap_bytes or set(actions) == {"R"}:
            break
        room -= peak - cap_bytes
    return tried
