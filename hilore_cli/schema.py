"""The files: Profile (measured) -> Plan (solved) -> FrozenPlan (bound to a model), strict and versioned.

Every model is frozen and keyword-only; an unknown key, a NaN, a truncated file or another version is an error that names it.
Units are in the names: `_bytes` are integers, `_us` are microseconds of the profiled machine, `rel_error` is ||g_plan - g|| / ||g||.
This file reads and writes nothing but these files and imports no torch, solver or pandas: training loads plans through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hilore_cli.errors import ProfileError
from hilore_cli.provenance import BatchId, Machine, ModelId
from hilore_cli.records import Strict, digest_of

PROFILE_VERSION = 4
PLAN_VERSION = 4
FROZEN_VERSION = 4

INPUT_UNIT = "input"
"""Key of the one recovery unit that no operator makes: the layer's input."""

MASK_CODEC = "mask"
"""The codec that is exact: bools, eight to a byte. Every plan may use it, whatever its risk and codecs."""


ExposureRule = Literal["logits", "squared", "scalar", "tokens"]
"""How a micro-batch is weighed before its forward: sum of (c (1 - p))^2, the loss's derivative by the logit of each loss token, p its
probability when it was sampled; sum of c^2; (sum of |c|)^2; or its tokens alone, exposure ignored."""


# ---------------------------------------------------------------------------------------------------------------- graph


class GraphNode(Strict):
    """One node of a layer class's joint forward and backward graph, in the graph's own order.

    A node owns a storage, is a view of another node's (`storage` is the owner's index), or has none (`storage` = -1:
    operators with several outputs, whose getitem nodes own the storages).
    """

    index: int
    name: str
    target: str = Field(description="operator as torch prints it, or 'placeholder'")
    side: Literal["forward", "backward", "tangent"]
    inputs: list[int] = Field(description="indices of tensor-valued argument nodes, without repetition")
    storage: int = Field(description="index of the node that owns the storage; own index if it owns; -1 if none")
    nbytes: int = Field(ge=0, description="bytes of the storage at the profiled shape; 0 unless the node owns one; of an operator with several outputs those of the outputs that no node takes")
    nbytes_terms: dict[str, int] = Field(description="the same as a polynomial of batch b and length s: {'1': c, 'bs': k, 'bss': q}")
    kind: Literal["value", "parameter", "activation", "shared"] = Field(
        description="placeholders: parameter (or buffer), activation (this layer's own input), shared by all layers; all else: value"
    )
    unit: str | None = Field(description="recovery unit key, for forward nodes that own a storage and for the activation input")
    matmul: bool = Field(description="matmul-like (matrix products, attention): what the memory phases count")
    pinned: bool = Field(description="must never be recomputed: random, steers indexing, collective; stored if backward needs it")
    compressible: bool = Field(description="floating, large enough, finite by design")
    mask: bool = Field(default=False, description="boolean, large enough and pinned: stored eight to a byte where backward needs it (dropout)")
    time_us: float = Field(ge=0, description="median time of the operator; 0 for views, placeholders and backward nodes")


class LayerClass(Strict):
    """Layers whose traced graphs are equal share one class."""

    name: str
    graph_digest: str = Field(description="empty for layers that are left to torch's checkpoint: their rows were measured as a whole (uncaptured.py)")
    nodes: list[GraphNode]
    outputs: list[int] = Field(description="indices of the nodes that the backward graph returns (gradients), without repetition")
    forward_outputs: list[int] = Field(description="indices of the nodes that the forward returns to the model")


class LayerRow(Strict):
    """One decoder layer as profiled."""

    index: int
    fqn: str
    layer_class: str
    fallback: str | None = Field(default=None, description="why the layer could not be captured whole; it is then left to torch's checkpoint")
    grad_norm: float = Field(ge=0, description="norm of the exact gradient of the layer's parameters")
    input_grad_norm: float = Field(ge=0, description="norm of the exact gradient of the layer's input")
    noise_transfer: float = Field(ge=0, description="A_i of risk.py: squared gradient change below for a squared change of the layer's input gradient")


