"""The graphs that a GPU gives, on a CPU: layers traced with CUDA's attention operators (fake tensors need no kernels), and many plans
in one process on a torch without isolated compilations, as some GPU images have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import LIMIT, attach_each, differing, make_ids, step_gradients, step_loss
from test_timeline import assert_peaks, patterns_of, payload_bytes_of, real_order, real_split, saved_inputs
from torch import Tensor, fx
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hilore_cli import partition
from hilore_cli.capture import JointGraph, describe_joint
from hilore_cli.errors import CaptureError
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import LayerClass, Pattern, Variant
from hilore_cli.timeline import PayloadBytes, simulate_layer

aten = torch.ops.aten
HEADS = 32
"""As Llama has them: with so many the log-sum-exp is as large as some values that may be compressed."""


def flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, scale: float | None) -> Tensor:
    assert bias is None, "takes no mask"
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, scale=scale)[0]


def efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, scale: float | None) -> Tensor:
    bias = None if bias is None else bias.expand(query.shape[0], query.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout, bias is None, scale=scale)[0]


def cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, scale: float | None) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, dropout, bias is None, False, scale=scale)[0]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One layer's class and its split under many patterns. Nothing of it was run."""

    joint: JointGraph
    layer_class: LayerClass
    payload_bytes: PayloadBytes
    splits: list[tuple[Pattern, fx.GraphModule, fx.GraphModule]]


class TracedEnoughError(Exception):
    """Ends a forward before its first kernel would run."""


def trace(kernel: Callable[..., Tensor], *, padded: bool, dropout: float = 0.0) -> Traced:
    def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:
        key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        bias = None if mask is None else torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        return kernel(query, key, value, bias, dropout, scaling).transpose(1, 2).contiguous(), None

    name = f"traced_{'abc'[(flash, efficient, cudnn).index(kernel)]}"  # transformers looks for packages by words in it
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    model = build_tiny("llama", attn_implementation=name, hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=8, head_dim=2, attention_dropout=dropout)
    found: list[Traced] = []

    def keep(joint: JointGraph) -> None:
        layer_class = describe_joint(joint, name="A")
        splits = [(pattern, *real_split(joint, pattern)) for pattern in patterns_of(layer_class, count=6, seed=1)]
        found.append(Traced(joint=joint, layer_class=layer_class, payload_bytes=payload_bytes_of(joint, layer_class), splits=splits))
        raise TracedEnoughError

    with attach_patterns(model, patterns={"p": Pattern()}, variants=[Variant(max_tokens=LIMIT, layers=["p", "p"])], name="t", on_split=keep), pytest.raises(CaptureError, match="TracedEnough"):
        step_loss(model, *make_ids(2, 32, padded=padded))
    return found[0]


@pytest.mark.parametrize(("kernel", "padded"), [(flash, False), (efficient, True), (cudnn, True)], ids=["flash", "efficient", "cudnn"])
def test_plans_hold_for_the_attention_of_a_gpu(kernel: Callable[..., Tensor], padded: bool) -> None:
    """Saved sets, orders and liveness as predicted under every pattern; random states are not replayed where nothing is random."""
    traced = trace(kernel, padded=padded)
    units = {row.unit: row for row in traced.layer_class.nodes if row.unit and "sdpa" in row.unit}
    assert units["self_attn.sdpa.out"].compressible
    assert units["self_attn.sdpa.lse"].nbytes == 2 * HEADS * 32 * 4
    assert not units["self_attn.sdpa.lse"].compressible
    assert not any(row.pinned for row in units.values())
    outside = {row.name for row in traced.layer_class.nodes if row.kind in ("parameter", "shared")}
    for pattern, forward, backward in traced.splits:
        timeline = simulate_layer(traced.layer_class, pattern, payload_bytes=traced.payload_bytes)
        assert timeline.backward_order == real_order(backward), pattern
        assert sorted(timeline.saved) == sorted(n.name for n in saved_inputs(backward)), pattern
        assert_peaks(timeline, forward, backward, outside, traced.joint)
        assert not [n for graph in (forward, backward) for n in graph.graph.nodes if "rng_state" in f"{n.name} {n.target}" and n.name not in {row.name for row in traced.layer_class.nodes}]


def test_attention_with_dropout_is_stored() -> None:
    """Then its random states would have to be replayed: it is never recomputed."""
    traced = trace(efficient, padded=True, dropout=0.1)
    units = {row.unit: row for row in traced.layer_class.nodes if row.unit and "sdpa" in row.unit}
    assert all(row.pinned for row in units.values())
    for pattern, _, backward in traced.splits:
        assert not [n for n in backward.graph.nodes if n.target is aten._scaled_dot_product_efficient_attention.default], pattern


@pytest.mark.slow
def test_many_patterns_on_a_torch_without_isolated_compilations(monkeypatch) -> None:
    """torch 2.11 counts the graphs of all plans against one limit of 8: the tenth pattern ended in an error."""
    monkeypatch.setattr(partition, "HAS_ISOLATE_RECOMPILES", False)
    torch._dynamo.reset()
    model = build_tiny("llama", num_hidden_layers=10, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    ids, mask = make_ids(2, 8)
    exact = step_gradients(model, ids, mask)
    stored = ["mlp.gate_proj.mm", "mlp.up_proj.mm", "add", "self_attn.sdpa.out"]
    patterns = [Pattern(actions=dict.fromkeys([unit for bit, unit in enumerate(stored) if i >> bit & 1], "store")) for i in range(10)]
    with attach_each(model, patterns) as handle:
        assert differing(step_gradients(model, ids, mask), exact) == []
        assert handle.graphs == dict.fromkeys([f"p{i}" for i in range(10)], 1)
    torch._dynamo.reset()
