"""Traces of allocator events; measured peaks; the account and the predicted peak of a step against a measured one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tiny

from hilore_cli import peak
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.errors import InfeasibleError, ProfileError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.peak import (
    CountTracer,
    EventTracer,
    Tracer,
    mark,
    measure_peak,
    static_bytes_of,
    trace_memory,
    tracer_for,
    workspace_bytes,
)
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.schema import Pattern, Plan, Profile
from hilore_cli.sizes import parse_cap
from hilore_cli.timeline import simulate_step
from hilore_cli.whole_step import measure_account
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


# ----------------------------------------------------------------------------------------------- a GPU's allocator, made up

GPU = torch.device("cuda:0")
DeviceType = torch.autograd.DeviceType


@dataclass(frozen=True)
class Event:
    """As torch's profiler gives them."""

    label: str
    at: int
    size: int = 0
    device: DeviceType = DeviceType.CPU

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.at

    def nbytes(self) -> int:
        return self.size

    def device_type(self) -> DeviceType:
        return self.device


@dataclass
class Allocator:
    """Counts as a GPU's caching allocator does, and tells a profiler's events of the same allocations on a CPU."""

    live: int = 0
    most: int = 0
    events: list[Event] = field(default_factory=list)

    def change(self, nbytes: int) -> None:
        self.live += nbytes
        self.most = max(self.most, self.live)
        self.tell("[memory]", nbytes)
        self.tell("[memory]", 2 * abs(nbytes) + 512, device=DeviceType.CUDA)  # of another device: none of a CPU's business

    def tell(self, label: str, nbytes: int = 0, **rest: DeviceType) -> None:
        self.events.append(Event(label, len(self.events), nbytes, **rest))

    def stats(self, _device: torch.device) -> dict[str, int]:
        return {"requested_bytes.all.current": self.live, "requested_bytes.all.peak": self.most, "allocated_bytes.all.current": self.live + 512}

    def reset(self, _device: torch.device) -> None:
        self.most = self.live


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    """Stands in for torch's counts of a GPU and for its profiler of a CPU at once."""
    made = Allocator(live=1000, most=5000)

    @contextmanager
    def recording(**_: bool):
        made.events.clear()
        yield SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: random.Random(0).sample(made.events, len(made.events))))

    @contextmanager
    def named(label: str):
        made.tell(label)
        yield

    monkeypatch.setattr(torch.cuda, "memory_stats", made.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(peak, "profile", recording)
    monkeypatch.setattr(peak, "record_function", named)
    return made


def random_step(allocator: Allocator, *, seed: int) -> Callable[[Tracer], Callable[[], None]]:
    """Allocations, releases and the marks of an update, the same for every tracer; some marks are repeated."""

    def step_of(tracer: Tracer) -> Callable[[], None]:
        def step() -> None:
            rng = random.Random(seed)
            held: list[int] = []
            for name in ("layers", "head", "backward", "layers", "tail", "head", "update"):
                for _ in range(rng.randrange(6)):
                    if held and rng.random() < 0.5:
                        allocator.change(-held.pop(rng.randrange(len(held))))
                    else:
                        held.append(rng.randrange(1, 10**6))
                        allocator.change(held[-1])
                tracer.mark(name)
            for nbytes in (*held, 7, -7):
                allocator.change(-nbytes)

        return step

    return step_of


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_a_gpu_say_what_events_of_a_cpu_say(allocator: Allocator, seed: int) -> None:
    step_of = random_step(allocator, seed=seed)
    traces = {}
    for device, kind in ((CPU, EventTracer), (GPU, CountTracer)):
        tracer = tracer_for(device)
        assert isinstance(tracer, kind)
        traces[device] = tracer.trace(step_of(tracer))
    cpu, gpu = traces[CPU], traces[GPU]
    assert cpu.marks.keys() == gpu.marks.keys() == {"layers", "head", "backward", "tail", "update"}
    assert cpu.peak_bytes == gpu.peak_bytes
    for name in cpu.marks:
        assert cpu.live_at(name) == gpu.live_at(name)
        for end in ("head", "backward", "tail", "update", None):
            assert cpu.peak_between(name, end) == gpu.peak_between(name, end)
    for device in (CPU, GPU):
        unmarked = step_of(SimpleNamespace(mark=silent))
        assert measure_peak(unmarked, static_bytes=10**7, device=device) == 10**7 + cpu.peak_bytes
    assert allocator.live == 1000


def test_what_was_live_before_is_not_counted_twice(allocator: Allocator) -> None:
    """Neither in the peak, which an earlier step left at 5000, nor where the step frees some of it."""

    def step() -> None:
        allocator.change(-600)
        allocator.change(700)

    assert trace_memory(step, device=GPU).peak_bytes == 100


def test_workspaces_are_what_a_step_leaves(allocator: Allocator, monkeypatch) -> None:
    """One that was there before is freed first, so that it counts; tensors that come and go do not."""
    allocator.live += 300
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: allocator.change(-300), raising=False)

    def step() -> None:
        for nbytes in (300, 5000, 64, -5000):
            allocator.change(nbytes)

    assert workspace_bytes(step, device=GPU) == 364
    assert workspace_bytes(step, device=CPU) == 0


