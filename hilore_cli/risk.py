"""Errors: what compressing one unit of one layer does to the whole gradient.

A layer's joint graph is run once on the recorded inputs with every value kept. One unit is then replaced by its round trip,
the values that a plan would recompute from it are run again, and so is whatever part of backward reads a changed value; the
upstream gradient stays exact. With d_theta the change of the layer's parameter gradient and d_x that of its input gradient:

    rho^2 = [ |d_theta|^2 + A_i |d_x|^2 ] / |g|^2
    A_i   = a_{i-1} + b_{i-1} A_{i-1}:  what a squared change of the input gradient of layer i adds to the squared change of
            everything below, with a_j, b_j the gains of layer j's own backward from a change of its output gradient to its
            parameters' and its input's; A_0 is that of the embedding

The gains are measured by sending noise through each layer's exact backward (it is linear in the upstream gradient): the
gradient itself with every element multiplied by an independent normal number. Design section 6 proposed
A_i = sum_{j below} |g_j|^2 / |g_x|^2, as if a change kept its size relative to the gradient; measured on SmolLM2 that predicts
1.6 times the error, because noise averages out over tokens where the gradient adds up (README, "What did not help").

Two contexts: matmul-like results behind the unit are stored (exact), or recomputed from the changed value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from hilore_cli import codecs
from hilore_cli.capture import INPUT_UNIT, JointGraph, activation_inputs, eager_operator, forward_nodes, storage_owners
from hilore_cli.errors import CaptureError, ProfileError
from hilore_cli.schema import LayerClass

HEAD_START_CYCLES = 2_000_000
"""About a millisecond of a GPU."""

Context = str  # "stored" or "replayed"


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What a real step handed to one layer: flat graph inputs (sizes, activations, parameters) and the gradient of its output."""

    index: int
    graph: int
    primals: list[Any]
    tangent: Tensor


@dataclass(frozen=True, kw_only=True)
class GradientChange:
    """Squared norms of the change in the layer's parameter gradient and in its input gradient."""

    parameters: float
    activation: float


    def squared(self, transfer: float) -> float:
        """Squared change of the whole gradient, given the layer's transfer A_i."""
        return self.parameters + transfer * self.activation


@dataclass(frozen=True, kw_only=True)
class NoiseGain:
    """Squared gains a_j, b_j of one layer's backward for noise in its output gradient."""

    parameters: float
    activation: float


@dataclass(frozen=True, kw_only=True)
class UnitError:
    """One unit under one codec: relative round-trip errors, and the gradient change with what lies behind it stored or replayed."""

    rel_error: float
    exposure_error: float
    stored: GradientChange
    replayed: GradientChange
    payload_bytes: int


