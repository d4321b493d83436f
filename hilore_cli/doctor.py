"""`hilore doctor`: what is there and what is missing, looked at before anything long is run.

Four subjects, each a list of findings: this machine (versions, solver, Triton, GPU, trainers, variables), a model (which layers torch
captures whole, and why not the others), a plan (does it fit the model as installed, can its codecs run here), and the settings of a
trainer (which clash with a plan). Layers are captured on fake tensors, in one small update: no weights are loaded.

What it does NOT do: measure, run a trainer, or look at a model's weights. What a GPU's kernels do to a graph only a profile on it tells.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import hilore_cli
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.capture import graph_digest
from hilore_cli.capture_failures import reason_of
from hilore_cli.check_model import fingerprint_check
from hilore_cli.codecs import round_trip
from hilore_cli.codecs.formats import MaskCodec, get_codec
from hilore_cli.environment import COMPILER_OFF, OF_TESTS, VARIABLES
from hilore_cli.errors import CaptureError, CodecError, HiloreError, MutatingLayerError, SolverError, UsageError
from hilore_cli.fake import FakeWorkbench, build_fake_model
from hilore_cli.findings import Finding, Status
from hilore_cli.grpo import GrpoConfig
from hilore_cli.ilp import solver_version, try_solver
from hilore_cli.integrations.clashes import WRITTEN_FOR
from hilore_cli.models import DTYPES, choose_device, load_config
from hilore_cli.provenance import Lora
from hilore_cli.runtime import forward
from hilore_cli.schema import FrozenPlan, Plan

# -------------------------------------------------------------------------------------------------------------- machine


def examine_machine(*, device: str | None = None) -> list[Finding]:
    """Versions, solver, GPU, Triton, trainers and variables of this machine. `device`: as of `choose_device`."""
    say = partial(Finding, subject="machine")
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "pulp", "pandas", "pyarrow", "pydantic"))
    found = [say(name="versions", status="ok", detail=f"hilore {hilore_cli.__version__}, Python {platform.python_version()}, {versions}"), solver_finding()]
    try:
        place = choose_device(device)
        found.append(say(name="device", status="ok", detail=_device_words(place)))
    except UsageError as error:
        place = torch.device("cpu")
        found.append(say(name="device", status="problem", detail=str(error)))
    return [*found, triton_finding(place), *trainer_findings(), *variable_findings()]


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def solver_finding() -> Finding:
    """A program of one variable, solved."""
    try:
        try_solver()
    except SolverError as error:
        return Finding(subject="machine", name="solver", status="problem", detail=str(error))
    return Finding(subject="machine", name="solver", status="ok", detail=f"{solver_version()}, solves")


def _device_words(place: torch.device) -> str:
    if place.type == "cpu":
        there = " (a GPU is there, and not asked for)" if torch.cuda.is_available() else " (no GPU that this torch sees)"
        return f"cpu, {torch.get_num_threads()} threads{there}"
    properties = torch.cuda.get_device_properties(place)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {_driver()}, torch built for {torch.version.cuda or torch.version.hip}"


def _driver() -> str:
    """By NVIDIA's own tool, where it is: torch does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    asked = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=30)
    return (asked.stdout.strip().splitlines() or ["unknown"])[0]


