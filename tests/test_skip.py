"""Rows of zero exposure left out: the same gradient, for every loss and normaliser of every trainer; and where it would not be, a refusal."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import float64_throughout

from hilore_cli.batches import (
    MicroBatch,
    load_micro_batch,
    save_micro_batch,
    skip_zero_rows,
    synthetic_micro_batch,
    zero_exposure_rows,
)
from hilore_cli.errors import UsageError
from hilore_cli.exposure import OpenRlhfLoss, TrlLoss, VerlLoss
from hilore_cli.grpo import GrpoConfig, gradients, relative_error

CONFIG = GrpoConfig(head="full")
SKIPPED = [1, 2, 5, 6]
TRL_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
VERL_MODES = ("vanilla", "gspo", "sapo", "cispo", "gpg", "dppo_tv", "dppo_kl", "geo_mean")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
CONSTANTS = {"local": {}, "global": {"batch_num_tokens": 300.0, "global_batch_size": 12.0, "dp_size": 2}}

LOSSES = {f"trl {kind}": TrlLoss(loss_type=kind, num_items_in_batch=200, epsilon_high=0.28, current_gradient_accumulation_steps=3) for kind in TRL_TYPES}
LOSSES |= {f"trl {kind}, sequence ratios": TrlLoss(loss_type=kind, num_items_in_batch=200, importance_sampling_level="sequence") for kind in ("grpo", "dapo", "luspo")}
LOSSES["trl off-policy mask"] = TrlLoss(num_items_in_batch=200, off_policy_mask_threshold=0.02)
LOSSES["trl entropies above a given threshold"] = TrlLoss(num_items_in_batch=200, top_entropy_quantile=0.4, entropy_threshold=4.5)
LOSSES |= {f"verl {mode}, {agg}, {kind}": VerlLoss(loss_mode=mode, loss_agg_mode=agg, **constants) for mode in VERL_MODES for agg in AGG_MODES for kind, constants in CONSTANTS.items()}
LOSSES |= {f"openrlhf {kind}, {level}, {name}": OpenRlhfLoss(policy_loss_type=kind, token_level_loss=level == "tokens", dual_clip=2.0, **constants) for kind in ("ppo", "gspo") for level in ("tokens", "samples") for name, constants in CONSTANTS.items()}
LOSSES |= {f"openrlhf corrected by {kind}": OpenRlhfLoss(is_correction_enable=True, is_correction_type=kind, is_correction_threshold=(0.8, 1.2)) for kind in ("tis", "icepop", "seq-mask-tis")}


def micro_batch(loss, **changes) -> MicroBatch:
    """Eight rows, off-policy: 1, 2 and 5 have no advantage, 6 no loss token; in the others some tokens have no advantage."""
    mb = synthetic_micro_batch(vocab_size=97, rows=8, prompt_tokens=7, completion_tokens=11, group_size=4, seed=1)
    rng = torch.Generator().manual_seed(2)
    keep = torch.ones(8, 1)
    keep[SKIPPED] = 0
    mask = mb.loss_mask.clone()
    mask[6] = 0
    holes = (torch.rand(mb.input_ids.shape, generator=rng) < 0.8) * keep * mask
    logps = {name: (-torch.log(torch.tensor(97.0)) + 0.4 * torch.randn(mb.input_ids.shape, generator=rng)) * mask for name in ("old_logps", "sampling_logps")}
    return replace(mb, loss_mask=mask, advantages=mb.advantages * holes, loss=loss, **(logps | changes))


@pytest.fixture(scope="module")
def model():
    return build_tiny("llama", dtype=torch.float64)


@pytest.fixture(autouse=True)
def _float64():
    with float64_throughout():
        yield


def gradient_of(model, mb: MicroBatch) -> dict[str, torch.Tensor]:
    return gradients(model, [mb], CONFIG)


def same(a: MicroBatch, b: MicroBatch) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_same(model, name, layout):
    """To the rounding of the normaliser, which is kept in float32."""
    mb = micro_batch(LOSSES[name], layout=layout)
    kept = skip_zero_rows(mb)
    assert zero_exposure_rows(mb).nonzero().flatten().tolist() == SKIPPED
    assert (mb.zero_rows, kept.rows, kept.zero_rows) == (4, 4, 0)
    assert kept.tokens < mb.tokens
    kept.validate()
    assert relative_error(gradient_of(model, kept), gradient_of(model, mb)) <= 1e-7
    assert kept.weight("squared") == pytest.approx(mb.weight("squared"), rel=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["trl grpo", "trl dapo, sequence ratios", "verl vanilla, token-mean, local", "openrlhf gspo, samples, local"])
def test_with_a_normaliser_of_its_own_to_float64_rounding(model, name, layout):
    mb = micro_batch(LOSSES[name], layout=layout)
    mb = replace(mb, normaliser=torch.rand(mb.input_ids.shape, generator=torch.Generator().manual_seed(3)) * mb.loss_mask)
    assert relative_error(gradient_of(model, skip_zero_rows(mb)), gradient_of(model, mb)) <= 1e-12


@pytest.mark.parametrize("name", ["trl grpo", "trl bnpo", "verl vanilla, seq-mean-token-mean, local", "openrlhf ppo, tokens, local"])
def test_rows_taken_out_by_hand_are_not_the_same(model, name):
    """These losses divide by what is in the micro-batch: without the explicit normaliser the gradient would be another."""
    mb = micro_batch(LOSSES[name])
    assert relative_error(gradient_of(model, mb.take_rows(~zero_exposure_rows(mb))), gradient_of(model, mb)) > 0.1


def test_entropies_above_a_quantile_of_the_micro_batch_are_refused():
    """The threshold is of all rows' tokens: without some of them other tokens would pass it."""
    mb = micro_batch(TrlLoss(num_items_in_batch=200, top_entropy_quantile=0.4))
    assert mb.zero_rows == 0
    with pytest.raises(UsageError, match="the entropy quantile is taken over all rows; record entropy_threshold"):
        skip_zero_rows(mb)


