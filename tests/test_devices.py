"""Where tensors are: no operator of a step, a risk or a rollout mixes devices, and `--device` says where the model goes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tiny
from pretended_gpu import ELSEWHERE, Elsewhere, MixedDevicesError, PretendedGpu, move
from torch import Tensor, nn

from hilore_cli import profiler
from hilore_cli.batches import MicroBatch, synthetic_micro_batch
from hilore_cli.bench import apply_plan
from hilore_cli.codecs import default_codecs
from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.exposure import TrlLoss, VerlLoss
from hilore_cli.grpo import HEADS, GrpoConfig, actor_update, can_repeat, gradients, kernel_mode
from hilore_cli.models import choose_device, load_model
from hilore_cli.profiler import ProfileRequest, record_step, token_weights
from hilore_cli.provenance import Lora
from hilore_cli.risk import embedding_gain
from hilore_cli.rollout import with_sampling_logps
from hilore_cli.schema import Pattern
from hilore_cli.workbench import Workbench, contexts_of_forward

BATCH = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=0)
CONFIG = GrpoConfig(chunk_tokens=16)


def eager_llama() -> nn.Module:
    """Attention by plain products: torch has no fused one on the pretended device, whose results would differ in the last digits."""
    return build_tiny("llama", attn_implementation="eager")


def with_logps(batch: MicroBatch) -> MicroBatch:
    """Every optional [B,S] field that a loss may read."""
    drawn = {name: torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(i)).mul(0.1).sub(2.0) * batch.loss_mask for i, name in enumerate(("old_logps", "ref_logps", "sampling_logps"))}
    return replace(batch, **drawn)


# ------------------------------------------------------------------------------------------------------ a pretended GPU


def test_the_pretended_device_catches_mixing(monkeypatch) -> None:
    """The step with its one copy to the device taken out."""
    model = move(eager_llama())
    monkeypatch.setattr(MicroBatch, "to", lambda self, _device: self)
    with PretendedGpu(), pytest.raises(MixedDevicesError, match="embedding"):
        gradients(model, [BATCH], CONFIG)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", ["padded", "positions", "packed"])
def test_gradients_are_taken_where_the_model_is(head: str, layout: str) -> None:
    batch, config = replace(BATCH, layout=layout), GrpoConfig(head=head, chunk_tokens=16)
    expected = gradients(eager_llama(), [batch], config)
    with PretendedGpu():
        found = gradients(move(eager_llama()), [batch], config)
    assert all(isinstance(g, Elsewhere) for g in found.values())
    assert [name for name in expected if not torch.equal(found[name].held, expected[name])] == []


@pytest.mark.parametrize(
    "loss",
    [TrlLoss(num_items_in_batch=100), TrlLoss(num_items_in_batch=100, beta=0.1), TrlLoss(num_items_in_batch=100, importance_sampling_level="sequence"), TrlLoss(num_items_in_batch=100, top_entropy_quantile=0.5), VerlLoss()],
    ids=["on-policy", "kl", "sequence", "entropy", "verl"],
)
def test_exposure_is_taken_where_the_model_is(loss: TrlLoss | VerlLoss) -> None:
    """Losses whose coefficients need the forward's own log-probabilities, those of earlier forwards, whole rows, or entropies."""
    batch = replace(with_logps(BATCH), loss=loss)
    expected = gradients(eager_llama(), [batch], CONFIG)
    with PretendedGpu():
        found = gradients(move(eager_llama()), [batch], CONFIG)
    assert any(bool((g != 0).any()) for g in expected.values())
    assert [name for name in expected if not torch.equal(found[name].held, expected[name])] == []


def test_an_update_and_a_rollout_stay_where_the_model_is() -> None:
    models = eager_llama(), move(eager_llama())
    norms = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with PretendedGpu():
            norms.append(actor_update(model, optimizer, [BATCH], CONFIG))
            recorded = with_sampling_logps(model, BATCH)
        assert not isinstance(recorded.sampling_logps, Elsewhere), "micro-batches are kept on the CPU"
    assert norms[0] == norms[1] > 0
    assert [n for (n, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True) if not torch.equal(a, b.held)] == []


