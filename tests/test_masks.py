"""Dropout masks: stored as bits, exactly, in every plan that has to keep them."""

from __future__ import annotations

import pytest
import torch
from steps_for_tests import attach_one, capture, differing, make_ids, step_gradients, step_loss

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.grpo import GrpoConfig
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.risk import mask_units
from hilore_cli.schema import MASK_CODEC, Pattern
from hilore_cli.sizes import parse_cap
from hilore_cli.timeline import simulate_layer

SHAPE = {"vocab_size": 97, "rows": 4, "prompt_tokens": 10, "completion_tokens": 14, "group_size": 2}

peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")


def with_dropout(tiny_model):
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama", hidden_size=64, intermediate_size=96), config).train()
    model.enable_input_require_grads()  # else the first layer's input has no gradient, and the mask on it no use
    return model


def test_masks_are_found_stored_as_bits_and_come_back_exactly(tiny_model) -> None:
    model = with_dropout(tiny_model)
    batch = make_ids(4, 24, padded=True)
    layer = capture(model, *batch)
    masks = mask_units(layer.layer_class)
    rows = {row.unit: row for row in layer.layer_class.nodes}
    assert [rows[unit].nbytes for unit in masks] == [4 * 24 * 64, 4 * 24 * 96]
    assert all(rows[unit].pinned and not rows[unit].compressible for unit in masks)
    expected = step_gradients(model, *batch)
    predicted, counted = [], []
    for actions in ({}, {unit: f"compress:{MASK_CODEC}" for unit in masks}):
        pattern = Pattern(actions=actions)
        predicted.append(simulate_layer(layer.layer_class, pattern, payload_bytes=layer.payload_bytes).stored_bytes)
        with attach_one(model, pattern):
            assert differing(step_gradients(model, *batch), expected) == []
            counted.append(_saved_bytes(model, batch))
    assert predicted[0] - predicted[1] == counted[0] - counted[1] == 4 * 24 * (64 + 96) * 7 // 8


def _saved_bytes(model, batch) -> int:
    """Bytes that the first layer's graph hands to its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = model.get_base_model().model.layers[0]
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def before(*_: object) -> None:
        hooks.__enter__()

    def after(*_: object) -> None:
        hooks.__exit__(None, None, None)

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        step_loss(model, *batch)
    finally:
        for handle in handles:
            handle.remove()
    return sum(kept.values())


def test_an_exact_plan_packs_them(tiny_model, tmp_path) -> None:
    model = with_dropout(tiny_model)
    batches = [("a", synthetic_micro_batch(**SHAPE, seed=0)), ("b", synthetic_micro_batch(**SHAPE, seed=1))]
    request = ProfileRequest(name="masks", source="tiny", task="none", sources=["a", "b"], codecs=[], config=GrpoConfig(head="full"), repeats=1)
    profile = profile_update(model, batches, request, folder=tmp_path, progress=lambda *_: None)
    rows = [unit for unit in profile.units if unit.codec == MASK_CODEC]
    assert {(row.unit, row.rho2, row.payload_bytes * 8 == row.nbytes) for row in rows} == {(unit, 0.0, True) for layer_class in profile.classes for unit in mask_units(layer_class)}
    plan = solve_plan(profile, cap=parse_cap("1.0x-none"), risk=0.0, codecs=[], name="masks")
    packed = {unit for pattern in plan.patterns.values() for unit, action in pattern.actions.items() if action == f"compress:{MASK_CODEC}"}
    assert packed == {row.unit for row in rows}
    assert plan.update.rel_error == 0.0
