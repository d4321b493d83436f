"""The dry run that binds a plan, and the comparison of methods, on a tiny model with plans made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import hand_made_plan, planned_variant

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import apply_plan, check_size, gradient_error, paired_interval, run_bench
from hilore_cli.errors import PlanMismatchError, ProfileError, UsageError
from hilore_cli.exposure import TrlLoss
from hilore_cli.files import load_frozen_plan, save_json
from hilore_cli.models import decoder_layers
from hilore_cli.schema import Pattern, Variant, freeze

PATTERNS = {"A": Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "add": "store"})}
BATCH, HELDOUT = (synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=seed) for seed in (0, 1))


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def applied():
    """A model, and its plan with the figures of a dry run."""
    torch.set_num_threads(1)
    model = build_tiny("llama")
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"])
    return model, apply_plan(model, plan, [BATCH], heldout=[HELDOUT], emit_anyway=False, progress=silent)


def test_apply_measures_and_freezes(applied, tmp_path) -> None:
    model, frozen = applied
    measured = frozen.measured
    assert 0 < measured.rel_error < 0.05
    assert measured.gc_peak_bytes > 0
    assert measured.peak_bytes > 4 * sum(p.numel() * 4 for p in model.parameters()) * 0.99, "weights, gradients and two moments are in it"
    assert frozen.variants == [Variant(max_tokens=96, max_length=24, layers=["A", "A"])]
    assert frozen.layer_fqns == ["model.layers.0", "model.layers.1"]
    save_json(frozen, tmp_path / "plan.json")
    assert load_frozen_plan(tmp_path / "plan.json") == frozen
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))


def test_heldout_batch_is_what_the_error_is_measured_on(applied) -> None:
    model, frozen = applied
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"])
    same = apply_plan(model, plan, [BATCH], emit_anyway=False, progress=silent)
    assert same.measured.batch_digest == plan.batch.digest != frozen.measured.batch_digest
    assert same.measured.rel_error != frozen.measured.rel_error
    assert same.measured.peak_bytes == frozen.measured.peak_bytes


@pytest.mark.parametrize(("budget", "reason"), [({"cap_bytes": 1000}, r"the dry run peaked at .* over its cap of .*--emit-anyway"), ({"risk": 1e-9}, r"the dry run's gradient error is .* over its risk budget of 1e-09 .*--emit-anyway")])
def test_missed_budget_is_refused_unless_emitted_anyway(applied, budget, reason: str) -> None:
    model, frozen = applied
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"], **budget)
    with pytest.raises(PlanMismatchError, match=reason):
        apply_plan(model, plan, [BATCH], heldout=[HELDOUT], emit_anyway=False, progress=silent)
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))
    emitted = apply_plan(model, plan, [BATCH], heldout=[HELDOUT], emit_anyway=True, progress=silent)
    assert emitted.measured == frozen.measured, "the figures stay in the file"


def test_apply_refuses_other_models_and_larger_batches(applied) -> None:
    model, _ = applied
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"])
    with pytest.raises(PlanMismatchError, match="made for dtype float32"):
        apply_plan(build_tiny("llama", dtype=torch.bfloat16), plan, [BATCH], emit_anyway=False, progress=silent)
    larger = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=20, group_size=4, seed=0)
    with pytest.raises(PlanMismatchError, match=r"up to 96 tokens in rows of up to 24, the micro-batch has 112 in rows of 28"):
        apply_plan(model, plan, [BATCH], heldout=[larger], emit_anyway=False, progress=silent)


def test_bench_compares_three_methods(applied) -> None:
    model, frozen = applied
    report = run_bench(model, frozen, [("synthetic", BATCH)], repeats=2, progress=silent)
    none, gc, plan = report.methods
    assert [row.name for row in report.methods] == ["none", "gc", "plan"]
    assert none.rel_error == gc.rel_error == 0.0
    assert 0 < plan.rel_error == report.rel_error == report.measured.rel_error < 0.05
    assert none.peak_bytes > plan.peak_bytes == report.measured.peak_bytes
    assert report.peak_vs_gc == plan.peak_bytes / gc.peak_bytes
    assert gc.speedup_vs_gc == gc.speedup_low == gc.speedup_high == 1.0
    assert all(row.wall_us > 0 and row.cpu_us > 0 and row.speedup_low <= row.speedup_vs_gc <= row.speedup_high for row in report.methods)
    assert report.predicted.peak_bytes == frozen.predicted.peak_bytes
    assert report.plan_digest == frozen.digest
    assert (none.recovered, gc.recovered) == (1.0, 0.0) or none.cpu_us >= gc.cpu_us, "checkpointing that costs nothing leaves nothing to recover"
    assert all(row.recovered_low <= row.recovered <= row.recovered_high for row in report.methods)
    assert report.recovered == plan.recovered
    assert [(b.source, b.task, b.digest) for b in report.batches] == [("synthetic", "synthetic", frozen.batch.digest)]


def test_exact_plan_has_error_zero() -> None:
    model = build_tiny("llama")
    plan = hand_made_plan(model, BATCH, {"A": Pattern(actions={"add": "store"})}, ["A", "A"], risk=0.0)
    assert apply_plan(model, plan, [BATCH], heldout=[HELDOUT], emit_anyway=False, progress=silent).measured.rel_error == 0.0


# ------------------------------------------------------------------------------------------------- updates of micro-batches


def two_batches():
    """An update of two: one as large as the profiled one with a row without gradient, and a shorter one of tiny advantages."""
    short = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=8, group_size=4, seed=2)
    rows = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None]
    return [replace(BATCH, advantages=BATCH.advantages * rows), replace(short, advantages=short.advantages * 0.01)]


@pytest.fixture(scope="module")
def of_update():
    """A plan with a careful and a bold pattern: bold on short micro-batches, and on long ones of low exposure."""
    torch.set_num_threads(1)
    model = build_tiny("llama")
    patterns = {"careful": Pattern(default="store"), "bold": Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "add": "compress:int4"})}
    variants = [planned_variant(["bold"] * 2, max_tokens=64, max_length=24), planned_variant(["bold"] * 2, max_tokens=96, max_length=24, max_exposure=0.5), planned_variant(["careful"] * 2, max_tokens=96, max_length=24)]
    plan = hand_made_plan(model, BATCH, patterns, ["careful"] * 2, variants=variants, micro_batches=2)
    return model, plan, apply_plan(model, plan, two_batches(), emit_anyway=False, progress=silent)


def test_apply_runs_the_update_under_its_variants(of_update) -> None:
    """The short micro-batch alone is changed by the plan, and it is a tiny part of the update's gradient."""
    model, plan, frozen = of_update
    assert [v.label for v in frozen.variants] == ["up to 64 tokens", "up to 96 tokens, exposure up to 0.5", "up to 96 tokens"]
    assert frozen.micro_batches == 2
    assert 0 < frozen.measured.rel_error < 1e-3
    alone = apply_plan(model, plan, two_batches(), heldout=[two_batches()[1]], emit_anyway=False, progress=silent)
    assert alone.measured.rel_error > 10 * frozen.measured.rel_error
    assert alone.measured.peak_bytes == pytest.approx(frozen.measured.peak_bytes, abs=1024), "the peak is of the update, whatever the error is judged on"
    exact = apply_plan(model, plan, two_batches(), heldout=[two_batches()[0]], emit_anyway=False, progress=silent)
    assert exact.measured.rel_error == 0.0
    # of two long ones the second has a relative exposure of less than 0.5: it is compressed
    weak = replace(BATCH, advantages=BATCH.advantages * 0.1)
    assert apply_plan(model, plan, [BATCH], heldout=[BATCH, weak], emit_anyway=False, progress=silent).measured.rel_error > 0


