"""The Triton kernels against the specification, bit for bit; and what they compile to for GPUs that need not be here.

One body of tests: where there is no GPU, conftest.py turns Triton's interpreter on and they run on the CPU. What only a GPU can run is marked `gpu`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from tensors_for_tests import pool_tensors, pooled_everything, same_values, sample_tensors
from torch import Tensor

from hilore_cli import codecs
from hilore_cli.codecs import CODECS, reference
from hilore_cli.codecs.formats import FLOATS, Bf16Codec, Codec, GroupedCodec, MaskCodec

pytest.importorskip("triton", reason="Triton is not installed (the test extra brings it on Linux): pip install triton")

from hilore_cli.codecs import triton as kernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA or ROCm device")
FEW = 8192
"""Elements of one program in these tests' interpreter: two programs' worth of a GPU, and of bit masks just one."""
EVEN, TAIL, LONG_TAIL = FEW, 5033, FEW + 1234

CODED = [codec for codec in CODECS.values() if isinstance(codec, GroupedCodec | Bf16Codec)]
KINDS = [(kind, asymmetric) for kind, asymmetric in product(("int8", "int4", "e4m3"), (False, True)) if not (kind == "e4m3" and asymmetric)]
LAYOUTS = list(product((128, 64, 32), (False, True)))


def spread_codecs() -> list[Codec]:
    """Every kind, to the nearest and stochastically, each with another group and width of metadata."""
    chosen = [
        GroupedCodec(kind=kind, asymmetric=asymmetric, stochastic=stochastic, group=group, wide=wide)
        for ((kind, asymmetric), stochastic), (group, wide) in zip(product(KINDS, (False, True)), (LAYOUTS * 2)[:10], strict=True)
    ]
    return [*chosen, Bf16Codec(), Bf16Codec(stochastic=True)]


def each(chosen: list[Codec]):
    return pytest.mark.parametrize("codec", chosen, ids=lambda codec: codec.name)


def drawn(codec: Codec) -> dict[str, int]:
    return {"seed": 0xFEDCBA9876543210, "stream": 0x7FFFFFF5} if codec.stochastic else {}


pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # numpy's, which interprets


@pytest.fixture(autouse=True)
def few_elements_a_program(monkeypatch):
    """The interpreter's time goes by programs, and by elements from some ten thousand on."""
    monkeypatch.setattr(kernels, "NUMEL_INTERPRETED", FEW)


def assert_equals_reference(x: Tensor, codec: Codec, **seeds: int) -> None:
    """Payload, and what comes back, the sign of zeros included."""
    seeds = seeds or drawn(codec)
    expected = reference.compress(x, codec, **seeds)
    payload = kernels.compress(x.to(DEVICE), codec, **seeds)
    assert payload.device.type == DEVICE
    assert torch.equal(payload.cpu(), expected)
    restored = kernels.decompress(payload, codec, dtype=x.dtype, numel=x.numel())
    assert same_values(restored.cpu(), reference.decompress(expected, codec, dtype=x.dtype, numel=x.numel()))


def test_the_kernels_are_interpreted_where_there_is_no_gpu():
    assert kernels._interpreted(kernels.encode_kernel) == (not ON_GPU)


# ---- bit for bit ----


@each(CODED)
def test_a_tail_equals_the_reference(codec):
    one = CODED.index(codec) % len(codec.dtypes)
    for dtype in codec.dtypes[one : one + 1] if ON_GPU else codec.dtypes:  # a GPU compiles each
        assert_equals_reference(pooled_everything(TAIL, dtype), codec)


@each(spread_codecs())
def test_whole_programs_and_several_equal_the_reference(codec):
    for dtype in codec.dtypes:
        for numel in (EVEN, LONG_TAIL):
            options = kernels.kernel_options(codec, dtype, numel, interpreted=not ON_GPU)
            assert options["EVEN"] == (numel == EVEN)
            assert_equals_reference(pooled_everything(numel, dtype), codec)


