"""Tables, notes and progress on the terminal; with cli.py the only file that knows rich.

Every `*_view` is a pure function from a record to something rich can print. Records are imported for type checkers only:
`hilore --help` loads this file, and must not wait for pydantic or torch.
What it does NOT do: read or write files, or measure.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hilore_cli.sizes import format_bytes, format_gain, format_us

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch
    from hilore_cli.schema import BenchReport, CodecBenchReport, CodecPace, FrozenPlan, Pattern, Plan, Profile, Variant

MOST_UNITS_SHOWN = 16

CLONE_GOAL = 0.5
"""What a codec is to reach of the speed of a clone on a CPU."""
BANDWIDTH_GOAL = 0.8
"""What a codec that rounds to the nearest is to reach of the bandwidth of a clone on a GPU."""

Progress = Callable[[str, int, int], None]
"""Told of (what is being done, done, of how many)."""


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Where one command writes. stdout is for the result: its table, or with `as_json` one JSON document."""

    as_json: bool
    quiet: bool

    def note(self, text: str) -> None:
        """One line on stderr, for people."""
        if not self.quiet:
            Console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)

    def result(self, view: RenderableType, document: Callable[[], Any]) -> None:
        """The result; its table goes to stderr when stdout holds the JSON document."""
        if not self.as_json:
            Console().print(view)
            return
        if not self.quiet:
            Console(stderr=True).print(view)
        sys.stdout.write(json.dumps(document(), indent=1, allow_nan=False) + "\n")
        sys.stdout.flush()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress bar while stderr is a terminal, else nothing; either way the place where a swallowed Ctrl-C comes up again."""
        interrupt = Interrupt()
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            with self._bar() as show:
                yield lambda what, done, total: (interrupt.check(), show(what, done, total))
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def _bar(self) -> Iterator[Progress]:
        if self.quiet or not sys.stderr.isatty():
            yield lambda what, done, total: None
            return
        # imported here: 40 ms that `hilore --help` need not wait for
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task("starting", total=1)
            yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)


class Interrupt:
    """Handler of Ctrl-C. Python drops what is raised inside a callback of torch's own: then it is raised at the next progress."""

    def __init__(self) -> None:
        self._seen = False

    def __call__(self, *_: object) -> None:
        self._seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._seen:
            raise KeyboardInterrupt


def print_view(view: RenderableType) -> None:
    """Print on stdout, and do not leave it in a buffer: other processes write there too."""
    Console().print(view)
    sys.stdout.flush()


def print_warning(message: str) -> None:
    """One yellow line on stderr."""
    Console(stderr=True).print(Text(f"hilore: {' '.join(message.split())}", style="yellow"), soft_wrap=True)


def print_error(message: str) -> None:
    """One red line on stderr."""
    line = " ".join(message.split())
    Console(stderr=True).print(Text(f"hilore: {line}", style="bold red"), soft_wrap=True)


# ----------------------------------------------------------------------------------------------------------------- views


def profile_view(profile: Profile) -> RenderableType:
    """Peaks and times of the whole-step methods, units by risk, and the memory account."""
    times, peaks = profile.times, profile.peaks
    measured_peaks = {"none": peaks.none_bytes, "gc": peaks.gc_bytes}
    methods = _table("method", "step >", "vs GC >", "peak >", "vs GC >", title=f"whole updates, median of {times.repeats}, {_threads(times.threads)}")
    labels = {"none": "no checkpointing", "gc": "checkpointing (GC)", "recompute": "hilore, all recomputed"}
    for key, label in labels.items():
        step_us, peak_bytes = getattr(times, f"{key}_us"), measured_peaks.get(key)
        size = ("", "") if peak_bytes is None else (format_bytes(peak_bytes), f"{peak_bytes / peaks.gc_bytes:.3f} x")
        methods.add_row(label, format_us(step_us), format_gain(times.gc_us / step_us), *size)
    account = _table("memory account", "bytes >")
    for key, value in profile.account.model_dump().items():
        account.add_row(key.removesuffix("_bytes"), format_bytes(value))
    batch = profile.batch
    head = _lines(
        f"profile {profile.name}: {profile.model.source}, {profile.model.layers} layers, {profile.model.dtype}, head {profile.head}",
        f"micro-batch {batch.source}: task {batch.task}, {batch.rows} rows x {batch.length} tokens = {batch.tokens}, {batch.loss_tokens} loss tokens, group size {batch.group_size}",
    )
    return _stack(head, methods, units_view(profile), account, *update_view(profile), *calibration_view(profile), *_fallback_lines(profile))


