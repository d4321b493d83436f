"""What two ranks do with a plan, wrapping by wrapping; test_distributed.py starts it and holds its JSON against what must be.

    torchrun --standalone --nproc-per-node 2 tests/distributed_steps.py FOLDER       # writes FOLDER/0.json and 1.json

Updates of two micro-batches, whose lengths differ between the ranks: two within the plan's small variant, which is exact, and one
that a rank takes above it, into the variant with a codec. Beside it the same wrapping without the plan, and one process that runs
all micro-batches of both ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import build_tiny
from steps_for_tests import frozen_plan, make_ids, step_loss
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hilore_cli import attach
from hilore_cli.capture import graph_digest
from hilore_cli.models import decoder_layers, unwrapped
from hilore_cli.runtime import Handle, attach_patterns
from hilore_cli.schema import FrozenPlan, Pattern, Variant, freeze

WORLD = 2
PATTERNS = {
    "exact": Pattern(actions={"mlp.gate_proj.mm": "store", "self_attn.v_proj.mm": "store", "add": "store"}),
    "codec": Pattern(default="store", actions={"mlp.gate_proj.mm": "recompute", "mlp.up_proj.mm": "compress:int8"}),
}
SMALL = Variant(max_tokens=24, max_length=12, layers=["exact", "exact"])
LARGE = Variant(max_tokens=48, max_length=16, layers=["codec", "exact"])
UPDATES = {  # of each micro-batch (rows, length) of rank 0 and of rank 1
    "exact": [((2, 8), (2, 11)), ((2, 9), (2, 6))],
    "exact again": [((2, 5), (2, 7)), ((2, 12), (2, 10))],
    "codec": [((2, 8), (3, 15)), ((3, 16), (2, 9))],
}
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Gradients = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------------------ steps


def micro_batches(update: str, rank: int) -> list[tuple[Tensor, Tensor]]:
    return [make_ids(*sizes[rank], padded=True, seed=10 * index + rank) for index, sizes in enumerate(UPDATES[update])]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def run_update(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Gradients:
    """Accumulate without communication but for the last micro-batch, clip, step; the gradients are those before clipping."""
    for index, (ids, mask) in enumerate(batches):
        with synchronised(model, last=index == len(batches) - 1):
            step_loss(model, ids, mask).backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@contextmanager
def synchronised(model: nn.Module, *, last: bool) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def local(values: Gradients) -> Gradients:
    return {name.removeprefix("module."): value.to_local() if isinstance(value, DTensor) else value for name, value in values.items()}


def whole(values: Gradients) -> Gradients:
    return {name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def distance(found: Gradients, expected: Gradients) -> float:
    """Relative, over all parameters."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in found)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def differing(found: Gradients, expected: Gradients) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