OTHER_TERMS = {
    "trl KL": TrlLoss(num_items_in_batch=200, beta=0.01),
    "trl entropy bonus": TrlLoss(num_items_in_batch=200, entropy_coef=0.01),
    "trl adaptive entropy bonus": TrlLoss(num_items_in_batch=200, use_adaptive_entropy=True),
    "trl router": TrlLoss(num_items_in_batch=200, router_aux_loss_coef=0.001),
    "verl KL": VerlLoss(use_kl_loss=True),
    "verl entropy bonus": VerlLoss(entropy_coeff=0.01),
    "verl dro": VerlLoss(loss_mode="dro", dro_beta=0.1),
    "verl kl_cov": VerlLoss(loss_mode="kl_cov"),
    "openrlhf KL": OpenRlhfLoss(use_kl_loss=True),
    "openrlhf entropy bonus": OpenRlhfLoss(entropy_coef=0.01),
    "openrlhf router": OpenRlhfLoss(aux_loss_coef=0.001),
}


@pytest.mark.parametrize("name", OTHER_TERMS)
@pytest.mark.parametrize("advantages", [0.0, 1.0])
def test_terms_that_reach_every_row_are_refused(name, advantages):
    mb = micro_batch(OTHER_TERMS[name])
    mb = replace(mb, advantages=mb.advantages * advantages)
    assert mb.zero_rows == 0
    through_logps = not any(words in name for words in ("entropy", "router"))  # of the others the step has no gradient
    assert mb.has_gradient == (through_logps or advantages != 0)
    with pytest.raises(UsageError, match="cannot be skipped: the loss has a KL, entropy or router"):
        skip_zero_rows(mb)


def test_a_coefficient_of_zero_is_no_term():
    for loss in (TrlLoss(num_items_in_batch=200, beta=0.0), VerlLoss(use_kl_loss=True, kl_loss_coef=0.0), OpenRlhfLoss(use_kl_loss=True, kl_coef=0.0)):
        assert skip_zero_rows(micro_batch(loss)).rows == 4


def test_nothing_left_nothing_to_skip_and_twice():
    mb = micro_batch(LOSSES["trl grpo"])
    assert skip_zero_rows(replace(mb, advantages=mb.advantages * 0)) is None
    kept = skip_zero_rows(mb)
    assert skip_zero_rows(kept) is kept
    whole = synthetic_micro_batch(vocab_size=97, rows=8, prompt_tokens=7, completion_tokens=11, group_size=4, seed=1)
    assert skip_zero_rows(whole) is whole
    assert whole.normaliser is None


def test_what_is_kept_is_as_it_was():
    mb = micro_batch(LOSSES["trl grpo"], is_weights=torch.ones(8, 18))
    kept = skip_zero_rows(mb)
    rows = [i for i in range(8) if i not in SKIPPED]
    for f in fields(mb):
        before, after = getattr(mb, f.name), getattr(kept, f.name)
        if f.name == "normaliser":
            assert before is None
            # a row's tokens weigh 1 / (B n GA), B as it was
            torch.testing.assert_close(after.sum(1), torch.full((4,), 1 / (8 * 3)))
        elif isinstance(before, torch.Tensor):
            assert torch.equal(after, before[rows]), f.name
        else:
            assert after == before, f.name


@pytest.mark.parametrize("name", ["trl bnpo", "verl geo_mean, token-mean, local", "openrlhf gspo, samples, global"])
def test_a_file_keeps_the_normaliser(model, tmp_path, name):
    mb = micro_batch(LOSSES[name])
    kept = skip_zero_rows(mb)
    save_micro_batch(tmp_path / "kept.parquet", kept)
    loaded = load_micro_batch(tmp_path / "kept.parquet")
    assert same(loaded, kept)
    assert skip_zero_rows(loaded) is loaded
    assert relative_error(gradient_of(model, loaded), gradient_of(model, mb)) <= 1e-7
