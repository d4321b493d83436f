"""Codecs: the CPU path against the specification, the specification against its own words, the bound against a search.

Ids in the names (NU02 ...) are those of the catalogue of known bugs in others' checkpointing and compression. test_codec_ops.py has the two ops, test_kernels.py Triton.
"""

from __future__ import annotations

import math
import struct
from itertools import product

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from tensors_for_tests import (
    non_finite_tensors,
    pool_tensors,
    pooled_everything,
    restorable,
    same_values,
    sample_tensors,
)

from hilore_cli import codecs
from hilore_cli.codecs import CODECS, cpu, reference, rowwise, rowwise_cpu
from hilore_cli.codecs.formats import FLOATS, LEAST, Bf16Codec, GroupedCodec, MaskCodec, RowwiseCodec
from hilore_cli.errors import UsageError

CHUNK = 4096  # in place of CHUNK_NUMEL, to cross its boundaries with small tensors
NUMELS = (1, 31, 32, 33, 96, 127, 128, 129, CHUNK, CHUNK + 40, 3 * CHUNK, 3 * CHUNK + 129)

GROUPED = [codec for codec in CODECS.values() if isinstance(codec, GroupedCodec)]
ROWWISE = [codec for codec in CODECS.values() if isinstance(codec, RowwiseCodec)]
KINDS = [(kind, asymmetric) for kind, asymmetric in product(("int8", "int4", "e4m3"), (False, True)) if not (kind == "e4m3" and asymmetric)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def each(chosen: list[codecs.Codec]):
    return pytest.mark.parametrize("codec", chosen, ids=lambda codec: codec.name)


def each_with_its_dtypes(chosen):
    cases = [(codec, dtype) for codec in chosen for dtype in codec.dtypes]
    return pytest.mark.parametrize(("codec", "dtype"), cases, ids=[f"{codec.name}-{dtype_name(dtype)}" for codec, dtype in cases])


LOSSY = [codec for codec in CODECS.values() if not codec.exact]
IN_GROUPS = GROUPED + ROWWISE
ALL_DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)


def drawn(codec: codecs.Codec) -> dict[str, int]:
    return {"seed": 0x123456789ABCDEF, "stream": 7} if codec.stochastic else {}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (cpu, rowwise_cpu):
        assert module.CHUNK_NUMEL % CHUNK == 0
        monkeypatch.setattr(module, "CHUNK_NUMEL", CHUNK)


# ---- names ----


def test_the_names_are_those_of_the_grammar():
    grammar = product(("int8", "int8-asym", "int4", "int4-asym", "e4m3"), ("", "-g64", "-g32"), ("", "-fp32"), ("", "-sr"))
    grouped = {"".join(parts) for parts in grammar}
    assert len(grouped) == 60
    assert set(CODECS) == grouped | {"bf16", "bf16-sr", "mask"} | {f"fbgemm-int{bits}{group}" for bits in (8, 4) for group in ("", "-g64", "-g128")}


@pytest.mark.parametrize("name", CODECS)
def test_a_name_says_what_its_codec_is(name):
    codec = codecs.get_codec(name)
    assert codec.name == name
    parts = name.split("-")
    assert codec.stochastic == ("sr" in parts)
    if isinstance(codec, GroupedCodec):
        assert (codec.kind, codec.asymmetric, codec.wide) == (parts[0], "asym" in parts, "fp32" in parts)
    if isinstance(codec, GroupedCodec | RowwiseCodec):
        assert codec.group == next((int(part[1:]) for part in parts if part[0] == "g"), 128 if isinstance(codec, GroupedCodec) else 32)
        assert codec.bits == (4 if "int4" in parts else 8)


@pytest.mark.parametrize("name", ["fp8", "int8-g128", "int8-sr-g32", "int4-fp32-asym", "e4m3-asym", "INT8", "", "bf16-g32"])
def test_an_unknown_name_is_a_usage_error_that_says_which_there_are(name):
    with pytest.raises(UsageError) as caught:
        codecs.get_codec(name)
    message = str(caught.value)
    assert message.startswith(f"codec {name!r} does not exist; there are int8, int4")
    assert "\n" not in message
    assert all(word in message for word in ("-asym", "e4m3", "-g32", "-g64", "-fp32", "-sr", "bf16", "mask", "fbgemm-int8", "fbgemm-int4"))