def update_view(profile: Profile) -> list[RenderableType]:
    """The update's micro-batches: how well their exposure tells the size of their gradients before the forward."""
    rows = profile.micro_batches
    if len(rows) < 2:
        return []
    rule = "squared" if any(row.logits is None for row in rows) else "logits"
    table = _table("micro-batch", "tokens >", "loss tokens >", "exposure >", "gradient norm^2 >", title=f"the update's micro-batches: shares in exposure (rule {rule}) and in squared gradient norms")
    exposure, norms = sum(row.weight(rule) for row in rows) or 1.0, sum(row.gradient_norm**2 for row in rows)
    for row in rows:
        table.add_row(_short(row.source), str(row.tokens), str(row.loss_tokens), _tenths(row.weight(rule) / exposure), _tenths(row.gradient_norm**2 / norms))
    return [table]


def calibration_view(profile: Profile) -> list[RenderableType]:
    """Predicted against measured error of every plan that was tried, and each codec's kappa."""
    if not profile.calibration:
        return []
    table = _table("codec", "plan tried", "micro-batch", "predicted >", "measured >", "ratio >", title="calibration: gradient error")
    for pair in profile.calibration:
        predicted = math.sqrt(profile.kappa(pair.codec) * pair.predicted_rho2)
        table.add_row(pair.codec, pair.plan, _short(pair.micro_batch) if pair.heldout else f"{_short(pair.micro_batch)} (profiled)", f"{predicted:.2e}", f"{pair.measured_rel_error:.2e}", f"{predicted / pair.measured_rel_error:.2f}" if pair.measured_rel_error else "-")
    words = [f"{k.codec}: kappa {k.value:.3g} (predicted error^2 = kappa x sum of rho^2), {_percent(k.quantile)} limit of {k.pairs} pairs on {k.micro_batches} micro-batches; {_percent(k.coverage)} of them below the limit that the others give" for k in profile.kappas]
    return [table, _lines(*words)]


