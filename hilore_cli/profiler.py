"""Measuring one GRPO update: whole steps (whole_step.py), layers' graphs, units and their risk, whole plans -> Profile.

Stages, each kept in profiles/<name>/unfinished/ as soon as it is done, so that an interrupted profile goes on where it stopped:
`steps` (peaks and account of none and checkpointing, times of these and of recompute-all), `layer-<i>` (units and their risk),
`calibration` (predicted against measured error of whole plans), `rounding` (what it makes of a gradient). What it does NOT do: plan, or
change the model's weights for good (the timed updates run at a learning rate of zero).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hilore_cli
from hilore_cli import exposure as losses
from hilore_cli.batches import MicroBatch, require_gradient
from hilore_cli.calibration import gradient_norm, kappas_of, try_plans
from hilore_cli.capture import JointGraph, describe_joint, graph_digest, model_identity
from hilore_cli.codecs import get_codec
from hilore_cli.errors import CaptureError, ProfileError, UsageError
from hilore_cli.files import save_profile
from hilore_cli.grpo import GrpoConfig
from hilore_cli.identities import batch_identity, describe_machine, micro_batch_row
from hilore_cli.models import text_decoder
from hilore_cli.norms import squared_norm
from hilore_cli.risk import (
    GradientChange,
    LayerCall,
    LayerReplay,
    NoiseGain,
    candidate_units,
    codec_times_us,
    embedding_gain,
    mask_units,
    measure_noise_gain,
    measure_unit,
    transfers,
)
from hilore_cli.schema import (
    MASK_CODEC,
    Account,
    CalibrationPair,
    LayerClass,
    LayerRow,
    Profile,
    SmallerAccount,
    StepPeaks,
    StepTimes,
    UnitRow,
)
from hilore_cli.stages import Stages, key_of
from hilore_cli.uncaptured import (
    LeftCall,
    check_some_captured,
    eager_noise_gain,
    leaving_uncaptured,
    left_call,
    measured_class,
    run_backward,
    warn_of_uncaptured,
)
from hilore_cli.whole_step import measure_rounding, measure_steps
from hilore_cli.workbench import Progress, Workbench, check_vocabulary

OPERATOR_REPEATS = 5
COUNTS = {"current_gradient_accumulation_steps", "num_items_in_batch", "batch_num_tokens", "global_batch_size", "entropy_threshold", "loss_scale_factor"}
"""Settings of a loss that count an update's tokens, rows or micro-batches: they may differ from one to the next."""
CodecTimes = dict[tuple[str, str], tuple[float, float]]
"""(unit, codec) -> (compress, decompress) in microseconds."""

@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What to measure. `source` (of the model), `task` and `sources` (of the micro-batches) are the user's words; `repeats` counts interleaved timed updates of each method."""

    name: str
    source: str
    task: str
    sources: Sequence[str]
    codecs: Sequence[str]
    config: GrpoConfig
    seed: int = 0
    repeats: int = 3


def profile_update(model: nn.Module, batches: Sequence[tuple[str, MicroBatch]], request: ProfileRequest, *, folder: Path, progress: Progress) -> Profile:
    """Measure an update and write profiles/<name>/. `batches`: its micro-batches with their sources. The largest is measured in
    full; on the others, and some on it, plans are tried. Raises ProfileError and CaptureError that name the thing and the remedy.
    """
    batches = ordered_update(batches)
    check_vocabulary(model, [micro_batch for _, micro_batch in batches])
    check_codecs(model, request.codecs)
    source, micro_batch = batches[0]
    identity = model_identity(model, source=request.source)
    batch = batch_identity(micro_batch, source=source, task=request.task)
    bench = Workbench(model, [micro_batch], request.config)
    key = _key(identity.model_dump() | {"device": describe_machine(bench.device).device}, [batch_identity(mb, source=name, task=request.task).model_dump() for name, mb in batches], request)
    stages = Stages(folder / "unfinished", key=key)
    _warn_of_other_terms([mb for _, mb in batches])

    progress("recording one step", 0, 1)
    record = record_step(bench)  # first: it compiles what is timed next
    warn_of_uncaptured(bench.uncaptured)
    if (steps := stages.load("steps")) is None:
        steps = measure_steps(bench, repeats=request.repeats, progress=progress)
        stages.save("steps", steps)
    layers, units, classes = measure_layers(bench, record, request, stages=stages, progress=progress)
    if (tried := stages.load("calibration")) is None:
        result = try_plans(bench, batches, units=units, classes=classes, layers=layers, codecs=request.codecs, exact=record.exact, progress=progress)
        tried = asdict(replace(result, pairs=[])) | {"pairs": [pair.model_dump() for pair in result.pairs]}
        stages.save("calibration", tried)

    if (rounding := stages.load("rounding")) is None:
        progress("moving a gradient by its rounding", 0, 1)
        rounding = measure_rounding(bench, record.exact)
        stages.save("rounding", rounding)

    calibration = [CalibrationPair(**pair) for pair in tried["pairs"]]
    profile = Profile(
        name=request.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(bench.device),
        model=identity,
        batch=batch,
        sources=list(request.sources),
        head=request.config.head,
        codecs=list(request.codecs),
        seed=request.seed,
        gradient_norm=record.gradient_norm,
        account=Account(**steps["account"]),
        smaller=None if steps["smaller"] is None else SmallerAccount(**steps["smaller"]),
        times=StepTimes(**steps["times"]),
        peaks=StepPeaks(**steps["peaks"]),
        micro_batches=[micro_batch_row(name, mb, gradient_norm=norm) for (name, mb), norm in zip(batches, tried["gradient_norms"], strict=True)],
        update_gradient_norm=tried["update_gradient_norm"],
        rounding_error=rounding,
        kappas=kappas_of(calibration, request.codecs, rounding_error=rounding),
        calibration=calibration,
        layers=layers,
        classes=classes,
        units=units,
    )
    save_profile(profile, folder)
    stages.clear()
    return profile


