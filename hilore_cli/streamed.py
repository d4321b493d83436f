"""A model larger than memory, measured on real weights: one layer at a time out of safetensors, the lowest and the middle layer of each class in detail.

One update's forward and backward run as under checkpointing, but that a layer's weights are there only while it runs: forward keeps each
layer's input; backward loads the weights again, replays the layer and takes its exact gradient. Every layer's gradient norms and noise
gain are measured, the errors of units only on those two (lowest layers are unlike the rest): the others take the middle one's, scaled by their own gradient norms.
Graphs, account and peaks come from the fake model (fake.py), times are summed over layers, kappa is a relative's.

What this does NOT do: adapters, files that hold experts one by one, and whole plans on other micro-batches (hence the relative's kappa).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM

from hilore_cli import malloc
from hilore_cli.batches import MicroBatch
from hilore_cli.capture import JointGraph, graph_digest, model_identity
from hilore_cli.errors import CaptureError, UsageError
from hilore_cli.estimate import scale_micro_batches, trace_updates
from hilore_cli.fake import FakeWorkbench, build_fake_model, capture_layers
from hilore_cli.files import save_profile
from hilore_cli.grpo import GrpoConfig, make_optimizer, micro_batch_loss
from hilore_cli.identities import batch_identity, describe_machine
from hilore_cli.models import DTYPES, decoder_layers, prepare_to_train
from hilore_cli.norms import squared_norm
from hilore_cli.partition import compile_layer, compiler_settings
from hilore_cli.profiler import (
    CodecTimes,
    ProfileRequest,
    StepRecord,
    check_codecs,
    combine_layers,
    measure_layer,
    ordered_update,
    timed_class,
    token_weights,
)
from hilore_cli.records import digest_of
from hilore_cli.relative import check_codecs as check_relative
from hilore_cli.relative import kappas_of
from hilore_cli.risk import LayerCall
from hilore_cli.schema import Estimate, LayerClass, Pattern, Profile, StepTimes
from hilore_cli.timeline import simulate_layer
from hilore_cli.workbench import Progress, Recorder

Seconds = dict[int, float]
"""By layer."""


class WeightFiles:
    """The safetensors of a folder, read tensor by tensor. Raises UsageError that names what is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of = {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        else:
            self._file_of = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names_in(file)}
        if not self._file_of:
            raise UsageError(f"model {folder}: holds no *.safetensors; hilore reads no pickled weights, convert them first")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, *, like: Tensor, device: torch.device) -> Tensor:
        if name not in self._file_of:
            raise UsageError(f"model {self._folder}: holds no tensor {name}, so its layers cannot be read one at a time; profile it without --layers-sample")
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if tensor.shape != like.shape:
            raise UsageError(f"model {self._folder}: tensor {name} has shape {tuple(tensor.shape)}, its configuration asks for {tuple(like.shape)}")
        return torch.empty_like(like, device=device).copy_(tensor)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise UsageError(f"model file {file}: is damaged ({error}); copy it again") from error


