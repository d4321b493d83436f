"""A decoder layer's training forward, kept so that the layer can be run once more in backward, as torch's checkpoint does.

    kept = KeptForward(layer, args=args, kwargs=kwargs)     # before the forward: inputs, random numbers, autocast
    exact = kept.run(upstream)                              # in backward: the layer's exact gradients for these of its outputs

The layer runs by its class's own forward, uncompiled, past the plan that is on it and past hooks on the layer itself. What it does
NOT do: bring back the layer's mode (train or eval) or what other code writes into its buffers in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Exact gradients of a layer's parameters by name, and of its input; None where there is none."""

    parameters: dict[str, Tensor | None]
    hidden: Tensor | None


class KeptForward:
    """What one forward of a layer was given. Holds neither the layer nor the graph that made its inputs."""

    def __init__(self, layer: nn.Module, *, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = hidden_states_of(args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        self._layer = weakref.ref(layer)
        self._place = next(i for i, x in enumerate(leaves) if x is given)
        self._leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._requires_grad = given.requires_grad
        self._random = (torch.get_rng_state(), *get_device_states(self.hidden))
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted({"cpu", given.device.type})]

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the layer got, without their graph."""
        return self._leaves[self._place]

    def run(self, upstream: Sequence[Tensor | None]) -> Exact:
        """Run the layer with everything kept, and take its gradients. upstream: of the tensors that it returns, in order; those beyond have none.

        Parameters stand in as aliases, so that hooks on the trainer's own (and data parallelism's) do not see these gradients.
        """
        layer = self._layer()
        weights = {name: p.detach().requires_grad_() for name, p in layer.named_parameters() if p.requires_grad}
        leaves = list(self._leaves)
        leaves[self._place] = hidden = self.hidden.detach().requires_grad_(self._requires_grad)
        args, kwargs = tree_unflatten(leaves, self._spec)
        with torch.enable_grad(), self._as_in_forward():
            output = functional_call(_Unplanned(layer), {f"layer.{name}": weight for name, weight in weights.items()}, args, kwargs)
        given = [(y, g) for y, g in zip(tensors_of(output), upstream, strict=False) if g is not None]
        wanted = [*weights.values(), *([hidden] if self._requires_grad else [])]
        found = torch.autograd.grad([y for y, _ in given], wanted, [g for _, g in given], allow_unused=True)
        return Exact(parameters=dict(zip(weights, found, strict=False)), hidden=found[-1] if self._requires_grad else None)

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Random numbers and autocast as they were. Weights cast for the layer are not cached: the cache would outlive it."""
        state, devices, states = self._random
        on_device = {"device_type": self.hidden.device.type} if devices else {}
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            stack.enter_context(torch.random.fork_rng(devices=devices, **on_device))
            torch.set_rng_state(state)
            set_device_states(devices, states, **on_device)
            yield


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a decoder layer is called on."""
    return args[0] if args else kwargs["hidden_states"]


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that a layer returns, hidden states first."""
    return [y for y in tree_leaves(output) if isinstance(y, Tensor)]


class _Unplanned(nn.Module):
    """A layer run by its class's own forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)
