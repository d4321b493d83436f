"""One stage of run_on_gpu.py: a whole update of a model of 1.2 billion random weights, profiled, planned, applied and benchmarked.

    python tests/update_on_gpu.py update.json --work FOLDER [--rehearse]

Parts run one after the other on one model; each adds its result, or its error, to the file as soon as it is done, and a part whose
forerunner failed is skipped with its name. What random weights cannot show: outliers, so errors here say nothing about a real model.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hilore_cli.batches import MicroBatch, synthetic_micro_batch
from hilore_cli.bench import apply_plan, run_bench
from hilore_cli.grpo import GrpoConfig, relative_error
from hilore_cli.models import choose_device, load_model
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.schema import FrozenPlan, Pattern, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.timeline import simulate_step
from hilore_cli.workbench import UNIFORM, Workbench

BENCHED = 2
"""The first plans are benchmarked, the others run dry after that, if there is time."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is trained, and on what. `config` as in LlamaConfig; tokens = rows x (prompt + completion)."""

    config: Mapping[str, int]
    dtype: str
    rows: int
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    exact_rows: int
    repeats: int
    plans: Mapping[str, tuple[str, float]]
    """name -> (cap, risk)"""
    max_patterns: int
    """of a plan; each is compiled twice here, in the dry run and in the benchmark: seconds that the whole run has not"""
    judged: bool
    """whether a plan that misses its cap or risk is a failure; on a tiny model any plan may"""


