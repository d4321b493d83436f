"""What commands are given: micro-batches, models, names and files. Raises UsageError, ProfileError and PlanMismatchError that name them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hilore_cli
from hilore_cli.commands.options import (
    PROFILES,
    SHIPPED_BATCHES,
    SHIPPED_HELDOUT,
    SHIPPED_MODEL,
    SHIPPED_RELATIVES,
    SHIPPED_TASK,
)
from hilore_cli.errors import HiloreError, ProfileError, UsageError
from hilore_cli.views.console import Reporter

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch
    from hilore_cli.provenance import Lora
    from hilore_cli.schema import Profile


def load_batches(sources: list[str]) -> list[tuple[str, MicroBatch]]:
    """Recorded micro-batches with their sources: of files, of the files in a folder, or of those that come with hilore by bare name."""
    from hilore_cli.captured import read_micro_batches

    found = []
    for source in sources:
        path = shipped_file(source) if source in (*SHIPPED_BATCHES, SHIPPED_HELDOUT) and not Path(source).exists() else Path(source)
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
        if not files:
            raise ProfileError(f"{source}: an empty folder; record micro-batches with: hilore rollout, or hilore capture TRAINER")
        for file in files:
            name = str(Path(source) / file.name) if path.is_dir() else source
            batches = read_micro_batches(file)
            found += [(name if len(batches) == 1 else f"{name}#{i}", batch) for i, batch in enumerate(batches)]
    return found


def shipped_file(name: str) -> Path:
    """profiles/<name> of the checkout, or hilore_cli/data/<name> of an installed wheel."""
    package = Path(hilore_cli.__file__).parent
    folders = (package.parent / "profiles", package / "data")
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[-1] / name)


def check_task(task: str) -> None:
    """Raise UsageError for an unknown task, before a model is loaded."""
    from hilore_cli.tasks import load_task

    load_task(task, seed=0, size=2)


def sample_batches(loaded: Any, model: str, task: str, *, tokens: int, seed: int, name: str, reporter: Reporter) -> list[tuple[str, MicroBatch]]:
    """Up to three micro-batches of real rollouts of about `tokens` tokens each, kept in profiles/: one to profile, two to try plans on.

    Raises ProfileError when no group has mixed rewards.
    """
    from hilore_cli.batches import save_micro_batch
    from hilore_cli.models import load_tokenizer
    from hilore_cli.rollout import generate_rollouts
    from hilore_cli.tasks import load_task

    group_size = 8
    room = row_room(tokens, group_size=group_size)
    prompts = 16 + 6 * room["rows_per_micro_batch"] // group_size
    reporter.note(f"sampling {prompts} x {group_size} completions of task {task}")
    items = load_task(task, seed=seed, size=prompts)
    sampled = generate_rollouts(loaded, load_tokenizer(model), items, prompts=prompts, group_size=group_size, seed=seed, meta={"model": model}, **room)[:3]
    sources = [str(PROFILES / f"{name}{suffix}.parquet") for suffix in ("", "-calibration-0", "-calibration-1")[: len(sampled)]]
    for source, micro_batch in zip(sources, sampled, strict=True):
        save_micro_batch(source, micro_batch)
    reporter.note(f"micro-batches: {len(sampled)} of up to {max(mb.tokens for mb in sampled)} tokens of real rollouts, kept as {', '.join(sources)}")
    return list(zip(sources, sampled, strict=True))


def invented_batches(task: str, *, name: str, tokens: int | None, rows: int | None, vocabulary: int, reporter: Reporter) -> list[tuple[str, MicroBatch]]:
    """The recorded micro-batches of task math, for a model that was not run: their lengths, stretched to about `tokens`; their ids mean nothing.

    Kept in profiles/, so that the model, once it is there, can be measured on the very same. Raises UsageError.
    """
    from dataclasses import replace

    from hilore_cli.batches import save_micro_batch
    from hilore_cli.stretch import size_for, stretch

    recorded = load_batches(list(SHIPPED_BATCHES))
    largest = max((micro_batch for _, micro_batch in recorded), key=lambda micro_batch: micro_batch.tokens)
    made = []
    for position, (_, micro_batch) in enumerate(recorded):
        if tokens is not None:
            count, length = size_for(largest, tokens=tokens, rows=rows)
            micro_batch = stretch(micro_batch, rows=count, length=round(length * micro_batch.input_ids.shape[1] / largest.input_ids.shape[1]))
        micro_batch = replace(micro_batch, input_ids=micro_batch.input_ids % vocabulary)
        source = str(PROFILES / (name + (f"-calibration-{position - 1}" if position else "") + ".parquet"))
        save_micro_batch(source, micro_batch)
        made.append((source, micro_batch))
    lengths = "those recorded of SmolLM2-135M" if tokens is None else f"those recorded of SmolLM2-135M, stretched to {made[0][1].tokens} tokens: that is invented"
    other = "" if task == SHIPPED_TASK else f" (on task {SHIPPED_TASK}: none of task {task} is recorded)"
    reporter.note(f"micro-batches: {len(made)}; lengths are {lengths}{other}. For those of your trainer: hilore capture, and --batch")
    return made


def load_relative(path: Path | None, *, codecs: Sequence[str], without: Path) -> Profile:
    """The measured profile that risk is scaled from: the one named, or the first of those that come with hilore that has the codecs.

    Raises ProfileError.
    """
    from hilore_cli.files import load_profile

    package = Path(hilore_cli.__file__).parent
    shipped = [place / name for name in SHIPPED_RELATIVES for place in (PROFILES, package.parent / "profiles", package / "data") if (place / name / "profile.json").is_file()]
    known = [path] if path is not None else [folder for folder in shipped if folder.resolve() != without.resolve()]
    if not known:
        raise ProfileError(f"no measured profile to scale the risk from; measure a small model (hilore profile --model {SHIPPED_MODEL} --task {SHIPPED_TASK} --codecs int8,int4 --name {SHIPPED_RELATIVES[0]}), or name one with --relative")
    if known[0].resolve() == without.resolve():
        raise ProfileError(f"{path}: would be written over by the profile that is scaled from it; give that one another --name")
    profiles = [load_profile(folder) for folder in known]
    measured = [profile for profile in profiles if profile.estimate is None]
    if not measured:
        raise ProfileError(f"{known[0]}: is itself estimated; risk can be scaled from a measured profile only: name one with --relative")
    return next((profile for profile in measured if set(codecs) <= {row.codec for row in profile.kappas}), measured[0])


def check_replaced(name: str) -> None:
    """Raise UsageError where an estimate would take the place of a profile that was measured."""
    from hilore_cli.files import load_profile

    folder = PROFILES / name
    if not (folder / "profile.json").is_file():
        return
    try:
        measured = load_profile(folder).estimate is None
    except HiloreError:
        return  # damaged: there is nothing to lose
    if measured:
        raise UsageError(f"{folder}: was measured, and would be replaced by an estimate; give that another --name")


def measured_profiles(path: Path | None) -> list[Profile]:
    """The measured profiles in profiles/, and the one named; what cannot be read is left out."""
    from hilore_cli.files import load_profile

    found = []
    for folder in sorted({*(p.parent for p in PROFILES.glob("*/profile.json")), *([path] if path is not None else [])}):
        try:
            profile = load_profile(folder)
        except HiloreError:
            continue  # whoever needs it will say what is wrong with it
        if profile.estimate is None:
            found.append(profile)
    return found


def row_room(tokens: int, *, group_size: int, max_new_tokens: int | None = None) -> dict[str, int]:
    """Rows and widths that fill about `tokens` tokens: rows of up to 256 tokens, half of them for the completion."""
    groups = max(1, tokens // (group_size * 256))
    width = tokens // (groups * group_size)
    new = max_new_tokens or max(width // 2, 1)
    if width - new < 1:
        raise UsageError(f"{tokens} tokens leave no room for a prompt in {group_size} rows with {new} new tokens; ask for more tokens")
    return {"rows_per_micro_batch": groups * group_size, "max_prompt_tokens": width - new} | ({} if max_new_tokens else {"max_new_tokens": new})


def task_options(texts: list[str]) -> dict[str, Any]:
    """`max_digits=1` and the like, for a task's generator; values as in JSON, else as they stand. Raises UsageError."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--task-option {text!r}: is not of the form NAME=VALUE, such as max_digits=1")
        if name in ("name", "seed", "size"):
            raise UsageError(f"--task-option {text!r}: is told by --task, --seed and --prompts")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def load_planned_model(source: str, planned: Any, *, device: str | None) -> Any:
    """The model that a plan (solved or frozen) is for: its dtype, attention implementation and adapters."""
    from hilore_cli.models import choose_device, load_model

    identity = planned.model
    return load_model(source, dtype=identity.dtype, attn_implementation=identity.attn_implementation, lora=identity.lora, device=choose_device(device))