class UnitRow(Strict):
    """One recovery unit of one layer under one codec."""

    layer: int
    unit: str
    codec: str
    nbytes: int
    payload_bytes: int
    compress_us: float = Field(ge=0)
    decompress_us: float = Field(ge=0)
    rel_error: float = Field(ge=0, description="round trip: ||t' - t|| / ||t||")
    exposure_error: float = Field(ge=0, description="the same with each token's square weighted by its exposure squared")
    rho2: float = Field(ge=0, description="squared relative error this unit alone brings into the whole gradient (risk.py), matmul-like results behind it stored")
    replayed_rho2: float = Field(ge=0, description="the same when they are recomputed from the restored unit; never below rho2")


# -------------------------------------------------------------------------------------------------------------- profile


class Account(Strict):
    """Memory of the step outside the layers' stored activations, in bytes; what is live when."""

    weights_bytes: int
    gradients_bytes: int = Field(description="gradient buffers of all trainable parameters: they persist between micro-batches")
    optimizer_bytes: int
    workspace_bytes: int = Field(default=0, ge=0, description="what libraries keep on a GPU once they were used: cuBLAS's workspaces; 0 on a CPU")
    shared_bytes: int = Field(description="ids, masks, position embeddings and the like: live from before the first layer to the last backward")
    head_bytes: int = Field(description="most bytes live above static + shared + stored during final norm, head and loss, forward and backward")
    tail_bytes: int = Field(description="most bytes live above static + shared after the last layer's backward: embedding gradient")
    update_bytes: int = Field(description="most bytes live above static during clipping and the optimizer step")

    @property
    def static_bytes(self) -> int:
        """Weights, gradients, optimizer state and workspaces: live during the whole update."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.workspace_bytes


class StepTimes(Strict):
    """Whole updates on the profiled micro-batch, interleaved in one process; medians."""

    none_us: float
    gc_us: float
    recompute_us: float = Field(description="the runtime with everything recomputed")
    repeats: int
    threads: int


class StepPeaks(Strict):
    """Measured peaks of whole updates, static part included."""

    none_bytes: int
    gc_bytes: int


class SmallerAccount(Strict):
    """The account at a smaller micro-batch: between the two, and below, its rows are taken as linear in the tokens."""

    tokens: int
    account: Account


class MicroBatchRow(Strict):
    """One micro-batch of the profiled update: what is known of it before its forward, and its exact gradient."""

    source: str
    digest: str
    rows: int
    length: int
    tokens: int
    loss_tokens: int
    logits: float | None = Field(ge=0, description="sum of (c (1 - p))^2; None where no log-probabilities were recorded")
    squared: float = Field(ge=0, description="sum of c^2 over its loss tokens, c = dL/dlogp")
    scalar: float = Field(ge=0, description="(sum of |c|)^2: one scalar a micro-batch, as published")
    uniform: float = Field(ge=0, description="sum of z^2: every loss token as if its advantage were 1")
    gradient_norm: float = Field(ge=0)

    def weight(self, rule: ExposureRule) -> float | None:
        """What its squared gradient is taken to go with, under a rule; None where that is not known."""
        return {"logits": self.logits, "squared": self.squared, "scalar": self.scalar, "tokens": self.uniform}[rule]


class CalibrationPair(Strict):
    """One measured (plan, micro-batch): predicted sum of rho^2 against the measured error of the micro-batch's gradient."""

    codec: str
    plan: str = Field(description="which units on which layers, in words")
    micro_batch: str
    heldout: bool = Field(description="whether the micro-batch is another one than that whose risk was measured")
    predicted_rho2: float = Field(gt=0)
    measured_rel_error: float = Field(ge=0)

    def ratio(self, rounding_error: float = 0.0) -> float:
        """Measured eps^2 over predicted sum of rho^2. In low precision what is beyond the roundings, and never less than predicted: a plan on
        the lower layers changes fewer of them than `rounding_error` says.
        """
        beyond = self.measured_rel_error**2 - rounding_error**2
        return beyond / self.predicted_rho2 if rounding_error == 0 else max(beyond / self.predicted_rho2, 1.0)


