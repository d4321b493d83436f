"""Synthetic profiles: invented times and risks over a captured SmolLM2-135M layer, and hand-made layers small enough to enumerate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hilore_cli.provenance import BatchId, Machine, ModelId
from hilore_cli.schema import (
    Account,
    CalibrationPair,
    GraphNode,
    Kappa,
    LayerClass,
    LayerRow,
    MicroBatchRow,
    Pattern,
    Profile,
    SmallerAccount,
    StepPeaks,
    StepTimes,
    UnitRow,
)
from hilore_cli.timeline import simulate_layer

MIB = 2**20
_RHO2 = {"mlp.gate_proj.mm": 8.1e-7, "mlp.up_proj.mm": 4.5e-7, "add": 3.1e-7, "self_attn.v_proj.mm": 6.8e-7, "self_attn.sdpa.out": 7.5e-7, "input": 1.2e-5}
"""int8, one layer of 30: design section 4 (squared relative error of the unit in all layers, over 30); all else as q and k."""


@cache
def smollm2_class() -> LayerClass:
    """SmolLM2-135M's layer at 16 x 64 tokens with times of about a CPU: matrix products by their bytes, the rest by memory traffic."""
    text = (Path(__file__).parent / "data" / "smollm2_layer_class.json").read_text()
    layer_class = LayerClass.model_validate_json(text)
    rows = []
    for row in layer_class.nodes:
        time_us = 0.0
        if row.side == "forward" and row.target != "placeholder" and (row.storage == row.index or row.storage < 0) and "getitem" not in row.target:
            read = sum(layer_class.nodes[layer_class.nodes[i].storage].nbytes for i in row.inputs if layer_class.nodes[i].storage >= 0)
            time_us = (read + row.nbytes) / 4000
            if row.matmul:
                time_us = 1800.0 if row.storage < 0 else row.nbytes / 640
        rows.append(row.model_copy(update={"time_us": time_us}))
    return layer_class.model_copy(update={"name": "llama", "nodes": rows})


def chain_class(*, blocks: int = 1, name: str = "chain", pinned: bool = False) -> LayerClass:
    """A layer small enough to enumerate: a norm, and `blocks` times mm -> activation, all read by backward."""
    rows: list[GraphNode] = []

    def add(node_name: str, target: str, side: str, inputs: list[int], nbytes: int, **rest: object) -> int:
        index = len(rows)
        defaults = {"storage": index, "kind": "value", "unit": None, "matmul": False, "pinned": False, "compressible": False, "time_us": 0.0}
        rows.append(GraphNode(index=index, name=node_name, target=target, side=side, inputs=inputs, nbytes=nbytes, nbytes_terms={"1": nbytes}, **(defaults | rest)))
        return index

    x = add("x", "placeholder", "forward", [], 4 * MIB, kind="activation", unit="input", compressible=True)
    weight = add("w", "placeholder", "forward", [], MIB, kind="parameter")
    tangent = add("tangents_1", "placeholder", "tangent", [], 4 * MIB)
    value = add("norm", "aten.norm", "forward", [x], 4 * MIB, unit="norm", compressible=True, time_us=500.0, pinned=pinned)
    pairs = []
    for block in range(blocks):
        product = add(f"mm_{block}", "aten.mm", "forward", [value, weight], 10 * MIB, unit=f"u-{block}", compressible=True, time_us=9000.0 + 1000 * block, matmul=True)
        act = add(f"act_{block}", "aten.silu", "forward", [product], 10 * MIB, unit=f"u_{block}", compressible=True, time_us=2000.0)
        pairs.append((value, product, act))
        value = act
    out = add("out", "aten.mm", "forward", [value, weight], 4 * MIB, unit="out", compressible=True, time_us=9000.0, matmul=True)
    gradient, outputs = tangent, []
    outputs.append(add("grad_out_w", "aten.mm", "backward", [gradient, value], MIB, matmul=True))
    gradient = add("grad_out", "aten.mm", "backward", [gradient, weight], 10 * MIB, matmul=True)
    for source, product, _ in reversed(pairs):
        gradient = add(f"act_backward_{source}", "aten.silu_backward", "backward", [gradient, product], 10 * MIB)
        outputs.append(add(f"grad_w_{source}", "aten.mm", "backward", [gradient, source], MIB, matmul=True))
        gradient = add(f"grad_{source}", "aten.mm", "backward", [gradient, weight], 10 * MIB, matmul=True)
    outputs.append(add("grad_x", "aten.norm_backward", "backward", [gradient, x], 4 * MIB))
    return LayerClass(name=name, graph_digest="0" * 16, nodes=rows, outputs=outputs, forward_outputs=[out])