@each([GroupedCodec(kind="int4", group=32), GroupedCodec(kind="int8", asymmetric=True, stochastic=True), Bf16Codec()])
def test_short_tensors_equal_the_reference(codec):
    for numel in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129):
        assert_equals_reference(pool_tensors({"normal": sample_tensors(numel)["normal"]}, dtype=torch.float32, numel=numel), codec)
    empty = torch.empty(0, device=DEVICE)
    assert kernels.compress(empty, codec).shape == (0,)
    assert kernels.decompress(empty.byte(), codec, dtype=torch.float32, numel=0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "asymmetric"), KINDS)
def test_every_16_bit_number_equals_the_reference(kind, asymmetric, dtype, monkeypatch):
    """Every float there is of that size, in order and shuffled: normal, subnormal, infinite, NaN."""
    monkeypatch.setattr(kernels, "NUMEL_INTERPRETED", 2**16)
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = numbers[numbers.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    for x in (numbers, shuffled):
        assert_equals_reference(x, GroupedCodec(kind=kind, asymmetric=asymmetric, group=32))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "asymmetric"), KINDS)
def test_every_code_comes_back_as_the_reference_says(kind, asymmetric, dtype):
    """Codes and scales that few tensors would make: decoded by themselves. e4m3 has no infinity and its NaN is never stored."""
    codec = GroupedCodec(kind=kind, asymmetric=asymmetric, group=64, wide=True)
    scales = torch.tensor([0.0, 1.0, 0.3, 1e-30, 1.2e36, 3e36, torch.nan, 7e-4]).repeat_interleave(4)
    lows = torch.tensor([0.0, -1.0, 1e30, -3e-41, -2e36, 1e38, 0.0, 5.0]).repeat_interleave(4)
    codes = torch.arange(256, dtype=torch.uint8).repeat(8)
    if kind == "e4m3":
        codes = codes.clamp(max=0xFE) - (codes == 0x7F).byte()
    if codec.bits == 4:
        codes = codes.view(-1, 2)[:, 0].contiguous()
    metas = [meta.view(torch.uint8) for meta in ((scales, lows) if asymmetric else (scales,))]
    payload = torch.cat((codes, *metas))
    numel = 32 * codec.group
    assert payload.numel() == codec.payload_bytes(numel)
    restored = kernels.decompress(payload.to(DEVICE), codec, dtype=dtype, numel=numel)
    assert same_values(restored.cpu(), reference.decompress(payload, codec, dtype=dtype, numel=numel))


@each([GroupedCodec(kind="int8", stochastic=True), GroupedCodec(kind="e4m3", stochastic=True, group=32), Bf16Codec(stochastic=True)])
def test_seeds_and_streams_of_any_size_draw_the_same_words(codec):
    x = sample_tensors(300)["normal"]
    for seed, stream in ((0, 0), (1, 1), (-1, 2**31 - 1), (2**31, 0), (2**32 - 1, 3), (2**32, 0), (2**63, 0), (2**64 - 1, 5), (-(2**63), 2**31), (7, 2**32 - 1)):
        assert_equals_reference(x, codec, seed=seed, stream=stream)


@pytest.mark.skipif(ON_GPU, reason="a GPU's programs are of one size")
@each(spread_codecs())
def test_launches_of_other_sizes_give_the_same_bits(codec, monkeypatch):
    dtype = codec.dtypes[-1]
    x = pooled_everything(3 * 1024 + 200, dtype)
    payloads, values = [], []
    for numel in (1024, 2048, 2**16):
        monkeypatch.setattr(kernels, "NUMEL_INTERPRETED", numel)
        payloads.append(kernels.compress(x, codec, **drawn(codec)))
        values.append(kernels.decompress(payloads[-1], codec, dtype=dtype, numel=x.numel()))
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
    assert all(same_values(value, values[0]) for value in values)


def test_masks_equal_the_reference():
    for numel in (0, 1, 7, 8, 15, 16, 17, 1000, 16 * kernels.WORDS, 2 * 16 * kernels.WORDS, 2 * 16 * kernels.WORDS + 9):
        mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.4
        payload = kernels.compress(mask.to(DEVICE), MaskCodec())
        assert torch.equal(payload.cpu(), reference.compress(mask, MaskCodec()))
        assert torch.equal(kernels.decompress(payload, MaskCodec(), dtype=torch.bool, numel=numel).cpu(), mask)


# ---- where they read and write ----


