"""The command line: profile -> plan -> apply -> bench, and rollout, show, demo.

    hilore profile --model smollm2-135m --task math
    hilore plan --mem-cap 1.1x-gc --risk 0.015
    hilore apply
    hilore bench

stdout is for results (one JSON document with --json), stderr for notes, progress and errors. An error is one line and an exit code
(errors.py). torch, transformers, pandas and the solver are imported inside the commands: `hilore --help` must answer at once.
What it does NOT do: measure, plan or bind anything itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.text import Text

import hilore_cli
from hilore_cli import report
from hilore_cli.errors import HiloreError, InfeasibleError, PlanMismatchError, ProfileError, UsageError
from hilore_cli.malloc import steady_malloc
from hilore_cli.report import Reporter
from hilore_cli.sizes import parse_bytes, parse_cap

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch

PROFILES = Path("profiles")
PLANS = Path("plans")
SHIPPED_MODEL = "smollm2-135m"
SHIPPED_TASK = "math"
SHIPPED_BATCHES = ("smollm2-math.parquet", "smollm2-math-calibration-0.parquet", "smollm2-math-calibration-1.parquet")
SHIPPED_HELDOUT = "smollm2-math-heldout.parquet"
EXPOSURE_RULES = ("logits", "squared", "scalar", "tokens")
INTERRUPTED = 130

CommandLineError: type[Exception] = typer.BadParameter.__base__
"""Unknown options and the like. typer carries click inside since 0.2x, so there is no click to take UsageError from."""

app = typer.Typer(
    name="hilore",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Profile one GRPO step and compile a plan: which activations to store, compress or recompute under a memory cap and a gradient-error budget.",
    epilog="First contact: hilore demo",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; tables go to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Default: torch's own.", show_default=False)]
BatchFiles = Annotated[list[Path] | None, typer.Option("--batch", help="Recorded micro-batches of one update: file of a trainer (hilore capture) or of hilore rollout, or a folder of them. May be repeated.", show_default=False)]
Device = Annotated[str | None, typer.Option("--device", envvar="HILORE_DEVICE", help="cpu or cuda. Default: the GPU if there is one.", show_default=False)]
ModelName = Annotated[str | None, typer.Option("--model", help="Preset, folder or hub id. Default: the plan's.", show_default=False)]


def main() -> NoReturn:
    """Console entry: runs the command, turns what went wrong into one line and an exit code."""
    # read once, when torch is loaded: kineto prints two lines at each memory trace, and torch's allocator one for a block
    # that was there before the trace
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch's deterministic mode, in which gradients are compared, refuses matrix products
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while another process has their core cost a step tenfold
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|torch")
    warnings.showwarning = lambda message, *_: report.print_warning(str(message))
    try:
        code = typer.main.get_command(app)(prog_name="hilore", standalone_mode=False)
    except HiloreError as error:
        report.print_error(str(error))
        code = error.exit_code
    except CommandLineError as error:
        report.print_error(f"{error.format_message().rstrip('.')}; see: hilore --help")
        code = UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `hilore show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report.print_error(f"{where}{error.strerror or error}; check the path, its permissions and the free space")
        code = HiloreError.exit_code
    if code == INTERRUPTED:
        report.print_error("interrupted; `hilore profile` goes on where it stopped when the same command is run again")
    raise SystemExit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hilore {hilore_cli.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# -------------------------------------------------------------------------------------------------------------- commands


@app.command("profile")
def profile_command(
    model: Annotated[str, typer.Option(help="Preset (smollm2-135m, llama-8b, ...), folder in Hugging Face format, or hub id.")],
    task: Annotated[str, typer.Option(help="math, or the name of a reasoning-gym generator.")] = SHIPPED_TASK,
    name: Annotated[str | None, typer.Option(help="Name of the folder in profiles/. Default: <model>-<task>.", show_default=False)] = None,
    batch: BatchFiles = None,
    tokens: Annotated[int | None, typer.Option(min=64, help="Without --batch: about so many tokens (padding included) are sampled. Default: 1024.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    lora: Annotated[int | None, typer.Option(min=1, help="LoRA rank; without it everything is trained.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, of LoRA and of the measurements.")] = 0,
    codecs: Annotated[str | None, typer.Option(help="Codecs to measure, comma-separated; empty: none. Default: fbgemm-int8,fbgemm-int4 on a CPU, int8,int4 on a GPU.", show_default=False)] = None,
    head: Annotated[str, typer.Option(help="Loss head: chunked, full or one-pass.")] = "chunked",
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates of each method.")] = 3,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure one GRPO update: bytes, times and risk of every activation. Writes profiles/<name>/."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    steady_malloc()
    name = file_name(name) if name is not None else file_safe(f"{model.rstrip('/').rsplit('/', 1)[-1]}-{task}")
    from hilore_cli.codecs import default_codecs, get_codec
    from hilore_cli.grpo import GrpoConfig
    from hilore_cli.models import choose_device, load_model, resolve_model
    from hilore_cli.profiler import ProfileRequest, profile_update

    chosen = None if codecs is None else split_names(codecs)
    for codec in chosen or ():
        get_codec(codec)
    config, place = GrpoConfig(head=head), choose_device(device)  # an unknown head is told before a model is loaded
    set_threads(threads)
    shipped = model == SHIPPED_MODEL and task == SHIPPED_TASK and not batch and tokens is None
    if not batch and not shipped:
        check_task(task)
    resolve_model(model)
    sources = [str(path) for path in batch] if batch else list(SHIPPED_BATCHES)
    if batch or shipped:
        batches = load_batches(sources)
        if shipped:
            reporter.note(f"micro-batches: {len(batches)} that come with hilore for this model and task, of up to {max(mb.tokens for _, mb in batches)} tokens")
    loaded = load_model(model, dtype=dtype, lora_rank=lora, seed=seed, device=place)
    if chosen is None:
        chosen = default_codecs(place)
    folder = PROFILES / name
    if not batch and not shipped:
        batches = sample_batches(loaded, model, task, tokens=tokens or 1024, seed=seed, name=name, reporter=reporter)
        sources = [source for source, _ in batches]
    request = ProfileRequest(name=name, source=model, task=task, sources=sources, codecs=chosen, config=config, seed=seed, repeats=repeats)
    with reporter.progress() as progress:
        profile = profile_update(loaded, batches, request, folder=folder, progress=progress)
    reporter.result(report.profile_view(profile), lambda: profile_document(folder))
    reporter.note(f"written: {folder}/; next: hilore plan {folder} --mem-cap 1.1x-gc --risk 0.015")


@app.command("plan")
def plan_command(
    profile: Annotated[Path | None, typer.Argument(help="Folder that hilore profile wrote. Default: the newest in profiles/.", show_default=False)] = None,
    mem_cap: Annotated[str, typer.Option(help="Cap on the peak of a whole update: 1.1x-gc (times the checkpointing peak), 0.9x-none, or 40GiB.")] = "1.1x-gc",
    risk: Annotated[float, typer.Option(help="Largest relative gradient error; 0 gives an exact plan.")] = 0.015,
    codecs: Annotated[str | None, typer.Option(help="Codecs to use, comma-separated. Default: those of the profile.", show_default=False)] = None,
    max_patterns: Annotated[int, typer.Option(min=1, help="Most distinct patterns of a variant; each is compiled once.")] = 8,
    variants: Annotated[bool, typer.Option("--variants/--one-variant", help="Variants by size and exposure of the micro-batch, where the profile has several; or one for all.")] = True,
    weigh: Annotated[str | None, typer.Option(help="What a micro-batch's part in the update is taken to go with: logits (sum of (c (1 - p))^2), squared (sum of c^2), scalar ((sum of |c|)^2), tokens (exposure ignored). Default: logits where log-probabilities were recorded, else squared.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the plan. Default: the profile's.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: plans/<name>.plan.json.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Solve for the fastest step under a memory cap and a gradient-error budget. Writes plans/<name>.plan.json."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    cap = parse_cap(mem_cap)
    if not (math.isfinite(risk) and risk >= 0):
        raise UsageError(f"risk {risk}: must be a relative gradient error of 0 or more, such as 0.015")
    if profile is None:
        profile = newest(PROFILES, "*/profile.json", ProfileError, "make one with `hilore profile`").parent
        reporter.note(f"profile: the newest, {profile}")
    if weigh is not None and weigh not in EXPOSURE_RULES:
        raise UsageError(f"weigh {weigh!r}: unknown; use one of {', '.join(EXPOSURE_RULES)}")
    from hilore_cli.planner import solve_plan
    from hilore_cli.schema import load_profile, save_json

    measured = load_profile(profile)
    chosen = list(measured.codecs) if codecs is None else split_names(codecs)
    try:
        plan = solve_plan(measured, cap=cap, risk=risk, codecs=chosen, name=file_name(name or measured.name), max_patterns=max_patterns, variants=variants, rule=weigh)
    except InfeasibleError as error:
        if as_json:
            print(json.dumps(infeasible_document(error), indent=1))
        raise
    path = output or PLANS / f"{plan.name}.plan.json"
    save_json(plan, path)
    gained = {"speedup_vs_gc": plan.predicted.speedup_vs_gc, "recovered": plan.predicted.recovered, "path": str(path)}
    reporter.result(report.plan_view(plan), lambda: plan.model_dump(mode="json") | gained)
    reporter.note(f"written: {path}; next: hilore apply {path}")


@app.command("apply")
def apply_command(
    plan: Annotated[Path | None, typer.Argument(help="File that hilore plan wrote. Default: the newest in plans/.", show_default=False)] = None,
    model: ModelName = None,
    batch: BatchFiles = None,
    heldout: Annotated[list[Path] | None, typer.Option(help="Micro-batches that were not profiled, to judge the gradient error on. May be repeated.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Name of the frozen plan. Default: the plan's.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: plans/<name>.json.", show_default=False)] = None,
    emit_anyway: Annotated[bool, typer.Option("--emit-anyway", help="Write the plan even if the dry run misses its cap or risk.")] = False,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Bind a plan to a model: dry-run it, compare with the prediction, freeze it. Writes plans/<name>.json."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    steady_malloc()
    if plan is None:
        plan = newest(PLANS, "*.plan.json", PlanMismatchError, "make one with `hilore plan`")
        reporter.note(f"plan: the newest, {plan}")
    from hilore_cli.schema import load_plan_file, save_json

    solved = load_plan_file(plan)
    name = None if name is None else file_name(name)
    sources = [str(path) for path in batch] if batch else solved.sources
    judges = [str(path) for path in heldout or []]
    if not judges and sources == list(SHIPPED_BATCHES):
        judges = [SHIPPED_HELDOUT]
        reporter.note(f"gradient error: judged on {SHIPPED_HELDOUT}, which was not profiled")
    batches = [micro_batch for _, micro_batch in load_batches(sources)]
    unseen = [micro_batch for _, micro_batch in load_batches(judges)]
    from hilore_cli.bench import apply_plan

    set_threads(threads)
    loaded = load_planned_model(model or solved.model.source, solved, device=device)
    with reporter.progress() as progress:
        frozen = apply_plan(loaded, solved, batches, heldout=unseen, emit_anyway=emit_anyway, progress=progress, name=name)
    path = output or PLANS / f"{frozen.name}.json"
    save_json(frozen, path)
    reporter.result(report.frozen_view(frozen, path=str(path), patterns=False), lambda: frozen.model_dump(mode="json") | {"path": str(path)})
    reporter.note(f"written: {path}; next: hilore bench {path}")


@app.command("bench")
def bench_command(
    frozen_plan: Annotated[Path | None, typer.Argument(help="File that hilore apply wrote. Default: the newest in plans/.", show_default=False)] = None,
    batch: BatchFiles = None,
    model: ModelName = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved timed updates of each method, or samples of each codec.")] = 5,
    also: Annotated[str, typer.Option(help="Further methods, comma-separated: store, recompute (the runtime's two uniform plans).")] = "",
    against: Annotated[list[Path] | None, typer.Option(help="Another frozen plan of the same model, as a row of its own. May be repeated.", show_default=False)] = None,
    skip_zero_rows: Annotated[bool, typer.Option("--skip-zero-rows", help="Also run checkpointing and the plan without the rows that have no gradient.")] = False,
    codecs: Annotated[str | None, typer.Option(help="Instead of a plan: GB/s of codecs beside a plain copy, and the width of product below which recomputing is cheaper. all (one of each kind), or names, comma-separated.", show_default=False)] = None,
    sizes: Annotated[str | None, typer.Option(help="With --codecs: sizes of the tensors, comma-separated. Default: 2MiB,16MiB,64MiB on a CPU, 16MiB,256MiB,1GiB on a GPU.", show_default=False)] = None,
    threads: Threads = None,
    device: Device = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the report as a JSON file, too.", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """No checkpointing, checkpointing and the plan side by side: times, peaks, gradient error. With --codecs: codecs by themselves."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    steady_malloc()
    if codecs is not None:
        of_plans = {"the plan": frozen_plan, "--batch": batch, "--model": model, "--also": also, "--against": against, "--skip-zero-rows": skip_zero_rows}
        if given := [option for option, value in of_plans.items() if value]:
            raise UsageError(f"--codecs measures codecs by themselves, without a model; leave out {', '.join(given)}")
        bench_codecs_alone(codecs, sizes, repeats=repeats, threads=threads, device=device, output=output, reporter=reporter)
        return
    if sizes is not None:
        raise UsageError("--sizes are those of tensors for codecs; give --codecs, too")
    if frozen_plan is None:
        frozen_plan = newest(PLANS, "*.json", PlanMismatchError, "make one with `hilore apply`", without=".plan.json")
        reporter.note(f"plan: the newest, {frozen_plan}")
    from hilore_cli.schema import load_frozen_plan, save_json

    frozen = load_frozen_plan(frozen_plan)
    batches = load_batches([str(path) for path in batch] if batch else frozen.sources)
    others = {path.name.removesuffix(".json"): load_frozen_plan(path) for path in against or []}
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
    reporter.result(report.bench_view(measured), lambda: measured.model_dump(mode="json"))


