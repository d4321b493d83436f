"""Reading a layer's joint forward and backward FX graph: recovery units, storages, bytes, digest.

Nothing here changes a graph (partition.py does) or runs one (profiler.py, risk.py and runtime.py do). Torch hands the
joint graph to a backend's partition function; its nodes carry fake tensors whose storages tell which node is a view of which.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from hilore_cli.adapters import idle_adapters
from hilore_cli.errors import CaptureError, MutatingLayerError
from hilore_cli.lora import find_lora
from hilore_cli.models import decoder_layers
from hilore_cli.provenance import ModelId
from hilore_cli.scaling import evaluate_terms
from hilore_cli.schema import INPUT_UNIT, GraphNode, LayerClass

MIN_NUMEL_PER_TOKEN = 32
"""A value with fewer elements a token (log-sum-exp, rstd) gains nothing from a codec's groups: stored or recomputed."""

WRITES = "the layer writes into a buffer or an input during forward, and recomputing it, here or by checkpointing, would write twice; write after the step instead, outside the layer, or train this model without a plan"

LOG_SUM_EXP = "lse"
"""Of attention, one a head and token: backward takes its exponential, so that it is never compressed, however many heads there are."""

_SHORT_NAMES = {
    "_scaled_dot_product_flash_attention_for_cpu": "sdpa",
    "_scaled_dot_product_flash_attention": "sdpa",
    "_scaled_dot_product_efficient_attention": "sdpa",
    "_scaled_dot_product_cudnn_attention": "sdpa",
    "_scaled_dot_product_fused_attention_overrideable": "sdpa",
}
_OUTPUT_NAMES = {"output": "out", "logsumexp": LOG_SUM_EXP, "log_sumexp": LOG_SUM_EXP}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution", "_grouped_mm", "grouped_mm", "grouped_mm_fallback", "_scaled_mm", "sdpa"}
_STEERING = {"topk", "sort", "argsort", "argmax", "argmin", "nonzero", "bincount", "histc", "searchsorted", "unique_dim", "_unique2", "randperm"}
_CONFIG_NOT_IN_GRAPH = {"output_router_logits", "router_aux_loss_coef", "output_hidden_states", "output_attentions", "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "_attn_implementation", "attn_implementation", "pad_token_id", "bos_token_id", "eos_token_id"}
_COMPRESSIBLE_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """A joint graph as torch handed it over, with what only that moment knows."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_indices: frozenset[int]

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)


def forward_nodes(joint: JointGraph) -> list[fx.Node]:
    """Nodes up to the last one that torch tagged as forward, tangents left out: the rule of torch's default partitioner."""
    nodes = joint.nodes
    last = max(i for i, n in enumerate(nodes) if _is_primal(n) or n.meta.get("partitioner_tag") == "is_forward")
    return [n for n in nodes[: last + 1] if not _is_tangent(n) and n.op != "output"]


def unit_keys(joint: JointGraph) -> dict[str, str]:
    """Key of each forward node that owns a storage: node name -> `module.path.op[.output][.ordinal]`, and `input` for the layer's input.

    Keys, not node names, are what plans hold: they survive another mask, another length and another torch release.
    """
    seen: dict[str, int] = {}
    keys: dict[str, str] = {}
    owners = storage_owners(joint)
    for node in forward_nodes(joint):
        if node.op == "placeholder":
            continue
        if owners.get(node.name) != node.name:
            continue
        base = ".".join(part for part in (_module_path(node), _op_name(node), _output_name(node)) if part)
        ordinal = seen.get(base, 0)
        seen[base] = ordinal + 1
        keys[node.name] = base if ordinal == 0 else f"{base}.{ordinal}"
    for node in activation_inputs(joint)[:1]:
        keys[node.name] = INPUT_UNIT
    return keys


def storage_owners(joint: JointGraph) -> dict[str, str]:
    """Node name -> name of the first node with the same storage, for tensor-valued nodes."""
    first: dict[int, str] = {}
    owners: dict[str, str] = {}
    for node in joint.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            owners[node.name] = first.setdefault(value.untyped_storage()._cdata, node.name)
    return owners


def activation_inputs(joint: JointGraph) -> list[fx.Node]:
    """Placeholders that carry the residual stream: not static, floating, and shaped like the layer's first output."""
    output = _forward_outputs(joint)[0].meta.get("val")
    found = []
    for position, node in enumerate(n for n in joint.nodes if _is_primal(n)):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point() and position not in joint.static_indices and value.dim() == output.dim() and str(value.shape) == str(output.shape):
            found.append(node)
    return found


def is_random(node: fx.Node) -> bool:
    """True for operators that consume random numbers; attention without dropout does not, whatever its tag says."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if _op_name(node) == "sdpa":
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        return given.get("dropout_p", 0.0) != 0.0
    return True


def eager_operator(node: fx.Node) -> Any:
    """What runs for a node: `reshape` for `view`, because some kernels lay their result out otherwise than the traced fakes say
    (qwen3_next's gated delta rule on a CPU, torch 2.13); where the layouts agree it is the same view.
    """
    return torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target


def must_store(node: fx.Node) -> bool:
    """True for values that no plan may recompute: random, steering an index, or the result of a collective."""
    source = node.args[0] if node.op == "call_function" and _is_getitem(node) else node
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    namespace = getattr(source.target, "namespace", "")
    return is_random(source) or _op_name(source) in _STEERING or namespace in ("_c10d_functional", "c10d_functional")


def describe_joint(joint: JointGraph, *, name: str) -> LayerClass:
    """The joint graph as a record: storages, bytes (at the traced shape and as polynomials of batch and length), units.

    Raises CaptureError when the graph writes into its inputs (recomputing such a layer would be wrong).
    """
    nodes = [n for n in joint.nodes if n.op != "output" and not _is_symbolic(n)]
    refuse_mutation(joint)
    index = {node.name: i for i, node in enumerate(nodes)}
    owners, keys = storage_owners(joint), unit_keys(joint)
    forward = {n.name for n in forward_nodes(joint)}
    activations = {n.name for n in activation_inputs(joint)[:1]}
    downstream = _downstream(joint, activations)
    batch, length = _batch_and_length(joint)
    primals = [n for n in joint.nodes if _is_primal(n)]
    static = {primals[i].name for i in joint.static_indices if i < len(primals)}
    rows = []
    for node in nodes:
        value = node.meta.get("val")
        owner = owners.get(node.name)
        owns = owner == node.name
        terms = _byte_terms(value, batch, length) if owns else _untaken_terms(node, batch, length)
        rows.append(
            GraphNode(
                index=index[node.name],
                name=node.name,
                target="placeholder" if node.op == "placeholder" else str(node.target),
                side="tangent" if _is_tangent(node) else "forward" if node.name in forward else "backward",
                inputs=[index[n.name] for n in dict.fromkeys(node.all_input_nodes) if n.name in index],
                storage=index[owner] if owner is not None else -1,
                nbytes=evaluate_terms(terms, batch=_hint(batch), length=_hint(length)),
                nbytes_terms=terms,
                kind=_kind(node, static=static, activations=activations),
                unit=keys.get(node.name),
                matmul=node.op == "call_function" and _is_matmul(node),
                pinned=must_store(node),
                compressible=owns and node.name in downstream and node.name in forward and _output_name(node) != LOG_SUM_EXP and _is_compressible(value, terms, batch, length),
                mask=owns and must_store(node) and node.name in forward and value.dtype == torch.bool and _is_large(value, terms, batch, length),
                time_us=0.0,
            )
        )
    output = next(n for n in joint.nodes if n.op == "output")
    results = [n for n in output.all_input_nodes if n.name in index]
    forward_results = list(dict.fromkeys(n for n in _forward_outputs(joint) if isinstance(n, fx.Node) and n.name in index))
    return LayerClass(
        name=name,
        graph_digest=graph_digest(joint),
        nodes=rows,
        outputs=[index[n.name] for n in dict.fromkeys(results) if n not in set(forward_results)],
        forward_outputs=[index[n.name] for n in forward_results],
    )


def graph_digest(joint: JointGraph) -> str:
    """16 hex digits over operators, constants and wiring; node and symbol names do not matter."""
    position = {node: i for i, node in enumerate(joint.nodes)}
    lines = []
    for node in joint.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{position[n]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {arguments}")
    return _sha("\n".join(lines))


def model_identity(model: torch.nn.Module, *, source: str) -> ModelId:
    """What a plan is bound to: architecture, configuration, parameters and which of them train. `source` is for people only.

    Adapters that are there but not active (TRL keeps a frozen copy as its reference) take no part.
    """
    config, idle = model.config, idle_adapters(model)
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if idle.isdisjoint(name.split("."))]
    settings = _graph_settings(config.to_dict())
    names = [f"{n} {tuple(p.shape)} {p.dtype} {'train' if p.requires_grad else 'frozen'}" for n, p in parameters]
    layers = decoder_layers(model)
    lora = find_lora(model, layers)
    return ModelId(
        source=source,
        architecture=str((config.architectures or [_own_class(model).__name__])[0]),
        config_digest=_sha("\n".join(f"{k}={settings[k]!r}" for k in sorted(settings))),
        layers=len(layers),
        parameters=sum(p.numel() for _, p in parameters),
        trainable_digest=_sha("\n".join(sorted(names))),
        dtype=str(parameters[0][1].dtype).removeprefix("torch."),
        attn_implementation=str(config._attn_implementation),
        lora_rank=lora and lora.rank,
        **({} if lora is None else {"lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "lora_targets": None if lora.targets is None else list(lora.targets)}),
    )


def sharded_modules(model: torch.nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on (FSDP2)."""
    return [module for module in model.modules() if _is_sharded(type(module))]


# --------------------------------------------------------------------------------------------------------------- helpers


def _is_sharded(cls: type) -> bool:
    # by name: not every build of torch has torch.distributed
    return any(base.__name__ == "FSDPModule" for base in cls.__mro__)


def _own_class(model: torch.nn.Module) -> type:
    """The model's class as it was before `fully_shard` swapped in one of its own."""
    return next(cls for cls in type(model).__mro__ if not _is_sharded(cls))


def _graph_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what trainers and versions change but no graph depends on; nested configurations alike."""
    return {k: _graph_settings(v) if isinstance(v, dict) else v for k, v in settings.items() if k not in _CONFIG_NOT_IN_GRAPH}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" not in str(node.target) and "bwd_seed_offset" not in str(node.target)


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _op_name(node: fx.Node) -> str:
    if _is_getitem(node):
        return _op_name(node.args[0])
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))
    return _SHORT_NAMES.get(name, name)


def _output_name(node: fx.Node) -> str:
    if not _is_getitem(node):
        return ""
    source, position = node.args
    schema = getattr(source.target, "_schema", None)
    name = schema.returns[position].name if schema is not None and position < len(schema.returns) else ""
    return _OUTPUT_NAMES.get(name, name) or str(position)


def _module_path(node: fx.Node) -> str:
    source = node.args[0] if _is_getitem(node) and isinstance(node.args[0], fx.Node) else node
    stack = source.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return re.sub(r"^L\['[^']*'\]\.?", "", path).replace("_modules['", "").replace("']", "")


def _is_matmul(node: fx.Node) -> bool:
    name = _op_name(node)
    return not _is_getitem(node) and (name in _MATMULS or name.removesuffix("_backward") in _SHORT_NAMES or name.removesuffix("_backward") in _MATMULS)


def _kind(node: fx.Node, *, static: set[str], activations: set[str]) -> str:
    if node.op != "placeholder" or _is_tangent(node):
        return "value"
    if node.name in activations:
        return "activation"
    return "parameter" if node.name in static else "shared"


def _forward_outputs(joint: JointGraph) -> list[Any]:
    output = next(n for n in joint.nodes if n.op == "output")
    return list(output.args[0])[: joint.num_fwd_outputs]


def _downstream(joint: JointGraph, sources: set[str]) -> set[str]:
    reached = set(sources)
    for node in joint.nodes:
        if any(n.name in reached for n in node.all_input_nodes):
            reached.add(node.name)
    return reached


def _batch_and_length(joint: JointGraph) -> tuple[Any, Any]:
    inputs = activation_inputs(joint)
    if not inputs:
        raise CaptureError("the layer's graph has no input shaped like its first output: it writes into a buffer (torch returns that first), or is no decoder layer that hilore can plan")
    shape = inputs[0].meta["val"].shape
    return shape[0], shape[1]


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _byte_terms(value: torch.Tensor, batch: Any, length: Any) -> dict[str, int]:
    """Bytes of the value's storage as a polynomial; a shape that is none counts at the traced size."""
    nbytes = value.untyped_storage().nbytes()
    if isinstance(nbytes, int):
        return {"1": nbytes} if nbytes else {}
    symbols = {size.node.expr: sympy.Symbol(letter) for size, letter in ((batch, "b"), (length, "s")) if not isinstance(size, int)}
    expression = sympy.expand(nbytes.node.expr.xreplace(symbols))
    letters = sorted(expression.free_symbols, key=str)
    if not all(str(letter) in "bs" for letter in letters) or not expression.is_polynomial(*letters):
        return {"1": int(nbytes.node.hint)}
    powers = sympy.Poly(expression, *letters).terms() if letters else [((), expression)]
    return {"".join(str(x) * p for x, p in zip(letters, exponents, strict=True)) or "1": int(factor) for exponents, factor in powers}


def _untaken_terms(node: fx.Node, batch: Any, length: Any) -> dict[str, int]:
    """Bytes of the outputs of an operator with several that no node takes: they are made all the same."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, (tuple, list)):
        return {}
    taken = [user for user in node.users if _is_getitem(user)]
    counted = {tensor.untyped_storage()._cdata for other in (*node.all_input_nodes, *taken) if isinstance(tensor := other.meta.get("val"), torch.Tensor)}
    total: dict[str, int] = {}
    for output in value:
        if isinstance(output, torch.Tensor) and (storage := output.untyped_storage()._cdata) not in counted:
            counted.add(storage)
            for power, nbytes in _byte_terms(output, batch, length).items():
                total[power] = total.get(power, 0) + nbytes
    return total


def _is_compressible(value: Any, terms: dict[str, int], batch: Any, length: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in _COMPRESSIBLE_DTYPES:
        return False
    return _is_large(value, terms, batch, length)


def _is_large(value: torch.Tensor, terms: dict[str, int], batch: Any, length: Any) -> bool:
    numel = evaluate_terms(terms, batch=_hint(batch), length=_hint(length)) // value.element_size()
    return numel >= MIN_NUMEL_PER_TOKEN * _hint(batch) * _hint(length)


def refuse_mutation(joint: JointGraph) -> None:
    """Raise MutatingLayerError for a graph that writes into its inputs: torch would split it by other rules, without a word."""
    for node in joint.nodes:
        if node.op == "call_function" and _op_name(node) in ("copy_", "set_"):
            raise MutatingLayerError(WRITES)