class Kappa(Strict):
    """Calibration of one codec: predicted eps^2 = value x sum of rho^2."""

    codec: str
    value: float = Field(gt=0, description="upper prediction limit of the ratio eps^2 / sum rho^2 of a further pair (calibration.py)")
    quantile: float
    pairs: int
    micro_batches: int
    coverage: float = Field(description="share of pairs below the limit that the other micro-batches give")


class Estimate(Strict):
    """What a profile holds that was computed without the device, and from what. Bytes and graphs are exact all the same."""

    device: str = Field(description="the device model that times come from (devices.py)")
    time_error: float | None = Field(ge=0, description="median of |computed / measured - 1| over the operators of measured profiles of that device; None: there is none to compare with")
    relative: str = Field(description="name of the measured profile of a smaller model, whose risk and noise were scaled")
    relative_digest: str


class Profile(Strict):
    """One GRPO update, measured, or estimated without the device. profile.json holds all but `classes[].nodes`, `units` and `calibration`, which are Parquet tables beside it."""

    LATER: ClassVar[set[str]] = {"rounding_error"}

    format: Literal["hilore-profile"] = "hilore-profile"
    version: int = PROFILE_VERSION
    name: str
    created: str
    machine: Machine
    model: ModelId
    batch: BatchId
    sources: list[str] = Field(description="of the update's micro-batches, as they were given: files, folders, or bare names of shipped ones")
    head: str
    codecs: list[str]
    seed: int
    estimate: Estimate | None = Field(default=None, description="None: times and risk were measured")
    gradient_norm: float
    account: Account
    times: StepTimes
    peaks: StepPeaks
    smaller: SmallerAccount | None = Field(description="None where the micro-batch has but one row")
    micro_batches: list[MicroBatchRow] = Field(description="of the update, the profiled one first")
    update_gradient_norm: float = Field(gt=0, description="norm of the gradient of all its micro-batches together")
    rounding_error: float = Field(default=0.0, ge=0, description="relative gradient change when the last layer's output gradient moves by its own rounding: what any inexact value brings at least, in low precision; 0 in fp32, and where it was not measured")
    kappas: list[Kappa]
    calibration: list[CalibrationPair]
    layers: list[LayerRow]
    classes: list[LayerClass]
    units: list[UnitRow]

    @property
    def graph_digests(self) -> list[str]:
        """Of the graphs that a plan of it is made for."""
        return sorted({layer_class.graph_digest for layer_class in self.classes if layer_class.graph_digest})

    @property
    def fallback(self) -> list[str]:
        """Names of the layers that are left to torch's checkpoint."""
        return [row.fqn for row in self.layers if row.fallback is not None]

    def predicted_error(self, pair: CalibrationPair) -> float:
        """Of a plan that was tried: what a plan like it would be said to bring."""
        return math.sqrt(self.kappa(pair.codec) * pair.predicted_rho2 + self.rounding_error**2)

    def kappa(self, codec: str) -> float:
        """Raises ProfileError for a codec that was not calibrated: its risk is not known."""
        for row in self.kappas:
            if row.codec == codec:
                return row.value
        raise ProfileError(f"profile {self.name}: codec {codec} was not calibrated; measure it again with a further micro-batch that has a gradient (--batch)")


# ----------------------------------------------------------------------------------------------------------------- plan

Action = Annotated[str, Field(pattern=r"^(store|recompute|compress:[a-z0-9-]+)$")]


