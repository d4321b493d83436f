"""Predicted against measured error: the limits that are drawn from pairs, and the whole plans that are tried for them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import build_tiny
from profiles_for_tests import chain_class, make_profile

from hilore_cli.batches import MicroBatch, synthetic_micro_batch
from hilore_cli.calibration import (
    LARGEST_ERROR,
    PAIRS,
    Tried,
    halves_of,
    kappas_of,
    prediction_limit,
    t_quantile,
    trial_plans,
    try_plans,
)
from hilore_cli.choice import RECOMPUTE_ALL
from hilore_cli.grpo import GrpoConfig, gradients
from hilore_cli.profiler import ProfileRequest as Request
from hilore_cli.profiler import measure_layers, record_step
from hilore_cli.schema import CalibrationPair, LayerClass, LayerRow, UnitRow
from hilore_cli.stages import Stages
from hilore_cli.workbench import Workbench

CODECS = ["int8", "int4"]


def silent(*_: object) -> None:
    pass


def pair(ratio: float, *, micro_batch: str = "a", codec: str = "int8") -> CalibrationPair:
    return CalibrationPair(codec=codec, plan="p", micro_batch=micro_batch, heldout=True, predicted_rho2=1e-4, measured_rel_error=math.sqrt(ratio * 1e-4))


# ----------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("freedom", "expected"), [(1, 6.314), (2, 2.920), (3, 2.353), (5, 2.015), (7, 1.895), (10, 1.812), (30, 1.697)])
def test_students_t(freedom: int, expected: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(expected, abs=0.02)
    assert t_quantile(0.05, freedom) == pytest.approx(-expected, abs=0.02)


def test_limit_by_hand() -> None:
    """Log ratios -1 and 1: mean 0, sd sqrt(2), t(0.95, 1) = 6.314."""
    assert prediction_limit([math.exp(-1), math.exp(1)]) == pytest.approx(math.exp(6.314 * math.sqrt(2) * math.sqrt(1.5)), rel=0.01)
    assert prediction_limit([0.7] * 9) == pytest.approx(0.7), "no scatter, no margin"
    assert prediction_limit([0.7]) == pytest.approx(1.4)
    ratios = [0.5, 0.8, 1.1, 1.3, 0.9]
    assert prediction_limit([3 * r for r in ratios]) == pytest.approx(3 * prediction_limit(ratios))


@pytest.mark.parametrize("count", [3, 8, 16])
def test_limit_covers_a_further_draw(count: int) -> None:
    """Nineteen in twenty, whatever the mean and the scatter (4000 seeded draws: 0.35 % standard deviation)."""
    rng = random.Random(count)
    below = 0
    for _ in range(4000):
        mean, spread = rng.uniform(-2, 2), rng.uniform(0.05, 1.5)
        *ratios, further = (rng.lognormvariate(mean, spread) for _ in range(count + 1))
        below += further <= prediction_limit(ratios)
    assert below / 4000 == pytest.approx(0.95, abs=0.015)


def test_kappa_of_each_codec() -> None:
    pairs = [pair(r, micro_batch=m) for r, m in ((0.5, "a"), (0.6, "a"), (0.8, "b"), (0.7, "b"))] + [pair(2.0, codec="int4")]
    with pytest.warns(UserWarning, match="codec (int8|int4): calibrated on [41] pairs of plan and micro-batch; give more micro-batches"):
        int8, int4 = kappas_of(pairs, ["int8", "int4", "int2"])
    assert (int8.codec, int8.pairs, int8.micro_batches, int8.quantile) == ("int8", 4, 2, 0.95)
    assert int8.value == pytest.approx(prediction_limit([0.5, 0.6, 0.8, 0.7]))
    assert (int4.pairs, int4.value, int4.coverage) == (1, pytest.approx(4.0), 0.0), "there is no other pair to judge it by"
    assert kappas_of([], ["int8"]) == []
    exact = pair(0.5).model_copy(update={"measured_rel_error": 0.0})
    assert kappas_of([exact], ["int8"]) == [], "a plan that changed nothing says nothing"
    assert kappas_of([exact, *[pair(0.5)] * 8], ["int8"])[0].pairs == 8
    with pytest.warns(UserWarning, match="none of them on another micro-batch than the profiled one"):
        kappas_of([pair(0.5).model_copy(update={"heldout": False})] * 8, ["int8"])


def test_coverage_is_of_pairs_that_the_limit_has_not_seen() -> None:
    """Each pair against the limit of the other micro-batches' pairs; with one micro-batch, of the other pairs."""
    calm = [0.50, 0.52, 0.48, 0.51]
    pairs = [pair(r, micro_batch="a") for r in calm] + [pair(r, micro_batch="b") for r in (*calm[:3], 5.0)]
    (kappa,) = kappas_of(pairs, ["int8"])
    assert prediction_limit(calm) < 5.0 < prediction_limit([*calm[:3], 5.0])
    assert kappa.coverage == 7 / 8
    (alone,) = kappas_of([pair(r) for r in (*calm, *calm, 5.0)], ["int8"])
    assert alone.coverage == 8 / 9


