"""Layers that torch cannot capture whole: found by trying, left to torch's checkpoint, and measured as a whole.

Such a layer has no units to choose from. It is planned as what checkpointing makes of it: its input is stored, its forward runs
again in backward, where it then holds all that autograd saves. That is written down as a layer class of six rows whose bytes
and time were measured instead of read off a graph, so that timeline and planner need to know nothing more of it.

What this does NOT do: leave a layer that writes into its buffers to checkpointing, which would write twice; that one is refused.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from hilore_cli.capture_failures import reason_of
from hilore_cli.errors import CaptureError, MutatingLayerError
from hilore_cli.norms import squared_norm
from hilore_cli.peak import tracer_for
from hilore_cli.risk import NoiseGain, time_us
from hilore_cli.runtime import Handle, forward
from hilore_cli.schema import GraphNode, LayerClass
from hilore_cli.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class LeftCall:
    """What a real step handed to one layer that is left to checkpoint, detached; and the gradient of its output."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs_input_gradient: bool
    tangent: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerBackward:
    """Gradients of one layer's eager backward: of its parameters, those that train, and of its input (None where not required)."""

    parameters: list[Tensor]
    activation: Tensor | None

    @property
    def parameters_norm2(self) -> float:
        return sum(map(squared_norm, self.parameters))

    @property
    def activation_norm2(self) -> float:
        return 0.0 if self.activation is None else squared_norm(self.activation)


# -------------------------------------------------------------------------------------------------------------- finding


