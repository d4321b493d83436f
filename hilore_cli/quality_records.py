"""QualityReport and QualityRuns: whether training under a plan learns as checkpointing does. Written by quality/, read by tables and people.

Accuracies are shares of the held-out problems; `_points` are percentage points. Differences are paired: an arm less checkpointing, which had
the same starting weights, prompts and random numbers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hilore_cli.provenance import Machine, ModelId
from hilore_cli.records import Strict

QUALITY_VERSION = 1
QUALITY_RUNS_VERSION = 1


class ErrorPoint(Strict):
    """The gradient of one micro-batch of a training step as the arm computes it, against the exact one of the same weights."""

    step: int = Field(ge=0)
    rel_error: float = Field(ge=0)


class ArmRun(Strict):
    """One whole GRPO run: one arm of one pair."""

    pair: int = Field(ge=0)
    arm: str
    greedy: float = Field(ge=0, le=1, description="share of the held-out problems that the likeliest completion solves")
    sampled: float = Field(ge=0, le=1, description="expected share that a sampled completion solves")
    rewards: list[float] = Field(description="mean reward of the completions of each step")
    errors: list[ErrorPoint] = Field(description="empty for arms without any")
    diverged_at: int | None = Field(description="step whose gradient was not finite: the run ended there, and solves nothing")
    weights_digest: str = Field(description="of the trained weights: equal where a run is the same to the last bit")
    seconds: float = Field(ge=0, description="wall time")


class RunsIdentity(Strict):
    """What makes runs comparable: they are one experiment only where all of this is equal."""

    setting: str
    setting_digest: str = Field(description="of all values of the setting, the number of held-out problems among them")
    hilore: str
    torch: str
    transformers: str
    device: str
    threads: int
    checkpoint_digest: str = Field(description="of the weights that every run starts from")
    plan_digests: dict[str, str] = Field(description="by arm")


class QualityRuns(Strict):
    """runs.json in the folder of an experiment: what is finished. Going on appends to it."""

    format: Literal["hilore-quality-runs"] = "hilore-quality-runs"
    version: int = QUALITY_RUNS_VERSION
    identity: RunsIdentity
    runs: list[ArmRun]


class QualityPlan(Strict):
    """A plan that an arm was trained under."""

    arm: str
    digest: str
    mem_cap: str
    risk: float
    predicted_rel_error: float
    measured_rel_error: float = Field(description="of the dry run, before training")
    stored_bytes: int
    compressed_bytes: int
    compressed: dict[str, int] = Field(description="unit and codec -> number of layers that compress it")


class Difference(Strict):
    """Mean of the paired differences to checkpointing, over the pairs, with Student's t at one degree of freedom less than pairs."""

    mean_points: float
    sd_points: float = Field(ge=0)
    low_points: float = Field(description="two-sided 95 % interval of the mean")
    high_points: float
    half_width_points: float = Field(ge=0)
    bound_points: float = Field(ge=0, description="|mean| + t(0.95) x standard error: the least margin within which the two are shown equal at 5 % (two one-sided tests)")


class ArmSummary(Strict):
    """One arm over all pairs."""

    arm: str
    greedy: float
    sampled: float
    greedy_difference: Difference | None = Field(description="None for checkpointing itself")
    sampled_difference: Difference | None
    diverged: int = Field(ge=0, description="runs that did")
    median_rel_error: float | None
    largest_rel_error: float | None


class Trend(Strict):
    """Whether the gradient error of the plan changes as training goes on: least squares of ln(error) over the run in each pair, Student's t
    over the pairs' slopes. A slope of 0.1: the error ends 10 % above where it began.
    """

    slope: float
    low: float = Field(description="two-sided 95 % interval")
    high: float

    @property
    def there(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


class QualityReport(Strict):
    """Real GRPO runs in pairs: checkpointing, a plan, and controls."""

    format: Literal["hilore-quality"] = "hilore-quality"
    version: int = QUALITY_VERSION
    date: str
    machine: Machine
    model: ModelId
    setting: dict[str, Any] = Field(description="all its values")
    checkpoint_digest: str
    start_greedy: float = Field(description="of the weights that every run starts from")
    start_sampled: float
    pairs: int = Field(ge=2)
    problems: int = Field(ge=1, description="held out of warm-up and training")
    margin_points: float
    plans: list[QualityPlan]
    arms: list[ArmSummary]
    within_margin: bool = Field(description="the plan's bounds are below the margin, greedy and sampled")
    has_power: bool = Field(description="so are the half-widths of its intervals, and what one problem counts: a difference of the margin would have been seen")
    control_failed: bool = Field(description="the negative control is shown worse by more than the margin; where it is not, the experiment proves nothing")
    trend: Trend | None = Field(description="of the plan's gradient error; None where too few were measured")
    covered: float | None = Field(description="share of the plan's measured errors that are not above the predicted one")
    runs: list[ArmRun]
