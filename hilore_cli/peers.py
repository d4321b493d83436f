"""Other ways to run a training step in less memory, each as a way to run one decoder layer, on the same bench as ours.

    bench = PeerBench(model, micro_batches, config)
    bench.add_peer("every-2nd", checkpoint_some(every_kth(30, 2)))
    bench.peak_bytes("every-2nd@full")           # any method with any loss head

    partial-gc       torch's checkpoint on some of the layers, the others store
    sac-*            torch's selective checkpointing by operator: attention alone, attention and every second product, attention and all products
    membudget        torch.compile of each layer, its partitioner under an activation memory budget; as torch does it, gradients of frozen experts included (frozen_weights.py)
    fp8-all          all that a layer saves in float8 e4m3 with a scale a group, through saved-tensor hooks
    gc+fp8-boundary  checkpointing, the layer inputs that it keeps in the same float8
    int8-mlp         the outputs of gate_proj and up_proj in int8, all else stored

Codecs are hilore's own kernels, so that a peer is never slower for its codec; a tensor that several operators save is packed once.
Layers alone are changed: the loss head is the same for everybody. What it does NOT do: choose settings (suite.py), or offload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hilore_cli.codecs import compress, compressible, decompress, span_of
from hilore_cli.errors import UsageError
from hilore_cli.partition import RECOMPILES, compile_whole
from hilore_cli.runtime import Handle
from hilore_cli.workbench import Workbench, contexts_of_forward

Forward = Callable[..., Any]
Wrap = Callable[[int, nn.Module], Forward | None]
"""(position, layer) -> its forward while a peer runs; None leaves it as it is."""

HEAD_MARK = "@"
NARROWEST = 1 / 32
"""Of a layer input's elements: keys of one of 32 heads have as many, statistics of rows fewer."""
SATURATION = 448.0
"""Largest finite float8 e4m3."""

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


class PeerBench(Workbench):
    """A Workbench that knows peers, and runs any method under any loss head: `method("gc@full")`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peers: dict[str, Wrap] = {}

    def add_peer(self, name: str, wrap: Wrap) -> None:
        """Make a peer a method of this name. Raises UsageError where a layer has not what it needs."""
        with wrapped(self.layers, wrap):
            self._peers[name] = wrap

    def has_peer(self, name: str) -> bool:
        return name in self._peers

    @contextmanager
    def method(self, name: str) -> Iterator[Handle | None]:
        method, _, head = name.partition(HEAD_MARK)
        before = self.config
        self.config = replace(before, head=head) if head else before
        try:
            with wrapped(self.layers, self._peers[method]) if method in self._peers else super().method(method) as handle:
                yield handle
        finally:
            self.config = before


@contextmanager
def wrapped(layers: Sequence[tuple[str, nn.Module]], wrap: Wrap) -> Iterator[None]:
    """Context in which the layers run by what `wrap` makes of them."""
    with ExitStack() as undo:
        for position, (_, layer) in enumerate(layers):
            if (forward := wrap(position, layer)) is not None:
                undo.callback(partial(_restore, layer, vars(layer).get("forward")))
                layer.forward = forward
        yield


def _restore(layer: nn.Module, forward: Forward | None) -> None:
    del layer.forward
    if forward is not None:
        layer.forward = forward


# ------------------------------------------------------------------------------------------------------------ recomputation


def checkpoint_some(positions: Collection[int]) -> Wrap:
    """torch's checkpoint, as Hugging Face applies it, on the layers of these positions."""
    chosen = frozenset(positions)
    return lambda position, layer: _checkpointed(layer) if position in chosen else None


def every_kth(layers: int, k: int) -> range:
    """Positions of every k-th layer, as torchtune and torchtitan count: k = 2 checkpoints half of them."""
    return range(0, layers, k)


def all_but_spread(layers: int, stored: int) -> list[int]:
    """Positions of all layers but `stored` of them that lie evenly over the stack."""
    kept = {(2 * i + 1) * layers // (2 * stored) for i in range(stored)}
    return [position for position in range(layers) if position not in kept]


def checkpoint_ops(products: str) -> Wrap:
    """Selective checkpointing that saves attention and, of the matrix products, "none", "half" (every second is recomputed) or "all"."""
    if products not in ("none", "half", "all"):
        raise ValueError(f"products {products!r}")

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        seen = count()  # a policy is asked once an operator, in forward alone; torch replays its answers when it recomputes

        def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            save = op in ATTENTION or (op in PRODUCTS and (products == "all" or (products == "half" and next(seen) % 2 == 0)))
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        first, again = create_selective_checkpoint_contexts(policy)
        return first, _both(contexts_of_forward()[1], again)

    return lambda _position, layer: _checkpointed(layer, contexts=contexts)


def compile_within(budget: float) -> Wrap:
    """torch.compile of each layer whose partitioner keeps at most `budget` (0: inputs alone, 1: all it would) of the activations' memory."""

    def backend(graph: Any, inputs: Any) -> Any:
        on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs)
        compiler = torch._dynamo.lookup_backend("inductor" if on_gpu else "aot_eager_decomp_partition")
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs)

    compiled: dict[type, Forward] = {}

    def wrap(_position: int, layer: nn.Module) -> Forward:
        kind = type(layer)
        if kind not in compiled:  # of the class: its layers share the graph
            compiled[kind] = compile_whole(kind.forward, backend=backend, dynamic=False)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch._dynamo.config.patch(**RECOMPILES):  # one graph for each size of micro-batch, beside whatever else compiled this class
                return compiled[kind](layer, *args, **kwargs)

        return forward

    return wrap


