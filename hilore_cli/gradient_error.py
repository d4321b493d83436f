"""The gradient error of one micro-batch, measured while its backward runs: the exact gradient beside the planned one.

    measured = GradientError(model, layers=fqns, name="math", on_done=keep)
    call = measured.watch(layer, fqn=fqn, args=args, kwargs=kwargs)    # before each layer's training forward
    call.returned(output, compresses=True)                             # after it
    loss.backward()                                                    # at its end: keep(Measured(...), "")

A plan changes no value of the forward, so the gradient that reaches the last layer is exact. Behind the planned backward of each
layer, from the highest that compresses on down, the layer is run once more from its own input (replay.py), and its exact gradients
are taken for the EXACT gradient of its output. So two gradients go down side by side, the planned one, which the trainer gets, and
the exact one:

    eps^2 = sum of |planned - exact|^2 / sum of |exact|^2

over all parameters that train: the layers', those above them (norm, head: planned is exact) and those below (embeddings, tied
ones too). That is the error itself. Design section 6 would estimate it from each layer's own change, at the same cost; but what
it takes for the way down (as if a change kept its size relative to the gradient) was measured to be 1.6 times too much (risk.py).

Costs, in this micro-batch alone: a forward and a backward of the layers from the highest that compresses on down. Memory above the
plan's own: the activations of one layer, all kept, and its parameters' gradient twice, at one time; three gradients of a hidden
state; and until then the layers' inputs, as far as the plan does not store them. At the end the embeddings' gradient twice.
What it does NOT do: touch the trainer's gradients or random numbers; see gradients of router logits or attentions that transformers
records inside a layer, or models that do other than hand each layer's output to the next: those micro-batches are not measured, and
the reason is told. Hooks on modules inside a layer, and on the weights of embeddings, run once more, as under checkpointing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hilore_cli.errors import PlanMismatchError
from hilore_cli.replay import Exact, KeptForward, hidden_states_of, tensors_of

NO_BACKWARD = "its backward did not come before the next micro-batch's forward"
NOT_FINITE = "its exact gradient is not finite"
NO_GRADIENT = "its gradient is zero"
FSDP_BOUNDARY = "RegisterPostBackwardFunction"
"""Name of what FSDP2 puts before a layer's inputs: to run its backward would reduce the layer's gradients."""


# -------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """One decoder layer of a measured micro-batch. Errors are relative: norm of planned minus exact gradient over norm of the exact one."""

    fqn: str
    parameters: float
    """of its parameters' gradient"""
    output: float
    """of the gradient that came to its output: what the layers above brought"""
    input: float
    """of the gradient that it passed on"""
    lost: float
    """share of the micro-batch's squared gradient that is first lost here"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One micro-batch: squared norms of its exact gradient and of planned minus exact (inf: the planned one is not finite); lowest layer first."""

    gradient2: float
    change2: float
    layers: tuple[LayerError, ...]

    @property
    def rel_error(self) -> float:
        return math.sqrt(self.change2 / self.gradient2)


OnDone = Callable[[Measured | None, str], None]
"""Gets the result, or None and the reason in words."""


# ------------------------------------------------------------------------------------------------------- one micro-batch


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What goes down from a layer's input: its exact gradient, and the planned one that autograd passes on (None: not seen)."""

    exact: Tensor
    passed: Tensor | None


