"""Pictures and figures -> one HTML file. The markup is report.html.jinja beside this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from hilore_cli.page.pictures import NARROW, WIDE, all_pictures
from hilore_cli.page.rows import Shown, Story, binding, outcome_rows
from hilore_cli.page.theme import Theme, render_svg, variables, write_png
from hilore_cli.sizes import format_bytes, format_gain, format_us

TEMPLATE = Path(__file__).parent / "report.html.jinja"


def render_page(story: Story, *, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> str:
    """The whole page. Raises PlanMismatchError when the profile is not the plan's."""
    shown = Shown(story)
    pictures = all_pictures(shown)
    drawn = []
    for done, picture in enumerate(pictures):
        progress(f"draw: {picture.title.lower()}", done, len(pictures))
        drawn.append({"picture": picture, **{name: render_svg(picture.draw(Theme(png=False), width), key=f"{picture.key}-{name}", label=f"{picture.title}. {picture.caption}") for name, width in (("wide", WIDE), ("narrow", NARROW))}})
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        plan=story.plan,
        estimated=story.plan.estimate,
        lead=lead_words(shown),
        figures=key_figures(shown),
        drawn=drawn,
        outcomes=[{**row, "shown": _outcome(row)} for row in outcome_rows(story)],
        provenance=provenance(story),
        light=variables(0),
        dark=variables(1),
    )


def write_pictures(story: Story, folder: Path, *, width: int = WIDE) -> list[Path]:
    """Every picture as PNG, in the page's light colours and twice its pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in all_pictures(Shown(story)):
        path = folder / f"{picture.key}.png"
        write_png(picture.draw(Theme(png=True), width), path)
        written.append(path)
    return written


def lead_words(shown: Shown) -> str:
    """The plan in a sentence or two."""
    plan = shown.story.plan
    predicted = plan.predicted
    word = "estimated" if plan.estimate is not None else "predicted"
    error = "with exactly the same gradients" if plan.update.rel_error == 0 else f"with a gradient error of {plan.update.rel_error:.2g}"
    return (
        f"Under a cap of {format_bytes(plan.budgets.cap_bytes)} this plan is {word} to run the update in {format_us(plan.update.step_us)}, where gradient checkpointing takes {format_us(plan.update.gc_us)}: "
        f"{format_gain(plan.update.gc_us / plan.update.step_us)}, {error}. Memory is fullest at the {predicted.binding_moment}."
    )


def key_figures(shown: Shown) -> list[dict[str, str]]:
    """Four figures that a reader takes away, each with what it is compared with."""
    plan = shown.story.plan
    update, predicted = plan.update, plan.predicted
    _, peak = binding(shown)
    return [
        {"value": format_gain(update.gc_us / update.step_us), "name": "against checkpointing", "note": f"{format_gain(update.gc_us / update.none_us)} without any"},
        {"value": f"{100 * update.recovered:.0f} %", "name": "of its cost recovered", "note": f"{format_us(update.gc_us - update.step_us)} of {format_us(update.gc_us - update.none_us)}"},
        {"value": f"{peak.nbytes / predicted.gc_peak_bytes:.3f} x", "name": "checkpointing's peak", "note": f"{format_bytes(peak.nbytes)}, cap {format_bytes(plan.budgets.cap_bytes)}"},
        {"value": "0" if update.rel_error == 0 else f"{update.rel_error:.2g}", "name": "gradient error", "note": f"{plan.budgets.risk:g} allowed"},
    ]


def provenance(story: Story) -> list[tuple[str, str]]:
    """What the page's figures were made from."""
    plan, profile = story.plan, story.profile
    machine, model, batch = profile.machine, plan.model, plan.batch
    place = machine.cpu if machine.device == "cpu" else machine.device
    rows = [
        ("model", f"{model.source}: {model.architecture}, {model.layers} layers, {model.parameters:,} parameters, {model.dtype}, {model.attn_implementation}" + (f", {model.lora}" if model.lora else "")),
        ("micro-batch", f"{batch.rows} rows of {batch.length} tokens, {batch.loss_tokens} of them in the loss; task {batch.task}; the update has {plan.update.micro_batches}"),
        ("budgets", f"cap {plan.budgets.mem_cap}, risk {plan.budgets.risk:g}, codecs {', '.join(plan.budgets.codecs) or 'none'}, loss head {plan.head}"),
        ("profile", f"{profile.name}, {plan.profile_digest}, of {profile.created[:10]}"),
        ("measured on" if profile.estimate is None else "computed on", f"{place}, {machine.threads} threads, torch {machine.torch}, transformers {machine.transformers}, hilore {machine.hilore}"),
        ("solver", f"{plan.solver.solver}: {plan.solver.status}, {100 * plan.solver.gap_of_step:.2f} % of the step above the bound"),
    ]
    if story.frozen is not None:
        rows.append(("frozen plan", f"{story.frozen.name}, digest {story.frozen.digest}"))
    return rows


def _outcome(row: dict[str, Any]) -> dict[str, str]:
    """Both figures, and measured over predicted."""
    show = {"bytes": format_bytes, "us": format_us, "gain": format_gain, "error": "{:.2e}".format}[row["unit"]]
    if row["unit"] == "gain":
        off = f"{100 * (row['measured'] - row['predicted']):+.1f} points"
    else:
        off = f"{100 * (row['measured'] / row['predicted'] - 1):+.2f} %" if row["predicted"] else "-"
    return {"predicted": show(row["predicted"]), "measured": show(row["measured"]), "off": off}
