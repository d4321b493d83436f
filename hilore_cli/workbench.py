"""One model, the micro-batches of one update, one optimizer, and the ways to run it: what is measured is run here.

Methods: `none`, `gc` (Hugging Face's own checkpointing), `store` and `recompute` (the runtime's uniform plans), and plans under
names of their own (`add_plan`). Each plan is compiled once and attached only while it runs. The learning rate is zero, so that every run
of every method sees the same weights.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointError

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import JointGraph
from hilore_cli.errors import ProfileError, UsageError, first_line
from hilore_cli.grpo import BeforeForward, GrpoConfig, actor_update, can_repeat, gradients, kernel_mode, make_optimizer
from hilore_cli.malloc import page_faults
from hilore_cli.models import decoder_layers, text_decoder
from hilore_cli.peak import Tracer, static_bytes_of, tracer_for, workspace_bytes
from hilore_cli.runtime import Handle, Program, attach_patterns
from hilore_cli.schema import ExposureRule, Pattern, Variant

UNLIMITED_TOKENS = 2**40
UNIFORM = ("store", "recompute")
SETTLED_BYTES = 2**24
"""So much memory may be new to the process in an update that is timed: on a virtual machine a page of 4 KiB took up to 18 us, all of them together 7 of 19 s."""
UNSETTLED_UPDATES = 3
"""So many updates of a method are run again at most for more: SmolLM2 without checkpointing took two before the heap held all it needs. On a GPU the first update of a method grows the allocator's reserve."""
ASSIGNED = "assigned"
SKIP = "+skip"

Progress = Callable[[str, int, int], None]
"""Told of (what is being done, done, of how many)."""


