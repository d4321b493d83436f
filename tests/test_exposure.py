"""Exposure against autograd in float64, through a loss written here on its own, as TRL writes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hilore_cli.errors import UsageError
from hilore_cli.exposure import LOSS_TYPES, exposure

ROWS, COLUMNS = 6, 9
LOSS_TOKENS, STEPS, WIDEST = 200, 4, 16


def draw(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    logps = -torch.rand(ROWS, COLUMNS, generator=rng, dtype=torch.float64) * 3
    old = logps + torch.randn(ROWS, COLUMNS, generator=rng, dtype=torch.float64) * 0.3
    advantages = torch.randn(ROWS, generator=rng, dtype=torch.float64)
    advantages[2] = 0.0
    lengths = torch.tensor([9, 5, 7, 1, 0, 3])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    return logps, old, advantages, mask


def trl_loss(logps, old, advantages, mask, loss_type, low, high):
    """TRL 1.16's `_compute_loss` for token-level ratios, in its own order of operations."""
    old = logps.detach() if old is None else old
    coef_1 = torch.exp(logps - old)
    coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
    per_token = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    mask = mask.double()
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / STEPS
    if loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0) / STEPS
    if loss_type == "dr_grpo":
        return (per_token * mask).sum() / (per_token.size(0) * WIDEST) / STEPS
    return (per_token * mask).sum() / LOSS_TOKENS


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28)])
@pytest.mark.parametrize("xp", [np, torch])
def test_exposure_is_the_derivative(loss_type, on_policy, low, high, xp):
    logps, old, advantages, mask = draw()
    old = None if on_policy else old
    logps.requires_grad_(True)
    trl_loss(logps, old, advantages, mask, loss_type, low, high).backward()

    def give(x):
        return x if x is None or xp is torch else x.detach().numpy()

    c = exposure(
        advantages=give(advantages),
        mask=give(mask.double()),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        loss_tokens=LOSS_TOKENS,
        accumulation_steps=STEPS,
        max_completion_tokens=WIDEST,
        logps=give(logps.detach()),
        old_logps=give(old),
        xp=xp,
    )
    c = torch.as_tensor(c)
    assert c.dtype == torch.float64
    assert (c - logps.grad).norm() <= 1e-12 * logps.grad.norm()
    assert (c[mask == 0] == 0).all()


def test_the_clip_is_active_in_the_draw():
    """Otherwise the test above would not see it."""
    logps, old, advantages, mask = draw()
    c = exposure(advantages=advantages, mask=mask.double(), loss_type="bnpo", logps=logps, old_logps=old, xp=torch)
    clipped = (c == 0) & (mask != 0) & (advantages[:, None] != 0)
    assert 3 <= int(clipped.sum()) < int(mask.sum()) // 2


def test_garbage_under_the_mask_does_not_spread():
    logps, old, advantages, mask = draw()
    old[mask == 0] = float("nan")
    c = exposure(advantages=advantages, mask=mask.double(), loss_type="bnpo", logps=logps, old_logps=old, xp=torch)
    assert torch.isfinite(c).all()


def test_on_policy_is_known_without_logps():
    _, _, advantages, mask = draw()
    c = exposure(advantages=advantages.numpy(), mask=mask.numpy(), loss_tokens=10)
    np.testing.assert_allclose(c, -advantages.numpy()[:, None] * mask.numpy() / 10)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"loss_type": "gspo"}, "gspo"),
        ({"loss_type": "dapo"}, "loss_tokens"),
        ({"loss_tokens": 9, "old_logps": 1}, "logps"),
    ],
)
def test_bad_input(extra, words):
    _, _, advantages, mask = draw()
    with pytest.raises(UsageError, match=words):
        exposure(advantages=advantages, mask=mask.double(), **extra)
