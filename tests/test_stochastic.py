"""Stochastic rounding: its random numbers, its seeds, and that it is unbiased."""

from __future__ import annotations

import math

import pytest
import torch
from tensors_for_tests import pooled_everything
from torch import Tensor

from hilore_cli import codecs
from hilore_cli.codecs import CODECS, cpu, reference
from hilore_cli.codecs.formats import Bf16Codec, Codec
from hilore_cli.errors import CodecError

STOCHASTIC = [codec for codec in CODECS.values() if codec.stochastic]
SEEDS = 1024
compress_op = torch.ops.hilore.compress.default


# ---- Philox ----

# philox4x32 10: counter, key, answer; file kat_vectors of Random123 (D. E. Shaw Research)
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, answer):
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    wanted = [int(word, 16) for word in answer.split()]
    assert list(reference.philox(*words, seed=low | high << 32)) == wanted
    tensors = [torch.full((3,), word) for word in words]
    assert [word.tolist() for word in reference.philox(*tensors, seed=low | high << 32)] == [[word] * 3 for word in wanted]


def test_words_are_dealt_to_the_quarters_of_a_group():
    seed, stream, group, first = 0x9ABCDEF012345678, 0x7FFFFFF1, 32, 2**33 - 1
    words = reference.random_words(2, group, first=first, seed=seed, stream=stream, device=torch.device("cpu"))
    for row in range(2):
        for lane in range(group // 4):
            n = (first + row) * (group // 4) + lane  # its upper half is not zero, and changes from one row to the next
            drawn = reference.philox(n % 2**32, n >> 32, stream, 0, seed=seed)
            assert words[row, lane :: group // 4].tolist() == list(drawn)


# ---- seeds ----


@pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.name)
def test_same_seed_and_stream_same_bits_else_others(codec):
    x = torch.randn(999, generator=torch.Generator().manual_seed(0))
    payload = codecs.compress(x, codec, seed=5, stream=3)
    assert torch.equal(payload, codecs.compress(x, codec, seed=5, stream=3))
    for seed, stream in ((6, 3), (5 + 2**32, 3), (-5, 3), (5, 4), (3, 5)):
        assert not torch.equal(payload, codecs.compress(x, codec, seed=seed, stream=stream))
    assert torch.equal(payload, codecs.compress(x, codec, seed=5 + 2**64, stream=3))  # 64 bits of it


@pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.name)
def test_chunks_do_not_change_the_bits(codec, monkeypatch):
    x = pooled_everything(5 * 1024 + 77, torch.float32)
    whole = cpu.compress(x, codec, seed=2**63 + 1, stream=9)
    for chunk in (128, 1024, 4096):
        monkeypatch.setattr(cpu, "CHUNK_NUMEL", chunk)
        assert torch.equal(cpu.compress(x, codec, seed=2**63 + 1, stream=9), whole)


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if not codec.stochastic and not codec.exact], ids=lambda codec: codec.name)
def test_rounding_to_the_nearest_has_no_seed(codec):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codecs.compress(x, codec, seed=1, stream=1), codecs.compress(x, codec, seed=2, stream=2))


def test_seeded_nests_and_resets():
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))

    def draw() -> Tensor:
        return compress_op(x, "int8-sr", None, 4)

    outside = draw()
    with codecs.seeded(1):
        one = draw()
        with codecs.seeded(2):
            two = draw()
        assert torch.equal(draw(), one)
        with pytest.raises(CodecError), codecs.seeded(3):
            compress_op(x.long(), "int8-sr")
        assert torch.equal(draw(), one)
    assert torch.equal(draw(), outside)
    assert torch.equal(outside, codecs.compress(x, "int8-sr", seed=0, stream=4))
    assert torch.equal(one, codecs.compress(x, "int8-sr", seed=1, stream=4))
    assert torch.equal(two, codecs.compress(x, "int8-sr", seed=2, stream=4))
    with codecs.seeded(2):
        assert torch.equal(two, codecs.compress(x, "int8-sr", stream=4))
        assert torch.equal(one, codecs.compress(x, "int8-sr", seed=1, stream=4))
    assert len({bytes(payload.tolist()) for payload in (outside, one, two)}) == 3


