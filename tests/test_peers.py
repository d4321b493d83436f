"""Peers on a tiny llama: what each keeps, recomputes and changes, by counting; nothing stays patched."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from conftest import build_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli import paper_dp
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import gradient_error
from hilore_cli.errors import UsageError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.paper_dp import LayerCosts, choose_actions, non_negative_least_squares, run_actions
from hilore_cli.peers import (
    UNSCALED,
    Packing,
    PeerBench,
    all_but_spread,
    checkpoint_ops,
    checkpoint_some,
    compile_within,
    every_kth,
    pack_all,
    pack_inputs,
    pack_mlp,
    packing_of,
    wrapped,
)

LAYERS = 4
PRODUCTS_OF_A_LAYER = 7
TINY = {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
BATCH = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=16, completion_tokens=32, group_size=4, seed=0)

PEERS = {
    "half": checkpoint_some(every_kth(LAYERS, 2)),
    "sac-attention": checkpoint_ops("none"),
    "sac-half-mm": checkpoint_ops("half"),
    "sac-mm": checkpoint_ops("all"),
    "membudget-0": compile_within(0.0),
    "membudget-1": compile_within(1.0),
    "fp8-all": pack_all(packing_of("e4m3")),
    "gc+fp8-boundary": pack_inputs(packing_of("e4m3")),
    "int8-mlp": pack_mlp(packing_of("int8")),
    "paper-L": pack_mlp(UNSCALED, names=("up_proj",)),
    "mixed": run_actions("HLRR"),
}


@pytest.fixture(scope="module")
def bench() -> PeerBench:
    torch.set_num_threads(1)
    bench = PeerBench(build_tiny("llama", **TINY), [BATCH], GrpoConfig(head="chunked"))
    for name, wrap in PEERS.items():
        bench.add_peer(name, wrap)
    return bench


@pytest.fixture(scope="module")
def found(bench) -> dict[str, tuple[float, int, int]]:
    """Of each method: gradient error, matrix products of a step, peak."""
    exact = bench.gradients_by("none")
    rows = {}
    for name in ("none", "gc", *PEERS):
        error = gradient_error(bench.gradients_by(name), exact)
        rows[name] = (error, count_products(bench, name), bench.peak_bytes(name))
    assert not any("forward" in vars(layer) for _, layer in bench.layers), "nothing stays patched"
    assert all(torch.equal(g, exact[name]) for name, g in bench.gradients().items())
    return rows


def count_products(bench: PeerBench, method: str) -> int:
    """By operator; a compiled method's by the profiler, because torch compiles nothing under a dispatch mode."""
    if method.startswith("membudget"):
        with bench.method(method), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as events:
            bench.gradients()
        return sum(event.name in ("aten::mm", "aten::addmm") for event in events.events())
    with Counter() as counter, bench.method(method):
        bench.gradients()
    return counter.products


class Counter(TorchDispatchMode):
    """Counts matrix products that are run; what selective checkpointing takes out of its cache is none."""

    products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.products += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return op(*args, **(kwargs or {}))


def test_exact_peers_have_the_same_gradients(found) -> None:
    errors = {name: row[0] for name, row in found.items()}
    assert {name for name, error in errors.items() if error == 0.0} == {"none", "gc", "half", "sac-attention", "sac-half-mm", "sac-mm"}
    assert all(0 < errors[name] < 1e-6 for name in ("membudget-0", "membudget-1")), "decomposed operators round differently"
    assert all(1e-4 < errors[name] < 0.2 for name in ("fp8-all", "gc+fp8-boundary", "int8-mlp", "paper-L", "mixed"))
    assert errors["int8-mlp"] < errors["fp8-all"]


def test_products_that_are_recomputed(found) -> None:
    """All but the last of a layer, whose output nothing saves: torch stops before it."""
    again = {name: row[1] - found["membudget-1" if name.startswith("membudget") else "none"][1] for name, row in found.items()}
    whole = PRODUCTS_OF_A_LAYER - 1
    assert again["gc"] == again["gc+fp8-boundary"] == again["sac-attention"] == LAYERS * whole
    assert again["half"] == again["mixed"] == 2 * whole
    assert again["sac-mm"] == again["fp8-all"] == again["int8-mlp"] == again["paper-L"] == 0
    assert again["sac-half-mm"] == LAYERS * 3, "k, o and up of q, k, v, o, gate, up, down"
    assert again["membudget-0"] == LAYERS * whole


def test_peaks(found, bench) -> None:
    peaks = {name: row[2] for name, row in found.items()}
    assert peaks["gc"] < peaks["half"] < peaks["none"]
    assert peaks["gc"] < peaks["sac-attention"] < peaks["sac-half-mm"] < peaks["sac-mm"] < peaks["none"]
    assert peaks["membudget-0"] < peaks["membudget-1"]
    assert peaks["fp8-all"] < peaks["none"] - (peaks["none"] - peaks["gc"]) / 2
    hidden = BATCH.tokens * TINY["hidden_size"] * 4
    kept = hidden - BATCH.tokens * TINY["hidden_size"] * 34 // 32
    assert peaks["gc"] - peaks["gc+fp8-boundary"] == pytest.approx((LAYERS - 1) * kept, abs=hidden), "all inputs but those of the layer in work"
    wide = BATCH.tokens * TINY["intermediate_size"] * 4
    assert peaks["none"] - peaks["int8-mlp"] == pytest.approx(2 * LAYERS * wide * (1 - 34 / 128), abs=4 * wide)
    assert peaks["none"] - peaks["paper-L"] == pytest.approx(LAYERS * wide * 3 / 4, abs=2 * wide)


