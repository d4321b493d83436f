"""Small steps on tiny models: ids and masks, gradients, attached patterns, captured layers, and plans made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from hilore_cli.batches import MicroBatch
from hilore_cli.capture import JointGraph, describe_joint, model_identity
from hilore_cli.codecs import get_codec, payload_bytes
from hilore_cli.identities import batch_identity
from hilore_cli.models import decoder_layers
from hilore_cli.provenance import BatchId
from hilore_cli.runtime import Handle, attach_patterns
from hilore_cli.schema import (
    Budgets,
    FrozenPlan,
    LayerClass,
    Pattern,
    Plan,
    PlannedVariant,
    Prediction,
    SolverRecord,
    UpdatePrediction,
    Variant,
    freeze,
)

LIMIT = 2**30


# ------------------------------------------------------------------------------------------------------------------- steps


def make_ids(rows: int, length: int, *, padded: bool = False, vocabulary: int = 97, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Random ids [rows, length] and a left-padding mask (None without padding; the first row is never padded)."""
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    if not padded:
        return ids, None
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : max(1, length // (row + 2))] = 0
    return ids * mask, mask


def step_loss(model: nn.Module, ids: Tensor, mask: Tensor | None, *, autocast: torch.dtype | None = None) -> Tensor:
    """A loss that every position and every logit enters; the generator is seeded, so that dropout draws the same masks."""
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
        logits = model(input_ids=ids, attention_mask=mask).logits.float()
    weight = torch.linspace(-1, 1, logits.numel()).sin().view_as(logits)
    return (logits.log_softmax(-1) * weight).sum()


def step_gradients(model: nn.Module, ids: Tensor, mask: Tensor | None, *, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gradients by parameter name; the model is left without any."""
    model.zero_grad(set_to_none=True)
    try:
        step_loss(model, ids, mask, autocast=autocast).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad(set_to_none=True)


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients that are not bitwise equal, missing ones included."""
    names = sorted(set(found) | set(expected))
    return [n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n])]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """transformers computes norms and eager softmaxes in fp32 even in a float64 model; in here llama's are of the model's dtype."""

    def norm(self: nn.Module, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: object) -> tuple[Tensor, Tensor]:
        key, value = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    with patch.object(modeling_llama.LlamaRMSNorm, "forward", norm), patch.object(modeling_llama, "eager_attention_forward", attention):
        yield


def attach_each(model: nn.Module, patterns: Sequence[Pattern], *, max_tokens: int = LIMIT) -> Handle:
    """Attach one pattern to every layer, in order; the patterns are named p0, p1, ..."""
    names = {f"p{i}": pattern for i, pattern in enumerate(patterns)}
    return attach_patterns(model, patterns=names, variants=[Variant(max_tokens=max_tokens, layers=list(names))], name="test")


def attach_one(model: nn.Module, pattern: Pattern, *, max_tokens: int = LIMIT) -> Handle:
    """Attach the same pattern, named p, to every layer."""
    layers = ["p"] * len(decoder_layers(model))
    return attach_patterns(model, patterns={"p": pattern}, variants=[Variant(max_tokens=max_tokens, layers=layers)], name="test")