class Pattern(Strict):
    """The actions of one layer: units that are not named take `default`."""

    default: Literal["recompute", "store"] = "recompute"
    actions: dict[str, Action] = Field(default_factory=dict)


class Prediction(Strict):
    """What the plan is said to do on the profiled micro-batch and machine."""

    peak_bytes: int = Field(gt=0)
    binding_moment: str
    step_us: float = Field(gt=0)
    gc_us: float = Field(gt=0)
    none_us: float = Field(gt=0)
    gc_peak_bytes: int = Field(gt=0)
    none_peak_bytes: int = Field(gt=0)
    rel_error: float
    recompute_us: float
    codec_us: float
    stored_bytes: int
    compressed_bytes: int

    @property
    def speedup_vs_gc(self) -> float:
        return self.gc_us / self.step_us

    @property
    def recovered(self) -> float:
        """(T_gc - T_plan) / (T_gc - T_none); 0 when checkpointing costs nothing."""
        span = self.gc_us - self.none_us
        return (self.gc_us - self.step_us) / span if span > 0 else 0.0


class UpdatePrediction(Strict):
    """What the variants are said to do together on the profiled update."""

    micro_batches: int
    step_us: float = Field(gt=0)
    gc_us: float = Field(gt=0)
    none_us: float = Field(gt=0)
    rel_error: float

    @property
    def recovered(self) -> float:
        """(T_gc - T_plan) / (T_gc - T_none); 0 when checkpointing costs nothing."""
        span = self.gc_us - self.none_us
        return (self.gc_us - self.step_us) / span if span > 0 else 0.0


class SolverRecord(Strict):
    """How the plan was found and how good it is known to be."""

    solver: str
    status: str
    objective_us: float
    bound_us: float = Field(description="objective of the LP relaxation: no plan can be cheaper")
    gap_of_step: float = Field(description="(objective - bound) / predicted step time")
    candidates: int = Field(description="patterns that were simulated exactly and offered to the layers")
    resolves: int = Field(description="solves of the whole program beyond the relaxation")
    reproducible: bool


class Alternative(Strict):
    """Another point of the same profile, for comparison."""

    label: str
    cap_bytes: int
    risk: float
    peak_bytes: int = Field(gt=0)
    step_us: float = Field(gt=0)
    rel_error: float


class Budgets(Strict):
    """What was asked for."""

    mem_cap: str
    cap_bytes: int
    risk: float
    codecs: list[str]
    max_patterns: int = Field(description="distinct patterns of one variant")
    exposure_rule: ExposureRule = "squared"


# --------------------------------------------------------------------------------------------------------------- variants


class Variant(Strict):
    """A full set of patterns for micro-batches of up to `max_tokens` (rows x padded length) in rows of up to `max_length`,
    and of up to `max_exposure` times the mean weight of the update's micro-batches (ExposureRule); None: any.
    """

    max_tokens: int = Field(gt=0)
    max_length: int | None = Field(default=None, gt=0, description="padded tokens of a row: eager attention is quadratic in it; None: any")
    max_exposure: float | None = Field(default=None, ge=0)
    layers: list[str] = Field(description="pattern name of each layer, in order")

    @property
    def label(self) -> str:
        exposure = "" if self.max_exposure is None else f", exposure up to {self.max_exposure:.3g}"
        return f"up to {self.max_tokens} tokens{exposure}"


class PlannedVariant(Variant):
    """A variant with what it is predicted to do on a micro-batch of `max_tokens`."""

    micro_batches: int = Field(description="of the profiled update, that fall to it")
    risk: float = Field(description="relative gradient error that it may bring into one of its micro-batches")
    step_us: float
    peak_bytes: int
    rel_error: float


