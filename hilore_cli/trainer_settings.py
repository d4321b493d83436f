"""A file of trainer settings against a plan, before a trainer is built: TRL's arguments, or an accelerate configuration.

    findings = examine_settings(read_settings(Path("grpo.yaml")), plan=plan, where="grpo.yaml")

What clashes is refused by the integrations in the same words (integrations/clashes.py) once the trainer is built. What is looked at
here and not there makes a plan less than it says: another graph, another rounding. Options of a command line beside the file are not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hilore_cli.errors import UsageError
from hilore_cli.findings import Finding, Status
from hilore_cli.integrations.clashes import REFUSED, TRL, VERL, WRITTEN_FOR
from hilore_cli.provenance import Lora
from hilore_cli.schema import FrozenPlan, Plan

LOW_DTYPES = ("bfloat16", "float16")
OF_ACCELERATE = {"compute_environment", "distributed_type"}
"""Keys that only a configuration of accelerate has."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""What PEFT puts LoRA on where nothing is said: of llama, qwen2, qwen3, mistral, gemma and most others."""
ANOTHER_GRAPH = "another graph, treated as planned where its units are the same"


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON or YAML file; those that it keeps in files beside it (fsdp_config, deepspeed) are read, too. Raises UsageError."""
    settings = _read(path)
    for key in ("fsdp_config", "deepspeed", "model_init_kwargs", "gradient_checkpointing_kwargs"):
        value = settings.get(key)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            settings[key] = _parsed(value, where=f"{path}: {key}")
        elif isinstance(value, str) and value:
            beside = path.parent / value
            settings[key] = _read(beside if beside.exists() else Path(value), named=f"{path}: {key} names {value}")
    return settings


def _read(path: Path, *, named: str | None = None) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{named or path}: no such file; give the JSON or YAML file that the trainer reads its settings from")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{named or path}: not a text file ({error}); give a JSON or YAML file of settings") from error
    return _parsed(text, where=named or str(path))


def _parsed(text: str, *, where: str) -> dict[str, Any]:
    """JSON, else YAML: YAML reads 1e-6 as a text."""
    try:
        settings = json.loads(text)
    except ValueError:
        try:
            settings = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{where}: neither JSON nor YAML ({' '.join(str(error).split())}); give a file of settings") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{where}: holds no settings by name; give a JSON or YAML file such as gradient_checkpointing: false")
    return settings


def examine_settings(settings: Mapping[str, Any], *, where: str, plan: Plan | FrozenPlan | None = None) -> list[Finding]:
    """One finding for each setting that matters; one that says so when none clashes. `plan`: for what depends on it."""
    say = partial(Finding, subject=f"settings {where}")
    found = [say(name=name, status=status, detail=detail) for name, status, detail in (*_clashing(settings), *_changing(settings, plan), *_of_plan(settings, plan))]
    return found or [say(name="settings", status="ok", detail="nothing that clashes with a plan")]


def _clashing(settings: Mapping[str, Any]) -> Iterator[tuple[str, Status, str]]:
    """What stops a plan from being what it says."""
    accelerate = bool(OF_ACCELERATE & set(settings))
    checkpointing = settings.get("gradient_checkpointing", not accelerate)
    if checkpointing:
        yield "gradient_checkpointing", "problem", TRL["gradient_checkpointing"]
        if _mapping(settings, "gradient_checkpointing_kwargs").get("use_reentrant"):
            yield "use_reentrant", "problem", "reentrant checkpointing runs the layers without gradients first, where a plan is not carried out; pass GRPOConfig(gradient_checkpointing=False)"
    fsdp = _mapping(settings, "fsdp_config")
    sharded = bool(settings.get("fsdp")) or str(settings.get("distributed_type", "")).upper() == "FSDP"
    if sharded and (fsdp.get("activation_checkpointing") or fsdp.get("fsdp_activation_checkpointing")):
        yield "activation_checkpointing", "problem", TRL["activation_checkpointing"]
    version = fsdp.get("fsdp_version", fsdp.get("version", 1 if accelerate else 2))  # accelerate takes FSDP1 where nothing is said, transformers FSDP2
    if sharded and int(version) == 1:
        yield "fsdp_version", "problem", f"{VERL['FSDP1'].split('; ')[0].replace('the engine shards', 'the trainer shards')}; set fsdp_version: 2 in fsdp_config"
    if _zero_stage(settings) == 3:
        yield "ZeRO-3", "problem", TRL["ZeRO-3"]


def _changing(settings: Mapping[str, Any], plan: Plan | FrozenPlan | None) -> Iterator[tuple[str, Status, str]]:
    """What makes a plan less than it says: it is carried out, its figures are not those of the profile."""
    if any(settings.get(key) for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode")) or str(_mapping(settings, "dynamo_config").get("dynamo_backend", "NO")).upper() != "NO":
        yield "torch_compile", "warning", "the model is compiled around the plan: gradients are within rounding of those without it, not equal; leave torch_compile out to have them equal"
    if settings.get("use_liger_kernel") or _mapping(settings, "model_init_kwargs").get("use_kernels"):
        yield "kernels", "warning", "kernels in place of the layers' own operators make other graphs than a profile's; leave them out, or profile the model with them"
    if _mapping(settings, "model_init_kwargs").get("use_cache"):
        yield "use_cache", "warning", "a cache in the training forward makes a graph for each layer; leave use_cache out of model_init_kwargs"
    low = "fp16" if settings.get("fp16") else "bf16" if settings.get("bf16", not OF_ACCELERATE & set(settings)) else None
    if low and (plan is None or plan.model.dtype not in LOW_DTYPES):
        yield low, "warning", f"computes fp32 weights in {low} (autocast{'' if low in settings else ', TRL has it on by default'}), and profiles are of one precision: units that are still there are treated as planned, the figures are those of the profile; load the weights as bfloat16 and profile with --dtype bfloat16, or set {low}: false"


def _of_plan(settings: Mapping[str, Any], plan: Plan | FrozenPlan | None) -> Iterator[tuple[str, Status, str]]:
    """What of a plan's fingerprint the settings contradict, and its adapters."""
    if plan is None:
        return
    given = _mapping(settings, "model_init_kwargs")
    attention = given.get("attn_implementation", settings.get("attn_implementation"))
    if attention is not None and attention != plan.model.attn_implementation:
        yield "attn_implementation", "problem", f"{attention}, the plan is bound to {plan.model.attn_implementation}; load the model with that, or profile it as it is run"
    dtype = str(given.get("dtype", given.get("torch_dtype", settings.get("dtype", plan.model.dtype)))).removeprefix("torch.")
    if dtype not in ("auto", plan.model.dtype):
        yield "dtype", "problem", f"{dtype}, the plan is bound to {plan.model.dtype}; load the model with that, or profile it with --dtype {dtype}"
    rank = settings.get("lora_r", 16) if settings.get("use_peft") else None
    if "use_peft" in settings and rank != plan.model.lora_rank:
        words = {None: "the whole model"}
        yield "use_peft", "problem", f"trains {words.get(rank, f'adapters of rank {rank}')}, the plan is for {words.get(plan.model.lora_rank, f'adapters of rank {plan.model.lora_rank}')}; profile what is trained (hilore profile --lora)"
    elif settings.get("use_peft") and plan.model.lora is not None:
        yield from _of_adapters(settings, plan.model.lora)


