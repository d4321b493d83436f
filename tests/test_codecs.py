"""Codecs: the CPU path against the specification, the bound against a search, the ops against torch's tracing.

Ids in the names (NU02 ...) are those of the catalogue of known bugs in others' checkpointing and compression.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hilore_cli import codecs
from hilore_cli.codecs import CODECS, cpu, reference
from hilore_cli.codecs.reference import DTYPES
from hilore_cli.errors import CodecError, UsageError

ALL_CODECS = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
CHUNK = 4096  # in place of cpu.CHUNK_NUMEL, to cross its boundaries with small tensors
NUMELS = (1, 31, 32, 33, 96, 127, 128, 129, CHUNK, CHUNK + 40, 3 * CHUNK)


@pytest.fixture(autouse=True)
def one_thread_small_chunks(monkeypatch):
    """One thread: tensors this small are slower on several, by much where the cores are shared."""
    assert cpu.CHUNK_NUMEL % CHUNK == 0
    monkeypatch.setattr(cpu, "CHUNK_NUMEL", CHUNK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample_tensors(numel: int) -> dict[str, torch.Tensor]:
    """Finite in fp32: what activations look like, and what breaks quantizers."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    exponents = normal.roll(1).mul(4).clamp(-30, 30)
    outliers = normal.clone()
    outliers[::7] *= 1e4
    return {
        "normal": normal,
        "relu": normal.relu(),
        "minus_zero": -normal.relu(),
        "zeros": torch.zeros(numel),
        "constant": torch.full((numel,), 3.3),
        "outliers": outliers,
        "heavy_tail": normal**9,
        "all_scales": normal * 10**exponents,
        "denormal": normal * 1e-40,
        "near_epsilon": normal * 1e-8,
        "tiny": normal * 1e-30,
        "offset": 1000 + 0.1 * normal,
        "far_offset": -3e4 + normal,
        "huge": normal * 2e37,
    }


def signless_zero_rows(payload: torch.Tensor, codec: codecs.Codec) -> torch.Tensor:
    """The payload's rows with every zero in the metadata made +0: the one thing that is not specified."""
    rows = payload.view(-1, codec.row_bytes).clone()
    meta = rows[:, codec.code_bytes :].contiguous().view(torch.float32 if codec.bits == 8 else torch.float16)
    rows[:, codec.code_bytes :] = torch.where(meta == 0, 0, meta).view(torch.uint8)
    return rows


def group_bound(x: torch.Tensor, codec: codecs.Codec) -> torch.Tensor:
    """The bound of every element of a flat x, float64."""
    rows = reference.pad_to_groups(x, codec).float().view(-1, codec.group)
    bound = codecs.error_bound(codec, rows.amin(1), rows.amax(1), dtype=x.dtype)
    return bound.repeat_interleave(codec.group)[: x.numel()]


# ---- the CPU path is the specification ----


@ALL_CODECS
@ALL_DTYPES
def test_cpu_path_equals_reference_bit_for_bit(codec, dtype):
    largest = torch.finfo(dtype).max
    for numel in NUMELS:
        for name, x in sample_tensors(numel).items():
            x = x.clamp(-largest, largest).to(dtype)
            where = f"{name} numel {numel}"
            fast, specified = cpu.compress(x, codec), reference.compress(x, codec)
            assert fast.shape == specified.shape == (codecs.payload_bytes(codec, numel),), where
            assert torch.equal(signless_zero_rows(fast, codec), signless_zero_rows(specified, codec)), where
            restored = cpu.decompress(fast, codec, dtype=dtype, numel=numel)
            expected = reference.decompress(specified, codec, dtype=dtype, numel=numel)
            assert restored.dtype == dtype
            assert torch.equal(restored.isnan(), expected.isnan()), where  # int4: beyond fp16
            assert torch.equal(restored.nan_to_num(), expected.nan_to_num()), where


def test_reference_fma_rounds_once():
    """Against exact rational arithmetic, on operands chosen so that two roundings differ from one."""
    from fractions import Fraction

    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 256, (4000,), generator=generator).float()
    scale = torch.randn(4000, generator=generator)
    low = torch.cat((torch.randn(2000, generator=generator), -(code * scale)[2000:].nextafter(torch.tensor(9.0))))
    low = low * 2.0 ** torch.randint(-40, 40, (4000,), generator=generator).float()
    for got, c, s, m in zip(*(t.tolist() for t in (reference._fma(code, scale, low), code, scale, low)), strict=True):
        exact = Fraction(c) * Fraction(s) + Fraction(m)
        here = torch.tensor(got)
        error = abs(Fraction(got) - exact)
        for neighbour in (here.nextafter(torch.tensor(math.inf)), here.nextafter(torch.tensor(-math.inf))):
            assert error <= abs(Fraction(neighbour.item()) - exact)


