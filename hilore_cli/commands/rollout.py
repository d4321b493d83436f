"""hilore rollout and hilore capture: where micro-batches come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hilore_cli.commands.documents import batch_document
from hilore_cli.commands.inputs import (
    check_task,
    row_room,
    set_threads,
    task_options,
)
from hilore_cli.commands.options import (
    SHIPPED_TASK,
    Device,
    Json,
    Quiet,
    Threads,
    check_writable,
    complete_models,
    complete_tasks,
    complete_trainers,
)
from hilore_cli.errors import UsageError
from hilore_cli.views.console import Reporter
from hilore_cli.views.profile import batches_view


def rollout_command(
    model: Annotated[str, typer.Option(help="Preset, folder or hub id.", autocompletion=complete_models)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write; with --rows a folder of them.")],
    task: Annotated[str, typer.Option(help="math, or the name of a reasoning-gym generator.", autocompletion=complete_tasks)] = SHIPPED_TASK,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to sample.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, help="Completions per prompt.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    system_prompt: Annotated[str | None, typer.Option(help="What the model is told before the question. Default: to answer with one number only.", show_default=False)] = None,
    task_option: Annotated[list[str] | None, typer.Option(help="Difficulty of the task's generator, as NAME=VALUE: max_digits=1. May be repeated.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the task and of the sampling.")] = 0,
    tokens: Annotated[int | None, typer.Option(min=64, help="At most about so many tokens (padding included) in the micro-batch.", show_default=False)] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of a micro-batch: all groups with mixed rewards are recorded, as one update of as many micro-batches as it takes.", show_default=False)] = None,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sample completions of a task, score them, and record them for hilore profile --batch: as one micro-batch, or with --rows as an update."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    if not temperature > 0:
        raise UsageError(f"temperature {temperature}: must be above 0")
    if rows is not None and tokens is not None:
        raise UsageError("--rows and --tokens both say how large a micro-batch is; give one of them")
    check_output(output, folder=rows is not None)
    check_task(task)
    from hilore_cli.batches import save_micro_batch, save_update
    from hilore_cli.models import choose_device, load_model, load_tokenizer
    from hilore_cli.rollout import generate_rollouts
    from hilore_cli.tasks import load_task

    set_threads(threads)
    place = choose_device(device)
    items = load_task(task, seed=seed, size=prompts, **task_options(task_option or []))
    loaded, tokenizer = load_model(model, device=place), load_tokenizer(model)
    sizes: dict[str, Any] = {"rows_per_micro_batch": rows} if tokens is None else row_room(tokens, group_size=group_size, max_new_tokens=max_new_tokens)
    if system_prompt is not None:
        sizes["system_prompt"] = system_prompt
    reporter.note(f"sampling {prompts} x {group_size} completions")
    sampled = generate_rollouts(loaded, tokenizer, items, prompts=prompts, group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, meta={"model": model}, **sizes)
    if rows is None:
        save_micro_batch(output, sampled[0])
        reporter.result(batches_view([(output.name, sampled[0])]), lambda: batch_document(sampled[0]))
    else:
        names = save_update(output, sampled)
        reporter.result(batches_view(list(zip(names, sampled, strict=True))), lambda: [batch_document(micro_batch) for micro_batch in sampled])
    reporter.note(f"written: {output}; next: hilore profile --model {model} --task {task} --batch {output}")


def check_output(output: Path, *, folder: bool) -> None:
    """Raise UsageError, before anything is sampled, for a place that cannot be written to or that holds something else."""
    if folder and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output}: exists, and an update wants a folder of its own; give another one, or remove it")
    if not folder and output.is_dir():
        raise UsageError(f"{output}: is a folder, and one micro-batch is a file; give {output / 'batch.parquet'}, or --rows for an update")
    check_writable(None if folder and output.is_dir() else output)


def capture_command(
    trainer: Annotated[str, typer.Argument(help="trl, verl, openrlhf, slime, or own.", autocompletion=complete_trainers)],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the few lines that make a trainer record the micro-batches of an update, for hilore profile --batch."""
    from hilore_cli.captured import recipe

    text = recipe(trainer).strip()
    if as_json:
        Reporter(as_json=True, quiet=True).result("", lambda: {"format": "hilore-recipe", "trainer": trainer, "lines": text.splitlines()})
    else:
        print(text)
