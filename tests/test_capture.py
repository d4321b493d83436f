"""What a captured layer says about itself: unit keys, views, pinned and compressible values, bytes at other shapes, and the fingerprint."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import Captured, capture, frozen_plan, make_ids
from torch import nn

from hilore_cli.capture import (
    activation_inputs,
    describe_joint,
    forward_nodes,
    is_random,
    model_identity,
    must_store,
    storage_owners,
)
from hilore_cli.errors import CaptureError
from hilore_cli.models import decoder_layers, unwrapped
from hilore_cli.partition import compile_layer, compiler_settings
from hilore_cli.runtime import attach
from hilore_cli.scaling import evaluate_terms
from hilore_cli.schema import Pattern

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}

LLAMA_MATMULS = {
    "self_attn.q_proj.mm",
    "self_attn.k_proj.mm",
    "self_attn.v_proj.mm",
    "self_attn.sdpa.out",
    "self_attn.sdpa.lse",
    "self_attn.o_proj.mm",
    "mlp.gate_proj.mm",
    "mlp.up_proj.mm",
    "mlp.down_proj.mm",
}
"""Keys that plans hold: a change here makes every plan on disk unreadable."""
LLAMA_OTHERS = {"input", "input_layernorm.mul", "input_layernorm.rsqrt", "self_attn.add", "self_attn.add.1", "add", "post_attention_layernorm.rsqrt", "mlp.act_fn.silu", "mlp.mul", "add.1"}


@pytest.fixture(scope="module")
def llama() -> dict[str, Captured]:
    """A padded and an unpadded batch, and other shapes of the padded one."""
    torch.set_num_threads(1)
    model = build_tiny("llama", num_hidden_layers=1)
    batches = {"padded": make_ids(2, 14, padded=True), "plain": make_ids(2, 14)}
    return {name: capture(model, *batch) for name, batch in batches.items()}


@pytest.fixture(scope="module")
def moe() -> Captured:
    torch.set_num_threads(1)
    return capture(build_tiny("qwen3_moe", num_hidden_layers=1, **MOE), *make_ids(2, 14, padded=True))


def test_unit_keys_are_stable(llama: dict[str, Captured]) -> None:
    """The same names with a mask and without, so that one plan serves both."""
    padded, plain = ({row.unit for row in c.layer_class.nodes if row.unit} for c in llama.values())
    assert padded >= LLAMA_MATMULS | LLAMA_OTHERS
    assert plain >= LLAMA_MATMULS | LLAMA_OTHERS
    matmuls = {row.unit for row in llama["padded"].layer_class.nodes if row.matmul and row.unit}
    assert matmuls == {unit for unit in LLAMA_MATMULS if not unit.startswith("self_attn.sdpa")}


def test_units_own_their_storage_and_their_name(llama: dict[str, Captured], moe: Captured) -> None:
    """A view never is a unit; two units never share a key or a storage."""
    for captured in (*llama.values(), moe):
        units = [row for row in captured.layer_class.nodes if row.unit]
        assert len({row.unit for row in units}) == len(units)
        assert all(row.storage == row.index and row.side == "forward" for row in units)
        owners = storage_owners(captured.joint)
        assert all(row.nbytes == 0 for row in captured.layer_class.nodes if owners.get(row.name) != row.name)
        assert {owners[row.name] for row in units} == {row.name for row in units}


def test_input_and_its_gradient_are_found(llama: dict[str, Captured]) -> None:
    captured = llama["padded"]
    (hidden,) = activation_inputs(captured.joint)
    row = next(row for row in captured.layer_class.nodes if row.name == hidden.name)
    assert (row.unit, row.kind, row.nbytes) == ("input", "activation", 2 * 14 * 32 * 4)
    kinds = [r.kind for r in captured.layer_class.nodes if r.target == "placeholder" and r.side == "forward"]
    assert kinds.count("activation") == 1
    assert kinds.count("parameter") == 9
    assert len(captured.layer_class.forward_outputs) == 1
    assert len(captured.layer_class.outputs) == 10


def test_router_is_pinned_and_its_choice_never_recomputed(moe: Captured) -> None:
    pinned = {row.unit for row in moe.layer_class.nodes if row.pinned and row.unit}
    assert any("topk" in unit for unit in pinned)
    steering = [n for n in forward_nodes(moe.joint) if must_store(n)]
    assert steering
    assert not any(is_random(n) for n in steering)


def test_integers_masks_and_small_values_are_not_compressible(llama: dict[str, Captured], moe: Captured) -> None:
    for captured in (llama["padded"], moe):
        values = {n.name: n.meta.get("val") for n in captured.joint.nodes}
        for row in captured.layer_class.nodes:
            if row.compressible:
                assert values[row.name].dtype == torch.float32
                assert row.kind in ("value", "activation"), "parameters and shared inputs are not the layer's to compress"
                assert row.nbytes >= 4 * 32 * 28
    mask = [row for row in llama["padded"].layer_class.nodes if row.unit and "where" in row.unit]
    assert mask, "the padded graph makes a mask of zeros and infinities"
    assert not any(row.compressible for row in mask)
    lse = next(row for row in llama["padded"].layer_class.nodes if row.unit == "self_attn.sdpa.lse")
    assert not lse.compressible


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_byte_polynomials_hold_at_other_shapes(attention: str) -> None:
    """Bytes written down at one shape, evaluated at three others, against graphs traced there; eager attention is quadratic."""
    torch.set_num_threads(1)
    reference = capture(build_tiny("llama", num_hidden_layers=1, attn_implementation=attention), *make_ids(2, 14, padded=True))
    terms = {row.unit: row.nbytes_terms for row in reference.layer_class.nodes if row.unit}
    assert any("bss" in t for t in terms.values()) or attention == "sdpa"
    for rows, length in ((3, 9), (5, 31), (2, 64)):
        other = capture(build_tiny("llama", num_hidden_layers=1, attn_implementation=attention), *make_ids(rows, length, padded=True))
        assert other.layer_class.graph_digest == reference.layer_class.graph_digest
        found = {row.unit: row.nbytes for row in other.layer_class.nodes if row.unit}
        assert found == {unit: evaluate_terms(t, batch=rows, length=length) for unit, t in terms.items()}


def test_digest_is_of_the_graph_not_of_the_layer(llama: dict[str, Captured]) -> None:
    assert llama["padded"].layer_class.graph_digest != llama["plain"].layer_class.graph_digest
    model = build_tiny("llama", num_hidden_layers=1, seed=3)
    assert capture(model, *make_ids(2, 14, padded=True)).layer_class.graph_digest == llama["padded"].layer_class.graph_digest


def test_layer_that_writes_into_a_buffer_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return self.linear(x) * self.seen

    layer = Counting()
    compiled = compile_layer(type(layer).forward, pattern=Pattern(), on_split=lambda joint: describe_joint(joint, name="A") and None)
    with compiler_settings(), pytest.raises(Exception, match="writes into a buffer") as caught:
        compiled(layer, torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    assert isinstance(getattr(caught.value, "inner_exception", None) or caught.value, CaptureError)


# ------------------------------------------------------------------------------------------------------------ fingerprint


def test_identity_is_of_what_the_graph_depends_on() -> None:
    base = model_identity(build_tiny("llama"), source="a")
    same = build_tiny("llama", use_cache=True, seed=5)
    assert model_identity(same, source="a") == base
    frozen = build_tiny("llama")
    frozen.lm_head.requires_grad_(False)
    others = {
        "dtype": build_tiny("llama", dtype=torch.bfloat16),
        "attn_implementation": build_tiny("llama", attn_implementation="eager"),
        "layers": build_tiny("llama", num_hidden_layers=3),
        "trainable_digest": frozen,
        "config_digest": build_tiny("llama", rope_theta=5e5),
        "parameters": build_tiny("llama", tie_word_embeddings=True),
    }
    for field, model in others.items():
        assert getattr(model_identity(model, source="a"), field) != getattr(base, field), field


def test_attach_through_ddp(tmp_path) -> None:
    """The plan of a model is attached to the same model inside DistributedDataParallel: the layers are the model's own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build_tiny("llama")
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert unwrapped(wrapped) is model
        layers = decoder_layers(model)
        with attach(wrapped, frozen_plan(model, {"A": Pattern()}, ["A"] * len(layers), max_tokens=64)):
            assert all("_hilore" in vars(layer) for _, layer in layers)
    finally:
        torch.distributed.destroy_process_group()


def test_special_token_ids_are_not_part_of_the_identity() -> None:
    """Trainers write their tokenizer's ids into the configuration."""
    model = build_tiny("llama")
    before = model_identity(model, source="a")
    model.config.pad_token_id = 7
    assert model_identity(model, source="a") == before


def test_identity_of_lora() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    adapted = peft.get_peft_model(build_tiny("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    identity = model_identity(adapted, source="a")
    assert identity.lora_rank == 4
    assert identity.trainable_digest != model_identity(build_tiny("llama"), source="a").trainable_digest
