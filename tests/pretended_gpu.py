"""A device that is not the CPU, on a machine that has none: real values behind tensors that say they are elsewhere.

Torch's CPU builds end the process when autograd meets a tensor of CUDA, so the device is called `meta`, which autograd knows. Whatever mixes a
tensor of it with one of the CPU raises, as on a GPU: except copies, indices (torch takes those of the CPU) and tensors without dimensions. Only for eager code: torch.compile
does not run under a dispatch mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
TAKE_CPU_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


class MixedDevicesError(RuntimeError):
    """An operator got tensors of both devices."""


class Elsewhere(Tensor):
    """A tensor on the pretended device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=ELSEWHERE)
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class PretendedGpu(TorchDispatchMode):
    """Context in which `device="meta"` makes tensors on the pretended device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values; its results are where its inputs are, or where `device` says."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [t for t in tensors if isinstance(t, Elsewhere)]
    here = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim() > 0]
    if there and here and func not in COPIES | TAKE_CPU_INDICES:
        raise MixedDevicesError(f"{func}: got tensors on {ELSEWHERE} and on the CPU")
    device = kwargs.get("device")
    goes_there = bool(there) if device is None else torch.device(device) == ELSEWHERE
    plain_args, plain_kwargs = tree_map_only(Elsewhere, lambda t: t.held, (args, kwargs))
    if device is not None:
        plain_kwargs = plain_kwargs | {"device": torch.device("cpu")}
    result = func(*plain_args, **plain_kwargs)
    if func is aten.copy_.default:
        goes_there = isinstance(args[0], Elsewhere)
    if goes_there:
        result = tree_map_only(Tensor, Elsewhere, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if goes_there and there else result


def move(model: nn.Module) -> nn.Module:
    """Put a model's parameters and buffers on the pretended device, in place."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(Elsewhere(parameter.detach()), requires_grad=parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = Elsewhere(buffer)
    return model
