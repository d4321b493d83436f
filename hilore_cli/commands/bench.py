"""hilore bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilore_cli import malloc
from hilore_cli.commands.inputs import (
    load_batches,
    load_planned_model,
    newest,
    set_threads,
    split_names,
)
from hilore_cli.commands.options import (
    PLANS,
    BatchFiles,
    Device,
    Json,
    ModelName,
    Quiet,
    Threads,
    check_writable,
    complete_plans,
)
from hilore_cli.commands.quality import bench_quality
from hilore_cli.commands.suite import bench_suite
from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.quality.settings import SETTINGS
from hilore_cli.sizes import parse_bytes
from hilore_cli.views.bench import bench_view, codec_bench_view
from hilore_cli.views.console import Reporter

HEADS_OF_SUITE = "full,chunked"
REPEATS = 5


def bench_command(
    frozen_plan: Annotated[Path | None, typer.Argument(help="File that hilore apply wrote. Default: the newest in plans/.", show_default=False, autocompletion=complete_plans)] = None,
    batch: BatchFiles = None,
    model: ModelName = None,
    repeats: Annotated[int | None, typer.Option(min=1, help=f"Interleaved timed updates of each method, or samples of each codec. Default: {REPEATS}.", show_default=False)] = None,
    also: Annotated[str, typer.Option(help="Further methods, comma-separated: store, recompute (the runtime's two uniform plans).")] = "",
    against: Annotated[list[Path] | None, typer.Option(help="Another frozen plan of the same model, as a row of its own. May be repeated.", show_default=False)] = None,
    skip_zero_rows: Annotated[bool, typer.Option("--skip-zero-rows", help="Also run checkpointing and the plan without the rows that have no gradient.")] = False,
    codecs: Annotated[str | None, typer.Option(help="Instead of a plan: GB/s of codecs beside a plain copy, and the width of product below which recomputing is cheaper. all (one of each kind), or names, comma-separated.", show_default=False)] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Every peer beside the plans, under one cap: partial and selective checkpointing, torch's memory budget, compression hooks, whole layers.")] = False,
    mem_cap: Annotated[str | None, typer.Option(help="With --suite: the cap for all, such as 2.5GiB or 1.1x-gc. Default: the plan's.", show_default=False)] = None,
    heads: Annotated[str, typer.Option(help="With --suite: loss heads, comma-separated; a plan runs under its own.")] = HEADS_OF_SUITE,
    peers: Annotated[str | None, typer.Option(help="With --suite: peers, comma-separated. Default: all.", show_default=False)] = None,
    as_csv: Annotated[Path | None, typer.Option("--csv", help="With --suite: keep the rows as a CSV file, too.", show_default=False, callback=check_writable)] = None,
    parquet: Annotated[Path | None, typer.Option(help="With --suite or --quality: keep the rows as a Parquet file, too.", show_default=False, callback=check_writable)] = None,
    png: Annotated[Path | None, typer.Option(help="With --suite: draw speed-up against peak into this file.", show_default=False, callback=check_writable)] = None,
    quality: Annotated[bool, typer.Option("--quality", help="Instead of a plan: GRPO runs in pairs, under checkpointing and under a plan made for them, with controls: does it still learn?")] = False,
    setting: Annotated[str | None, typer.Option(help=f"With --quality: what is learnt; {', '.join(SETTINGS)}. Default: {next(iter(SETTINGS))}.", show_default=False)] = None,
    pairs: Annotated[int | None, typer.Option(min=2, help="With --quality: pairs of runs. Default: the setting's.", show_default=False)] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="With --quality: held-out problems. Default: the setting's.", show_default=False)] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="With --quality: begin no run that would end later; run again to go on.", show_default=False)] = None,
    folder: Annotated[Path | None, typer.Option(help="With --quality: where starting weights, plans and finished runs are kept. Default: quality/SETTING.", show_default=False)] = None,
    sizes: Annotated[str | None, typer.Option(help="With --codecs: sizes of the tensors, comma-separated. Default: 2MiB,16MiB,64MiB on a CPU, 16MiB,256MiB,1GiB on a GPU.", show_default=False)] = None,
    threads: Threads = None,
    device: Device = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the report as a JSON file, too. With --suite an interrupted run then goes on where it stopped.", show_default=False, callback=check_writable)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """No checkpointing, checkpointing and the plan side by side: times, peaks, gradient error. With --suite: every peer beside them. With --codecs: codecs by themselves. With --quality: whether training under a plan learns as well."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    malloc.steady_malloc()
    of_plans = {"the plan": frozen_plan, "--batch": batch, "--model": model, "--also": also, "--against": against, "--skip-zero-rows": skip_zero_rows, "--suite": suite}
    of_suite = {"--mem-cap": mem_cap, "--heads": heads != HEADS_OF_SUITE, "--peers": peers, "--csv": as_csv, "--png": png}
    if quality:
        if given := [option for option, value in {**of_plans, **of_suite, "--codecs": codecs is not None, "--sizes": sizes, "--repeats": repeats}.items() if value]:
            raise UsageError(f"--quality trains a model of its own under a plan of its own; leave out {', '.join(given)}")
        bench_quality(setting or next(iter(SETTINGS)), pairs=pairs, problems=problems, minutes=minutes, folder=folder, threads=threads, device=device, output=output, parquet=parquet, reporter=reporter)
        return
    repeats = repeats or REPEATS
    of_quality = {"--setting": setting, "--pairs": pairs, "--problems": problems, "--minutes": minutes, "--folder": folder}
    if given := [option for option, value in of_quality.items() if value is not None]:
        raise UsageError(f"{given[0]} belongs to training in pairs; give --quality, too")
    if codecs is not None:
        if given := [option for option, value in of_plans.items() if value]:
            raise UsageError(f"--codecs measures codecs by themselves, without a model; leave out {', '.join(given)}")
        bench_codecs_alone(codecs, sizes, repeats=repeats, threads=threads, device=device, output=output, reporter=reporter)
        return
    if sizes is not None:
        raise UsageError("--sizes are those of tensors for codecs; give --codecs, too")
    of_suite |= {"--parquet": parquet}
    if not suite and (given := [option for option, value in of_suite.items() if value]):
        raise UsageError(f"{given[0]} belongs to the comparison with every peer; give --suite, too")
    if suite and (given := [option for option, value in {"--also": also, "--skip-zero-rows": skip_zero_rows}.items() if value]):
        raise UsageError(f"--suite has methods of its own; leave out {', '.join(given)}")
    if frozen_plan is None:
        frozen_plan = newest(PLANS, "*.json", PlanMismatchError, "make one with `hilore apply`", without=".plan.json")
        reporter.note(f"plan: the newest, {frozen_plan}")
    from hilore_cli.files import load_frozen_plan, save_json

    frozen = load_frozen_plan(frozen_plan)
    batches = load_batches([str(path) for path in batch] if batch else frozen.sources)
    others = {path.name.removesuffix(".json"): load_frozen_plan(path) for path in against or []}
    if suite:
        plans = {frozen_plan.name.removesuffix(".json"): frozen, **others}
        if len(plans) <= len(others):
            raise UsageError(f"--against {frozen_plan}: is the first plan itself; name another file")
        bench_suite(plans, batches, model=model, mem_cap=mem_cap, heads=heads, peers=peers, repeats=repeats, threads=threads, device=device, output=output, as_csv=as_csv, parquet=parquet, png=png, reporter=reporter)
        return
    from hilore_cli.bench import run_bench
    from hilore_cli.workbench import UNIFORM

    further = split_names(also)
    if unknown := set(further) - set(UNIFORM):
        raise UsageError(f"method {sorted(unknown)[0]!r} is not known; --also takes {', '.join(UNIFORM)}")
    set_threads(threads)
    loaded = load_planned_model(model or frozen.model.source, frozen, device=device)
    with reporter.progress() as progress:
        measured = run_bench(loaded, frozen, batches, repeats=repeats, progress=progress, also=further, others=others, skip=skip_zero_rows)
    if output is not None:
        save_json(measured, output)
    reporter.result(bench_view(measured), lambda: measured.model_dump(mode="json"))


def bench_codecs_alone(codecs: str, sizes: str | None, *, repeats: int, threads: int | None, device: str | None, output: Path | None, reporter: Reporter) -> None:
    """What `hilore bench --codecs` does: measure, keep, print."""
    asked = None if sizes is None else [parse_bytes(part) for part in split_names(sizes)]
    if asked == []:
        raise UsageError("--sizes names none; give sizes such as 16MiB,64MiB")
    from hilore_cli.codec_bench import bench_codecs, default_sizes
    from hilore_cli.files import save_json
    from hilore_cli.models import choose_device

    set_threads(threads)
    place = choose_device(device)
    with reporter.progress() as progress:
        measured = bench_codecs(split_names(codecs), device=place, sizes=asked or default_sizes(place), repeats=repeats, progress=progress)
    if output is not None:
        save_json(measured, output)
    reporter.result(codec_bench_view(measured), lambda: measured.model_dump(mode="json"))