class GradientError:
    """One micro-batch's measurement: fed with its layer calls, done when its backward ends.

    What a layer is run again from belongs to autograd's graph: a forward whose backward is left out frees it with the graph.
    """

    def __init__(self, model: nn.Module, *, layers: Sequence[str], name: str, on_done: OnDone) -> None:
        """`layers`: fqns of the decoder layers. Raises PlanMismatchError for a parameter outside them that is sharded apart from the model."""
        self.closed = False
        self._name = name
        self._on_done = on_done
        self._fqns: list[str] = []
        self._calls: list[weakref.ref[LayerCall]] = []
        self._carried: Carried | None = None
        self._rows: list[Tensor] = []
        self._outside: list[Tensor] = []
        self._below: list[bool] = []
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}
        self._exact: dict[int, Tensor] = {}
        self._changes: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._deaf = self._ending = False
        inside = tuple(f"{fqn}." for fqn in layers)
        self.hook_parameters((fqn, p) for fqn, p in model.named_parameters() if not fqn.startswith(inside))

    def watch(self, layer: nn.Module, *, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
        """Keep what it takes to run the layer once more; None where nothing can be measured any more."""
        if self.closed:
            return None
        for name, parameter in layer.named_parameters():
            _refuse_sharded(parameter, fqn=f"{fqn}.{name}", plan=self._name)
        call = LayerCall(self, layer, fqn=fqn, args=args, kwargs=kwargs, lowest=not self._calls)
        if self._calls and not call.follows(self._calls[-1]()):
            return self.give_up(f"{fqn} does not get the output of {self._fqns[-1]} as it is")
        if call.other_gradients:
            return self.give_up(f"{fqn} gets more than hidden states with a gradient")
        self._fqns.append(fqn)
        self._calls.append(weakref.ref(call))
        return call

    def hook_parameters(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """See the gradients of parameters where they arrive: those of captured layers are seen as the layers hand them over."""
        training = [(fqn, parameter) for fqn, parameter in named if parameter.requires_grad]
        for fqn, parameter in training:
            _refuse_sharded(parameter, fqn=fqn, plan=self._name)
        for fqn, parameter in training:
            self._parameters[id(parameter)] = weakref.ref(parameter)
            self._hooks.append(parameter.register_hook(partial(self._note_gradient, fqn, id(parameter))))

    def give_up(self, problem: str) -> None:
        """Measure no more in this micro-batch; training goes on."""
        if not self.closed:
            self.close()
            self._on_done(None, problem)

    def close(self) -> None:
        """Take all hooks off and let all tensors go. Calling it twice is harmless."""
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        for reference in self._calls:
            if (call := reference()) is not None:
                call.release()
        self._hooks, self._calls, self._carried = [], [], None
        self._exact, self._changes = {}, {}

    # ------------------------------------------------------------------------------------------------- while backward runs

    def compare(self, call: LayerCall, *, arrived: Sequence[Tensor | None], planned: Mapping[str, Tensor | None], passed: Tensor | None) -> None:
        """A captured layer's backward has run. arrived: gradients of its outputs; planned: of its parameters; passed: of its input."""
        if not self._is_next(call):
            return
        came = arrived[0]
        if came is None:
            self.give_up(f"{call.fqn} got no gradient")
        elif self._carried is None and not call.compresses:
            self._rows.append(_figures((planned.values(), planned.values()), (came, came), (passed, passed)))
            self._end_call(call)
        elif (exact := self._run_again(call, [exact_came := self._exact_of(came), *arrived[1:]])) is not None:
            self._rows.append(_figures((planned.values(), [exact.parameters[name] for name in planned]), (came, exact_came), (passed, exact.hidden)))
            self._carry(exact.hidden, passed)
            self._end_call(call)

    def compare_uncaptured(self, call: LayerCall, came: Tensor) -> None:
        """A layer that is left to torch's checkpoint is about to run its backward: exact, but for what has come down to it."""
        if not self._is_next(call):
            return
        exact_came = self._exact_of(came)
        if self._carried is not None:
            exact = self._run_again(call, [exact_came])
            if exact is None:
                return
            self._exact |= {id(parameter): gradient for name, parameter in call.parameters() if (gradient := exact.parameters.get(name)) is not None}
            self._carry(exact.hidden, None)
        self._rows.append(_figures(((), ()), (came, exact_came), (None, None)))
        self._end_call(call)

    def _note_gradient(self, fqn: str, key: int, gradient: Tensor) -> None:
        """The planned gradient of a parameter, from all of this backward, before it is accumulated."""
        if self.closed or self._deaf:
            return
        if key in self._arrived:
            return self.give_up(f"the gradient of {fqn} came in two backward passes")
        if gradient.layout != torch.strided:
            return self.give_up(f"the gradient of {fqn} is sparse")
        self._arrived.add(key)
        change = self._changes.pop(key, None)
        self._below.append(change is not None)
        if change is not None:
            self._outside.append(torch.stack([_norm2([gradient - change], like=gradient), _norm2([change], like=gradient)]))
        else:
            exact = self._exact.pop(key, gradient)
            self._outside.append(torch.stack([_norm2([exact], like=gradient), _distance2([gradient], [exact], like=gradient)]))

    def _is_next(self, call: LayerCall) -> bool:
        """Whether this is the layer whose turn it is. At the first one, has the end of the backward told of."""
        if self.closed:
            return False
        if not self._ending:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if not self._calls or self._calls[-1]() is not call:
            self.give_up(f"the backward of {call.fqn} ran out of turn")
        return not self.closed

    def _exact_of(self, came: Tensor) -> Tensor:
        """The exact gradient of a layer's output. What others than the next layer add to it (a loss on hidden states) is exact and in both."""
        carried = self._carried
        if carried is None:
            return came
        if carried.passed is None or carried.passed.data_ptr() == came.data_ptr():
            return carried.exact
        return carried.exact + (came - carried.passed)

    def _run_again(self, call: LayerCall, upstream: Sequence[Tensor | None]) -> Exact | None:
        try:
            return call.kept.run(upstream)
        except torch.OutOfMemoryError:
            return self.give_up(f"there was no memory to run {call.fqn} once more")

    def _carry(self, exact: Tensor | None, passed: Tensor | None) -> None:
        self._carried = None if exact is None else Carried(exact=exact, passed=passed)

    def _end_call(self, call: LayerCall) -> None:
        self._calls.pop()
        carried = self._carried
        if call.below is not None and self._parameters and carried is not None and carried.passed is not None:
            self._look_below(call.below, carried.passed - carried.exact)
        call.release()

    def _look_below(self, edge: GradientEdge, change: Tensor) -> None:
        """What a change of the lowest layer's input gradient does to the parameters below it: backward is linear in it."""
        self._deaf = True
        try:
            found = torch.autograd.grad([edge], [reference() for reference in self._parameters.values()], [change], retain_graph=True, allow_unused=True)
        finally:
            self._deaf = False
        self._changes = {key: changed for key, changed in zip(self._parameters, found, strict=True) if changed is not None}

    # -------------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        if self.closed:
            return
        result = "its backward did not go through all layers" if self._calls else self._result()
        if isinstance(result, str):
            return self.give_up(result)
        self.close()
        self._on_done(result, "")

    def _result(self) -> Measured | str:
        """The figures, from the device in one piece; or why there are none."""
        rows = torch.stack(self._rows).tolist()
        outside = torch.stack(self._outside).tolist() if self._outside else []
        gradient2 = change2 = 0.0
        for own, changed, *_ in (*rows, *outside):
            if math.isfinite(own):
                gradient2 += own
                change2 += changed if math.isfinite(changed) else math.inf
            elif change2 < math.inf:  # from the top down: below a planned gradient that is not finite nothing is known
                return NOT_FINITE
        if gradient2 == 0:
            return NO_GRADIENT
        below2 = sum(own for (own, _), below in zip(outside, self._below, strict=True) if below and math.isfinite(own))
        return Measured(gradient2=gradient2, change2=change2, layers=_layer_errors(self._fqns, rows[::-1], below2=below2, gradient2=gradient2))


def _layer_errors(fqns: Sequence[str], rows: Sequence[Sequence[float]], *, below2: float, gradient2: float) -> tuple[LayerError, ...]:
    """rows, lowest layer first: squared norms of exact gradient and change of parameters, output, input. below2: of what lies below the layers.

    What a layer loses: of its parameters' squared gradient the share that its error grows by from its output to them, of everything below it
    the share that the error grows by from its output to its input. A share is 1 at most: a gradient that is gone cannot be lost again.
    """
    found = []
    for fqn, (own2, own_change, output2, output_change, input2, input_change) in zip(fqns, rows, strict=True):
        came, own, passed = (_share(change, norm2) for change, norm2 in ((output_change, output2), (own_change, own2), (input_change, input2)))
        lost = max(min(own, 1.0) - min(came, 1.0), 0.0) * own2 + max(min(passed, 1.0) - min(came, 1.0), 0.0) * below2
        found.append(LayerError(fqn=fqn, parameters=math.sqrt(own), output=math.sqrt(came), input=math.sqrt(passed), lost=lost / gradient2))
        below2 += own2 if math.isfinite(own2) else 0.0
    return tuple(found)


def _share(change2: float, norm2: float) -> float:
    """Squared relative error; inf where the change, or what it is to be compared with, is not finite, or that is zero."""
    if change2 == 0:
        return 0.0
    return change2 / norm2 if math.isfinite(change2) and 0 < norm2 < math.inf else math.inf


# ------------------------------------------------------------------------------------------------------------- one layer


class LayerCall:
    """One layer's training forward in a measured micro-batch, and where its gradients come by."""

    def __init__(self, owner: GradientError, layer: nn.Module, *, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], lowest: bool) -> None:
        hidden = hidden_states_of(args, kwargs)
        self.fqn = fqn
        self.compresses = False
        self.kept = KeptForward(layer, args=args, kwargs=kwargs)
        self.below = _edge_below(hidden) if lowest else None
        self.other_gradients = any(isinstance(x, Tensor) and x.requires_grad and x is not hidden for x in tree_leaves((args, kwargs)))
        self._owner = owner
        self._layer = weakref.ref(layer)
        self._requires_grad = hidden.requires_grad
        self._edges: dict[Edge, str | None] = {_edge_of(p): name for name, p in layer.named_parameters() if p.requires_grad} | ({_edge_of(hidden): None} if hidden.requires_grad else {})
        self._output: tuple[Tensor, int] | None = None

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._layer().named_parameters()

    def follows(self, lower: LayerCall | None) -> bool:
        """Whether the layer gets a lower one's output, unchanged: then the gradient of the one is that of the other."""
        if lower is None or lower._output is None:
            return False
        hidden, (output, version) = self.kept.hidden, lower._output
        lower._output = None
        return hidden.data_ptr() == output.data_ptr() and hidden.shape == output.shape and hidden.stride() == output.stride() and hidden._version == version

    def returned(self, output: Any, *, compresses: bool, captured: bool = True) -> None:
        """Note what the layer gave. `captured`: all of its backward is one node of autograd's graph; else it is exact."""
        tensors = tensors_of(output)
        edges, self._edges = self._edges, {}  # they hold the graph below
        self.compresses = compresses
        self._output = (tensors[0].detach(), tensors[0]._version)
        if not captured:
            self._owner.hook_parameters((f"{self.fqn}.{name}", parameter) for name, parameter in self.parameters())
            tensors[0].register_hook(partial(self._owner.compare_uncaptured, self))
            return
        node = tensors[0].grad_fn
        slots = [y.output_nr if y.requires_grad and y.grad_fn is node else None for y in tensors]
        places = {edges[edge]: i for i, edge in enumerate(node.next_functions) if edge in edges}
        if self._requires_grad and None not in places:
            return self._owner.give_up(f"{self.fqn} is not one piece of autograd's graph")
        node.register_hook(partial(self._ran, slots, places))

    def release(self) -> None:
        """Let the tensors go."""
        self.kept = self.below = self._output = None

    def _ran(self, slots: Sequence[int | None], places: Mapping[str | None, int], grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        """The layer's planned backward has run; its gradients go on as they are."""
        if any(gradient is not None and slot not in slots for slot, gradient in enumerate(grad_outputs)):
            return self._owner.give_up(f"what is recorded inside {self.fqn} (router logits, attentions) has a gradient of its own")
        arrived = [None if slot is None else grad_outputs[slot] for slot in slots]
        planned = {name: grad_inputs[i] for name, i in places.items() if name is not None}
        self._owner.compare(self, arrived=arrived, planned=planned, passed=grad_inputs[places[None]] if None in places else None)


# -------------------------------------------------------------------------------------------------------------- helpers


def _refuse_sharded(parameter: nn.Parameter, *, fqn: str, plan: str) -> None:
    # by name: not every build of torch has torch.distributed
    if type(parameter).__name__ == "DTensor":
        raise PlanMismatchError(f"plan {plan}: the guard cannot see the gradient of {fqn}, which is sharded while the layers run (tensor parallelism, or fully_shard on it alone); shard it with the whole model, or train without the guard")


Edge = tuple[Node, int]


def _edge_of(tensor: Tensor) -> Edge:
    """Where autograd delivers the tensor's gradient."""
    return (get_gradient_edge(tensor).node, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _edge_below(hidden: Tensor) -> GradientEdge | None:
    """Where the gradient of hidden states goes on to, behind FSDP2's boundary; None where nothing below trains."""
    node, output = hidden.grad_fn, hidden.output_nr
    while node is not None and node.name().startswith(FSDP_BOUNDARY):
        node, output = node.next_functions[output]
    return None if node is None else GradientEdge(node, output)


Pair = tuple[Tensor | None, Tensor | None]
Many = tuple[Iterable[Tensor | None], Iterable[Tensor | None]]


def _figures(parameters: Many, output: Pair, hidden: Pair) -> Tensor:
    """(planned, exact) of parameters, output and input -> [6] squared norms of exact gradient and change of each, in that order."""
    like = output[0]
    sides = [tuple(map(list, parameters)), ([output[0]], [output[1]]), ([hidden[0]], [hidden[1]])]
    return torch.stack([figure for planned, exact in sides for figure in (_norm2(exact, like=like), _distance2(planned, exact, like=like))])


def _norm2(tensors: Iterable[Tensor | None], *, like: Tensor) -> Tensor:
    """Sum of squares over all tensors: float64 [] on the device of `like`. No tensor is copied to a wider type."""
    total = torch.zeros((), dtype=torch.float64, device=like.device)
    for tensor in tensors:
        if tensor is not None:
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            total = total + torch.linalg.vector_norm(tensor, dtype=wide).double().square()
    return total


def _distance2(planned: Sequence[Tensor | None], exact: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
    """Sum of squares of planned - exact; None counts as zeros."""
    changed = (e if p is None else p if e is None else p - e for p, e in zip(planned, exact, strict=True) if p is not e)
    return _norm2(changed, like=like)