def test_an_update_without_gradient_is_refused(of_update) -> None:
    model, plan, frozen = of_update
    flat = replace(BATCH, advantages=torch.zeros_like(BATCH.advantages))
    with pytest.raises(ProfileError, match="all advantages are zero"):
        apply_plan(model, plan, [flat], emit_anyway=True, progress=silent)
    with pytest.raises(ProfileError, match="all advantages are zero"):
        run_bench(model, frozen, [("flat", flat)], repeats=1, progress=silent)
    assert apply_plan(model, plan, [flat], heldout=[BATCH, flat], emit_anyway=True, progress=silent).measured.rel_error == 0.0


def test_bench_against_another_plan_and_without_zero_rows(of_update) -> None:
    model, _, frozen = of_update
    other = freeze(frozen.model_copy(update={"variants": [Variant(max_tokens=96, max_length=24, layers=["bold"] * 2)], "name": "other"}))
    sources = list(zip(("long", "short"), two_batches(), strict=True))
    report = run_bench(model, frozen, sources, repeats=2, progress=silent, also=["recompute"], others={"all-bold": other}, skip=True)
    rows = {row.name: row for row in report.methods}
    assert list(rows) == ["none", "gc", "recompute", "plan", "all-bold", "gc+skip", "plan+skip"]
    assert rows["recompute"].rel_error == 0.0
    assert rows["gc+skip"].rel_error < 1e-6, "the same gradient to rounding"
    assert rows["gc+skip"].peak_bytes < rows["gc"].peak_bytes, "a row of the longer one is left out"
    assert 0 < rows["plan"].rel_error < rows["all-bold"].rel_error
    assert rows["plan+skip"].rel_error == pytest.approx(rows["plan"].rel_error, rel=0.5)
    assert [b.source for b in report.batches] == ["long", "short"]
    assert report.predicted.rel_error == frozen.update.rel_error
    assert report.predicted.step_us == frozen.update.step_us


