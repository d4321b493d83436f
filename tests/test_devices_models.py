"""Device models: the formula, the calibration on measured operators, and the work that is read off graphs and rows."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from profiles_for_tests import make_profile
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore_cli.devices import CPU_MODEL, DEVICES, NAMES, Sample, Work, calibrated, choose_model, samples_of, time_error
from hilore_cli.errors import UsageError
from hilore_cli.fake import work_of

aten = torch.ops.aten


def test_time_is_the_slower_of_compute_and_memory_and_the_launch():
    device = DEVICES["h100"]
    product = Work(kind="matmul", flops=2 * 8192 * 4096 * 4096, nbytes=2 * (8192 * 4096 * 2 + 4096**2), dtype="bfloat16")
    assert device.time_us(product) == pytest.approx(1e6 * product.flops / (989.4e12 * device.matrix_fraction) + device.launch_us)
    copy = Work(kind="other", flops=0, nbytes=2**30, dtype="bfloat16")
    assert device.time_us(copy) == pytest.approx(1e6 * 2**30 / (3.35e12 * device.bandwidth_fraction) + device.launch_us)
    single = Work(kind="matmul", flops=product.flops, nbytes=product.nbytes, dtype="float32")
    assert device.time_us(single) / device.time_us(product) > 10, "eager torch multiplies fp32 without TF32"


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_figures_are_plausible_and_sourced(device):
    assert 50 < device.half_tflops < 5000
    assert device.single_tflops < device.half_tflops
    assert 0 < device.attention_fraction <= device.matrix_fraction <= 1
    assert 0.5 < device.bandwidth_fraction < 1
    assert "sheet" in device.source or "white paper" in device.source
    assert all(getattr(device, f.name) is not None for f in fields(device))


def made_up_samples(device, *, noise: float) -> list[Sample]:
    rng = random.Random(0)
    works = [Work(kind=kind, flops=0 if kind == "other" else n * 10**9, nbytes=n * 10**5, dtype="float32") for n in range(1, 40) for kind in ("matmul", "attention", "other")]
    return [Sample(work=work, time_us=device.time_us(work) * rng.lognormvariate(0, noise)) for work in works]


def test_calibration_finds_the_fractions_of_exact_times():
    from dataclasses import replace

    true = replace(DEVICES["a100"], matrix_fraction=0.31, attention_fraction=0.12, bandwidth_fraction=0.55, launch_us=3.0)
    samples = made_up_samples(true, noise=0.0)
    found = calibrated(DEVICES["a100"], samples)
    assert found.matrix_fraction == pytest.approx(0.31, rel=0.05)
    assert found.attention_fraction == pytest.approx(0.12, rel=0.05)
    assert found.bandwidth_fraction == pytest.approx(0.55, rel=0.2)
    assert time_error(DEVICES["a100"], samples) < 0.05


def test_the_error_grows_with_the_noise_of_what_was_measured():
    errors = [time_error(CPU_MODEL, made_up_samples(DEVICES["a100"], noise=noise)) for noise in (0.01, 0.2, 0.6)]
    assert errors == sorted(errors)
    assert errors[0] < 0.1 < errors[2]


def test_too_few_operators_tell_no_error():
    assert time_error(DEVICES["h100"], made_up_samples(DEVICES["h100"], noise=0.0)[:3]) is None


def test_a_model_without_measured_profile_says_so_and_one_with_is_calibrated():
    measured = make_profile(layers=2)
    device, error = choose_model("h100", measured=[measured])
    assert (device, error) == (DEVICES["h100"], None), "a CPU's profile says nothing of a GPU"
    device, error = choose_model("cpu-model", measured=[measured])
    assert error is not None
    assert device.matrix_fraction != CPU_MODEL.matrix_fraction
    on_gpu = measured.model_copy(update={"machine": measured.machine.model_copy(update={"device": "NVIDIA H100 80GB HBM3"})})
    device, error = choose_model("h100", measured=[on_gpu])
    assert error is not None
    assert device.fractions_from == "measured profiles"


def test_unknown_and_uncalibrated_devices_are_refused():
    with pytest.raises(UsageError, match="unknown; use cpu or cuda to measure, or a model: h100, h200, a100, l40s, rtx4090, mi300x, cpu-model"):
        choose_model("h1000", measured=[])
    with pytest.raises(UsageError, match="needs a profile measured on this CPU"):
        choose_model("cpu-model", measured=[])
    assert len(NAMES) == 7


def test_work_of_rows_is_that_of_the_operators():
    """SmolLM2's layer at 16 x 64 tokens: products by their sizes, attention by its length."""
    samples = samples_of(make_profile(layers=1))
    flops = sorted(s.work.flops for s in samples if s.work.kind == "matmul")
    tokens = 1024
    assert flops == sorted(2 * tokens * n * k for n, k in ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)))
    (attention,) = [s.work.flops for s in samples if s.work.kind == "attention"]
    assert attention == 4 * 16 * 9 * 64 * 64 * 64


def test_work_of_operators():
    with FakeTensorMode():
        a, b = torch.empty(64, 32), torch.empty(32, 48)
        product = work_of(aten.mm.default, (a, b), {}, aten.mm.default(a, b))
        assert (product.kind, product.flops, product.nbytes, product.dtype) == ("matmul", 2 * 64 * 32 * 48, 4 * (64 * 32 + 32 * 48 + 64 * 48), "float32")
        assert work_of(aten.t.default, (a,), {}, aten.t.default(a)) is None, "a view does nothing"
        added = work_of(aten.add.Tensor, (a, a), {}, aten.add.Tensor(a, a))
        assert (added.flops, added.nbytes) == (0, 3 * 64 * 32 * 4)
        in_place = work_of(aten.add_.Tensor, (a, a), {}, aten.add_.Tensor(a, a))
        assert in_place.nbytes == 3 * 64 * 32 * 4, "what is written into counts as written"
        table, ids = torch.empty(1000, 32), torch.empty(5, dtype=torch.int64)
        rows = work_of(aten.embedding.default, (table, ids), {}, aten.embedding.default(table, ids))
        assert rows.nbytes == 2 * 5 * 32 * 4 + 5 * 8, "of the table only the rows are read"
        q = torch.empty(2, 4, 16, 8)
        out = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.0, True)
        attention = work_of(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, True), {}, out)
        assert (attention.kind, attention.flops) == ("attention", 2 * 2 * 4 * 16 * 16 * 16 // 2), "half of a causal square"
