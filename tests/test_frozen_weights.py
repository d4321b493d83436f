"""Gradients of frozen experts: not computed, as in eager layers, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny
from torch import fx

from hilore_cli.capture import JointGraph
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import Pattern, Variant

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def operators(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if "grouped_mm" in str(node.target)]


@pytest.mark.parametrize(("trained", "products"), [("self_attn", ["forward"] * 4), ("gate_up_proj", ["forward"] * 3 + ["backward"]), ("experts", ["forward", "forward", "backward", "backward"])])
def test_backward_makes_the_gradients_that_train(trained: str, products: list[str]) -> None:
    """Bitwise those of the eager layer, for frozen experts, half frozen ones and ones that train."""
    torch.manual_seed(0)
    model = build_tiny("qwen3_moe", **MOE).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids = torch.randint(0, 97, (2, 12))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, use_cache=False, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]

    expected = gradients()
    seen: list[list[str]] = []

    def look(joint: JointGraph) -> None:
        joint.module.graph.lint()
        seen.append(operators(joint.module))

    layers = len(model.model.layers)
    for pattern in (Pattern(), Pattern(default="store")):
        with attach_patterns(model, patterns={"p": pattern}, variants=[Variant(max_tokens=10**6, layers=["p"] * layers)], name="t", on_split=look):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    named = {"forward": "transformers.grouped_mm_fallback.default", "backward": "transformers.grouped_mm_fallback_backward.default"}
    assert all(sorted(graph) == sorted(named[product] for product in products) for graph in seen)
    assert len(seen) >= 2