def units_view(profile: Profile) -> RenderableType:
    """One row per unit and codec, over all layers together, riskiest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in profile.units:
        entry = sums.setdefault((row.unit, row.codec), [0.0, 0, 0, 0.0])
        for position, value in enumerate((row.rho2, row.nbytes, row.payload_bytes, row.compress_us + row.decompress_us)):
            entry[position] += value
    table = _table("unit, in all layers", "codec", "grad error >", "bytes >", "kept >", "codec time >", title="units by risk")
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    for (unit, codec), (rho2, nbytes, payload, us) in ordered[:MOST_UNITS_SHOWN]:
        table.add_row(unit, codec, f"{rho2**0.5:.2e}", format_bytes(nbytes), format_bytes(payload), format_us(us))
    rest = len(ordered) - MOST_UNITS_SHOWN
    return Group(table, *([_lines(f"and {rest} calmer ones")] if rest > 0 else []))


def plan_view(plan: Plan) -> RenderableType:
    """What the plan gains and pays against checkpointing, its patterns, alternatives, and how good it is known to be."""
    predicted, budgets = plan.predicted, plan.budgets
    head = _lines(
        f"plan {plan.name} for {plan.model.source}, from profile {plan.profile}",
        f"cap {budgets.mem_cap} = {format_bytes(budgets.cap_bytes)}, risk {budgets.risk:g}, codecs {', '.join(budgets.codecs) or 'none'}",
    )
    table = _table("predicted", "GC >", "plan >", "no checkpointing >")
    table.add_row("step", format_us(predicted.gc_us), f"{format_us(predicted.step_us)} ({format_gain(predicted.speedup_vs_gc)})", f"{format_us(predicted.none_us)} ({format_gain(predicted.gc_us / predicted.none_us)})")
    table.add_row("recovered", "0 %", _percent(predicted.recovered), "100 %")
    table.add_row("peak", format_bytes(predicted.gc_peak_bytes), f"{format_bytes(predicted.peak_bytes)} ({predicted.peak_bytes / predicted.gc_peak_bytes:.3f} x)", f"{format_bytes(predicted.none_peak_bytes)} ({predicted.none_peak_bytes / predicted.gc_peak_bytes:.3f} x)")
    table.add_row("gradient error", "0", f"{predicted.rel_error:.2e} (budget {budgets.risk:g})", "0")
    costs = _lines(
        f"pays {format_us(predicted.recompute_us)} of recomputation and {format_us(predicted.codec_us)} of codecs; keeps {format_bytes(predicted.stored_bytes)}, of which {format_bytes(predicted.compressed_bytes)} compressed",
        f"the cap binds at: {predicted.binding_moment}",
    )
    solver = plan.solver
    quality = _lines(f"{solver.solver}: {solver.status}; {format_us(solver.objective_us)} against a lower bound of {format_us(solver.bound_us)}, a gap of {100 * solver.gap_of_step:.2f} % of the step; {solver.candidates} candidate patterns")
    return _stack(head, table, costs, patterns_view(plan.patterns, plan.layers), *variants_view(plan), *_alternatives(plan), quality)


def variants_view(plan: Plan) -> list[RenderableType]:
    """The variants of a plan that has several, and what they do to the profiled update together."""
    if len(plan.variants) < 2:
        return []
    table = _table("variant for", "micro-batches >", "patterns >", "step >", "peak >", "grad error >", title=f"variants, by tokens and by exposure (rule {plan.budgets.exposure_rule}) relative to the update's mean")
    for variant in plan.variants:
        table.add_row(variant.label, str(variant.micro_batches), str(len(set(variant.layers))), format_us(variant.step_us), format_bytes(variant.peak_bytes), f"{variant.rel_error:.2e}")
    update = plan.update
    words = f"the update's {update.micro_batches} micro-batches: {format_us(update.step_us)} against {format_us(update.gc_us)} with GC ({format_gain(update.gc_us / update.step_us)}), {_percent(update.recovered)} recovered, gradient error of the update {update.rel_error:.2e}"
    return [table, _lines(words)]


def patterns_view(patterns: Mapping[str, Pattern], layers: Sequence[str]) -> RenderableType:
    """Which layers follow which pattern, and each pattern in words."""
    table = _table("pattern", "layers", "what backward gets")
    for name, pattern in patterns.items():
        members = [index for index, used in enumerate(layers) if used == name]
        if members:
            table.add_row(name, f"{ranges(members)} ({len(members)})", pattern_words(pattern))
    return table


def pattern_words(pattern: Pattern) -> str:
    """`int8: mlp (gate_proj.mm, up_proj.mm); store: self_attn (sdpa.lse); recompute: the rest`."""
    units: dict[str, list[str]] = {}
    for unit, action in pattern.actions.items():
        units.setdefault(action.removeprefix("compress:"), []).append(unit)
    parts = [f"{action}: {_by_module(names)}" for action, names in sorted(units.items())]
    return "; ".join([*parts, f"{pattern.default}: {'the rest' if parts else 'everything'}"])


def _by_module(units: Sequence[str]) -> str:
    """["add", "mlp.a", "mlp.b.c"] -> 'add, mlp (a, b.c)'."""
    members: dict[str, list[str]] = {}
    for unit in sorted(units):
        module, _, rest = unit.partition(".")
        members.setdefault(module, []).extend([rest] if rest else [])
    return ", ".join(f"{module} ({', '.join(rests)})" if rests else module for module, rests in members.items())


def ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def frozen_view(frozen: FrozenPlan, *, path: str, patterns: bool) -> RenderableType:
    """Predicted against measured, what the plan is bound to, its patterns if asked for, and how a trainer loads it."""
    predicted, measured, budgets = frozen.predicted, frozen.measured, frozen.budgets
    head = _lines(
        f"frozen plan {frozen.name}, digest {frozen.digest}: {frozen.model.architecture}, {frozen.model.layers} layers, {frozen.model.dtype}, {frozen.model.attn_implementation}",
        f"{len(frozen.variants)} variant{'s' if len(frozen.variants) > 1 else ''}, micro-batches of up to {max(v.max_tokens for v in frozen.variants)} tokens; above, every layer is recomputed",
    )
    table = _table("dry run", "predicted >", "measured >", "allowed >")
    table.add_row("peak", format_bytes(predicted.peak_bytes), format_bytes(measured.peak_bytes) if measured else "-", f"{format_bytes(budgets.cap_bytes)} ({budgets.mem_cap})")
    table.add_row("GC's peak", format_bytes(predicted.gc_peak_bytes), format_bytes(measured.gc_peak_bytes) if measured else "-", "")
    table.add_row("gradient error", f"{frozen.update.rel_error:.2e}", f"{measured.rel_error:.2e}" if measured else "-", f"{budgets.risk:g}")
    table.add_row("step", f"{format_us(predicted.step_us)} ({format_gain(predicted.speedup_vs_gc)} vs GC)", "hilore bench", "")
    tables = [_variant_patterns(frozen, variant) for variant in frozen.variants] if patterns else []
    return _stack(head, table, *tables, trainer_lines(path))


def _variant_patterns(frozen: FrozenPlan, variant: Variant) -> RenderableType:
    view = patterns_view(frozen.patterns, variant.layers)
    return view if len(frozen.variants) == 1 else Group(_lines(f"{variant.label}:"), view)


def trainer_lines(path: str) -> RenderableType:
    """The three lines that a trainer needs."""
    return Group(
        _lines("in the trainer:"),
        Text(f'    from hilore_cli import attach, load_plan\n    with attach(model, load_plan("{path}")):\n        trainer.train()', style="bold"),
    )


def bench_view(report: BenchReport) -> RenderableType:
    """The methods of a benchmark side by side, and predicted against measured. At one thread of a CPU the ratios are of CPU time, which is steadier."""
    one_thread = report.clock == "cpu"
    place = report.machine.cpu if report.machine.device == "cpu" else report.machine.device
    head = _lines(
        f"plan {report.plan} on {place}, {_threads(report.machine.threads)}, torch {report.machine.torch}, {report.date}",
        f"{_batches(report)}; {report.repeats} interleaved repeats, ratios of {'CPU time' if one_thread else 'wall time'} paired",
    )
    table = _table("method", "step >", "vs GC >", "(interval) >", "recovered >", "peak >", "x GC >", "grad error >")
    gc_peak = {row.name: row.peak_bytes for row in report.methods}["gc"]
    for row in report.methods:
        gain, low, high = (row.cpu_speedup_vs_gc, row.cpu_speedup_low, row.cpu_speedup_high) if one_thread else (row.speedup_vs_gc, row.speedup_low, row.speedup_high)
        interval = f"{format_gain(low)}..{format_gain(high)}".replace(" %", "")
        error = "0" if row.rel_error == 0 else f"{row.rel_error:.1e}"
        table.add_row(row.name, format_us(row.wall_us), format_gain(gain), interval, f"{row.recovered:.2f}", format_bytes(row.peak_bytes), f"{row.peak_bytes / gc_peak:.3f}", error)
    outcome = _table("the plan", "step >", "vs GC >", "peak >", "grad error >")
    for label, figures in (("predicted", report.predicted), ("measured", report.measured)):
        outcome.add_row(label, format_us(figures.step_us), format_gain(figures.speedup_vs_gc), format_bytes(figures.peak_bytes), f"{figures.rel_error:.2e}")
    summary = _lines(f"{format_gain(report.speedup_vs_gc)} against GC of {format_gain(report.ceiling_vs_gc)} possible, {_percent(report.recovered)} recovered, at {report.peak_vs_gc:.3f} x GC's peak; gradient error {report.rel_error:.2e}")
    return _stack(head, table, outcome, summary)


def _batches(report: BenchReport) -> str:
    first, count = report.batches[0], len(report.batches)
    return f"micro-batch {first.source}: {first.tokens} tokens" if count == 1 else f"update of {count} micro-batches, {sum(b.tokens for b in report.batches)} tokens"


def codec_bench_view(report: CodecBenchReport) -> RenderableType:
    """GB/s of each codec, beside a plain copy and the products that would be recomputed instead."""
    on_gpu = report.clock == "device"
    clock = {"cpu": "CPU time", "wall": "wall time", "device": "CUDA events"}[report.clock]
    place = report.machine.device if on_gpu else f"{report.machine.cpu}, {_threads(report.machine.threads)}"
    head = _lines(f"codecs on {place}, torch {report.machine.torch}, {report.date}; {clock}, {report.repeats} interleaved repeats")
    table = _table("codec", "of", "size >", "in GB/s >", "x copy >", "out GB/s >", "x copy >", "K >")
    for row in report.rows:
        (into, into_copy), (out, out_copy) = ((_figure(pace.gb_per_s), f"{_of_copy(pace, on_gpu):.2f}") for pace in (row.compress, row.decompress))
        table.add_row(row.codec, row.dtype, format_bytes(row.nbytes), into, into_copy, out, out_copy, "-" if row.break_even_width is None else str(row.break_even_width))
    compared = "bytes moved a second, tensor and payload," if on_gpu else "speed"
    words = _lines(
        "in, out: bytes of the tensor over the time to compress it, to restore it.",
        f"x copy: {compared} against a plain copy of the same tensor in the same repeat.",
        "K: where the tensor is a product x @ W of an inner width below K, recomputing it takes less time than compressing and restoring it; '-' where no product makes it.",
        _goal_words(report, on_gpu),
    )
    return _stack(head, table, words, *_products_view(report))


def _of_copy(pace: CodecPace, on_gpu: bool) -> float:
    """What the goals are about: of the copy's bandwidth on a GPU, of its speed on a CPU."""
    return pace.bandwidth_of_clone if on_gpu else pace.of_clone