def variant_for(variants: Sequence[Variant], *, tokens: int, length: int, exposure: float | None = None) -> Variant | None:
    """The variant of the smallest size that holds a micro-batch, and in that size of the least exposure that does; None above the
    largest. An unknown exposure gets the variant made for the highest.
    """
    order = sorted(variants, key=lambda v: (v.max_tokens, math.inf if v.max_exposure is None else v.max_exposure))
    fitting = [v for v in order if tokens <= v.max_tokens and (v.max_length is None or length <= v.max_length)]
    if not fitting:
        return None
    size = [v for v in fitting if v.max_tokens == fitting[0].max_tokens]
    return next(v for v in size if v.max_exposure is None or (exposure is not None and exposure <= v.max_exposure))


class Plan(Strict):
    """The solved plan, before it is bound to a model."""

    format: Literal["hilore-plan"] = "hilore-plan"
    version: int = PLAN_VERSION
    name: str
    profile: str
    profile_digest: str
    model: ModelId
    batch: BatchId = Field(description="the micro-batch that was profiled in full")
    sources: list[str] = Field(description="of the update's micro-batches, as they were given")
    estimate: Estimate | None = Field(default=None, description="the profile's; None: it was measured")
    graph_digests: list[str] = Field(description="digests of the profiled layers' joint graphs")
    fallback: list[str] = Field(default_factory=list, description="fqns of layers that are left to torch's checkpoint")
    head: str
    budgets: Budgets
    patterns: dict[str, Pattern]
    layers: list[str] = Field(description="pattern name of each layer on the profiled micro-batch, in order")
    variants: list[PlannedVariant] = Field(min_length=1)
    predicted: Prediction = Field(description="of the variant for the profiled micro-batch, on it")
    update: UpdatePrediction
    solver: SolverRecord
    alternatives: list[Alternative]

    @model_validator(mode="after")
    def _layers_name_patterns(self) -> Plan:
        return _checked_variants(self, extra=self.layers)


# --------------------------------------------------------------------------------------------------------------- frozen


class Measurement(Strict):
    """A dry run of the plan on one micro-batch."""

    peak_bytes: int
    gc_peak_bytes: int
    rel_error: float
    batch_digest: str
    date: str


class FrozenPlan(Strict):
    """What the runtime carries out. Bound to a model by its fingerprint; `digest` covers everything else in the file."""

    format: Literal["hilore-frozen-plan"] = "hilore-frozen-plan"
    version: int = FROZEN_VERSION
    name: str
    plan_digest: str
    model: ModelId
    batch: BatchId
    sources: list[str]
    estimate: Estimate | None = Field(default=None, description="the profile's: predictions come from it, `measured` never does")
    graph_digests: list[str]
    head: str
    budgets: Budgets
    patterns: dict[str, Pattern]
    layer_fqns: list[str]
    fallback: list[str] = Field(default_factory=list, description="fqns of layers that are left to torch's checkpoint")
    variants: list[Variant] = Field(min_length=1, description="above the largest every layer is recomputed")
    micro_batches: int = Field(gt=0, description="of the profiled update: over so many an exposure is compared with the mean")
    predicted: Prediction
    update: UpdatePrediction
    measured: Measurement | None
    digest: str = ""

    UNDIGESTED: ClassVar[set[str]] = {"digest"}

    @model_validator(mode="after")
    def _variants_name_patterns(self) -> FrozenPlan:
        return _checked_variants(self)


def _checked_variants(plan: Any, *, extra: Sequence[str] = ()) -> Any:
    used = {name for variant in plan.variants for name in variant.layers} | set(extra)
    if unknown := used - set(plan.patterns):
        raise ValueError(f"a layer names pattern {sorted(unknown)[0]!r}, which the file does not hold")
    for tokens in {variant.max_tokens for variant in plan.variants}:
        if [v.max_exposure for v in plan.variants if v.max_tokens == tokens].count(None) != 1:
            raise ValueError(f"the variants of {tokens} tokens need exactly one without max_exposure, for unknown and high exposure")
    return plan


def freeze(plan: FrozenPlan) -> FrozenPlan:
    """The same plan with its digest filled in."""
    return plan.model_copy(update={"digest": digest_of(plan)})
