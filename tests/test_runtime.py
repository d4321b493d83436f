"""attach / detach on tiny models: gradients bitwise equal to no plan, work and bytes by counting, and a model that behaves as if nothing were attached.

Families, attention implementations and autocast are in test_model_families.py. Compilations take most of the time: tests share handles.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections import Counter

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import (
    Captured,
    attach_each,
    attach_one,
    capture,
    differing,
    frozen_plan,
    make_ids,
    step_gradients,
    step_loss,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli import attach
from hilore_cli.capture import JointGraph, describe_joint
from hilore_cli.errors import CaptureError, PlanMismatchError
from hilore_cli.models import decoder_layers
from hilore_cli.partition import HAS_ISOLATE_RECOMPILES
from hilore_cli.peak import mark, trace_memory
from hilore_cli.runtime import RECOMPUTE_ALL, attach_patterns
from hilore_cli.schema import Pattern, Variant, freeze
from hilore_cli.timeline import simulate_layer

STORE, RECOMPUTE = Pattern(default="store"), Pattern()
MIXED = Pattern(actions={"mlp.gate_proj.mm": "store", "self_attn.v_proj.mm": "store", "add": "store"})
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}


# ------------------------------------------------------------------------------------------------------ bitwise gradients


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_without_padding(family: str) -> None:
    """The mask is None: another graph, with the causal flag instead of a mask; one row, two tokens and one token too."""
    model = build_tiny(family, **(GEMMA if family == "gemma3_text" else {}))
    shapes = [(3, 7)] if family == "gemma3_text" else [(3, 7), (1, 2), (2, 1)]
    batches = [make_ids(*shape) for shape in shapes]
    expected = [step_gradients(model, *batch) for batch in batches]
    with attach_one(model, RECOMPUTE):
        assert [differing(step_gradients(model, *batch), exact) for batch, exact in zip(batches, expected, strict=True)] == [[]] * len(shapes)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_dropout_draws_the_same_masks(attention: str) -> None:
    model = build_tiny("llama", attn_implementation=attention, attention_dropout=0.1)
    batch = make_ids(2, 14, padded=True)
    plain, expected = build_tiny("llama", attn_implementation=attention), step_gradients(model, *batch)
    assert differing(step_gradients(plain, *batch), expected), "dropout does something"
    with attach_each(model, [STORE, RECOMPUTE]):
        assert differing(step_gradients(model, *batch), expected) == []
        after = torch.rand(1)
    step_gradients(model, *batch)
    assert torch.equal(torch.rand(1), after), "the generator is left where the plain step leaves it"


def test_stochastic_codecs_draw_other_words_at_every_step_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same ones when the run is repeated."""
    model, batch = build_tiny("llama"), make_ids(2, 16)
    pattern = Pattern(actions={"mlp.gate_proj.mm": "compress:int4-sr"})

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)

    def run(ranks: list[int]) -> list[dict[str, Tensor]]:
        steps = []
        with attach_one(model, pattern):
            for rank in ranks:
                monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
                steps.append(step_gradients(model, *batch))
        return steps

    (first, second), (again, elsewhere) = run([0, 0]), run([0, 1])
    assert differing(first, again) == []
    assert differing(first, second), "another step"
    assert differing(second, elsewhere), "another rank"


def test_low_precision() -> None:
    model = build_tiny("llama", dtype=torch.bfloat16)
    batch = make_ids(2, 14, padded=True)
    expected = step_gradients(model, *batch)
    with attach_each(model, [STORE, RECOMPUTE]):
        assert differing(step_gradients(model, *batch), expected) == []


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(build_tiny("llama"), config).train()
    batch = make_ids(2, 14, padded=True)
    expected = step_gradients(model, *batch)
    assert all("lora_" in name for name in expected)
    with attach_each(model, [STORE, RECOMPUTE]):
        assert differing(step_gradients(model, *batch), expected) == []


def test_more_patterns_than_dynamo_keeps_entries() -> None:
    """dynamo keeps some graphs (8; here 2, for speed) for a code object that all layers share; the layer after would run without its plan."""
    if not HAS_ISOLATE_RECOMPILES:
        pytest.skip("this torch has no torch.compile(isolate_recompiles=)")
    model = build_tiny("llama", num_hidden_layers=3)
    batch = make_ids(2, 9, padded=True)
    expected = step_gradients(model, *batch)
    patterns = [RECOMPUTE, *(Pattern(actions={unit: "store"}) for unit in ("mlp.gate_proj.mm", "self_attn.v_proj.mm"))]
    with torch._dynamo.config.patch(recompile_limit=2), attach_each(model, patterns) as handle:
        assert differing(step_gradients(model, *batch), expected) == []
    assert handle.graphs == Counter({f"p{i}": 1 for i in range(3)})


# -------------------------------------------------------------------------------------------------- one model, many cases