def _goal_words(report: CodecBenchReport, on_gpu: bool) -> str:
    """In how many rows the goal is met, and which codecs miss it."""
    judged = [row for row in report.rows if not (on_gpu and row.stochastic)]
    goal, words = (BANDWIDTH_GOAL, "of a copy's bandwidth, codecs that round to the nearest") if on_gpu else (CLONE_GOAL, "of a copy's speed")
    missed = [row.codec for row in judged if min(_of_copy(pace, on_gpu) for pace in (row.compress, row.decompress)) < goal]
    named = ", ".join(f"{codec} ({missed.count(codec)})" for codec in dict.fromkeys(missed))
    return f"Goal, {_percent(goal)} {words}, in and out: met in {len(judged) - len(missed)} of {len(judged)} rows" + (f"; missed by {named}." if missed else ".")


def _products_view(report: CodecBenchReport) -> list[RenderableType]:
    if not report.products:
        return []
    table = _table("product into", "size >", "widths", "fixed >", "per 100 of K >", "TFLOP/s >", "off by >", title="products: time = fixed + K x per width; wider ones are extrapolated")
    for row in report.products:
        speed = _figure(2 * row.rows * row.columns / row.us_per_width / 1e6) if row.us_per_width > 0 else "-"
        table.add_row(row.dtype, format_bytes(row.nbytes), f"{row.widths[0]}-{row.widths[-1]}", format_us(row.fixed_us), format_us(100 * row.us_per_width), speed, _percent(row.largest_deviation))
    return [table]