def test_allocator_that_does_not_count_is_refused(allocator: Allocator) -> None:
    allocator.live = allocator.most = 0
    with pytest.raises(ProfileError, match="'cudaMallocAsync' counted no requested bytes; unset PYTORCH_CUDA_ALLOC_CONF"):
        trace_memory(silent, device=GPU)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ProfileError, match="memory on meta cannot be measured; use a CPU"):
        trace_memory(silent, device=torch.device("meta"))


def test_workspaces_are_a_row_of_the_account(profiled) -> None:
    """On every peak that is predicted, and on the cap."""
    _, profile = profiled
    assert profile.account.workspace_bytes == 0
    more = profile.model_copy(update={"account": profile.account.model_copy(update={"workspace_bytes": 64 * MIB})})
    assert more.account.static_bytes == profile.account.static_bytes + 64 * MIB
    for pattern in PATTERNS.values():
        plain, grown = (simulate_step(p, [pattern] * len(profile.layers)) for p in (profile, more))
        assert grown.peak_bytes == plain.peak_bytes + 64 * MIB
        assert [row.nbytes for row in grown.account if row.label == "workspaces"] == [64 * MIB]


# -------------------------------------------------------------------------------------------- one profile, several plans

MIXED = Pattern(actions={"mlp.gate_proj.mm": "store", "mlp.up_proj.mm": "store", "self_attn.sdpa.out": "store", "self_attn.sdpa.lse": "store", "add": "store"})
INT8 = Pattern(actions={"mlp.gate_proj.mm": "compress:fbgemm-int8", "mlp.up_proj.mm": "compress:fbgemm-int8", "self_attn.sdpa.out": "compress:fbgemm-int8", "add": "compress:fbgemm-int8", "self_attn.sdpa.lse": "store"})
PATTERNS = {"store": Pattern(default="store"), "recompute": Pattern(), "mixed": MIXED, "int8": INT8, "input": Pattern(actions={"input": "compress:fbgemm-int8"})}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> tuple[Workbench, Profile]:
    """A llama whose activations outweigh its weights: 4 layers, 8 x 96 tokens."""
    torch.set_num_threads(1)
    model = build_tiny("llama", hidden_size=64, intermediate_size=192, head_dim=16, num_hidden_layers=4)
    batch = synthetic_micro_batch(vocab_size=97, rows=8, prompt_tokens=32, completion_tokens=64, group_size=4, seed=0)
    request = ProfileRequest(name="tiny", source="tiny", task="none", sources=["synthetic"], codecs=["fbgemm-int8"], config=GrpoConfig(head="chunked"), repeats=1)
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


def test_workspaces_are_measured_once_and_added_to_every_peak(monkeypatch) -> None:
    """By a whole update, under checkpointing, when gradients and optimizer state are there; then in the static part of every method."""
    model = build_tiny("llama")
    batch = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=8, group_size=4, seed=0)
    bench = Workbench(model, [batch], GrpoConfig())
    plain = bench.peak_bytes("none")
    fresh, seen = Workbench(model, [batch], GrpoConfig()), []

    def measured(step: Callable[[], object], *, device: torch.device) -> int:
        seen.append((device, len(fresh.optimizer.state), model.model.gradient_checkpointing, model.model.layers[0].gradient_checkpointing))
        step()
        return 32 * MIB

    monkeypatch.setattr("hilore_cli.workbench.workspace_bytes", measured)
    assert fresh.peak_bytes("none") == plain + 32 * MIB
    account, gc_peak = measure_account(fresh, fresh.static())
    assert account["workspace_bytes"] == 32 * MIB
    assert fresh.peak_bytes("gc") == gc_peak
    assert [(device, states) for device, states, *_ in seen] == [(CPU, len(list(model.parameters())))]
    assert seen[0][3]


