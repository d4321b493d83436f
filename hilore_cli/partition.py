"""A plan's pattern -> two graphs. The only file that touches torch's compiler backends and partitioner.

Torch's joint graph is tagged (MUST_SAVE for what the pattern stores or compresses and for what may never be recomputed,
MUST_RECOMPUTE for the rest), split by torch's default partitioner, and each compressed saved value is replaced by its payload:
`hilore::compress` right after the producer in the forward graph, `hilore::decompress` right before the first use in the
backward graph. Names used: `functorch.compile.default_partition`, `torch._dynamo.backends.common.aot_autograd`,
`torch.utils.checkpoint.CheckpointPolicy` (torch 2.11 to 2.14 alike); `torch.compile(isolate_recompiles=)` is absent in 2.11.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from functorch.compile import default_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils.checkpoint import CheckpointPolicy

import hilore_cli.codecs  # noqa: F401 - registers torch.ops.hilore
from hilore_cli.capture import (
    WRITES,
    JointGraph,
    eager_operator,
    forward_nodes,
    must_store,
    refuse_mutation,
    storage_owners,
    unit_keys,
)
from hilore_cli.errors import CaptureError, MutatingLayerError, PlanMismatchError
from hilore_cli.frozen_weights import drop_idle_gradients
from hilore_cli.schema import Pattern

HAS_ISOLATE_RECOMPILES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
RECOMPILE_LIMIT = 64
"""Graphs of one pattern (before torch 2.12 of all patterns of a class of layers). torch's own limit is 8; modes, precisions, masks and single rows multiply."""
ALL_RECOMPILES_LIMIT = 4096
"""The same over all plans of a process."""
RECOMPILES = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": ALL_RECOMPILES_LIMIT}
"""For whatever compiles a layer's class: torch counts a class's graphs together, whoever made them."""


def compile_layer(forward: Callable[..., Any], *, pattern: Pattern, on_split: Callable[[JointGraph], Pattern | None], on_run: Callable[[], None] | None = None, on_graphs: Callable[[fx.GraphModule, fx.GraphModule], None] | None = None, run: Callable[[fx.GraphModule, str], Callable[[list[Any]], Any]] | None = None) -> Callable[..., Any]:
    """`type(layer).forward` compiled once for one pattern; the layer is the first argument, so layers share the graphs.

    `on_split` is told of every joint graph before it is split, and may answer with another pattern for it. `on_run` is called at each run of a forward graph: it
    proves that the plan is on (torch runs a layer eagerly without a word under a dispatch mode, a stance or after an early exception). `run` may wrap the
    generated code ("forward" or "backward").
    """

    def partition(module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None, **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        drop_idle_gradients(module)
        joint = JointGraph(module=module, num_fwd_outputs=num_fwd_outputs, static_indices=frozenset(static_lifetime_input_indices or ()))
        graphs = split_joint(joint, joint_inputs, pattern=on_split(joint) or pattern, static_lifetime_input_indices=static_lifetime_input_indices, **rest)
        if on_graphs is not None:
            on_graphs(*graphs)
        return graphs

    def compiler(side: str) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, _example_inputs: Any) -> Callable[[list[Any]], Any]:
            _refuse_written_inputs()
            _declare_no_donated_buffers()
            boxed = box_graph(graph)
            told = boxed if run is None else run(graph, side)
            return _as_boxed(told if side == "backward" or on_run is None else _after(on_run, told))

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), partition_fn=partition)
    return compile_whole(forward, backend=backend, dynamic=True)


def compile_whole(forward: Callable[..., Any], *, backend: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """torch.compile without graph breaks, its recompilations counted apart from those of other compilations of `forward` where torch can (2.12)."""
    options = {"isolate_recompiles": True} if HAS_ISOLATE_RECOMPILES else {}
    return torch.compile(forward, backend=backend, fullgraph=True, dynamic=dynamic, **options)


@contextmanager
def compiler_settings() -> Iterator[None]:
    """Settings of torch's compiler for our calls only.

    donated_buffer: retain_graph works. skip_nnmodule_hook_guards: hooks added later are honoured. use_duck_shape: a length
    that equals a head size does not become one symbol with it. specialize_float: eps is a constant, not a tensor input.
    optimize_ddp: inside DistributedDataParallel torch would cut a layer's graph at the edges of gradient buckets. skip_fsdp_guards:
    in sharded layers torch would make symbols of integers (head sizes), and a graph that is not the profiled one. The limits: above.
    """
    with (
        torch._functorch.config.patch(donated_buffer=False),
        torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, specialize_float=True, optimize_ddp=False, skip_fsdp_guards=False, **RECOMPILES),
        torch.fx.experimental._config.patch(use_duck_shape=False),
    ):
        yield


def _refuse_written_inputs() -> None:
    """Raise MutatingLayerError for a layer whose forward writes into a buffer or an input (BatchNorm, load counters): torch carries
    the write out behind the graph, which does not show it, and a recomputation would then read what was written.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and any(info.mutates_data for info in context.fw_metadata.input_info):
        raise MutatingLayerError(WRITES)


def _declare_no_donated_buffers() -> None:
    """Let `retain_graph` work outside `compiler_settings` too: torch asks for donated_buffer again when backward runs, where
    the caller's setting holds, and takes a list that was never made (because it was off while compiling) for a full one."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def box_graph(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Generated code that empties its argument list, so that each value dies after its last use."""
    for node in graph.graph.nodes:
        node.target = eager_operator(node)
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    return _as_boxed(graph.forward)