def bench_codecs_alone(codecs: str, sizes: str | None, *, repeats: int, threads: int | None, device: str | None, output: Path | None, reporter: Reporter) -> None:
    """What `hilore bench --codecs` does: measure, keep, print."""
    asked = None if sizes is None else [parse_bytes(part) for part in split_names(sizes)]
    if asked == []:
        raise UsageError("--sizes names none; give sizes such as 16MiB,64MiB")
    from hilore_cli.codec_bench import bench_codecs, default_sizes
    from hilore_cli.models import choose_device
    from hilore_cli.schema import save_json

    set_threads(threads)
    place = choose_device(device)
    with reporter.progress() as progress:
        measured = bench_codecs(split_names(codecs), device=place, sizes=asked or default_sizes(place), repeats=repeats, progress=progress)
    if output is not None:
        save_json(measured, output)
    reporter.result(report.codec_bench_view(measured), lambda: measured.model_dump(mode="json"))


@app.command("rollout")
def rollout_command(
    model: Annotated[str, typer.Option(help="Preset, folder or hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")],
    task: Annotated[str, typer.Option(help="math, or the name of a reasoning-gym generator.")] = SHIPPED_TASK,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to sample.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, help="Completions per prompt.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the task and of the sampling.")] = 0,
    tokens: Annotated[int | None, typer.Option(min=64, help="At most about so many tokens (padding included) in the micro-batch.", show_default=False)] = None,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sample completions of a task, score them, and record them as one micro-batch for hilore profile --batch."""
    reporter = Reporter(as_json=as_json, quiet=quiet)
    if not temperature > 0:
        raise UsageError(f"temperature {temperature}: must be above 0")
    check_task(task)
    from hilore_cli.batches import save_micro_batch
    from hilore_cli.models import choose_device, load_model, load_tokenizer
    from hilore_cli.rollout import generate_rollouts
    from hilore_cli.tasks import load_task

    set_threads(threads)
    place = choose_device(device)
    items = load_task(task, seed=seed, size=prompts)
    loaded, tokenizer = load_model(model, device=place), load_tokenizer(model)
    room = {} if tokens is None else row_room(tokens, group_size=group_size, max_new_tokens=max_new_tokens)
    reporter.note(f"sampling {prompts} x {group_size} completions")
    micro_batch = generate_rollouts(loaded, tokenizer, items, prompts=prompts, group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, meta={"model": model}, **room)[0]
    save_micro_batch(output, micro_batch)
    reporter.result(report.batches_view([(output.name, micro_batch)]), lambda: batch_document(micro_batch))
    reporter.note(f"written: {output}; next: hilore profile --model {model} --task {task} --batch {output}")


@app.command("capture")
def capture_command(trainer: Annotated[str, typer.Argument(help="trl, verl, openrlhf, slime, or own.")]) -> None:
    """Print the few lines that make a trainer record the micro-batches of an update, for hilore profile --batch."""
    from hilore_cli.captured import recipe

    print(recipe(trainer).strip())


@app.command("show")
def show_command(
    path: Annotated[Path, typer.Argument(help="A profile folder, a plan, a frozen plan, a micro-batch or a benchmark.")],
    as_json: Json = False,
) -> None:
    """Print any of hilore's files."""
    reporter = Reporter(as_json=as_json, quiet=as_json)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give a profile folder, a plan, a micro-batch or a benchmark")
    if (path.is_dir() and (path / "profile.json").exists()) or path.name == "profile.json":
        from hilore_cli.schema import load_profile

        folder = path if path.is_dir() else path.parent
        profile = load_profile(folder)
        reporter.result(report.profile_view(profile), lambda: profile_document(folder))
    elif path.suffix == ".json":
        show_json(path, reporter)
    else:
        batches = load_batches([str(path)])
        reporter.result(report.batches_view(batches), lambda: [batch_document(micro_batch) for _, micro_batch in batches])