class LayerReplay:
    """One layer's joint graph with all its values on one recorded call."""

    def __init__(self, joint: JointGraph, layer_class: LayerClass, call: LayerCall) -> None:
        self.layer_class = layer_class
        self._nodes = joint.nodes
        self._node_of = {n.name: n for n in self._nodes}
        self._forward = {n.name for n in forward_nodes(joint)}
        self._owner = storage_owners(joint)
        self._row = {row.name: row for row in layer_class.nodes}
        self._num_fwd_outputs = joint.num_fwd_outputs
        self._unit_node = {row.unit: row.name for row in layer_class.nodes if row.unit}
        activation = activation_inputs(joint)[0]
        primal_names = [n.name for n in self._nodes if n.op == "placeholder"][: len(call.primals)]
        self._activation_position = primal_names.index(activation.name)
        self._parameter_positions = sorted(joint.static_indices)
        self.values = self._run(call)
        self._results = self._gradients(self.values)

    def value(self, unit: str) -> Tensor:
        """The unit's exact value."""
        return self.values[self._unit_node[unit]]

    def parameter_gradients(self) -> list[Tensor]:
        """Exact gradients of the layer's parameters, those that train."""
        return [g for g in (self._results[p] for p in self._parameter_positions) if g is not None]

    def input_gradient(self) -> Tensor | None:
        """Exact gradient of the layer's input; None where the input does not require one."""
        return self._results[self._activation_position]

    def forward_times_us(self, *, repeats: int) -> dict[str, float]:
        """Median time of every forward operator on the recorded values: node name -> microseconds. Views cost nothing."""
        times = {}
        for node in self._nodes:
            if node.op != "call_function" or node.name not in self._forward or self._is_view(node):
                continue
            args, kwargs = self._arguments(node, self.values)
            times[node.name] = time_us(lambda f=node.target, a=args, k=kwargs: f(*a, **k), repeats=repeats, device=self._device())
        return times

    def change(self, unit: str, altered: Tensor, *, context: Context) -> GradientChange:
        """Gradient change when backward reads `altered` instead of the unit's exact value."""
        results = self._gradients(self._with(unit, altered, context))
        parameters = sum(_squared_distance(results[p], self._results[p]) for p in self._parameter_positions)
        return GradientChange(parameters=parameters, activation=_squared_distance(results[self._activation_position], self._results[self._activation_position]))

    def contexts(self, unit: str) -> Sequence[Context]:
        """The second context only where a matmul-like forward value that backward reads lies behind the unit."""
        reached = {self._unit_node[unit]}
        for node in self._nodes:
            if node.name not in self._forward or not any(n.name in reached for n in node.all_input_nodes):
                continue
            reached.add(node.name)
            if self._is_matmul(node) and self._needed(node):
                return ("stored", "replayed")
        return ("stored",)

    def _needed(self, node: fx.Node) -> bool:
        """Whether backward reads the node, directly or through forward values that are cheap to recompute."""
        pending, seen = [node], set()
        while pending:
            for user in pending.pop().users:
                if user.name not in self._forward and user.op != "output":
                    return True
                if user.name in self._forward and user.name not in seen and not self._is_matmul(user):
                    seen.add(user.name)
                    pending.append(user)
        return False

    def _run(self, call: LayerCall) -> dict[str, Any]:
        inputs = iter([*call.primals, call.tangent])
        values: dict[str, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node.name] = next(inputs, None)
                if values[node.name] is None:
                    raise CaptureError("the layer has more outputs with a gradient than one; hilore plans layers that return one hidden state")
            elif node.op == "call_function":
                args, kwargs = self._arguments(node, values)
                values[node.name] = eager_operator(node)(*args, **kwargs)
            elif node.op != "output":
                raise CaptureError(f"joint graph holds a {node.op} node, which replay does not know")
        return values

    def _with(self, unit: str, altered: Tensor, context: Context) -> dict[str, Any]:
        name = self._unit_node[unit]
        values, dirty = dict(self.values), {name}
        values[name] = altered
        for node in self._nodes:
            if node.op != "call_function" or node.name == name or not any(n.name in dirty for n in node.all_input_nodes):
                continue
            if node.name in self._forward and self._stays_exact(node, context):
                continue
            args, kwargs = self._arguments(node, values)
            values[node.name] = eager_operator(node)(*args, **kwargs)
            dirty.add(node.name)
        return values

    def _stays_exact(self, node: fx.Node, context: Context) -> bool:
        row = self._row.get(node.name)
        if row is not None and row.pinned:
            return True
        return context == "stored" and self._is_matmul(node)

    def _is_matmul(self, node: fx.Node) -> bool:
        return node.name in self._row and self._row[node.name].matmul

    def _is_view(self, node: fx.Node) -> bool:
        return self._owner.get(node.name, node.name) != node.name or node.name not in self._row

    def _arguments(self, node: fx.Node, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])

    def _gradients(self, values: dict[str, Any]) -> list[Any]:
        output = self._nodes[-1].args[0]
        return [values[n.name] if isinstance(n, fx.Node) else n for n in output[self._num_fwd_outputs :]]

    def _device(self) -> torch.device:
        return next(v.device for v in self.values.values() if isinstance(v, Tensor))