def split_joint(joint: JointGraph, joint_inputs: Any, *, pattern: Pattern, **partitioner_arguments: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph of one layer under one pattern. Raises PlanMismatchError for a unit that the graph lacks."""
    refuse_mutation(joint)
    keys = unit_keys(joint)
    codec_of = tag_joint(joint, keys, pattern)
    forward, backward = default_partition(joint.module, joint_inputs, num_fwd_outputs=joint.num_fwd_outputs, **partitioner_arguments)
    for name, codec in codec_of.items():
        insert_codec(forward, backward, name=name, codec=codec, num_fwd_outputs=joint.num_fwd_outputs, stream=crc32(keys[name].encode()) & 0x7FFFFFFF)
    for graph in (forward, backward):
        graph.graph.lint()
    return forward, backward


def tag_joint(joint: JointGraph, keys: dict[str, str], pattern: Pattern) -> dict[str, str]:
    """Tag every forward operator for torch's partitioner; returns node name -> codec for the units to compress."""
    missing = set(pattern.actions) - set(keys.values())
    if missing:
        raise PlanMismatchError(f"the plan names unit {sorted(missing)[0]!r}, which this layer's graph does not have; profile the model as it is run now")
    owners = storage_owners(joint)
    codec_of: dict[str, str] = {}
    for node in forward_nodes(joint):
        owner = owners.get(node.name, node.name)
        action = pattern.actions.get(keys.get(owner, ""), pattern.default)
        compressed = action.startswith("compress:")
        if compressed and owner == node.name:
            codec_of[node.name] = action.removeprefix("compress:")
        if node.op == "call_function":
            # views of a compressed or stored unit are taken again from what is saved: one copy per storage
            saved = must_store(node) if owner != node.name and action != pattern.default else action != "recompute" or must_store(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
            if not saved and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                # attention without dropout: its outputs carry the tags that count; one here would make torch replay random states for it
                del node.meta["recompute"]
    return codec_of


def insert_codec(forward: fx.GraphModule, backward: fx.GraphModule, *, name: str, codec: str, num_fwd_outputs: int, stream: int) -> None:
    """Replace one saved value by its payload in both graphs; nothing happens when backward does not read it. `stream`: of a stochastic codec's random numbers."""
    saved_input = next((n for n in backward.graph.find_nodes(op="placeholder") if n.name == name), None)
    producer = next((n for n in forward.graph.nodes if n.name == name), None)
    if saved_input is None:
        return
    if producer is None:
        raise CaptureError(f"the value {name} is saved for backward but not made in forward; report the layer")
    value = producer.meta["val"]
    output = next(iter(forward.graph.find_nodes(op="output")))
    with forward.graph.inserting_before(_last_placeholder_or(producer, forward).next):
        payload = forward.graph.call_function(torch.ops.hilore.compress.default, (producer, codec, _symbolic_list(forward, value.stride()), stream))
    payload.meta["val"] = torch.ops.hilore.compress.default(value, codec)
    results = list(output.args[0])
    output.args = ([*results[:num_fwd_outputs], *(payload if r is producer else r for r in results[num_fwd_outputs:])],)
    first_use = next(iter(sorted(saved_input.users, key=list(backward.graph.nodes).index)))
    with backward.graph.inserting_before(first_use):
        size, stride = _symbolic_list(backward, value.shape), _symbolic_list(backward, value.stride())
        restored = backward.graph.call_function(torch.ops.hilore.decompress.default, (saved_input, codec, value.dtype, size, stride))
    restored.meta["val"] = value
    saved_input.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    saved_input.meta["val"] = payload.meta["val"]


def _last_placeholder_or(producer: fx.Node, forward: fx.GraphModule) -> fx.Node:
    """Where `compress` goes: after the producer, or after all placeholders when the producer is one."""
    return producer if producer.op != "placeholder" else forward.graph.find_nodes(op="placeholder")[-1]


def _symbolic_list(graph: fx.GraphModule, sizes: Any) -> list[Any]:
    return [size if isinstance(size, int) else _symbolic_node(graph, size.node.expr) for size in sizes]


def _symbolic_node(graph: fx.GraphModule, expression: Any) -> fx.Node:
    """A node that holds a symbolic size: one that is there, or computed from the inputs' shapes."""
    symbols: dict[Any, fx.Proxy] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            if value.node.expr == expression:
                return node
            symbols.setdefault(value.node.expr, fx.Proxy(node))
    for symbol in expression.free_symbols - set(symbols):
        symbols[symbol] = fx.Proxy(_size_node(graph, symbol))
    return sympy_interp(PythonReferenceAnalysis, symbols, expression).node


def _size_node(graph: fx.GraphModule, symbol: Any) -> fx.Node:
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dimension, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                return graph.graph.call_function(torch.ops.aten.sym_size.int, (node, dimension))
    raise CaptureError(f"the size {symbol} of a compressed unit is not known in the layer's graph; leave the unit out with --codecs or report the layer")


def _after(first: Callable[[], None], function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run_both(arguments: list[Any]) -> Any:
        first()
        return function(arguments)

    return run_both


def _as_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run_graph(arguments: list[Any]) -> Any:
        return function(arguments)

    run_graph._boxed_call = True
    return run_graph
