"""The online guard: its figure is the true gradient error, it leaves the plan when that is over the budget, and nothing else changes.

Two ranks: this file run by torchrun (`main`), at its end.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import LIMIT, attach_each, attach_one, differing, frozen_plan, make_ids, step_gradients, step_loss
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hilore_cli import attach
from hilore_cli.codecs import cpu
from hilore_cli.errors import HiloreError, PlanMismatchError, UsageError
from hilore_cli.gradient_error import LayerCall, _layer_errors
from hilore_cli.grpo import relative_error
from hilore_cli.guard import GuardRecord, is_sampled
from hilore_cli.models import decoder_layers
from hilore_cli.peak import trace_memory
from hilore_cli.replay import KeptForward
from hilore_cli.runtime import RECOMPUTE_ALL, Handle, attach_patterns
from hilore_cli.schema import Pattern, Variant

STORE, RECOMPUTE = Pattern(default="store"), Pattern()
MIXED = Pattern(actions={"mlp.gate_proj.mm": "store", "self_attn.v_proj.mm": "store", "add": "store"})
GATE = Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "mlp.up_proj.mm": "store", "add": "store"})
CALM = Pattern(default="store", actions={"mlp.up_proj.mm": "compress:int4", "self_attn.sdpa.out": "compress:int8", "add": "compress:int8"})
INPUT = Pattern(actions={"input": "compress:int8"})
QUERIES = Pattern(default="store", actions={"self_attn.add": "compress:int8"})
PATTERNS = {"store": STORE, "recompute": RECOMPUTE, "mixed": MIXED, "gate": GATE, "calm": CALM, "input": INPUT, "queries": QUERIES}
BATCH = make_ids(2, 14, padded=True)
Batch = tuple[Tensor, Tensor | None]


class Bench:
    """One llama of three layers whose patterns are compiled once for all tests: compiling takes most of their time."""

    def __init__(self, **options: object) -> None:
        torch.set_num_threads(1)
        self.model = build_tiny("llama", num_hidden_layers=3, **options)
        self.fqns = [fqn for fqn, _ in decoder_layers(self.model)]
        self._weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._handle = attach_patterns(self.model, patterns=PATTERNS, variants=[Variant(max_tokens=LIMIT, layers=["store"] * 3)], name="test")
        self._handle.detach()

    @contextmanager
    def under(self, *names: str) -> Iterator[Handle]:
        """Attached, the layers' patterns by name (one: of all); afterwards there is no plan, no guard, and the first weights are back."""
        self._handle.program.choice.variants = [Variant(max_tokens=LIMIT, layers=list(names) if len(names) > 1 else [*names] * 3)]
        self._handle.program.choice.served.clear()
        try:
            with self._handle:
                yield self._handle
        finally:
            self._handle.unguard()
            self.restore()

    def restore(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model.load_state_dict(self._weights)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def dropping() -> Bench:
    """With dropout in its attention."""
    return Bench(attn_implementation="eager", attention_dropout=0.2)


def measured(model: nn.Module, handle: Handle, batch: Batch = BATCH, **step: object) -> tuple[GuardRecord, dict[str, Tensor]]:
    """One guarded step's record and gradients; the budget is out of reach."""
    guard = handle.guard(every=1, budget=1e9)
    try:
        gradients = step_gradients(model, *batch, **step)
        assert len(guard.history) == 1
        return guard.history[0], gradients
    finally:
        handle.unguard()


@contextmanager
def warned() -> Iterator[list[str]]:
    """What the guard warns of in here."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(w.message) for w in caught if ": guard: " in str(w.message))


def hooks_on(model: nn.Module) -> int:
    return sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------------- the figure is true

PLANS = {
    "gate, all layers": ["gate"],
    "gate, the middle layer": ["recompute", "gate", "mixed"],
    "gate, the top layer": ["store", "recompute", "gate"],
    "three units, int4 among them": ["calm"],
    "inputs, and what is recomputed from them": ["input", "recompute", "input"],
    "queries": ["queries", "store", "queries"],
}


@pytest.mark.parametrize("outliers", [False, True], ids=["plain", "outliers"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_error_is_that_of_all_parameters_together(bench: Bench, plan: str, outliers: bool) -> None:
    """Not an estimate: to a thousandth, whatever its size; and the trainer's gradients are those of the plan without a guard."""
    if outliers:
        add_outliers(bench.model, layer=1)
    exact = step_gradients(bench.model, *BATCH)
    with bench.under(*PLANS[plan]) as handle:
        planned = step_gradients(bench.model, *BATCH)
        record, gradients = measured(bench.model, handle)
    assert differing(gradients, planned) == []
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=1e-3)
    assert record.rel_error > 1e-5
    assert [layer.fqn for layer in record.layers] == bench.fqns


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}),
    ],
    ids=["tied", "scaled embeddings", "experts"],
)
def test_families(family: str, options: dict[str, object]) -> None:
    """Tied and scaled embeddings get a part of the error, too; the residual is in every family."""
    model = build_tiny(family, **options)
    exact = step_gradients(model, *BATCH)
    with attach_one(model, INPUT) as handle:
        record, planned = measured(model, handle)
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=1e-3)