# ------------------------------------------------------------------------------------------------------------- trial plans


def rows_of(layers: int = 6, **options: object) -> tuple[list[UnitRow], list[LayerClass], list[LayerRow]]:
    profile = make_profile(layers=layers, layer_class=chain_class(blocks=2), **options)
    return profile.units, profile.classes, profile.layers


@pytest.mark.parametrize("scale", [1.0, 50.0, 2000.0])
def test_trial_plans_keep_to_the_largest_error(scale: float) -> None:
    """Thinned where units are risky, riskiest layers first; what they are predicted to do is the sum of what they compress."""
    units, classes, layers = rows_of()
    units = [u.model_copy(update={"rho2": u.rho2 * scale, "replayed_rho2": u.replayed_rho2 * scale}) for u in units]
    counts = {}
    for codec in CODECS:
        patterns, plans = trial_plans(units, classes, layers, codec=codec)
        counts[codec] = len(plans)
        assert len({tuple(plan.layers) for plan in plans}) == len(plans), "no plan twice, thinned or not"
        for plan in plans:
            alone = len(plans) == 1 and sum(name != RECOMPUTE_ALL for name in plan.layers) == 1
            assert 0 < plan.rho2 <= LARGEST_ERROR**2 or alone
            assert len(plan.layers) == 6
            assert {name for name in plan.layers if name != RECOMPUTE_ALL} <= set(patterns)
            field = "replayed_rho2" if plan.words.startswith("input") else "rho2"
            compressed = [(i, unit) for i, name in enumerate(plan.layers) if name != RECOMPUTE_ALL for unit, action in patterns[name].actions.items() if action == f"compress:{codec}"]
            assert plan.rho2 == pytest.approx(sum(getattr(u, field) for u in units if u.codec == codec and (u.layer, u.unit) in compressed))
    if scale == 1.0:
        assert counts["int8"] == 8


def test_calm_units_leave_the_riskiest_out() -> None:
    units, classes, layers = rows_of()
    units = [u.model_copy(update={"rho2": 1e-4 if u.unit == "u-1" else 1e-7, "replayed_rho2": 1e-3}) for u in units]
    patterns, plans = trial_plans(units, classes, layers, codec="int8")
    calm = next(p for name, p in patterns.items() if "-calm-" in name).actions
    everything = next(p for name, p in patterns.items() if "-all-" in name).actions
    assert "u-1" not in calm or calm["u-1"] == "store"
    assert everything["u-1"] == "compress:int8"
    assert "input" not in calm | everything
    assert [p.actions for name, p in patterns.items() if "-input-" in name] == [{"input": "compress:int8"}]
    assert "calm units, 6 of every layer" in {plan.words for plan in plans}


def test_codec_without_units_has_no_plan() -> None:
    assert trial_plans(*rows_of(), codec="int2") == ({}, [])


# -------------------------------------------------------------------------------------------------------------------- tried


def batch(seed: int, *, rows: int = 4, group_size: int = 4, scale: float = 1.0) -> MicroBatch:
    mb = synthetic_micro_batch(vocab_size=97, rows=rows, prompt_tokens=8, completion_tokens=12, group_size=group_size, seed=seed)
    return replace(mb, advantages=mb.advantages * scale)


class Tries:
    """A tiny model with the units of its profiled micro-batch measured; `run` tries plans on others."""

    def __init__(self, folder) -> None:
        torch.set_num_threads(1)
        self.profiled = batch(0)
        self.model = build_tiny("llama")
        self.bench = Workbench(self.model, [self.profiled], GrpoConfig(head="full"))
        record = record_step(self.bench)
        request = Request(name="t", source="t", task="t", sources=["t"], codecs=CODECS, config=GrpoConfig(head="full"))
        self.layers, self.units, self.classes = measure_layers(self.bench, record, request, stages=Stages(folder, key="k"), progress=silent)
        self.exact = record.exact

    def run(self, *others: tuple[str, MicroBatch], codecs=CODECS) -> Tried:
        return try_plans(self.bench, [("profiled", self.profiled), *others], units=self.units, classes=self.classes, layers=self.layers, codecs=codecs, exact=self.exact, progress=silent)

    def norm(self, *batches: MicroBatch) -> float:
        return sum(float(g.double().square().sum()) for g in gradients(self.model, batches, GrpoConfig(head="full")).values()) ** 0.5