def triton_finding(place: torch.device) -> Finding:
    """On a GPU the int8 kernels are compiled and run; elsewhere they are not needed."""
    say = partial(Finding, subject="machine", name="triton")
    version = version_of("triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if place.type == "cpu":
        return say(status="ok", detail=f"{f'{version}, ' if version else 'not installed, '}not needed on a CPU" + (" (TRITON_INTERPRET=1: kernels would be interpreted)" if interpreted else ""))
    if interpreted:
        return say(status="warning", detail="TRITON_INTERPRET=1: kernels are interpreted, thousands of times slower; unset it")
    try:
        _run_codec("int8", torch.bfloat16, place)
    except Exception as error:  # Triton, its compiler and the driver raise a dozen types; all of them mean the same here
        return say(status="problem", detail=f"{version or 'not installed'}: its kernels do not run ({reason_of(error)}); install the version that belongs to this torch (pip install triton), or plan with --risk 0")
    return say(status="ok", detail=f"{version}, compiles and runs the int8 kernels")


def trainer_findings() -> list[Finding]:
    """What of trainers and adapters is installed, and whether an integration was written for that version."""
    found = []
    for name in ("trl", "peft", "accelerate", "verl", "openrlhf", "deepspeed"):
        say, version = partial(Finding, subject="machine", name=name), version_of(name)
        written = WRITTEN_FOR.get(name)
        if version is None:
            found.append(say(status="skipped", detail="not installed"))
        elif written is None or version == written or version.startswith(f"{written}."):
            found.append(say(status="ok", detail=version + ("" if written is None else f", which hilore_cli.integrations.{name} was written for")))
        else:
            found.append(say(status="warning", detail=f"{version}; hilore_cli.integrations.{name} was written for {written}: try a few steps, and compare gradients"))
    return found


def variable_findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """HILORE_* variables in effect, and those of torch that switch capturing off."""
    say = partial(Finding, subject="machine")
    found = []
    for name, value in sorted(environment.items()):
        if name.startswith("HILORE_") and name not in OF_TESTS:
            known = name in VARIABLES
            found.append(say(name=name, status="ok" if known else "warning", detail=f"{value}: {VARIABLES[name]}" if known else f"no variable of hilore; known: {', '.join(VARIABLES)}"))
        if name in COMPILER_OFF and value not in ("", "0"):
            found.append(say(name=name, status="problem", detail=f"{value}: torch.compile is off, so no layer can be captured; unset it"))
    return found


# ---------------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of each decoder layer in one update: its class by digest of the graph, or the reason why it has none."""

    digests: Mapping[str, str]
    reasons: Mapping[str, str]
    writes: Mapping[str, str]
    """Layers that write into buffers: they can be neither planned nor checkpointed."""


def examine_model(source: str, *, dtype: str, attn_implementation: str, lora: Lora | None) -> list[Finding]:
    """What of a model can be planned, from its configuration. Raises UsageError for a model that there is none of."""
    say = partial(Finding, subject=f"model {source}")
    try:
        model = build_fake_model(load_config(source), dtype=dtype, attn_implementation=attn_implementation, lora=lora)
    except (ImportError, ValueError) as error:
        return [say(name="model", status="problem", detail=f"cannot be built with {attn_implementation} attention ({(str(error).splitlines() or [''])[0]}); install what is missing, or use sdpa")]
    parameters = list(model.parameters())
    trained, total = (sum(p.numel() for p in chosen) for chosen in ([p for p in parameters if p.requires_grad], parameters))
    how = "all weights" if lora is None else str(lora)
    found = [
        say(name="trained", status="ok", detail=f"{how}: {trained} of {total} parameters, {dtype}"),
        say(name="attention", status="ok", detail=f"{model.config._attn_implementation}; a plan is bound to it"),
    ]
    try:
        return found + layer_findings(say, try_layers(model))
    except CaptureError as error:
        return [*found, say(name="layers", status="problem", detail=str(error))]


def layer_findings(say: Callable[..., Finding], tried: Tried) -> list[Finding]:
    """One line for the layers that are captured, and one for each reason why others are not."""
    sizes = {digest: list(tried.digests.values()).count(digest) for digest in dict.fromkeys(tried.digests.values())}
    total = len(tried.digests) + len(tried.reasons) + len(tried.writes)
    found = []
    if sizes:
        found.append(say(name="layers", status="ok", detail=f"{len(tried.digests)} of {total} captured whole, as {len(sizes)} class{'es' if len(sizes) > 1 else ''} ({' + '.join(map(str, sizes.values()))})"))
    for reason in dict.fromkeys(tried.reasons.values()):
        names = [name for name, other in tried.reasons.items() if other == reason]
        rest = "they are left to torch's checkpoint, which recomputes all of them" if sizes else "there is nothing to plan: train this model with gradient checkpointing"
        found.append(say(name="layers", status="warning" if sizes else "problem", detail=f"{_few(names)}: torch cannot capture them whole ({reason}); {rest}"))
    for reason in dict.fromkeys(tried.writes.values()):
        names = [name for name, other in tried.writes.items() if other == reason]
        found.append(say(name="layers", status="problem", detail=f"{_few(names)}: {reason}"))
    return found


def try_layers(model: nn.Module) -> Tried:
    """One small update on fake tensors, every layer recomputed. A layer that cannot be captured hands its input on."""
    vocabulary = model.config.get_text_config().vocab_size
    batch = synthetic_micro_batch(vocab_size=vocabulary, rows=2, prompt_tokens=4, completion_tokens=8, group_size=2, seed=0)
    bench = FakeWorkbench(model, [batch], GrpoConfig())
    reasons: dict[str, str] = {}
    writes: dict[str, str] = {}
    bench.recorder.active = True
    try:
        with bench.method("recompute") as handle, _passing_uncaptured(bench, handle, reasons, writes):
            bench.gradients()
    except HiloreError:
        raise
    except Exception as error:  # whatever the layers above make of an input that a layer should have changed
        if not reasons and not writes:
            raise
        # what a layer returns is not always what it was handed: the layers above it were then not looked at
        raise CaptureError(f"{next(iter(reasons | writes))}: torch cannot capture the layer whole ({next(iter((reasons | writes).values()))}), and those above it were not looked at; hilore profile looks at all of them") from error
    finally:
        bench.recorder.active = False
    joints = [graph_digest(joint) for joint in bench.recorder.joints]
    of_layer = {bench.layers[index][0]: joints[which] for index, (which, _) in bench.recorder.primals.items()}
    return Tried(digests={fqn: of_layer[fqn] for fqn, _ in bench.layers if fqn in of_layer}, reasons=reasons, writes=writes)


@contextmanager
def _passing_uncaptured(bench: FakeWorkbench, handle: Any, reasons: dict[str, str], writes: dict[str, str]) -> Iterator[None]:
    def run_or_pass(fqn: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(layer, *args, **kwargs)
        except MutatingLayerError as refusal:
            writes[fqn] = str(refusal)
        except CaptureError as refusal:
            by_torch = isinstance(refusal.__cause__, torch._dynamo.exc.TorchDynamoException)
            reasons[fqn] = reason_of(refusal.__cause__) if by_torch else str(refusal).removeprefix("plan recompute: ").removeprefix(f"{fqn} ")
        return args[0] if args else kwargs["hidden_states"]

    for fqn, layer in bench.layers:
        layer.forward = partial(run_or_pass, fqn, layer)
    try:
        yield
    finally:
        handle.install()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ----------------------------------------------------------------------------------------------------------------- plan


def examine_plan(plan: Plan | FrozenPlan, *, device: str | None = None) -> list[Finding]:
    """Whether a plan fits the model as installed and can be carried out on this machine; and what `examine_model` says of the model."""
    say = partial(Finding, subject=f"plan {plan.name}")
    frozen = isinstance(plan, FrozenPlan)
    measured = plan.estimate is None and frozen and plan.measured is not None
    found = [
        say(name="file", status="ok" if frozen else "warning", detail="frozen, its digest is right" if frozen else "solved, not yet bound to a model: hilore apply"),
        say(name="variants", status="ok", detail=f"{len(plan.variants)} of up to {max(v.max_tokens for v in plan.variants)} tokens, {len(plan.patterns)} pattern{'s' if len(plan.patterns) > 1 else ''}, {len(plan.variants[0].layers)} layers" + (f", {len(plan.fallback)} of them left to torch's checkpoint" if plan.fallback else "")),
        say(name="measured", status="ok" if measured else "warning", detail="peak and gradient error were measured" if measured else "no peak or gradient error was measured on the device; run hilore apply there"),
    ]
    check = fingerprint_check(plan)
    status: Status = {"passed": "ok", "failed": "problem", "skipped": "warning"}[check.status]
    found += [say(name="fingerprint", status=status, detail=check.detail), codec_finding(say, plan, device=device)]
    identity = plan.model
    try:
        return found + examine_model(identity.source, dtype=identity.dtype, attn_implementation=identity.attn_implementation, lora=identity.lora)
    except UsageError as error:
        return [*found, say(name="layers", status="skipped", detail=str(error))]


def codec_finding(say: Callable[..., Finding], plan: Plan | FrozenPlan, *, device: str | None) -> Finding:
    """Every codec of the plan's patterns, run once on this machine's device."""
    used = sorted({action.removeprefix("compress:") for pattern in plan.patterns.values() for action in (*pattern.actions.values(), pattern.default) if action.startswith("compress:")})
    if not used:
        return say(name="codecs", status="ok", detail="none: the plan is exact")
    try:
        place = choose_device(device)
        for codec in used:
            _run_codec(codec, DTYPES[plan.model.dtype], place)
    except HiloreError as error:
        return say(name="codecs", status="problem", detail=str(error))
    return say(name="codecs", status="ok", detail=f"{', '.join(used)} run on {place.type}")


def _run_codec(name: str, dtype: torch.dtype, place: torch.device) -> None:
    """Raises CodecError."""
    values = torch.linspace(-1, 1, 512, device=place)
    sample = values > 0 if isinstance(get_codec(name), MaskCodec) else values.to(dtype)
    if round_trip(sample, name).shape != sample.shape:
        raise CodecError(f"codec {name}: gives back another shape on {place.type}; reinstall hilore in an environment of its own")