def adapters_of(rank: int | None, *, alpha: float | None, dropout: float | None, targets: str | None) -> Lora | None:
    """What --lora and its options ask for. Raises UsageError."""
    from hilore_cli.provenance import Lora

    if rank is None:
        if given := [option for option, value in {"--lora-alpha": alpha, "--lora-dropout": dropout, "--lora-targets": targets}.items() if value is not None]:
            raise UsageError(f"{given[0]} is of adapters; give their rank with --lora, too")
        return None
    lora = Lora(rank=rank, alpha=alpha, dropout=dropout or 0.0, targets=None if targets is None else tuple(split_names(targets)))
    lora.check()
    return lora


def set_threads(count: int | None) -> None:
    import torch

    if count is not None:
        torch.set_num_threads(count)


def split_names(text: str) -> list[str]:
    """ "int8, int4" -> ["int8", "int4"]; without repetition."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def file_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "profile"


def file_name(name: str) -> str:
    """The name, or UsageError when it cannot be that of a file."""
    if file_safe(name) != name:
        raise UsageError(f"name {name!r}: use letters, digits, dots, dashes and underscores, such as {file_safe(name)!r}")
    return name


def choose_profile(path: Path | None, *, reporter: Reporter) -> Path:
    """The folder that was named, or the newest in profiles/. Raises ProfileError where there is none."""
    if path is None:
        path = newest(PROFILES, "*/profile.json", ProfileError, "make one with `hilore profile`").parent
        reporter.note(f"profile: the newest, {path}")
    return path


def check_risk(risk: float) -> None:
    """Raise UsageError, before a profile is loaded."""
    if not (math.isfinite(risk) and risk >= 0):
        raise UsageError(f"risk {risk}: must be a relative gradient error of 0 or more, such as 0.015")


def newest(folder: Path, pattern: str, error: type[HiloreError], remedy: str, *, without: str | None = None) -> Path:
    """The file changed last, ties by name. Raises `error` when there is none."""
    found = [path for path in folder.glob(pattern) if without is None or not path.name.endswith(without)]
    if not found:
        raise error(f"{folder}/: holds no {pattern}; {remedy}")
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
