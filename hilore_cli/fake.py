"""A model without its weights: one update on fake tensors, for its graphs, its memory to the byte, and the work of its operators.

Parameters are torch's FakeTensors: they have shapes, dtypes and storages, and no memory. The micro-batch is real (its masks steer
indexing), and what it makes is handed to the layers as fakes. So the very step that is measured elsewhere (workbench.py) runs here with
every method, and the tracer sees each operator, what it makes and when that dies. Attention stays the fused operator.

What this does NOT see: numbers (a number that the step asks of a fake is 1), and memory that a kernel takes and gives back within one
operator, but for the one case that is known (`_SCRATCH`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import JointGraph, describe_joint, graph_digest
from hilore_cli.devices import Work
from hilore_cli.errors import CaptureError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.models import DTYPES, check_dtype, prepare_to_train
from hilore_cli.peak import MemoryTrace, Step
from hilore_cli.provenance import Lora
from hilore_cli.runtime import Handle
from hilore_cli.schema import LayerClass
from hilore_cli.workbench import Workbench

aten = torch.ops.aten

_GATHERS = {"embedding", "index_select", "gather", "index"}
"""Operators that read of their first argument only what they return."""
_SCRATCH: dict[Any, Callable[[Tensor, Tensor], int]] = {aten.logsumexp.default: lambda x, result: _nbytes(x) + 2 * _nbytes(result)}
"""Bytes alive at most within an operator, from its first argument and its result: logsumexp keeps exp(x - max), the max and the result."""
_DISPATCH = {"__torch_dispatch__", "_fn", "inner"}
"""Functions between an operator's caller and a mode."""
_HOLDERS = (4, 2)
"""Uses of an operand, and of its storage, that the engine alone holds, counted while it is dispatched. Where torch counts otherwise, an estimate is too high."""


class StandInMode(FakeTensorMode):
    """Fake tensors whose numbers are 1 where the step asks for one (the gradient's norm, the gradient of the loss by itself)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return args[0].new_empty(_grouped_shape(*args[:3], **(kwargs or {})))  # torch tells the shape of bf16 only, and a CPU multiplies all
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor, **_: Any) -> tuple[int, ...]:
    """Of rows (T,K) with experts (E,K,N); of the gradient of the experts, (K,T) with (T,N) in E groups."""
    return (offs.shape[0], a.shape[0], b.shape[1]) if a.dim() == b.dim() == 2 else (a.shape[-2], b.shape[-1])


def build_fake_model(config: PreTrainedConfig, *, dtype: str, attn_implementation: str = "sdpa", lora: Lora | None = None) -> nn.Module:
    """The model of a configuration as `load_model` gives it, on fake CPU tensors. Raises UsageError."""
    check_dtype(dtype)
    # without initial values: torch draws a truncated normal again until no value is outside, which a fake never says
    with _moving_fakes(), StandInMode(allow_non_fake_inputs=True):
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=attn_implementation)
        model.tie_weights()  # which transformers leaves out there, too
        return prepare_to_train(model, lora=lora, seed=0)


@contextmanager
def _moving_fakes() -> Iterator[None]:
    """Context in which `Module.to` takes fakes: PEFT moves its adapters, and torch would swap tensors that have weak references."""
    theirs = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if dtype is not None and parameter.dtype != dtype and parameter.is_floating_point():
                    setattr(owner, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad))
        return module

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = theirs


class FakeWorkbench(Workbench):
    """A workbench whose model is fake: its updates take memory only on paper.

    `workspace_bytes`: what the target's libraries keep. `fused_dropout`: as on a GPU, whose masks are of bools.
    """

    def __init__(self, model: nn.Module, batches: Sequence[MicroBatch], config: GrpoConfig, *, workspace_bytes: int = 0, fused_dropout: bool = False) -> None:
        super().__init__(model, batches, config)
        self._fused_dropout = fused_dropout
        self._workspace_bytes = workspace_bytes
        self.mode: FakeTensorMode = next(model.parameters()).fake_mode
        for _, layer in self.layers:
            layer.register_forward_pre_hook(self._hand_over, with_kwargs=True)

    @contextmanager
    def method(self, name: str) -> Iterator[Handle | None]:
        eager = name in ("none", "gc")  # captured graphs hold the fused operator on every device
        with _fused_dropout() if self._fused_dropout and eager else nullcontext(), super().method(name) as handle:
            yield handle

    def tracer(self) -> FakeTracer:
        return FakeTracer()

    def work_of_update(self, method: str) -> list[Work]:
        """What the operators of one update by a method do, in order."""
        tracer = self.tracer()
        with self.method(method):
            tracer.trace(self.update)
        return tracer.works

    def _hand_over(self, _layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Real tensors (masks, position ids) become fakes, whose memory is that of the real ones for as long as any of them lives."""
        return tree_map_only(Tensor, self._as_fake, (args, kwargs))

    def _as_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.mode.from_tensor(tensor)
        weakref.finalize(fake.untyped_storage(), _let_go, tensor)
        return fake


