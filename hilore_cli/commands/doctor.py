"""hilore doctor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilore_cli.commands.inputs import adapters_of
from hilore_cli.commands.options import (
    Device,
    Json,
    LoraAlpha,
    LoraDropout,
    LoraTargets,
    Quiet,
    complete_models_and_plans,
)
from hilore_cli.commands.reading import read_plan
from hilore_cli.errors import CheckError
from hilore_cli.views.console import Reporter
from hilore_cli.views.doctor import doctor_view, doctor_words

if TYPE_CHECKING:
    from hilore_cli.findings import Finding


def doctor_command(
    target: Annotated[str | None, typer.Argument(metavar="[MODEL|PLAN]", help="A model (preset, folder, hub id) or a plan. Default: this machine alone.", show_default=False, autocompletion=complete_models_and_plans)] = None,
    trainer_args: Annotated[list[Path] | None, typer.Option("--trainer-args", help="JSON or YAML file of the trainer's settings: TRL's arguments, or accelerate's configuration. May be repeated.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of a model: float32 or bfloat16.")] = "float32",
    attention: Annotated[str, typer.Option(help="Of a model: its attention implementation in transformers.")] = "sdpa",
    lora: Annotated[int | None, typer.Option(min=1, help="Of a model: rank of LoRA adapters; without it everything is trained.", show_default=False)] = None,
    lora_alpha: LoraAlpha = None,
    lora_dropout: LoraDropout = None,
    lora_targets: LoraTargets = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What is here and what is missing: versions, solver, GPU, trainers; what of a model can be planned, and whether a plan fits."""
    from hilore_cli.doctor import examine_machine, examine_model, examine_plan, version_of
    from hilore_cli.findings import problems
    from hilore_cli.integrations.clashes import REFUSED
    from hilore_cli.trainer_settings import examine_settings, read_settings, unseen_settings

    reporter = Reporter(as_json=as_json, quiet=quiet)
    adapters = adapters_of(lora, alpha=lora_alpha, dropout=lora_dropout, targets=lora_targets)
    settings = [(path, read_settings(path)) for path in trainer_args or []]
    plan = read_plan(Path(target)) if target is not None and (target.endswith(".json") or Path(target).is_file()) else None
    findings = examine_machine(device=device)
    if target is not None:
        reporter.note(f"capturing the layers of {target if plan is None else plan.model.source} on fake tensors")
        findings += examine_plan(plan, device=device) if plan is not None else examine_model(target, dtype=dtype, attn_implementation=attention, lora=adapters)
    for path, given in settings:
        findings += examine_settings(given, where=str(path), plan=plan)
    if not settings:
        findings += unseen_settings(installed=[name for name in REFUSED if version_of(name) is not None])
    reporter.result(doctor_view(findings), lambda: doctor_document(findings, target=target))
    if problems(findings):
        raise CheckError(doctor_words(findings))


def doctor_document(findings: list[Finding], *, target: str | None) -> dict[str, Any]:
    from dataclasses import asdict
    from datetime import UTC, datetime

    import hilore_cli

    count = Counter(finding.status for finding in findings)
    return {
        "format": "hilore-doctor",
        "version": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "hilore": hilore_cli.__version__,
        "target": target,
        "problems": count["problem"],
        "warnings": count["warning"],
        "findings": [asdict(finding) for finding in findings],
    }
