"""Families of models, tiny and random: each layer captured whole, and gradients under a plan those of the model, in the ways trainers run them.

`hilore` knows no family by name: what can be planned is found by tracing. README's table of models is this file's FAMILIES.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import attach_each, attach_one, differing, make_ids, step_gradients
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from hilore_cli import output_capture
from hilore_cli.capture import model_identity
from hilore_cli.errors import CaptureError
from hilore_cli.grpo import relative_error
from hilore_cli.models import decoder_layers
from hilore_cli.runtime import Handle, attach_patterns
from hilore_cli.schema import Pattern, Variant

STORE, RECOMPUTE = Pattern(default="store"), Pattern()
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a tiny model of a family is built, and how near its gradients must be."""

    options: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    alike: bool = False
    """One pattern for both layers instead of one each: layers that take more than ten seconds to compile."""
    rel_error: float = 0.0
    """0: bitwise. Jamba's selective scan: Dynamo's own trace of it, run by torch's backend "eager", already differs by 3e-8."""


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "mistral": Family(options={"sliding_window": 5}),
    "gemma2": Family(options=SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, attention="eager"),
    "gemma3_text": Family(options=SLIDING | {"query_pre_attn_scalar": 8}),
    "phi3": Family(options={"resid_pdrop": 0.1}),
    "olmo2": Family(),
    "glm4": Family(),
    "gpt_neox": Family(),
    "gpt2": Family(options={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "mixtral": Family(options={"num_local_experts": 4}),
    "qwen3_moe": Family(options=EXPERTS),
    "gpt_oss": Family(options=SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}, attention="eager"),
    "deepseek_v3": Family(options={"moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "lfm2": Family(options={"full_attn_idxs": [1], "block_multiple_of": 16}),
    "mamba2": Family(options={"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1, "chunk_size": 8}, attention="eager", alike=True),
    "falcon_h1": Family(options={"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8, "mamba_n_groups": 1}, alike=True),
    "jamba": Family(options={"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2}, alike=True, rel_error=1e-6),
    "qwen3_next": Family(options=EXPERTS | {"shared_expert_intermediate_size": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}, alike=True),
}


def build(name: str, **options: Any) -> nn.Module:
    family = FAMILIES[name]
    return build_tiny(name, **{"attn_implementation": family.attention, **family.options, **options})


SCANS = ("mamba2", "falcon_h1", "jamba", "qwen3_next")
"""Their CPU fallbacks are long loops, which torch traces whole: 16 to 28 seconds each."""
ALIKE = ("qwen2", "olmo2", "glm4", "gpt_neox", "mistral", "mixtral")
"""Built as others that run always, here or in other files: llama, gemma2's sliding window, qwen3_moe."""
ALL_FAMILIES = pytest.mark.skipif(os.environ.get("HILORE_ALL_FAMILIES") != "1", reason="two minutes of scans and of families that are built as others: set HILORE_ALL_FAMILIES=1")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ALL_FAMILIES) if name in SCANS + ALIKE else name for name in FAMILIES])
def test_gradients_of_a_family(name: str) -> None:
    """One layer recomputed, the other stored; left padding, and a second shape through the same graphs."""
    family, model = FAMILIES[name], build(name)
    batches = [make_ids(2, 14, padded=True), make_ids(3, 9, padded=True, seed=1)]
    expected = [step_gradients(model, *batch) for batch in batches]
    with attach_one(model, RECOMPUTE) if family.alike else attach_each(model, [RECOMPUTE, STORE]) as handle:
        found = [step_gradients(model, *batch) for batch in batches]
    kinds = {type(layer) for _, layer in decoder_layers(model)}
    assert sum(handle.calls.values()) == 4
    assert sum(handle.graphs.values()) <= 2 * len(kinds), "no graph of its own for the second shape"
    for mine, exact in zip(found, expected, strict=True):
        if family.rel_error:
            assert relative_error(mine, exact) < family.rel_error
        else:
            assert differing(mine, exact) == []


def test_experts_one_by_one_are_refused_by_name() -> None:
    """transformers' slowest way to run experts asks how many tokens each got: no graph can hold that."""
    model = build("qwen3_moe", experts_implementation="eager")
    with attach_one(model, RECOMPUTE), pytest.raises(CaptureError, match=r"model\.layers\.0 cannot be captured whole: \w+"):
        step_gradients(model, *make_ids(2, 14, padded=True))


# --------------------------------------------------------------------------------------------------- as trainers run them


def packed(model: nn.Module) -> dict[str, Tensor]:
    """Two rows of 9 and 5 tokens behind each other, told apart by their positions."""
    ids, _ = make_ids(1, 14)
    return _gradients(model, input_ids=ids, position_ids=torch.cat([torch.arange(9), torch.arange(5)])[None])


def autocast(model: nn.Module) -> dict[str, Tensor]:
    return step_gradients(model, *make_ids(2, 14, padded=True), autocast=torch.bfloat16)


def padded(model: nn.Module) -> dict[str, Tensor]:
    return step_gradients(model, *make_ids(2, 14, padded=True))


@pytest.mark.parametrize(
    ("name", "run", "options"),
    [
        ("qwen3", packed, {}),
        ("gemma3_text", packed, {}),
        ("qwen2", autocast, {}),
        ("mixtral", autocast, {}),
        ("llama", padded, {"attn_implementation": "eager"}),
        ("gemma3_text", padded, {"attn_implementation": "eager"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else "-".join(value.values()) or "sdpa"),
)
def test_ways_to_run(name: str, run: Callable[[nn.Module], dict[str, Tensor]], options: Mapping[str, Any]) -> None:
    model = build(name, **options)
    expected = run(model)
    with attach_each(model, [STORE, RECOMPUTE]):
        assert differing(run(model), expected) == []


def test_flex_attention() -> None:
    query = torch.zeros(1, 1, 16, 16, requires_grad=True)
    try:
        torch.compile(flex_attention, backend="aot_eager")(query, query, query).sum().backward()
    except (NotImplementedError, RuntimeError) as refusal:
        pytest.skip(f"flex attention has no backward here: {type(refusal).__name__}: {str(refusal).splitlines()[0]}")
    model = build("llama", attn_implementation="flex_attention")
    expected = padded(model)
    with attach_each(model, [STORE, RECOMPUTE]):
        assert differing(padded(model), expected) == []


# ----------------------------------------------------------------------------------------------------- recorded outputs


def aux(model: nn.Module) -> dict[str, Tensor]:
    """With the router's auxiliary loss, as TRL's GRPOTrainer asks for it on every mixture of experts."""
    ids, mask = make_ids(2, 14, padded=True)
    return _gradients(model, input_ids=ids, attention_mask=mask, output_router_logits=True)


def hidden(model: nn.Module) -> dict[str, Tensor]:
    """With a loss on the hidden states between the layers."""
    ids, mask = make_ids(2, 14, padded=True)
    return _gradients(model, input_ids=ids, attention_mask=mask, output_hidden_states=True)


def _gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """Gradients of logits, auxiliary loss, hidden states and attentions, whatever the call returns; and these values beside them."""
    torch.manual_seed(7)
    output = model(**inputs)
    weight = torch.linspace(-1, 1, output.logits.numel()).sin().view_as(output.logits)
    loss = (output.logits.log_softmax(-1) * weight).sum()
    recorded = {}
    for key in ("router_logits", "hidden_states", "attentions"):
        for i, value in enumerate(getattr(output, key, None) or ()):
            recorded[f"{key}.{i}"] = value.detach()
            if key != "router_logits":
                loss = loss + value.square().sum()
    if getattr(output, "aux_loss", None) is not None:  # deepseek_v3 has router logits and no auxiliary loss
        loss = loss + 3 * output.aux_loss
        recorded["aux_loss"] = output.aux_loss.detach()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients | recorded


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_auxiliary_loss_from_the_first_step_on(name: str) -> None:
    """The hooks that record are put on during the call that compiles."""
    twin, model = build(name), build(name)
    expected = aux(twin)
    assert {"aux_loss", "router_logits.0"} <= set(expected) if name != "deepseek_v3" else "router_logits.0" in expected
    with attach_one(model, RECOMPUTE) as handle:
        assert differing(aux(model), expected) == []
    assert handle.calls["p"] == 2


@pytest.fixture(scope="module")
def recording():
    """A mixture of experts with a plan, and its exact gradients and outputs in each way to call it; hooks are not on yet."""
    torch.set_num_threads(1)
    twin, model = build("qwen3_moe"), build("qwen3_moe")
    expected = {run: run(twin) for run in (padded, aux, hidden)}
    assert differing(expected[aux], expected[padded]), "the auxiliary loss has a gradient"
    handle = attach_each(model, [STORE, RECOMPUTE])
    handle.detach()
    return model, handle, expected


def test_recording_may_come_and_go(recording) -> None:
    """Compiled without hooks, then with them for router logits, for hidden states, and for nothing; graphs are those of the four, and no more."""
    model, handle, expected = recording
    with handle:
        for run in (padded, aux, hidden, padded, aux, aux):
            found = run(model)
            if run is hidden:  # a loss between the layers: its gradient is added to a layer's own sum, in eager to each of its terms
                assert found.keys() == expected[run].keys()
                assert relative_error(found, expected[run]) <= 1e-6
            else:
                assert differing(found, expected[run]) == [], run.__name__
        assert handle.graphs == {"p0": 4, "p1": 4}
        with torch.no_grad():
            ids, mask = make_ids(2, 14, padded=True)
            output = model(input_ids=ids, attention_mask=mask, output_router_logits=True, output_hidden_states=True)
        assert (len(output.router_logits), len(output.hidden_states)) == (2, 3)
    assert differing(aux(model), expected[aux]) == [], "and without the plan as ever"


def test_recording_in_a_layer_left_to_checkpoint(recording) -> None:
    model, _, expected = recording
    variant = Variant(max_tokens=10**6, layers=["p", "p"])
    fqns = [fqn for fqn, _ in decoder_layers(model)]
    with attach_patterns(model, patterns={"p": RECOMPUTE}, variants=[variant], name="test", fallback=fqns):
        assert differing(aux(model), expected[aux]) == []


def test_nothing_of_the_collector_stays(recording) -> None:
    """After a step, and after one that failed while it was handed over."""
    model, handle, _ = recording
    collector = output_capture._collector()
    with handle:
        aux(model)
        assert (collector.compiling, collector.global_var, collector.get()) == (False, None, None)
        router = model.model.layers[1].mlp.gate
        hook = router.register_forward_hook(_fail)
        try:
            with pytest.raises(CaptureError, match=r"layers\.1 cannot be captured whole"):
                aux(model)
        finally:
            hook.remove()
        assert (collector.compiling, collector.global_var, collector.get()) == (False, None, None)


def _fail(*_: object) -> None:
    raise RuntimeError("no memory")


def test_transformers_that_records_otherwise_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in router logits that are silently missing: before the hooks are on, and after."""
    monkeypatch.setattr(output_capture, "_collector", lambda: None)
    model = build("qwen3_moe")
    with attach_one(model, RECOMPUTE):
        padded(model)
        for run in (aux, padded):
            with pytest.raises(CaptureError, match=r"model\.layers\.0 cannot be captured whole: .*; the layer records router logits.*switch output_router_logits and its like off"):
                run(model)


def test_hidden_states_inside_a_layer_are_refused(recording) -> None:
    model, handle, expected = recording
    norm = model.model.layers[1].post_attention_layernorm
    output_capture.output_capturing.install_output_capuring_hook(norm, "hidden_states", 0)
    try:
        handle.program._capture._recorded.clear()
        with handle:
            assert differing(aux(model), expected[aux]) == [], "nobody asked for hidden states"
            with pytest.raises(CaptureError, match=r"model\.layers\.1: the layer records hidden states of a module inside it.*output_hidden_states=False"):
                hidden(model)
    finally:
        norm._forward_hooks.popitem()
        handle.program._capture._recorded.clear()


def test_eager_attentions_are_recorded() -> None:
    """Each layer's own, in the model's order, also where the plan recomputes them."""
    twin, model = (build("llama", attn_implementation="eager") for _ in range(2))

    def run(model: nn.Module) -> dict[str, Tensor]:
        ids, mask = make_ids(2, 14, padded=True)
        return _gradients(model, input_ids=ids, attention_mask=mask, output_attentions=True)

    expected = run(twin)
    assert "attentions.1" in expected
    with attach_one(model, RECOMPUTE) as handle:
        assert differing(run(model), expected) == []
    assert handle.graphs["p"] == 1


def test_what_a_call_records_is_not_part_of_the_identity() -> None:
    """Trainers switch it on in the configuration; no layer's values depend on it."""
    model = build("qwen3_moe")
    before = model_identity(model, source="a")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    assert model_identity(model, source="a") == before


def test_dropped_model_is_collected_with_its_collector() -> None:
    model = build("qwen3_moe")
    handle: Handle = attach_one(model, RECOMPUTE)
    aux(model)
    references = [*handle.program._capture._models]
    assert all(reference() is not None for reference in references)
    del model
    gc.collect()
    assert all(reference() is None for reference in references)