def test_skipping_what_cannot_be_skipped_is_refused(of_update) -> None:
    model, _, frozen = of_update
    kl = replace(BATCH, loss=TrlLoss(num_items_in_batch=500, beta=0.1), ref_logps=torch.zeros_like(BATCH.advantages))
    with pytest.raises(UsageError, match="cannot be skipped"):
        run_bench(model, frozen, [("kl", kl)], repeats=1, progress=silent, skip=True)


# ----------------------------------------------------------------------------------------------------------------- figures


def test_paired_interval_by_hand() -> None:
    """Up to 5 samples the range; 6 to 8 drop none, 9 drop one at each end (1 - 2 x (1 + 9) / 2^9 = 0.961), 12 drop two."""
    assert paired_interval([1.2]) == (1.2, 1.2)
    assert paired_interval([1.3, 1.1, 1.2]) == (1.1, 1.3)
    assert paired_interval(range(8)) == (0, 7)
    assert paired_interval(range(9)) == (1, 7)
    assert paired_interval(range(12)) == (2, 9)
    for n in range(6, 40):
        low, high = paired_interval(range(n))
        assert high == n - 1 - low
        assert 1 - 2 * sum(comb(n, i) for i in range(low + 1)) / 2**n >= 0.95, "coverage of the order statistics low and high"
        assert 1 - 2 * sum(comb(n, i) for i in range(low + 2)) / 2**n < 0.95, "one more at each end is too many"


def test_gradient_error_is_zero_only_when_bitwise_equal() -> None:
    exact = {"w": torch.ones(4, dtype=torch.float64)}
    assert gradient_error({"w": torch.ones(4, dtype=torch.float64)}, exact) == 0.0
    assert gradient_error({"w": torch.full((4,), 1.5, dtype=torch.float64)}, exact) == pytest.approx(0.5)
    tiny = exact["w"].clone()
    tiny[0] = -0.0
    assert gradient_error({"w": tiny}, exact) > 0


def test_micro_batches_above_the_largest_variant_are_refused() -> None:
    variants = [Variant(max_tokens=200, max_length=48, layers=["A", "A"]), Variant(max_tokens=32, layers=["B", "B"])]

    def check(rows: int, length: int) -> None:
        check_size("p", variants, synthetic_micro_batch(vocab_size=50, rows=rows, prompt_tokens=length // 2, completion_tokens=length - length // 2, group_size=2, seed=0))

    for rows, length in ((2, 4), (2, 16), (2, 17), (4, 48)):
        check(rows, length)
    with pytest.raises(PlanMismatchError, match=r"up to 200 tokens in rows of up to 48, the micro-batch has 240 in rows of 24"):
        check(10, 24)
    with pytest.raises(PlanMismatchError, match="120 in rows of 60"):
        check(2, 60)


def test_gradient_that_is_not_finite_is_refused() -> None:
    exact = {"w": torch.ones(2)}
    with pytest.raises(PlanMismatchError, match="not finite"):
        gradient_error({"w": torch.tensor([1.0, float("nan")])}, exact)