@each([GroupedCodec(kind="int4", asymmetric=True, group=32), GroupedCodec(kind="int8", wide=True), GroupedCodec(kind="e4m3", stochastic=True, group=64), Bf16Codec()])
@pytest.mark.parametrize("numel", [1, 33, 1000, 4096 + 65])
def test_nothing_is_read_or_written_beyond_the_ends(codec, numel):
    """NaN around what is read, a pattern around what is written: a masked load or store too few would show."""
    margin = 256
    x = sample_tensors(numel)["normal"]
    around = torch.full((numel + 2 * margin,), torch.nan, device=DEVICE)
    around[margin : margin + numel] = x
    size = codec.payload_bytes(numel)
    stored = torch.full((size + 2 * margin,), 0xA5, dtype=torch.uint8)
    expected = reference.compress(x, codec, **drawn(codec))
    stored[margin : margin + size] = expected

    written = launch_encode(around[margin : margin + numel], codec, margin=margin).cpu()
    assert torch.equal(written, stored)

    restored = launch_decode(stored.to(DEVICE), codec, numel=numel, margin=margin).cpu()
    assert same_values(restored[margin : margin + numel], reference.decompress(expected, codec, dtype=torch.float32, numel=numel))
    assert (restored[:margin] == 7).all()
    assert (restored[margin + numel :] == 7).all()


