"""Exposure against autograd in float64, through the trainers' losses written again in losses_for_tests.py."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from losses_for_tests import (
    TRL_CONSTANTS,
    TRL_TYPES,
    TRL_VARIANTS,
    draw,
    gradient,
    openrlhf_loss,
    poison,
    trl_loss,
    verl_loss,
)

from hilore_cli.errors import UsageError
from hilore_cli.exposure import (
    LossInputs,
    OpenRlhfLoss,
    Readiness,
    TrlLoss,
    VerlLoss,
    bound,
    exposure,
    from_dict,
    has_other_terms,
    is_token_local,
    normaliser,
    readiness,
    to_dict,
)
from hilore_cli.exposure.verl import AGG_MODES, KL_TYPES, LOSS_MODES

TOLERANCE = 1e-10  # measured, token by token: 3e-14 for every family
EXACT, BOUND, BACKWARD = Readiness  # in the order of their definition


def inputs_of(data, *, xp=torch, advantages="advantages", **names):
    """LossInputs with NaN under the mask. `names`: field of LossInputs = attribute of the draw, or None."""
    arrays = {field: getattr(data, name) for field, name in names.items() if name is not None}
    arrays["advantages"] = getattr(data, advantages)
    arrays = {field: poison(array, data.mask) for field, array in arrays.items()} | {"mask": data.mask}
    return LossInputs(**{field: array.numpy() if xp is np else array for field, array in arrays.items()})


def assert_gradient(loss, data, expected, *, what, **names):
    """c equals autograd's gradient token by token, from numpy and from torch, and is 0 under the mask."""
    scale = expected.abs() + 1e-6 * expected.abs().max()
    for xp in (np, torch):
        c = exposure(loss, inputs_of(data, xp=xp, **names), xp=xp)
        assert isinstance(c, np.ndarray if xp is np else torch.Tensor)
        c = torch.as_tensor(c)
        assert c.dtype == torch.float64
        error = float(((c - expected).abs() / scale).max())
        assert error <= TOLERANCE, f"{what}: relative error {error}"
        assert (c[data.mask == 0] == 0).all()


# ---------------------------------------------------------------------------------------------------------------- TRL


def trl_cases(loss_type):
    """(what, loss, names of arrays) for each level, variant, and policy."""
    for level, variant, on_policy in itertools.product(("token", "sequence"), TRL_VARIANTS, (True, False)):
        settings, arrays = TRL_VARIANTS[variant]
        loss = TrlLoss(loss_type=loss_type, importance_sampling_level=level, **TRL_CONSTANTS, **settings)
        names = {"logps": "logps", "old_logps": None if on_policy else "old_logps"}
        names |= {"is_weights" if array.endswith("weights") else array: array for array in arrays}
        yield f"{loss_type} {level} {variant} {'on' if on_policy else 'off'}-policy", loss, names


@pytest.mark.parametrize("advantages", ["advantages", "token_advantages"])
@pytest.mark.parametrize("loss_type", TRL_TYPES)
def test_trl(loss_type, advantages):
    data = draw()
    for what, loss, names in trl_cases(loss_type):
        give = {"old": "old_logps", "ref": "ref_logps", "sampling": "sampling_logps", "weights": "is_weights"}
        give = {short: names.get(field) for short, field in (give | {"entropies": "entropies"}).items()}
        arrays = {short: getattr(data, name) for short, name in give.items() if name is not None}
        expected = gradient(trl_loss, data.logps, loss, mask=data.mask, advantages=getattr(data, advantages), **arrays)
        assert_gradient(loss, data, expected, what=what, advantages=advantages, **names)


def test_vespo_clamps_the_log_ratio_of_each_token():
    data = draw()
    data.old_logps[1, 2] -= 25
    data.logps[1, 3] -= 23
    loss = TrlLoss(loss_type="vespo", num_items_in_batch=9, vespo_lambda_neg=0.1)
    a, old = data.advantages, data.old_logps
    expected = gradient(trl_loss, data.logps, loss, mask=data.mask, advantages=a, old=old)
    assert expected[1, 2] != 0
    assert_gradient(loss, data, expected, what="vespo", logps="logps", old_logps="old_logps")