def test_each_layers_own_figures(bench: Bench) -> None:
    """Against the gradients by hand: of a layer's parameters, and from where on they differ at all."""
    model = bench.model
    exact = step_gradients(model, *BATCH)
    with bench.under("recompute", "gate", "recompute") as handle:
        record, planned = measured(model, handle)
    below, own, above = record.layers
    for layer in (below, own):
        mine = [{name: g for name, g in gradients.items() if name.startswith(f"{layer.fqn}.")} for gradients in (planned, exact)]
        assert layer.parameters == pytest.approx(relative_error(*mine), rel=1e-3)
    assert (above.parameters, above.output, above.input, above.lost) == (0, 0, 0, 0)
    assert own.output == 0 < own.input
    assert below.output == own.input
    assert record.worst is own


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_dropout_and_autocast_are_those_of_the_forward(dropping: Bench, autocast: torch.dtype | None) -> None:
    exact = step_gradients(dropping.model, *BATCH, autocast=autocast)
    with dropping.under("gate", "mixed", "gate") as handle:
        record, planned = measured(dropping.model, handle, autocast=autocast)
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=1e-3 if autocast is None else 0.05)


def test_low_precision() -> None:
    """In bf16 the planned and the exact gradient differ by rounding, too, wherever something came down."""
    model = build_tiny("llama", dtype=torch.bfloat16)
    exact = step_gradients(model, *BATCH)
    with attach_one(model, GATE) as handle:
        record, planned = measured(model, handle)
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=0.05)


@pytest.mark.slow
def test_lora() -> None:
    """Only adapters train; their dropout draws the same, and the layers' own weights have no part in the figure."""
    peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(build_tiny("llama"), config).train()
    exact = step_gradients(model, *BATCH)
    with attach_one(model, INPUT) as handle:
        record, planned = measured(model, handle)
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=1e-3)


def test_layers_that_are_left_to_checkpoint() -> None:
    """Exact themselves, they carry on what came down from above."""
    model = build_tiny("llama", num_hidden_layers=4)
    exact = step_gradients(model, *BATCH)
    fqns = [fqn for fqn, _ in decoder_layers(model)]
    variant = Variant(max_tokens=LIMIT, layers=["gate", "gate", "gate", "gate"])
    with attach_patterns(model, patterns={"gate": GATE}, variants=[variant], name="test", fallback=[fqns[1], fqns[3]]) as handle:
        record, planned = measured(model, handle)
    assert record.rel_error == pytest.approx(relative_error(planned, exact), rel=1e-3)
    assert hooks_on(model) == 0


def test_an_exact_plan_has_no_error_at_all_and_runs_nothing_again(bench: Bench) -> None:
    model = bench.model
    exact = step_gradients(model, *BATCH)
    with bench.under("mixed", "recompute", "store") as handle, patch.object(KeptForward, "run", side_effect=AssertionError):
        record, gradients = measured(model, handle)
    assert differing(gradients, exact) == []
    assert record.rel_error == record.update_error == 0.0


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_layer_run_again_is_bitwise_the_layer(dropping: Bench, autocast: torch.dtype | None) -> None:
    """Exact patterns, run again all the same: 0 to the last bit, with dropout."""
    with dropping.under("mixed") as handle, patch("hilore_cli.runtime.compresses", return_value=True), patch.object(KeptForward, "run", autospec=True, side_effect=KeptForward.run) as runs:
        record, _ = measured(dropping.model, handle, autocast=autocast)
    assert runs.call_count == 3
    assert record.rel_error == 0.0


# --------------------------------------------------------------------------------------------------------- nothing changes