def launch_encode(x: Tensor, codec: Codec, *, margin: int) -> Tensor:
    """The payload with `margin` bytes of 0xA5 on both sides, as the kernel left them."""
    numel = x.numel()
    size = codec.payload_bytes(numel)
    around = torch.full((size + 2 * margin,), 0xA5, dtype=torch.uint8, device=x.device)
    outputs = kernels._outputs(around[margin : margin + size], codec, numel)
    options = kernels.kernel_options(codec, x.dtype, numel, interpreted=not ON_GPU)
    seeds = {"seed": 0, "stream": 0} | drawn(codec)
    programs, groups = kernels._programs(numel, options), -(-numel // options["G"])
    kernels._launch(kernels.encode_kernel, programs, x, *outputs, numel, groups, kernels._signed(seeds["seed"], 64), seeds["stream"], **options, STOCHASTIC=codec.stochastic)
    return around


def launch_decode(stored: Tensor, codec: Codec, *, numel: int, margin: int) -> Tensor:
    """fp32 with `margin` sevens on both sides, as the kernel left them."""
    around = torch.full((numel + 2 * margin,), 7.0, device=stored.device)
    outputs = kernels._outputs(stored[margin : margin + codec.payload_bytes(numel)], codec, numel)
    options = kernels.kernel_options(codec, torch.float32, numel, interpreted=not ON_GPU)
    programs, groups = kernels._programs(numel, options), -(-numel // options["G"])
    kernels._launch(kernels.decode_kernel, programs, *outputs, around[margin : margin + numel], numel, groups, **options, MAX=torch.finfo(torch.float32).max)
    return around


def pointer_before(tensor: Tensor, *, elements: int) -> Tensor:
    """A tensor of one element that lies so many elements before a flat one. Never to be read itself."""
    kind = {torch.int16: ctypes.c_int16, torch.int32: ctypes.c_int32, torch.uint8: ctypes.c_uint8, torch.float32: ctypes.c_float}[tensor.dtype]
    place = (kind * 1).from_address(tensor.data_ptr() - elements * tensor.element_size())
    return torch.from_numpy(np.ctypeslib.as_array(place))


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter; a GPU runs the test below on memory of that size")
@pytest.mark.parametrize("first_element", [2**31, 2**36], ids=["2^31", "2^36"])
@each([GroupedCodec(kind="int8", asymmetric=True, stochastic=True, group=32, wide=True), GroupedCodec(kind="e4m3", stochastic=True)])
def test_a_program_beyond_32_bits_reads_draws_and_writes_in_its_own_place(codec, first_element, monkeypatch):
    """Only the last program of a tensor of 2^31 (2^36) elements is run, on pointers moved so that its part alone is in memory.

    From 2^34 elements on the counter of the random numbers needs its second word.
    """
    from triton.runtime import interpreter

    length = FEW - 100
    x = pooled_everything(length, torch.float32)
    first_group, groups = first_element // codec.group, codec.groups(length)
    program = first_element // FEW
    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", lambda i, j, k: setattr(interpreter.interpreter_builder, "grid_idx", (i + program, j, k)))
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *arguments: None)  # on a CPU it copies each argument onto itself
    payload = torch.zeros(codec.payload_bytes(length), dtype=torch.uint8)
    codes, scale, low = kernels._outputs(payload, codec, length)
    codes = codes.view(-1)
    far = {
        "codes": pointer_before(codes, elements=first_group * codec.code_bytes),
        "scale": pointer_before(scale, elements=first_group),
        "low": pointer_before(low, elements=first_group),
    }
    numel = first_element + length
    options = kernels.kernel_options(codec, torch.float32, numel, interpreted=True)
    assert not options["EVEN"]
    seeds = drawn(codec)
    kernels._launch(kernels.encode_kernel, 1, pointer_before(x, elements=first_element), *far.values(), numel, first_group + groups, kernels._signed(seeds["seed"], 64), seeds["stream"], **options, STOCHASTIC=True)

    rows = reference._rows(x, codec.group)
    expected, expected_scale, expected_low = reference.encode(rows, codec, first=first_group, **seeds)
    assert torch.equal(codes[:length], expected.view(-1)[:length])
    assert torch.equal(scale, expected_scale.view(scale.dtype))
    assert not codec.asymmetric or torch.equal(low, expected_low.view(low.dtype))

    restored = torch.zeros_like(x)
    kernels._launch(kernels.decode_kernel, 1, *far.values(), pointer_before(restored, elements=first_element), numel, first_group + groups, **options, MAX=torch.finfo(torch.float32).max)
    assert same_values(restored, reference.decompress(payload, codec, dtype=torch.float32, numel=length))


@pytest.mark.gpu
@NEEDS_GPU
def test_more_than_2_to_31_elements_on_a_gpu():
    """Its two ends against the reference; zeros between them."""
    codec = codecs.get_codec("int8-sr")
    end, numel = 2**14, 2**31 + 2**14 + 1000
    sample = pooled_everything(end, torch.bfloat16)
    first = (numel - end) // codec.group * codec.group
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[:end] = sample.cuda()
    x[first : first + end] = sample.cuda()
    payload = kernels.compress(x, codec, **drawn(codec))
    restored = kernels.decompress(payload, codec, dtype=x.dtype, numel=numel)
    for start in (0, first):
        rows = sample.float().view(-1, codec.group)
        code, scale, _ = reference.encode(rows, codec, first=start // codec.group, **drawn(codec))
        expected = reference.decode(code, codec, scale).clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max).view(-1).to(x.dtype)
        assert torch.equal(payload[start : start + end].cpu(), code.view(-1))
        assert same_values(restored[start : start + end].cpu(), expected)
    assert not restored[end:first].count_nonzero()


@pytest.mark.gpu
@NEEDS_GPU
def test_the_ops_run_the_kernels_on_a_gpu():
    x = torch.randn(33, 130, device="cuda").t()
    for name in ("int8", "int4-asym-g32-sr", "e4m3", "bf16", "mask"):
        value = x > 0 if name == "mask" else x
        payload = codecs.compress(value, name, seed=3, stream=4)
        assert payload.is_cuda
        assert torch.equal(payload.cpu(), codecs.compress(value.cpu(), name, seed=3, stream=4))
        restored = codecs.round_trip(value, name, seed=3, stream=4)
        assert restored.stride() == value.stride()
        assert same_values(restored.cpu(), codecs.round_trip(value.cpu(), name, seed=3, stream=4))


# ---- what they compile to ----


def run_compiler(*arguments: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def covered() -> list[dict]:
    return run_compiler("cover")["kernels"]


def names(records: list[dict]) -> list[str]:
    return [" ".join(str(record[key]) for key in ("direction", "codec", "dtype", "end", "target")) for record in records]


def assert_compiled_well(records: list[dict]) -> None:
    """No spills, no narrow pointers, nothing rounded otherwise than written, and loads and stores as wide as they can be."""
    in_rows = [r for r in records if r["end"] != "ragged"]
    words_cut = [r for r in in_rows if r["codec"] == "mask" and r["end"] != "even"]  # a word more or less than a whole thread's
    bad = {
        "spilled": [r for r in records if r["spilled"]],
        "narrow pointers": [r for r in records if r["pointers"] == 0 or r["narrow_pointers"]],
        "rounded otherwise": [r for r in records if r["fused"] or r["approximate"] or r["flushing"]],
        "read or written twice": [r for r in records if r["loops"] or (r["read_bytes"], r["written_bytes"]) != bytes_of_a_program(r)],
        "divisions": [r for r in records if r["kernel"] == "encode_kernel" and not r["codec"].startswith("bf16") and r["divisions"] != 2],
        "narrow on the tensor": [r for r in in_rows if widest_access(r, of_tensor=True) not in (r["loads"] if r["direction"] == "compress" else r["stores"])],
        "narrow on the payload": [r for r in in_rows if r not in words_cut and widest_access(r, of_tensor=False) not in (r["stores"] if r["direction"] == "compress" else r["loads"])],
    }
    assert {what: names(found) for what, found in bad.items() if found} == {}


def bytes_of_a_program(record: dict) -> tuple[int, int]:
    """What has to be read and written once: the elements, and their payload."""
    codec = codecs.get_codec(record["codec"])
    numel = 16 * kernels.WORDS if record["codec"] == "mask" else kernels.NUMEL
    tensor, payload = numel * getattr(torch, record["dtype"]).itemsize, codec.payload_bytes(numel)
    return (tensor, payload) if record["direction"] == "compress" else (payload, tensor)


def widest_access(record: dict, *, of_tensor: bool) -> str:
    """The instruction that moves a thread's share at once: 8 elements of a quarter on NVIDIA, 4 on AMD, 4 and 2 words of a mask; at most 16 bytes."""
    nvidia, compressing = record["target"].startswith("sm_"), record["direction"] == "compress"
    if record["codec"] == "mask":
        size = 16 if of_tensor else 8 if nvidia else 4
    else:
        element = getattr(torch, record["dtype"]).itemsize if of_tensor else 2 if record["codec"].startswith("bf16") else 1
        size = min(16, element * (8 if nvidia else 4))
    verb = "load" if compressing == of_tensor else "store"
    return f"{ {'load': 'ld', 'store': 'st'}[verb] }.global.{ {16: 'v4', 8: 'v2'}[size] }.b32" if nvidia else f"global_{verb}_{ {16: 'dwordx4', 8: 'dwordx2', 4: 'dword'}[size] }"


def test_the_selection_covers_every_pair(covered):
    columns = {
        "kind": {f"{kind}{'-asym' * asymmetric}" for kind, asymmetric in KINDS},
        "group": {32, 64, 128},
        "wide": {False, True},
        "stochastic": {False, True},
        "dtype": {"float32", "bfloat16", "float16"},
        "end": {"even", "tail", "ragged"},
        "target": {"sm_80", "sm_90", "sm_100", "gfx942"},
    }
    for direction in ("compress", "decompress"):
        rows = []
        for record in (record for record in covered if record["direction"] == direction):
            codec = codecs.get_codec(record["codec"])
            if isinstance(codec, GroupedCodec):
                rows.append(record | {"kind": codec.kind + "-asym" * codec.asymmetric, "group": codec.group, "wide": codec.wide, "stochastic": codec.stochastic})
        for one, other in combinations([column for column in columns if direction == "compress" or column != "stochastic"], 2):
            assert {(row[one], row[other]) for row in rows} == set(product(columns[one], columns[other]))
        for family in ("bf16", "mask"):
            rows = [record for record in covered if record["direction"] == direction and record["codec"].removesuffix("-sr") == family]
            assert all({row[column] for row in rows} == columns[column] for column in ("end", "target"))


def test_a_selection_compiles_well(covered):
    assert_compiled_well(covered)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("HILORE_ALL_KERNELS") != "1", reason="some forty minutes of CPU time: set HILORE_ALL_KERNELS=1")
def test_all_kernels_compile_well():
    parts = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(parts) as pool:
        documents = list(pool.map(lambda part: run_compiler("all", "--part", f"{part + 1}/{parts}"), range(parts)))
    assert_compiled_well([record for document in documents for record in document["kernels"]])