def _checkpointed(layer: nn.Module, *, contexts: Callable[[], Any] = contexts_of_forward) -> Forward:
    forward = layer.forward
    return lambda *args, **kwargs: checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


# -------------------------------------------------------------------------------------------------------------- compression


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How one tensor is kept: flat (n,) of its memory -> payload, and back."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, torch.dtype, int], Tensor]


def packing_of(codec: str) -> Packing:
    """hilore's codec of this name."""
    return Packing(encode=lambda flat: compress(flat, codec), decode=lambda payload, dtype, numel: decompress(payload, codec, dtype=dtype, size=(numel,), stride=(1,)))


UNSCALED = Packing(encode=lambda flat: flat.clamp(-SATURATION, SATURATION).to(torch.float8_e4m3fn), decode=lambda payload, dtype, _numel: payload.to(dtype))
"""A plain cast to float8 e4m3, which saturates."""


def pack_all(packing: Packing) -> Wrap:
    """Whatever a layer saves: every float tensor but parameters, buffers, what all layers are handed alike (masks, rotary angles), and
    statistics of rows (norms, attention's log-sum-exp), which are few bytes and whose errors are exponents.
    """

    def wrap(_position: int, layer: nn.Module) -> Forward:
        run = layer.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            shared = [*layer.parameters(), *layer.buffers(), *(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))]
            kept = {_key(x) for x in shared}
            with _storing(packing, lambda x: _key(x) not in kept and _memory_of(x).numel() >= NARROWEST * hidden.numel() and not _is_mask(x)):
                return run(hidden, *args, **kwargs)

        return forward

    return wrap


def pack_inputs(packing: Packing) -> Wrap:
    """Checkpointing whose kept layer inputs are packed."""

    def wrap(_position: int, layer: nn.Module) -> Forward:
        run = _checkpointed(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _storing(packing, lambda _: True):
                return run(*args, **kwargs)

        return forward

    return wrap


def pack_mlp(packing: Packing, *, names: Collection[str] = ("gate_proj", "up_proj")) -> Wrap:
    """The outputs of the MLP's modules of these names. Raises UsageError for a layer without them."""

    def wrap(position: int, layer: nn.Module) -> Forward:
        modules = [module for name, module in layer.named_modules() if name.rsplit(".", 1)[-1] in names]
        if not modules:
            raise UsageError(f"layer {position} has no {' and '.join(names)}")
        run = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again

            def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
                outputs[_key(output)] = StorageWeakRef(output.untyped_storage())

            with ExitStack() as hooks:
                for module in modules:
                    hooks.enter_context(module.register_forward_hook(note))
                hooks.enter_context(_storing(packing, lambda x: _key(x) in outputs))
                return run(*args, **kwargs)

        return forward

    return wrap


def _storing(packing: Packing, chosen: Callable[[Tensor], bool]) -> saved_tensors_hooks:
    """Hooks that pack the chosen tensors; what is saved twice, or as another view of the same memory, is packed once."""
    packed: dict[tuple[int, ...], tuple[StorageWeakRef, Tensor]] = {}

    def pack(x: Tensor) -> Callable[[], Tensor]:
        if not (_packable(x) and chosen(x)):
            return lambda: x
        core = _memory_of(x)
        numel = core.numel()
        place = (_key(x), x.storage_offset(), numel, x.element_size(), x._version)
        if place not in packed:
            with torch.no_grad():
                packed[place] = (StorageWeakRef(x.untyped_storage()), packing.encode(core.as_strided((numel,), (1,))))
        payload, dtype, size, stride = packed[place][1], x.dtype, x.size(), x.stride()
        return lambda: packing.decode(payload, dtype, numel).as_strided(size, stride)

    return saved_tensors_hooks(pack, lambda restore: restore())


def _packable(x: Tensor) -> bool:
    core = _memory_of(x)
    return compressible(core) and not isinstance(x, nn.Parameter) and span_of(core.shape, core.stride()) == core.numel()


def _memory_of(x: Tensor) -> Tensor:
    """x without its repetitions: of keys that are expanded over query heads the keys."""
    return x.detach().as_strided([1 if step == 0 else length for length, step in zip(x.shape, x.stride(), strict=True)], x.stride())


def _is_mask(x: Tensor) -> bool:
    """One [S, S] for all heads, as attention makes it of a boolean mask; it holds infinities."""
    return x.dim() == 4 and x.shape[1] == 1 and x.shape[2] == x.shape[3]


def _key(x: Tensor) -> int:
    """Which memory a tensor lies in; unique while that, or a weak reference to it, lives."""
    return x.untyped_storage()._cdata