def test_gradients_and_random_numbers_are_those_without_a_guard(dropping: Bench) -> None:
    """Dropout in every layer, two accumulated micro-batches, both measured."""
    model = dropping.model
    batches = [BATCH, make_ids(3, 9, padded=True, seed=1)]

    def update() -> tuple[dict[str, Tensor], Tensor]:
        model.zero_grad(set_to_none=True)
        for batch in batches:
            step_loss(model, *batch).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}, torch.rand(3)

    with dropping.under("gate") as handle:
        expected, drawn = update()
        guard = handle.guard(every=1, budget=1e9)
        found, again = update()
    assert len(guard.history) == 2
    assert differing(found, expected) == []
    assert torch.equal(drawn, again)


def test_each_accumulated_micro_batch_has_its_own_error(bench: Bench) -> None:
    model, batches = bench.model, [BATCH, make_ids(3, 9, padded=True, seed=1)]
    exact = [step_gradients(model, *batch) for batch in batches]
    with bench.under("gate") as handle:
        planned = [step_gradients(model, *batch) for batch in batches]
        guard = handle.guard(every=1, budget=1e9)
        for batch in batches:
            step_loss(model, *batch).backward()
    errors = [relative_error(p, e) for p, e in zip(planned, exact, strict=True)]
    assert [record.rel_error for record in guard.history] == pytest.approx(errors, rel=1e-3)
    assert errors[0] != pytest.approx(errors[1], rel=0.01)