def batches_view(batches: Sequence[tuple[str, MicroBatch]]) -> RenderableType:
    """Sizes, rewards and origin of recorded micro-batches."""
    return _stack(*(_micro_batch_view(micro_batch, source) for source, micro_batch in batches))


def _micro_batch_view(micro_batch: MicroBatch, name: str) -> RenderableType:
    meta, (rows, length) = micro_batch.meta, micro_batch.shape
    rewards = "" if micro_batch.rewards is None else f", mean reward {float(micro_batch.rewards.mean()):.2f}"
    table = _table(f"micro-batch {name}", "")
    entries = {
        "rows x tokens": f"{rows} x {length} = {micro_batch.tokens} ({micro_batch.real_tokens} without padding), {micro_batch.layout}",
        "loss tokens": str(micro_batch.loss_tokens),
        "loss": f"{micro_batch.loss.trainer}; exposure {micro_batch.readiness.value}; sum of c^2 {micro_batch.weight('squared'):.3g}",
        "groups": f"{len(micro_batch.group_ids.unique())} in {micro_batch.rows} sequences{rewards}",
        "rows without gradient": str(micro_batch.zero_rows),
        **{key: str(meta[key]) for key in ("model", "trainer", "task", "task_options", "seed", "date") if key in meta},
    }
    for label, value in entries.items():
        table.add_row(label, value)
    return table


# --------------------------------------------------------------------------------------------------------------- helpers


def _stack(*parts: RenderableType) -> Group:
    """One under the other, an empty line between."""
    return Group(*(piece for part in parts for piece in (part, "")))


def _table(*columns: str, title: str | None = None) -> Table:
    """A plain table; a heading that ends in ` >` is right-aligned."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.removesuffix(" >"), justify="right" if column.endswith(" >") else "left", overflow="fold", no_wrap=column.endswith(" >"))
    return table


def _lines(*lines: str) -> Text:
    return Text("\n".join(lines))


def _short(source: str) -> str:
    """A source without its folders."""
    return source.rsplit("/", 1)[-1]


def _figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _tenths(share: float) -> str:
    return f"{100 * share:.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _threads(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")


def _fallback_lines(profile: Profile) -> list[Text]:
    return [_lines(f"{row.fqn}: left to torch's checkpoint: {row.fallback}") for row in profile.layers if row.fallback]


def _alternatives(plan: Plan) -> list[RenderableType]:
    if not plan.alternatives:
        return []
    table = _table("instead", "step >", "vs GC >", "peak >", "grad error >")
    for other in plan.alternatives:
        table.add_row(other.label, format_us(other.step_us), format_gain(plan.predicted.gc_us / other.step_us), format_bytes(other.peak_bytes), f"{other.rel_error:.2e}")
    return [table]