def _of_adapters(settings: Mapping[str, Any], planned: Lora) -> Iterator[tuple[str, Status, str]]:
    """Adapters of the plan's rank: where they are not on the same linears it is refused; with another scale or dropout it runs in part."""
    given = settings.get("lora_target_modules")
    asked = (given,) if isinstance(given, str) else tuple(sorted(given or PEFT_TARGETS))
    if (None if asked == ("all-linear",) else asked) != planned.targets:
        where = "all linears" if planned.targets is None else ", ".join(planned.targets)
        option = "without --lora-targets" if asked == ("all-linear",) else f"with --lora-targets {','.join(asked)}"
        yield "lora_target_modules", "problem", f"{', '.join(asked)}{'' if given else ' (what PEFT takes of most models)'}, the plan has adapters on {where}; set {'all-linear' if planned.targets is None else ' '.join(planned.targets)}, or profile {option}"
    for name in ("use_dora", "lora_modules_to_save"):
        if settings.get(name):
            yield name, "problem", "trains parameters that the plan does not know; leave it out, or profile the model as you build it with hilore_cli.profiler.profile_update"
    if settings.get("use_rslora"):
        yield "use_rslora", "warning", f"another scale is {ANOTHER_GRAPH}; leave it out, or profile with --lora-alpha of that scale (alpha / sqrt(rank) x rank)"
    alpha = _number(settings, "lora_alpha", 32)
    if alpha != planned.lora_alpha:
        yield "lora_alpha", "warning", f"{alpha:g}, the plan was made with {planned.lora_alpha:g}: {ANOTHER_GRAPH}; profile with --lora-alpha {alpha:g}"
    dropout = _number(settings, "lora_dropout", 0.05)
    if dropout != planned.dropout:
        yield "lora_dropout", "warning", f"{dropout:g}{'' if 'lora_dropout' in settings else ', which is the default of TRL'}; the plan was made with {planned.dropout:g}: {ANOTHER_GRAPH}; profile with --lora-dropout {dropout:g}"


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    """YAML reads 5e-2 as a text. Raises UsageError for what is no number."""
    value = settings.get(key)
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{key}: {value!r} is no number") from error


def _zero_stage(settings: Mapping[str, Any]) -> int | None:
    stages = (_mapping(_mapping(settings, "deepspeed"), "zero_optimization").get("stage"), _mapping(settings, "deepspeed_config").get("zero_stage"))
    return next((int(stage) for stage in stages if stage is not None), None)


def _mapping(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, Mapping) else {}


def unseen_settings(*, installed: list[str]) -> list[Finding]:
    """For who names no file: what each installed trainer's integration refuses."""
    return [
        Finding(subject="settings", name=name, status="skipped", detail=f"not looked at (--trainer-args FILE); beside a plan, {name} {WRITTEN_FOR[name]} is refused with: {', '.join(REFUSED[name])}")
        for name in REFUSED
        if name in installed
    ]
