"""Paired differences with Student's t over the pairs, and the trend of an error over training. Plain numbers.

n pairs, d_k the difference of pair k, m their mean, s their standard deviation, t(p) the quantile at n - 1 degrees of freedom:

    interval   m +- t(0.975) s / sqrt(n)           two-sided 95 %
    bound      |m| + t(0.95) s / sqrt(n)           two one-sided tests at 5 % show equality within any larger margin (Schuirmann, 1987)

What varies between pairs is the training (prompts, random numbers); the starting weights and the held-out problems are the same in all of
them, so that neither interval speaks of another warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

from hilore_cli.calibration import t_quantile
from hilore_cli.quality_records import ArmRun, ArmSummary, Difference, ErrorPoint, Trend


def difference_of(ours: Sequence[float], reference: Sequence[float]) -> Difference:
    """Paired shares -> their difference in points."""
    points = [100 * (a - b) for a, b in zip(ours, reference, strict=True)]
    mean, deviation, low, high = mean_interval(points)
    error = deviation / math.sqrt(len(points))
    return Difference(mean_points=mean, sd_points=deviation, low_points=low, high_points=high, half_width_points=(high - low) / 2, bound_points=abs(mean) + t_quantile(0.95, len(points) - 1) * error)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation, and two-sided 95 % interval of the mean."""
    mean, deviation = fmean(values), stdev(values)
    half = t_quantile(0.975, len(values) - 1) * deviation / math.sqrt(len(values))
    return mean, deviation, mean - half, mean + half


def summarise_arm(runs: Sequence[ArmRun], reference: Sequence[ArmRun]) -> ArmSummary:
    """Both in the order of their pairs."""
    own = runs[0].arm == reference[0].arm
    errors = [point.rel_error for run in runs for point in run.errors]
    return ArmSummary(
        arm=runs[0].arm,
        greedy=fmean(run.greedy for run in runs),
        sampled=fmean(run.sampled for run in runs),
        greedy_difference=None if own else difference_of([run.greedy for run in runs], [run.greedy for run in reference]),
        sampled_difference=None if own else difference_of([run.sampled for run in runs], [run.sampled for run in reference]),
        diverged=sum(run.diverged_at is not None for run in runs),
        median_rel_error=median(errors) if errors else None,
        largest_rel_error=max(errors, default=None),
    )


def trend_of(errors: Sequence[Sequence[ErrorPoint]], *, steps: int) -> Trend | None:
    """`errors` of each pair; None for fewer than two pairs with three measurements each."""
    slopes = [_slope([point.step / steps for point in series], [math.log(point.rel_error) for point in series]) for points in errors if len(series := [point for point in points if point.rel_error > 0]) >= 3]
    if len(slopes) < 2:
        return None
    mean, _, low, high = mean_interval(slopes)
    return Trend(slope=mean, low=low, high=high)


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least squares."""
    x_mean, y_mean = fmean(xs), fmean(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def is_within(summary: ArmSummary, margin: float) -> bool:
    """Whether both bounds are below the margin."""
    return all(difference.bound_points < margin for difference in differences(summary).values())


def has_power(summary: ArmSummary, margin: float, *, problems: int) -> bool:
    """Whether a difference of the margin would have left the intervals without zero: both half-widths are below it, and so is what one problem counts."""
    return 100 / problems < margin and all(difference.half_width_points < margin for difference in differences(summary).values())


def is_worse(summary: ArmSummary, margin: float) -> bool:
    """Whether one accuracy is shown to be more than the margin below the reference's: its interval lies there."""
    return any(difference.high_points < -margin for difference in differences(summary).values())


def differences(summary: ArmSummary) -> Mapping[str, Difference]:
    """By accuracy; those of the reference itself are none."""
    both = {"greedy": summary.greedy_difference, "sampled": summary.sampled_difference}
    return {name: difference for name, difference in both.items() if difference is not None}