class Workbench:
    """One model, the micro-batches of one update (`batches`, which may be exchanged), one optimizer, and the ways to run it."""

    def __init__(self, model: nn.Module, batches: Sequence[MicroBatch], config: GrpoConfig) -> None:
        self.model = model
        self.batches = list(batches)
        self.config = replace(config, learning_rate=0.0, weight_decay=0.0)
        self.optimizer = make_optimizer(model, self.config)
        self.layers = decoder_layers(model)
        self.device = next(model.parameters()).device
        check_vocabulary(model, batches)
        self.repeats_exactly = self.device.type == "cpu" or can_repeat(self.device)
        """Whether gradients are bitwise the same each time they are taken; a GPU has to be asked for it."""
        self.recorder = Recorder()
        self._planned: Handle | None = None
        self._weights: list[float | None] = []
        self.skipping: list[MicroBatch] = []
        self.uncaptured: dict[str, str] = {}
        """Layers that torch cannot capture whole, by name, with its reason: left to torch's checkpoint in all that is run here."""
        self._handles: dict[str, Handle] = {}
        self._compiled: set[str] = set()
        self._unsettled: Counter[str] = Counter()
        self._workspace_bytes: int | None = None

    def update(self) -> None:
        actor_update(self.model, self.optimizer, self.batches, self.config, before=self._announce())

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of all micro-batches together."""
        if self.device.type == "cpu" or not self.repeats_exactly:
            return gradients(self.model, self.batches, self.config, before=self._announce())
        try:
            return gradients(self.model, self.batches, self.config, before=self._announce(), deterministic=True)
        except RuntimeError as error:
            if "deterministic" not in str(error) and not isinstance(error, CheckpointError):
                raise
            warnings.warn(f"gradients on this GPU are not the same each time, and differ by that much where they should be equal: {first_line(error)}", stacklevel=2)
            self.repeats_exactly = False
            return self.gradients()

    def _announce(self) -> BeforeForward | None:
        """Tell an attached plan what the update holds; what is returned tells it of each micro-batch."""
        return None if self._planned is None else announce(self._planned, self._weights)

    def gradients_by(self, method: str) -> dict[str, Tensor]:
        """Gradients of the micro-batch by a method; compiles what it runs."""
        with self.method(method):
            gradient = self.gradients()
        self._compiled.add(method)
        return gradient

    def compile(self, method: str) -> None:
        """Run a method once if it has not run here."""
        if method not in self._compiled:
            self.gradients_by(method)

    def static(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state, which are created here when there was no update yet, and of workspaces."""
        if not self.optimizer.state:
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()  # at a learning rate of zero
        if self._workspace_bytes is None:
            with self.method("gc"):
                self._workspace_bytes = workspace_bytes(self.update, device=self.device)
        return static_bytes_of(self.model, self.optimizer) | {"workspace_bytes": self._workspace_bytes}

    def add_plan(self, name: str, patterns: Mapping[str, Pattern], variants: Sequence[Variant], *, fallback: Sequence[str] = (), graph_digests: Sequence[str] = (), micro_batches: int = 1, rule: ExposureRule = "squared") -> None:
        """Make a plan a method of this name. `graph_digests`: of the graphs it was made for; layers with another are recomputed whole."""
        if name in self._handles or name in ("none", "gc", *UNIFORM):
            raise ValueError(f"method {name!r} is there already")
        self._handles[name] = self._detached(name, patterns, variants, fallback=fallback, graph_digests=graph_digests, micro_batches=micro_batches, exposure_rule=rule)

    @contextmanager
    def method(self, name: str) -> Iterator[Handle | None]:
        """Context in which updates run by a method: none, gc, store, recompute, or a plan that was added.

        With "+skip" after it the update is that of `skipping`, without the rows that have no gradient.
        """
        if name.endswith(SKIP):
            whole = self.batches
            with self.method(name.removesuffix(SKIP)) as handle:  # exposures are compared with the whole update's
                self.batches = self.skipping
                try:
                    yield handle
                finally:
                    self.batches = whole
        elif name == "none":
            yield None
        elif name == "gc":
            with checkpointing(self.model):
                yield None
        else:
            with self._handle(name) as handle:
                self._planned, self._weights = handle, [batch.weight(handle.exposure_rule) for batch in self.batches]
                try:
                    yield handle
                finally:
                    self._planned = None

    @contextmanager
    def assigned(self, patterns: Mapping[str, Pattern], layers: Sequence[str], *, graph_digests: Sequence[str]) -> Iterator[Handle]:
        """Like `method`, for the calibration's patterns, whose layers change from call to call: compiled patterns are kept."""
        variants = [Variant(max_tokens=UNLIMITED_TOKENS, layers=list(layers))]
        if ASSIGNED not in self._handles:
            self.add_plan(ASSIGNED, patterns, variants, graph_digests=graph_digests)
        self._handles[ASSIGNED].program.choice.variants = variants
        with self.method(ASSIGNED) as handle:
            yield handle

    def _handle(self, name: str) -> Handle:
        if name not in self._handles:
            pattern = {"store": Pattern(default="store"), "recompute": Pattern()}[name]
            watch = {"run": self.recorder.run, "on_split": self.recorder.joints.append} if name == "recompute" else {}
            handle = self._detached(name, {name: pattern}, [Variant(max_tokens=UNLIMITED_TOKENS, layers=[name] * len(self.layers))], **watch)
            if watch:
                self.recorder.program = handle.program
            self._handles[name] = handle
        return self._handles[name]

    def leave_to_checkpoint(self, fqn: str, *, reason: str) -> None:
        """Note a layer that cannot be captured, and run it by torch's checkpoint from now on."""
        self.uncaptured[fqn] = reason
        for handle in self._handles.values():
            handle.leave_to_checkpoint(fqn)

    def _detached(self, name: str, patterns: Mapping[str, Pattern], variants: Sequence[Variant], *, fallback: Sequence[str] = (), **options: Any) -> Handle:
        handle = attach_patterns(self.model, patterns=patterns, variants=variants, name=name, fallback=[*fallback, *self.uncaptured], **options)
        handle.detach()
        return handle

    def peak_bytes(self, method: str) -> int:
        if method not in ("none", "gc"):
            self.compile(method)  # a trace of the first call would hold the compiler's own allocations
        static = sum(self.static().values())
        with self.method(method):
            return static + self.tracer().trace(self.update).peak_bytes

    def tracer(self) -> Tracer:
        """What counts this bench's bytes during a step."""
        return tracer_for(self.device)

    def time_updates(self, methods: Sequence[str], *, repeats: int, progress: Progress) -> dict[str, list[tuple[float, float]]]:
        """Interleaved updates: method -> [(wall us, CPU us)] per repeat. Methods are compiled before, by `gradients_by`.

        An update in which memory was still taken from the system is run again: that is paid for once, by whichever method comes first.
        """
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for repeat in range(repeats):
            for position, name in enumerate(methods):
                progress("timing whole updates", repeat * len(methods) + position, repeats * len(methods))
                with self.method(name):
                    samples[name].append(self._settled(name))
        return samples

    def _settled(self, name: str) -> tuple[float, float]:
        """(wall us, CPU us) of an update that hardly took new memory, or of the last that may be tried."""
        while True:
            before = _taken_bytes(self.device)
            sample = _timed(self.update, self.device)
            if _taken_bytes(self.device) - before <= SETTLED_BYTES or self._unsettled[name] == UNSETTLED_UPDATES:
                return sample
            self._unsettled[name] += 1


