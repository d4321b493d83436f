"""The trainers' losses, written again in their own order of operations, and one draw of data to differentiate them on.

Independent of `hilore_cli.exposure`: nothing is imported from it but the settings, which arrive as arguments. Sources:
TRL 1.16.0 `grpo_trainer.py: _compute_loss`, verl 0.9.1 `core_algos.py` and `losses.py`, OpenRLHF 0.11.0 `models/loss.py`
and `ppo_actor.py: training_step`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

ROWS, COLUMNS = 9, 14
NAN = float("nan")


def draw(seed: int = 0, *, spread: float = 0.35, dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    """One micro-batch: holes in the mask, row 4 fully masked, row 2 of zero advantage, both signs, clips on both sides."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    logps = -torch.rand(ROWS, COLUMNS, generator=rng, dtype=torch.float64) * 3 - 0.05
    lengths = torch.tensor([14, 9, 12, 5, 0, 1, 14, 7, 11])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    mask[0, 3] = mask[1, 0] = mask[6, 5:8] = 0
    advantages = torch.tensor([1.3, -0.8, 0.0, -1.9, 0.7, 0.4, -0.3, 2.1, -1.1], dtype=torch.float64)
    shift = normal(ROWS, 1) * spread
    old = (logps + normal(ROWS, COLUMNS) * spread + shift).clamp(max=-0.01)
    data = SimpleNamespace(
        mask=mask,
        advantages=advantages,
        token_advantages=(advantages[:, None] + 0.3 * normal(ROWS, COLUMNS)) * (advantages != 0)[:, None],
        logps=logps,
        old_logps=old,
        ref_logps=logps + normal(ROWS, COLUMNS) * 0.5,
        sampling_logps=old + normal(ROWS, COLUMNS) * 0.2,
        row_weights=torch.exp(normal(ROWS, 1) * 0.3),
        token_weights=torch.exp(normal(ROWS, COLUMNS) * 0.3),
        entropies=torch.rand(ROWS, COLUMNS, generator=rng, dtype=torch.float64).float().double() * 2,
    )
    data.row_weights[3] = 0.0  # as a sequence mask leaves it
    data.token_weights[mask == 0] = 1.0  # exp of a masked difference
    return SimpleNamespace(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in vars(data).items()})


