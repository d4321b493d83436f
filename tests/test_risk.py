"""The gradient error that a plan is said to make, against the error it makes; and the parts that the prediction is put together from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import build_tiny

from hilore_cli import codecs
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.capture import describe_joint
from hilore_cli.errors import ProfileError
from hilore_cli.grpo import GrpoConfig, relative_error
from hilore_cli.profiler import ProfileRequest, measure_layer, record_step, token_weights
from hilore_cli.risk import (
    GradientChange,
    LayerReplay,
    NoiseGain,
    UnitError,
    candidate_units,
    embedding_gain,
    measure_noise_gain,
    measure_unit,
    transfers,
)
from hilore_cli.schema import Pattern
from hilore_cli.workbench import Workbench

SEEDS = (0, 1, 2)


class Recorded:
    """Random weights in a shared tiny llama (compiled graphs are shared too), one exact recorded GRPO step, the layers' replays."""

    def __init__(self, bench: Workbench | None, seed: int) -> None:
        torch.set_num_threads(1)
        model = build_tiny("llama", num_hidden_layers=3, hidden_size=64, intermediate_size=96, head_dim=16, seed=seed)
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=seed)
        self.bench = bench or Workbench(model, [self.batch], GrpoConfig(head="full"))
        self.load()
        self.record = record_step(self.bench)
        self.layer_class = describe_joint(self.record.joints[0], name="A")
        with torch.no_grad():
            self.replays = [self.replay(i) for i in range(3)]
            self.gains = [measure_noise_gain(self.record.joints[0], self.layer_class, self.record.calls[i], seed=i) for i in range(3)]
            bottom = embedding_gain(self.replays[0].input_gradient(), self.batch.input_ids, vocabulary=97, seed=0)
        self.transfers = transfers(self.gains, embedding=bottom)

    def load(self) -> None:
        self.bench.model.load_state_dict(self.weights)
        self.bench.batches = [self.batch]

    def replay(self, layer: int) -> LayerReplay:
        return LayerReplay(self.record.joints[self.record.calls[layer].graph], self.layer_class, self.record.calls[layer])

    def predicted(self, unit: str, codec: str, layers: list[int]) -> float:
        """Square root of the sum of rho^2, matmul-like results behind the unit stored."""
        with torch.no_grad():
            changes = [self.replays[i].change(unit, codecs.round_trip(self.replays[i].value(unit), codec), context="stored") for i in layers]
        return math.sqrt(sum(c.squared(self.transfers[i]) for c, i in zip(changes, layers, strict=True))) / self.record.gradient_norm


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    found: list[Recorded] = []
    for seed in SEEDS:
        found.append(Recorded(found[0].bench if found else None, seed))
    return found


@pytest.fixture
def first(recorded: list[Recorded]) -> Recorded:
    recorded[0].load()
    return recorded[0]


def test_record_is_the_exact_step(first: Recorded) -> None:
    exact = first.bench.gradients()
    assert all(torch.equal(exact[name], gradient) for name, gradient in first.record.exact.items())
    assert first.record.gradient_norm == pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in exact.values())))
    assert sorted(first.record.calls) == [0, 1, 2]


def test_replay_gives_the_steps_gradients(first: Recorded) -> None:
    """Bit for bit, every parameter of every layer."""
    for index, replay in enumerate(first.replays):
        theirs = [g for name, g in first.record.exact.items() if f"layers.{index}." in name]
        mine = replay.parameter_gradients()
        assert len(mine) == len(theirs) == 9
        assert all(any(g.shape == t.shape and torch.equal(g, t) for t in theirs) for g in mine)


def test_unaltered_unit_changes_nothing(first: Recorded) -> None:
    with torch.no_grad():
        for unit in candidate_units(first.layer_class):
            for context in first.replays[1].contexts(unit):
                assert first.replays[1].change(unit, first.replays[1].value(unit).clone(), context=context) == GradientChange(parameters=0.0, activation=0.0)


def test_candidates_are_the_units_worth_a_codec(first: Recorded) -> None:
    units = candidate_units(first.layer_class)
    assert {"input", "add", "mlp.gate_proj.mm", "mlp.up_proj.mm", "self_attn.v_proj.mm", "self_attn.sdpa.out"} <= set(units)
    assert not {"mlp.down_proj.mm", "self_attn.o_proj.mm", "self_attn.sdpa.lse", "add.1"} & set(units)
    assert len(units) == len(set(units)) == 8, "query and key stand in after their rotary embedding"


