"""hilore profile: measured on this machine, or estimated for a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilore_cli import malloc
from hilore_cli.commands.documents import profile_document
from hilore_cli.commands.inputs import (
    adapters_of,
    check_replaced,
    check_task,
    file_name,
    file_safe,
    invented_batches,
    load_batches,
    load_relative,
    measured_profiles,
    sample_batches,
    set_threads,
    split_names,
)
from hilore_cli.commands.options import (
    PROFILES,
    SHIPPED_BATCHES,
    SHIPPED_MODEL,
    SHIPPED_TASK,
    BatchFiles,
    Json,
    LoraAlpha,
    LoraDropout,
    LoraTargets,
    Quiet,
    Threads,
    complete_models,
    complete_tasks,
)
from hilore_cli.errors import UsageError
from hilore_cli.views.console import Reporter
from hilore_cli.views.profile import profile_view

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch
    from hilore_cli.profiler import ProfileRequest
    from hilore_cli.provenance import Lora
    from hilore_cli.schema import Profile

MEASURING = (None, "cpu", "cuda")
"""--device: these measure; every other name is a device model's."""


def profile_command(
    model: Annotated[str, typer.Option(help="Preset (smollm2-135m, llama-8b, ...), folder in Hugging Face format, or hub id.", autocompletion=complete_models)],
    task: Annotated[str, typer.Option(help="math, or the name of a reasoning-gym generator.", autocompletion=complete_tasks)] = SHIPPED_TASK,
    name: Annotated[str | None, typer.Option(help="Name of the folder in profiles/. Default: <model>-<task>.", show_default=False)] = None,
    batch: BatchFiles = None,
    tokens: Annotated[int | None, typer.Option(min=64, help="Without --batch: about so many tokens (padding included) are sampled. Default: 1024.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    lora: Annotated[int | None, typer.Option(min=1, help="LoRA rank; without it everything is trained.", show_default=False)] = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_targets: LoraTargets = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, of LoRA and of the measurements.")] = 0,
    codecs: Annotated[str | None, typer.Option(help="Codecs to measure, comma-separated; empty: none. Default: fbgemm-int8,fbgemm-int4 on a CPU, int8,int4 on a GPU.", show_default=False)] = None,
    head: Annotated[str, typer.Option(help="Loss head: chunked, full or one-pass.")] = "chunked",
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates of each method.")] = 3,
    threads: Threads = None,
    device: Annotated[str | None, typer.Option("--device", envvar="HILORE_DEVICE", help="cpu or cuda: measure there. Default: the GPU if there is one. h100, h200, a100, l40s, rtx4090, mi300x, cpu-model: nothing is measured and no weights are loaded; bytes are exact, times computed, risk scaled.", show_default=False)] = None,
    relative: Annotated[Path | None, typer.Option(help="With a device model or --layers-sample: measured profile of a smaller model that risk is scaled from. Default: one of SmolLM2-135M that has the codecs.", show_default=False)] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="With a device model and --tokens: rows of the micro-batch. Default: as recorded.", show_default=False)] = None,
    layers_sample: Annotated[bool, typer.Option("--layers-sample", help="Measure two layers of each class, weights streamed layer by layer: for models larger than memory. kappa is that of --relative.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure one GRPO update: bytes, times and risk of every activation. Writes profiles/<name>/."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    name = file_name(name) if name is not None else file_safe(f"{model.rstrip('/').rsplit('/', 1)[-1]}-{task}")
    estimated = device not in MEASURING
    if estimated and layers_sample:
        raise UsageError("--layers-sample measures on this machine; leave the device model out, or --layers-sample")
    if not estimated and (rows is not None or (relative is not None and not layers_sample)):
        raise UsageError("--relative and --rows belong to a profile without the device; name a device model with --device, such as h100")
    if layers_sample and lora is not None:
        raise UsageError("--layers-sample: of a model whose own weights train; profile adapters without it")
    adapters = adapters_of(lora, alpha=lora_alpha, dropout=lora_dropout, targets=lora_targets)
    malloc.steady_malloc()
    from hilore_cli.codecs import default_codecs, get_codec
    from hilore_cli.grpo import GrpoConfig
    from hilore_cli.profiler import ProfileRequest

    chosen = None if codecs is None else split_names(codecs)
    for codec in chosen or ():
        get_codec(codec)
    config = GrpoConfig(head=head)  # an unknown head is told before a model is loaded
    set_threads(threads)
    request = ProfileRequest(name=name, source=model, task=task, sources=[], codecs=chosen or [], config=config, seed=seed, repeats=repeats)
    if estimated:
        estimate(request, device=device, batch=batch, tokens=tokens, rows=rows, dtype=dtype, lora=adapters, default_codecs=chosen is None, relative=relative, reporter=reporter)
        return
    from dataclasses import replace

    from hilore_cli.models import (
        check_is_here,
        choose_device,
        is_random,
        load_config,
        load_model,
        resolve_model,
        weights_folder,
    )
    from hilore_cli.profiler import profile_update
    from hilore_cli.streamed import profile_by_layers

    place, folder = choose_device(device), PROFILES / name
    request = replace(request, codecs=default_codecs(place) if chosen is None else chosen)
    recorded = model == SHIPPED_MODEL and task == SHIPPED_TASK and tokens is None
    if not batch and not recorded:
        check_task(task)
    resolve_model(model)
    if device is None and place.type == "cpu":
        check_is_here(model)  # nobody downloads 16 GB to a laptop without having said so
    batches = None  # sampled from the model, once it is there
    if batch:
        batches = load_batches([str(path) for path in batch])
    elif recorded:
        batches = load_batches(list(SHIPPED_BATCHES))
        reporter.note(f"micro-batches: {len(batches)} that come with hilore for this model and task, of up to {max(mb.tokens for _, mb in batches)} tokens")
    elif layers_sample or is_random(model):  # these write nothing
        batches = invented_batches(task, name=name, tokens=tokens, rows=None, vocabulary=load_config(model).get_text_config().vocab_size, reporter=reporter)
    if layers_sample:
        kin = load_relative(relative, codecs=request.codecs, without=folder)
        with reporter.progress() as progress:
            profile = profile_by_layers(weights_folder(model), batches, replace(request, sources=sources_of(batch, batches)), dtype=dtype, device=place, relative=kin, out=folder, progress=progress)
        return _tell(profile, folder, reporter=reporter)
    loaded = load_model(model, dtype=dtype, lora=adapters, seed=seed, device=place)
    if is_random(model):
        reporter.note("random weights: bytes and times are those of the shape, gradient errors are no trained model's")
    if batches is None:
        batches = sample_batches(loaded, model, task, tokens=tokens or 1024, seed=seed, name=name, reporter=reporter)
    with reporter.progress() as progress:
        profile = profile_update(loaded, batches, replace(request, sources=sources_of(batch, batches)), folder=folder, progress=progress)
    _tell(profile, folder, reporter=reporter)


def estimate(
    request: ProfileRequest,
    *,
    device: str,
    batch: list[Path] | None,
    tokens: int | None,
    rows: int | None,
    dtype: str,
    lora: Lora | None,
    default_codecs: bool,
    relative: Path | None,
    reporter: Reporter,
) -> None:
    """Profile without the device: graphs and bytes from fakes, times from a device model, risk from a relative."""
    from dataclasses import replace

    import torch

    from hilore_cli import codecs
    from hilore_cli.devices import CPU_MODEL, choose_model
    from hilore_cli.estimate import Target, estimate_update
    from hilore_cli.models import check_dtype, load_config
    from hilore_cli.relative import check_codecs

    if batch and (tokens or rows):
        raise UsageError("--tokens and --rows make a recorded micro-batch larger; with --batch it is taken as it is: leave them out")
    if rows and not tokens:
        raise UsageError("--rows: say with --tokens how many tokens the rows hold together")
    check_dtype(dtype)
    if not batch:
        check_task(request.task)
    check_replaced(request.name)
    measured = measured_profiles(relative)
    model_of_device, error = choose_model(device, measured=measured)
    settings = load_config(request.source)
    if default_codecs:
        request = replace(request, codecs=codecs.default_codecs(torch.device("cpu" if model_of_device.reported_as == CPU_MODEL.reported_as else "cuda")))
    kin = load_relative(relative, codecs=request.codecs, without=PROFILES / request.name)
    check_codecs(kin, request.codecs)  # before anything is written
    if batch:
        batches = load_batches([str(path) for path in batch])
    else:
        batches = invented_batches(request.task, name=request.name, tokens=tokens, rows=rows, vocabulary=settings.get_text_config().vocab_size, reporter=reporter)
    target = Target(config=settings, dtype=dtype, lora=lora, device=model_of_device, time_error=error)
    folder = PROFILES / request.name
    with reporter.progress() as progress:
        profile = estimate_update(target, batches, replace(request, sources=sources_of(batch, batches)), relative=kin, folder=folder, progress=progress)
    reporter.note(f"device model {model_of_device.name}: {model_of_device.source}; fractions: {model_of_device.fractions_from}")
    if 0 < model_of_device.memory_bytes < profile.peaks.gc_bytes:
        reporter.note(f"checkpointing's peak is above the {model_of_device.memory_bytes / 1e9:.0f} GB of a {model_of_device.name}: shard the model, train adapters (--lora), or profile fewer tokens")
    _tell(profile, folder, reporter=reporter)


def sources_of(given: list[Path] | None, batches: list[tuple[str, MicroBatch]]) -> list[str]:
    """Where micro-batches are found again: what the user gave (a folder stays one), or the files that were made."""
    return [str(path) for path in given] if given else [source for source, _ in batches]


def _tell(profile: Profile, folder: Path, *, reporter: Reporter) -> None:
    reporter.result(profile_view(profile), lambda: profile_document(folder))
    how = "" if profile.estimate is None else ", estimated"
    reporter.note(f"written: {folder}/{how}; next: hilore plan {folder} --mem-cap 1.1x-gc --risk 0.015")