# ---------------------------------------------------------------------------------------------------------------- capture


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The first graph that a step's decoder layers gave."""

    joint: JointGraph
    layer_class: LayerClass

    def payload_bytes(self, unit: str, codec: str) -> int:
        row = next(row for row in self.layer_class.nodes if row.unit == unit)
        value = next(n for n in self.joint.nodes if n.name == row.name).meta["val"]
        return payload_bytes(get_codec(codec), row.nbytes // value.element_size())


def capture(model: nn.Module, ids: Tensor, mask: Tensor | None) -> Captured:
    """Trace a forward (no backward is run) and describe its first layer's joint graph."""
    found: list[Captured] = []

    def keep(joint: JointGraph) -> None:
        found.append(Captured(joint=joint, layer_class=describe_joint(joint, name="A")))

    names = ["record"] * len(decoder_layers(model))
    with attach_patterns(model, patterns={"record": Pattern()}, variants=[Variant(max_tokens=LIMIT, layers=names)], name="record", on_split=keep):
        step_loss(model, ids, mask)
    return found[0]


# ------------------------------------------------------------------------------------------------------ plans made by hand


def prediction(*, peak_bytes: int = 10**9, rel_error: float = 0.0) -> Prediction:
    return Prediction(
        peak_bytes=peak_bytes,
        binding_moment="loss head",
        step_us=1.0,
        gc_us=1.2,
        none_us=0.9,
        gc_peak_bytes=10**9,
        none_peak_bytes=10**9,
        rel_error=rel_error,
        recompute_us=0.0,
        codec_us=0.0,
        stored_bytes=0,
        compressed_bytes=0,
    )


def update_prediction(*, micro_batches: int = 1) -> UpdatePrediction:
    return UpdatePrediction(micro_batches=micro_batches, step_us=1.0, gc_us=1.2, none_us=0.9, rel_error=0.0)


def planned_variant(layers: list[str], *, max_tokens: int, max_length: int | None = None, max_exposure: float | None = None) -> PlannedVariant:
    return PlannedVariant(max_tokens=max_tokens, max_length=max_length, max_exposure=max_exposure, layers=layers, micro_batches=1, risk=1.0, step_us=1.0, peak_bytes=10**9, rel_error=0.0)


def hand_made_plan(
    model: nn.Module,
    micro_batch: MicroBatch,
    patterns: dict[str, Pattern],
    layers: list[str],
    *,
    variants: Sequence[PlannedVariant] = (),
    micro_batches: int = 1,
    cap_bytes: int = 10**12,
    risk: float = 1.0,
    head: str = "chunked",
) -> Plan:
    """A plan that no solver made; its prediction is not meant to hold. Without `variants` it has one, for the micro-batch's size."""
    rows, length = micro_batch.shape
    return Plan(
        name="hand-made",
        profile="none",
        profile_digest="0" * 16,
        model=model_identity(model, source="tiny"),
        batch=batch_identity(micro_batch, source="synthetic", task="none"),
        sources=["synthetic"],
        graph_digests=[],
        head=head,
        budgets=Budgets(mem_cap="1.1x-gc", cap_bytes=cap_bytes, risk=risk, codecs=["int8"], max_patterns=8),
        patterns=patterns,
        layers=layers,
        variants=list(variants) or [planned_variant(layers, max_tokens=rows * length, max_length=length)],
        predicted=prediction(),
        update=update_prediction(micro_batches=micro_batches),
        solver=SolverRecord(solver="hand", status="optimal", objective_us=0.0, bound_us=0.0, gap_of_step=0.0, candidates=1, resolves=0, reproducible=True),
        alternatives=[],
    )


def frozen_plan(model: nn.Module, patterns: dict[str, Pattern], layers: list[str], *, max_tokens: int, variants: Sequence[Variant] = (), micro_batches: int = 1) -> FrozenPlan:
    """The same for the runtime: bound to this model, never run dry."""
    fqns = [fqn for fqn, _ in decoder_layers(model)][: len(layers)]
    return freeze(
        FrozenPlan(
            name="hand-made",
            plan_digest="0" * 16,
            model=model_identity(model, source="tiny"),
            batch=BatchId(source="synthetic", digest="0" * 16, task="none", rows=1, length=max_tokens, tokens=max_tokens, loss_tokens=1, group_size=1),
            sources=["synthetic"],
            graph_digests=[],
            head="chunked",
            budgets=Budgets(mem_cap="1.1x-gc", cap_bytes=10**12, risk=1.0, codecs=["int8"], max_patterns=8),
            patterns=patterns,
            layer_fqns=fqns,
            variants=list(variants) or [Variant(max_tokens=max_tokens, layers=layers)],
            micro_batches=micro_batches,
            predicted=prediction(),
            update=update_prediction(micro_batches=micro_batches),
            measured=None,
        )
    )
