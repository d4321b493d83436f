"""Options that several commands share, and the names of what comes with hilore."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.errors import UsageError
from hilore_cli.presets import PRESETS

PROFILES = Path("profiles")
PLANS = Path("plans")
SHIPPED_MODEL = "smollm2-135m"
SHIPPED_TASK = "math"
SHIPPED_BATCHES = ("smollm2-math.parquet", "smollm2-math-calibration-0.parquet", "smollm2-math-calibration-1.parquet")
SHIPPED_HELDOUT = "smollm2-math-heldout.parquet"
SHIPPED_RELATIVES = ("smollm2-135m-relative", "smollm2-135m-math")
"""Measured profiles in profiles/ that the risk of larger models is scaled from: the first that has the codecs."""
EXPOSURE_RULES = ("logits", "squared", "scalar", "tokens")


def check_writable(path: Path | None) -> Path | None:
    """Of an option that names a file to write: raise UsageError before anything is measured where it cannot be written. Makes its folder."""
    if path is None:
        return None
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file, such as {path / 'report'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise UsageError(f"{path}: in {path.parent} is a file where a folder would have to be; give another path") from e
    except OSError as e:
        raise UsageError(f"{path}: cannot be written ({e.strerror}); give another path") from e
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written (no permission in {path.parent}); give another path")
    return path


def complete_models(incomplete: str) -> list[str]:
    """Names of presets."""
    return sorted(name for name in PRESETS if name.startswith(incomplete))


def complete_tasks(incomplete: str) -> list[str]:
    """math, and reasoning-gym's generators where it is installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        DATASETS = {}
    return sorted(name for name in ("math", *DATASETS) if name.startswith(incomplete))


def complete_trainers(incomplete: str) -> list[str]:
    return [name for name in ("trl", "verl", "openrlhf", "slime", "own") if name.startswith(incomplete)]


def complete_plans(incomplete: str) -> list[str]:
    """Files in plans/. Where none fits, shells fall back to files."""
    return sorted(str(path) for path in PLANS.glob("*.json") if str(path).startswith(incomplete))


def complete_profiles(incomplete: str) -> list[str]:
    """Folders in profiles/."""
    return sorted(str(path.parent) for path in PROFILES.glob("*/profile.json") if str(path.parent).startswith(incomplete))


def complete_files(incomplete: str) -> list[str]:
    """Plans and profiles."""
    return complete_plans(incomplete) + complete_profiles(incomplete)


def complete_models_and_plans(incomplete: str) -> list[str]:
    return complete_models(incomplete) + complete_plans(incomplete)


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; tables go to stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also on stderr: stages with their times, solver runs, compilations.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress.")]
Threads = Annotated[int | None, typer.Option("--threads", envvar="HILORE_THREADS", min=1, help="CPU threads of torch. Default: torch's own.", show_default=False)]
BatchFiles = Annotated[list[Path] | None, typer.Option("--batch", help="Recorded micro-batches of one update: file of a trainer (hilore capture) or of hilore rollout, or a folder of them. May be repeated.", show_default=False)]
Device = Annotated[str | None, typer.Option("--device", envvar="HILORE_DEVICE", help="cpu or cuda. Default: the GPU if there is one.", show_default=False)]
ProfileFolder = Annotated[Path | None, typer.Argument(help="Folder that hilore profile wrote. Default: the newest in profiles/.", show_default=False, autocompletion=complete_profiles)]
MemCap = Annotated[str, typer.Option(help="Cap on the peak of a whole update: 1.1x-gc (times the checkpointing peak), 0.9x-none, or 40GiB.")]
Codecs = Annotated[str | None, typer.Option(help="Codecs to use, comma-separated. Default: those of the profile.", show_default=False)]
LoraAlpha = Annotated[float | None, typer.Option("--lora-alpha", help="With --lora: PEFT's lora_alpha. Default: twice the rank.", show_default=False)]
LoraDropout = Annotated[float | None, typer.Option("--lora-dropout", help="With --lora: PEFT's lora_dropout. Default: 0.", show_default=False)]
LoraTargets = Annotated[str | None, typer.Option("--lora-targets", help="With --lora: linears of the decoder layers that have adapters, by the last part of their names, comma-separated (q_proj,v_proj). Default: all.", show_default=False)]
ModelName = Annotated[str | None, typer.Option("--model", help="Preset, folder or hub id. Default: the plan's.", show_default=False, autocompletion=complete_models)]