@app.command("demo")
def demo_command(
    folder: Annotated[Path, typer.Option(help="Folder to write profiles/ and plans/ into.")] = Path("."),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: noisier figures.")] = False,
) -> None:
    """The whole job on SmolLM2-135M and recorded rollouts of a math task: profile, plan, apply, bench."""
    from hilore_cli.models import resolve_model

    resolve_model(SHIPPED_MODEL)
    load_batches([*SHIPPED_BATCHES, SHIPPED_HELDOUT])
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{SHIPPED_MODEL}-{SHIPPED_TASK}"
    steps = [
        ("Measure one GRPO update: time, bytes and risk of each activation in 30 layers.", f"profile --model {SHIPPED_MODEL} --task {SHIPPED_TASK} --codecs fbgemm-int8 --repeats {1 if quick else 2}"),
        ("Solve: what to store, compress and recompute for the fastest step under 1.1 x the peak of gradient checkpointing (GC).", f"plan profiles/{name} --mem-cap 1.1x-gc --risk 0.015"),
        ("Bind the plan to the model: run one update, compare peak and gradient error with the prediction, on rollouts that were not profiled.", f"apply plans/{name}.plan.json"),
        ("Run no checkpointing, GC and the plan side by side, on the rollouts that were not profiled.", f"bench plans/{name}.json --batch {SHIPPED_HELDOUT} --repeats {2 if quick else 3}"),
    ]
    started = time.monotonic()
    for number, (what, command) in enumerate(steps, 1):
        before = time.monotonic()
        say(f"\n[{number}/{len(steps)}] {what}", style="bold")
        say(f"$ hilore {command}", style="cyan")
        # each step is the very command, in a process of its own: its figures are those that the user gets
        finished = subprocess.run([sys.executable, "-m", "hilore_cli", *command.split()], cwd=folder, check=False)
        if finished.returncode:
            raise typer.Exit(finished.returncode)
        say(f"({time.monotonic() - before:.0f} s)", style="dim")
    say("")
    report.print_view(report.trainer_lines(f"plans/{name}.json"))
    say(f"\nThe whole demo took {time.monotonic() - started:.0f} s. Look closer with: hilore show plans/{name}.json")


