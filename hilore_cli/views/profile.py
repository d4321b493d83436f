"""Profiles and the micro-batches that they were measured on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hilore_cli.sizes import format_bytes, format_gain, format_us
from hilore_cli.views.layout import lines, make_table, percent, short, stack, tenths, threads_words
from hilore_cli.views.plan import estimate_words

if TYPE_CHECKING:
    from hilore_cli.batches import MicroBatch
    from hilore_cli.schema import Profile

MOST_UNITS_SHOWN = 16


def profile_view(profile: Profile) -> RenderableType:
    """Peaks and times of the whole-step methods, units by risk, and the memory account."""
    times, peaks = profile.times, profile.peaks
    measured_peaks = {"none": peaks.none_bytes, "gc": peaks.gc_bytes}
    how = f"median of {times.repeats}, {threads_words(times.threads)}" if profile.estimate is None else f"steps estimated for a {profile.estimate.device}"
    methods = make_table("method", "step >" if profile.estimate is None else "est. step >", "vs GC >", "peak >", "vs GC >", title=f"whole updates, {how}")
    labels = {"none": "no checkpointing", "gc": "checkpointing (GC)", "recompute": "hilore, all recomputed"}
    for key, label in labels.items():
        step_us, peak_bytes = getattr(times, f"{key}_us"), measured_peaks.get(key)
        size = ("", "") if peak_bytes is None else (format_bytes(peak_bytes), f"{peak_bytes / peaks.gc_bytes:.3f} x")
        methods.add_row(label, format_us(step_us), format_gain(times.gc_us / step_us), *size)
    account = make_table("memory account", "bytes >")
    for key, value in profile.account.model_dump().items():
        account.add_row(key.removesuffix("_bytes"), format_bytes(value))
    batch = profile.batch
    head = lines(
        f"profile {profile.name}: {profile.model.source}, {profile.model.layers} layers, {profile.model.dtype}, head {profile.head}",
        f"micro-batch {batch.source}: task {batch.task}, {batch.rows} rows x {batch.length} tokens = {batch.tokens}, {batch.loss_tokens} loss tokens, group size {batch.group_size}",
        *estimate_words(profile.estimate),
    )
    return stack(head, methods, units_view(profile), account, *update_view(profile), *calibration_view(profile), *_rounding_lines(profile), *_fallback_lines(profile))


def _rounding_lines(profile: Profile) -> list[RenderableType]:
    """What any plan that is not exact brings, whatever it compresses."""
    if profile.rounding_error == 0:
        return []
    return [lines(f"rounding in {profile.model.dtype}: a plan that is not exact brings a gradient error of {profile.rounding_error:.1e} at least, and the error of its values besides")]


def update_view(profile: Profile) -> list[RenderableType]:
    """The update's micro-batches: how well their exposure tells the size of their gradients before the forward."""
    rows = profile.micro_batches
    if len(rows) < 2:
        return []
    rule = "squared" if any(row.logits is None for row in rows) else "logits"
    norm = "gradient norm^2 >" if profile.estimate is None else "est. gradient norm^2 >"
    table = make_table("micro-batch", "tokens >", "loss tokens >", "exposure >", norm, title=f"the update's micro-batches: shares in exposure (rule {rule}) and in squared gradient norms")
    exposure, norms = sum(row.weight(rule) for row in rows) or 1.0, sum(row.gradient_norm**2 for row in rows)
    for row in rows:
        table.add_row(short(row.source), str(row.tokens), str(row.loss_tokens), tenths(row.weight(rule) / exposure), tenths(row.gradient_norm**2 / norms))
    return [table]


def calibration_view(profile: Profile) -> list[RenderableType]:
    """Predicted against measured error of every plan that was tried, and each codec's kappa."""
    if not profile.calibration:
        return [lines(*_kappa_words(profile))] if profile.kappas else []
    table = make_table("codec", "plan tried", "micro-batch", "predicted >", "measured >", "ratio >", title="calibration: gradient error")
    for pair in profile.calibration:
        predicted = profile.predicted_error(pair)
        table.add_row(pair.codec, pair.plan, short(pair.micro_batch) if pair.heldout else f"{short(pair.micro_batch)} (profiled)", f"{predicted:.2e}", f"{pair.measured_rel_error:.2e}", f"{predicted / pair.measured_rel_error:.2f}" if pair.measured_rel_error else "-")
    return [table, lines(*_kappa_words(profile))]


def _kappa_words(profile: Profile) -> list[str]:
    origin = "" if profile.estimate is None else f", of {profile.estimate.relative}"
    return [f"{k.codec}: kappa {k.value:.3g} (predicted error^2 = kappa x sum of rho^2), {percent(k.quantile)} limit of {k.pairs} pairs on {k.micro_batches} micro-batches; {percent(k.coverage)} of them below the limit that the others give{origin}" for k in profile.kappas]


def units_view(profile: Profile) -> RenderableType:
    """One row per unit and codec, over all layers together, riskiest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row in profile.units:
        entry = sums.setdefault((row.unit, row.codec), [0.0, 0, 0, 0.0])
        for position, value in enumerate((row.rho2, row.nbytes, row.payload_bytes, row.compress_us + row.decompress_us)):
            entry[position] += value
    mark = "" if profile.estimate is None else "est. "
    table = make_table("unit, in all layers", "codec", f"{mark}grad error >", "bytes >", "kept >", f"{mark}codec time >", title="units by risk" if profile.estimate is None else f"units by risk, scaled from {profile.estimate.relative}")
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    for (unit, codec), (rho2, nbytes, payload, us) in ordered[:MOST_UNITS_SHOWN]:
        table.add_row(unit, codec, f"{rho2**0.5:.2e}", format_bytes(nbytes), format_bytes(payload), format_us(us))
    rest = len(ordered) - MOST_UNITS_SHOWN
    return Group(table, *([lines(f"and {rest} calmer ones")] if rest > 0 else []))


def _fallback_lines(profile: Profile) -> list[Text]:
    return [lines(f"{row.fqn}: left to torch's checkpoint: {row.fallback}") for row in profile.layers if row.fallback]


def batches_view(batches: Sequence[tuple[str, MicroBatch]]) -> RenderableType:
    """Sizes, rewards and origin of recorded micro-batches."""
    return stack(*(_micro_batch_view(micro_batch, source) for source, micro_batch in batches))


def _micro_batch_view(micro_batch: MicroBatch, name: str) -> RenderableType:
    meta, (rows, length) = micro_batch.meta, micro_batch.shape
    rewards = "" if micro_batch.rewards is None else f", mean reward {float(micro_batch.rewards.mean()):.2f}"
    table = make_table(f"micro-batch {name}", "")
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