def test_heads_by_name(bench) -> None:
    with bench.method("half@full"):
        assert bench.config.head == "full"
    assert bench.config.head == "chunked"
    assert gradient_error(bench.gradients_by("half@full"), bench.gradients_by("none@full")) == 0.0


def test_what_a_layer_saves_is_packed_once(bench) -> None:
    """q, k and v save one normed input, gate and up another: one payload each. None of parameters, rotary angles, masks or statistics of rows."""
    packed: list[torch.Tensor] = []  # held, so that no address comes twice
    codec = packing_of("e4m3")

    def encode(flat):
        packed.append(flat)
        return codec.encode(flat)

    with wrapped(bench.layers[:1], pack_all(Packing(encode=encode, decode=codec.decode))):
        bench.gradients()
    hidden, wide = BATCH.tokens * TINY["hidden_size"], BATCH.tokens * TINY["intermediate_size"]
    sizes = [len(flat) for flat in packed]
    assert set(sizes) == {wide, hidden, hidden // 2}, "keys and values are those of one head, expanded over two"
    assert sizes.count(wide) == 4, "gate, silu of it, up, their product"
    assert len({flat.data_ptr() for flat in packed}) == len(packed)
    assert sum(sizes) * 4 == pytest.approx(paper_dp.held_bytes(bench)[0], rel=0.05)


def test_a_class_that_others_compiled_before_is_compiled_again(bench, found) -> None:
    bench.add_peer("membudget-half", compile_within(0.5))
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):  # both used up: by the peers of `found`
        gradients = bench.gradients_by("membudget-half")
    assert gradient_error(gradients, bench.gradients_by("none")) < 1e-5


def test_a_layer_without_an_mlp_is_refused() -> None:
    other = PeerBench(build_tiny("phi3", num_hidden_layers=1), [BATCH], GrpoConfig())
    with pytest.raises(UsageError, match="layer 0 has no gate_proj and up_proj"):
        other.add_peer("int8-mlp", pack_mlp(packing_of("int8")))
    assert "forward" not in vars(other.layers[0][1])


def test_positions() -> None:
    assert list(every_kth(7, 3)) == [0, 3, 6]
    assert all_but_spread(6, 0) == [0, 1, 2, 3, 4, 5]
    assert all_but_spread(6, 2) == [0, 2, 3, 5]
    assert all(len(all_but_spread(30, stored)) == 30 - stored for stored in range(31))


# ----------------------------------------------------------------------------------------------------------------- paper-dp


def test_the_knapsack_against_enumeration() -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        layers = 5
        full = generator.integers(40, 80, layers)
        costs = LayerCosts(nbytes=np.stack([full, full // 2], 1).astype(float), saved_us=np.stack([generator.uniform(8, 12, layers), generator.uniform(4, 9, layers)], 1), risk=generator.integers(1, 6, layers).astype(float))
        room, risk = 128, 8.0  # whole bins of 1024 / 128 and 1024 / 8: nothing is rounded

        def figures(actions: str, costs: LayerCosts = costs) -> tuple[float, float, float]:
            kept = [(layer, "HL".index(a)) for layer, a in enumerate(actions) if a != "R"]
            return sum(costs.saved_us[k] for k in kept), sum(costs.nbytes[k] for k in kept), sum(costs.risk[layer] for layer, a in kept if a == 1)

        best = max(gain for gain, nbytes, error in map(figures, map("".join, product("HLR", repeat=layers))) if nbytes <= room and error <= risk)
        gain, nbytes, error = figures(choose_actions(costs, room_bytes=room, risk=risk))
        assert gain == pytest.approx(best)
        assert nbytes <= room
        assert error <= risk
        assert set(choose_actions(costs, room_bytes=0, risk=risk)) == {"R"}
        assert "L" not in choose_actions(costs, room_bytes=room, risk=0.0)


def test_non_negative_least_squares() -> None:
    design = np.random.default_rng(1).uniform(0, 1, (16, 4))
    truth = np.array([0.5, 0.0, 2.0, 1.0])
    assert non_negative_least_squares(design, design @ truth) == pytest.approx(truth, abs=1e-6)
    assert (non_negative_least_squares(design, -design @ truth) == 0).all()


def test_costs_are_of_the_model(bench) -> None:
    bench.add_peer(paper_dp.ALL_LOSSY, PEERS["paper-L"])
    risks = paper_dp.measure_risks(bench, progress=lambda *_: None)
    assert risks.shape == (LAYERS,)
    assert (risks >= 0).all()
    assert risks.sum() > 0
    gc, none = bench.peak_bytes("gc"), bench.peak_bytes("none")
    costs = paper_dp.measure_costs(bench, head="chunked", gc_peak=gc, none_peak=none, clock=1, kappa_eps=risks, progress=lambda *_: None)
    assert costs.nbytes[:, 0].sum() == pytest.approx(none - gc)
    assert (costs.nbytes[:, 1] < costs.nbytes[:, 0]).all()
    assert costs.nbytes[:, 0].std() < 0.02 * costs.nbytes[:, 0].mean(), "equal layers hold as much"

    def peak(actions: str) -> int:
        bench.add_peer(f"try-{actions}", run_actions(actions))
        return bench.peak_bytes(f"try-{actions}")

    cap = gc + (none - gc) // 2
    exact = LayerCosts(nbytes=costs.nbytes, saved_us=np.tile([2.0, 1.0], (LAYERS, 1)), risk=risks)
    tried = paper_dp.settle_actions(exact, cap_bytes=cap, gc_peak=gc, risk=1.0, measured_peak=peak)
    assert tried[-1][1] <= cap
    assert set(tried[-1][0]) > {"R"}
    assert len({actions for actions, _ in tried}) == len(tried)