@pytest.mark.slow
def test_risk_is_measured_where_the_model_is(monkeypatch) -> None:
    """One layer's recorded call, replayed there: the same rows as on the CPU, by every codec of the CPU."""
    plain = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: plain())  # none of meta
    bench = Workbench(build_tiny("llama"), [BATCH], CONFIG)
    record = record_step(bench)
    request = ProfileRequest(name="tiny", source="tiny", task="none", sources=["a"], codecs=["int8", "fbgemm-int8"], config=CONFIG)
    call = record.calls[0]
    layer_class, _ = profiler.timed_class(record.joints[call.graph], call, name="A", codecs=[])
    moved = replace(call, primals=[Elsewhere(p.detach()) if isinstance(p, Tensor) else p for p in call.primals], tangent=Elsewhere(call.tangent))
    rows = {}
    for name, one, model, device in (("cpu", call, bench.model, torch.device("cpu")), ("gpu", moved, move(copy.deepcopy(bench.model)), ELSEWHERE)):
        stand_in = SimpleNamespace(model=model, batches=[BATCH], device=device)
        with pretending(device):
            rows[name] = profiler.measure_layer(stand_in, record, one, layer_class, fqn="model.layers.0", request=request, weight=token_weights(BATCH).to(device))
    assert rows["cpu"] == rows["gpu"]
    assert {row["row"]["codec"] for row in rows["gpu"]["units"]} == {"int8", "fbgemm-int8"}
    assert rows["gpu"]["embedding_gain"] > 0


def test_embedding_gain_takes_ids_from_the_cpu(monkeypatch) -> None:
    plain = torch.Generator
    gradient = torch.randn(*BATCH.input_ids.shape, 8)
    expected = embedding_gain(gradient, BATCH.input_ids, vocabulary=97, seed=1)
    monkeypatch.setattr(torch, "Generator", lambda device=None: plain())
    with PretendedGpu():
        assert embedding_gain(Elsewhere(gradient), BATCH.input_ids, vocabulary=97, seed=1) == expected


@contextmanager
def pretending(device: torch.device) -> Iterator[None]:
    if device == ELSEWHERE:
        with PretendedGpu():
            yield
    else:
        yield


# ----------------------------------------------------------------------------------------------------- deterministic mode


def test_backward_alone_runs_in_deterministic_mode(monkeypatch) -> None:
    """Forward does not, since compiled layers are guarded on it; afterwards everything is as it was."""
    model = eager_llama()
    modes = watch_modes(model)
    plain = gradients(model, [BATCH], CONFIG)
    assert modes == {"forward": [False], "backward": [False]}
    found = gradients(model, [BATCH], CONFIG, deterministic=True)
    assert modes == {"forward": [False, False], "backward": [False, True]}
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with kernel_mode(deterministic=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_checkpointing_recomputes_in_the_mode_of_the_forward() -> None:
    """Torch may choose another attention kernel in deterministic mode, which saves other tensors: checkpointing would end in an error."""
    model = eager_llama()
    modes = watch_modes(model)
    plain = gradients(model, [BATCH], CONFIG)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts_of_forward})
    modes["forward"].clear()
    found = gradients(model, [BATCH], CONFIG, deterministic=True)
    assert modes["forward"] == [False, False], "once in forward, once again in backward"
    assert modes["backward"][-1]
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def watch_modes(model: nn.Module) -> dict[str, list[bool]]:
    """Whether torch was in deterministic mode in the first layer's MLP, forward and backward, call by call."""
    modes: dict[str, list[bool]] = {"forward": [], "backward": []}
    mlp = model.model.layers[0].mlp  # hooks of the layer itself are not called again where transformers recomputes it
    mlp.register_forward_pre_hook(lambda *_: modes["forward"].append(torch.are_deterministic_algorithms_enabled()))
    mlp.register_full_backward_hook(lambda *_: modes["backward"].append(torch.are_deterministic_algorithms_enabled()))
    return modes