def test_hooks_of_the_trainer_see_the_plans_gradients_alone(bench: Bench) -> None:
    model, seen = bench.model, []
    hook = decoder_layers(model)[0][1].mlp.gate_proj.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with bench.under("gate") as handle:
        step_gradients(model, *BATCH)
        measured(model, handle)
    hook.remove()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_every_so_many_micro_batches_and_no_cost_in_between(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, run = bench.model, [], []
    monkeypatch.setattr(LayerCall, "__init__", counted(LayerCall.__init__, kept))
    monkeypatch.setattr(KeptForward, "run", counted(KeptForward.run, run))
    with bench.under("gate") as handle:
        graphs = None
        guard = handle.guard(every=3, budget=1e9)
        for count in range(1, 8):
            before = len(kept), len(run)
            loss = step_loss(model, *BATCH)
            assert (hooks_on(model) > 0) == (count in (1, 5, 7))
            loss.backward()
            assert hooks_on(model) == 0
            assert (len(kept) - before[0], len(run) - before[1]) == ((3, 3) if count in (1, 5, 7) else (0, 0))
            graphs = graphs or handle.graphs.copy()
        assert handle.graphs == graphs, "nothing is compiled for it"
        with torch.no_grad():
            model(input_ids=BATCH[0], attention_mask=BATCH[1])
    assert [record.step for record in guard.history] == [1, 5, 7]


@pytest.mark.parametrize("every", [1, 2, 7, 15, 16, 64, 100])
def test_one_of_so_many_at_all_places_of_an_update(every: int) -> None:
    """Whatever the number of micro-batches of an update, and an order in them that every update repeats."""
    steps = [count for count in range(1, 64 * every + 1) if is_sampled(count, every=every)]
    assert steps[0] == 1
    assert [(count - 1) // every for count in steps] == list(range(64))
    for update in (2, 4, 5, 16):
        seen = [(count - 1) % update for count in steps]
        assert max(seen.count(place) for place in range(update)) <= 3 * 64 / update
        assert len(set(seen)) >= update - update // 16


def counted(function, calls: list[object]):
    def call(*args: object, **kwargs: object) -> object:
        calls.append(function)
        return function(*args, **kwargs)

    return call


@pytest.mark.slow
def test_memory_grows_by_one_layer_whatever_the_depth() -> None:
    """Activations of one layer with their backward, its parameters' gradient once more, and a few hidden states."""
    growth, bound = {}, {}
    for pattern in (GATE, INPUT):
        for layers in (3, 6):
            model = build_tiny("llama", hidden_size=64, intermediate_size=160, head_dim=16, num_hidden_layers=layers)
            batch = make_ids(4, 33, padded=True)
            with attach_one(model, pattern) as handle:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                peaks = []
                for every in (None, 1):
                    if every is not None:
                        handle.guard(every=every, budget=1e9)
                    step_loss(model, *batch).backward()
                    peaks.append(trace_memory(lambda model=model, batch=batch: step_loss(model, *batch).backward()).peak_bytes)
                growth[pattern.default, "input" in pattern.actions, layers] = peaks[1] - peaks[0]
            hidden_bytes = batch[0].numel() * 64 * 4
            layer = decoder_layers(model)[0][1]
            bound[layers] = alone_bytes(layer, batch) + sum(p.numel() * 4 for p in layer.parameters()) + 4 * hidden_bytes
    stored, compressed = (lambda layers: growth["recompute", False, layers]), (lambda layers: growth["recompute", True, layers])
    assert 0 <= stored(3) <= bound[3]
    assert stored(6) == pytest.approx(stored(3), abs=hidden_bytes)
    assert compressed(6) - compressed(3) <= 3 * (hidden_bytes + torch.get_rng_state().numel() + 256), "inputs that the plan keeps as int8 are kept whole, too, and random numbers' state"


def alone_bytes(layer: nn.Module, batch: Batch) -> int:
    """Peak of one layer's eager forward and backward."""
    hidden = torch.randn(*batch[0].shape, 64, requires_grad=True)
    positions = torch.arange(batch[0].shape[1])[None]
    cos, sin = (torch.randn(1, batch[0].shape[1], 16) for _ in range(2))
    return trace_memory(lambda: type(layer).forward(layer, hidden, position_ids=positions, position_embeddings=(cos, sin)).sum().backward()).peak_bytes


def test_a_dropped_model_is_collected() -> None:
    model = build_tiny("llama")
    handle = attach_one(model, GATE)
    handle.guard(every=1, budget=1e9)
    step_gradients(model, *BATCH)
    loss = step_loss(model, *BATCH)
    dead = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    del model, loss
    gc.collect()
    assert dead() is None
    handle.detach()  # harmless


# ----------------------------------------------------------------------------------------------------------- over the budget

OUTLIER = 5
"""A token that no batch of `ordinary` has."""


def ordinary(seed: int, rows: int = 2) -> Batch:
    ids, mask = make_ids(rows, 14, padded=True, seed=seed)
    return ids.masked_fill(ids == OUTLIER, OUTLIER + 1), mask


def add_outliers(model: nn.Module, *, layer: int, factor: float = 1000.0) -> None:
    """Two channels of one layer's gate become outliers: the other channels of their group vanish in the codec's steps."""
    with torch.no_grad():
        decoder_layers(model)[layer][1].mlp.gate_proj.weight[[3, 20]] *= factor


def budget_of(model: nn.Module, handle: Handle) -> float:
    """Twice what ordinary batches have at most: what a profile would ask for."""
    return 2 * max(measured(model, handle, ordinary(seed))[0].rel_error for seed in range(4))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_outliers_that_the_profile_did_not_see_trip_it(bench: Bench, layer: int) -> None:
    """The warning names the layer; from the next micro-batch on gradients are exact, until it is reset."""
    model = bench.model
    with bench.under("gate") as handle:
        budget = budget_of(model, handle)
        told: list[GuardRecord] = []
        guard = handle.guard(every=2, budget=budget, on_measure=told.append)
        with warned() as texts:
            for seed in range(10, 20):
                step_gradients(model, *ordinary(seed))
        assert texts == []
        assert not guard.fallen_back
        assert [record.tripped for record in guard.history] == [False] * 5
        add_outliers(model, layer=layer)
        with warned() as texts:
            planned = step_gradients(model, *BATCH)
            found = [step_gradients(model, *BATCH) for _ in range(3)]
        calls = handle.microbatches.copy()
        guard.reset()
        with warned() as more:
            again = step_gradients(model, *BATCH)
        handle.detach()
        exact = step_gradients(model, *BATCH)
    assert told == guard.history
    record = guard.history[5]
    assert record.tripped
    assert record.worst.fqn == decoder_layers(model)[layer][0]
    assert record.rel_error == record.update_error == pytest.approx(relative_error(planned, exact), rel=1e-3)
    assert len(texts) == 1
    assert f"is over the budget of {budget:.3g}" in texts[0]
    assert f"most of it from {record.worst.fqn} " in texts[0]
    assert "every layer is recomputed from the next micro-batch on" in texts[0]
    assert [differing(gradients, exact) for gradients in found] == [[], [], []]
    assert calls[RECOMPUTE_ALL] == 3
    assert differing(again, planned) == [], "reset: the plan again"
    assert (len(more), guard.history[6].step) == (1, 15)


def test_a_token_with_a_huge_embedding_trips_it() -> None:
    """Not the weights changed but what is fed: the codec's groups go across tokens here, and a residual a thousand times as large spoils its neighbours'."""
    model = build_tiny("llama", hidden_size=48, num_hidden_layers=3)
    residual = Pattern(default="store", actions={"add": "compress:int8"})
    with torch.no_grad():
        model.get_input_embeddings().weight[OUTLIER] *= 1000
    ids, mask = ordinary(3)
    ids[0, 4] = OUTLIER
    with attach_one(model, residual) as handle:
        guard = handle.guard(every=1, budget=budget_of(model, handle))
        for seed in range(10, 14):
            step_gradients(model, *ordinary(seed))
        with warned() as texts:
            step_gradients(model, ids, mask)
            found = step_gradients(model, ids, mask)
    assert [record.tripped for record in guard.history] == [False] * 4 + [True]
    assert len(texts) == 1
    assert differing(found, step_gradients(model, ids, mask)) == []


def test_without_fallback_it_only_warns_once(bench: Bench) -> None:
    model = bench.model
    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e-9, fallback=False)
        found = [step_gradients(model, *BATCH) for _ in range(3)]
        assert not guard.fallen_back
        assert RECOMPUTE_ALL not in handle.microbatches
    assert [differing(gradients, planned) for gradients in found] == [[], [], []]
    assert len(texts) == 1
    assert "the plan goes on (fallback=False)" in texts[0]


def test_a_planned_gradient_that_is_not_finite_trips_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model
    exact = step_gradients(model, *BATCH)
    with bench.under("gate", "gate", "recompute") as handle:
        guard = handle.guard(every=1, budget=1e6)
        with monkeypatch.context() as patched, warned() as texts:
            patched.setattr(cpu, "decompress", lambda payload, codec, *, dtype, numel: torch.full((numel,), torch.nan, dtype=dtype))
            step_gradients(model, *BATCH)
        assert guard.history[0].rel_error == float("inf")
        assert guard.history[0].worst.fqn.endswith("layers.1")
        assert len(texts) == 1
        assert differing(step_gradients(model, *BATCH), exact) == []


def test_no_gradient_and_an_overflow_are_not_measured(bench: Bench) -> None:
    """Neither says anything about the plan: equal rewards, and a loss scale that was too large."""
    model = bench.model
    with bench.under("gate") as handle, warned() as texts:
        guard = handle.guard(every=1, budget=1e-9)
        for factor in (0.0, float("inf")):
            (step_loss(model, *BATCH) * factor).backward()
            assert hooks_on(model) == 0
        model.zero_grad()
    assert guard.history == []
    assert len(texts) == 1
    assert "micro-batch 2 was not measured: its exact gradient is not finite" in texts[0]


def test_the_budget_is_of_the_update(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan made of four micro-batches: squared errors over squared gradients of the last four samples, missing ones exact."""
    model = bench.model
    batches = [ordinary(seed, rows=1 + seed % 3) for seed in range(6)]
    with bench.under("gate") as handle:
        monkeypatch.setattr(handle.program.choice, "micro_batches", 4)
        guard = handle.guard(every=1, budget=1e9)
        for batch in batches:
            step_gradients(model, *batch)
    exact = [step_gradients(model, *batch) for batch in batches]
    gradients2 = [sum(float(g.double().square().sum()) for g in each.values()) for each in exact]
    changes2 = [record.rel_error**2 * g2 for record, g2 in zip(guard.history, gradients2, strict=True)]
    expected = []
    for last in range(1, 7):
        window = slice(max(0, last - 4), last)
        count = min(last, 4)
        expected.append((sum(changes2[window]) / (sum(gradients2[window]) / count * 4)) ** 0.5)
    assert [record.update_error for record in guard.history] == pytest.approx(expected, rel=1e-3)
    assert guard.history[0].update_error == pytest.approx(guard.history[0].rel_error / 2, rel=1e-6)


def test_a_frozen_plans_risk_is_the_budget() -> None:
    model = build_tiny("llama")
    plan = frozen_plan(model, {"gate": GATE}, ["gate", "gate"], max_tokens=64)
    with attach(model, plan) as handle:
        guard = handle.guard(every=1)
        step_gradients(model, *BATCH)
    assert (guard.history[0].budget, guard.history[0].predicted) == (plan.budgets.risk, plan.update.rel_error)


def test_shares_of_what_is_lost() -> None:
    """A gradient that is gone is lost where it went, whatever comes of it further down."""
    rows = [  # lowest first: exact and change of parameters, output, input, squared
        [1.0, 4e4, 1.0, 4e4, 1.0, 9e4],
        [2.0, 6e4, 1.0, 0.01, 1.0, 4e4],
        [1.0, 0.01, 1.0, 0.0, 1.0, 0.01],
    ]
    lowest, middle, top = _layer_errors(["a", "b", "c"], rows, below2=1.0, gradient2=5.0)
    assert lowest.lost == 0.0
    assert middle.lost == pytest.approx(0.99 * (2 + 2) / 5)
    assert top.lost == pytest.approx((0.01 * 1 + 0.01 * 4) / 5)


# ------------------------------------------------------------------------------------------------- when it cannot be measured


def test_a_forward_without_backward_frees_its_memory_and_is_told_of(bench: Bench) -> None:
    model = bench.model
    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e9)

        def skip() -> None:
            loss = step_loss(model, *BATCH)
            del loss

        gc.disable()
        try:
            trace = trace_memory(skip)
        finally:
            gc.enable()
        assert trace.live_bytes[-1] < 8192
        assert differing(step_gradients(model, *BATCH), planned) == []
        assert differing(step_gradients(model, *BATCH), planned) == []
    assert [record.step for record in guard.history] == [2, 3]
    assert texts == ["plan test: guard: micro-batch 1 was not measured: its backward did not come before the next micro-batch's forward"]


def test_two_forwards_before_one_backward(bench: Bench) -> None:
    model = bench.model
    other = make_ids(3, 9, padded=True, seed=1)

    def both() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        (step_loss(model, *BATCH) + step_loss(model, *other)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with bench.under("gate") as handle, warned() as texts:
        planned = both()
        guard = handle.guard(every=2, budget=1e9)
        assert differing(both(), planned) == []
        assert hooks_on(model) == 0
    assert guard.history == []
    assert len(texts) == 1


def test_a_retained_graph_is_measured_once(bench: Bench) -> None:
    model = bench.model
    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e9)
        loss = step_loss(model, *BATCH)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert differing({name: p.grad for name, p in model.named_parameters()}, planned) == []
    assert len(guard.history) == 1
    assert texts == []


def test_a_backward_that_failed(bench: Bench) -> None:
    model = bench.model

    def fail(_: Tensor) -> None:
        raise RuntimeError("no room")

    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e9)
        hook = decoder_layers(model)[0][1].mlp.gate_proj.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="no room"):
            step_loss(model, *BATCH).backward()
        hook.remove()
        for _ in range(2):
            assert differing(step_gradients(model, *BATCH), planned) == []
        assert hooks_on(model) == 0
    assert [record.step for record in guard.history] == [2, 3]
    assert len(texts) == 1


def test_no_memory_for_it_leaves_training_alone(bench: Bench) -> None:
    model = bench.model
    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e9)
        with patch.object(KeptForward, "run", side_effect=torch.OutOfMemoryError("full")):
            assert differing(step_gradients(model, *BATCH), planned) == []
    assert guard.history == []
    assert "there was no memory to run model.layers.2 once more" in texts[0]


def test_what_stands_between_two_layers_is_told_of(bench: Bench) -> None:
    """Something that is not handed on as it is has a derivative that nobody here knows."""
    model = bench.model
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    with bench.under("gate") as handle, warned() as texts:
        planned = step_gradients(model, *BATCH)
        guard = handle.guard(every=1, budget=1e9)
        assert differing(step_gradients(model, *BATCH), planned) == []
    hook.remove()
    assert guard.history == []
    assert "model.layers.1 does not get the output of model.layers.0 as it is" in texts[0]


def test_a_loss_on_hidden_states_is_in_both_gradients() -> None:
    model = build_tiny("llama")

    def step() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        output = model(input_ids=BATCH[0], attention_mask=BATCH[1], output_hidden_states=True)
        (output.logits.float().log_softmax(-1)[..., 3].sum() + 30 * output.hidden_states[1].sin().sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    exact = step()
    with attach_each(model, [RECOMPUTE, GATE]) as handle:
        guard = handle.guard(every=1, budget=1e9)
        planned = step()
    assert guard.history[0].rel_error == pytest.approx(relative_error(planned, exact), rel=2e-3)


def test_router_logits_with_a_loss_are_told_of() -> None:
    model = build_tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, router_aux_loss_coef=0.5)
    with attach_one(model, INPUT) as handle, warned() as texts:
        guard = handle.guard(every=1, budget=1e9)
        model(input_ids=BATCH[0], attention_mask=BATCH[1], labels=BATCH[0], output_router_logits=True).loss.backward()
        model.zero_grad()
    assert guard.history == []
    assert "what is recorded inside model.layers.1 (router logits, attentions) has a gradient of its own" in texts[0]


def test_detached_and_unguarded_nothing_is_left(bench: Bench) -> None:
    model = bench.model
    exact = step_gradients(model, *BATCH)
    with bench.under("gate") as handle:
        planned = step_gradients(model, *BATCH)
        handle.guard(every=1, budget=1e-9)
        pending = step_loss(model, *BATCH)
        assert hooks_on(model) > 0
        handle.detach()
        assert hooks_on(model) == 0
        pending.backward()
        assert differing({name: p.grad for name, p in model.named_parameters()}, planned) == []
        handle.install()
        with warned() as texts:
            step_gradients(model, *BATCH)
            assert differing(step_gradients(model, *BATCH), exact) == []
        assert len(texts) == 1
        handle.unguard()
        assert differing(step_gradients(model, *BATCH), planned) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"every": 0, "budget": 0.1}, "every must be a number of micro-batches, 1 or more, not 0"),
        ({"every": 2.5, "budget": 0.1}, "not 2.5"),
        ({"every": 1, "budget": float("nan")}, "budget must be a relative gradient error of 0 or more, such as 0.015, not nan"),
        ({"every": 1}, "these patterns come without a plan that has one"),
    ],
)
def test_figures_that_mean_nothing(arguments: dict[str, object], reason: str) -> None:
    with attach_one(build_tiny("llama"), GATE) as handle:
        with pytest.raises(UsageError, match=reason):
            handle.guard(**arguments)
        assert handle.program.guard is None


def test_shared_layers_and_second_guards_are_refused() -> None:
    model = build_tiny("llama")
    with attach_one(model, GATE) as handle:
        handle.guard(every=1, budget=1.0)
        with pytest.raises(UsageError, match=r"has a guard already; handle\.unguard\(\) takes it off"):
            handle.guard(every=1, budget=1.0)
        handle.unguard()
        first, second = (layer for _, layer in decoder_layers(model))
        second.mlp.gate_proj.weight = first.mlp.gate_proj.weight
        with pytest.raises(PlanMismatchError, match=r"cannot tell apart the gradients of model\.layers\.0\.mlp\.gate_proj\.weight and model\.layers\.1\.mlp\.gate_proj\.weight"):
            handle.guard(every=1, budget=1.0)


# --------------------------------------------------------------------------------------------------------------------- TRL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_logs_it(tmp_path: Path) -> None:
    """Two micro-batches, both measured: the log has their mean, and the parameters are those of the plan without a guard."""
    trl_for_tests = pytest.importorskip("trl_for_tests", reason="TRL is not installed (extra trl)")
    from hilore_cli.integrations.trl import use_plan

    runs = []
    for name, guard_every in (("plain", None), ("guarded", 1)):
        trainer = trl_for_tests.trainer_in(tmp_path / name, logging_strategy="steps", logging_steps=1, learning_rate=1e-3)
        handle = use_plan(trainer, frozen_plan(trainer.model, {"gate": GATE}, ["gate", "gate"], max_tokens=10**6), guard_every=guard_every)
        runs.append((trl_for_tests.run(trainer), handle))
    (plain, _), (guarded, handle) = runs
    assert trl_for_tests.differing_parameters(guarded, plain) == []
    errors = [record.rel_error for record in handle.program.guard.history]
    assert len(errors) == 2
    assert [entry["hilore/grad_error"] for entry in guarded.log if "hilore/grad_error" in entry] == pytest.approx([sum(errors) / 2])
    assert 0 < errors[0] < 0.1
    with pytest.raises(HiloreError):
        use_plan(trainer_without_plan := trl_for_tests.trainer_in(tmp_path / "bad"), frozen_plan(trainer_without_plan.model, {"gate": GATE}, ["gate", "gate"], max_tokens=10**6), guard_every=0)
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(trainer_without_plan.model))


# --------------------------------------------------------------------------------------------------------------- two ranks

WRAPPINGS = ["ddp", "fsdp", "fsdp resharded"]
RANK_BATCHES = [ordinary(seed, rows=1 + seed) for seed in (1, 2)]
"""One for each rank."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(folder)]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPINGS)
def test_ranks_measure_their_own_micro_batch_and_agree(ranks: list[dict], name: str) -> None:
    """The error of each rank's own micro-batch, as one process has it; of the update over both; gradients as without a guard."""
    for rank in ranks:
        found = rank[name]
        assert found["rel_error"] == pytest.approx(found["true"], rel=2e-3)
        assert found["differing"] == []
        assert found["tripped"] == [False, True]
        assert found["recomputed"] == {RECOMPUTE_ALL: 1}
        assert found["exact differing"] == []
        assert found["hooks"] == 0
    first, second = (rank[name] for rank in ranks)
    assert first["rel_error"] != pytest.approx(second["rel_error"], rel=0.01)
    assert first["update_error"] == second["update_error"]
    assert first["update_error"] == pytest.approx(first["pooled"], rel=2e-3)
    assert [rank[name]["warnings"] for rank in ranks] == [1, 1]


@pytest.mark.slow
def test_embeddings_sharded_by_themselves_are_refused(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "the guard cannot see the gradient of model.embed_tokens.weight, which is sharded while the layers run" in rank["refused"]


def wrap(model: nn.Module, name: str) -> nn.Module:
    if name == "ddp":
        return DistributedDataParallel(model)
    for _, layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=name == "fsdp resharded")
    fully_shard(model)
    return model


def gradients_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """After a step, as they are on this rank."""
    model.zero_grad(set_to_none=True)
    step_loss(model, *batch).backward()
    return {name.removeprefix("module."): (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone() for name, p in model.named_parameters()}


def run_wrapped(name: str) -> dict[str, object]:
    """A measured step beside the same without a guard, and after a spoiled one on rank 1 alone a step that must be exact on both."""
    batch = RANK_BATCHES[dist.get_rank()]
    whole, reference, wrapped = build_tiny("llama"), wrap(build_tiny("llama"), name), wrap(build_tiny("llama"), name)
    patterns = {"patterns": {"p": GATE}, "variants": [Variant(max_tokens=LIMIT, layers=["p", "p"])], "name": "test"}
    true, norms = one_process(whole, patterns)
    plain = gradients_of(reference, batch)
    inner = wrapped.module if name == "ddp" else wrapped
    with attach_patterns(inner, **patterns) as handle, warned() as texts:
        planned = gradients_of(wrapped, batch)
        guard = handle.guard(every=1, budget=2 * max(true))
        found = gradients_of(wrapped, batch)
        with spoiled(active=dist.get_rank() == 1):
            gradients_of(wrapped, batch)
            served = handle.microbatches.copy()
            exact = gradients_of(wrapped, batch)
    return {
        "rel_error": guard.history[0].rel_error,
        "update_error": guard.history[0].update_error,
        "true": true[dist.get_rank()],
        "pooled": (sum(e**2 * n for e, n in zip(true, norms, strict=True)) / sum(norms)) ** 0.5,
        "differing": differing(found, planned),
        "tripped": [record.tripped for record in guard.history],
        "recomputed": dict(handle.microbatches - served),
        "exact differing": differing(exact, plain),
        "hooks": hooks_on(wrapped),
        "warnings": len(texts),
    }


def one_process(model: nn.Module, patterns: dict[str, object]) -> tuple[list[float], list[float]]:
    """True errors of both ranks' micro-batches, and their squared gradient norms."""
    exact = [step_gradients(model, *batch) for batch in RANK_BATCHES]
    with attach_patterns(model, **patterns):
        planned = [step_gradients(model, *batch) for batch in RANK_BATCHES]
    return [relative_error(p, e) for p, e in zip(planned, exact, strict=True)], [sum(float(g.double().square().sum()) for g in each.values()) for each in exact]


@contextmanager
def spoiled(*, active: bool) -> Iterator[None]:
    """On this rank what is decompressed comes back at half its size."""
    decompress = cpu.decompress
    with patch.object(cpu, "decompress", lambda payload, codec, **rest: decompress(payload, codec, **rest) * (0.5 if active else 1.0)):
        yield


def refusal() -> str:
    model = build_tiny("llama")
    fully_shard(model.model.embed_tokens)
    with attach_one(wrap(model, "fsdp"), GATE) as handle:
        handle.guard(every=1, budget=1.0)
        try:
            step_loss(model, *RANK_BATCHES[0])
        except PlanMismatchError as error:
            return str(error)
    return ""


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, object] = {name: run_wrapped(name) for name in WRAPPINGS}
    result["refused"] = refusal()
    (Path(arguments[0]) / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