@contextmanager
def _fused_dropout() -> Iterator[None]:
    """Context in which dropout is one operator, as torch runs it on a GPU; on a CPU it multiplies by noise of the values' dtype, and keeps that."""
    theirs = F.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        fused = training and 0 < p < 1 and not inplace
        return torch.native_dropout(input, p, True)[0] if fused else theirs(input, p, training, inplace)

    F.dropout = dropout
    try:
        yield
    finally:
        F.dropout = theirs


def _let_go(_tensor: Tensor) -> None:
    """Called when a fake's storage is gone: until then its arguments are kept."""


# ---------------------------------------------------------------------------------------------------------------- memory


class FakeTracer(TorchDispatchMode):
    """A peak.Tracer of storages: alive from the operator that returns them until nothing holds them. `works`: what operators did."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []
        self._known: dict[int, weakref.ref[Any]] = {}
        self._live = [0]
        self._marks: dict[str, int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch would run compiled layers eagerly

    def mark(self, name: str) -> None:
        self._marks.setdefault(name, len(self._live) - 1)

    def trace(self, step: Step) -> MemoryTrace:
        self.works, self._live, self._marks = [], [0], {}
        with self:
            step()
        return MemoryTrace(time_ns=np.arange(len(self._live)), live_bytes=np.array(self._live, dtype=np.int64), marks=dict(self._marks))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor and _engine_adds_in_place(args):
            func = aten.add_.Tensor
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, nbytes=0)  # it was there before the step
        result = func(*args, **kwargs)
        if func in _SCRATCH:
            scratch = _SCRATCH[func](args[0], result)
            self._add(scratch)
            self._add(-scratch)
        for tensor in _tensors(result):
            self._see(tensor, nbytes=tensor.untyped_storage().nbytes())
        if (work := work_of(func, args, kwargs, result)) is not None:
            self.works.append(work)
        return result

    def _see(self, tensor: Tensor, *, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))
            if nbytes:
                self._add(nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        del self._known[key]
        if nbytes:
            self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self._live.append(self._live[-1] + nbytes)


def _engine_adds_in_place(args: Sequence[Any]) -> bool:
    """Whether a sum is one that the autograd engine would do in place, had no mode been on.

    The engine sums the gradients of what was used twice (a tied embedding, a residual) into the first if that is dense and nothing else
    holds it; but under a mode, and for every subclass, into new memory (torch 2.13, csrc/autograd/input_buffer.cpp).
    """
    caller = sys._getframe(1)
    while caller is not None and caller.f_code.co_name in _DISPATCH:
        caller = caller.f_back
    if caller is None or caller.f_code.co_name != "_engine_run_backward" or torch.is_grad_enabled():
        return False
    first = args[0]
    holders = first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return holders == _HOLDERS and is_non_overlapping_and_dense_or_false(first)


# ---------------------------------------------------------------------------------------------------------------- graphs


@dataclass(frozen=True, kw_only=True)
class CapturedClass:
    """One class of layers, its graph, the work of each forward operator by node name, and elements and dtype of each unit."""

    layer_class: LayerClass
    joint: JointGraph
    works: Mapping[str, Work]
    numel: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]


def capture_layers(bench: FakeWorkbench) -> tuple[list[CapturedClass], list[str]]:
    """All classes, and the name of each layer's, lowest first. One update with every layer recomputed is run for it.

    Raises CaptureError for a layer that cannot be captured whole: what such a layer takes can only be measured.
    """
    bench.static()
    bench.recorder.active = True
    try:
        bench.gradients_by("recompute")
    except CaptureError as error:
        raise CaptureError(f"{error}; a layer that is left to checkpoint can only be measured: profile without a device model") from error
    finally:
        bench.recorder.active = False
    joints, calls = bench.recorder.joints, bench.recorder.primals
    digests = [graph_digest(joint) for joint in joints]
    of_layer = [digests[calls[index][0]] for index in range(len(bench.layers))]
    names = {digest: chr(ord("A") + i) if i < 26 else f"class{i}" for i, digest in enumerate(dict.fromkeys(digests))}
    classes = [describe_class(joints[digests.index(digest)], name=names[digest]) for digest in dict.fromkeys(of_layer)]
    return classes, [names[digest] for digest in of_layer]


def describe_class(joint: JointGraph, *, name: str) -> CapturedClass:
    layer_class = describe_joint(joint, name=name)
    nodes = {node.name: node for node in joint.nodes}
    forward = [row for row in layer_class.nodes if row.side == "forward"]
    works = {row.name: work for row in forward if (work := work_of_node(nodes[row.name])) is not None}
    values = {row.unit: nodes[row.name].meta["val"] for row in forward if row.unit is not None}
    return CapturedClass(layer_class=layer_class, joint=joint, works=works, numel={unit: _hint(value.numel()) for unit, value in values.items()}, dtypes={unit: value.dtype for unit, value in values.items()})


# ------------------------------------------------------------------------------------------------------------------ work


def work_of_node(node: fx.Node) -> Work | None:
    """What one node of a traced graph does at the traced sizes; None for views, placeholders and sizes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return work_of(node.target, args, kwargs, node.meta.get("val"))


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """What an operator does: every input read once, every output written once; None for views, which do nothing."""
    read, made = _tensors((args, kwargs)), _tensors(result)
    written = _written(func, args, kwargs)
    storages = {t.untyped_storage()._cdata for t in read}
    made = [t for t in made if t.untyped_storage()._cdata not in storages]
    if not made and not written:
        return None
    name = func._overloadpacket.__name__
    if name in _GATHERS:
        read = [*made, *read[1:]]
    nbytes = sum(map(_nbytes, [*read, *made, *written]))
    flops, kind = _flops(func, name, args, kwargs, result)
    dtype = str(read[0].dtype if read else made[0].dtype).removeprefix("torch.")
    return Work(kind=kind, flops=flops, nbytes=nbytes, dtype=dtype)