# -------------------------------------------------------------------------------------------------- one process, both ranks


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process has, with no layer wrapped."""

    gradients: dict[str, Gradients]  # of each update, the mean over the ranks of each rank's sum, as DDP and FSDP make it
    payload_bytes: int  # of the planned layers, as in `look_inside`
    graph_digests: list[str]


def run_in_one_process(*, dtype: torch.dtype = torch.float32, plan: FrozenPlan | None = None) -> Reference:
    model = build_tiny("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer, gradients, payload, digests = optimizer_of(model), {}, 0, []
    handle = None if plan is None else attach_patterns(model, patterns=plan.patterns, variants=plan.variants, name="one process", on_split=lambda joint: digests.append(graph_digest(joint)))
    for update, sizes in UPDATES.items():
        for rank in range(WORLD):
            for index, (ids, mask) in enumerate(micro_batches(update, rank)):
                if handle is not None:  # of its own size it would get another variant than the larger of the two ranks'
                    handle.microbatch(tokens=max(rows * length for rows, length in sizes[index]), length=max(length for _, length in sizes[index]))
                (step_loss(model, ids, mask) / WORLD).backward()
        gradients[update] = {name: p.grad.float().clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.microbatch(tokens=LARGE.max_tokens, length=LARGE.max_length)
        loss = step_loss(model, *micro_batches("codec", dist.get_rank())[0])
        payload = sum(nbytes for _, nbytes in payloads(loss, {p.untyped_storage()._cdata for p in model.parameters()}))
        handle.detach()
    return Reference(gradients=gradients, payload_bytes=payload, graph_digests=sorted(set(digests)))


def payloads(loss: Tensor, parameters: set[int]) -> list[tuple[Tensor, int]]:
    """What the planned layers' graphs hold for backward and is on no parameter's storage: one tensor and its bytes for each storage."""
    found, waiting, seen = {}, [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if node.name().startswith("CompiledFunction"):
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                found[tensor.untyped_storage()._cdata] = (tensor, tensor.untyped_storage().nbytes())
    return [value for key, value in found.items() if key not in parameters]


# ------------------------------------------------------------------------------------------------------------- the wrappings


@dataclass(frozen=True, kw_only=True)
class Case:
    attach: str  # "before" or "after" wrapping
    wrap: Callable[[nn.Module], nn.Module]
    reference: str = "planned"  # the one process with the plan that its gradients are held against, or in bf16 without


def shard(model: nn.Module, *, reshard_after_forward: bool, **options: Any) -> nn.Module:
    """Layer by layer; the root, which FSDP keeps whole after a forward, by its defaults."""
    for _, layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, **options)


CASES = {
    "fsdp, before, resharded": Case(attach="before", wrap=lambda model: shard(model, reshard_after_forward=True)),
    "fsdp, after, whole": Case(attach="after", wrap=lambda model: shard(model, reshard_after_forward=False)),
    "fsdp bf16, before, whole": Case(attach="before", wrap=lambda model: shard(model, reshard_after_forward=False, mp_policy=LOW), reference="bf16"),
    "fsdp bf16, after, resharded": Case(attach="after", wrap=lambda model: shard(model, reshard_after_forward=True, mp_policy=LOW), reference="bf16"),
    "ddp, before, small buckets": Case(attach="before", wrap=lambda model: DistributedDataParallel(model, bucket_cap_mb=0.01)),
    "ddp, after": Case(attach="after", wrap=DistributedDataParallel),
}


def run_case(case: Case, *, plan: FrozenPlan, reference: Reference) -> dict[str, Any]:
    plain, model = case.wrap(build_tiny("llama")), build_tiny("llama")
    handle = attach(model, plan) if case.attach == "before" else None
    wrapped = case.wrap(model)
    optimizers = [optimizer_of(plain), optimizer_of(wrapped)]
    for either in (plain, wrapped):
        with torch.no_grad():  # as a generation's: it leaves parameters whole, and in the policy's dtype
            either(input_ids=make_ids(2, 9)[0])
    handle = handle or attach(wrapped, plan)
    result: dict[str, Any] = {"class": type(decoder_layers(model)[0][1]).__name__}
    for update in UPDATES:
        calls, variants = handle.calls.copy(), handle.microbatches.copy()
        expected, found = (run_update(each, optimizer, micro_batches(update, dist.get_rank())) for each, optimizer in zip((plain, wrapped), optimizers, strict=True))
        result[update] = {
            "differing": differing(local(found), local(expected)),
            "parameters differing": differing(local(dict(wrapped.named_parameters())), local(dict(plain.named_parameters()))),
            "from no plan": distance(whole(found), whole(expected)),
            "from one process": distance(whole(found), reference.gradients[update]),
            "calls": dict(handle.calls - calls),
            "variants": dict(handle.microbatches - variants),
        }
    result["graphs"] = dict(handle.graphs)
    if isinstance(wrapped, FSDPModule):
        result["bytes"] = look_inside(wrapped, handle)
    return result | {"detached": run_detached(wrapped, handle)}


def look_inside(model: nn.Module, handle: Handle) -> dict[str, Any]:
    """Bytes of the decoder layers' parameters while they run and after the forward, and what the planned layers keep beside them."""
    layers = [layer for _, layer in decoder_layers(model)]
    gathered: list[tuple[torch.UntypedStorage, int, Tensor]] = []

    def note(layer: nn.Module, _: Any) -> None:
        gathered.extend((p.untyped_storage(), p.untyped_storage().nbytes(), p.detach().float().clone()) for p in layer.parameters())

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    handle.microbatch(tokens=LARGE.max_tokens, length=LARGE.max_length)
    loss = step_loss(model, *micro_batches("codec", dist.get_rank())[0])
    for hook in hooks:
        hook.remove()
    kept = payloads(loss, {storage._cdata for storage, *_ in gathered})
    values = {tuple(sorted(value.flatten().tolist())) for _, _, value in gathered}
    result = {
        "gathered": sum(nbytes for _, nbytes, _ in gathered),
        "after forward": sum(storage.nbytes() for storage, *_ in gathered),
        "payload": sum(nbytes for _, nbytes in kept),
        "payloads that are parameters": sum(tensor.is_floating_point() and tuple(sorted(tensor.float().flatten().tolist())) in values for tensor, _ in kept),
    }
    loss.backward()
    model.zero_grad()
    return result | {"sharded": sum(p.to_local().untyped_storage().nbytes() for layer in layers for p in layer.parameters())}


def run_detached(wrapped: nn.Module, handle: Handle) -> dict[str, Any]:
    """A step without the plan, and what is left on the layers."""
    handle.detach()
    calls = handle.calls.copy()
    step_loss(wrapped, *micro_batches("exact", dist.get_rank())[0]).backward()
    left = {name for _, layer in decoder_layers(unwrapped(wrapped)) for name in ("forward", "_hilore") if name in vars(layer)}
    return {"calls": dict(handle.calls - calls), "left": sorted(left)}


def run_modes() -> dict[str, list[str]]:
    """Sharded layers with attention dropout in train mode, in eval mode and in train mode again: gradients that differ from no plan's."""
    found = {}
    for planned in (False, True):
        model = shard(build_tiny("llama", attention_dropout=0.5), reshard_after_forward=True)
        handle = attach_patterns(model, patterns=PATTERNS, variants=[Variant(max_tokens=48, layers=SMALL.layers)], name="modes") if planned else None
        for step, training in enumerate((True, False, True)):
            step_loss(model.train(training), *micro_batches("exact", 0)[0]).backward()
            found[planned, step] = local({name: p.grad.clone() for name, p in model.named_parameters()})
            model.zero_grad()
        if handle is not None:
            handle.detach()
    result = {mode: differing(found[True, step], found[False, step]) for step, mode in enumerate(("train", "eval", "train again"))}
    return result | {"between modes": differing(found[False, 0], found[False, 1])}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_tiny("llama")
    plan = frozen_plan(model, PATTERNS, LARGE.layers, max_tokens=LARGE.max_tokens, variants=[SMALL, LARGE])
    references = {"planned": run_in_one_process(plan=plan), "none": run_in_one_process(), "bf16": run_in_one_process(dtype=torch.bfloat16)}
    plan = freeze(plan.model_copy(update={"graph_digests": references["planned"].graph_digests}))
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result[name] = run_case(case, plan=plan, reference=references[case.reference])
        result[name]["warnings"] = sorted({str(warning.message) for warning in caught if str(warning.message).startswith("plan ")})
    result["modes"] = run_modes()
    result["one process"] = {update: distance(references["planned"].gradients[update], references["none"].gradients[update]) for update in UPDATES}
    result["payload of one process"] = references["planned"].payload_bytes
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
