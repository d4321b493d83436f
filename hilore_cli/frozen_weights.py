"""What a joint graph computes for weights that do not train, taken out of it.

An operator with a backward formula of its own gives all gradients at once. transformers multiplies by an expert's weights with such
an operator where torch has no traced grouped product (everything but bf16): for frozen experts (LoRA) its backward would make, and
throw away, a gradient as large as all experts of the layer. Eager layers take torch's own grouped product, which does not.
"""

from __future__ import annotations

import torch
from torch import fx

_GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


def drop_idle_gradients(module: fx.GraphModule) -> None:
    """Let a grouped product's backward compute the input's gradient alone where nobody takes the weight's: bitwise the same products.

    grad_input of X @ W by groups is grad_output @ W^T by the same groups, which is the forward operator.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if str(node.target) != _GROUPED_BACKWARD or {user.args[1] for user in node.users} != {0}:
            continue
        _, weight, offsets, grad_output = node.args
        with graph.inserting_before(node):
            transposed = graph.call_function(torch.ops.aten.transpose.int, (weight, 1, 2))
            product = graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, (grad_output, transposed, offsets))
        transposed.meta = node.meta | {"val": weight.meta["val"].transpose(1, 2)}
        for taken in list(node.users):
            product.meta = dict(taken.meta)
            taken.replace_all_uses_with(product)
            graph.erase_node(taken)
        graph.erase_node(node)
