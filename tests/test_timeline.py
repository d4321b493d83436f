"""The emulated partition against the real one: graphs, orders and liveness of captured layers under many patterns."""

from __future__ import annotations

import copy
import operator
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from profiles_for_tests import make_profile
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from transformers import AutoConfig, AutoModelForCausalLM

from hilore_cli.capture import JointGraph, describe_joint
from hilore_cli.errors import PlanMismatchError
from hilore_cli.partition import split_joint
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import LayerClass, Pattern, Variant
from hilore_cli.timeline import LayerTimeline, PayloadBytes, simulate_layer, simulate_step

BATCH, LENGTH = 2, 32
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16}
FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
}


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A layer class and, for each of many patterns, the two real graphs. Torch splits only while it traces."""

    joint: JointGraph
    layer_class: LayerClass
    payload_bytes: PayloadBytes
    splits: list[tuple[Pattern, fx.GraphModule, fx.GraphModule]]


@cache
def capture(family: str, attention: str = "sdpa", dropout: float = 0.0, frozen: str = "") -> Captured:
    """A tiny model's first layer, split under recompute-all, store-all, compressed and random patterns; parameters with `frozen` in their names do not train."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, **FAMILIES[family])
    if dropout:
        config.attention_dropout = dropout
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    found: list[Captured] = []

    def keep(joint: JointGraph) -> None:
        if found:
            return
        layer_class = describe_joint(joint, name="A")
        splits = [(pattern, *real_split(joint, pattern)) for pattern in patterns_of(layer_class, count=10, seed=1)]
        found.append(Captured(joint=joint, layer_class=layer_class, payload_bytes=payload_bytes_of(joint, layer_class), splits=splits))

    ids = torch.randint(0, 128, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with attach_patterns(model, patterns={"p": Pattern()}, variants=[Variant(max_tokens=10**6, layers=["p", "p"])], name="t", on_split=keep):
        model(ids, attention_mask=mask, use_cache=False, labels=ids).loss.backward()
    return found[0]


def payload_bytes_of(joint: JointGraph, layer_class: LayerClass) -> PayloadBytes:
    """Payload sizes of the real codecs."""
    nodes = {n.name: n for n in joint.nodes}
    name_of = {row.unit: row.name for row in layer_class.nodes if row.unit}

    wanted = [(row.unit, codec) for row in layer_class.nodes if row.unit and row.compressible for codec in ("int8", "int4")]
    sizes = {(unit, codec): tensor_bytes(torch.ops.hilore.compress.default(nodes[name_of[unit]].meta["val"], codec)) for unit, codec in wanted}
    return lambda unit, codec: sizes[unit, codec]


def patterns_of(layer_class: LayerClass, *, count: int, seed: int) -> list[Pattern]:
    units = [row.unit for row in layer_class.nodes if row.unit]
    compressible = {row.unit for row in layer_class.nodes if row.compressible and not row.pinned}
    rng = random.Random(seed)
    patterns = [Pattern(), Pattern(default="store"), Pattern(actions={"input": "compress:int8"}), Pattern(actions=dict.fromkeys(units, "store"))]
    patterns.append(Pattern(actions={u: "compress:int8" if u in compressible else "store" for u in units}))
    for _ in range(count):
        share = rng.choice([0.1, 0.3, 0.6])
        actions = {}
        for unit in units:
            if rng.random() < share:
                actions[unit] = rng.choice(["store", "compress:int8", "compress:int4"]) if unit in compressible else "store"
        patterns.append(Pattern(actions=actions))
    return patterns


CASES = [("llama", "sdpa", 0.0, ""), ("llama", "eager", 0.1, ""), ("llama", "sdpa", 0.1, ""), ("gemma3_text", "eager", 0.0, ""), ("qwen3_moe", "sdpa", 0.0, ""), ("qwen3_moe", "sdpa", 0.0, "experts")]


@pytest.mark.parametrize(("family", "attention", "dropout", "frozen"), CASES)
def test_emulation_equals_real_graphs(family: str, attention: str, dropout: float, frozen: str) -> None:
    """Order, saved set and liveness of both graphs, for recompute-all, store-all, compressed and random patterns."""
    assert_emulated(capture(family, attention, dropout, frozen))


def test_outputs_that_no_node_takes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator makes all its outputs: here a gradient of frozen experts, which nobody asked for (and which hilore takes out of the graph)."""
    lean = capture("qwen3_moe", "sdpa", 0.0, "experts")
    monkeypatch.setattr("hilore_cli.partition.drop_idle_gradients", lambda module: None)
    wasteful = capture.__wrapped__("qwen3_moe", "sdpa", 0.0, "experts")
    assert_emulated(wasteful)
    made = [sum(row.nbytes for row in captured.layer_class.nodes if row.storage < 0) for captured in (lean, wasteful)]
    experts = 4 * 4 * (2 * 32 * 64 + 64 * 32)
    assert made == [0, experts]
    peaks = [simulate_layer(captured.layer_class, Pattern(), payload_bytes=captured.payload_bytes).backward_peak_bytes for captured in (lean, wasteful)]
    assert peaks[1] > peaks[0] + experts // 3


def assert_emulated(captured: Captured) -> None:
    layer_class, joint = captured.layer_class, captured.joint
    for pattern, forward, backward in captured.splits:
        timeline = simulate_layer(layer_class, pattern, payload_bytes=captured.payload_bytes)
        assert timeline.backward_order == real_order(backward), pattern
        assert sorted(timeline.saved) == sorted(n.name for n in saved_inputs(backward)), pattern
        outside = {row.name for row in layer_class.nodes if row.kind in ("parameter", "shared")}
        assert_peaks(timeline, forward, backward, outside, joint)


def assert_peaks(timeline: LayerTimeline, forward: fx.GraphModule, backward: fx.GraphModule, outside: set[str], joint: JointGraph) -> None:
    stored = {storage_of(n): tensor_bytes(n.meta["val"]) for n in saved_inputs(backward)}
    free = {storage_of(n) for n in joint.nodes if n.name in outside}
    assert timeline.stored_bytes == sum(nbytes for storage, nbytes in stored.items() if storage not in free)
    attention = next((n.meta["val"] for n in joint.nodes if n.meta.get("val").__class__ is tuple and "backward" not in n.name), ())
    assert timeline.backward_peak_bytes == count_peak(backward, free, attention, hold_inputs=False)
    assert timeline.forward_peak_bytes == count_peak(forward, free, attention, hold_inputs=True)


def test_unknown_unit_is_named() -> None:
    layer_class = capture("llama").layer_class
    with pytest.raises(PlanMismatchError, match="no_such"):
        simulate_layer(layer_class, Pattern(actions={"no_such": "store"}), payload_bytes=lambda unit, codec: 0)


def test_mm01_boundaries_are_charged() -> None:
    """Storing the input of every child (norm, attention, norm, MLP) costs about four tensors a layer against one."""
    captured = capture("llama")
    layer_class, payload_bytes = captured.layer_class, captured.payload_bytes
    hidden = next(row.nbytes for row in layer_class.nodes if row.kind == "activation")
    boundaries = ["input_layernorm.mul.1", "add", "post_attention_layernorm.mul.1"]
    whole = simulate_layer(layer_class, Pattern(), payload_bytes=payload_bytes)
    parts = simulate_layer(layer_class, Pattern(actions=dict.fromkeys(boundaries, "store")), payload_bytes=payload_bytes)
    assert whole.stored_bytes == hidden
    assert parts.stored_bytes == 4 * hidden
    assert parts.recompute_us <= whole.recompute_us


def test_step_moments() -> None:
    """The head binds when it is large, the last layer's backward when it is small, and every row adds up to the peak."""
    for head_bytes, moment in ((10**9, "loss head"), (0, "backward of layer 3")):
        profile = make_profile(layers=4, head_bytes=head_bytes)
        step = simulate_step(profile, [Pattern()] * 4)
        assert step.binding_moment == moment
        assert step.peak_bytes == sum(row.nbytes for row in step.account)
        account = profile.account
        assert step.peak_bytes >= account.static_bytes + account.shared_bytes + step.stored_bytes + head_bytes


# ----------------------------------------------------------------------------------- an independent count on real graphs


def real_split(joint: JointGraph, pattern: Pattern) -> tuple[fx.GraphModule, fx.GraphModule]:
    module = fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph))
    fresh = JointGraph(module=module, num_fwd_outputs=joint.num_fwd_outputs, static_indices=joint.static_indices)
    return split_joint(fresh, None, pattern=pattern, static_lifetime_input_indices=sorted(joint.static_indices))


