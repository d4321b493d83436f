"""Traces of allocator events; measured peaks; the account and the predicted peak of a step against a measured one."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.errors import ProfileError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.peak import mark, measure_peak, static_bytes_of, trace_memory
from hilore_cli.profiler import ProfileRequest, measure_account, profile_update
from hilore_cli.schema import Pattern, Profile
from hilore_cli.timeline import simulate_step
from hilore_cli.workbench import Workbench

MIB = 2**20
CPU = torch.device("cpu")


def silent(*_: object) -> None:
    pass


def test_trace_of_a_hand_made_sequence() -> None:
    def step() -> None:
        a = torch.empty(3 * MIB, dtype=torch.uint8)
        mark("one")
        b = torch.empty(5 * MIB, dtype=torch.uint8)
        del a
        mark("two")
        c = torch.empty(2 * MIB, dtype=torch.uint8)
        mark("three")
        del b, c

    trace = trace_memory(step)
    assert trace.peak_bytes == 8 * MIB
    assert [trace.live_at(name) for name in ("one", "two", "three")] == [3 * MIB, 5 * MIB, 7 * MIB]
    assert trace.peak_between("one", "two") == 8 * MIB
    assert trace.peak_between("two", "three") == 7 * MIB
    assert trace.peak_between("three", None) == 7 * MIB
    assert trace.live_bytes[-1] == 0
    assert measure_peak(step, static_bytes=MIB, device=CPU) == 9 * MIB


def test_memory_from_before_the_step_is_not_credited() -> None:
    """Torch reports no release of what it did not see being allocated: a step that frees old memory is never understated."""
    held = [torch.empty(5 * MIB, dtype=torch.uint8)]

    def step() -> None:
        held.clear()
        held.append(torch.empty(MIB, dtype=torch.uint8))

    assert trace_memory(step).peak_bytes == MIB


def test_step_without_allocations_is_refused() -> None:
    with pytest.raises(ProfileError, match="no memory events"):
        trace_memory(silent)


def test_static_bytes_count_storages_once() -> None:
    model = build_tiny("llama", tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.numel() for p in model.parameters()) * 4
    static = static_bytes_of(model, optimizer)
    assert static["weights_bytes"] - weights == sum(b.untyped_storage().nbytes() for b in set(model.buffers()))
    assert (static["gradients_bytes"], static["optimizer_bytes"]) == (0, 0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    static = static_bytes_of(model, optimizer)
    assert static["gradients_bytes"] == weights
    assert static["optimizer_bytes"] == 2 * weights + 4 * len(list(model.parameters()))


# -------------------------------------------------------------------------------------------- one profile, several plans

MIXED = Pattern(actions={"mlp.gate_proj.mm": "store", "mlp.up_proj.mm": "store", "self_attn.sdpa.out": "store", "self_attn.sdpa.lse": "store", "add": "store"})
INT8 = Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "mlp.up_proj.mm": "compress:int8", "self_attn.sdpa.out": "compress:int8", "add": "compress:int8", "self_attn.sdpa.lse": "store"})
PATTERNS = {"store": Pattern(default="store"), "recompute": Pattern(), "mixed": MIXED, "int8": INT8, "input": Pattern(actions={"input": "compress:int8"})}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[Workbench, Profile]:
    """A llama whose activations outweigh its weights: 4 layers, 8 x 96 tokens."""
    torch.set_num_threads(1)
    model = build_tiny("llama", hidden_size=64, intermediate_size=192, head_dim=16, num_hidden_layers=4)
    batch = synthetic_micro_batch(vocab_size=97, rows=8, prompt_tokens=32, completion_tokens=64, group_size=4, seed=0)
    request = ProfileRequest(name="tiny", source="tiny", task="none", sources=["synthetic"], codecs=["int8"], config=GrpoConfig(head="chunked"), repeats=1)
    profile = profile_update(model, [("synthetic", batch)], request, folder=tmp_path_factory.mktemp("profile"), progress=silent)
    return Workbench(model, [batch], request.config), profile


@pytest.fixture(scope="module")
def measured(profiled) -> dict[str, int]:
    bench, profile = profiled
    static = sum(bench.static().values())
    peaks = {}
    for name in PATTERNS:
        with bench.assigned(PATTERNS, [name] * len(profile.layers), graph_digests=[c.graph_digest for c in profile.classes]):
            bench.gradients()
            peaks[name] = measure_peak(bench.update, static_bytes=static, device=CPU)
    return peaks


def test_activations_dominate(profiled) -> None:
    _, profile = profiled
    assert profile.peaks.none_bytes > 3 * profile.account.static_bytes


def test_recompute_all_is_not_above_checkpointing(profiled) -> None:
    bench, profile = profiled
    assert bench.peak_bytes("recompute") <= profile.peaks.gc_bytes
    assert bench.peak_bytes("store") <= profile.peaks.none_bytes


def test_account_adds_up_to_the_measured_peak_of_checkpointing() -> None:
    """static + shared + what checkpointing stores (the layers' inputs) + head, to the byte, where the head is the peak."""
    model = build_tiny("llama", vocab_size=3001)
    batch = synthetic_micro_batch(vocab_size=3001, rows=4, prompt_tokens=8, completion_tokens=24, group_size=4, seed=0)
    for head in ("full", "chunked"):
        bench = Workbench(model, [batch], GrpoConfig(head=head))
        account, gc_peak = measure_account(bench, bench.static())
        stored = batch.tokens * 32 * 4 * 2
        weights, gradients, optimizer = (account[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        assert weights + gradients + optimizer + account["shared_bytes"] + stored + account["head_bytes"] == gc_peak
        assert 0 < weights - gradients < 256, "buffers only"
        assert 2 * gradients <= optimizer <= 2 * gradients + 4 * len(list(model.parameters()))


@pytest.mark.parametrize("name", PATTERNS)
def test_predicted_peak(profiled, measured, name: str) -> None:
    """Within 3 % of the measured one, and never more than 1 % under."""
    _, profile = profiled
    predicted = simulate_step(profile, [PATTERNS[name]] * len(profile.layers))
    print(f"{name}: predicted {predicted.peak_bytes} at {predicted.binding_moment}, measured {measured[name]}: {predicted.peak_bytes / measured[name] - 1:+.2%}")
    assert 0.99 <= predicted.peak_bytes / measured[name] <= 1.03


def test_predicted_peak_of_a_plan_that_differs_by_layer(profiled) -> None:
    bench, profile = profiled
    static = sum(bench.static().values())
    names = ["recompute", "int8", "mixed", "store"]
    with bench.assigned(PATTERNS, names, graph_digests=[c.graph_digest for c in profile.classes]):
        peak = measure_peak(bench.update, static_bytes=static, device=CPU)
    predicted = simulate_step(profile, [PATTERNS[name] for name in names]).peak_bytes
    assert 0.99 <= predicted / peak <= 1.03
