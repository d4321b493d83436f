"""Measured peaks: the most bytes live at once during a step, from an allocator's own events or counts, never from RSS.

On a CPU: the events that torch's profiler records for every allocation and release. On a GPU: the caching allocator's count of requested
bytes, read at every mark, with its greatest value since the mark before. Both count what tensors and libraries ask for, to the byte, which is
what plans predict. The allocator hands out more than that: multiples of 512 bytes, and of a block over 1 MiB up to 1 MiB that it does not
split off (`torch.cuda.max_memory_allocated`); and it keeps what is freed (`max_memory_reserved`). Leave that room below the card's size.

What is live before the step starts is in neither. Weights, gradients and optimizer state are counted by `static_bytes_of`, what libraries
keep by `workspace_bytes`; whoever wants a whole peak adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from hilore_cli.errors import ProfileError

_MARK = "hilore:mark:"
CPU = torch.device("cpu")
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """Live bytes over one step, relative to its start.

    `time_ns` and `live_bytes` [events] are parallel, in time order; `marks` are the moments named with `Tracer.mark`. A GPU's moments are
    numbered, not timed.
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


class Tracer(Protocol):
    """Traces one step; `mark` may be called from within it, from any thread. The first mark of a name counts."""

    def mark(self, name: str) -> None: ...

    def trace(self, step: Step) -> MemoryTrace: ...


def tracer_for(device: torch.device) -> Tracer:
    """Raises ProfileError for a device whose memory cannot be told."""
    if device.type == "cpu":
        return EventTracer()
    if device.type == "cuda":
        return CountTracer(device)
    raise ProfileError(f"memory on {device.type} cannot be measured; use a CPU, or a GPU of CUDA or ROCm")


def mark(name: str) -> None:
    """Name this moment in the trace of a CPU's events that is being taken, if one is."""
    with record_function(_MARK + name):
        pass


def trace_memory(step: Step, *, device: torch.device = CPU) -> MemoryTrace:
    """Run a step and return its allocator's events or counts as a trace."""
    return tracer_for(device).trace(step)


def measure_peak(step: Step, *, static_bytes: int, device: torch.device) -> int:
    """Most bytes live at once during a step, static part included."""
    return static_bytes + trace_memory(step, device=device).peak_bytes


class EventTracer:
    """A CPU's allocations and releases as torch's profiler records them; other devices' are left out."""

    def mark(self, name: str) -> None:
        mark(name)

    def trace(self, step: Step) -> MemoryTrace:
        with profile(profile_memory=True, record_shapes=False, with_stack=False) as recorder:
            step()
        times, deltas, marks = [], [], {}
        for event in recorder.kineto_results.events():
            name = event.name()
            if name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                times.append(event.start_ns())
                deltas.append(event.nbytes())
            elif name.startswith(_MARK):
                key = name.removeprefix(_MARK)
                marks[key] = min(event.start_ns(), marks.get(key, event.start_ns()))
        if not times:
            raise ProfileError("torch's profiler reported no memory events for the step; is another profiler running?")
        order = np.argsort(np.array(times), kind="stable")
        return MemoryTrace(time_ns=np.array(times)[order], live_bytes=np.cumsum(np.array(deltas, dtype=np.int64)[order]), marks=marks)


class CountTracer:
    """A GPU's caching allocator, asked at every mark how much is live and what the most was since the mark before.

    Allocation happens when an operator is launched, so that the counts are in the order of the program, whatever the GPU is doing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._live: list[int] = []
        self._marks: dict[str, int] = {}

    def mark(self, name: str) -> None:
        self._note()
        self._marks.setdefault(name, len(self._live) - 1)

    def trace(self, step: Step) -> MemoryTrace:
        before = self._begin()
        step()
        self._note()
        if not any(self._live):
            raise ProfileError(f"the CUDA allocator {torch.cuda.get_allocator_backend()!r} counted no requested bytes; unset PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF and PYTORCH_NO_CUDA_MEMORY_CACHING, so that torch's own is used")
        return MemoryTrace(time_ns=np.arange(len(self._live)), live_bytes=np.array(self._live, dtype=np.int64) - before, marks=dict(self._marks))

    def _begin(self) -> int:
        """Bytes live before the step."""
        self._live, self._marks = [], {}
        torch.cuda.reset_peak_memory_stats(self.device)
        return requested_bytes(self.device)

    def _note(self) -> None:
        """Two moments: the most since the last note, and now."""
        stats = torch.cuda.memory_stats(self.device)
        self._live += [stats[f"requested_bytes.all.{which}"] for which in ("peak", "current")]
        torch.cuda.reset_peak_memory_stats(self.device)


def requested_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors and libraries of this process asked for and hold now."""
    return torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0)


def workspace_bytes(step: Step, *, device: torch.device) -> int:
    """Bytes that libraries keep once a step has run: on a GPU cuBLAS's workspaces, one for each thread that multiplies matrices; 0 on a CPU.

    The step's own lasting tensors (gradients, optimizer state) must be there before; its workspaces are freed first, and counted as it makes them anew.
    """
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = requested_bytes(device)
    step()
    return max(requested_bytes(device) - before, 0)


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
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