def ordered_update(batches: Sequence[tuple[str, MicroBatch]]) -> list[tuple[str, MicroBatch]]:
    """The micro-batches of one update, that which is profiled first: of those with a gradient the one of most tokens, then of most loss tokens (the head
    grows with them). Raises ProfileError for what cannot be profiled, and for micro-batches that are no parts of one update.
    """
    for _, micro_batch in batches:
        micro_batch.validate()
    require_gradient([micro_batch for _, micro_batch in batches])
    _check_one_update(batches)
    return sorted(batches, key=lambda item: (not item[1].has_gradient, -item[1].tokens, -item[1].loss_tokens))


def _check_one_update(batches: Sequence[tuple[str, MicroBatch]]) -> None:
    """The same twice, other losses, other layouts. Equal completions of a prompt make equal micro-batches where a group is parted:
    those of one file differ by their place in it, sampled ones by what their meta says.
    """
    seen: dict[tuple[str, str, str], str] = {}
    first_source, first = batches[0]
    for source, micro_batch in batches:
        key = (batch_identity(micro_batch, source="").digest, json.dumps(micro_batch.meta, sort_keys=True, default=str), source.partition("#")[2])
        if key in seen:
            raise ProfileError(f"micro-batches {seen[key]} and {source} are the same; give each once")
        seen[key] = source
        mine, theirs = ({"layout": mb.layout, **losses.to_dict(mb.loss)} for mb in (first, micro_batch))
        differing = [key for key in sorted(mine.keys() | theirs.keys()) if key not in COUNTS and mine.get(key) != theirs.get(key)]
        if differing:
            key = differing[0]
            raise ProfileError(f"micro-batches {first_source} and {source} differ in {key} ({mine.get(key)}, {theirs.get(key)}); give those of one update of one trainer")


def _warn_of_other_terms(batches: Sequence[MicroBatch]) -> None:
    """The step has no entropy bonus and no router loss: their gradient does not come through log-probabilities."""
    names = ("entropy_coef", "entropy_coeff", "use_adaptive_entropy", "router_aux_loss_coef", "aux_loss_coef")
    left_out = [name for name in names if any(getattr(batch.loss, name, None) for batch in batches)]
    if left_out:
        warnings.warn(f"the recorded loss has {' and '.join(left_out)}, which is left out of the profiled step: risk is that of the policy and KL terms", stacklevel=3)