def test_prediction_of_single_units(recorded: list[Recorded]) -> None:
    """One unit kind compressed in all three layers, the rest stored, against the measured error of the whole gradient.

    In the median over the seeds within a factor of 1.6, and never understated by more. A single tiny step may be overstated
    by more (5 units x 2 codecs x 3 seeds: 0.57 to 1.07 of the prediction): errors of three layers do not average out.
    """
    cases = [("mlp.gate_proj.mm", "int8"), ("self_attn.v_proj.mm", "int8"), ("add", "int8"), ("mlp.up_proj.mm", "int4"), ("self_attn.sdpa.out", "int4")]
    layer_class = recorded[0].layer_class
    stored = dict.fromkeys(candidate_units(layer_class), "store") | {row.unit: "store" for row in layer_class.nodes if row.unit and row.side == "forward" and not row.compressible}
    del stored["input"]
    patterns = {f"{unit}-{codec}": Pattern(actions=stored | {unit: f"compress:{codec}"}) for unit, codec in cases}
    for unit, codec in cases:
        ratios = []
        for one in recorded:
            one.load()
            with one.bench.assigned(patterns, [f"{unit}-{codec}"] * 3, graph_digests=[layer_class.graph_digest]):
                measured = relative_error(one.bench.gradients(), one.record.exact)
            ratios.append(measured / one.predicted(unit, codec, [0, 1, 2]))
        print(f"{unit} {codec}: measured / predicted {[round(r, 2) for r in ratios]}")
        assert max(ratios) < 1.6, (unit, codec, ratios)
        assert sorted(ratios)[1] > 1 / 1.6, (unit, codec, ratios)


def test_transfers_against_direct_propagation(first: Recorded) -> None:
    """Noise in the input gradient of the top layer, sent down through the exact backward of the layers below, one by one."""
    generator = torch.Generator().manual_seed(1)
    totals = []
    with torch.no_grad():
        for _ in range(8):
            tangent = first.record.calls[1].tangent
            noise = tangent * torch.randn(tangent.shape, generator=generator)
            start, total = float(noise.double().square().sum()), 0.0
            for layer in (1, 0):
                call = first.record.calls[layer]
                replay = LayerReplay(first.record.joints[call.graph], first.layer_class, type(call)(index=layer, graph=call.graph, primals=call.primals, tangent=noise))
                total += sum(float(g.double().square().sum()) for g in replay.parameter_gradients())
                noise = replay.input_gradient()
            table = torch.zeros(97, 64).index_add_(0, first.batch.input_ids.flatten(), noise.flatten(0, 1))
            totals.append((total + float(table.double().square().sum())) / start)
    assert first.transfers[2] == pytest.approx(sum(totals) / len(totals), rel=0.3)


def test_transfers_recursion() -> None:
    """A_0 is the embedding's gain; A_i = a_{i-1} + b_{i-1} A_{i-1}; the top layer's own gain goes nowhere."""
    gains = [NoiseGain(parameters=2.0, activation=0.5), NoiseGain(parameters=3.0, activation=0.25), NoiseGain(parameters=100.0, activation=100.0)]
    assert transfers(gains, embedding=4.0) == [4.0, 2.0 + 0.5 * 4.0, 3.0 + 0.25 * 4.0]
    assert embedding_gain(None, torch.zeros(1, 1, dtype=torch.long), vocabulary=3, seed=0) == 0.0


def test_embedding_gain_is_one_for_independent_noise() -> None:
    """It adds in squares, whether or not tokens repeat (512 numbers in the table's row: 6 % standard deviation)."""
    gradient = torch.ones(8, 64, 512)
    assert embedding_gain(gradient, torch.zeros(8, 64, dtype=torch.long), vocabulary=3, seed=0) == pytest.approx(1.0, abs=0.3)
    assert embedding_gain(gradient, torch.arange(512).view(8, 64), vocabulary=512, seed=0) == pytest.approx(1.0)
    assert embedding_gain(torch.zeros(1, 4, 16), torch.zeros(1, 4, dtype=torch.long), vocabulary=3, seed=0) == 0.0


# ----------------------------------------------------------------------------------------------------------------- exposure


def test_exposure_error_with_equal_exposures_is_the_plain_error(first: Recorded) -> None:
    with torch.no_grad():
        for unit in ("mlp.gate_proj.mm", "add", "input", "self_attn.sdpa.out"):
            error = measure_unit(first.replays[1], unit, "int8", token_weight=torch.full((4, 24), 0.37, dtype=torch.float64))
            assert error.exposure_error == pytest.approx(error.rel_error, rel=1e-5)


