"""hilore: profile one GRPO step, plan which activations to store, compress or recompute, and run the plan in your trainer."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["attach", "load_plan"]


def __getattr__(name: str) -> Any:
    """`attach` and `load_plan` import torch, which `hilore --help` must not: they are loaded on first use."""
    if name in __all__:
        from hilore_cli import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'hilore_cli' has no attribute {name!r}")
