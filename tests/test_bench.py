"""The dry run that binds a plan, and the comparison of methods, on a tiny model with plans made by hand."""

from __future__ import annotations

from math import comb

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import hand_made_plan

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import apply_plan, gradient_error, layers_for, paired_interval, run_bench
from hilore_cli.errors import PlanMismatchError
from hilore_cli.models import decoder_layers
from hilore_cli.schema import Pattern, Variant, load_frozen_plan, save_json

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
    return model, apply_plan(model, plan, BATCH, heldout=HELDOUT, emit_anyway=False, progress=silent)


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
    same = apply_plan(model, plan, BATCH, heldout=None, emit_anyway=False, progress=silent)
    assert same.measured.batch_digest == plan.batch.digest != frozen.measured.batch_digest
    assert same.measured.rel_error != frozen.measured.rel_error
    assert same.measured.peak_bytes == frozen.measured.peak_bytes


@pytest.mark.parametrize(("budget", "reason"), [({"cap_bytes": 1000}, r"the dry run peaked at .* over its cap of .*--emit-anyway"), ({"risk": 1e-9}, r"the dry run's gradient error is .* over its risk budget of 1e-09 .*--emit-anyway")])
def test_missed_budget_is_refused_unless_emitted_anyway(applied, budget, reason: str) -> None:
    model, frozen = applied
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"], **budget)
    with pytest.raises(PlanMismatchError, match=reason):
        apply_plan(model, plan, BATCH, heldout=HELDOUT, emit_anyway=False, progress=silent)
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))
    emitted = apply_plan(model, plan, BATCH, heldout=HELDOUT, emit_anyway=True, progress=silent)
    assert emitted.measured == frozen.measured, "the figures stay in the file"


def test_apply_refuses_other_models_and_larger_batches(applied) -> None:
    model, _ = applied
    plan = hand_made_plan(model, BATCH, PATTERNS, ["A", "A"])
    with pytest.raises(PlanMismatchError, match="made for dtype float32"):
        apply_plan(build_tiny("llama", dtype=torch.bfloat16), plan, BATCH, heldout=None, emit_anyway=False, progress=silent)
    larger = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=20, group_size=4, seed=0)
    with pytest.raises(PlanMismatchError, match=r"up to 96 tokens in rows of up to 24, the micro-batch has 112 in rows of 28"):
        apply_plan(model, plan, BATCH, heldout=larger, emit_anyway=False, progress=silent)


def test_bench_compares_three_methods(applied) -> None:
    model, frozen = applied
    report = run_bench(model, frozen, BATCH, source="synthetic", task="none", repeats=2, progress=silent)
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


def test_exact_plan_has_error_zero() -> None:
    model = build_tiny("llama")
    plan = hand_made_plan(model, BATCH, {"A": Pattern(actions={"add": "store"})}, ["A", "A"], risk=0.0)
    assert apply_plan(model, plan, BATCH, heldout=HELDOUT, emit_anyway=False, progress=silent).measured.rel_error == 0.0


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


def test_layers_for_takes_the_smallest_variant_that_fits() -> None:
    variants = [Variant(max_tokens=200, max_length=48, layers=["A", "A"]), Variant(max_tokens=32, layers=["B", "B"])]

    def of(rows: int, length: int) -> str:
        return layers_for("p", variants, synthetic_micro_batch(vocab_size=50, rows=rows, prompt_tokens=length // 2, completion_tokens=length - length // 2, group_size=2, seed=0))[0]

    assert [of(2, 4), of(2, 16), of(2, 17), of(4, 48)] == ["B", "B", "A", "A"]
    with pytest.raises(PlanMismatchError, match=r"up to 200 tokens in rows of up to 48, the micro-batch has 240 in rows of 24"):
        of(10, 24)
    with pytest.raises(PlanMismatchError, match="120 in rows of 60"):
        of(2, 60)


def test_gradient_that_is_not_finite_is_refused() -> None:
    exact = {"w": torch.ones(2)}
    with pytest.raises(PlanMismatchError, match="not finite"):
        gradient_error({"w": torch.tensor([1.0, float("nan")])}, exact)
