"""Why torch could not capture a layer, or did not run it, in one line that names the layer and the remedy.

What it does NOT do: recognise what hilore refuses itself (runtime.py, adapters.py, output_capture.py say that where they see it).
"""

from __future__ import annotations

import torch

from hilore_cli.errors import CaptureError, HiloreError
from hilore_cli.output_capture import recording_remedy
from hilore_cli.partition import RECOMPILE_LIMIT


def explain(error: Exception, *, plan: str, fqn: str) -> Exception:
    """Our own errors as they are; torch's capture failures as a CaptureError that names the layer; anything else unchanged."""
    inner = getattr(error, "inner_exception", None) or error
    if "found no compiled frames" in str(error):  # torch 2.13 on: a plain RuntimeError with a page of skipped frames
        return ran_uncompiled(plan=plan, fqn=fqn)
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return CaptureError(f"plan {plan}: {fqn} is called in more ways than torch keeps graphs for ({RECOMPILE_LIMIT}); find what changes with TORCH_LOGS=recompiles: an attribute of the layer, a hook, a mode, a precision")
    if isinstance(inner, HiloreError):
        return type(inner)(f"{fqn}: {inner}")
    if isinstance(inner, torch.OutOfMemoryError):
        return inner  # whoever handles it knows what to do
    if isinstance(error, (torch._dynamo.exc.TorchDynamoException,)):
        return CaptureError(f"plan {plan}: {fqn} cannot be captured whole: {reason_of(error)}{recording_remedy(str(inner))}; profile this model as it is now (such layers are then left to checkpointing), or detach the plan")
    return error


def reason_of(error: BaseException) -> str:
    """Torch's reason for a failed capture in one line: the type and first line of what it wraps, and the exception that the layer itself raised."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [""]
    raised = next((line for line in lines[1:] if "raised exception" in line or " got " in line), "")
    return f"{type(inner).__name__}: {lines[0]}" + (f" ({raised.removeprefix('Developer debug context: ')})" if raised else "")


def ran_uncompiled(*, plan: str, fqn: str) -> CaptureError:
    """For a layer that was called and whose graphs did not run."""
    return CaptureError(f"plan {plan}: {fqn} ran without its plan (torch ran the layer uncompiled); a TorchDispatchMode, torch.compiler.set_stance or a disabled torch.compile does this: end it, or detach the plan")