# ------------------------------------------------------------------------------------------------------------ micro-batches


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


def row_room(tokens: int, *, group_size: int, max_new_tokens: int | None = None) -> dict[str, int]:
    """Rows and widths that fill about `tokens` tokens: rows of up to 256 tokens, half of them for the completion."""
    groups = max(1, tokens // (group_size * 256))
    width = tokens // (groups * group_size)
    new = max_new_tokens or max(width // 2, 1)
    if width - new < 1:
        raise UsageError(f"{tokens} tokens leave no room for a prompt in {group_size} rows with {new} new tokens; ask for more tokens")
    return {"rows_per_micro_batch": groups * group_size, "max_prompt_tokens": width - new} | ({} if max_new_tokens else {"max_new_tokens": new})


# ------------------------------------------------------------------------------------------------------------------ models


def load_planned_model(source: str, planned: Any, *, device: str | None) -> Any:
    """The model that a plan (solved or frozen) is for: its dtype, attention implementation and LoRA rank."""
    from hilore_cli.models import choose_device, load_model

    identity = planned.model
    return load_model(source, dtype=identity.dtype, attn_implementation=identity.attn_implementation, lora_rank=identity.lora_rank, device=choose_device(device))


def set_threads(count: int | None) -> None:
    import torch

    if count is not None:
        torch.set_num_threads(count)


# --------------------------------------------------------------------------------------------------------- names and files


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


def newest(folder: Path, pattern: str, error: type[HiloreError], remedy: str, *, without: str | None = None) -> Path:
    """The file changed last, ties by name. Raises `error` when there is none."""
    found = [path for path in folder.glob(pattern) if without is None or not path.name.endswith(without)]
    if not found:
        raise error(f"{folder}/: holds no {pattern}; {remedy}")
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def show_json(path: Path, reporter: Reporter) -> None:
    """A plan, frozen plan or benchmark by the `format` it names. Raises PlanMismatchError, UsageError."""
    from hilore_cli.schema import load_bench_report, load_codec_bench_report, load_frozen_plan, load_plan_file

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kind = document.get("format") if isinstance(document, dict) else None
    except ValueError as error:
        raise UsageError(f"{path}: not a whole JSON document ({error}); it is cut short or not a file of hilore") from error
    if kind == "hilore-plan":
        plan = load_plan_file(path)
        reporter.result(report.plan_view(plan), lambda: plan.model_dump(mode="json"))
    elif kind == "hilore-frozen-plan":
        frozen = load_frozen_plan(path)
        reporter.result(report.frozen_view(frozen, path=str(path), patterns=True), lambda: frozen.model_dump(mode="json"))
    elif kind == "hilore-bench":
        measured = load_bench_report(path)
        reporter.result(report.bench_view(measured), lambda: measured.model_dump(mode="json"))
    elif kind == "hilore-codec-bench":
        codec_report = load_codec_bench_report(path)
        reporter.result(report.codec_bench_view(codec_report), lambda: codec_report.model_dump(mode="json"))
    else:
        raise UsageError(f"{path}: format {kind!r} is none of hilore's; give a profile folder, a plan, a micro-batch or a benchmark")


def profile_document(folder: Path) -> dict[str, Any]:
    """profile.json as it is on disk; the tables that it names lie beside it."""
    return json.loads((folder / "profile.json").read_text(encoding="utf-8")) | {"path": str(folder)}


def batch_document(micro_batch: MicroBatch) -> dict[str, Any]:
    from hilore_cli.exposure import to_dict

    return {
        "format": "hilore-micro-batch",
        "rows": micro_batch.rows,
        "length": micro_batch.shape[1],
        "layout": micro_batch.layout,
        "tokens": micro_batch.tokens,
        "real_tokens": micro_batch.real_tokens,
        "loss_tokens": micro_batch.loss_tokens,
        "rewards": None if micro_batch.rewards is None else micro_batch.rewards.tolist(),
        "largest_advantages": [float(row[row.abs().argmax()]) for row in micro_batch.advantages],
        "loss": to_dict(micro_batch.loss),
        "readiness": micro_batch.readiness.value,
        "weights": {rule: micro_batch.weight(rule) for rule in EXPOSURE_RULES},
        "meta": micro_batch.meta,
    }


def infeasible_document(error: InfeasibleError) -> dict[str, Any]:
    return {
        "error": str(error),
        "exit_code": error.exit_code,
        "least_peak_bytes": error.least_peak_bytes,
        "least_peak_at_risk_bytes": error.least_peak_at_risk_bytes,
        "least_risk": error.least_risk,
        "binding_moment": error.binding_moment,
    }


def say(text: str, style: str = "") -> None:
    report.print_view(Text(text, style=style))