def announce(handle: Handle, weights: Sequence[float | None]) -> BeforeForward:
    """Tell a plan what an update's micro-batches weigh; what is returned tells it of each before its forward. Raises UsageError where it needs a weight that is None."""
    if None not in weights:
        handle.expect(weights)
    elif handle.program.choice.has_classes:
        raise UsageError(f"plan {handle.program.name}: weighs micro-batches by {handle.exposure_rule}, and micro-batch {weights.index(None)} has no log-probabilities from sampling; record them, or plan with --weigh squared")
    return lambda batch: handle.microbatch(exposure=batch.weight(handle.exposure_rule), tokens=batch.tokens, length=batch.shape[1])


def check_vocabulary(model: nn.Module, batches: Sequence[MicroBatch]) -> None:
    """Raise ProfileError for token ids that the model does not have."""
    vocabulary = text_decoder(model).get_input_embeddings().weight.shape[0]
    if (largest := max(int(batch.input_ids.max()) for batch in batches)) >= vocabulary:
        raise ProfileError(f"micro-batch: holds token id {largest}, the model's vocabulary has {vocabulary}; record it with this model's tokenizer (hilore rollout)")


class Recorder:
    """Sees the joint graphs of the recompute-all plan when they are split and, while `active`, what each layer is handed."""

    def __init__(self) -> None:
        self.joints: list[JointGraph] = []
        self.primals: dict[int, tuple[int, list[Any]]] = {}
        self.active = False
        self.program: Program | None = None

    def run(self, graph: fx.GraphModule, side: str) -> Callable[[list[Any]], Any]:
        """Runs a generated graph; the forward one tells what the layer was handed."""
        which = len(self.joints) - 1
        if side == "backward":
            return graph.forward

        def run_forward(arguments: list[Any]) -> Any:
            if self.active:
                self.primals[self.program.current_layer] = (which, list(arguments))
            return graph.forward(arguments)

        return run_forward


@contextmanager
def checkpointing(model: nn.Module):
    """Hugging Face's own gradient checkpointing, non-reentrant, early stop as torch defaults to.

    It makes the embeddings' output require a gradient, and leaves that on (of a model with adapters the first layer then computes one for
    its input, which nobody reads): put back, so that what runs afterwards is what a trainer without checkpointing runs.
    """
    on_gpu = {"context_fn": contexts_of_forward} if next(model.parameters()).device.type == "cuda" else {}
    inputs_required = bool(getattr(model, "_require_grads_hooks", None))
    model.disable_input_require_grads()  # else there would be two hooks, and one that nobody can remove
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **on_gpu})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        if not inputs_required:
            model.disable_input_require_grads()


def contexts_of_forward() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch's checkpoint: recompute in the kernel mode of the forward, also where backward runs in the deterministic one."""
    return nullcontext(), kernel_mode(deterministic=False)


def _taken_bytes(device: torch.device) -> int:
    """What the process has taken from the system so far: pages touched on a CPU, the allocator's reserve on a GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else page_faults() * PAGESIZE


def _timed(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - wall) / 1e3, (time.process_time_ns() - cpu) / 1e3