# ------------------------------------------------------------------------------------------------------------ one recording


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One exact step, recorded: the joint graphs, what every layer was handed (captured ones, and those left to checkpoint), and the exact gradient."""

    joints: list[JointGraph]
    calls: dict[int, LayerCall]
    left: dict[int, LeftCall]
    exact: dict[str, Tensor]
    gradient_norm: float


def record_step(bench: Workbench) -> StepRecord:
    """Run one step with every layer recomputed and keep what each layer was handed (inputs are kept by checkpointing anyway).

    A layer that cannot be captured runs by torch's checkpoint. Raises CaptureError when no layer can be.
    """
    recorder, tangents = bench.recorder, {}
    hooks = [layer.register_forward_hook(_keep_tangent(tangents, index)) for index, (_, layer) in enumerate(bench.layers)]
    recorder.active = True
    try:
        with bench.method("recompute") as handle, leaving_uncaptured(bench, handle) as handed:
            exact = bench.gradients()
    finally:
        recorder.active = False
        for hook in hooks:
            hook.remove()
    check_some_captured(bench)
    calls = {
        index: LayerCall(index=index, graph=graph, primals=arguments, tangent=tangents[index])
        for index, (graph, arguments) in recorder.primals.items()
        if index in tangents
    }
    left = {index: left_call(index, *arguments, tangent=tangents[index]) for index, arguments in handed.items() if index in tangents}
    norm = gradient_norm(exact)
    if not norm > 0:
        raise ProfileError("the micro-batch has no gradient at all; use one whose groups have mixed rewards")
    return StepRecord(joints=recorder.joints, calls=calls, left=left, exact=exact, gradient_norm=norm)


def _keep_tangent(tangents: dict[int, Tensor], index: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda grad: tangents.__setitem__(index, grad.detach()))

    return hook


# ------------------------------------------------------------------------------------------------------------ units and risk


def measure_layers(bench: Workbench, record: StepRecord, request: ProfileRequest, *, stages: Stages, progress: Progress) -> tuple[list[LayerRow], list[UnitRow], list[LayerClass]]:
    """Every unit of every layer under every codec; operator and codec times on the middle layer of each class."""
    digests = [graph_digest(joint) for joint in record.joints]
    names = {digest: chr(ord("A") + i) if i < 26 else f"class{i}" for i, digest in enumerate(dict.fromkeys(digests))}
    weight = token_weights(bench.batches[0]).to(bench.device)
    classes: dict[str, LayerClass] = {}
    codec_times: dict[str, CodecTimes] = {}
    for digest, name in names.items():
        members = [c for c in record.calls.values() if digests[c.graph] == digest]
        if not members:
            continue
        call = members[len(members) // 2]
        classes[name], codec_times[name] = timed_class(record.joints[call.graph], call, name=name, codecs=request.codecs)
    left_classes = measure_left_classes(bench, record)
    measured = []
    for index, (fqn, layer) in enumerate(bench.layers):
        progress("measuring layers", index, len(bench.layers))
        if index not in record.calls and index not in record.left:
            raise CaptureError(f"{fqn}: ran without being captured; report the model")
        if (stage := stages.load(f"layer-{index}")) is None:
            if index in record.left:
                stage = measure_left_layer(bench, record.left[index], fqn=fqn, class_name=left_classes[type(layer)].name, request=request)
            else:
                call = record.calls[index]
                stage = measure_layer(bench, record, call, classes[names[digests[call.graph]]], fqn=fqn, request=request, weight=weight)
            stages.save(f"layer-{index}", stage)
        measured.append(stage)
    return (*combine_layers(measured, codec_times, gradient_norm=record.gradient_norm), [*classes.values(), *left_classes.values()])


def combine_layers(measured: Sequence[dict[str, Any]], codec_times: Mapping[str, CodecTimes], *, gradient_norm: float) -> tuple[list[LayerRow], list[UnitRow]]:
    """Layers' own measurements -> rows with the risk to the whole gradient: now the gains of all layers below are known."""
    gains = [NoiseGain(**stage["gain"]) for stage in measured]
    transfer = transfers(gains, embedding=measured[0]["embedding_gain"])
    layers, units = [], []
    for stage, a_i in zip(measured, transfer, strict=True):
        layers.append(LayerRow(**stage["row"], noise_transfer=a_i))
        for unit in stage["units"]:
            stored, replayed = (GradientChange(**unit[context]).squared(a_i) / gradient_norm**2 for context in ("stored", "replayed"))
            compress, restore = codec_times[stage["row"]["layer_class"]][unit["row"]["unit"], unit["row"]["codec"]]
            units.append(UnitRow(**unit["row"], compress_us=compress, decompress_us=restore, rho2=stored, replayed_rho2=max(stored, replayed)))
    return layers, units


def timed_class(joint: JointGraph, call: LayerCall, *, name: str, codecs: Sequence[str]) -> tuple[LayerClass, CodecTimes]:
    """The class's graph as a record; median times of each forward operator and of each unit's codecs on one layer's real values."""
    described = describe_joint(joint, name=name)
    with torch.no_grad():
        replay = LayerReplay(joint, described, call)
        times = replay.forward_times_us(repeats=OPERATOR_REPEATS)
        codec_times = {(unit, codec): codec_times_us(replay.value(unit), codec, repeats=OPERATOR_REPEATS) for unit, codec in measured_pairs(replay, described, codecs)}
    nodes = [node.model_copy(update={"time_us": times.get(node.name, 0.0)}) for node in described.nodes]
    return described.model_copy(update={"nodes": nodes}), codec_times


def check_codecs(model: nn.Module, codecs: Sequence[str]) -> None:
    """Raise UsageError for a codec that takes nothing the model holds."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for name in codecs:
        if dtype not in get_codec(name).dtypes:
            why = "masks are stored as bits without being asked to" if name == MASK_CODEC else f"the model is {str(dtype).removeprefix('torch.')}, which it does not take"
            raise UsageError(f"codec {name}: {why}; leave it out of --codecs")


def measured_pairs(replay: LayerReplay, layer_class: LayerClass, codecs: Sequence[str]) -> list[tuple[str, str]]:
    """Units and the codecs to measure on them: those that take the unit's dtype, and for masks their own."""
    lossy = [(unit, codec) for unit in candidate_units(layer_class) for codec in codecs if replay.value(unit).dtype in get_codec(codec).dtypes]
    return lossy + [(unit, MASK_CODEC) for unit in mask_units(layer_class)]