@pytest.fixture(scope="module")
def tries(tmp_path_factory) -> Tries:
    return Tries(tmp_path_factory.mktemp("tries") / "unfinished")


def test_two_held_out_micro_batches_give_enough_pairs(tries: Tries) -> None:
    """And the profiled one is tried as well: SmolLM2's plans brought it a tenth more error than the others, so that a limit from those alone was too low."""
    first, second = batch(1), batch(2)
    kept = {name: grad.clone() for name, grad in tries.exact.items()}
    tried = tries.run(("first", first), ("second", second))
    for codec in CODECS:
        mine = [p for p in tried.pairs if p.codec == codec]
        assert sum(p.heldout for p in mine) >= PAIRS
        assert {(p.micro_batch, p.heldout) for p in mine} == {("first", True), ("second", True), ("profiled", False)}
        assert all(p.measured_rel_error > 0 and 0 < p.predicted_rho2 <= LARGEST_ERROR**2 for p in mine)
        assert len({(p.plan, p.micro_batch) for p in mine}) >= PAIRS - 2, "no plan is tried twice on one, where there are enough"
        (kappa,) = kappas_of(mine, [codec])
        print(f"{codec}: kappa {kappa.value:.2f}, coverage {kappa.coverage:.2f}, ratios {sorted(round(p.ratio(), 2) for p in mine)}")
        assert 0.02 < kappa.value < 20
    assert tried.gradient_norms == pytest.approx([tries.norm(b) for b in (tries.profiled, first, second)], rel=1e-4)
    assert tried.update_gradient_norm == pytest.approx(tries.norm(tries.profiled, first, second), rel=1e-4)
    assert tries.bench.batches == [tries.profiled]
    assert all(torch.equal(kept[name], grad) for name, grad in tries.exact.items()), "the profiled gradient is not added to"


def test_without_another_micro_batch_its_halves_are_tried(tries: Tries) -> None:
    tried = tries.run(codecs=["int8"])
    assert len(tried.pairs) >= PAIRS
    assert not any(p.heldout for p in tried.pairs)
    assert {p.micro_batch for p in tried.pairs} == {"part 1 of profiled", "part 2 of profiled"}
    assert tried.gradient_norms == [tried.update_gradient_norm] == pytest.approx([tries.norm(tries.profiled)], rel=1e-4)


def test_micro_batches_without_gradient_are_left_untried(tries: Tries) -> None:
    flat = batch(3, scale=0.0)
    tried = tries.run(("flat", flat), ("other", batch(1)), codecs=["int8"])
    assert tried.gradient_norms[1] == 0.0
    assert tried.gradient_norms[0] > 0 < tried.gradient_norms[2]
    assert {p.micro_batch for p in tried.pairs} == {"other", "profiled"}
    assert tried.update_gradient_norm == pytest.approx(tries.norm(tries.profiled, batch(1)), rel=1e-4)


@pytest.mark.parametrize("flat", [1, 2])
def test_enough_pairs_beside_micro_batches_without_gradient(tries: Tries, flat: int) -> None:
    """One of two held-out ones has a gradient; and where none has one, the halves of the profiled one are tried."""
    others = [("flat", batch(3 + i, scale=0.0)) for i in range(flat)] + [("other", batch(1))] * (2 - flat)
    tried = tries.run(*others, codecs=["int8"])
    assert len(tried.pairs) >= PAIRS
    assert sum(p.heldout for p in tried.pairs) >= PAIRS * (flat == 1)
    assert any(p.heldout for p in tried.pairs) == (flat == 1)
    assert tried.gradient_norms[1 : 1 + flat] == [0.0] * flat


def test_halves_have_a_gradient_each() -> None:
    """Whole groups where both sides have one; else rows, by size of advantage; else the whole."""
    two = batch(0, rows=8)
    first, second = halves_of(two)
    assert (set(first.group_ids.tolist()), set(second.group_ids.tolist())) == ({0}, {1})
    for changed in (batch(0), replace(two, advantages=two.advantages * (two.group_ids == 0)[:, None])):
        halves = halves_of(changed)
        assert len(halves) == 2
        assert sum(half.rows for half in halves) == changed.rows
        assert all(half.has_gradient for half in halves)
    lone = replace(two, advantages=two.advantages * (torch.arange(8) == int(two.advantages.abs().amax(1).argmax()))[:, None])
    assert halves_of(lone) == (lone,)