# --------------------------------------------------------------------------------------------------------------- verl

VERL_OWN = {"kl_cov": {"kl_cov_ratio": 0.2}, "dro": {"dro_beta": 0.3}}
VERL_GLOBAL = {"dp_size": 4, "batch_num_tokens": 900, "global_batch_size": 64, "loss_scale_factor": 30}


def verl_cases(mode):
    """(what, loss, names of arrays): every agg mode, then every KL type, each with and without weights."""
    settings = [{"loss_agg_mode": agg, **constants} for agg in AGG_MODES for constants in ({}, VERL_GLOBAL)]
    for kind, agg in itertools.product(KL_TYPES, ("token-mean", "seq-mean-token-sum-norm")):
        settings.append({"use_kl_loss": True, "kl_loss_type": kind, "kl_loss_coef": 0.05, "loss_agg_mode": agg})
    for given, weights, on_policy in itertools.product(settings, (None, "token_weights"), (True, False)):
        narrow = (
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15} if mode.startswith("dppo") else {"clip_ratio_high": 0.28}
        )
        loss = VerlLoss(loss_mode=mode, clip_ratio_c=1.6, **narrow, **VERL_OWN.get(mode, {}), **given)
        names = {"logps": "logps", "old_logps": None if on_policy else "old_logps", "is_weights": weights}
        names["ref_logps"] = "ref_logps" if "use_kl_loss" in given else None
        yield f"{mode} {given} {weights} {on_policy}", loss, names


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_verl(mode):
    data = draw()
    data.ref_logps[0, 1] += 30  # the KL's clamps: of the gap, of the value
    data.ref_logps[1, 2] += 4
    for what, loss, names in verl_cases(mode):
        arrays = {"old": names["old_logps"], "ref": names["ref_logps"], "weights": names["is_weights"]}
        arrays = {short: getattr(data, name) for short, name in arrays.items() if name is not None}
        a = data.token_advantages
        expected = gradient(verl_loss, data.logps, loss, mask=data.mask, advantages=a, **arrays)
        assert_gradient(loss, data, expected, what=what, advantages="token_advantages", **names)


@pytest.mark.parametrize("mode", sorted(set(LOSS_MODES) - {"kl_cov", "geo_mean"}))
def test_verl_clamps_of_the_log_ratio(mode):
    """Ratios outside e^-20..e^20, and sequence ratios above e^10 (whose gradient would be large: not in kl_cov)."""
    data = draw()
    data.old_logps[0, 1] -= 25
    data.logps[3, 1] -= 25
    data.old_logps[7] -= 12
    data.old_logps[8] -= 12
    loss = VerlLoss(loss_mode=mode, **VERL_OWN.get(mode, {}))
    a, old = data.token_advantages, data.old_logps
    expected = gradient(verl_loss, data.logps, loss, mask=data.mask, advantages=a, old=old)
    assert_gradient(
        loss, data, expected, what=mode, advantages="token_advantages", logps="logps", old_logps="old_logps"
    )


# ----------------------------------------------------------------------------------------------------------- OpenRLHF


