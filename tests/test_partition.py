"""The two graphs of a pattern, run: backward reads exactly the restored value, whatever its layout, at every shape without recompiling."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import Captured, attach_one, capture, make_ids, step_gradients
from torch import Tensor

from hilore_cli import codecs
from hilore_cli.errors import CodecError
from hilore_cli.grpo import relative_error
from hilore_cli.models import decoder_layers
from hilore_cli.risk import LayerCall, LayerReplay, candidate_units
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import Pattern, Variant

# units of one llama layer that a plan may compress, and what each of them is
GATE, UP, OUT, RESIDUAL, INPUT = "mlp.gate_proj.mm", "mlp.up_proj.mm", "self_attn.sdpa.out", "add", "input"


@pytest.fixture(scope="module")
def step():
    torch.set_num_threads(1)
    model = build_tiny("llama", num_hidden_layers=1, hidden_size=64, head_dim=16)
    batch = make_ids(3, 17, padded=True)
    return model, batch, step_gradients(model, *batch), recorded(model, batch)


def recorded(model, batch) -> tuple[Captured, LayerReplay]:
    """The layer's graph, and its replay on the values of a real step."""
    primals: list[list] = []
    tangents: list[Tensor] = []

    def run(graph, side):
        def run_graph(arguments):
            if side == "forward":
                primals.append(list(arguments))
            return graph.forward(arguments)

        return run_graph

    captured = capture(model, *batch)
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output.register_hook(tangents.append) and None)
    with attach_patterns(model, patterns={"p": Pattern()}, variants=[Variant(max_tokens=10**6, layers=["p"])], name="test", run=run):
        step_gradients(model, *batch)
    hook.remove()
    call = LayerCall(index=0, graph=0, primals=primals[0], tangent=tangents[0])
    with torch.no_grad():
        return captured, LayerReplay(captured.joint, captured.layer_class, call)


def layer_vector(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for name, g in sorted(gradients.items()) if ".layers.0." in name]).double()


def test_replay_is_the_real_step(step) -> None:
    """The reference of the next test: with nothing altered, replay gives the step's gradients bit for bit."""
    _, _, exact, (_, replay) = step
    mine = sorted((tuple(g.shape), float(g.double().square().sum())) for g in replay.parameter_gradients())
    theirs = sorted((tuple(g.shape), float(g.double().square().sum())) for name, g in exact.items() if ".layers.0." in name)
    assert mine == theirs


@pytest.mark.parametrize("unit", [GATE, OUT, INPUT, "rotated query"])
def test_backward_reads_the_restored_value(step, unit: str) -> None:
    """int4 is coarse, so a backward that still read the exact value, or another copy of it, could not pass."""
    model, batch, exact, (captured, replay) = step
    unit = permuted_unit(captured) if unit == "rotated query" else unit
    matmuls = {row.unit: "store" for row in captured.layer_class.nodes if row.side == "forward" and row.unit not in (None, unit, INPUT) and stands_for_matmul(captured, row)}
    with attach_one(model, Pattern(actions=matmuls | {unit: "compress:int4"})):
        found = step_gradients(model, *batch)
    with torch.no_grad():
        expected = replay.change(unit, codecs.round_trip(replay.value(unit), "int4"), context="stored")
    change = layer_vector(found) - layer_vector(exact)
    assert expected.parameters > 0
    assert float(change.square().sum()) == pytest.approx(expected.parameters, rel=1e-5)


def permuted_unit(captured: Captured) -> str:
    """The query after its rotary embedding: read by backward through a transposed layout."""
    nodes = {n.name: n for n in captured.joint.nodes}
    return next(row.unit for row in captured.layer_class.nodes if row.unit and row.unit.startswith("self_attn.add") and not nodes[row.name].meta["val"].is_contiguous())


def stands_for_matmul(captured: Captured, row) -> bool:
    rows = captured.layer_class.nodes
    return row.matmul or (row.target.startswith("<built-in function getitem") and rows[row.inputs[0]].matmul)


def test_replayed_context_reads_what_is_recomputed_from_the_restored_value(step) -> None:
    model, batch, exact, (_, replay) = step
    with attach_one(model, Pattern(actions={INPUT: "compress:int4"})):
        change = layer_vector(step_gradients(model, *batch)) - layer_vector(exact)
    altered = codecs.round_trip(replay.value(INPUT), "int4")
    with torch.no_grad():
        expected, stored = (replay.change(INPUT, altered, context=context).parameters for context in ("replayed", "stored"))
    assert float(change.square().sum()) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(stored, rel=0.05)


def test_changing_shapes_do_not_recompile(step) -> None:
    """Odd element counts too: payload sizes and strides are computed from each call's sizes."""
    model, _, _, _ = step
    pattern = Pattern(actions={GATE: "compress:int8", INPUT: "compress:int8", RESIDUAL: "compress:int4", OUT: "compress:int8"})
    with attach_one(model, pattern) as handle:
        for rows, length in ((3, 17), (2, 5), (5, 31), (2, 64), (7, 3)):
            batch = make_ids(rows, length, padded=True, seed=length)
            handle.detach()
            exact = layer_vector(step_gradients(model, *batch))
            handle.install()
            error = (layer_vector(step_gradients(model, *batch)) - exact).norm() / exact.norm()
            assert 0 < float(error) < 0.5
        assert handle.graphs["p"] == 1


def test_other_codec_is_another_gradient(step) -> None:
    model, batch, exact, _ = step
    errors = {}
    for codec in ("int8", "int4"):
        with attach_one(model, Pattern(actions={UP: f"compress:{codec}", GATE: "store", OUT: "store"})):
            errors[codec] = float((layer_vector(step_gradients(model, *batch)) - layer_vector(exact)).norm() / layer_vector(exact).norm())
    assert 0 < 5 * errors["int8"] < errors["int4"] < 0.5


def test_promised_strides_are_checked() -> None:
    """The runtime tells compress the traced strides, so another layout at run time is an error and not a permuted value."""
    x = torch.randn(4, 8, 16)
    with pytest.raises(CodecError, match="was promised strides"):
        torch.ops.hilore.compress.default(x.transpose(1, 2), "int8", x.stride())


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_compressed_plans_on_other_families(family: str) -> None:
    """Every unit worth a codec is compressed in every layer: gradients change, and by no more than int8 explains."""
    torch.set_num_threads(1)
    model = build_tiny(family)
    batch = make_ids(2, 24, padded=True)
    exact = step_gradients(model, *batch)
    units = candidate_units(capture(model, *batch).layer_class)
    assert len(units) >= 5
    layers = len(decoder_layers(model))
    pattern = Pattern(actions={unit: "compress:int8" for unit in units})
    with attach_patterns(model, patterns={"p": pattern}, variants=[Variant(max_tokens=10**6, layers=["p"] * layers)], name="test"):
        lossy = step_gradients(model, *batch)
    assert 0 < relative_error(lossy, exact) < 0.1
