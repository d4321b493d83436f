"""A layer that torch cannot capture whole: named with torch's reason, planned as checkpointing makes it, carried out and benched; gradients equal, peaks as predicted."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import differing
from torch import nn

from hilore_cli import attach
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import apply_plan, run_bench
from hilore_cli.errors import CaptureError, MutatingLayerError, PlanMismatchError
from hilore_cli.files import load_frozen_plan, load_plan_file, load_profile, save_json
from hilore_cli.grpo import GrpoConfig, gradients
from hilore_cli.models import decoder_layers
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, measure_layers, profile_update, record_step
from hilore_cli.schema import FrozenPlan, Pattern, Plan, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.stages import Stages
from hilore_cli.step_planner import time_scale
from hilore_cli.timeline import simulate_step
from hilore_cli.views.profile import profile_view
from hilore_cli.workbench import Workbench

REQUEST = ProfileRequest(name="tiny", source="tiny", task="none", sources=["a", "b"], codecs=["int8"], config=GrpoConfig(head="full"), repeats=1)
BATCH, OTHER = (synthetic_micro_batch(vocab_size=97, rows=8, prompt_tokens=16, completion_tokens=n, group_size=4, seed=seed) for seed, n in ((0, 48), (1, 32)))
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}


class Breaking(nn.Module):
    """An MLP with a graph break behind it: nothing in eager mode, and what fullgraph refuses."""

    def __init__(self, mlp: nn.Module, *, counts: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        if counts:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if hasattr(self, "seen"):  # the buffer is there or not, as in layers that count
            self.seen += 1
        result = self.mlp(x)
        torch._dynamo.graph_break()
        return result


def breaking_llama(*broken: int, layers: int = 3, **options):
    """A llama whose layers `broken` cannot be captured; the weights are those of one without."""
    model = build_tiny("llama", num_hidden_layers=layers, **SHAPE)
    for index in broken:
        layer = model.model.layers[index]
        layer.mlp = Breaking(layer.mlp, **options)
    return model


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[nn.Module, Profile, list[str]]:
    """A model whose middle layer breaks, its profile, and the warnings of profiling."""
    torch.set_num_threads(1)
    model, folder = breaking_llama(1), tmp_path_factory.mktemp("profile") / "tiny"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = profile_update(model, [("a", BATCH), ("b", OTHER)], REQUEST, folder=folder, progress=silent)
    assert load_profile(folder) == profile
    return model, profile, [str(w.message) for w in caught if "capture" in str(w.message)]


def test_profile_names_layer_and_reason_once(profiled) -> None:
    _, profile, told = profiled
    assert [row.fallback is not None for row in profile.layers] == [False, True, False]
    assert "graph_break" in profile.layers[1].fallback
    (warning,) = told
    assert warning.startswith("model.layers.1: torch cannot capture the layer whole (Unsupported: ")
    assert profile.layers[1].fallback in warning
    assert warning.endswith("left to torch's checkpoint, which recomputes all of it")
    assert {unit.layer for unit in profile.units} == {0, 2}
    assert [c.name for c in profile.classes] == ["A", "checkpointed LlamaDecoderLayer"]
    assert profile_view(profile)


def test_what_is_measured_eagerly_is_what_a_captured_layer_would_show(profiled, tmp_path: Path) -> None:
    """Gradient norms, noise transfer and risk of all layers, against the same weights without the break."""
    _, broken, _ = profiled
    bench = Workbench(breaking_llama(), [BATCH], REQUEST.config)
    layers, units, _ = measure_layers(bench, record_step(bench), REQUEST, stages=Stages(tmp_path / "whole", key="k"), progress=silent)
    for mine, theirs in zip(broken.layers, layers, strict=True):
        for field in ("grad_norm", "input_grad_norm", "noise_transfer"):
            assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-4), (mine.fqn, field)
    risk = {(u.layer, u.unit): u.rho2 for u in units}
    assert all(u.rho2 == pytest.approx(risk[u.layer, u.unit], rel=1e-3) for u in broken.units)


def test_risk_is_calibrated_through_the_layer(profiled) -> None:
    _, profile, _ = profiled
    assert len(profile.calibration) >= 4
    assert all(0.3 < pair.ratio() < 3 for pair in profile.calibration)


@pytest.fixture(scope="module")
def planned(profiled, tmp_path_factory) -> tuple[Plan, FrozenPlan]:
    """An exact plan, and applied; both through their files."""
    model, profile, _ = profiled
    folder = tmp_path_factory.mktemp("plans")
    plan = solve_plan(profile, cap=parse_cap("1.05x-gc"), risk=0.0, codecs=[], name="exact")
    save_json(plan, folder / "exact.plan.json")
    frozen = apply_plan(model, load_plan_file(folder / "exact.plan.json"), [BATCH], heldout=[OTHER], emit_anyway=False, progress=silent)
    save_json(frozen, folder / "exact.json")
    return plan, load_frozen_plan(folder / "exact.json")


def test_layer_is_planned_as_a_whole(profiled, planned) -> None:
    _, profile, _ = profiled
    plan, frozen = planned
    assert plan.fallback == frozen.fallback == ["model.layers.1"]
    assert plan.patterns[plan.layers[1]] == Pattern()
    assert plan.patterns[plan.layers[0]].actions
    assert len(plan.graph_digests) == 1
    assert frozen.measured.rel_error == 0
    (run,) = (node for node in profile.classes[1].nodes if node.name == "run")
    again_us = time_scale(profile) * run.time_us
    assert 0 < again_us * 0.99 < plan.solver.bound_us <= plan.solver.objective_us, "the layer's recomputation is in every plan, and in the bound"
    assert plan.predicted.step_us == pytest.approx(profile.times.none_us + plan.solver.objective_us, rel=1e-3)


def test_peaks_are_the_predicted_ones(profiled, planned) -> None:
    """Within 2 % of what the update needs beyond weights, gradients and optimizer state: of the plan, and of nothing stored at all."""
    model, profile, _ = profiled
    plan, frozen = planned
    static = profile.account.static_bytes
    assert plan.predicted.peak_bytes - static == pytest.approx(frozen.measured.peak_bytes - static, rel=0.02)
    assert frozen.measured.peak_bytes <= plan.budgets.cap_bytes
    bench = Workbench(model, [BATCH], REQUEST.config)
    bench.leave_to_checkpoint("model.layers.1", reason="breaks")
    recomputed = simulate_step(profile, [Pattern()] * 3)
    assert recomputed.peak_bytes - static == pytest.approx(bench.peak_bytes("recompute") - static, rel=0.02)


def test_attached_plan_has_the_models_gradients(profiled, planned) -> None:
    model, _, _ = profiled
    _, frozen = planned
    exact = gradients(model, [BATCH, OTHER], REQUEST.config)
    with attach(model, frozen) as handle:
        assert differing(gradients(model, [BATCH, OTHER], REQUEST.config), exact) == []
    assert handle.calls.total() == 2 * 2, "two planned layers, two micro-batches"


def test_plan_without_its_note_is_loud(profiled, planned) -> None:
    """The runtime never leaves a layer to checkpoint that the plan does not name."""
    model, _, _ = profiled
    _, frozen = planned
    with attach(model, frozen.model_copy(update={"fallback": []})), pytest.raises(CaptureError, match=r"model\.layers\.1 cannot be captured whole: Unsupported"):
        gradients(model, [BATCH], REQUEST.config)
    with pytest.raises(PlanMismatchError):
        attach(breaking_llama(0), frozen)


def test_bench_runs_it(profiled, planned) -> None:
    model, _, _ = profiled
    _, frozen = planned
    report = run_bench(model, frozen, [("a", BATCH)], repeats=1, progress=silent)
    rows = {row.name: row for row in report.methods}
    assert rows["plan"].rel_error == 0
    assert rows["plan"].peak_bytes == frozen.measured.peak_bytes


def test_lowest_and_highest_layer_may_be_left() -> None:
    model = breaking_llama(0, 2)
    bench = Workbench(model, [BATCH], REQUEST.config)
    record = record_step(bench)
    assert list(bench.uncaptured) == ["model.layers.0", "model.layers.2"]
    assert (sorted(record.left), sorted(record.calls)) == ([0, 2], [1])
    assert differing(record.exact, gradients(model, [BATCH], REQUEST.config)) == []
    assert all("_hilore" not in vars(layer) and "forward" not in vars(layer) for _, layer in decoder_layers(model))
    assert record_step(bench).left.keys() == record.left.keys(), "what is known is not tried again"


def test_no_layer_at_all_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"no decoder layer can be captured whole, so there is nothing to plan; the first: Unsupported: .*graph_break"):
        record_step(Workbench(breaking_llama(0, 1, layers=2), [BATCH], REQUEST.config))


def test_layer_that_counts_its_calls_is_refused() -> None:
    """Checkpointing would run it twice."""
    with pytest.raises(MutatingLayerError, match=r"model\.layers\.1: cannot be captured whole, and writes into its buffer mlp\.seen"):
        record_step(Workbench(breaking_llama(1, counts=True), [BATCH], REQUEST.config))