# ---- unbiased ----


def e4m3_values() -> Tensor:
    """All finite ones in order, float64."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return codes[codes.isfinite()].unique()


def neighbours(x: Tensor, codec: Codec, payload: Tensor) -> tuple[Tensor, Tensor]:
    """What each element of x [n] may come back as, float64: the codec's next value below or at it, and the one above."""
    if isinstance(codec, Bf16Codec):
        bits = x.view(torch.int32) & -0x10000
        inner, outer = (b.view(torch.float32).double() for b in (bits, bits + 0x10000))
        return torch.minimum(inner, outer), torch.maximum(inner, outer)
    _, *metas = reference.regions(payload, codec, x.numel())
    scale, low = (meta.double().repeat_interleave(codec.group) for meta in (metas[0], metas[-1]))
    low = low if codec.asymmetric else 0
    y = (x.double() - low) / scale
    if codec.kind == "e4m3":
        values = e4m3_values()
        at = torch.searchsorted(values, y, right=True).clamp(max=len(values) - 1) - 1
        below, above = values[at], values[at + 1]
    else:
        below = y.floor()
        above = below + 1
    return below * scale + low, above * scale + low


@pytest.mark.parametrize("name", ["int8-sr", "int8-asym-sr", "int4-g32-fp32-sr", "int4-asym-g64-sr", "e4m3-sr", "e4m3-g32-fp32-sr", "bf16-sr"])
def test_stochastic_rounding_is_unbiased(name):
    """Each element is one of its two neighbours, and its mean over the seeds is off by no more than a fair coin of the exact probability would be.

    z is standard normal then. Elements whose rarer neighbour is expected fewer than 20 times are left out of z: a binomial so skew has no normal tail.
    """
    codec = codecs.get_codec(name)
    x = torch.randn(512, generator=torch.Generator().manual_seed(11))
    x[128:256] *= torch.logspace(-4, 2, 128)  # e4m3: normal and subnormal codes in one group
    restored = torch.empty(SEEDS, x.numel(), dtype=torch.float64)
    for seed in range(SEEDS):
        payload = reference.compress(x, codec, seed=seed * 0x9E3779B97F4A7C15, stream=1)
        restored[seed] = reference.decompress(payload, codec, dtype=torch.float32, numel=x.numel())
    below, above = neighbours(x, codec, payload)
    step = above - below
    near = torch.minimum((restored - below).abs(), (restored - above).abs())
    assert (near <= (x.abs().max() + step) * 2.0**-22).all()

    up = ((x.double() - below) / step).clamp(0, 1)
    deviation = step * (up * (1 - up)).sqrt()
    judged = SEEDS * torch.minimum(up, 1 - up) >= 20
    count = int(judged.sum())
    assert count > 200
    error = restored - x.double()
    z = (error.mean(0) / deviation * math.sqrt(SEEDS))[judged]
    assert abs(z.mean()) < 4 / math.sqrt(count)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * count)
    assert z.abs().max() < 4.5
    assert (error.mean(0)[~judged].abs() <= step[~judged] * 60 / SEEDS).all()

    # elements are independent: the error of their sum is as large as that of independent coins
    sums = error.sum(1) / deviation.square().sum().sqrt()
    assert abs(sums.std() - 1) < 4 / math.sqrt(2 * SEEDS)
    # and so are seeds
    assert abs((sums[1:] * sums[:-1]).mean()) < 4 / math.sqrt(SEEDS)


def test_what_a_code_holds_exactly_is_never_moved():
    x = torch.randn(256, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        for codec in STOCHASTIC:
            assert (codecs.round_trip(torch.zeros(256), codec, seed=seed) == 0).all()
        assert torch.equal(codecs.round_trip(x.bfloat16().float(), "bf16-sr", seed=seed), x.bfloat16().float())
        assert codecs.round_trip(x, "int4-asym-fp32-sr", seed=seed).view(2, 128).amin(1).tolist() == x.view(2, 128).amin(1).tolist()