@pytest.fixture(scope="module")
def mixed():
    """A llama, a compiled handle with an exact mixed pattern (detached between tests), a batch, and its exact gradients."""
    torch.set_num_threads(1)
    model = build_tiny("llama")
    batch = make_ids(2, 14, padded=True)
    expected = step_gradients(model, *batch)
    handle = attach_one(model, MIXED)
    step_gradients(model, *batch)
    handle.detach()
    return model, handle, batch, expected


def test_mixed_pattern_is_bitwise_equal_and_detach_restores(mixed) -> None:
    model, handle, batch, expected = mixed
    keys = list(model.state_dict())
    calls = handle.calls["p"]
    with handle:
        assert list(model.state_dict()) == keys
        assert differing(step_gradients(model, *batch), expected) == []
        assert handle.calls["p"] == calls + 2
        handle.install()  # harmless
    assert all("forward" not in vars(layer) and "_hilore" not in vars(layer) for _, layer in decoder_layers(model))
    assert differing(step_gradients(model, *batch), expected) == []
    assert handle.calls["p"] == calls + 2
    handle.detach()  # harmless
    graphs = handle.graphs["p"]
    with handle:
        assert differing(step_gradients(model, *batch), expected) == []
    assert handle.graphs["p"] == graphs, "a handle that is installed again keeps its graphs"


def test_no_grad_passes_through(mixed) -> None:
    model, handle, (ids, mask), _ = mixed
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
    calls = handle.calls["p"]
    with handle:
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=mask).logits
        with torch.inference_mode():
            assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
        generated = model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        model.train()
    assert torch.equal(found, expected)
    assert generated.shape == (2, 17)
    assert handle.calls["p"] == calls


def test_lc03_eval_with_gradients_applies_the_plan(mixed) -> None:
    model, handle, batch, _ = mixed
    try:
        expected = step_gradients(model.eval(), *batch)
        calls = handle.calls["p"]
        with handle:
            assert differing(step_gradients(model, *batch), expected) == []
        assert handle.calls["p"] == calls + 2
    finally:
        model.train()


def test_a_copy_runs_its_own_weights_and_no_plan(mixed) -> None:
    model, handle, batch, expected = mixed
    with handle:
        calls = handle.calls["p"]
        twin = copy.deepcopy(model)
        assert differing(step_gradients(twin, *batch), expected) == []
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not any(g.any() for name, g in step_gradients(twin, *batch).items() if "layers" in name)
        assert handle.calls["p"] == calls
        assert differing(step_gradients(model, *batch), expected) == []


def test_pickle_and_torch_save(mixed) -> None:
    model, handle, batch, expected = mixed
    with handle:
        calls = handle.calls["p"]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for loaded in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
            assert differing(step_gradients(loaded, *batch), expected) == []
        assert handle.calls["p"] == calls


def test_second_plan_is_refused(mixed) -> None:
    model, handle, _, _ = mixed
    with handle, pytest.raises(PlanMismatchError, match=r"layers\.0: another plan is attached"):
        attach_one(model, STORE)
    model.model.layers[1].forward = lambda *args, **kwargs: None
    try:
        with pytest.raises(PlanMismatchError, match=r"layers\.1: its forward was replaced"):
            handle.install()
        assert "forward" not in vars(model.model.layers[0]), "nothing is half attached"
    finally:
        del model.model.layers[1].forward


def test_checkpointing_left_on_is_refused(mixed) -> None:
    model, handle, batch, _ = mixed
    with handle:
        model.gradient_checkpointing_enable()
        try:
            with pytest.raises(PlanMismatchError, match=r"layers\.0: gradient checkpointing is on"):
                step_loss(model, *batch)
        finally:
            model.gradient_checkpointing_disable()


def test_ag01_backward_twice_doubles(mixed) -> None:
    model, handle, batch, expected = mixed
    with handle:
        loss = step_loss(model, *batch)
        loss.backward(retain_graph=True)
        loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert differing(found, {name: 2 * g for name, g in expected.items()}) == []


def test_hk08_skipped_backward_frees_memory(mixed) -> None:
    """At once, and a hundred times in a row. No garbage collection: values must not sit in cycles."""
    model, handle, batch, _ = mixed

    def skip_hundred() -> None:
        for step in range(100):
            loss = step_loss(model, *batch)
            mark(f"held {step}")
            del loss
            mark(f"dropped {step}")

    gc.disable()
    try:
        with handle:
            trace = trace_memory(skip_hundred)
    finally:
        gc.enable()
    held, dropped = ([trace.live_at(f"{moment} {step}") for step in range(100)] for moment in ("held", "dropped"))
    assert min(held) > 20_000
    assert dropped[0] < 4096
    assert set(dropped) == {dropped[0]}


