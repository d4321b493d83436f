"""The quality benchmark."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import RenderableType

from hilore_cli.sizes import format_bytes
from hilore_cli.views.layout import lines, machine_words, make_table, percent, stack, threads_words

if TYPE_CHECKING:
    from hilore_cli.quality_records import ArmRun, ArmSummary, Difference, QualityPlan, QualityReport, QualityRuns


def quality_view(report: QualityReport) -> RenderableType:
    """What was run, the plans, the arms side by side, and what they show."""
    recipe, ours = report.setting["recipe"], next(arm for arm in report.arms if arm.arm == "gc")
    head = lines(
        f"{report.model.source}, {report.model.parameters} parameters, on {machine_words(report.machine)}, torch {report.machine.torch}, {report.date}",
        f"{report.pairs} pairs of GRPO runs of {recipe['steps']} steps, {recipe['prompts']} x {recipe['group_size']} completions and {recipe['updates']} updates each; {report.problems} held-out problems",
        f"start: greedy {_share(report.start_greedy)}, sampled {_share(report.start_sampled)}; checkpointing gains {_gain(ours.greedy, report.start_greedy)} and {_gain(ours.sampled, report.start_sampled)} points",
    )
    return stack(head, lines(*(_plan(plan) for plan in report.plans)), _arms(report), lines(*verdict(report)))


def quality_runs_view(record: QualityRuns) -> RenderableType:
    """What is finished of an experiment, pair by pair; what it shows is for the report."""
    found, runs = record.identity, {(run.pair, run.arm): run for run in record.runs}
    arms = list(dict.fromkeys(run.arm for run in record.runs))
    head = lines(
        f"quality {found.setting}: {len(runs)} finished runs, {sum(run.seconds for run in record.runs) / 60:.0f} minutes",
        f"on {found.device}, {threads_words(found.threads)}, hilore {found.hilore}, torch {found.torch}, transformers {found.transformers}",
    )
    table = make_table("pair", *(f"{arm} >" for arm in arms), title="solved in %, greedy and sampled")
    for pair in sorted({run.pair for run in record.runs}):
        table.add_row(str(pair + 1), *(_reached(runs.get((pair, arm))) for arm in arms))
    errors = [[point.rel_error for run in record.runs if run.arm == arm for point in run.errors] for arm in arms]
    table.add_row("error", *(f"{median(one):.1e}" if one else "-" for one in errors))
    words = lines("error: median relative gradient error along the way.", f"`hilore bench --quality --setting {found.setting}`, run again as it was, goes on from here and compares the arms.")
    return stack(head, table, words)


def _reached(run: ArmRun | None) -> str:
    if run is None:
        return "-"
    return f"{100 * run.greedy:.2f} {100 * run.sampled:.2f}" if run.diverged_at is None else f"diverged at {run.diverged_at}"


def _plan(plan: QualityPlan) -> str:
    codecs = sorted({unit.rpartition(":")[2] for unit in plan.compressed})
    return (
        f"plan {plan.arm}: risk {plan.risk:g} under {plan.mem_cap}, {', '.join(codecs)} on {sum(plan.compressed.values())} activations, "
        f"{format_bytes(plan.compressed_bytes)} compressed beside {format_bytes(plan.stored_bytes)} stored; gradient error {plan.predicted_rel_error:.1e} predicted, {plan.measured_rel_error:.1e} in the dry run"
    )


def _arms(report: QualityReport) -> RenderableType:
    table = make_table("arm", "accuracy", "% >", "vs gc >", "95 % interval >", "bound >", "grad error >")
    for arm in report.arms:
        for name, share, difference in (("greedy", arm.greedy, arm.greedy_difference), ("sampled", arm.sampled, arm.sampled_difference)):
            table.add_row(arm.arm if name == "greedy" else "", name, f"{100 * share:.2f}", *_difference(difference), _error(arm) if name == "greedy" else "")
    return table


def _difference(difference: Difference | None) -> tuple[str, str, str]:
    if difference is None:
        return "-", "-", "-"
    return f"{difference.mean_points:+.2f}", f"{difference.low_points:+.2f}..{difference.high_points:+.2f}", f"{difference.bound_points:.2f}"


def _error(arm: ArmSummary) -> str:
    if arm.diverged:
        return f"{arm.diverged} diverged"
    return "-" if arm.median_rel_error is None else f"{arm.median_rel_error:.1e}"


def power_words(report: QualityReport, margin: str) -> str:
    """Whether a loss of the margin would have been seen."""
    if report.has_power:
        return f"the intervals' half-widths are below {margin}"
    if (one := 100 / report.problems) >= report.margin_points:
        return f"NONE, one of {report.problems} problems is {one:.1f} points; more of them (--problems)"
    return f"the intervals' half-widths are NOT below {margin}; more pairs (--pairs), or more problems"


def verdict(report: QualityReport) -> list[str]:
    """What the experiment shows, a sentence each."""
    margin = f"{report.margin_points:g} points"
    plan = next(plan for plan in report.plans if plan.arm == "hilore")
    found = [
        "Differences in points, paired, Student's t over the pairs. bound: 95 % upper bound of the absolute difference.",
        f"plan: the bounds are {'below' if report.within_margin else 'NOT below'} {margin}{'' if report.has_power else ', which says nothing without power'}.",
        f"power: {power_words(report, margin)}.",
        f"control: int2 {'is shown worse by more than' if report.control_failed else 'is NOT shown worse by more than'} {margin}{'' if report.control_failed else ': this experiment proves nothing'}.",
    ]
    if report.covered is not None:
        found.append(f"gradient error along the way: {percent(report.covered)} of the measured are not above the predicted {plan.predicted_rel_error:.1e}.")
    if report.trend is not None:
        slope = f"ln(error) changes by {report.trend.slope:+.2f} ({report.trend.low:+.2f}..{report.trend.high:+.2f}) over a run"
        found.append(f"trend: {slope}, which {'is one' if report.trend.there else 'is none'}.")
    return found + ([f"{report.setting['name']} shows: {report.setting['shows']}."] if report.setting["shows"] else [])


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _gain(reached: float, start: float) -> str:
    return f"{100 * (reached - start):+.2f}"