def saved_inputs(backward: fx.GraphModule) -> list[fx.Node]:
    """Tensors that forward hands over, without the generator state."""
    return [n for n in backward.graph.find_nodes(op="placeholder") if is_tensor(n) and not n.name.startswith(("tangents", "rng_state"))]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def real_order(graph: fx.GraphModule) -> tuple[str, ...]:
    names = []
    for node in graph.graph.nodes:
        if node.target is torch.ops.hilore.decompress.default:
            names.append(f"decompress:{node.args[0].name}")
        elif node.target is run_with_rng_state:  # torch replays attention under the saved generator state, dropout or not
            names.append(node.args[1]._schema.name.split("::")[1])
        elif node.op == "call_function" and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            names.append(node.name)
    return tuple(names)


def tensor_bytes(value: torch.Tensor) -> int:
    nbytes = value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else int(nbytes.node.hint)


def storage_of(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata


def count_peak(graph: fx.GraphModule, free: set[int], attention: tuple[torch.Tensor, ...], *, hold_inputs: bool) -> int:
    """Run the graph's bookkeeping the way generated code does: names hold storages, a name dies after its last use."""
    nodes = [n for n in graph.graph.nodes if n.op == "output" or isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)) or n.target in (run_with_rng_state, run_and_save_rng_state, operator.getitem)]
    last = {used: position for position, node in enumerate(nodes) for used in node.all_input_nodes}
    names: dict[fx.Node, dict[object, int]] = {}
    peak = 0
    for position, node in enumerate(nodes):
        names[node] = held_by(node, names, free, attention)
        live: dict[object, int] = {}
        for held in names.values():
            live.update(held)
        peak = max(peak, sum(live.values()))
        for name in [n for n in names if last.get(n, -1) <= position]:
            if not (name.op == "placeholder" and hold_inputs):
                del names[name]
    return peak


