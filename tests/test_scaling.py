"""A profile at another size against what is captured there: bytes to the byte, the account on its line, and a refusal where there is no line."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import build_tiny
from profiles_for_tests import MIB, chain_class, make_profile, scaling
from steps_for_tests import capture, make_ids

from hilore_cli.errors import ProfileError
from hilore_cli.scaling import SCALED_FIELDS, account_at, evaluate_terms, profile_at
from hilore_cli.schema import LayerClass, Pattern, Profile, UnitRow
from hilore_cli.timeline import simulate_layer, simulate_step

PROFILED = (4, 24)
SIZES = [(2, 24), (3, 9), (5, 31)]


def captured_class(attention: str, rows: int, length: int) -> LayerClass:
    return capture(build_tiny("llama", num_hidden_layers=1, attn_implementation=attention), *make_ids(rows, length, padded=True)).layer_class


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def captured(request) -> tuple[str, Profile]:
    """A profile of one captured layer of 4 x 24 tokens."""
    torch.set_num_threads(1)
    layer_class = captured_class(request.param, *PROFILED)
    profile = make_profile(layers=1, layer_class=layer_class, codecs=("int8",))
    rows, length = PROFILED
    batch = profile.batch.model_copy(update={"rows": rows, "length": length, "tokens": rows * length})
    smaller = profile.smaller.model_copy(update={"tokens": rows * length // 2})
    return request.param, profile.model_copy(update={"batch": batch, "smaller": smaller})


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_are_those_captured_afresh(captured, size: tuple[int, int]) -> None:
    """Every node of the graph, forward and backward, and what any pattern keeps and peaks at. Inputs that all layers share are the account's."""
    attention, profile = captured
    rows, length = size
    sized = profile_at(profile, tokens=rows * length, length=length)
    fresh = captured_class(attention, rows, length)
    (scaled,) = sized.classes
    assert scaled.graph_digest == fresh.graph_digest
    own = [[(n.name, n.nbytes) for n in c.nodes if n.kind != "shared"] for c in (scaled, fresh)]
    assert own[0] == own[1]
    for pattern in (Pattern(), Pattern(default="store"), Pattern(actions={"mlp.gate_proj.mm": "store", "add": "store"})):
        found, expected = (simulate_layer(c, pattern, payload_bytes=lambda unit, codec: 0) for c in (scaled, fresh))
        assert (found.stored_bytes, found.forward_peak_bytes, found.backward_peak_bytes) == (expected.stored_bytes, expected.forward_peak_bytes, expected.backward_peak_bytes)
    bytes_of = {n.unit: n.nbytes for n in fresh.nodes if n.unit}
    assert all(unit.nbytes == bytes_of[unit.unit] for unit in sized.units)
    assert (sized.batch.rows, sized.batch.length, sized.batch.tokens) == (rows, length, rows * length)


def test_eager_attention_grows_with_the_square_of_the_length(captured) -> None:
    attention, profile = captured
    doubled = profile_at(profile, tokens=4 * 48, length=48)
    growth = {new.nbytes / old.nbytes for old, new in zip(profile.classes[0].nodes, doubled.classes[0].nodes, strict=True) if old.nbytes and old.kind != "shared"}
    assert growth <= {1.0, 2.0, 4.0}
    assert 4.0 in growth, "the mask at least is of length x length"
    quadratic = [n.unit for n in doubled.classes[0].nodes if "bss" in n.nbytes_terms and n.unit and not n.unit.startswith("self_attn.where")]
    assert bool(quadratic) == (attention == "eager")


def test_tokens_that_are_no_whole_rows_are_rounded_up() -> None:
    assert evaluate_terms({"bs": 8}, batch=3, length=5) == 120
    assert evaluate_terms({"1": 5, "bs": 4, "bss": 2}, batch=2, length=3) == 5 + 24 + 36
    profile = make_profile(layers=1, layer_class=scaling(chain_class()))
    assert profile_at(profile, tokens=410, length=64).classes[0].nodes[0].nbytes == math.ceil(4 * MIB * 410 / 1024)