def test_failed_step_can_be_repeated(mixed) -> None:
    model, handle, batch, expected = mixed
    with handle:
        hook = model.model.norm.register_full_backward_pre_hook(_out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            step_gradients(model, *batch)
        hook.remove()
        assert differing(step_gradients(model, *batch), expected) == []


def test_hooks_registered_later_fire(mixed) -> None:
    model, handle, batch, expected = mixed
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    try:
        hooked = step_gradients(model, *batch)
        assert differing(hooked, expected)
        with handle:
            assert differing(step_gradients(model, *batch), hooked) == []
    finally:
        hook.remove()


def test_dispatch_mode_is_an_error_not_a_silence(mixed) -> None:
    """torch runs compiled layers eagerly while a TorchDispatchMode is active; before and after the first call."""
    model, handle, batch, _ = mixed
    with handle, Passing(), pytest.raises(CaptureError, match=r"layers\.0 ran without its plan.*TorchDispatchMode"):
        step_loss(model, *batch)
    with attach_one(model, RECOMPUTE), Passing(), pytest.raises(CaptureError, match=r"layers\.0 ran without its plan.*TorchDispatchMode"):
        step_loss(model, *batch)


def test_unknown_unit_is_named(mixed) -> None:
    model, _, batch, _ = mixed
    with attach_one(model, Pattern(actions={"mlp.nowhere.mm": "store"})), pytest.raises(PlanMismatchError, match=r"layers\.0.*'mlp\.nowhere\.mm'"):
        step_loss(model, *batch)


def test_mm02_larger_micro_batch_is_recomputed_with_one_warning(mixed) -> None:
    model, _, batch, expected = mixed
    short = make_ids(2, 6, padded=True)
    exact = step_gradients(model, *short)
    with attach_one(model, MIXED, max_tokens=12) as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert differing(step_gradients(model, *batch), expected) == []
        assert differing(step_gradients(model, *short), exact) == []
    ours = [str(w.message) for w in caught if "every layer is recomputed" in str(w.message)]
    assert len(ours) == 1
    assert "28 tokens" in ours[0]
    assert "(12 tokens" in ours[0]
    assert handle.calls == Counter({RECOMPUTE_ALL: 4, "p": 2})


def test_layer_left_to_checkpoint(mixed) -> None:
    model, _, batch, expected = mixed
    fqns = [fqn for fqn, _ in decoder_layers(model)]
    variant = Variant(max_tokens=10**6, layers=["p", "p"])
    with attach_patterns(model, patterns={"p": RECOMPUTE}, variants=[variant], name="test", fallback=fqns) as handle:
        assert differing(step_gradients(model, *batch), expected) == []
    assert not handle.graphs


def test_dropped_model_is_collected() -> None:
    model = build_tiny("llama")
    handle = attach_one(model, RECOMPUTE)
    step_gradients(model, *make_ids(2, 14, padded=True))
    dead = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    del model
    gc.collect()
    assert dead() is None
    handle.detach()  # harmless


def _out_of_memory(*_: object) -> None:
    raise RuntimeError("out of memory")


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------------- by counting


@pytest.fixture(scope="module")
def counted():
    """Gradients, matrix products, attention calls and bytes held after forward for several patterns; and what the timeline says."""
    torch.set_num_threads(1)
    model = build_tiny("llama", hidden_size=64, intermediate_size=160, num_hidden_layers=3, head_dim=16)
    batch, other = make_ids(4, 33, padded=True), make_ids(3, 7, padded=True, seed=1)
    exact = [step_gradients(model, *b) for b in (batch, other)]
    patterns = {
        "recompute": RECOMPUTE,
        "store": STORE,
        "mixed": MIXED,
        "int8": Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "self_attn.sdpa.out": "compress:int8", "add": "store"}),
        "input": Pattern(actions={"input": "compress:int8"}),
    }
    joints: list[JointGraph] = []
    handle = attach_patterns(model, patterns=patterns, variants=[Variant(max_tokens=10**6, layers=["store"] * 3)], name="test", on_split=joints.append)
    figures, changed = {}, {}
    for name in patterns:
        handle.program.choice.variants = [Variant(max_tokens=10**6, layers=[name] * 3)]
        changed[name] = [differing(step_gradients(model, *b), e) for b, e in zip((batch, other), exact, strict=True)]
        figures[name] = (backward_operators(model, batch), bytes_after_forward(model, batch))
    handle.detach()
    assert handle.graphs == Counter(dict.fromkeys(patterns, 1)), "the second, odd shape goes through the first one's graph"
    return patterns, figures, Captured(joint=joints[0], layer_class=describe_joint(joints[0], name="A")), changed


def test_exact_plans_are_bitwise_equal(counted) -> None:
    """All stored, all recomputed, and a mix, at two shapes; a codec does something."""
    *_, changed = counted
    assert {name for name, names in changed.items() if names == [[], []]} == {"recompute", "store", "mixed"}


