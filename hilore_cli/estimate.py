"""A profile without the device and without weights: graphs and bytes from fakes, times from a device model, risk from a relative.

Exact: graphs, units, every byte of the account and of the peaks as the traced step has them. Computed: times. Scaled: risk, kappa,
gradient norms. `Profile.estimate` says so, and everything made from the profile carries it on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import model_identity
from hilore_cli.codecs import get_codec
from hilore_cli.devices import CPU_MODEL, DeviceModel
from hilore_cli.fake import CapturedClass, FakeWorkbench, build_fake_model, capture_layers
from hilore_cli.files import save_profile
from hilore_cli.identities import batch_identity, describe_machine, micro_batch_row
from hilore_cli.profiler import ProfileRequest, check_codecs, ordered_update
from hilore_cli.provenance import Lora
from hilore_cli.records import digest_of
from hilore_cli.relative import Risk, kappas_of, kind_of, scale_layers, scale_risk
from hilore_cli.risk import candidate_units, mask_units
from hilore_cli.schema import (
    MASK_CODEC,
    Account,
    Estimate,
    LayerClass,
    LayerRow,
    MicroBatchRow,
    Profile,
    SmallerAccount,
    StepPeaks,
    StepTimes,
    UnitRow,
)
from hilore_cli.whole_step import measure_account, measure_smaller_account
from hilore_cli.workbench import Progress

METHODS = ("none", "gc", "recompute")
EXACT = Risk(rho2=0.0, replayed_rho2=0.0, rel_error=0.0, exposure_error=0.0)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is profiled without being there: a model's configuration, dtype and adapters, and the device."""

    config: PreTrainedConfig
    dtype: str
    lora: Lora | None
    device: DeviceModel
    time_error: float | None
    attn_implementation: str = "sdpa"


def estimate_update(target: Target, batches: Sequence[tuple[str, MicroBatch]], request: ProfileRequest, *, relative: Profile, folder: Path, progress: Progress) -> Profile:
    """Compute what `profile_update` would measure, and write profiles/<name>/. Raises ProfileError, CaptureError, UsageError."""
    batches = ordered_update(batches)
    source, micro_batch = batches[0]
    progress("building the model without weights", 0, 1)
    model = build_fake_model(target.config, dtype=target.dtype, attn_implementation=target.attn_implementation, lora=target.lora)
    check_codecs(model, request.codecs)
    bench = FakeWorkbench(model, [micro_batch], request.config, workspace_bytes=target.device.workspace_bytes, fused_dropout=target.device.reported_as != CPU_MODEL.reported_as)
    progress("capturing layers", 0, 1)
    classes, of_layer = capture_layers(bench)
    units = estimate_units(classes, of_layer, relative=relative, codecs=request.codecs, device=target.device)
    traced = trace_updates(bench, progress=progress)
    times = estimate_times(bench, target.device, progress=progress)
    figures = scale_layers(relative, len(bench.layers))
    first = relative.micro_batches[0]
    rows = scale_micro_batches(batches, gradient_norm2=first.gradient_norm**2, exposure=first.squared)
    profile = Profile(
        name=request.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(bench.device).model_copy(update={"device": f"model of {target.device.name}"}),
        model=model_identity(model, source=request.source),
        batch=batch_identity(micro_batch, source=source, task=request.task),
        sources=list(request.sources),
        head=request.config.head,
        codecs=list(request.codecs),
        seed=request.seed,
        estimate=Estimate(device=target.device.name, time_error=target.time_error, relative=relative.name, relative_digest=digest_of(relative)),
        gradient_norm=rows[0].gradient_norm,
        account=traced.account,
        times=times,
        peaks=traced.peaks,
        smaller=traced.smaller,
        micro_batches=rows,
        update_gradient_norm=math.sqrt(sum(row.gradient_norm**2 for row in rows)),
        kappas=kappas_of(relative, request.codecs),
        calibration=[],
        layers=[LayerRow(index=i, fqn=fqn, layer_class=name, grad_norm=figure.grad_norm, input_grad_norm=figure.input_grad_norm, noise_transfer=figure.noise_transfer) for i, ((fqn, _), name, figure) in enumerate(zip(bench.layers, of_layer, figures, strict=True))],
        classes=[timed(captured, target.device) for captured in classes],
        units=units,
    )
    save_profile(profile, folder)
    return profile


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Memory of whole updates, to the byte."""

    account: Account
    smaller: SmallerAccount | None
    peaks: StepPeaks


def trace_updates(bench: FakeWorkbench, *, progress: Progress) -> Traced:
    """Account at two sizes, and peaks, of updates on fakes."""
    progress("tracing updates", 0, 3)
    account, gc_peak = measure_account(bench, bench.static())
    progress("tracing updates", 1, 3)
    smaller = measure_smaller_account(bench)
    progress("tracing updates", 2, 3)
    none_peak = bench.peak_bytes("none")
    return Traced(account=Account(**account), smaller=None if smaller is None else SmallerAccount(tokens=smaller["tokens"], account=Account(**smaller["account"])), peaks=StepPeaks(none_bytes=none_peak, gc_bytes=gc_peak))


def estimate_times(bench: FakeWorkbench, device: DeviceModel, *, progress: Progress) -> StepTimes:
    """The sum over the operators that each method runs."""
    times = {}
    for position, method in enumerate(METHODS):
        progress("adding up operators", position, len(METHODS))
        times[f"{method}_us"] = sum(map(device.time_us, bench.work_of_update(method)))
    return StepTimes(**times, repeats=1, threads=torch.get_num_threads())


def timed(captured: CapturedClass, device: DeviceModel) -> LayerClass:
    """The class with the device's time at each forward operator."""
    nodes = [node.model_copy(update={"time_us": device.time_us(captured.works[node.name]) if node.name in captured.works else 0.0}) for node in captured.layer_class.nodes]
    return captured.layer_class.model_copy(update={"nodes": nodes})