def held_by(node: fx.Node, names: dict[fx.Node, dict[object, int]], free: set[int], attention: tuple[torch.Tensor, ...]) -> dict[object, int]:
    """Storages that a name keeps alive, with their bytes. The generator state that torch saves (5 KB) is left out."""
    if node.op == "output" or node.name.startswith("rng_state"):
        return {}
    value = node.meta.get("val")
    if node.target in (run_with_rng_state, run_and_save_rng_state):
        value = attention
    if isinstance(value, (tuple, list)):
        bases = {storage_of(used): names[used] for used in node.all_input_nodes if is_tensor(used)}  # split returns views
        fresh = {(node.name, i): v for i, v in enumerate(value) if isinstance(v, torch.Tensor)}
        held = {key: tensor_bytes(v) for key, v in fresh.items() if v.untyped_storage()._cdata not in bases}
        return held | {key: n for v in fresh.values() for key, n in bases.get(v.untyped_storage()._cdata, {}).items()}
    if node.target is operator.getitem:
        source, position = node.args
        if source.target is run_and_save_rng_state:
            return names[source] if position == 1 else {}
        return {key: nbytes for key, nbytes in names[source].items() if not isinstance(key, tuple) or key[1] == position}
    if storage_of(node) in free:
        return {}
    if node.op == "placeholder":
        return {storage_of(node): tensor_bytes(value)}
    for used in node.all_input_nodes:  # a view holds what its base holds
        if is_tensor(used) and storage_of(used) == storage_of(node) and node.target is not torch.ops.hilore.decompress.default:
            return names[used]
    return {node.name: tensor_bytes(value)}