# ---- how well it comes back ----


@ALL_CODECS
@ALL_DTYPES
def test_error_stays_within_the_bound(codec, dtype):
    for name, x in sample_tensors(4096 + 17).items():
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        restored = codecs.round_trip(x, codec)
        specified = restored.isfinite() | (codec.bits == 8)
        if codec.bits == 4 and name not in ("all_scales", "huge", "heavy_tail", "outliers"):
            assert restored.isfinite().all(), name
        excess = (x.double() - restored.double()).abs() - group_bound(x, codec)
        assert (excess[specified] <= 0).all(), (name, excess[specified].max())


@ALL_CODECS
@hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],  # the fixture above need not be reset
)
@hypothesis.given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    shrink=st.sampled_from([1.0, 1e-3, 1e-20, 1e-34]),
    offset=st.floats(min_value=-6e4, max_value=6e4, width=32),
    dtype=st.sampled_from(DTYPES),
)
def test_error_bound_cannot_be_broken(codec, values, shrink, offset, dtype):
    limit = 3e4 if codec.bits == 4 or dtype == torch.float16 else 1.6e38
    x = (torch.tensor(values) * shrink + offset).clamp(-limit, limit).to(dtype)
    restored = codecs.round_trip(x, codec)
    assert restored.isfinite().all()
    assert ((x.double() - restored.double()).abs() <= group_bound(x, codec)).all()


@ALL_CODECS
def test_a_group_is_cut_into_equal_steps(codec):
    """Pins the quality: uniform noise of the width of a step, span / (2^bits - 1)."""
    x = torch.randn(codec.group * 4096, generator=torch.Generator().manual_seed(1))
    rows = x.view(-1, codec.group)
    step = (rows.amax(1) - rows.amin(1)) / codec.levels
    expected = (step.square().mean() / 12).sqrt().item()
    measured = (codecs.round_trip(x, codec) - x).square().mean().sqrt().item()
    # the two extremes of a group are exact, which takes 2 / group off; the rounded fp16 metadata of int4 adds 0.1 %
    assert measured == pytest.approx(expected * math.sqrt(1 - 2 / codec.group), rel=0.01)


# ---- special values ----


@ALL_CODECS
@ALL_DTYPES
def test_nu02_zero_and_constant_groups_come_back_exactly(codec, dtype):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[2] = 0.0
    x[3] = -0.0
    x[5] = 0.5
    restored = codecs.round_trip(x, codec)
    assert (restored[2:4] == 0).all()
    assert (restored[5] == 0.5).all()
    assert restored.isfinite().all()


@ALL_CODECS
@pytest.mark.parametrize("size", [1e-30, 1e-40, 1e-45, 1e-8, 1e-6])
def test_nu02_tiny_groups_stay_within_the_bound(codec, size):
    x = torch.randn(512, generator=torch.Generator().manual_seed(3)) * size
    restored = codecs.round_trip(x, codec)
    assert restored.isfinite().all()
    assert ((x.double() - restored.double()).abs() <= group_bound(x, codec)).all()