def estimate_units(classes: Sequence[CapturedClass], of_layer: Sequence[str], *, relative: Profile, codecs: Sequence[str], device: DeviceModel) -> list[UnitRow]:
    """Every unit worth a codec, as `profiler.measured_pairs` chooses them, with scaled risk and computed times."""
    by_name = {captured.layer_class.name: captured for captured in classes}
    kinds = {name: {unit: kind_of(captured.layer_class, unit) for unit in candidate_units(captured.layer_class)} for name, captured in by_name.items()}
    risks = scale_risk(relative, [kinds[name] for name in of_layer], codecs=codecs)
    found = []
    for layer, name in enumerate(of_layer):
        captured = by_name[name]
        pairs = [(unit, codec, risks[layer, unit, codec]) for unit in kinds[name] for codec in codecs if captured.dtypes[unit] in get_codec(codec).dtypes]
        pairs += [(unit, MASK_CODEC, EXACT) for unit in mask_units(captured.layer_class)]
        found += [_unit_row(captured, layer, unit, codec, risk, device=device) for unit, codec, risk in pairs]
    return found


def _unit_row(captured: CapturedClass, layer: int, unit: str, codec: str, risk: Risk, *, device: DeviceModel) -> UnitRow:
    nbytes = next(row.nbytes for row in captured.layer_class.nodes if row.unit == unit)
    payload = get_codec(codec).payload_bytes(captured.numel[unit])
    us = device.copy_us(nbytes + payload)
    return UnitRow(layer=layer, unit=unit, codec=codec, nbytes=nbytes, payload_bytes=payload, compress_us=us, decompress_us=us, rel_error=risk.rel_error, exposure_error=risk.exposure_error, rho2=risk.rho2, replayed_rho2=risk.replayed_rho2)


def scale_micro_batches(batches: Sequence[tuple[str, MicroBatch]], *, gradient_norm2: float, exposure: float) -> list[MicroBatchRow]:
    """The update's micro-batches; their squared gradients go with their squared exposure, as in one whose two are known."""
    ratio = gradient_norm2 / exposure if exposure > 0 else 1.0
    rows = [micro_batch_row(source, micro_batch, gradient_norm=0.0) for source, micro_batch in batches]
    return [row.model_copy(update={"gradient_norm": math.sqrt(ratio * row.squared)}) for row in rows]