def test_activations_dominate(profiled) -> None:
    _, profile = profiled
    assert profile.peaks.none_bytes > 3 * profile.account.static_bytes


def test_recompute_all_is_not_above_checkpointing(profiled) -> None:
    bench, profile = profiled
    assert bench.peak_bytes("recompute") <= profile.peaks.gc_bytes
    assert bench.peak_bytes("store") <= profile.peaks.none_bytes


def test_account_adds_up_to_the_measured_peak_of_checkpointing() -> None:
    """static + shared + what checkpointing stores (the layers' inputs, and the generator's state for each) + head, to the byte, where the head is the peak."""
    model = build_tiny("llama", vocab_size=3001)
    batch = synthetic_micro_batch(vocab_size=3001, rows=4, prompt_tokens=8, completion_tokens=24, group_size=4, seed=0)
    for head in ("full", "chunked"):
        bench = Workbench(model, [batch], GrpoConfig(head=head))
        account, gc_peak = measure_account(bench, bench.static())
        stored = 2 * (batch.tokens * 32 * 4 + torch.get_rng_state().nbytes)
        weights, gradients, optimizer = (account[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        assert weights + gradients + optimizer + account["shared_bytes"] + stored + account["head_bytes"] == gc_peak
        assert 0 < weights - gradients < 256, "buffers only"
        assert 2 * gradients <= optimizer <= 2 * gradients + 4 * len(list(model.parameters()))


@pytest.mark.parametrize("name", PATTERNS)
def test_predicted_peak(profiled, measured, name: str) -> None:
    """Within 3 % of the measured one, and never under: the CPU's own codecs take no scratch memory in fp32."""
    _, profile = profiled
    predicted = simulate_step(profile, [PATTERNS[name]] * len(profile.layers))
    print(f"{name}: predicted {predicted.peak_bytes} at {predicted.binding_moment}, measured {measured[name]}: {predicted.peak_bytes / measured[name] - 1:+.2%}")
    assert 1 <= predicted.peak_bytes / measured[name] <= 1.03


def test_predicted_peak_of_a_plan_that_differs_by_layer(profiled) -> None:
    bench, profile = profiled
    static = sum(bench.static().values())
    names = ["recompute", "int8", "mixed", "store"]
    with bench.assigned(PATTERNS, names, graph_digests=[c.graph_digest for c in profile.classes]):
        peak = measure_peak(bench.update, static_bytes=static, device=CPU)
    predicted = simulate_step(profile, [PATTERNS[name] for name in names]).peak_bytes
    assert 1 <= predicted / peak <= 1.03


def test_mm05_measured_peaks_keep_their_caps(profiled) -> None:
    """Over caps from 0.1 of all that can be stored to all of it: what no plan keeps is refused with the least peak that one does; above,
    the measured peak is never over the predicted one, and a plan for less memory does not take more. Codecs count as free, so that
    there is compression in the plans whatever this machine is doing beside.
    """
    bench, profile = profiled
    profile = profile.model_copy(update={"units": [unit.model_copy(update={"compress_us": 0.0, "decompress_us": 0.0}) for unit in profile.units]})
    static = sum(bench.static().values())

    def planned(share: float) -> Plan:
        cap = int(profile.account.static_bytes + share * (profile.peaks.none_bytes - profile.account.static_bytes))
        plan = solve_plan(profile, cap=parse_cap(f"{cap / 2**30:.9f}GiB"), risk=0.02, codecs=["fbgemm-int8"], name=f"cap-{share}")
        assert plan.predicted.peak_bytes <= cap
        return plan

    with pytest.raises(InfeasibleError, match="least feasible peak at this risk"):
        planned(0.1)
    predicted = []
    for share in (0.3, 0.7):
        plan = planned(share)
        bench.add_plan(plan.name, plan.patterns, plan.variants, graph_digests=profile.graph_digests)
        bench.compile(plan.name)
        with bench.method(plan.name):
            measured = measure_peak(bench.update, static_bytes=static, device=CPU)
        predicted.append(plan.predicted.peak_bytes)
        assert 1 <= predicted[-1] / measured <= 1.03
        assert plan.predicted.compressed_bytes > 0
    assert predicted == sorted(predicted)
    assert predicted[0] < 0.8 * predicted[-1]
