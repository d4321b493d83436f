"""One model, one micro-batch, one optimizer, and the ways to run an update on them: what is measured is run here.

Methods: `none`, `gc` (Hugging Face's own checkpointing), `store` and `recompute` (the runtime's uniform plans), and plans under
names of their own. Each plan is compiled once and attached only while it runs. The learning rate is zero, so that every run
of every method sees the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import JointGraph
from hilore_cli.errors import ProfileError
from hilore_cli.grpo import GrpoConfig, actor_update, gradients, make_optimizer
from hilore_cli.models import decoder_layers, text_decoder
from hilore_cli.peak import measure_peak, static_bytes_of
from hilore_cli.runtime import Handle, Program, attach_patterns
from hilore_cli.schema import Pattern, Variant

UNLIMITED_TOKENS = 2**40

Progress = Callable[[str, int, int], None]
"""Told of (what is being done, done, of how many)."""


class Workbench:
    """One model, one micro-batch, one optimizer, and the four ways to run an update on them."""

    def __init__(self, model: nn.Module, micro_batch: MicroBatch, config: GrpoConfig) -> None:
        self.model = model
        self.micro_batch = micro_batch
        self.config = replace(config, learning_rate=0.0, weight_decay=0.0)
        self.optimizer = make_optimizer(model, self.config)
        self.layers = decoder_layers(model)
        self.device = next(model.parameters()).device
        vocabulary = text_decoder(model).get_input_embeddings().weight.shape[0]
        if (largest := int(micro_batch.input_ids.max())) >= vocabulary:
            raise ProfileError(f"micro-batch: holds token id {largest}, the model's vocabulary has {vocabulary}; record it with this model's tokenizer (hilore rollout)")
        self.recorder = Recorder()
        self._handles: dict[str, Handle] = {}
        self._compiled: set[str] = set()

    def update(self) -> None:
        actor_update(self.model, self.optimizer, [self.micro_batch], self.config)

    def gradients(self) -> dict[str, Tensor]:
        return gradients(self.model, self.micro_batch, self.config)

    def gradients_by(self, method: str) -> dict[str, Tensor]:
        """Gradients of the micro-batch by a method; compiles what it runs."""
        with self.method(method):
            gradient = self.gradients()
        self._compiled.add(method)
        return gradient

    def static(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state, which are created here when there was no update yet."""
        if not self.optimizer.state:
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()  # at a learning rate of zero
        return static_bytes_of(self.model, self.optimizer)

    def method(self, name: str, patterns: dict[str, Pattern] | None = None, layers: Sequence[str] | None = None, fallback: Sequence[str] = ()) -> AbstractContextManager[Any]:
        """Context in which updates run by a method: none, gc, store, recompute, or patterns of one's own under a new name."""
        if name == "none":
            return _nothing()
        if name == "gc":
            return checkpointing(self.model)
        if name not in self._handles:
            if patterns is None:
                patterns = {name: {"store": Pattern(default="store"), "recompute": Pattern()}[name]}
            variant = Variant(max_tokens=UNLIMITED_TOKENS, layers=list(layers or [name] * len(self.layers)))
            watch = {"run": self.recorder.run, "on_split": self.recorder.joints.append} if name == "recompute" else {}
            handle = attach_patterns(self.model, patterns=patterns, variants=[variant], name=name, fallback=fallback, **watch)
            if watch:
                self.recorder.program = handle.program
            handle.detach()
            self._handles[name] = handle
        return self._handles[name]

    def assigned(self, name: str, patterns: dict[str, Pattern], layers: Sequence[str]) -> AbstractContextManager[Any]:
        """Like `method`, with the layers' patterns chosen anew each time: compiled patterns are kept."""
        handle = self.method(name, patterns, layers)
        handle.program.variants = [Variant(max_tokens=UNLIMITED_TOKENS, layers=list(layers))]
        return handle

    def peak_bytes(self, method: str) -> int:
        if method not in ("none", "gc") and method not in self._compiled:
            self.gradients_by(method)  # a trace of the first call would hold the compiler's own allocations
        static = sum(self.static().values())
        with self.method(method):
            return measure_peak(self.update, static_bytes=static, device=self.device)

    def time_updates(self, methods: Sequence[str], *, repeats: int, progress: Progress) -> dict[str, list[tuple[float, float]]]:
        """Interleaved updates: method -> [(wall us, CPU us)] per repeat. Methods are compiled before, by `gradients_by`."""
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for repeat in range(repeats):
            for position, name in enumerate(methods):
                progress("timing whole updates", repeat * len(methods) + position, repeats * len(methods))
                with self.method(name):
                    samples[name].append(_timed(self.update, self.device))
        return samples


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
    """Hugging Face's own gradient checkpointing, non-reentrant, early stop as torch defaults to."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _nothing():
    yield


def _timed(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - wall) / 1e3, (time.process_time_ns() - cpu) / 1e3