def test_deterministic_mode_needs_cublas_to_agree(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    for value, answer in ((":4096:8", True), (":16:8", True), (":4096:2", False), (None, False)):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        if value is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        assert can_repeat(torch.device("cuda")) is answer
    assert not can_repeat(torch.device("cpu"))


@pytest.fixture
def on_gpu(monkeypatch) -> Workbench:
    """A workbench that takes its device for a GPU whose exact gradients are never the same twice; `refuses` raises in deterministic mode."""
    bench = Workbench(eager_llama(), [BATCH], CONFIG)
    bench.device, bench.repeats_exactly = torch.device("cuda"), True
    calls: list[bool] = []

    def noisy(model: nn.Module, batches: list[MicroBatch], config: GrpoConfig, *, before: object, deterministic: bool = False) -> dict[str, Tensor]:
        calls.append(deterministic)
        if deterministic and bench.refuses:
            raise RuntimeError("index_fill_cuda does not have a deterministic implementation, but you set\n...")
        exact = gradients(model, batches, config)
        return {name: g if deterministic else g * (1 + 1e-4 * len(calls)) for name, g in exact.items()}

    bench.calls, bench.refuses = calls, False
    monkeypatch.setattr("hilore_cli.workbench.gradients", noisy)
    return bench


def test_gradients_of_a_gpu_are_compared_in_deterministic_mode(on_gpu: Workbench) -> None:
    first, second = on_gpu.gradients_by("none"), on_gpu.gradients_by("gc")
    assert on_gpu.calls == [True, True]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_kernel_without_deterministic_form_is_told_once(on_gpu: Workbench) -> None:
    on_gpu.refuses = True
    with pytest.warns(UserWarning, match="not the same each time.*index_fill_cuda"):
        on_gpu.gradients_by("none")
    on_gpu.gradients_by("none")
    assert on_gpu.calls == [True, False, False]
    assert not on_gpu.repeats_exactly


def test_other_failures_of_a_gpu_are_not_hidden(on_gpu: Workbench, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("hilore_cli.workbench.gradients", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        on_gpu.gradients_by("none")


@pytest.mark.parametrize(("device", "noise", "accepted"), [("cpu", 1e-4, False), ("cuda", 1e-4, True), ("cuda", 1e-6, False)])
def test_an_exact_plan_is_let_through_with_the_gpus_own_noise(monkeypatch, device: str, noise: float, accepted: bool) -> None:
    """A plan of risk 0 measures 1e-4: what checkpointing differs from itself by, or a hundred times as much."""
    from steps_for_tests import hand_made_plan

    model = eager_llama()
    plan = hand_made_plan(model, BATCH, {"p": Pattern(default="store")}, ["p", "p"], risk=0.0)
    exact = gradients(model, [BATCH], CONFIG)
    taken = {"gc": iter((0.0, noise)), "plan": iter((1e-4,))}

    def gradients_by(self: Workbench, method: str) -> dict[str, Tensor]:
        self.device = torch.device(device)
        factor = 1 + next(taken[method])
        return {name: g * factor for name, g in exact.items()}

    monkeypatch.setattr(Workbench, "gradients_by", gradients_by)
    monkeypatch.setattr(Workbench, "peak_bytes", lambda self, method: 10**9)
    if accepted:
        assert apply_plan(model, plan, [BATCH], emit_anyway=False, progress=lambda *_: None).measured.rel_error == pytest.approx(1e-4, rel=0.1)
    else:
        with pytest.raises(PlanMismatchError, match=r"gradient error is 0\.0001"):
            apply_plan(model, plan, [BATCH], emit_anyway=False, progress=lambda *_: None)


# ---------------------------------------------------------------------------------------------------------------- --device


@pytest.mark.parametrize(("there", "name", "chosen"), [(True, None, "cuda"), (True, "cpu", "cpu"), (True, "cuda", "cuda"), (False, None, "cpu"), (False, "cpu", "cpu")])
def test_a_gpu_is_chosen_where_there_is_one(monkeypatch, there: bool, name: str | None, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert choose_device(name) == torch.device(chosen)
    assert default_codecs(choose_device(name)) == (("int8", "int4") if chosen == "cuda" else ("fbgemm-int8", "fbgemm-int4"))


def test_devices_that_are_not_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"device cuda: this torch \(.*\) sees no GPU"):
        choose_device("cuda")
    with pytest.raises(UsageError, match="device 'cuda:1': unknown; use one of cpu, cuda"):
        choose_device("cuda:1")


def test_a_model_is_loaded_to_its_device(tmp_path) -> None:
    """Adapters too, and whatever else the model holds."""
    build_tiny("llama").save_pretrained(tmp_path)
    for lora in (None, Lora(rank=2)):
        model = load_model(tmp_path, device="meta", lora=lora)
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
        assert {t.device.type for t in load_model(tmp_path, lora=lora).parameters()} == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("arguments", "environment"), [(["--device", "cuda"], {}), ([], {"HILORE_DEVICE": "cuda"})], ids=["option", "environment"])
def test_a_gpu_that_is_not_there_ends_in_one_line(tmp_path, arguments: list[str], environment: dict[str, str]) -> None:
    """Before the model is looked for."""
    command = [sys.executable, "-m", "hilore_cli", "profile", "--model", "./nothing", "--batch", "nothing.parquet", *arguments]
    finished = subprocess.run(command, cwd=tmp_path, env={**os.environ, "COLUMNS": "400", **environment}, capture_output=True, text=True, check=False, timeout=120)
    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (2, "", 1)
    assert finished.stderr.startswith("hilore: device cuda: this torch")