LLAMA_1B = Scale(
    config={"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256},
    dtype="bfloat16",
    rows=16,
    prompt_tokens=256,
    completion_tokens=768,
    group_size=8,
    exact_rows=4,
    repeats=5,
    plans={"first": ("1.1x-gc", 0.015), "exact": ("1.1x-gc", 0.0), "tight": ("1.0x-gc", 0.015)},
    max_patterns=4,
    judged=True,
)
REHEARSAL = Scale(
    config={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192, "vocab_size": 128},
    dtype="float32",
    rows=8,
    prompt_tokens=32,
    completion_tokens=64,
    group_size=4,
    exact_rows=4,
    repeats=1,
    plans={"first": ("1.3x-gc", 0.05), "exact": ("1.3x-gc", 0.0)},
    max_patterns=1,
    judged=False,
)


@dataclass(kw_only=True)
class Update:
    """What the parts hand on; None where the part that makes it failed."""

    scale: Scale
    device: torch.device
    work: Path
    model: nn.Module | None = None
    batches: list[tuple[str, MicroBatch]] = field(default_factory=list)
    profile: Profile | None = None
    frozen: dict[str, FrozenPlan] = field(default_factory=dict)


class MissingPartError(Exception):
    """A part needs what an earlier one did not make."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    arguments = parser.parse_args()
    scale = REHEARSAL if arguments.rehearse else LLAMA_1B
    update = Update(scale=scale, device=choose_device("cpu" if arguments.rehearse else "cuda"), work=arguments.work)
    plans = [(f"plan {name}", lambda update, name=name: plan_and_apply(update, name)) for name in scale.plans]
    parts = {"model": build_model, "exactness": compare_exactly, "profile": take_profile, **dict(plans[:BENCHED]), "bench": benchmark, **dict(plans[BENCHED:]), "allocator": count_allocator}
    run_parts(update, parts, output=arguments.output)


def run_parts(update: Update, parts: Mapping[str, Callable[[Update], dict[str, Any]]], *, output: Path) -> None:
    """Run each part and write what is known after each. A result that holds `problem` counts as failed."""
    done: dict[str, Any] = {}
    for name, part in parts.items():
        started = time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            result = part(update)
            entry = {"status": "failed" if result.get("problem") else "ok", "result": result}
        except MissingPartError as missing:
            entry = {"status": "skipped", "error": str(missing)}
        except Exception as error:  # whatever it is, the other parts' results are kept
            traceback.print_exc()
            entry = {"status": "failed", "error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        done[name] = entry | {"seconds": round(time.monotonic() - started, 1)}
        output.write_text(json.dumps(done, indent=1))
        print(f"{done[name]['status']} in {done[name]['seconds']} s {entry.get('error', '')}", flush=True)
        gc.collect()
        if update.device.type == "cuda":
            torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------- parts


def build_model(update: Update) -> dict[str, Any]:
    """Random weights of the scale's shape, saved and loaded as a user's model is; three micro-batches of one size."""
    scale, folder = update.scale, update.work / "model"
    config = LlamaConfig(**scale.config, max_position_embeddings=4096, tie_word_embeddings=True, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    with update.device:
        AutoModelForCausalLM.from_config(config).to(getattr(torch, scale.dtype)).save_pretrained(folder)
    update.model = load_model(folder, dtype=scale.dtype, device=update.device)
    update.batches = [(f"synthetic-{seed}", draw_batch(scale, rows=scale.rows, seed=seed)) for seed in range(3)]
    return {"parameters": sum(p.numel() for p in update.model.parameters()), "dtype": scale.dtype, "layers": config.num_hidden_layers, "tokens": update.batches[0][1].tokens, "loss_tokens": update.batches[0][1].loss_tokens}


def compare_exactly(update: Update) -> dict[str, Any]:
    """Gradients of every exact method against plain eager ones, bitwise: with deterministic kernels, and as a trainer runs them."""
    bench = Workbench(needed(update.model, "model"), [draw_batch(update.scale, rows=update.scale.exact_rows, seed=9)], GrpoConfig())
    kernels = {"deterministic": differences(bench)} if bench.repeats_exactly else {}
    if not bench.repeats_exactly:  # or no longer: torch refused one of the kernels
        kernels.clear()
    if update.device.type == "cuda":
        bench.repeats_exactly = False
        kernels["default"] = differences(bench)
    unequal = [name for name, row in kernels.get("deterministic", {}).items() if row["differing"]]
    problem = f"not bitwise equal to eager: {', '.join(unequal)}" if unequal else "" if "deterministic" in kernels else "torch's deterministic mode was refused, so that nothing can be told bit for bit"
    if "none" in unequal:
        problem += "; none itself differs from one time to the next"
    return {"kernels": kernels, "problem": problem}


def differences(bench: Workbench) -> dict[str, dict[str, Any]]:
    """Method -> how many parameters' gradients differ from the first of `none`, and by how much; `none` once more is the noise."""
    exact = bench.gradients_by("none")
    rows = {}
    for method in ("none", "gc", *UNIFORM):
        gradient = bench.gradients_by(method)
        rows[method] = {"differing": sum(not torch.equal(gradient[name], exact[name]) for name in exact), "parameters": len(exact), "rel_error": relative_error(gradient, exact)}
    return rows


def take_profile(update: Update) -> dict[str, Any]:
    """The whole profile under one codec; its account, and the peaks that it predicts for the uniform plans."""
    scale = update.scale
    request = ProfileRequest(name="gpu", source="random", task="synthetic", sources=[source for source, _ in update.batches], codecs=["int8"], config=GrpoConfig(), repeats=min(scale.repeats, 3))
    update.profile = profile_update(needed(update.model, "model"), update.batches, request, folder=update.work / "profile", progress=say_progress())
    profile = update.profile
    return {
        "account": profile.account.model_dump(),
        "times": profile.times.model_dump(),
        "peaks": profile.peaks.model_dump(),
        "predicted_bytes": {name: simulate_step(profile, [pattern] * len(profile.layers)).peak_bytes for name, pattern in {"store": Pattern(default="store"), "recompute": Pattern()}.items()},
        "kappas": [kappa.model_dump() for kappa in profile.kappas],
        "classes": len(profile.classes),
        "units": [{"unit": row.unit, "mib": round(row.nbytes / 2**20, 2), "compress_us": row.compress_us, "decompress_us": row.decompress_us, "rho2": row.rho2} for row in profile.units if row.layer == len(profile.layers) // 2],
        "operators_us": {row.name: row.time_us for row in profile.classes[0].nodes if row.matmul and row.side == "forward"},
    }


def plan_and_apply(update: Update, name: str) -> dict[str, Any]:
    """Solve, then run dry on the profiled micro-batch; errors are judged on another."""
    cap, risk = update.scale.plans[name]
    profile = needed(update.profile, "profile")
    started = time.monotonic()
    plan = solve_plan(profile, cap=parse_cap(cap), risk=risk, codecs=profile.codecs, name=name, max_patterns=update.scale.max_patterns)
    solved_s = time.monotonic() - started
    profiled = [batch for source, batch in update.batches if source == profile.batch.source]
    others = [batch for source, batch in update.batches if source != profile.batch.source]
    frozen = apply_plan(update.model, plan, profiled, heldout=others[:1], emit_anyway=True, progress=say_progress())
    update.frozen[name] = frozen
    predicted, measured = plan.predicted, frozen.measured
    missed = {"peak over its cap": measured.peak_bytes > plan.budgets.cap_bytes, "gradient error over its risk": measured.rel_error > risk} if update.scale.judged else {}
    return {
        "cap": cap,
        "cap_bytes": plan.budgets.cap_bytes,
        "risk": risk,
        "predicted": predicted.model_dump() | {"speedup_vs_gc": predicted.speedup_vs_gc, "recovered": predicted.recovered},
        "measured": measured.model_dump(),
        "peak_error": predicted.peak_bytes / measured.peak_bytes - 1,
        "solver": plan.solver.model_dump() | {"seconds": round(solved_s, 1)},
        "patterns": {key: pattern.model_dump() for key, pattern in plan.patterns.items()},
        "layers": plan.layers,
        "problem": ", ".join(words for words, is_so in missed.items() if is_so),
    }


def benchmark(update: Update) -> dict[str, Any]:
    """All methods side by side, interleaved, on the profiled micro-batch."""
    if not update.frozen:
        raise MissingPartError("needs a plan")
    profile = needed(update.profile, "profile")
    first, *rest = update.frozen.values()
    batches = [(source, batch) for source, batch in update.batches if source == profile.batch.source]
    report = run_bench(update.model, first, batches, repeats=update.scale.repeats, progress=say_progress(), also=UNIFORM, others={plan.name: plan for plan in rest})
    return report.model_dump(mode="json")


def count_allocator(update: Update) -> dict[str, Any]:
    """What the allocator hands out and keeps beyond what is asked for, over one update of each of two methods."""
    if update.device.type == "cpu":
        return {"none": "a CPU's allocator counts nothing"}
    bench = Workbench(needed(update.model, "model"), [update.batches[0][1]], GrpoConfig())
    rows: dict[str, Any] = {"static": bench.static()}
    for method in ("none", "gc"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(update.device)
        with bench.method(method):
            bench.update()
        stats = torch.cuda.memory_stats(update.device)
        rows[method] = {which: stats[f"{which}_bytes.all.peak"] for which in ("requested", "allocated", "reserved")}
    return rows


# --------------------------------------------------------------------------------------------------------------- helpers


def needed(value: Any, part: str) -> Any:
    if value is None:
        raise MissingPartError(f"needs {part}")
    return value


def draw_batch(scale: Scale, *, rows: int, seed: int) -> MicroBatch:
    return synthetic_micro_batch(vocab_size=scale.config["vocab_size"], rows=rows, prompt_tokens=scale.prompt_tokens, completion_tokens=scale.completion_tokens, group_size=min(scale.group_size, rows), seed=seed)


def say_progress() -> Callable[[str, int, int], None]:
    """Progress into the log, with the seconds since the part began: what a stage took is read from there."""
    started = time.monotonic()
    return lambda what, done, total: print(f"{time.monotonic() - started:7.1f} s  {what} {done}/{total}", flush=True)


if __name__ == "__main__":
    main()
