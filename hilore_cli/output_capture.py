"""Router logits and attentions that transformers records inside a planned layer (MoE auxiliary loss, `output_attentions`).

transformers (5.24) records them by forward hooks on inner modules, which append to lists that a context variable holds while
the model's forward runs. Torch cannot trace a context variable. transformers has a plain global in its place for that
(`CompileableContextVar`), but takes it only when the model's own forward is traced, and here the layers are. So each layer is
handed its collector as that global: with fresh lists, because the lengths of lists are guarded on and every layer would
compile a graph of its own; what they gather goes to the real ones when the layer has run. Values recorded so are outputs of
the layer's graph, and their gradients go through its backward graph.

Hidden states are recorded by a hook on the layer itself, which runs outside what is compiled. What this does NOT do: record
hidden states within a layer (refused), or keep two threads apart that record at once (torch.compile does not either).
Private names of transformers are in `_collector` alone; where they are others, nothing is handed over and a layer that
records ends in a CaptureError that says so (`recording_remedy`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from hilore_cli.errors import CaptureError

try:
    from transformers.utils import output_capturing
except ImportError:  # an earlier transformers: it patches forwards for the time of the call
    output_capturing = None

HIDDEN_STATES = "hidden_states"
_UNKNOWN = f" records router logits, attentions or hidden states in a way of transformers {transformers.__version__} that hilore does not know: switch output_router_logits and its like off, or use transformers 5.24"


def _collector() -> Any | None:
    """transformers' active collector; None where it is not the one this file knows."""
    found = vars(output_capturing).get("_active_collector") if output_capturing is not None else None
    return found if found is not None and vars(found).keys() >= {"context_var", "global_var", "compiling"} else None


class OutputCapture:
    """Hands one model's collector over to its layers while they run compiled. Keeps neither model nor layers alive."""

    def __init__(self, model: nn.Module) -> None:
        self._models = [weakref.ref(module) for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._hooked = 0
        self._recorded: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()

    @contextmanager
    def handed_over(self, layer: nn.Module) -> Iterator[None]:
        """Context in which the layer's hooks can be traced. Raises CaptureError for hidden states recorded inside the layer."""
        collector = _collector()
        if collector is None or not self._has_hooks():
            yield
            return
        recorded = collector.get() or {}
        fresh: dict[str, list[Any]] = {key: [] for key in sorted(self._recorded_inside(layer)) if key in recorded}
        if HIDDEN_STATES in fresh:
            raise CaptureError("the layer records hidden states of a module inside it, which cannot be captured; call the model with output_hidden_states=False, or detach the plan for this call")
        before = collector.compiling, collector.global_var
        collector.compiling, collector.global_var = True, fresh or None
        try:
            yield
        finally:
            collector.compiling, collector.global_var = before
        for key, values in fresh.items():
            recorded[key].extend(values)

    def _has_hooks(self) -> bool:
        """transformers puts its hooks on once for each (sub)model, at the first request, and notes that there."""
        hooked = sum(getattr(model, "_output_capturing_hooks_installed", False) for reference in self._models if (model := reference()) is not None)
        if hooked != self._hooked:
            self._hooked = hooked
            self._recorded.clear()
        return hooked > 0

    def _recorded_inside(self, layer: nn.Module) -> frozenset[str]:
        if layer not in self._recorded:
            self._recorded[layer] = recorded_inside(layer)
        return self._recorded[layer]


def recorded_inside(layer: nn.Module) -> frozenset[str]:
    """Keys ("router_logits", "attentions") that hooks on the layer's inner modules record. Raises CaptureError for hooks that hold no key."""
    hooks = (hook for name, module in layer.named_modules() if name for hook in module._forward_hooks.values())
    keys = [inspect.getclosurevars(hook).nonlocals.get("key") for hook in hooks if inspect.isfunction(hook) and hook.__module__ == output_capturing.__name__]
    if None in keys:
        raise CaptureError(f"the layer{_UNKNOWN}")
    return frozenset(keys)


def recording_remedy(reason: str) -> str:
    """What to do about a capture that failed on a context variable; empty for any other reason."""
    if "ContextVar" not in reason:
        return ""
    return f"; the layer{_UNKNOWN}"