def test_default_codecs_are_those_of_the_device():
    assert codecs.default_codecs(torch.device("cpu")) == ("fbgemm-int8", "fbgemm-int4")
    assert codecs.default_codecs(torch.device("cuda", 1)) == ("int8", "int4")


# ---- the CPU path is the specification ----


@each_with_its_dtypes([codec for codec in LOSSY if codec not in ROWWISE])
def test_cpu_path_equals_reference_bit_for_bit(codec, dtype):
    for numel in NUMELS:
        x = pooled_everything(numel, dtype)
        fast, specified = cpu.compress(x, codec, **drawn(codec)), reference.compress(x, codec, **drawn(codec))
        assert fast.shape == (codecs.payload_bytes(codec, numel),)
        assert torch.equal(fast, specified), numel
        restored = cpu.decompress(fast, codec, dtype=dtype, numel=numel)
        assert same_values(restored, reference.decompress(specified, codec, dtype=dtype, numel=numel)), numel


def signless_zero_rows(payload: torch.Tensor, codec: RowwiseCodec) -> torch.Tensor:
    """The payload's rows with every zero in the metadata made +0: the one thing that is not specified."""
    rows = payload.view(-1, codec.row_bytes).clone()
    meta = rows[:, codec.code_bytes :].contiguous().view(torch.float32 if codec.bits == 8 else torch.float16)
    rows[:, codec.code_bytes :] = torch.where(meta == 0, 0, meta).view(torch.uint8)
    return rows


@each_with_its_dtypes(ROWWISE)
def test_fbgemm_equals_its_reference_bit_for_bit(codec, dtype):
    for numel in NUMELS:
        samples = sample_tensors(numel)
        for name, sample in (samples | {"pooled": pool_tensors(samples, dtype=torch.float32, numel=numel)}).items():
            x = pool_tensors({name: sample}, dtype=dtype, numel=numel)
            where = f"{name} numel {numel}"
            fast, specified = rowwise_cpu.compress(x, codec), rowwise.compress(x, codec)
            assert fast.shape == specified.shape == (codecs.payload_bytes(codec, numel),), where
            assert torch.equal(signless_zero_rows(fast, codec), signless_zero_rows(specified, codec)), where
            restored = rowwise_cpu.decompress(fast, codec, dtype=dtype, numel=numel)
            expected = rowwise.decompress(specified, codec, dtype=dtype, numel=numel)
            assert restored.dtype == dtype
            assert torch.equal(restored.isnan(), expected.isnan()), where  # int4: beyond fp16
            assert torch.equal(restored.nan_to_num(), expected.nan_to_num()), where


def test_reference_fma_rounds_once():
    """Against exact rational arithmetic, on operands chosen so that two roundings differ from one: in fp32, and, the last, in float64 and then fp32."""
    from fractions import Fraction

    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 256, (4000,), generator=generator).float()
    scale = torch.randn(4000, generator=generator)
    low = torch.cat((torch.randn(2000, generator=generator), -(code * scale)[2000:].nextafter(torch.tensor(9.0))))
    low = low * 2.0 ** torch.randint(-40, 40, (4000,), generator=generator).float()
    beyond_a_tie = torch.tensor([[205, 5237765 * 2.0**-54, 1.0], [231, 4648233 * 2.0**-54, 1 + 2.0**-23]])  # 2^-24 and 2^-54 more, or less
    code, scale, low = torch.cat((torch.stack((code, scale, low)), beyond_a_tie.t(), beyond_a_tie.t() * torch.tensor([[1.0], [-1.0], [-1.0]])), dim=1)
    for got, c, s, m in zip(*(t.tolist() for t in (rowwise._fma(code, scale, low), code, scale, low)), strict=True):
        exact = Fraction(c) * Fraction(s) + Fraction(m)
        here = torch.tensor(got)
        error = abs(Fraction(got) - exact)
        for neighbour in (here.nextafter(torch.tensor(math.inf)), here.nextafter(torch.tensor(-math.inf))):
            assert error <= abs(Fraction(neighbour.item()) - exact)


# ---- the specification is what its docstring says, in plain Python ----