def poison(array: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """NaN wherever no loss token reads; of [B] and [B,1], in the rows without one."""
    dead = mask == 0
    dead = dead if array.shape == mask.shape else dead.all(1).reshape(array.shape)
    return torch.where(dead, NAN, array)


def gradient(loss_of, logps: torch.Tensor, *settings, **arrays) -> torch.Tensor:
    """dL/dlogp by autograd, L = loss_of(logps, *settings, **arrays)."""
    leaf = logps.clone().requires_grad_(True)
    loss_of(leaf, *settings, **arrays).backward()
    return leaf.grad


# ---------------------------------------------------------------------------------------------------------------- TRL

TRL_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
TRL_CONSTANTS = {
    "current_gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_processes": 2,
    "num_items_in_batch": 700,
    "max_completion_length": 20,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
}
TRL_VARIANTS = {  # settings, then which arrays besides logps and mask the loss gets
    "plain": ({}, ()),
    "delta": ({"delta": 1.5}, ()),
    "narrow delta": ({"delta": 1.1}, ()),
    "beta": ({"beta": 0.04}, ("ref_logps",)),
    "beta without correction": ({"beta": 0.04, "use_bias_correction_kl": False}, ("ref_logps",)),
    "row weights": ({}, ("row_weights",)),
    "token weights": ({}, ("token_weights",)),
    "off-policy mask": ({"off_policy_mask_threshold": 0.02}, ()),
    "off-policy mask, sampling": ({"off_policy_mask_threshold": 0.02}, ("sampling_logps",)),
    "top entropy": ({"top_entropy_quantile": 0.37}, ("entropies",)),
    "all": (
        {"delta": 1.6, "beta": 0.1, "off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6},
        ("ref_logps", "token_weights", "sampling_logps", "entropies"),
    ),
}


def trl_loss(lp, cfg, *, mask, advantages, old=None, ref=None, sampling=None, weights=None, entropies=None):
    """GRPOTrainer._compute_loss in train mode, without its entropy bonus and router loss (no part of dL/dlogp)."""
    low, high = cfg.epsilon, cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    if cfg.top_entropy_quantile < 1.0:
        threshold = torch.quantile(entropies[mask.bool()].float(), 1 - cfg.top_entropy_quantile)
        entropy_mask = (entropies * mask >= threshold) & mask.bool()
    old = lp.detach() if old is None else old
    if cfg.off_policy_mask_threshold is not None:
        kl = torch.nan_to_num((old if sampling is None else sampling) - lp.detach(), nan=0.0)
        mean = (kl * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
        keep = ((advantages >= 0) | (mean <= cfg.off_policy_mask_threshold)).to(lp.dtype)
    log_ratio = lp - old
    log_weights = log_ratio
    if cfg.importance_sampling_level == "sequence":
        log_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(log_weights)
    if cfg.beta != 0:
        per_token_kl = torch.exp(ref - lp) - (ref - lp) - 1
        if cfg.use_bias_correction_kl:
            per_token_kl = per_token_kl * coef_1
    if cfg.loss_type == "cispo":
        per_token = -torch.clamp(coef_1, max=high).detach() * advantages * lp
    elif cfg.loss_type == "sapo":
        tau = torch.where(advantages > 0, torch.tensor(cfg.sapo_temperature_pos).double(), cfg.sapo_temperature_neg)
        per_token = -torch.sigmoid(tau * (coef_1 - 1)) * 4 / tau * advantages
    elif cfg.loss_type == "vespo":
        per_token = -vespo_phi(cfg, advantages, log_ratio.detach(), mask, weights) * advantages * lp
    else:
        coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
        if cfg.delta is not None:
            coef_1 = torch.clamp(coef_1, max=cfg.delta)
        per_token = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if cfg.off_policy_mask_threshold is not None:
        per_token = per_token * keep
    if cfg.top_entropy_quantile < 1.0:
        per_token = per_token * entropy_mask
    if weights is not None and cfg.loss_type != "vespo":
        per_token = per_token * weights
    if cfg.beta != 0:
        per_token = per_token + cfg.beta * per_token_kl
    steps = cfg.current_gradient_accumulation_steps
    if cfg.loss_type in ("grpo", "sapo"):
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / steps
    if cfg.loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0) / steps
    if cfg.loss_type == "dr_grpo":
        return (per_token * mask).sum() / (per_token.size(0) * cfg.max_completion_length) / steps
    if cfg.loss_type == "luspo":
        return (per_token * mask).sum(-1).mean() / steps
    return (per_token * mask).sum() / (
        max(cfg.num_items_in_batch, 1) / cfg.num_processes * steps / cfg.steps_per_generation
    )


def vespo_phi(cfg, advantages, log_ratio, mask, weights):
    floor = math.log(1e-8)
    log_w = (torch.clamp(log_ratio, -20.0, 20.0) * mask).sum(-1, keepdim=True)
    if weights is not None:
        log_w = log_w + torch.clamp(torch.log(weights), floor, 20.0).sum(-1, keepdim=True)
    log_w = torch.clamp(log_w, floor, 20.0)
    one = torch.ones_like(advantages)
    k = torch.where(advantages >= 0, cfg.vespo_k_pos * one, cfg.vespo_k_neg * one)
    rate = torch.where(advantages >= 0, cfg.vespo_lambda_pos * one, cfg.vespo_lambda_neg * one).clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


# --------------------------------------------------------------------------------------------------------------- verl


def agg_loss(cfg, per_token, mask, mode):
    tokens, sequences = cfg.batch_num_tokens, cfg.global_batch_size
    if mode == "token-mean":
        return (per_token * mask).sum() / (mask.sum() if tokens is None else tokens) * cfg.dp_size
    if mode == "token-sum":
        return (per_token * mask).sum() * cfg.dp_size
    counts = mask.sum(-1)
    seq_mask = (counts > 0).double()
    sequences = seq_mask.sum() if sequences is None else sequences
    per_sequence = (per_token * mask).sum(-1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / (counts.double() + 1e-8)
    loss = (per_sequence * seq_mask).sum() / sequences * cfg.dp_size
    if mode == "seq-mean-token-sum-norm":
        loss = loss / (mask.shape[-1] if cfg.loss_scale_factor is None else cfg.loss_scale_factor)
    return loss


def verl_loss(lp, cfg, *, mask, advantages, old=None, ref=None, weights=None):
    """ppo_loss: the policy loss of a mode, and the KL loss; the entropy loss is no part of dL/dlogp."""
    old = lp.detach() if old is None else old
    low = cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    if cfg.loss_mode == "geo_mean":
        loss = verl_geo_mean(lp, old, advantages, mask, low, high, weights)
    else:
        per_token = verl_per_token(lp, cfg, old, advantages, mask, low, high)
        if weights is not None:
            per_token = per_token * weights
        loss = agg_loss(cfg, per_token, mask, "seq-mean-token-mean" if cfg.loss_mode == "sapo" else cfg.loss_agg_mode)
    if cfg.use_kl_loss:
        loss = loss + cfg.kl_loss_coef * agg_loss(cfg, verl_kl(lp, ref, cfg.kl_loss_type), mask, cfg.loss_agg_mode)
    return loss


def verl_per_token(lp, cfg, old, a, mask, low, high):
    mode, gap = cfg.loss_mode, lp - old
    clamped = torch.clamp(gap, min=-20.0, max=20.0)
    ratio = torch.exp(clamped)
    if mode == "vanilla":
        worse = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - low, 1 + high))
        return torch.where(a < 0, torch.min(-a * cfg.clip_ratio_c, worse), worse)
    if mode == "gspo":
        mean = (gap * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        s = torch.exp(torch.clamp(lp - lp.detach() + mean.detach().unsqueeze(-1), max=10.0))
        return torch.maximum(-a * s, -a * torch.clamp(s, 1 - low, 1 + high))
    if mode == "sapo":
        tau = torch.where(
            a > 0, torch.as_tensor(cfg.tau_pos, dtype=a.dtype), torch.as_tensor(cfg.tau_neg, dtype=a.dtype)
        )
        return -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * a
    if mode == "cispo":
        return -torch.clamp(ratio, 1 - low, 1 + high).detach() * a * lp
    if mode == "gpg":
        return -lp * a
    if mode == "dro":
        return -(lp * a - 0.5 * cfg.dro_beta * gap.square())
    if mode in ("dppo_tv", "dppo_kl"):
        p, q = torch.exp(lp), torch.exp(old)
        if mode == "dppo_tv":
            valid = torch.where(a > 0, (p - q) <= high, (p - q) >= -low)
        else:
            kl = q * (old - lp) + (1 - q) * torch.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
            valid = torch.where(a > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
        return -a * torch.clamp(ratio, max=cfg.clip_ratio_c).detach() * lp * valid.detach().double()
    assert mode == "kl_cov"
    losses, with_kl = -a * torch.exp(gap), -a * torch.exp(gap) + cfg.ppo_kl_coef * gap.abs()
    valid = torch.nonzero(mask.reshape(-1) > 0, as_tuple=True)[0]
    adv, logp = a[mask > 0], lp[mask > 0].detach()
    cov = (adv - adv.mean()) * (logp - logp.mean())
    top = valid[torch.topk(cov, max(1, int(len(cov) * cfg.kl_cov_ratio)), largest=True).indices]
    losses[top // a.shape[1], top % a.shape[1]] = with_kl[top // a.shape[1], top % a.shape[1]]
    return losses


def verl_geo_mean(lp, old, advantages, mask, low, high, weights):
    gap, sign = lp - old, torch.sign(advantages)
    worse = sign * torch.min(sign * gap, sign * torch.clamp(gap, -low, high))
    counts = mask.sum(-1).double() + 1e-8
    ratio = torch.exp((worse * mask).sum(-1) / counts)
    losses = -(advantages * mask).sum(-1) / counts * ratio
    if weights is not None:
        losses = losses * torch.exp((torch.log(weights + 1e-10) * mask).sum(-1) / counts)
    return torch.mean(losses)


def verl_kl(lp, ref, kind):
    base = kind.removesuffix("+")
    if base in ("kl", "k1"):
        value = lp - ref
    elif base == "abs":
        value = (lp - ref).abs()
    elif base in ("mse", "k2"):
        value = 0.5 * (lp - ref).square()
    else:
        kl = torch.clamp(ref - lp, min=-20, max=20)
        value = torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)
    if not kind.endswith("+"):
        return value
    straight = 0.5 * (lp - ref).square()
    return straight - straight.detach() + value.detach()


# ----------------------------------------------------------------------------------------------------------- OpenRLHF


def aggregate_loss(cfg, per_token, mask, *, token_level_loss=True):
    if token_level_loss:
        if cfg.batch_num_tokens is None:
            return (per_token * mask).sum() / mask.sum()
        return (per_token * mask).sum() / cfg.batch_num_tokens * cfg.dp_size
    counts = mask.sum(-1)
    per_sequence = (per_token * mask).sum(-1) / (counts.double() + 1e-8)
    seq_mask = (counts > 0).double()
    if cfg.global_batch_size is None:
        return (per_sequence * seq_mask).sum() / seq_mask.sum()
    return (per_sequence * seq_mask).sum() / cfg.global_batch_size * cfg.dp_size


def openrlhf_loss(lp, cfg, *, mask, advantages, old=None, ref=None, rollout=None):
    """PolicyLoss.forward and the KL loss of training_step; the entropy and router losses are no part of dL/dlogp."""
    old = lp.detach() if old is None else old
    a = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
    if cfg.policy_loss_type == "ppo":
        ratio = (lp - old).clamp(min=-20.0, max=20.0).exp()
    else:
        gap = lp - rollout if cfg.is_correction_enable else lp - old
        mean = (gap * mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
        ratio = mean.exp().unsqueeze(-1) * mask
    surr1 = ratio * a
    surr2 = ratio.clamp(1 - cfg.eps_clip_low_high[0], 1 + cfg.eps_clip_low_high[1]) * a
    loss = -torch.min(surr1, surr2)
    if cfg.dual_clip is not None:
        clip1 = torch.min(surr1, surr2)
        loss = -torch.where(a < 0, torch.max(clip1, cfg.dual_clip * a), clip1)
    if cfg.is_correction_enable and cfg.policy_loss_type == "ppo":
        low, high = cfg.is_correction_threshold
        gap = (old - rollout).detach()
        if cfg.is_correction_type == "icepop":
            weight = torch.exp(gap)
            loss = weight * ((weight >= low) & (weight <= high)) * loss
        elif cfg.is_correction_type == "seq-mask-tis":
            mean = torch.exp((gap * mask).sum(-1) / mask.sum(-1).clamp(min=1))
            loss = ((mean >= low) & (mean <= high)).unsqueeze(-1) * torch.exp(gap) * loss
        else:
            loss = torch.exp(gap).clamp(min=low, max=high) * loss
    per_token = cfg.token_level_loss and cfg.policy_loss_type != "gspo"
    loss = aggregate_loss(cfg, loss, mask, token_level_loss=per_token)
    if cfg.use_kl_loss:
        gap = lp - ref
        value = {"k1": gap, "k2": gap**2 / 2.0, "k3": (-gap).exp() - 1 + gap}[cfg.kl_estimator].clamp(min=-10, max=10)
        loss = loss + cfg.kl_coef * aggregate_loss(cfg, value, mask)
    return loss