def build_skeleton(folder: Path, weights: WeightFiles, *, dtype: str, device: torch.device) -> nn.Module:
    """The model with all its weights but the layers', which are on torch's meta device. Raises UsageError."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = prepare_to_train(AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa"), lora=None, seed=0)
    layers = tuple(f"{fqn}." for fqn, _ in decoder_layers(model))
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {name for name, _ in model.named_parameters()}
    for name, parameter in list(model.named_parameters()):
        if not name.startswith(layers):
            _put(model, name, nn.Parameter(weights.read(name, like=parameter, device=device)))
    if tied:
        model.tie_weights()
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if own:
            model._init_weights(module)  # transformers' own values of what no file holds
    return model


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


# -------------------------------------------------------------------------------------------------------------- the step


@dataclass
class LayerStream:
    """Runs the layers of a skeleton one at a time; backward hands each recorded call to `measure`, with the layer's weights there."""

    model: nn.Module
    weights: WeightFiles
    device: torch.device
    measure: Callable[[LayerCall], None]
    forward_seconds: Seconds = field(default_factory=dict)
    backward_seconds: Seconds = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    joints: list[JointGraph] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._recorder = Recorder()
        self._recorder.joints, self._recorder.active, self._recorder.program = self.joints, True, SimpleNamespace(current_layer=-1)
        self._compiled: dict[type, Callable[..., Any]] = {}
        for index, (fqn, layer) in enumerate(decoder_layers(self.model)):
            layer.forward = partial(self._call, index, fqn, layer)

    def _call(self, index: int, fqn: str, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _Streamed.apply(hidden_states, StreamedLayer(stream=self, index=index, fqn=fqn, layer=layer, args=args, kwargs=kwargs))

    def load(self, fqn: str, layer: nn.Module) -> None:
        for name, parameter in list(layer.named_parameters()):
            _put(layer, name, nn.Parameter(self.weights.read(f"{fqn}.{name}", like=parameter, device=self.device)))

    def drop(self, layer: nn.Module) -> None:
        for name, parameter in list(layer.named_parameters()):
            _put(layer, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
        malloc.give_back()

    def recompute(self, index: int, layer: nn.Module, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
        """The layer's forward with gradient, everything recomputed in backward; its graph is captured on the first call."""
        if type(layer) not in self._compiled:
            self._compiled[type(layer)] = compile_layer(type(layer).forward, pattern=Pattern(), on_split=self._on_split, run=self._recorder.run)
        self._recorder.program.current_layer = index
        with compiler_settings():
            return self._compiled[type(layer)](layer, hidden, *args, **kwargs)

    def call_of(self, index: int, tangent: Tensor) -> LayerCall:
        if index not in self._recorder.primals:
            raise CaptureError(f"layer {index}: ran without being captured; profile the model without --layers-sample")
        graph, primals = self._recorder.primals.pop(index)
        return LayerCall(index=index, graph=graph, primals=primals, tangent=tangent)

    def _on_split(self, joint: JointGraph) -> None:
        self.joints.append(joint)


@dataclass(frozen=True, kw_only=True)
class StreamedLayer:
    """One layer of one forward: runs it with its weights loaded for as long."""

    stream: LayerStream
    index: int
    fqn: str
    layer: nn.Module
    args: Any
    kwargs: Mapping[str, Any]

    def forward(self, hidden: Tensor) -> Tensor:
        self.stream.load(self.fqn, self.layer)
        begin = time.perf_counter()
        output = type(self.layer).forward(self.layer, hidden, *self.args, **self.kwargs)
        self.stream.marks["head"] = time.perf_counter()
        self.stream.forward_seconds[self.index] = self.stream.marks["head"] - begin
        self.stream.drop(self.layer)
        if not isinstance(output, Tensor):
            raise CaptureError(f"{self.fqn}: returns more than a hidden state; profile the model without --layers-sample")
        return output

    def backward(self, hidden: Tensor, tangent: Tensor) -> Tensor:
        stream = self.stream
        stream.marks.setdefault("layers", time.perf_counter())
        stream.load(self.fqn, self.layer)
        seen = len(stream.joints)
        gradient = self._backward_once(hidden, tangent)
        if len(stream.joints) > seen:
            gradient = self._backward_once(hidden, tangent)  # without the compiler's time
        stream.measure(stream.call_of(self.index, tangent))
        stream.drop(self.layer)
        stream.marks["end"] = time.perf_counter()
        return gradient

    def _backward_once(self, hidden: Tensor, tangent: Tensor) -> Tensor:
        with torch.enable_grad():
            begin = time.perf_counter()
            inputs = hidden.detach().requires_grad_()
            output = self.stream.recompute(self.index, self.layer, inputs, self.args, self.kwargs)
            middle = time.perf_counter()
            gradient, *_ = torch.autograd.grad(output, [inputs, *self.layer.parameters()], tangent)
        self.stream.forward_seconds[self.index], self.stream.backward_seconds[self.index] = middle - begin, time.perf_counter() - middle
        return gradient


class _Streamed(torch.autograd.Function):
    """A layer as one operator of the step; its parameters' gradients stay inside."""

    @staticmethod
    def forward(ctx, hidden, layer: StreamedLayer):
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        return layer.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, tangent):
        (hidden,) = ctx.saved_tensors
        return ctx.layer.backward(hidden, tangent), None


# ------------------------------------------------------------------------------------------------------------ the profile


def profile_by_layers(folder: Path, batches: Sequence[tuple[str, MicroBatch]], request: ProfileRequest, *, dtype: str, device: torch.device, relative: Profile, out: Path, progress: Progress) -> Profile:
    """Measure an update of the model in `folder` and write profiles/<name>/ (`out`). Raises UsageError, ProfileError, CaptureError."""
    batches = ordered_update(batches)
    check_relative(relative, request.codecs)
    source, micro_batch = batches[0]
    progress("capturing layers without weights", 0, 1)
    fake = build_fake_model(AutoConfig.from_pretrained(folder), dtype=dtype)
    check_codecs(fake, request.codecs)
    paper = FakeWorkbench(fake, [micro_batch], request.config)
    classes, of_layer = capture_layers(paper)
    traced = trace_updates(paper, progress=progress)
    weights = WeightFiles(folder)
    model = build_skeleton(folder, weights, dtype=dtype, device=device)
    sampled = sampled_layers(of_layer)
    bench = SimpleNamespace(model=model, batches=[micro_batch])
    measured = MeasuredLayers(bench=bench, request=request, classes={c.layer_class.name: c.layer_class for c in classes}, of_layer=of_layer, sampled=sampled, fqns=[fqn for fqn, _ in paper.layers], progress=progress)
    stream = LayerStream(model=model, weights=weights, device=device, measure=measured.measure)
    measured.joints = stream.joints
    stream.marks["start"] = time.perf_counter()
    micro_batch_loss(model, micro_batch, request.config).backward()
    stages = [measured.stages[i] for i in range(len(of_layer))]
    own = sum(squared_norm(p.grad) for p in model.parameters() if p.grad is not None)
    norm = math.sqrt(own + sum(stage["row"]["grad_norm"] ** 2 for stage in stages))
    stages = [stage if i in sampled[name] else spread(stage, stages[sampled[name][-1]]) for i, (stage, name) in enumerate(zip(stages, of_layer, strict=True))]
    layers, units = combine_layers(stages, measured.codec_times, gradient_norm=norm)
    rows = scale_micro_batches(batches, gradient_norm2=norm**2, exposure=micro_batch.weight("squared"))
    rows = [rows[0].model_copy(update={"gradient_norm": norm}), *rows[1:]]
    timed = [measured.timed[c.layer_class.name] for c in classes]
    profile = Profile(
        name=request.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(device),
        model=model_identity(fake, source=request.source),
        batch=batch_identity(micro_batch, source=source, task=request.task),
        sources=list(request.sources),
        head=request.config.head,
        codecs=list(request.codecs),
        seed=request.seed,
        estimate=Estimate(device=f"{device.type}, two layers of each class measured", time_error=None, relative=relative.name, relative_digest=digest_of(relative)),
        gradient_norm=norm,
        account=traced.account,
        times=step_times(stream, timed, of_layer, update_seconds=update_seconds(model, paper, request.config)),
        peaks=traced.peaks,
        smaller=traced.smaller,
        micro_batches=rows,
        update_gradient_norm=math.sqrt(sum(row.gradient_norm**2 for row in rows)),
        kappas=kappas_of(relative, request.codecs),
        calibration=[],
        layers=layers,
        classes=timed,
        units=units,
    )
    save_profile(profile, out)
    return profile


def sampled_layers(of_layer: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Class -> its lowest and its middle layer."""
    members: dict[str, list[int]] = {}
    for index, name in enumerate(of_layer):
        members.setdefault(name, []).append(index)
    return {name: (indices[0], indices[len(indices) // 2]) for name, indices in members.items()}


@dataclass(kw_only=True)
class MeasuredLayers:
    """Measurements of each layer as profiler.measure_layer has them; units only of the sampled ones, and their classes' times."""

    bench: Any
    request: ProfileRequest
    classes: Mapping[str, LayerClass]
    of_layer: Sequence[str]
    sampled: Mapping[str, tuple[int, int]]
    fqns: Sequence[str]
    progress: Progress
    joints: list[JointGraph] = field(default_factory=list)
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)
    timed: dict[str, LayerClass] = field(default_factory=dict)
    codec_times: dict[str, CodecTimes] = field(default_factory=dict)

    def measure(self, call: LayerCall) -> None:
        self.progress("measuring layers", len(self.stages), len(self.of_layer))
        name, joint = self.of_layer[call.index], self.joints[call.graph]
        layer_class = self.classes[name]
        if graph_digest(joint) != layer_class.graph_digest:
            raise CaptureError(f"layer {call.index}: traces to another graph with weights than without; profile the model without --layers-sample")
        detailed = call.index in self.sampled[name]
        if call.index == self.sampled[name][-1]:
            self.timed[name], self.codec_times[name] = timed_class(joint, call, name=name, codecs=self.request.codecs)
        request = self.request if detailed else replace(self.request, codecs=[])
        record = StepRecord(joints=self.joints, calls={}, left={}, exact={}, gradient_norm=0.0)
        weight = token_weights(self.bench.batches[0]).to(call.tangent.device)
        self.stages[call.index] = measure_layer(self.bench, record, call, layer_class, fqn=self.fqns[call.index], request=request, weight=weight)


def spread(stage: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    """A layer's measurements with the sampled layer's units: changes of gradients in proportion to the layer's own gradients."""
    parameters, activation = ((stage["row"][name] / sample["row"][name]) ** 2 if sample["row"][name] > 0 else 1.0 for name in ("grad_norm", "input_grad_norm"))
    units = [
        {"row": unit["row"] | {"layer": stage["row"]["index"]}} | {context: {"parameters": unit[context]["parameters"] * parameters, "activation": unit[context]["activation"] * activation} for context in ("stored", "replayed")}
        for unit in sample["units"]
    ]
    return stage | {"units": units}


def step_times(stream: LayerStream, timed: Sequence[LayerClass], of_layer: Sequence[str], *, update_seconds: float) -> StepTimes:
    """Whole updates as sums: every layer ran everything recomputed, which is taken for checkpointing's time too."""
    replay = {c.name: simulate_layer(c, Pattern(), payload_bytes=_no_payload).recompute_us for c in timed}
    head = stream.marks["layers"] - stream.marks["head"]
    recompute_us = 1e6 * (sum(stream.forward_seconds.values()) + sum(stream.backward_seconds.values()) + head + update_seconds)
    none_us = max(recompute_us - sum(replay[name] for name in of_layer), 0.0)
    return StepTimes(none_us=none_us, gc_us=recompute_us, recompute_us=recompute_us, repeats=1, threads=torch.get_num_threads())


def update_seconds(model: nn.Module, paper: FakeWorkbench, config: GrpoConfig) -> float:
    """AdamW on the weights that are there, in proportion to all that train."""
    held = [p for p in model.parameters() if p.device.type != "meta" and p.grad is not None]
    optimizer = make_optimizer(nn.ParameterList(held), replace(config, learning_rate=0.0, weight_decay=0.0))
    optimizer.step()
    begin = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - begin
    return seconds * sum(p.numel() for p in paper.model.parameters() if p.requires_grad) / max(sum(p.numel() for p in held), 1)


def _no_payload(unit: str, codec: str) -> int:
    raise ValueError(f"{unit} under {codec}: nothing is compressed here")