def candidate_units(layer_class: LayerClass) -> list[str]:
    """Units worth a codec: those that backward needs and that no other, cheaper unit stands for.

    A compressible value counts when its operator is matmul-like, when it is the layer's input, or when it is the value
    that backward reads on behalf of a matmul-like result that backward does not read itself (query after its rotary
    embedding, residual after the output projection). Everything else is elementwise work on one of these.
    """
    rows = layer_class.nodes
    read = _read_by_backward(layer_class)
    is_matmul = [_matmul_of(rows, row.index) for row in rows]
    stands_for: dict[int, int] = {}
    for row in rows:
        if row.side == "forward" and row.compressible and row.index in read and not is_matmul[row.index] and row.kind == "value":
            for source in _matmul_sources(rows, is_matmul, row.index):
                if source not in read and rows[source].nbytes >= row.nbytes:
                    stands_for.setdefault(source, row.index)
    chosen = []
    for row in rows:
        if row.unit is None or not row.compressible:
            continue
        if row.unit == INPUT_UNIT or row.index in stands_for.values() or (is_matmul[row.index] and row.index not in stands_for and _needed_cheaply(layer_class, is_matmul, read, row.index)):
            chosen.append(row.unit)
    return chosen


def mask_units(layer_class: LayerClass) -> list[str]:
    """Units that backward reads and that are stored as bits."""
    read = _read_by_backward(layer_class)
    return [row.unit for row in layer_class.nodes if row.mask and row.unit is not None and row.index in read]


def measure_unit(replay: LayerReplay, unit: str, codec: str, *, token_weight: Tensor) -> UnitError:
    """Round trip one unit and see what the layer's gradient makes of it. token_weight [B,S]: squared exposure of each position.

    Raises ProfileError when a codec brings back something that is not finite.
    """
    exact = replay.value(unit)
    spec = codecs.get_codec(codec)
    if spec.exact:
        nothing = GradientChange(parameters=0.0, activation=0.0)
        return UnitError(rel_error=0.0, exposure_error=0.0, stored=nothing, replayed=nothing, payload_bytes=spec.payload_bytes(exact.numel()))
    altered = codecs.round_trip(exact, codec)
    changes = {context: replay.change(unit, altered, context=context) for context in replay.contexts(unit)}
    norm2 = _squared_norm(exact)
    error = (_squared_distance(altered, exact) / norm2) ** 0.5 if norm2 > 0 else 0.0
    weighted = _exposure_error(exact, altered, token_weight)
    result = UnitError(
        rel_error=error,
        exposure_error=error if weighted is None else weighted,
        stored=changes["stored"],
        replayed=changes.get("replayed", changes["stored"]),
        payload_bytes=spec.payload_bytes(exact.numel()),
    )
    figures = (result.rel_error, result.exposure_error, *(x for c in changes.values() for x in (c.parameters, c.activation)))
    if not all(math.isfinite(x) for x in figures):
        broken = 1 - float(exact.isfinite().double().mean())
        raise ProfileError(f"unit {unit} under {codec}: the error is not finite; {f'{broken:.2%} of the values that the unit holds are not' if broken else 'the unit holds values that the codec cannot carry'}")
    return result


def measure_noise_gain(joint: JointGraph, layer_class: LayerClass, call: LayerCall, *, seed: int) -> NoiseGain:
    """Send multiplicative noise through one layer's exact backward."""
    generator = torch.Generator(device=call.tangent.device).manual_seed(seed)
    noise = call.tangent * torch.randn(call.tangent.shape, generator=generator, dtype=torch.float32, device=call.tangent.device).to(call.tangent.dtype)
    norm2 = _squared_norm(noise)
    if norm2 == 0:
        return NoiseGain(parameters=0.0, activation=0.0)
    replay = LayerReplay(joint, layer_class, replace(call, tangent=noise))
    below = replay.input_gradient()
    return NoiseGain(parameters=sum(_squared_norm(g) for g in replay.parameter_gradients()) / norm2, activation=0.0 if below is None else _squared_norm(below) / norm2)


def embedding_gain(input_gradient: Tensor | None, input_ids: Tensor, *, vocabulary: int, seed: int) -> float:
    """A_0: squared gain from noise in the first layer's input gradient to the embedding table's gradient (its rows add up)."""
    if input_gradient is None:
        return 0.0
    generator = torch.Generator(device=input_gradient.device).manual_seed(seed)
    noise = input_gradient.float() * torch.randn(input_gradient.shape, generator=generator, device=input_gradient.device)
    table = torch.zeros(vocabulary, noise.shape[-1], device=noise.device)
    table.index_add_(0, input_ids.flatten().to(noise.device), noise.flatten(0, -2))
    norm2 = _squared_norm(noise)
    return _squared_norm(table) / norm2 if norm2 > 0 else 0.0


