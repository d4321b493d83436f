"""Risk of a larger model from a measured relative: sums over layers are kept, depth corresponds, what is unknown is never calmer."""

from __future__ import annotations

import pytest
from profiles_for_tests import make_profile, smollm2_class

from hilore_cli.errors import ProfileError
from hilore_cli.relative import Kind, kappas_of, kind_of, scale_layers, scale_risk

RELATIVE = make_profile(layers=6)
UNITS = {unit: kind_of(smollm2_class(), unit) for unit in ("mlp.gate_proj.mm", "self_attn.v_proj.mm", "add", "input")}


def total(profile, unit: str, codec: str, name: str = "rho2") -> float:
    return sum(getattr(row, name) for row in profile.units if (row.unit, row.codec) == (unit, codec))


def test_kinds():
    assert {"mlp.gate_proj.mm": Kind(True, "mlp"), "self_attn.v_proj.mm": Kind(True, "attention"), "add": Kind(False, "residual"), "input": Kind(False, "residual")} == UNITS
    assert kind_of(smollm2_class(), "self_attn.sdpa.out") == Kind(True, "attention")
    assert kind_of(smollm2_class(), "self_attn.add") == Kind(False, "attention")
    with pytest.raises(ProfileError, match=r"has no unit 'mlp\.x'"):
        kind_of(smollm2_class(), "mlp.x")


@pytest.mark.parametrize("layers", [3, 6, 32])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_sums_over_layers_are_the_relatives(layers, codec):
    risks = scale_risk(RELATIVE, [UNITS] * layers, codecs=[codec])
    for unit in UNITS:
        assert sum(risks[i, unit, codec].rho2 for i in range(layers)) == pytest.approx(total(RELATIVE, unit, codec))
        assert sum(risks[i, unit, codec].replayed_rho2 for i in range(layers)) == pytest.approx(total(RELATIVE, unit, codec, "replayed_rho2"), rel=1e-6)
    assert all(risk.replayed_rho2 >= risk.rho2 > 0 for risk in risks.values())


def test_as_many_layers_are_the_relative_itself():
    risks = scale_risk(RELATIVE, [UNITS] * 6, codecs=["int8"])
    for row in RELATIVE.units:
        if row.codec == "int8" and row.unit in UNITS:
            found = risks[row.layer, row.unit, "int8"]
            assert (found.rho2, found.replayed_rho2, found.rel_error) == pytest.approx((row.rho2, row.replayed_rho2, row.rel_error))


def test_depth_corresponds():
    """A risk that grows with depth grows as much in a deeper model."""
    units = [row.model_copy(update={"rho2": (row.layer + 1) * 1e-7, "replayed_rho2": (row.layer + 1) * 1e-7}) for row in RELATIVE.units]
    risks = scale_risk(RELATIVE.model_copy(update={"units": units}), [UNITS] * 24, codecs=["int8"])
    series = [risks[i, "add", "int8"].rho2 for i in range(24)]
    assert series == sorted(series)
    assert series[-1] / series[0] == pytest.approx(6.0, rel=0.01)


def test_a_unit_that_the_relative_lacks_is_its_riskiest_of_that_kind():
    layers = [{"self_attn.q_norm.mul": Kind(False, "attention"), "mlp.experts.grouped": Kind(True, "mlp"), "post_attention_layernorm._to_copy": Kind(False, "residual")}] * 4
    risks = scale_risk(RELATIVE, layers, codecs=["int8"])
    keys = {row.unit for row in RELATIVE.units}
    for unit, kind in layers[0].items():
        mine = sum(risks[i, unit, "int8"].replayed_rho2 for i in range(4))
        there = [total(RELATIVE, key, "int8", "replayed_rho2") for key in keys if kind_of(smollm2_class(), key) == kind]
        assert mine == pytest.approx(max(there))


def test_adapters_do_not_hide_a_linear():
    risks = scale_risk(RELATIVE, [{"mlp.gate_proj.base_layer.mm": Kind(True, "mlp")}] * 6, codecs=["int8"])
    assert sum(risks[i, "mlp.gate_proj.base_layer.mm", "int8"].rho2 for i in range(6)) == pytest.approx(total(RELATIVE, "mlp.gate_proj.mm", "int8"))


def test_a_unit_of_every_second_layer_keeps_half():
    layers = [UNITS if i % 2 else {k: v for k, v in UNITS.items() if k != "add"} for i in range(12)]
    risks = scale_risk(RELATIVE, layers, codecs=["int8"])
    assert sum(risk.rho2 for (_, unit, _), risk in risks.items() if unit == "add") == pytest.approx(total(RELATIVE, "add", "int8") / 2)


def test_a_codec_that_was_not_measured_is_named_with_the_remedy():
    with pytest.raises(ProfileError, match=r"profile synthetic: codec e4m3 was not measured there.*--codecs int8,int4.*--relative.*hilore profile --model invented --task math --codecs int8,e4m3"):
        scale_risk(RELATIVE, [UNITS], codecs=["int8", "e4m3"])
    assert [row.codec for row in kappas_of(RELATIVE, ["int4"])] == ["int4"]


def test_layers_keep_the_whole_gradient():
    there = RELATIVE.model_copy(update={"layers": [row.model_copy(update={"grad_norm": 1.0 + row.index, "noise_transfer": 2.0}) for row in RELATIVE.layers]})
    rows = scale_layers(there, 40)
    assert sum(row.grad_norm**2 for row in rows) == pytest.approx(sum(row.grad_norm**2 for row in there.layers))
    assert all(row.noise_transfer == pytest.approx(2.0) for row in rows)
    assert [row.grad_norm for row in rows] == sorted(row.grad_norm for row in rows)
