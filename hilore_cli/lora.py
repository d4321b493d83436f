"""LoRA as a trainer puts it on: put on a model, and read off one.

What this does NOT do: rsLoRA, DoRA and other kinds (a plan runs under them, `adapters.py`; hilore itself makes plain LoRA).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hilore_cli.adapters import idle_adapters
from hilore_cli.errors import UsageError
from hilore_cli.provenance import Lora

Layers = Sequence[tuple[str, nn.Module]]
LINEARS = (nn.Linear, Conv1D)
"""What PEFT puts LoRA on; gpt2's are Conv1D."""


def put_lora_on(model: PreTrainedModel, layers: Layers, lora: Lora, *, seed: int) -> nn.Module:
    """The model with frozen weights and adapters. Raises UsageError without peft, for values that PEFT does not take, and for targets that are no linears of the layers."""
    lora.check()
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora needs peft; install it with: pip install 'hilore[lora]'") from error
    linears = [f"{name}.{inner}" for name, layer in layers for inner, module in layer.named_modules() if isinstance(module, LINEARS)]
    if unknown := set(lora.targets or ()) - {_last(name) for name in linears}:
        raise UsageError(f"lora target {min(unknown)!r}: no linear of the decoder layers; there are {', '.join(sorted({_last(name) for name in linears}))}")
    chosen = [name for name in linears if lora.targets is None or _last(name) in lora.targets]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.lora_alpha, lora_dropout=lora.dropout, target_modules=chosen, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT sets it right for gpt2's linears, and says so
        torch.manual_seed(seed)
        return get_peft_model(model, config).train()


def find_lora(model: nn.Module, layers: Layers) -> Lora | None:
    """The active adapters of a model, of which kinds other than LoRA have a rank alone; None where there are none, or none with a rank."""
    idle = idle_adapters(model)
    name, config = next(((name, config) for name, config in getattr(model, "peft_config", {}).items() if name not in idle), (None, None))
    if getattr(config, "r", None) is None:
        return None
    if not hasattr(config, "lora_alpha"):  # LoHa, VeRA and others have a rank, too
        return Lora(rank=config.r)
    have, lack = set(), set()
    for inner, module in _outer_linears(layers):
        (have if name in getattr(module, "lora_A", ()) else lack).add(_last(inner))
    return Lora(rank=config.r, alpha=float(config.lora_alpha), dropout=config.lora_dropout, targets=tuple(sorted(have)) if lack else None)


def _outer_linears(layers: Layers) -> Iterator[tuple[str, nn.Module]]:
    """Linears, and what PEFT has put in their place; not the linears inside of that."""
    for _, layer in layers:
        wrapped: list[str] = []
        for inner, module in layer.named_modules():
            if any(inner.startswith(f"{outer}.") for outer in wrapped):
                continue
            if hasattr(module, "lora_A"):  # by name: peft is an extra, and importing it takes seconds
                wrapped.append(inner)
                yield inner, module
            elif isinstance(module, LINEARS):
                yield inner, module


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