def scaling(layer_class: LayerClass) -> LayerClass:
    """A chain whose activations grow with the tokens: its bytes are those at 1024."""
    own = ("w", "grad_w", "grad_out_w")  # the weight and its gradients
    rows = [row if row.name.startswith(own) else row.model_copy(update={"nbytes_terms": {"bs": row.nbytes // 1024}}) for row in layer_class.nodes]
    return layer_class.model_copy(update={"nodes": rows})


def make_profile(
    *,
    layers: int = 30,
    layer_class: LayerClass | None = None,
    head_bytes: int = 600 * MIB,
    static_bytes: int = 2150 * MIB,
    codecs: tuple[str, ...] = ("int8", "int4"),
    seed: int = 0,
    spread: float = 0.6,
    kappa: float = 1.1,
    micro_batches: Sequence[tuple[int, float, float]] = (),
    store_us: float | None = None,
) -> Profile:
    """A profile whose measured times agree with its rows: recompute-all costs exactly the sum of the node times.

    `micro_batches`: those of the update beside the profiled one, as (tokens, sum of c^2, |g_m|); the profiled one has 1 and 1.
    """
    layer_class = layer_class or smollm2_class()
    rng = random.Random(seed)
    units = []
    for layer in range(layers):
        factor = rng.lognormvariate(0.0, spread)
        for row in layer_class.nodes:
            if row.unit is None or not row.compressible or row.pinned:
                continue
            for codec in codecs:
                share, risk = (0.28125, 1.0) if codec == "int8" else (0.15625, 300.0)
                rho2 = _RHO2.get(row.unit, 1.1e-5) * factor * rng.lognormvariate(0.0, 0.3) * risk
                cost_us = row.nbytes / 8000
                units.append(UnitRow(layer=layer, unit=row.unit, codec=codec, nbytes=row.nbytes, payload_bytes=round(row.nbytes * share), compress_us=cost_us, decompress_us=cost_us / 2, rel_error=0.005, exposure_error=0.005, rho2=rho2, replayed_rho2=rho2 * (3.0 if row.unit == "input" else 1.2)))
    replay_us = simulate_layer(layer_class, Pattern(), payload_bytes=lambda unit, codec: 0).recompute_us * layers
    store_us = store_us if store_us is not None else 3.5 * replay_us  # replay is 20-30 % of a step
    timeline = simulate_layer(layer_class, Pattern(), payload_bytes=lambda unit, codec: 0)
    store = simulate_layer(layer_class, Pattern(default="store"), payload_bytes=lambda unit, codec: 0)
    gc_bytes = static_bytes + max(head_bytes + layers * timeline.stored_bytes, (layers - 1) * timeline.stored_bytes + timeline.backward_peak_bytes)
    none_bytes = static_bytes + max(head_bytes + layers * store.stored_bytes, (layers - 1) * store.stored_bytes + store.backward_peak_bytes)
    account = Account(weights_bytes=static_bytes // 4, gradients_bytes=static_bytes // 4, optimizer_bytes=static_bytes - 2 * (static_bytes // 4), shared_bytes=0, head_bytes=head_bytes, tail_bytes=0, update_bytes=0)
    return Profile(
        name="synthetic",
        created="2026-01-01T00:00:00Z",
        machine=Machine(device="cpu", cpu="invented", threads=1, torch="2.13.0", transformers="5", python="3.11", hilore="0.1.0"),
        model=ModelId(source="invented", architecture="LlamaForCausalLM", config_digest="c", layers=layers, parameters=1, trainable_digest="t", dtype="float32", attn_implementation="sdpa", lora_rank=None),
        batch=BatchId(source="invented", digest="b", task="math", rows=16, length=64, tokens=1024, loss_tokens=512, group_size=8),
        sources=["invented"],
        head="full",
        codecs=list(codecs),
        seed=0,
        gradient_norm=1.0,
        account=account,
        times=StepTimes(none_us=store_us, gc_us=store_us + 1.1 * replay_us, recompute_us=store_us + replay_us, repeats=3, threads=1),
        peaks=StepPeaks(none_bytes=none_bytes, gc_bytes=gc_bytes),
        smaller=SmallerAccount(tokens=512, account=account.model_copy(update={"head_bytes": head_bytes // 2})),
        micro_batches=[micro_batch_row(*figures) for figures in ((1024, 1.0, 1.0), *micro_batches)],
        update_gradient_norm=math.sqrt(sum(norm**2 for _, _, norm in ((1024, 1.0, 1.0), *micro_batches))),
        kappas=[Kappa(codec=codec, value=kappa, quantile=0.95, pairs=8, micro_batches=2, coverage=1.0) for codec in codecs],
        calibration=[CalibrationPair(codec=codec, plan="invented", micro_batch="invented", heldout=True, predicted_rho2=1e-4, measured_rel_error=1.05e-2) for codec in codecs],
        layers=[LayerRow(index=i, fqn=f"model.layers.{i}", layer_class=layer_class.name, grad_norm=1.0, input_grad_norm=1.0, noise_transfer=1.0) for i in range(layers)],
        classes=[layer_class],
        units=units,
    )


def micro_batch_row(tokens: int, squared: float, gradient_norm: float) -> MicroBatchRow:
    return MicroBatchRow(source="invented", digest="m", rows=max(1, tokens // 64), length=64, tokens=tokens, loss_tokens=tokens // 2, logits=None, squared=squared, scalar=squared, uniform=tokens / 1024, gradient_norm=gradient_norm)
