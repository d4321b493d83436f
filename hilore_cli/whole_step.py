"""One whole update of a profile: its peaks, the account of what is live outside the layers, its times, and what rounding makes of its gradient.

What it does NOT do: look into layers (profiler.py), or say where a step's bytes are at each moment under a plan (timeline.py).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hilore_cli.grpo import relative_error
from hilore_cli.peak import MemoryTrace
from hilore_cli.workbench import Progress, Workbench

MOVED_OF = 32
"""Of so many elements two are moved by their rounding to see what rounding makes of it: few enough to bring nothing themselves."""


def measure_steps(bench: Workbench, *, repeats: int, progress: Progress) -> dict[str, Any]:
    """Peaks and account of none and gc; times of none, gc and recompute-all.

    Between no checkpointing and recompute-all lies every plan: the runtime with everything stored takes the time of none.
    """
    methods = ("none", "gc", "recompute")
    progress("measuring peaks", 0, 3)
    none_peak = bench.peak_bytes("none")
    progress("measuring peaks", 1, 3)
    account, gc_peak = measure_account(bench, bench.static())
    smaller = measure_smaller_account(bench)
    progress("measuring peaks", 2, 3)
    samples = bench.time_updates(methods, repeats=repeats, progress=progress)
    times = {f"{name}_us": median(wall for wall, _ in samples[name]) for name in methods}
    return {"account": account, "smaller": smaller, "peaks": {"none_bytes": none_peak, "gc_bytes": gc_peak}, "times": times | {"repeats": repeats, "threads": torch.get_num_threads()}}


def measure_account(bench: Workbench, static: dict[str, int]) -> tuple[dict[str, int], int]:
    """The account of what is live outside the layers, read off one traced update with checkpointing; and its peak."""
    with bench.method("gc"):
        trace = trace_marked_update(bench)
    hidden = _hidden_bytes(bench)
    total = sum(static.values())
    shared = max(trace.live_at("layers") - hidden, 0)
    stored = max(trace.live_at("head") - shared - hidden, 0)  # the layers' inputs, and the random states that checkpointing on a CPU keeps beside them
    account = {
        **static,
        "shared_bytes": shared,
        "head_bytes": max(trace.peak_between("head", "backward") - shared - stored, 0),
        "tail_bytes": max(trace.peak_between("tail", "update") - shared, 0),
        "update_bytes": trace.peak_between("update", None),
    }
    return account, total + trace.peak_bytes


def measure_smaller_account(bench: Workbench) -> dict[str, Any] | None:
    """The account with half of the rows; None where there are fewer than two rows with a loss token."""
    whole = bench.batches
    counted = whole[0].loss_mask.any(1).nonzero().flatten()
    if len(counted) < 2:
        return None
    half = whole[0].take_rows(counted[: max(1, len(counted) // 2)])
    bench.batches = [half]
    try:
        account, _ = measure_account(bench, bench.static())
    finally:
        bench.batches = whole
    return {"tokens": half.tokens, "account": account}


def trace_marked_update(bench: Workbench) -> MemoryTrace:
    """One traced update with marks: layers (before the first), head, backward (of the last layer), tail, update."""
    first, last = bench.layers[0][1], bench.layers[-1][1]
    tracer = bench.tracer()
    hooks = []

    def before_layers(_module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if torch.is_grad_enabled() and not torch._C._current_graph_task_id() >= 0:
            tracer.mark("layers")
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: tracer.mark("tail"))

    def after_layers(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        tracer.mark("head")
        hidden.register_hook(lambda grad: tracer.mark("backward"))

    def before_update(*_: Any) -> None:
        tracer.mark("update")

    hooks.append(first.register_forward_pre_hook(before_layers, with_kwargs=True))
    hooks.append(last.register_forward_hook(after_layers))
    hooks.append(bench.optimizer.register_step_pre_hook(before_update))
    try:
        trace = tracer.trace(bench.update)
    finally:
        for hook in hooks:
            hook.remove()
    marks = dict(trace.marks)
    marks.setdefault("tail", marks["update"])  # an input without gradient (LoRA, frozen embedding) has no tail
    return replace(trace, marks=marks)


def _hidden_bytes(bench: Workbench) -> int:
    config = bench.model.config.get_text_config()
    dtype = torch.get_autocast_dtype(bench.device.type) if torch.is_autocast_enabled(bench.device.type) else next(bench.model.parameters()).dtype
    return bench.batches[0].tokens * config.hidden_size * dtype.itemsize


def measure_rounding(bench: Workbench, exact: dict[str, Tensor]) -> float:
    """Relative change of the gradient when a few elements of the last layer's output gradient move by one rounding, up or down.

    In bf16 all that is computed below then rounds otherwise, and the gradient is another one by about what its own roundings make of it:
    SmolLM2 1.5e-2, at whichever size of change. So any plan that is not exact brings that, beside the error of its values. 0 in fp32.
    """
    generator = torch.Generator().manual_seed(0)

    def move(gradient: Tensor) -> Tensor:
        if gradient.dtype not in (torch.bfloat16, torch.float16):
            return gradient
        drawn = torch.randint(0, MOVED_OF, gradient.shape, generator=generator).to(gradient.device)
        steps = (drawn == 0).float() - (drawn == 1).float()
        return (gradient.float() * (1 + torch.finfo(gradient.dtype).eps * steps)).to(gradient.dtype)

    def after_last(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(move)

    if all(parameter.dtype in (torch.float32, torch.float64) for parameter in bench.model.parameters()) and not torch.is_autocast_enabled(bench.device.type):
        return 0.0
    hook = bench.layers[-1][1].register_forward_hook(after_last)
    try:
        with bench.method("recompute"):
            return relative_error(bench.gradients(), exact)
    finally:
        hook.remove()