def openrlhf_cases(kind):
    corrections = [{}]
    for form in ("tis", "icepop", "seq-mask-tis"):
        corrections.append(
            {"is_correction_enable": True, "is_correction_type": form, "is_correction_threshold": (0.85, 1.1)}
        )
    kls = [{}, *({"use_kl_loss": True, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3"))]
    globals_ = [{}, {"dp_size": 4, "batch_num_tokens": 210.5, "global_batch_size": 16.0}]
    levels = [{"token_level_loss": level, "dual_clip": dual} for level in (True, False) for dual in (None, 1.4)]
    for given in itertools.product(corrections, kls, globals_, levels, (True, False)):
        settings, on_policy = {**given[0], **given[1], **given[2], **given[3]}, given[4]
        loss = OpenRlhfLoss(policy_loss_type=kind, eps_clip_low_high=(0.2, 0.27), **settings)
        names = {"logps": "logps", "old_logps": None if on_policy else "old_logps"}
        names["ref_logps"] = "ref_logps" if loss.use_kl_loss else None
        names["sampling_logps"] = "sampling_logps" if loss.is_correction_enable else None
        yield f"{kind} {settings} {on_policy}", loss, names


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_openrlhf(kind):
    data = draw()
    data.ref_logps[0, 1] += 30  # the KL's clamp
    data.ref_logps[1, 2] += 4
    data.logps[3, 1] -= 25  # the ratio's clamp
    for what, loss, names in openrlhf_cases(kind):
        arrays = {"old": names["old_logps"], "ref": names["ref_logps"], "rollout": names["sampling_logps"]}
        arrays = {short: getattr(data, name) for short, name in arrays.items() if name is not None}
        a = data.advantages
        expected = gradient(openrlhf_loss, data.logps, loss, mask=data.mask, advantages=a, **arrays)
        assert_gradient(loss, data, expected, what=what, **names)


def test_openrlhf_takes_given_weights():
    data = draw()
    loss = OpenRlhfLoss(is_correction_enable=True)
    computed = exposure(
        loss, inputs_of(data, logps="logps", old_logps="old_logps", sampling_logps="sampling_logps"), xp=torch
    )
    data.weights = torch.exp(data.old_logps - data.sampling_logps).clamp(0.5, 5.0)
    given = exposure(loss, inputs_of(data, logps="logps", old_logps="old_logps", is_weights="weights"), xp=torch)
    assert torch.equal(computed, given)


# ------------------------------------------------------------------------------------------------------ across losses


def every_case():
    for loss_type in TRL_TYPES:
        yield from trl_cases(loss_type)
    for mode in LOSS_MODES:
        yield from verl_cases(mode)
    for kind in ("ppo", "gspo"):
        yield from openrlhf_cases(kind)


def before_forward(names):
    return {field: name for field, name in names.items() if field not in ("logps", "entropies")}


def test_the_clips_are_active_in_the_draw():
    """Otherwise the tests above would not see them."""
    data = draw()
    ratio, a = torch.exp(data.logps - data.old_logps), data.advantages[:, None] * data.mask
    assert ((ratio > 1.28) & (a > 0)).sum() >= 5
    assert ((ratio < 0.8) & (a < 0)).sum() >= 5
    assert ((ratio > 1.6) & (a < 0)).sum() >= 3  # delta, dual clip
    rows = ((data.logps - data.old_logps) * data.mask).sum(1) / data.mask.sum(1).clamp(min=1)
    assert ((rows.exp() > 1.28) & (data.advantages > 0)).any()
    assert ((rows.exp() < 0.8) & (data.advantages < 0)).any()
    assert (data.advantages == 0).any()
    assert (data.mask.sum(1) == 0).any()
    assert (data.mask.diff(dim=1) > 0).any()


def test_bound_holds_for_random_ratios():
    """Over every case that has a bound, with wild and with tame ratios."""
    answered = {BOUND: 0, EXACT: 0}
    for seed, spread in ((1, 0.3), (2, 2.0)):
        data = draw(seed, spread=spread)
        for what, loss, names in every_case():
            advantages = "advantages" if seed == 1 else "token_advantages"
            full = inputs_of(data, xp=np, advantages=advantages, **names)
            known = inputs_of(data, xp=np, advantages=advantages, **before_forward(names))
            ready = readiness(loss, known)
            assert ready is readiness(loss, full)
            if ready is BACKWARD:
                with pytest.raises(UsageError, match="no bound"):
                    bound(loss, known)
                continue
            most, c = bound(loss, known), exposure(loss, full)
            assert np.isfinite(most).all()
            assert (most[data.mask.numpy() == 0] == 0).all()
            assert (np.abs(c) <= most).all(), what
            assert ready is BOUND or (np.abs(c) == most).all()
            answered[ready] += 1
    assert min(answered.values()) > 200


@pytest.mark.parametrize("k", [-1.0, 0.0, 0.5, 40.0])
@pytest.mark.parametrize("rate", [0.0, 0.7, 30.0])
def test_vespo_bound_for_any_shape_of_its_weight(k, rate):
    data = draw(4, spread=2.0)
    loss = TrlLoss(loss_type="vespo", num_items_in_batch=9, vespo_k_pos=k, vespo_lambda_pos=rate)
    most = bound(loss, inputs_of(data, old_logps="old_logps"), xp=torch)
    assert (exposure(loss, inputs_of(data, logps="logps", old_logps="old_logps"), xp=torch).abs() <= most).all()


def test_ties_follow_torch():
    """Ratios that equal a clip's end to the last bit: clamp passes there, and min and max halve."""
    data = draw()
    data.old_logps = data.logps - 0.4
    ends = torch.exp(data.logps - data.old_logps)[data.mask != 0].unique().tolist()
    a, old = data.advantages, data.old_logps
    for end in ends:
        for loss in (
            VerlLoss(clip_ratio_c=end),
            VerlLoss(clip_ratio_high=end - 1),
            VerlLoss(clip_ratio_low=1 - 1 / end),
        ):
            expected = gradient(verl_loss, data.logps, loss, mask=data.mask, advantages=a[:, None], old=old)
            c = exposure(loss, inputs_of(data, logps="logps", old_logps="old_logps"), xp=torch)
            torch.testing.assert_close(c, expected, rtol=1e-12, atol=0)
        loss = OpenRlhfLoss(dual_clip=end)
        expected = gradient(openrlhf_loss, data.logps, loss, mask=data.mask, advantages=a, old=old)
        c = exposure(loss, inputs_of(data, logps="logps", old_logps="old_logps"), xp=torch)
        torch.testing.assert_close(c, expected, rtol=1e-12, atol=0)


def test_positive_advantages_have_bounds_that_are_reached():
    """Off-policy with A >= 0 a single clip bounds; its top is taken at the clip's end."""
    data = draw(3, spread=1.5)
    data.advantages = data.advantages.abs()
    data.old_logps[0, 0] = data.logps[0, 0] - float(np.log(1.2 - 1e-9))
    names = {"old_logps": "old_logps"}
    for loss in (TrlLoss(loss_type="bnpo"), VerlLoss(), OpenRlhfLoss(), VerlLoss(loss_mode="geo_mean")):
        assert readiness(loss, inputs_of(data, **names)) is BOUND
        most = bound(loss, inputs_of(data, **names), xp=torch)
        c = exposure(loss, inputs_of(data, logps="logps", **names), xp=torch)
        assert (c.abs() <= most).all()
        if loss != VerlLoss(loss_mode="geo_mean"):
            assert float(c[0, 0].abs() / most[0, 0]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("xp", [np, torch])
def test_float32_stays_float32(xp):
    exact, single = draw(), draw(dtype=torch.float32)
    for what, loss, names in list(every_case())[::7]:
        c = exposure(loss, inputs_of(single, xp=xp, **names), xp=xp)
        assert c.dtype == xp.float32, what
        assert normaliser(loss, inputs_of(single, xp=xp), xp=xp).dtype == xp.float32
        expected = exposure(loss, inputs_of(exact, **names), xp=torch)
        assert (torch.as_tensor(c).double() - expected).norm() <= 2e-5 * expected.norm(), what
        if readiness(loss, inputs_of(single, xp=xp, **names)) is not BACKWARD:
            most = bound(loss, inputs_of(single, xp=xp, **before_forward(names)), xp=xp)
            assert most.dtype == xp.float32
            assert (abs(c) <= most).all(), what


def test_integer_advantages_become_floats():
    inputs = LossInputs(mask=np.ones((2, 3), dtype=bool), advantages=np.array([1, -1]))
    c = exposure(TrlLoss(loss_type="bnpo"), inputs)
    np.testing.assert_allclose(c, [[-1 / 6] * 3, [1 / 6] * 3])


def test_all_masked_is_zero():
    data = draw()
    data.mask = torch.zeros_like(data.mask)
    for what, loss, names in list(every_case())[::5]:
        assert (exposure(loss, inputs_of(data, xp=np, **names)) == 0).all(), what


def test_own_normaliser():
    """z is c on-policy for A = -1 and one ratio per token; an override takes its place, masked."""
    data = draw()
    minus = LossInputs(mask=data.mask, advantages=-torch.ones(data.mask.shape[0], dtype=torch.float64))
    for loss_type in TRL_TYPES:
        loss = TrlLoss(loss_type=loss_type, **{**TRL_CONSTANTS, "epsilon_high": 5.0})
        z = normaliser(loss, minus, xp=torch)
        torch.testing.assert_close(exposure(loss, minus, xp=torch), z)
        given = replace(minus, normaliser=poison(2 * z, data.mask))
        torch.testing.assert_close(exposure(loss, given, xp=torch), 2 * z)
    for loss in (VerlLoss(loss_agg_mode="token-sum"), OpenRlhfLoss(token_level_loss=False)):
        z = normaliser(loss, minus, xp=torch)
        torch.testing.assert_close(exposure(loss, replace(minus, normaliser=2 * z), xp=torch), 2 * z)


def test_entropy_threshold_of_all_ranks():
    data = draw()
    loss = TrlLoss(loss_type="bnpo", top_entropy_quantile=0.2, entropy_threshold=1.0)
    c = exposure(loss, inputs_of(data, entropies="entropies"), xp=torch)
    assert ((c != 0) == ((data.entropies >= 1.0) & (data.mask != 0) & (data.advantages != 0)[:, None])).all()


def test_sampling_logps_that_vllm_could_not_give():
    """NaN on a loss token counts zero in the off-policy mask."""
    data = draw()
    data.sampling_logps[1, 3] = float("nan")
    loss = TrlLoss(loss_type="bnpo", off_policy_mask_threshold=0.05)
    arrays = {"sampling": data.sampling_logps, "old": data.old_logps, "mask": data.mask, "advantages": data.advantages}
    expected = gradient(trl_loss, data.logps, loss, **arrays)
    names = {"logps": "logps", "old_logps": "old_logps", "sampling_logps": "sampling_logps"}
    assert_gradient(loss, data, expected, what="NaN sampling", **names)


# ------------------------------------------------------------------------------------------------------------ answers

OLD, REF, SAMPLING, WEIGHTS = "old_logps", "ref_logps", "sampling_logps", "token_weights"


@pytest.mark.parametrize(
    ("loss", "arrays", "signs", "expected"),
    [
        (TrlLoss(num_items_in_batch=9), (), "+-", EXACT),
        (TrlLoss(num_items_in_batch=9), (WEIGHTS,), "+-", EXACT),
        (TrlLoss(num_items_in_batch=9), (OLD,), "+", BOUND),
        (TrlLoss(num_items_in_batch=9), (OLD,), "+-", BACKWARD),
        (TrlLoss(num_items_in_batch=9, delta=2.0), (OLD,), "+-", BOUND),
        (TrlLoss(num_items_in_batch=9, beta=0.1), (REF,), "+-", BACKWARD),
        (TrlLoss(loss_type="sapo"), (OLD,), "+-", BOUND),
        (TrlLoss(loss_type="cispo", num_items_in_batch=9), (OLD,), "+-", BOUND),
        (TrlLoss(loss_type="vespo", num_items_in_batch=9), (OLD,), "+-", BOUND),
        (TrlLoss(loss_type="grpo", importance_sampling_level="sequence"), (), "+-", EXACT),
        (TrlLoss(loss_type="grpo", importance_sampling_level="sequence"), (OLD,), "+-", BACKWARD),
        (TrlLoss(loss_type="grpo", off_policy_mask_threshold=0.1), (), "+-", EXACT),
        (TrlLoss(loss_type="grpo", off_policy_mask_threshold=0.1), (SAMPLING,), "+-", BOUND),
        (TrlLoss(loss_type="grpo", off_policy_mask_threshold=0.1), (SAMPLING,), "+", EXACT),
        (TrlLoss(loss_type="grpo", top_entropy_quantile=0.2), ("entropies",), "+-", BOUND),
        (VerlLoss(), (), "+-", EXACT),
        (VerlLoss(), (OLD, WEIGHTS), "+-", BOUND),
        (VerlLoss(use_kl_loss=True), (), "+-", BOUND),
        (VerlLoss(use_kl_loss=True, kl_loss_type="k1"), (), "+-", EXACT),
        (VerlLoss(use_kl_loss=True, kl_loss_type="k1+"), (), "+-", BACKWARD),
        (VerlLoss(use_kl_loss=True, kl_loss_type="k2"), (), "+-", BACKWARD),
        (VerlLoss(use_kl_loss=True, kl_loss_coef=0.0), (), "+-", EXACT),
        (VerlLoss(loss_mode="gpg"), (OLD,), "+-", EXACT),
        (VerlLoss(loss_mode="gspo"), (OLD,), "+-", BACKWARD),
        (VerlLoss(loss_mode="gspo"), (OLD,), "+", BOUND),
        (VerlLoss(loss_mode="geo_mean"), (OLD,), "+-", BACKWARD),
        (VerlLoss(loss_mode="kl_cov"), (), "+-", EXACT),
        (VerlLoss(loss_mode="kl_cov"), (OLD,), "+", BACKWARD),
        (VerlLoss(loss_mode="dro", dro_beta=1.0), (OLD,), "+", BACKWARD),
        (VerlLoss(loss_mode="dppo_kl"), (OLD,), "+-", BOUND),
        (OpenRlhfLoss(), (), "+-", EXACT),
        (OpenRlhfLoss(), (OLD,), "+-", BACKWARD),
        (OpenRlhfLoss(dual_clip=3.0), (OLD,), "+-", BOUND),
        (OpenRlhfLoss(use_kl_loss=True), (), "+-", BOUND),
        (OpenRlhfLoss(is_correction_enable=True), (SAMPLING,), "+-", BOUND),
        (OpenRlhfLoss(is_correction_enable=True), (WEIGHTS,), "+-", EXACT),
        (OpenRlhfLoss(is_correction_enable=True, is_correction_type="seq-mask-tis"), (SAMPLING,), "+-", BACKWARD),
        (OpenRlhfLoss(policy_loss_type="gspo", is_correction_enable=True), (SAMPLING,), "+-", BACKWARD),
    ],
)
def test_readiness(loss, arrays, signs, expected):
    """Log-probabilities and entropies after the forward change nothing; what is exact needs none of them."""
    data = draw()
    data.advantages = data.advantages if signs == "+-" else data.advantages.abs()
    names = {"is_weights" if array is WEIGHTS else array: array for array in arrays}
    assert readiness(loss, inputs_of(data, **names)) is expected
    assert readiness(loss, inputs_of(data, logps="logps", **names)) is expected
    if expected is EXACT:
        late = exposure(loss, inputs_of(data, logps="logps", **names), xp=torch)
        assert torch.equal(exposure(loss, inputs_of(data, **names), xp=torch), late)


def test_token_local():
    """Declared local: moving one log-probability moves no other token's exposure. Not declared: it does."""
    data = draw()
    moved = draw()
    moved.logps[6, 1] += 0.1
    for what, loss, names in every_case():
        change = exposure(loss, inputs_of(moved, **names), xp=torch) != exposure(
            loss, inputs_of(data, **names), xp=torch
        )
        change[6, 1] = False
        assert not (is_token_local(loss) and change.any()), what
    local = {mode: is_token_local(VerlLoss(loss_mode=mode, **VERL_OWN.get(mode, {}))) for mode in LOSS_MODES}
    assert {mode for mode, yes in local.items() if not yes} == {"gspo", "geo_mean", "kl_cov"}
    assert is_token_local(TrlLoss(loss_type="sapo", beta=0.1))
    assert not is_token_local(TrlLoss(loss_type="vespo", num_items_in_batch=9))
    assert not is_token_local(TrlLoss(loss_type="grpo", importance_sampling_level="sequence"))
    assert is_token_local(OpenRlhfLoss())
    assert not is_token_local(OpenRlhfLoss(policy_loss_type="gspo"))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (TrlLoss(loss_type="grpo"), False),
        (TrlLoss(loss_type="grpo", beta=0.1), True),
        (TrlLoss(loss_type="grpo", entropy_coef=0.1), True),
        (TrlLoss(loss_type="grpo", use_adaptive_entropy=True), True),
        (TrlLoss(loss_type="grpo", router_aux_loss_coef=0.1), True),
        (VerlLoss(kl_loss_coef=0.1), False),
        (VerlLoss(use_kl_loss=True), True),
        (VerlLoss(use_kl_loss=True, kl_loss_coef=0.0), False),
        (VerlLoss(entropy_coeff=0.01), True),
        (VerlLoss(loss_mode="dro", dro_beta=1.0), True),
        (OpenRlhfLoss(), False),
        (OpenRlhfLoss(entropy_coef=0.0), False),
        (OpenRlhfLoss(entropy_coef=0.1), True),
        (OpenRlhfLoss(use_kl_loss=True), True),
        (OpenRlhfLoss(aux_loss_coef=0.1), True),
    ],
)
def test_other_terms(loss, expected):
    assert has_other_terms(loss) is expected


# ----------------------------------------------------------------------------------------------------- settings, refusals


def test_settings_round_trip():
    for what, loss, _ in every_case():
        assert from_dict(json.loads(json.dumps(to_dict(loss)))) == loss, what
    assert from_dict({"trainer": "verl"}) == VerlLoss()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "dictionary"),
        ({}, "trainer=None"),
        ({"trainer": "slime"}, "slime.*trl, verl, openrlhf"),
        ({"trainer": "trl", "gamma": 1}, "gamma"),
        ({"trainer": "trl"}, "num_items_in_batch"),
        ({"trainer": "trl", "loss_type": "gspo"}, "gspo.*luspo"),
        ({"trainer": "trl", "loss_type": ["grpo"]}, "loss_type"),
        ({"trainer": "trl", "loss_type": "grpo", "beta": "0.1"}, "beta"),
        ({"trainer": "trl", "loss_type": "grpo", "beta": float("nan")}, "beta.*finite"),
        ({"trainer": "trl", "loss_type": "grpo", "delta": float("inf")}, "delta.*finite"),
        ({"trainer": "trl", "loss_type": "grpo", "epsilon": True}, "epsilon"),
        ({"trainer": "trl", "loss_type": "grpo", "epsilon": None}, "epsilon"),
        ({"trainer": "trl", "loss_type": "grpo", "num_processes": 1.5}, "num_processes"),
        ({"trainer": "trl", "loss_type": "grpo", "num_processes": 0}, "num_processes"),
        ({"trainer": "trl", "loss_type": "grpo", "use_bias_correction_kl": 1}, "use_bias_correction_kl"),
        ({"trainer": "trl", "loss_type": "grpo", "importance_sampling_level": "row"}, "token, sequence"),
        ({"trainer": "trl", "loss_type": "grpo", "top_entropy_quantile": 1.2}, "top_entropy_quantile"),
        ({"trainer": "trl", "loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length"),
        ({"trainer": "verl", "loss_mode": "clip_cov"}, "random"),
        ({"trainer": "verl", "loss_mode": "bypass_mode"}, "bypass_mode.*vanilla"),
        ({"trainer": "verl", "loss_mode": "ppo"}, "ppo.*vanilla"),
        ({"trainer": "verl", "loss_agg_mode": "mean"}, "mean.*token-sum"),
        ({"trainer": "verl", "kl_loss_type": "full"}, "full.*k3"),
        ({"trainer": "verl", "loss_mode": "dro"}, "dro_beta"),
        ({"trainer": "verl", "clip_ratio_c": 1.0}, "clip_ratio_c"),
        ({"trainer": "verl", "dp_size": 2}, "batch_num_tokens"),
        ({"trainer": "verl", "dp_size": 2, "loss_mode": "sapo"}, "global_batch_size"),
        ({"trainer": "verl", "dp_size": 2, "loss_mode": "geo_mean", "use_kl_loss": True}, "batch_num_tokens"),
        ({"trainer": "openrlhf", "policy_loss_type": "grpo"}, "grpo.*gspo"),
        ({"trainer": "openrlhf", "eps_clip_low_high": [0.2]}, "eps_clip_low_high"),
        ({"trainer": "openrlhf", "eps_clip_low_high": 0.2}, "eps_clip_low_high"),
        ({"trainer": "openrlhf", "eps_clip_low_high": [0.2, float("nan")]}, "eps_clip_low_high"),
        ({"trainer": "openrlhf", "is_correction_threshold": [5.0, 0.5]}, "is_correction_threshold"),
        ({"trainer": "openrlhf", "is_correction_type": "mis"}, "mis.*icepop"),
        ({"trainer": "openrlhf", "dual_clip": 1.0}, "dual_clip"),
        ({"trainer": "openrlhf", "kl_estimator": "k4"}, "k4"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(UsageError, match=words) as raised:
        from_dict(settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "names", "words"),
    [
        (TrlLoss(loss_type="grpo"), {"old_logps": OLD}, "needs logps"),
        (TrlLoss(loss_type="grpo", beta=0.1), {"logps": "logps"}, "beta 0.1 needs ref_logps"),
        (TrlLoss(loss_type="grpo", beta=0.1), {"ref_logps": REF}, "beta 0.1 needs logps"),
        (TrlLoss(loss_type="grpo", top_entropy_quantile=0.2), {}, "needs entropies"),
        (TrlLoss(loss_type="grpo", off_policy_mask_threshold=0.2), {"sampling_logps": SAMPLING}, "needs logps"),
        (VerlLoss(use_kl_loss=True), {"logps": "logps"}, "low_var_kl needs ref_logps"),
        (VerlLoss(loss_mode="dppo_tv"), {"old_logps": OLD}, "needs logps"),
        (
            VerlLoss(loss_mode="sapo", use_kl_loss=True),
            {"logps": "logps", "ref_logps": REF, "normaliser": WEIGHTS},
            "another normaliser",
        ),
        (OpenRlhfLoss(is_correction_enable=True), {"logps": "logps"}, "tis needs sampling_logps"),
        (OpenRlhfLoss(policy_loss_type="gspo", is_correction_enable=True), {"logps": "logps"}, "needs sampling_logps"),
        (OpenRlhfLoss(), {"is_weights": WEIGHTS}, "is_correction_enable"),
        (OpenRlhfLoss(token_level_loss=False, use_kl_loss=True), {"normaliser": WEIGHTS}, "leave it out"),
        (TrlLoss(loss_type="grpo"), {"logps": "advantages_row"}, "logps has shape"),
    ],
)
def test_bad_inputs(loss, names, words):
    data = draw()
    data.advantages_row = data.advantages[:, None]
    with pytest.raises(UsageError, match=words):
        exposure(loss, inputs_of(data, **names), xp=torch)


def test_bad_shapes():
    with pytest.raises(UsageError, match="advantages have shape"):
        exposure(VerlLoss(), LossInputs(mask=np.ones((2, 3)), advantages=np.ones(3)))
    with pytest.raises(UsageError, match="mask has shape"):
        exposure(VerlLoss(), LossInputs(mask=np.ones(3), advantages=np.ones(3)))
    with pytest.raises(UsageError, match="none of ours"):
        exposure("grpo", LossInputs(mask=np.ones((2, 3)), advantages=np.ones(2)))