def to_bits(value: float) -> int:
    return struct.unpack("=I", struct.pack("=f", value))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("=f", struct.pack("=I", bits))[0]


def scale_by_hand(reach: np.float32, codec: GroupedCodec) -> np.float32:
    """a / top, 4 units in the last place up, then up to bf16."""
    bits = to_bits(reach / np.float32(codec.top)) + 4
    return np.float32(from_bits(bits if codec.wide else (bits + 0xFFFF) // 0x10000 * 0x10000))


def low_by_hand(least: np.float32, codec: GroupedCodec) -> np.float32:
    """Down to bf16."""
    bits = to_bits(least)
    if not codec.wide and bits & 0xFFFF:
        bits = bits // 0x10000 * 0x10000 + (0x10000 if least < 0 else 0)
    return np.float32(from_bits(bits))


def value_of_code(code: int, codec: GroupedCodec) -> float:
    if codec.kind == "e4m3":
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
        return -size if code & 0x80 else size
    if codec.asymmetric or code < 2 ** (codec.bits - 1):
        return float(code)
    return float(code - 2**codec.bits)


def read_by_hand(payload: bytes, codec: GroupedCodec, groups: int) -> list[tuple[list[int], np.float32, np.float32]]:
    """Codes, scale and low of each group."""
    size = codec.group * codec.bits // 8

    def number(region: int, group: int) -> np.float32:
        at = groups * size + (region * groups + group) * codec.meta_bytes
        return np.float32(struct.unpack("=f", payload[at : at + 4] if codec.wide else b"\0\0" + payload[at : at + 2])[0])

    read = []
    for group in range(groups):
        packed = payload[group * size : (group + 1) * size]
        codes = list(packed) if codec.bits == 8 else [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        read.append((codes, number(0, group), number(1, group) if codec.asymmetric else np.float32(0)))
    return read


@each([codec for codec in GROUPED if not codec.stochastic])
def test_the_specification_by_hand(codec):
    """On a little-endian machine: layout, scale, low, the codes of integers, and values, each operation rounded to fp32 by numpy."""
    normal = torch.randn(4 * codec.group + 29, generator=torch.Generator().manual_seed(8))
    x = normal * torch.tensor([1.0, 1e-6, 3e4, 1.0])[torch.arange(normal.numel()) // codec.group % 4]
    groups = 5
    payload = codecs.compress(x, codec)
    assert payload.numel() == groups * (codec.group * codec.bits // 8 + codec.meta_bytes * (1 + codec.asymmetric))
    restored = codecs.decompress(payload, codec, dtype=torch.float32, size=x.shape, stride=(1,)).tolist()
    for number, (codes, scale, low) in enumerate(read_by_hand(bytes(payload.tolist()), codec, groups)):
        start = number * codec.group
        elements = [np.float32(value) for value in x[start : start + codec.group].tolist()]
        assert low == (low_by_hand(min(elements), codec) if codec.asymmetric else 0)
        assert scale == scale_by_hand(max(elements) - low if codec.asymmetric else max(map(abs, elements)), codec)
        for code, element, value in zip(codes, elements, restored[start:], strict=False):
            if codec.kind != "e4m3":
                assert value_of_code(code, codec) == np.rint((element - low) * (np.float32(1) / scale))
            assert value == np.float32(value_of_code(code, codec)) * scale + low
        assert codes[len(elements) :] == [0] * (codec.group - len(elements))


# ---- how well it comes back ----


def assert_within_bound(x: torch.Tensor, codec: codecs.Codec) -> None:
    """Restored values are finite where they have to be, NaN where they have to be, and nowhere further off than `error_bound`."""
    restored = codecs.round_trip(x, codec, **drawn(codec))
    has_to, may = restorable(codec, x)
    assert restored[has_to].isfinite().all()
    assert restored[~may].isnan().all()
    excess = (x.double() - restored.double()).abs() - codecs.error_bound(codec, x)
    finite = restored.isfinite()
    worst = torch.where(finite, excess, -math.inf).argmax()
    assert (excess[finite] <= 0).all(), f"element {worst}: {x[worst].item()!r} came back as {restored[worst].item()!r}"


@each_with_its_dtypes(LOSSY)
def test_error_stays_within_the_bound(codec, dtype):
    """NU02: zeros, constants, denormals, tiny and huge groups, huge outliers, numbers next to the largest; tails too."""
    samples = sample_tensors(640)
    assert_within_bound(pool_tensors(samples, dtype=dtype, numel=640 * len(samples) - 23), codec)


@each(LOSSY)
def test_the_bound_is_no_looser_than_it_must_be(codec):
    """Over nine tenths of it are reached (e4m3: a tie next to a power of two shows 16/17 of |x| 2^-4; stochastic: a whole step, nearly)."""
    x = torch.randn(2**19, generator=torch.Generator().manual_seed(2))
    error = (x.double() - codecs.round_trip(x, codec, **drawn(codec)).double()).abs()
    assert (error / codecs.error_bound(codec, x)).max() > 0.9


SEARCHED = [(kind + "-asym" * asymmetric, stochastic) for (kind, asymmetric), stochastic in product(KINDS, (False, True))]
SEARCHED += [("bf16", False), ("bf16", True), ("fbgemm-int8", False), ("fbgemm-int4", False)]


def relatives(kind: str, *, stochastic: bool) -> list[codecs.Codec]:
    """All groups and widths of a kind."""
    if kind.startswith("fbgemm"):
        return [codec for codec in ROWWISE if codec.name.startswith(kind)]
    if kind == "bf16":
        return [Bf16Codec(stochastic=stochastic)]
    return [codec for codec in GROUPED if (codec.kind + "-asym" * codec.asymmetric, codec.stochastic) == (kind, stochastic)]


@pytest.mark.parametrize(("kind", "stochastic"), SEARCHED, ids=[kind + "-sr" * stochastic for kind, stochastic in SEARCHED])
@hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],  # the fixture above need not be reset
)
@hypothesis.given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    shrink=st.sampled_from([1.0, 1e-3, 1e-20, 1e-34]),
    offset=st.one_of(st.just(0.0), st.floats(min_value=-6e4, max_value=6e4, width=32)),
    data=st.data(),
)
def test_error_bound_cannot_be_broken(kind, stochastic, values, shrink, offset, data):
    codec = data.draw(st.sampled_from(relatives(kind, stochastic=stochastic)))
    dtype = data.draw(st.sampled_from(codec.dtypes))
    limit = min(torch.finfo(dtype).max, 3e4 if kind == "fbgemm-int4" else 8e37 if "asym" in kind or kind == "fbgemm-int8" else math.inf)
    x = (torch.tensor(values) * shrink + offset).clamp(-limit, limit).to(dtype)
    assert restorable(codec, x)[0].all()
    assert_within_bound(x, codec)


@each(IN_GROUPS)
def test_rounding_noise_is_that_of_the_step(codec):
    """Pins the quality: to the nearest, noise uniform over a step; stochastically, twice its variance."""
    x = torch.randn(codec.group * 2048, generator=torch.Generator().manual_seed(1))
    rows = x.view(-1, codec.group)
    around_zero = isinstance(codec, GroupedCodec) and not codec.asymmetric
    reach = rows.abs().amax(1, keepdim=True) if around_zero else rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    step = (reach / (codec.levels if isinstance(codec, RowwiseCodec) else codec.top)).expand_as(rows)
    if codec in GROUPED and codec.kind == "e4m3":
        octave = (rows.abs() / step).log2().floor()
        step = torch.where(rows.abs() < reach, step * 2 ** (octave - 3).clamp(min=-9), 0)  # the largest is 448, or within 2^-7 of it
    # a group's extremes are exact where the metadata is: uniform noise has no share in them
    exact = 0 if codec in GROUPED and (not codec.wide or codec.kind == "e4m3") else 1 if around_zero else 2
    expected = (step.square().mean() / (6 if codec.stochastic else 12)).sqrt().item() * math.sqrt(1 - exact / codec.group)
    measured = (codecs.round_trip(x, codec, **drawn(codec)) - x).square().mean().sqrt().item()
    assert measured == pytest.approx(expected, rel=0.03 if codec in GROUPED else 0.01)


# ---- scales: no code ever needs clamping ----


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("kind", "asymmetric"), KINDS)
def test_no_quotient_exceeds_top(kind, asymmetric, wide):
    """Every seventh mantissa, at several exponents: a / scale, as it is computed, is at most top; so nothing overflows, however it is rounded."""
    codec = GroupedCodec(kind=kind, asymmetric=asymmetric, wide=wide)
    mantissas = torch.arange(0, 2**23, 7, dtype=torch.int32)
    for exponent in (-99, 0, 126 if asymmetric else 127):
        largest = (mantissas + ((exponent + 127) << 23)).view(torch.float32)
        rows = torch.stack((torch.zeros_like(largest), largest), dim=1) if asymmetric else largest[:, None]
        _, scale, _ = reference.encode(rows, codec, first=0, seed=0, stream=0)
        scale = scale.float()
        assert (scale.double() * codec.top >= largest.double()).all()
        assert (scale.double() * codec.top <= largest.double() * (1 + (2.0**-20 if wide else 2.0**-7 + 2.0**-20))).all()
        assert (largest * (torch.ones_like(scale) / scale) <= codec.top).all()


@each([codec for codec in GROUPED if codec.group == 32])
def test_a_group_of_its_own_maximum_stays_in_range(codec):
    """A code beyond top would wrap to the other end: far outside the bound. Stochastically with 32 draws to a mantissa."""
    largest = (torch.arange(0, 2**23, 2999, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    rows = largest[:, None].repeat(1, codec.group)
    rows[:, ::3] *= -1
    assert_within_bound(rows.view(-1), codec)
    codes, _, _ = reference.encode(rows, codec, first=0, **(drawn(codec) or {"seed": 0, "stream": 0}))
    codes = codes.view(torch.int8) if not codec.asymmetric and codec.kind != "e4m3" else codes
    sizes = codes & 0x7F if codec.kind == "e4m3" else codes.int().abs()
    assert sizes.amax() <= (0x7E if codec.kind == "e4m3" else codec.top)


# ---- special values ----


@each_with_its_dtypes(IN_GROUPS)
def test_nu02_zero_and_constant_groups_come_back(codec, dtype):
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[2] = 0.0
    x[3] = -0.0
    x[5] = 0.5
    restored = codecs.round_trip(x, codec, **drawn(codec))
    assert (restored[2:4] == 0).all()
    assert restored.isfinite().all()
    if isinstance(codec, RowwiseCodec) or codec.asymmetric:
        assert (restored[5] == 0.5).all()


@each(LOSSY)
@pytest.mark.parametrize("size", [1e-30, 1e-40, 1e-45, 1e-8, 1e-6])
def test_nu02_tiny_groups_stay_within_the_bound(codec, size):
    x = torch.randn(512, generator=torch.Generator().manual_seed(3)) * size
    assert_within_bound(x, codec)
    if isinstance(codec, GroupedCodec) and x.abs().max() < LEAST and not codec.asymmetric:
        assert (codecs.round_trip(x, codec, **drawn(codec)) == 0).all()


@each_with_its_dtypes(IN_GROUPS)
def test_nu05_non_finite_groups_are_nan_and_leave_neighbours_alone(codec, dtype):
    clean = torch.randn(6, codec.group, generator=torch.Generator().manual_seed(4)).to(dtype)
    specified, fast = (rowwise, rowwise_cpu) if isinstance(codec, RowwiseCodec) else (reference, cpu)
    expected = codecs.round_trip(clean, codec, **drawn(codec))
    for value, column in product((math.nan, math.inf, -math.inf), (0, 7, codec.group - 1)):
        x = clean.clone()
        x[1, column] = value
        x[4] = value
        for backend in (fast, specified):
            payload = backend.compress(x.view(-1), codec, **drawn(codec))
            restored = backend.decompress(payload, codec, dtype=dtype, numel=x.numel()).view_as(x)
            assert restored[[1, 4]].isnan().all()
            assert same_values(restored[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])


@each(IN_GROUPS)
def test_nu05_garbage_tail_rows_do_not_reach_the_rows_before(codec):
    x = torch.randn(10, codec.group // 2, generator=torch.Generator().manual_seed(5))
    expected = codecs.round_trip(x, codec, **drawn(codec))[:6]
    x[7:] = torch.tensor([math.inf, math.nan]).repeat(codec.group // 4)
    restored = codecs.round_trip(x, codec, **drawn(codec))
    assert same_values(restored[:6], expected)
    assert restored[8:].isnan().all()


@pytest.mark.parametrize("name", ["int8", "int4-asym-g32-sr", "fbgemm-int8"])
def test_nu01_a_nan_after_the_last_chunk_boundary_is_found(name):
    x = torch.ones(CHUNK + 64, dtype=torch.bfloat16)
    expected = codecs.round_trip(x, name)
    x[-1] = math.nan
    restored = codecs.round_trip(x, name)
    lost = 64 % codecs.get_codec(name).group or codecs.get_codec(name).group
    assert restored[-lost:].isnan().all()
    assert same_values(restored[:-lost], expected[:-lost])


def test_fbgemm_int4_groups_beyond_fp16_are_nan_and_never_quietly_wrong():
    x = torch.randn(4, 32)
    x[1, 3] = 1e6
    x[2] += 7e4
    restored = codecs.round_trip(x, "fbgemm-int4")
    assert restored[1:3].isnan().all()
    assert restored[[0, 3]].isfinite().all()
    extremes = torch.tensor([-65504.0, 65504.0], dtype=torch.float16).repeat(32)
    assert codecs.round_trip(extremes, "fbgemm-int4").isfinite().all()


@each([codec for codec in GROUPED if codec.asymmetric])
def test_asymmetric_groups_of_too_wide_a_range_are_nan_and_never_quietly_wrong(codec):
    """A range beyond fp32, or so near its end that code * scale would overflow on the way to a small number."""
    x = torch.randn(4, codec.group, generator=torch.Generator().manual_seed(6))
    x[1, :2] = torch.tensor([-1.68e38, 1.72e38])
    x[2, :2] = torch.tensor([-3.4e38, 3.4e38])
    x[3, :2] = torch.tensor([-8.4e37, 8.4e37])
    restored = codecs.round_trip(x, codec, **drawn(codec))
    assert restored[1:3].isnan().all()
    assert restored[[0, 3]].isfinite().all()


# ---- bf16 and masks ----


def test_bf16_is_torchs_cast_and_its_ends():
    x = pool_tensors(sample_tensors(999), dtype=torch.float32, numel=5000)
    x = x[x.abs() <= torch.finfo(torch.bfloat16).max]
    assert same_values(codecs.compress(x, "bf16").view(torch.bfloat16), x.bfloat16())
    assert same_values(reference.compress(x, Bf16Codec()).view(torch.bfloat16), x.bfloat16())
    assert same_values(codecs.round_trip(x, "bf16"), x.bfloat16().float())
    largest, beyond = torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max
    for name in ("bf16", "bf16-sr"):
        ends = torch.tensor([beyond, -beyond, math.inf, -math.inf, math.nan, -0.0, 1.0])
        assert codecs.round_trip(ends, name)[:4].tolist() == [largest, -largest, math.inf, -math.inf]
        assert codecs.round_trip(ends, name)[4].isnan()
        assert same_values(codecs.round_trip(ends, name)[5:], ends[5:])


def test_bf16_makes_no_other_nan_or_inf():
    x = pool_tensors(non_finite_tensors(6000), dtype=torch.float32, numel=6000)
    for name in ("bf16", "bf16-sr"):
        restored = codecs.round_trip(x, name)
        assert torch.equal(restored.isnan(), x.isnan())
        assert torch.equal(restored.isinf(), x.isinf())
        assert torch.equal(restored.signbit()[~x.isnan()], x.signbit()[~x.isnan()])


def test_masks_are_bits_and_come_back_exactly():
    for numel in (*range(0, 70), 127, 128, 129, CHUNK, CHUNK + 5, 2 * CHUNK + 8):
        mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.4
        payload = codecs.compress(mask, "mask")
        bits = [bool(byte >> bit & 1) for byte in payload.tolist() for bit in range(8)]
        assert payload.numel() == MaskCodec().payload_bytes(numel) == -(-numel // 16) * 2
        assert bits[:numel] == mask.tolist()
        assert not any(bits[numel:])
        assert torch.equal(codecs.round_trip(mask, "mask"), mask)
        assert torch.equal(payload, reference.compress(mask, MaskCodec()))
    assert (codecs.error_bound(MaskCodec(), mask) == 0).all()