@contextmanager
def leaving_uncaptured(bench: Workbench, handle: Handle) -> Iterator[dict[int, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Context in which a layer whose capture fails is left to checkpoint, now and in all that the bench runs later.

    Yields the arguments, not yet detached, of every layer that is left: index -> (args, kwargs).
    """
    handed: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run_or_leave(index: int, fqn: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if fqn not in bench.uncaptured:
            try:
                return forward(layer, *args, **kwargs)
            except MutatingLayerError:
                raise
            except CaptureError as refusal:
                bench.leave_to_checkpoint(fqn, reason=str(refusal) if refusal.__cause__ is None else reason_of(refusal.__cause__))
        handed[index] = args, kwargs
        with _refusing_writes(fqn, layer):
            return forward(layer, *args, **kwargs)

    for index, (fqn, layer) in enumerate(bench.layers):
        layer.forward = partial(run_or_leave, index, fqn, layer)
    try:
        yield handed
    finally:
        handle.install()


@contextmanager
def _refusing_writes(fqn: str, layer: nn.Module) -> Iterator[None]:
    before = {name: buffer._version for name, buffer in layer.named_buffers()}
    yield
    written = [name for name, buffer in layer.named_buffers() if buffer._version != before.get(name)]
    if written:
        raise MutatingLayerError(f"{fqn}: cannot be captured whole, and writes into its buffer {written[0]} during forward, so that checkpointing it would write twice; hilore cannot plan this model")


def left_call(index: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, tangent: Tensor) -> LeftCall:
    hidden = args[0] if args else kwargs["hidden_states"]
    kept_args, kept_kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
    return LeftCall(index=index, args=kept_args, kwargs=kept_kwargs, needs_input_gradient=hidden.requires_grad, tangent=tangent)


def check_some_captured(bench: Workbench) -> None:
    """Raise CaptureError when torch captured no layer at all: there is nothing to plan."""
    if len(bench.uncaptured) == len(bench.layers):
        raise CaptureError(f"no decoder layer can be captured whole, so there is nothing to plan; the first: {next(iter(bench.uncaptured.values()))}. Is torch.compile disabled (TORCHDYNAMO_DISABLE)? If not, train this model with gradient checkpointing")


def warn_of_uncaptured(reasons: Mapping[str, str]) -> None:
    """One warning for each reason, with the layers it holds for: `reasons` by name of the layer."""
    for reason in dict.fromkeys(reasons.values()):
        names = [fqn for fqn, other in reasons.items() if other == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(f"{', '.join(names[:3])}{more}: torch cannot capture the layer whole ({reason}); it is left to torch's checkpoint, which recomputes all of it", stacklevel=3)


# ------------------------------------------------------------------------------------------------------------ measuring


def run_backward(layer: nn.Module, call: LeftCall, *, tangent: Tensor) -> LayerBackward:
    """Eager forward and backward of one layer on what it was handed, from a gradient of its output."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    run, hidden = _runner(layer, call)
    with torch.enable_grad():
        wanted = [hidden, *parameters] if call.needs_input_gradient else parameters
        found = list(torch.autograd.grad(_hidden_of(run()), wanted, tangent, allow_unused=True))
    activation = found.pop(0) if call.needs_input_gradient else None
    return LayerBackward(parameters=[g for g in found if g is not None], activation=activation)


def eager_noise_gain(layer: nn.Module, call: LeftCall, *, seed: int) -> NoiseGain:
    """What risk.measure_noise_gain measures on a graph: multiplicative noise through the layer's own backward."""
    generator = torch.Generator(device=call.tangent.device).manual_seed(seed)
    noise = call.tangent * torch.randn(call.tangent.shape, generator=generator, dtype=torch.float32, device=call.tangent.device).to(call.tangent.dtype)
    norm2 = squared_norm(noise)
    if norm2 == 0:
        return NoiseGain(parameters=0.0, activation=0.0)
    result = run_backward(layer, call, tangent=noise)
    return NoiseGain(parameters=result.parameters_norm2 / norm2, activation=result.activation_norm2 / norm2)


def measured_class(layer: nn.Module, call: LeftCall, *, name: str, repeats: int) -> LayerClass:
    """The layer under checkpointing as six rows: input, what checkpointing itself keeps, forward, output, output gradient, backward.

    `run` stands for what forward holds beside input and output; `backward` for all that the layer's backward allocates beyond that,
    its recomputed values, temporaries and gradients together.
    """
    hidden = call.args[0] if call.args else call.kwargs["hidden_states"]
    tokens = hidden.shape[0] * hidden.shape[1]
    run, _ = _runner(layer, call)
    with torch.enable_grad():
        time = time_us(run, repeats=repeats, device=call.tangent.device)
        forward_peak, kept, backward_peak = _trace_checkpointed(layer, call)
    x, out = (t.untyped_storage().nbytes() for t in (hidden, call.tangent))
    work = max(forward_peak - out - kept, 0)
    rows: list[GraphNode] = []

    def add(node: str, side: str, inputs: Sequence[int], nbytes: int, **rest: Any) -> int:
        index = len(rows)
        terms = rest.pop("terms", {"bs": math.ceil(nbytes / tokens)} if nbytes else {})
        defaults = {"target": "placeholder" if not inputs else "checkpoint", "kind": "value", "unit": None, "matmul": False, "pinned": False, "compressible": False, "time_us": 0.0}
        rows.append(GraphNode(index=index, name=node, side=side, inputs=list(inputs), storage=index, nbytes=nbytes, nbytes_terms=terms, **(defaults | rest)))
        return index

    x_row = add("hidden_states", "forward", [], x, kind="activation")
    tangent = add("tangents_1", "tangent", [], out)
    kept_row = add("kept", "forward", [x_row], kept, pinned=True, terms={"1": kept} if kept else {})
    run_row = add("run", "forward", [x_row], work, time_us=time)
    out_row = add("output", "forward", [run_row], out)
    backward = add("backward", "backward", [tangent, kept_row, run_row, x_row], max(backward_peak - kept - work, 0))
    return LayerClass(name=name, graph_digest="", nodes=rows, outputs=[backward], forward_outputs=[out_row])


def _trace_checkpointed(layer: nn.Module, call: LeftCall) -> tuple[int, int, int]:
    """Most bytes during forward, bytes that checkpointing keeps, most bytes during backward; input, output and its gradient left out
    but for the output in forward. Gradient buffers are there before, as in training.
    """
    parameters = [p for p in layer.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    tracer = tracer_for(call.tangent.device)

    def step() -> None:
        args, kwargs = _arguments(call)
        tracer.mark("forward")
        output = _hidden_of(checkpoint(types.MethodType(type(layer).forward, layer), *args, use_reentrant=False, **kwargs))
        tracer.mark("backward")
        output.backward(call.tangent)

    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        step()
        trace = tracer.trace(step)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    output = call.tangent.untyped_storage().nbytes()
    return trace.peak_between("forward", "backward"), max(trace.live_at("backward") - output, 0), max(trace.peak_between("backward", None) - output, 0)


def _runner(layer: nn.Module, call: LeftCall) -> tuple[partial[Any], Tensor]:
    args, kwargs = _arguments(call)
    return partial(type(layer).forward, layer, *args, **kwargs), (args[0] if args else kwargs["hidden_states"])


def _arguments(call: LeftCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with an input that takes a gradient, where the real one did."""
    if call.args:
        return (call.args[0].detach().requires_grad_(call.needs_input_gradient), *call.args[1:]), call.kwargs
    return (), call.kwargs | {"hidden_states": call.kwargs["hidden_states"].detach().requires_grad_(call.needs_input_gradient)}


def _hidden_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