def _flops(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[int, Any]:
    """Operations on the matrix units, by torch's own formulas; for attention and grouped products, which it lacks on a CPU, by ours."""
    if "scaled_dot_product" in name:
        backward = name.endswith("_backward")
        query, key, value = (tuple(map(_hint, t.shape)) for t in args[backward : backward + 3])
        batch, heads, length, width = query
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
        pairs = length * key[2] / (2 if named.get("is_causal") else 1)
        return round(2 * batch * heads * pairs * (width + value[3]) * (2.5 if backward else 1)), "attention"
    if name in ("_grouped_mm", "grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"):
        a, b = (tuple(map(_hint, t.shape)) for t in args[:2])
        products = 2 if name.endswith("_backward") else 1
        return 2 * products * a[-2] * a[-1] * b[-1] * (1 if 2 in (len(a), len(b)) else a[0]), "matmul"
    formula = flop_registry.get(getattr(aten, name.removesuffix("_"), None))
    if formula is None:
        return 0, "other"
    sizes, out = tree_map_only(Tensor, lambda t: torch.Size(map(_hint, t.shape)), (tuple(args), result))
    return int(formula(*sizes, out_val=out)), "matmul"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that an operator writes into."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [t for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write for t in _tensors(given.get(argument.name))]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the elements, or of the storage where elements are repeated (expanded)."""
    return min(_hint(tensor.numel()) * tensor.element_size(), _hint(tensor.untyped_storage().nbytes()))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