def transfers(gains: Sequence[NoiseGain], *, embedding: float) -> list[float]:
    """A_i of every layer from the gains of all layers, lowest first."""
    result = [embedding]
    for gain in gains[:-1]:
        result.append(gain.parameters + gain.activation * result[-1])
    return result


def codec_times_us(value: Tensor, codec: str, *, repeats: int) -> tuple[float, float]:
    """Median times of compress and decompress for one value, in microseconds."""
    payload = codecs.compress(value, codec)
    compress = time_us(lambda: codecs.compress(value, codec), repeats=repeats, device=value.device)
    restore = time_us(lambda: codecs.decompress(payload, codec, dtype=value.dtype, size=value.shape, stride=value.stride()), repeats=repeats, device=value.device)
    return compress, restore


def time_us(run: Callable[[], Any], *, repeats: int, device: torch.device) -> float:
    """Median wall time of `run` in microseconds after one warm-up: CUDA events on a GPU, perf_counter_ns on a CPU.

    The GPU is kept waiting while `run` is being launched, as it is in a step, so that launching is not counted.
    """
    run()
    samples = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter_ns()
            run()
            samples.append((time.perf_counter_ns() - begin) / 1e3)
    return median(samples)


# --------------------------------------------------------------------------------------------------------------- helpers


def _read_by_backward(layer_class: LayerClass) -> set[int]:
    """Indices of storages that a backward operator reads, itself or through a view."""
    rows = layer_class.nodes
    return {
        rows[i].storage
        for row in rows
        if row.side == "backward" and (row.storage == row.index or row.storage == -1)
        for i in row.inputs
        if rows[i].side == "forward" and rows[i].storage >= 0
    }


def _matmul_of(rows: list[Any], index: int) -> bool:
    """Whether the value's operator is matmul-like (for an output of several: the operator's)."""
    row = rows[index]
    return row.matmul or (row.target.startswith("<built-in function getitem") and bool(row.inputs) and rows[row.inputs[0]].matmul)


def _matmul_sources(rows: list[Any], is_matmul: list[bool], index: int) -> set[int]:
    """Storages of the nearest matmul-like results (or placeholders: none) that a value is elementwise work on."""
    found, pending, seen = set(), [index], set()
    while pending:
        for i in rows[pending.pop()].inputs:
            if i in seen or rows[i].side != "forward":
                continue
            seen.add(i)
            owner = rows[i].storage
            if owner >= 0 and is_matmul[owner]:
                found.add(owner)
            else:
                pending.append(i)
    return found


def _needed_cheaply(layer_class: LayerClass, is_matmul: list[bool], read: set[int], index: int) -> bool:
    """Whether backward reads the value or elementwise work on it."""
    rows = layer_class.nodes
    reached = {index}
    for row in rows:
        if row.side == "forward" and any(i in reached for i in row.inputs):
            owner = row.storage
            if owner == -1 or not is_matmul[owner] or owner in reached:
                reached.update((row.index, *([owner] if owner >= 0 else [])))
    return any(i in read for i in reached)


def _exposure_error(exact: Tensor, altered: Tensor, token_weight: Tensor) -> float | None:
    """Relative error with each token weighted; None when the value's dimensions do not name the tokens."""
    rows, length = token_weight.shape
    by_token = [_by_token(t, rows, length) for t in (exact, (altered - exact))]
    if by_token[0] is None:
        return None
    reference, difference = ((t.double().square().sum(-1) * token_weight).sum() for t in by_token)
    return float((difference / reference) ** 0.5) if reference > 0 else 0.0


def _by_token(value: Tensor, rows: int, length: int) -> Tensor | None:
    if value.dim() >= 2 and value.shape[:2] == (rows, length):
        return value.reshape(rows, length, -1)
    if value.dim() == 2 and value.shape[0] == rows * length:
        return value.reshape(rows, length, -1)
    if value.dim() == 4 and value.shape[0] == rows and value.shape[2] == length:
        return value.transpose(1, 2).reshape(rows, length, -1)
    return None


def _squared_norm(tensor: Tensor) -> float:
    return float(tensor.double().square().sum()) if tensor.dtype == torch.float64 else float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2


def _squared_distance(a: Tensor | None, b: Tensor | None) -> float:
    return 0.0 if a is None or b is None or a is b else _squared_norm(a - b)