def test_exposure_error_looks_at_exposed_tokens_only(first: Recorded) -> None:
    """All weight on one token: the error of that token's row alone."""
    weight = torch.zeros(4, 24, dtype=torch.float64)
    weight[2, 5] = 1.0
    replay = first.replays[1]
    with torch.no_grad():
        error = measure_unit(replay, "add", "int8", token_weight=weight)
        exact = replay.value("add")
        row, altered = exact[2, 5].double(), codecs.round_trip(exact, "int8")[2, 5].double()
    assert error.exposure_error == pytest.approx(float((altered - row).norm() / row.norm()), rel=1e-5)


def test_masked_rows_and_zero_advantages_give_finite_numbers(first: Recorded) -> None:
    """No weight on any token at all, and weights of a batch whose last rows have no loss token."""
    mask = first.batch.loss_mask.clone()
    mask[2:] = 0
    half = replace(first.batch, loss_mask=mask, advantages=first.batch.advantages * mask)
    weight = token_weights(half)
    assert torch.isfinite(weight).all()
    assert not weight[2:].any()
    assert weight[:2].any()
    with torch.no_grad():
        for chosen in (weight, torch.zeros_like(weight)):
            error = measure_unit(first.replays[0], "mlp.gate_proj.mm", "int4", token_weight=chosen)
            assert all(math.isfinite(x) for x in (error.rel_error, error.exposure_error, error.stored.parameters, error.stored.activation))


def test_weights_sit_on_the_positions_that_predict_loss_tokens(first: Recorded) -> None:
    weight = token_weights(first.batch)
    expected = torch.zeros(4, 24, dtype=torch.bool)
    expected[:, :-1] = first.batch.loss_mask[:, 1:].bool() & (first.batch.advantages[:, 1:] != 0)
    assert torch.equal(weight > 0, expected)
    packed = token_weights(replace(first.batch, layout="packed"))
    assert packed.shape == (1, first.batch.real_tokens)
    assert torch.equal(packed[0], weight[first.batch.attention_mask.bool()])


def test_replay_of_a_fully_padded_row(first: Recorded) -> None:
    """A row whose every token is padding goes through the softmax of an all-masked row."""
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=5)
    batch.attention_mask[3], batch.loss_mask[3], batch.advantages[3], batch.input_ids[3] = 0, 0, 0, 0
    record = record_step(Workbench(first.bench.model, [batch], GrpoConfig(head="full")))
    with torch.no_grad():
        replay = LayerReplay(record.joints[0], describe_joint(record.joints[0], name="A"), record.calls[1])
        for unit in ("self_attn.sdpa.out", "mlp.gate_proj.mm", "input"):
            error = measure_unit(replay, unit, "int8", token_weight=token_weights(batch))
            assert all(math.isfinite(x) for x in (error.rel_error, error.exposure_error, error.stored.parameters, error.replayed.activation))


def test_unit_that_no_codec_can_carry_is_refused(first: Recorded) -> None:
    replay = first.replay(0)
    name = replay._unit_node["add"]
    replay.values[name] = replay.values[name].clone()
    replay.values[name][0, 0] = math.inf  # one of 4 x 24 tokens
    with torch.no_grad(), pytest.raises(ProfileError, match=r"unit add under int8: the error is not finite; 1\.04% of the values that the unit holds are not"):
        measure_unit(replay, "add", "int8", token_weight=torch.ones(4, 24, dtype=torch.float64))


def test_nu01_a_unit_that_no_codec_can_carry_is_left_out_of_the_profile_in_words(first: Recorded, monkeypatch) -> None:
    first.load()

    def refuse(replay: LayerReplay, unit: str, codec: str, **rest: object) -> UnitError:
        if unit == "add":
            raise ProfileError(f"unit {unit} under {codec}: the error is not finite")
        return measure_unit(replay, unit, codec, **rest)

    monkeypatch.setattr("hilore_cli.profiler.measure_unit", refuse)
    request = ProfileRequest(name="p", source="tiny", task="none", sources=["synthetic"], codecs=["int8"], config=GrpoConfig(head="full"))
    with pytest.warns(UserWarning, match=r"model\.layers\.1: unit add under int8: .*it is stored or recomputed there"):
        measured = measure_layer(first.bench, first.record, first.record.calls[1], first.layer_class, fqn="model.layers.1", request=request, weight=token_weights(first.batch))
    assert {unit["row"]["unit"] for unit in measured["units"]} == set(candidate_units(first.layer_class)) - {"add"}