def test_recomputed_work_is_counted(counted) -> None:
    """6 of 7 matrix products a layer run again: down_proj's result is read by nobody, so it is never replayed."""
    _, figures, _, _ = counted
    products = {name: operators["aten::mm"] for name, (operators, _) in figures.items()}
    attention = {name: operators["aten::_scaled_dot_product_flash_attention_for_cpu"] for name, (operators, _) in figures.items()}
    assert products["recompute"] - products["store"] == 3 * 6
    assert products["mixed"] - products["store"] == 3 * 3  # query, key and up: the rest is behind what is stored
    assert products["input"] == products["recompute"]
    assert attention["recompute"] - attention["store"] == 3
    assert attention["mixed"] - attention["store"] == 3


def test_stored_bytes_are_those_of_the_timeline(counted) -> None:
    """Live bytes at the end of forward, all layers together, each pattern against recompute-all."""
    patterns, figures, captured, _ = counted
    layer_class = captured.layer_class
    predicted = {name: simulate_layer(layer_class, pattern, payload_bytes=captured.payload_bytes).stored_bytes for name, pattern in patterns.items()}
    for name, (_, held) in figures.items():
        measured = held - figures["recompute"][1]
        assert measured == pytest.approx(3 * (predicted[name] - predicted["recompute"]), abs=256), name
    assert figures["store"][1] > figures["int8"][1] > figures["input"][1]


def backward_operators(model: nn.Module, batch) -> Counter[str]:
    loss = step_loss(model, *batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        loss.backward()
    model.zero_grad(set_to_none=True)
    return Counter(event.name for event in recorder.events())


def bytes_after_forward(model: nn.Module, batch) -> int:
    """Inputs that all layers share are kept alive by hand: some patterns hold them, some do not, and the account has them once."""
    shared: list[object] = []

    def run() -> None:
        hook = model.model.layers[0].register_forward_pre_hook(lambda module, args, kwargs: shared.append(kwargs), with_kwargs=True)
        loss = step_loss(model, *batch)
        mark("forward done")
        hook.remove()
        del loss

    return trace_memory(run).live_at("forward done")


# ------------------------------------------------------------------------------------------------------------ frozen plans


def test_attach_frozen_plan_and_its_refusals() -> None:
    model = build_tiny("llama")
    batch = make_ids(2, 14, padded=True)
    plan = frozen_plan(model, {"A": MIXED}, ["A", "A"], max_tokens=64)
    expected = step_gradients(model, *batch)
    with attach(model, plan) as handle:
        assert differing(step_gradients(model, *batch), expected) == []
        assert handle.calls["A"] == 2
    frozen = build_tiny("llama")
    frozen.model.embed_tokens.requires_grad_(False)
    others = {
        "architecture LlamaForCausalLM, this model has Qwen3ForCausalLM": build_tiny("qwen3"),
        "number of decoder layers 2, this model has 3": build_tiny("llama", num_hidden_layers=3),
        "dtype float32, this model has bfloat16": build_tiny("llama", dtype=torch.bfloat16),
        "attention implementation sdpa, this model has eager": build_tiny("llama", attn_implementation="eager"),
        "configuration digest": build_tiny("llama", rms_norm_eps=1e-3),
        "number of parameters": build_tiny("llama", intermediate_size=80),
        "digest of parameter names, shapes and which are trainable": frozen,
    }
    for reason, other in others.items():
        with pytest.raises(PlanMismatchError, match=f"plan hand-made: made for {reason}"):
            attach(other, plan)
        assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(other))
    with pytest.raises(PlanMismatchError, match="made for 1 decoder layers, the model has 2"):
        attach(model, frozen_plan(model, {"A": MIXED}, ["A"], max_tokens=64))


def test_graph_that_was_not_profiled_is_recomputed_with_one_warning() -> None:
    """Rows without padding lose their mask, and the graph some of its units: training goes on, exactly."""
    torch.set_num_threads(1)
    model = build_tiny("llama")
    padded, full = make_ids(2, 12, padded=True), make_ids(2, 12, padded=False)
    captured = capture(model, *padded)
    layers = len(decoder_layers(model))
    plan = frozen_plan(model, {"A": Pattern(actions={"self_attn.clone": "compress:int8"})}, ["A"] * layers, max_tokens=64)
    plan = freeze(plan.model_copy(update={"graph_digests": [captured.layer_class.graph_digest]}))
    exact = step_gradients(model, *full)
    with attach(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients = step_gradients(model, *full)
    assert all(torch.equal(gradients[name], exact[name]) for name in exact)
    assert [str(w.message) for w in caught if "not one that was profiled" in str(w.message)] != []
    assert sum("self_attn.clone" in str(w.message) for w in caught) == 1