def test_the_profiled_size_is_the_profile_itself() -> None:
    profile = make_profile(layers=2).model_copy(update={"smaller": None})
    assert profile_at(profile, tokens=1024, length=64) is profile


def test_payloads_and_times_go_with_the_size() -> None:
    """A payload is never below its share of the unit's bytes, nor above the unit; times are in proportion to the tokens; risk stays."""
    profile = make_profile(layers=2)
    sized = profile_at(profile, tokens=512, length=64)
    before: dict[tuple, UnitRow] = {(u.layer, u.unit, u.codec): u for u in profile.units}
    for unit in sized.units:
        old = before[unit.layer, unit.unit, unit.codec]
        assert old.payload_bytes * unit.nbytes / old.nbytes <= unit.payload_bytes <= unit.nbytes
        assert unit.payload_bytes <= old.payload_bytes * unit.nbytes / old.nbytes + 257
        assert (unit.compress_us, unit.decompress_us) == (old.compress_us / 2, old.decompress_us / 2)
        assert (unit.rho2, unit.replayed_rho2, unit.rel_error) == (old.rho2, old.replayed_rho2, old.rel_error)
    for name in ("none_us", "gc_us", "recompute_us"):
        assert getattr(sized.times, name) == getattr(profile.times, name) / 2
    nodes = list(zip(profile.classes[0].nodes, sized.classes[0].nodes, strict=True))
    assert all(new.time_us == old.time_us / 2 for old, new in nodes)
    assert all(new.nbytes == old.nbytes for old, new in nodes if old.kind == "parameter")
    static = profile.account.static_bytes
    assert sized.peaks.gc_bytes - static == pytest.approx((profile.peaks.gc_bytes - static) / 2, abs=1)
    smaller, larger = (simulate_step(p, [Pattern()] * 2).peak_bytes for p in (sized, profile))
    assert static < smaller < larger


# ------------------------------------------------------------------------------------------------------------- the account


def with_accounts(**figures: tuple[int, int]) -> Profile:
    """Figures at 512 and at 1024 tokens."""
    profile = make_profile(layers=1)
    small = profile.account.model_copy(update={name: low for name, (low, _) in figures.items()})
    large = profile.account.model_copy(update={name: high for name, (_, high) in figures.items()})
    return profile.model_copy(update={"account": large, "smaller": profile.smaller.model_copy(update={"account": small})})


def test_account_lies_on_the_line() -> None:
    profile = with_accounts(shared_bytes=(100, 300), head_bytes=(1000, 1501), tail_bytes=(70, 70), update_bytes=(64, 8))
    assert account_at(profile, 1024) == profile.account
    assert account_at(profile, 512) == profile.smaller.account
    between = account_at(profile, 768)
    assert [getattr(between, name) for name in SCALED_FIELDS] == [200, 1251, 70, 36], "rounded up"
    above = account_at(profile, 2048)
    assert [getattr(above, name) for name in SCALED_FIELDS] == [700, 2503, 70, 0], "and never below nothing"
    assert between.static_bytes == above.static_bytes == profile.account.static_bytes


@pytest.mark.parametrize("tokens", [64, 511])
def test_account_below_the_smaller_size_is_that_of_the_smaller(tokens: int) -> None:
    profile = with_accounts(shared_bytes=(100, 300), head_bytes=(1000, 1501), tail_bytes=(70, 70), update_bytes=(64, 8))
    assert account_at(profile, tokens) == profile.smaller.account


def test_one_size_is_no_line() -> None:
    profile = make_profile(layers=1).model_copy(update={"smaller": None})
    assert account_at(profile, 1024) == profile.account
    assert profile_at(profile, tokens=1024, length=32).account == profile.account, "as many tokens in shorter rows"
    for size in ((512, 64), (1025, 64)):
        with pytest.raises(ProfileError, match="profile synthetic: its account was measured at one size only; profile a micro-batch of more rows"):
            profile_at(profile, tokens=size[0], length=size[1])
