"""What a joint graph computes for weights that do not train, taken out of it.

An operator with a backward formula of its own gives all gradients at once. transformers multiplies by an expert's weights with such
an operator where torch has no traced grouped product (everything but bf16): for frozen experts (LoRA) its backward would make, and
throw away, a gradient as large as all experts of the layer. Eager layers take torch's own grouped product, which does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


def drop_idle_gradients(module: fx.GraphModule) -> None:
    """Let a grouped product's backward compute the input's gradient alone where nobody takes the weight's: bitwise the same products.

    grad_input of X @ W by groups is grad_output @ W^T by the same groups, which is the forward operator. A weight's gradient that is
    taken without the input's (trained experts of a first layer) stays as it is: it is the input's that is idle there, and small.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if str(node.target) != _GROUPED_BACKWARD or {user.args[1] for user in node.users} != {0}:
            continue
        rows, weight, offsets, grad_output = node.args
        if not rows.meta["val"].is_contiguous():  # the backward lays its result out like the input, the forward in rows
            continue
        with graph.inserting_before(node):
            transposed = graph.call_function(torch.ops.aten.transpose.int, (weight, 1, 2))
            product = graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, (grad_output, transposed, offsets))
        transposed.meta = _place(node) | {"val": weight.meta["val"].transpose(1, 2)}
        for taken in list(node.users):
            product.meta = _place(taken) | {"val": taken.meta["val"]}
            taken.replace_all_uses_with(product)
            graph.erase_node(taken)
        graph.erase_node(node)


def _place(node: fx.Node) -> dict[str, Any]:
    """What a node's metadata says of where it belongs, without what it says of its operator's arguments."""
    return {key: node.meta[key] for key in ("partitioner_tag", "seq_nr", "nn_module_stack", "stack_trace") if key in node.meta}