@ALL_CODECS
@ALL_DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nu05_non_finite_groups_are_nan_and_leave_neighbours_alone(codec, dtype, value):
    clean = torch.randn(6, codec.group, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = codecs.round_trip(clean, codec)
    for column in (0, 7, codec.group - 1):
        x = clean.clone()
        x[1, column] = value
        x[4] = value
        for backend in (cpu, reference):
            payload = backend.compress(x.view(-1), codec)
            restored = backend.decompress(payload, codec, dtype=dtype, numel=x.numel()).view_as(x)
            assert restored[[1, 4]].isnan().all()
            assert torch.equal(restored[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])


@ALL_CODECS
def test_nu05_garbage_tail_rows_do_not_reach_the_rows_before(codec):
    x = torch.randn(10, codec.group // 2, generator=torch.Generator().manual_seed(5))
    expected = codecs.round_trip(x, codec)[:6]
    x[7:] = torch.tensor([math.inf, math.nan]).repeat(codec.group // 4)
    restored = codecs.round_trip(x, codec)
    assert torch.equal(restored[:6], expected)
    assert restored[8:].isnan().all()


def test_nu01_a_nan_after_the_last_chunk_boundary_is_found():
    x = torch.ones(CHUNK + 64, dtype=torch.bfloat16)
    x[-1] = math.nan
    restored = codecs.round_trip(x, "int8")
    assert restored[-32:].isnan().all()
    assert (restored[:-32] == 1).all()


def test_int4_groups_beyond_fp16_are_nan_and_never_quietly_wrong():
    x = torch.randn(4, 32)
    x[1, 3] = 1e6
    x[2] += 7e4
    restored = codecs.round_trip(x, "int4")
    assert restored[1:3].isnan().all()
    assert restored[[0, 3]].isfinite().all()
    extremes = torch.tensor([-65504.0, 65504.0], dtype=torch.float16).repeat(32)
    assert codecs.round_trip(extremes, "int4").isfinite().all()


# ---- dtype, shape, strides ----


def layouts() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8, 10, 16, generator=torch.Generator().manual_seed(6))
    return {
        "contiguous": base,
        "permuted": base.permute(2, 0, 3, 1),
        "transposed": base.view(48, 160).t(),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "view_with_offset": base[3:],
        "slice_with_holes": base[..., 3:9],
        "every_other": base[:, ::2],
        "one_element_dims": base[:1].permute(3, 0, 2, 1),
        "expanded_of_one": base[:1, :1].expand(1, 1, 10, 16),
        "zero_dim": base[0, 0, 0, 0],
        "empty": base[:, :0],
        "empty_permuted": base[:, :0].permute(3, 1, 0, 2),
    }


@ALL_DTYPES
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", ["int8", "int4-g128"])
def test_hk04_restores_dtype_shape_strides_device(name, layout, dtype):
    x = layouts()[layout]
    if dtype != torch.float32:  # a plain .to() would lose the holes
        x = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
    restored = codecs.round_trip(x, name)
    assert restored.dtype == x.dtype
    assert restored.shape == x.shape
    assert restored.stride() == x.stride()
    assert restored.device == x.device
    assert x.numel() == 0 or restored.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if x.numel():
        span = (x.float().max() - x.float().min()).item()
        metadata = 2.0**-10 * x.float().abs().max()  # fp16 in int4
        assert (restored.float() - x.float()).abs().max() <= span / (400 if name == "int8" else 20) + metadata


def test_hk04_a_square_and_its_transpose_are_told_apart():
    x = torch.tanh(torch.randn(8, 8))
    payload = codecs.compress(x, "int8")
    assert torch.equal(payload, codecs.compress(x.t(), "int8"))  # one storage, one payload: the strides tell them apart
    plain = codecs.decompress(payload, "int8", dtype=x.dtype, size=x.shape, stride=x.stride())
    turned = codecs.decompress(payload, "int8", dtype=x.dtype, size=x.t().shape, stride=x.t().stride())
    assert torch.equal(plain.t(), turned)
    promised = torch.ops.hilore.compress.default
    assert torch.equal(promised(x.t(), "int8", (1, 8)), payload)
    with pytest.raises(CodecError, match="promised strides"):
        promised(x.t(), "int8", (8, 1))


def test_hk04_a_payload_of_another_length_or_type_is_refused():
    payload = codecs.compress(torch.randn(64), "int8")
    for wrong, size, dtype in (
        (payload, (96,), torch.float32),
        (payload, (64,), torch.int32),
        (payload.view(2, -1), (64,), torch.float32),
        (payload.to(torch.int8), (64,), torch.float32),
    ):
        with pytest.raises(CodecError, match="int8 stores"):
            codecs.decompress(wrong, "int8", dtype=dtype, size=size, stride=(1,))


def test_mm03_expanded_and_overlapping_tensors_are_refused():
    for x in (
        torch.randn(1, 8).expand(64, 8),
        torch.randn(64, 1).expand(64, 8),
        torch.randn(100).unfold(0, 50, 1),
    ):
        with pytest.raises(CodecError, match="do not overlap"):
            codecs.compress(x, "int8")
    assert not codecs.compressible(torch.randn(1, 8).expand(64, 8))
    with FakeTensorMode(), pytest.raises(CodecError, match="do not overlap"):
        codecs.compress(torch.randn(1, 8).expand(64, 8), "int8")


@ALL_CODECS
def test_mm03_payload_is_smaller_than_the_storage_it_replaces(codec):
    for dtype in DTYPES:
        for numel in (128, 129, 1000, 10**6):
            assert codecs.payload_bytes(codec, numel) < numel * dtype.itemsize * 0.8 + codec.row_bytes
    assert codecs.payload_bytes(codec, 2**33) == 2**33 // codec.group * codec.row_bytes


def test_integers_are_never_compressed():
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float64, torch.complex64):
        x = torch.ones(64, dtype=dtype)
        assert not codecs.compressible(x)
        with pytest.raises(CodecError, match="codecs take"):
            codecs.compress(x, "int8")
    assert codecs.compressible(torch.ones(32))
    assert not codecs.compressible(torch.ones(31))


def test_unknown_codec_is_a_usage_error_with_the_list():
    with pytest.raises(UsageError, match=re.escape("'fp8' does not exist; choose one of int8, int8-g64")):
        codecs.get_codec("fp8")


# ---- fake tensors, tracing ----


@ALL_CODECS
def test_payload_length_formula_is_exact(codec):
    for numel in (*range(0, 140), 255, 256, 257, 1023, 1024, 1025, 99_999):
        real = codecs.compress(torch.zeros(numel), codec)
        assert real.shape == (codecs.payload_bytes(codec, numel),)
        with FakeTensorMode():
            assert codecs.compress(torch.zeros(numel), codec).shape == real.shape


@ALL_CODECS
def test_symbolic_sizes_are_neither_guarded_nor_specialised(codec):
    shape_env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    real = torch.randn(3, 7, 24).transpose(0, 1)
    with FakeTensorMode(shape_env=shape_env) as mode:
        x = mode.from_tensor(real, symbolic_context=context)
        guards_before = len(shape_env.guards)
        payload = codecs.compress(x, codec)
        restored = codecs.round_trip(x, codec)
        assert codecs.compressible(x)
    assert len(shape_env.guards) == guards_before
    assert payload.dtype == torch.uint8
    assert isinstance(payload.shape[0], torch.SymInt)
    assert not payload.shape[0].node.expr.is_number
    assert payload.shape[0].node.hint == codecs.payload_bytes(codec, 3 * 7 * 24)
    assert [str(n) for n in (*restored.shape, *restored.stride())] == [str(n) for n in (*x.shape, *x.stride())]


def test_make_fx_symbolic_graph_serves_other_shapes():
    graph = make_fx(lambda x: codecs.round_trip(x * 2, "int4"), tracing_mode="symbolic")(torch.randn(5, 64))
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.hilore.compress.default in targets
    assert torch.ops.hilore.decompress.default in targets
    for shape in ((5, 64), (3, 17), (40, 129)):
        x = torch.randn(shape)
        assert torch.equal(graph(x), codecs.round_trip(x * 2, "int4"))


def test_compiled_once_for_all_shapes():
    compiles = []

    def count(graph, example_inputs):
        compiles.append(graph)
        return graph

    def step(x):
        return codecs.round_trip(x.relu().transpose(1, 2), "int8") + 1

    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    for shape in ((3, 5, 64), (2, 9, 33), (7, 4, 130)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), step(x))
    assert len(compiles) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_pass_torch_opcheck(dtype):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(6, 33).t().to(dtype)
    torch.library.opcheck(torch.ops.hilore.compress.default, (x, "int8"), test_utils=checks)
    payload = codecs.compress(x, "int8")
    arguments = (payload, "int8", dtype, x.shape, x.stride())
    torch.library.opcheck(torch.ops.hilore.decompress.default, arguments, test_utils=checks)


