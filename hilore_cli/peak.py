"""Measured peaks: the most bytes live at once during a step, from allocator events, never from RSS.

On a CPU the events are those that torch's profiler records for every allocation and release; on a GPU the caching allocator
counts. What is live before the step starts (weights, gradients, optimizer state) is not seen by either and is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from hilore_cli.errors import ProfileError

_MARK = "hilore:mark:"


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """Live bytes over one step, relative to its start.

    `time_ns` and `live_bytes` [events] are parallel, in time order; `marks` are the moments named with `mark()`.
    """

    time_ns: np.ndarray
    live_bytes: np.ndarray
    marks: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return int(max(self.live_bytes.max(initial=0), 0))

    def peak_between(self, start: str, end: str | None) -> int:
        """Most bytes live from one mark to another (to the end of the step without a second)."""
        first = self.marks[start]
        last = self.marks[end] if end is not None else np.iinfo(np.int64).max
        inside = (self.time_ns >= first) & (self.time_ns <= last)
        return int(max(self.live_bytes[inside].max(initial=0), self.live_at(start)))

    def live_at(self, mark: str) -> int:
        """Bytes live at a mark."""
        before = np.searchsorted(self.time_ns, self.marks[mark], side="right")
        return int(self.live_bytes[before - 1]) if before else 0


def mark(name: str) -> None:
    """Name this moment in the trace that is being taken, if one is."""
    with record_function(_MARK + name):
        pass


def trace_memory(step: Callable[[], object]) -> MemoryTrace:
    """Run a step on the CPU and return its allocator events as a trace. The first mark of a name counts."""
    with profile(profile_memory=True, record_shapes=False, with_stack=False) as recorder:
        step()
    times, deltas, marks = [], [], {}
    for event in recorder.kineto_results.events():
        name = event.name()
        if name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            times.append(event.start_ns())
            deltas.append(event.nbytes())
        elif name.startswith(_MARK):
            marks.setdefault(name.removeprefix(_MARK), event.start_ns())
    if not times:
        raise ProfileError("torch's profiler reported no memory events for the step; is another profiler running?")
    order = np.argsort(np.array(times), kind="stable")
    return MemoryTrace(time_ns=np.array(times)[order], live_bytes=np.cumsum(np.array(deltas, dtype=np.int64)[order]), marks=marks)


def measure_peak(step: Callable[[], object], *, static_bytes: int, device: torch.device) -> int:
    """Most bytes live at once during a step, static part included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return static_bytes + trace_memory(step).peak_bytes


def static_bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of weights and buffers, gradients, and optimizer state; tied and shared storages count once."""
    tensors = [*model.parameters(), *model.buffers()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "weights_bytes": _unique_bytes(tensors),
        "gradients_bytes": _unique_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_bytes": _unique_bytes(states),
    }


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