def measure_layer(bench: Workbench, record: StepRecord, call: LayerCall, layer_class: LayerClass, *, fqn: str, request: ProfileRequest, weight: Tensor) -> dict[str, Any]:
    """One layer's own measurements, ready for the stage file; what needs the other layers is left to `combine_layers`."""
    joint = record.joints[call.graph]
    with torch.no_grad():
        replay = LayerReplay(joint, layer_class, call)
        units = []
        for unit, codec in measured_pairs(replay, layer_class, request.codecs):
            try:
                error = measure_unit(replay, unit, codec, token_weight=weight)
            except ProfileError as refusal:
                warnings.warn(f"{fqn}: {refusal}; it is stored or recomputed there", stacklevel=2)
                continue
            row = {
                "layer": call.index,
                "unit": unit,
                "codec": codec,
                "nbytes": replay.value(unit).untyped_storage().nbytes(),
                "payload_bytes": error.payload_bytes,
                "rel_error": error.rel_error,
                "exposure_error": error.exposure_error,
            }
            units.append({"row": row, "stored": asdict(error.stored), "replayed": asdict(error.replayed)})
        gradient = replay.input_gradient()
        row = {
            "index": call.index,
            "fqn": fqn,
            "layer_class": layer_class.name,
            "grad_norm": sum(map(squared_norm, replay.parameter_gradients())) ** 0.5,
            "input_grad_norm": 0.0 if gradient is None else squared_norm(gradient) ** 0.5,
        }
        gain = measure_noise_gain(joint, layer_class, call, seed=request.seed + call.index)
        bottom = gain_below(bench, call.index, gradient, seed=request.seed)
    return {"row": row, "units": units, "gain": asdict(gain), "embedding_gain": bottom}


def measure_left_layer(bench: Workbench, call: LeftCall, *, fqn: str, class_name: str, request: ProfileRequest) -> dict[str, Any]:
    """The same of a layer that is left to checkpoint: it has no units, but noise from the layers above goes through its backward."""
    layer = bench.layers[call.index][1]
    exact = run_backward(layer, call, tangent=call.tangent)
    row = {
        "index": call.index,
        "fqn": fqn,
        "layer_class": class_name,
        "fallback": bench.uncaptured[fqn],
        "grad_norm": exact.parameters_norm2**0.5,
        "input_grad_norm": exact.activation_norm2**0.5,
    }
    gain = eager_noise_gain(layer, call, seed=request.seed + call.index)
    return {"row": row, "units": [], "gain": asdict(gain), "embedding_gain": gain_below(bench, call.index, exact.activation, seed=request.seed)}


def measure_left_classes(bench: Workbench, record: StepRecord) -> dict[type, LayerClass]:
    """One class for the layers of each type that are left to checkpoint, measured on the middle one."""
    classes = {}
    for kind in dict.fromkeys(type(bench.layers[index][1]) for index in record.left):
        members = [call for index, call in record.left.items() if type(bench.layers[index][1]) is kind]
        call = members[len(members) // 2]
        classes[kind] = measured_class(bench.layers[call.index][1], call, name=f"checkpointed {kind.__name__}", repeats=OPERATOR_REPEATS)
    return classes


def gain_below(bench: Workbench, index: int, input_gradient: Tensor | None, *, seed: int) -> float:
    """A_0: the embedding's gain, where a layer is the lowest; 0 for all others, and where the embedding does not train."""
    embedding = text_decoder(bench.model).get_input_embeddings().weight
    if index > 0 or not embedding.requires_grad:
        return 0.0
    return embedding_gain(input_gradient, bench.batches[0].model_inputs()["input_ids"], vocabulary=embedding.shape[0], seed=seed)


def token_weights(micro_batch: MicroBatch) -> Tensor:
    """Squared exposure of the position that predicts each token, float64, in the shape that the model computes on."""
    weight = torch.zeros(micro_batch.tokens, dtype=torch.float64)
    weight[micro_batch.predicting_positions()] = micro_batch.known_exposure.square()
    return weight.view(micro_batch.shape)


def _key(identity: dict[str, Any], batches: list[dict[str, Any]], request: ProfileRequest) -> str:
    versions = (torch.__version__, transformers.__version__, hilore_cli.__version__)
    return key_of([identity, batches, request.name, list(request.codecs), repr(request.config), request.seed, request.repeats, torch.get_num_threads(), versions])