def test_the_input_is_left_alone_and_not_aliased():
    x = torch.randn(4, 64, requires_grad=True)
    before = x.detach().clone()
    restored = codecs.round_trip(x, "int8")
    assert torch.equal(x, before)
    restored.zero_()
    assert torch.equal(x, before)
    assert not restored.requires_grad


def test_ops_cost_little_python():
    """30 us a call is the goal (13 to 16 measured, kernel included); the limit here only catches a slow registration."""
    x = torch.randn(4, 64)
    payload = codecs.compress(x, "int8")
    calls = 300
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        for _ in range(calls):
            torch.ops.hilore.compress.default(x, "int8")
            torch.ops.hilore.decompress.default(payload, "int8", torch.float32, (4, 64), (64, 1))
        best = min(best, (time.process_time() - start) / calls)
    assert best < 200e-6


# ---- malloc ----


def test_steady_malloc_stops_page_faults():
    """In a process of its own: the thresholds stay for good."""
    script = """
import ctypes, resource
from hilore_cli.malloc import steady_malloc
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def faults(rounds=20, size=32 * 2**20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        block = libc.malloc(size); ctypes.memset(block, 1, size); libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
worked = steady_malloc()
assert steady_malloc() is worked
faults(rounds=2)
print(worked, faults())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    worked, faults = done.stdout.split()
    if worked == "True":
        assert int(faults) < 1000


def test_steady_malloc_is_false_without_glibc(monkeypatch):
    from hilore_cli import malloc

    monkeypatch.setattr(malloc.os, "confstr", lambda name: "musl 1.2")
    assert malloc.steady_malloc.__wrapped__() is False
    monkeypatch.setattr(malloc.sys, "platform", "darwin")
    assert malloc.steady_malloc.__wrapped__() is False
