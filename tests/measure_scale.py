"""What planning and the runtime cost as models grow; the table "Scale" of the README comes from here.

    OMP_NUM_THREADS=1 python tests/measure_scale.py

Planning: synthetic profiles of SmolLM2's layer (16 units, two codecs) and of chains of more and more products, on one core.
Runtime: no checkpointing against the runtime with everything stored, on llamas of tiny layers, where all that differs is our own work.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from conftest import build_tiny
from profiles_for_tests import chain_class, make_profile

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.grpo import GrpoConfig
from hilore_cli.planner import solve_plan
from hilore_cli.schema import Plan, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.workbench import Workbench

LAYERS = (12, 24, 48, 96)
BLOCKS = (2, 6, 12)
REPEATS = 30


def timed_plan(profile: Profile) -> tuple[float, Plan]:
    started = time.perf_counter()
    plan = solve_plan(profile, cap=parse_cap("1.1x-gc"), risk=0.015, codecs=["int8", "int4"], name="scale")
    return time.perf_counter() - started, plan


def tell_planning(name: str, profile: Profile) -> None:
    seconds, plan = timed_plan(profile)
    units = len({unit.unit for unit in profile.units})
    print(f"plan     {name:12} {len(profile.layers):3} layers, {units:2} units: {seconds:6.1f} s, {100 * plan.solver.gap_of_step:.3f} % of the step above the bound, {plan.solver.candidates} candidates, {len(plan.patterns)} patterns")


def tell_runtime(layers: int, tokens: int) -> None:
    """Wall time of one update less that without the runtime, for each layer; median of pairs."""
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=tokens // 8, completion_tokens=tokens // 8, group_size=4, seed=0)
    bench = Workbench(build_tiny("llama", num_hidden_layers=layers), [batch], GrpoConfig(head="full"))
    for method in ("none", "store"):
        bench.compile(method)
    samples = bench.time_updates(["none", "store"], repeats=REPEATS, progress=lambda *_: None)
    differences = [(store - none) / layers for (none, _), (store, _) in zip(samples["none"], samples["store"], strict=True)]
    print(f"runtime  {layers:3} layers, {batch.tokens:4} tokens: {median(differences):6.1f} us a layer and step (update {median(none for none, _ in samples['none']) / 1e3:.1f} ms)")


def main() -> None:
    torch.set_num_threads(1)
    for layers in LAYERS:
        tell_planning("smollm2", make_profile(layers=layers))
    for blocks in BLOCKS:
        tell_planning(f"chain of {blocks}", make_profile(layers=24, layer_class=chain_class(blocks=blocks), head_bytes=64 * 2**20, static_bytes=256 * 2**20))
    for layers, tokens in ((12, 64), (24, 64), (96, 64), (24, 512)):
        tell_runtime(layers, tokens)


if __name__ == "__main__":
    main()
