"""The actor update: heads and layouts against each other and against the trainers' losses on the model's own logits, and the update itself."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from losses_for_tests import openrlhf_loss, trl_loss, verl_loss
from steps_for_tests import float64_throughout
from torch import nn

from hilore_cli.batches import LAYOUTS, synthetic_micro_batch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import OpenRlhfLoss, TrlLoss, VerlLoss, is_token_local
from hilore_cli.grpo import (
    GrpoConfig,
    actor_update,
    gradients,
    make_optimizer,
    micro_batch_loss,
    relative_error,
    token_logps,
)
from hilore_cli.norms import squared_distance, squared_norm
from hilore_cli.peak import trace_memory

HEADS = ("chunked", "one-pass")
DAPO = TrlLoss(num_items_in_batch=200)


def batch(*, old: bool = False, seed: int = 1, vocab_size: int = 97, loss=DAPO, **changes):
    """Eight rows, padded on both sides. `old`: with the log-probabilities of the sampler, of the old policy and of a reference."""
    mb = synthetic_micro_batch(vocab_size=vocab_size, rows=8, prompt_tokens=7, completion_tokens=11, group_size=4, seed=seed)
    if old:
        mb = replace(mb, **{name: near_uniform(mb, seed + i) for i, name in enumerate(("old_logps", "ref_logps", "sampling_logps"))})
    return replace(mb, loss=loss, **changes)


def near_uniform(mb, seed: int, spread: float = 0.4):
    """The models are random, so log-probabilities are near -log(V); ratios land on both sides of the clip range."""
    noise = torch.randn(mb.input_ids.shape, generator=torch.Generator().manual_seed(seed)) * spread
    return (-torch.log(torch.tensor(97.0)) + noise) * mb.loss_mask


def config(head: str, **changes) -> GrpoConfig:
    return GrpoConfig(head=head, chunk_tokens=7, **changes)


def whole_logits(model, mb):
    """Independent: log-probabilities [B,S] of the tokens and entropies [B,S] of what predicts them, from all logits of the model's own forward."""
    positions = {} if mb.layout == "padded" else {"position_ids": (mb.attention_mask.cumsum(1) - 1).clamp(min=0)}
    logits = model(input_ids=mb.input_ids, attention_mask=mb.attention_mask, use_cache=False, **positions).logits
    logps = torch.log_softmax(logits[:, :-1] / mb.loss.temperature, -1)
    first = logps.new_zeros(mb.rows, 1)
    own = logps.gather(2, mb.input_ids[:, 1:, None]).squeeze(2)
    return torch.cat([first, own], 1), torch.cat([first, -(logps.exp() * logps).sum(2)], 1)


def trainers_loss(model, mb):
    """The trainer's own loss (losses_for_tests) on the whole logits; nothing of hilore_cli is in it but the settings."""
    logps, entropies = whole_logits(model, mb)
    arrays = {"mask": mb.loss_mask.to(logps.dtype), "advantages": mb.advantages.to(logps.dtype)}
    old, ref, sampling, weights = (None if x is None else x.to(logps.dtype) for x in (mb.old_logps, mb.ref_logps, mb.sampling_logps, mb.is_weights))
    if isinstance(mb.loss, VerlLoss):
        return verl_loss(logps, mb.loss, **arrays, old=old, ref=ref, weights=weights)
    if isinstance(mb.loss, OpenRlhfLoss):
        return openrlhf_loss(logps, mb.loss, **arrays, old=old, ref=ref, rollout=sampling)
    return trl_loss(logps, mb.loss, **arrays, old=old, ref=ref, sampling=sampling, weights=weights, entropies=entropies.detach())


def autograd(model, mb):
    """Gradients of the trainer's own loss; the model is left without any."""
    model.zero_grad()
    trainers_loss(model, mb).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return found


MODELS = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "gemma2, softcap": (
        "gemma2",
        {"final_logit_softcapping": 2.0, "attn_implementation": "eager", "dtype": torch.float32},
    ),
    "granite, divided logits": ("granite", {"logits_scaling": 4.0}),
    "cohere, multiplied logits": ("cohere", {"logit_scale": 0.25}),
    "phi, head with bias": ("phi", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("head", ["full", *HEADS])
def test_every_head_is_the_whole_logits_loss(tiny_model, name, old, head):
    kind, overrides = MODELS[name]
    # gemma2 has no sdpa, and eager attention in float64 is NaN in left padding: its softmax is fp32, where the mask is -inf
    model = tiny_model(kind, **{"dtype": torch.float64, **overrides})
    mb = batch(old=old, loss=replace(DAPO, temperature=0.8))
    # bounds of fp32: transformers computes softcaps and norms partly in fp32 even in a float64 model
    assert relative_error(gradients(model, [mb], config(head)), autograd(model, mb)) <= 3e-6


GRPO = TrlLoss(loss_type="grpo", current_gradient_accumulation_steps=4)
CASES = {  # a loss, and whether its micro-batch is off-policy
    "trl dapo, on-policy": (DAPO, False),
    "trl dapo, off-policy": (replace(DAPO, epsilon_high=0.28, delta=1.4), True),
    "trl dapo, warm": (replace(DAPO, temperature=0.6), True),
    "trl grpo, on-policy": (GRPO, False),
    "trl grpo, off-policy": (GRPO, True),
    "trl bnpo": (replace(GRPO, loss_type="bnpo"), True),
    "trl cispo": (replace(DAPO, loss_type="cispo", epsilon_high=1.2), True),
    "trl sapo": (replace(GRPO, loss_type="sapo"), True),
    "trl vespo": (replace(DAPO, loss_type="vespo"), True),
    "trl gspo": (replace(GRPO, importance_sampling_level="sequence", epsilon=0.05), True),
    "trl dapo with KL": (replace(DAPO, beta=0.1), True),
    "trl gspo with KL": (replace(GRPO, importance_sampling_level="sequence", epsilon=0.05, beta=0.1), True),
    "trl top entropy": (replace(DAPO, top_entropy_quantile=0.4), True),
    "trl top entropy, on-policy, warm": (replace(DAPO, top_entropy_quantile=0.4, temperature=0.6), False),
    "trl off-policy mask": (replace(DAPO, off_policy_mask_threshold=0.02), True),
    "verl dual clip": (VerlLoss(clip_ratio_c=1.3, batch_num_tokens=300.0, dp_size=2), True),
    "verl on-policy": (VerlLoss(loss_agg_mode="seq-mean-token-mean"), False),
    "verl gspo": (VerlLoss(loss_mode="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05, loss_agg_mode="seq-mean-token-mean"), True),
    "verl geo_mean": (VerlLoss(loss_mode="geo_mean"), True),
    "verl kl_cov": (VerlLoss(loss_mode="kl_cov", kl_cov_ratio=0.2), True),
    "verl with KL": (VerlLoss(use_kl_loss=True, kl_loss_coef=0.1), True),
    "openrlhf": (OpenRlhfLoss(eps_clip_low_high=(0.2, 0.3), dual_clip=1.3), True),
    "openrlhf by samples": (OpenRlhfLoss(token_level_loss=False, global_batch_size=5.0, dp_size=2), True),
    "openrlhf corrected, with KL": (OpenRlhfLoss(is_correction_enable=True, is_correction_threshold=(0.8, 1.2), use_kl_loss=True, kl_coef=0.1, kl_estimator="k3"), True),
    "openrlhf gspo": (OpenRlhfLoss(policy_loss_type="gspo", eps_clip_low_high=(0.05, 0.05)), True),
}


def case(name: str, **changes):
    loss, old = CASES[name]
    return batch(old=old, loss=loss, **changes)


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_the_trainers_loss(tiny_llama, name):
    """Gradients against autograd through the trainer's loss on the whole logits, all in float64; each head that can, and a clear refusal of the one that cannot."""
    model, mb = tiny_llama(dtype=torch.float64), case(name)
    with float64_throughout():
        reference = autograd(model, mb)
        assert any(grad.any() for grad in reference.values())
        for head in ("full", *HEADS):
            if head == "one-pass" and not is_token_local(mb.loss):
                with pytest.raises(UsageError, match=f"head one-pass: the {mb.loss.trainer} loss weighs a token by others of its row or micro-batch.*--head chunked"):
                    micro_batch_loss(model, mb, config(head))
                continue
            assert relative_error(gradients(model, [mb], config(head)), reference) <= 1e-12, head


@pytest.mark.parametrize("loss", [VerlLoss(loss_mode="sapo", use_kl_loss=True), OpenRlhfLoss(token_level_loss=False, use_kl_loss=True)], ids=lambda loss: loss.trainer)
def test_one_pass_head_says_what_it_cannot_do(tiny_llama, loss):
    """Token-local losses whose KL term has another normaliser than the policy's."""
    model, mb = tiny_llama(dtype=torch.float64), batch(old=True, loss=loss)
    with pytest.raises(UsageError, match=r"head one-pass: .* its KL loss .*; use --head chunked"):
        micro_batch_loss(model, mb, config("one-pass"))


def test_sequence_ratios_of_one_are_token_by_token(tiny_llama):
    """On-policy a sequence's weight is known before the forward: the one-pass head takes it."""
    model, mb = tiny_llama(dtype=torch.float64), batch(loss=replace(GRPO, importance_sampling_level="sequence"))
    with float64_throughout():
        assert relative_error(gradients(model, [mb], config("one-pass")), autograd(model, mb)) <= 1e-12


def test_importance_weights_and_given_normalisers(tiny_llama):
    """They stand in for the loss's own z, and multiply each token's part."""
    model = tiny_llama(dtype=torch.float64)
    mb = batch(old=True)
    weights = torch.rand(mb.input_ids.shape, generator=torch.Generator().manual_seed(0)) * mb.loss_mask
    weighted = replace(mb, is_weights=weights)
    given = replace(mb, normaliser=weights / DAPO.num_items_in_batch)
    with float64_throughout():
        reference = autograd(model, weighted)
        for head in ("full", *HEADS):
            for one in (weighted, given):
                assert relative_error(gradients(model, [one], config(head)), reference) <= 1e-7, "z is kept in float32"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["trl dapo, off-policy", "trl gspo with KL", "trl top entropy", "verl dual clip", "openrlhf by samples"])
def test_layouts_have_one_gradient(tiny_llama, name, attention):
    """Packed rows, padded rows with the same positions, and (rotary embeddings are relative) padded rows that count their padding."""
    model = tiny_llama(dtype=torch.float64, attn_implementation=attention)
    positions, packed, padded = (case(name, layout=layout) for layout in ("positions", "packed", "padded"))
    with float64_throughout():
        reference = autograd(model, positions)
        for mb in (positions, packed, padded):
            for head in ("full", "chunked"):
                assert relative_error(gradients(model, [mb], config(head)), reference) <= 1e-12, (mb.layout, head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_do_not_see_each_other(tiny_llama, layout):
    """Other tokens in row 0: nothing changes for the rows after it."""
    model = tiny_llama(dtype=torch.float64)
    one = batch(layout=layout)
    ids = one.input_ids.clone()
    ids[0] = (ids[0] + 5) % 97 * one.attention_mask[0]
    other = replace(one, input_ids=ids)
    tokens = int(one.loss_mask[0].sum())
    with float64_throughout(), torch.no_grad():
        first, second = (token_logps(model, mb, config("chunked")) for mb in (one, other))
    assert not torch.allclose(first[:tokens], second[:tokens])
    torch.testing.assert_close(first[tokens:], second[tokens:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", ["full", *HEADS])
def test_token_logps_are_those_of_the_whole_logits(tiny_llama, head):
    model, mb = tiny_llama(dtype=torch.float64), batch(loss=replace(DAPO, temperature=0.7))
    with torch.no_grad():
        torch.testing.assert_close(token_logps(model, mb, config(head)), whole_logits(model, mb)[0][mb.loss_mask.bool()])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("dtype", "loss_bound", "bound"), [(torch.float64, 1e-14, 1e-12), (torch.float32, 1e-6, 1e-5)])
def test_heads_agree(tiny_llama, head, tied, old, dtype, loss_bound, bound):
    model = tiny_llama(dtype=dtype, tie_word_embeddings=tied)
    mb = batch(old=old)
    full, other = (micro_batch_loss(model, mb, config(h)).item() for h in ("full", head))
    assert abs(full - other) <= loss_bound * max(1, abs(full))
    error = relative_error(gradients(model, [mb], config(head)), gradients(model, [mb], config("full")))
    assert error <= bound


@pytest.mark.parametrize("head", HEADS)
def test_heads_agree_in_bf16(tiny_llama, head):
    """No further from float64 than the full head, but for the rounding of the weight gradient between chunks."""
    exact = gradients(tiny_llama(dtype=torch.float64), [batch()], config("full"))
    model = tiny_llama(dtype=torch.bfloat16)
    full = relative_error(gradients(model, [batch()], config("full")), exact)
    assert full > 1e-3
    assert relative_error(gradients(model, [batch()], config(head)), exact) <= 1.5 * full


@pytest.mark.parametrize("head", ["full", *HEADS])
def test_frozen_head(tiny_llama, head):
    model = tiny_llama(tie_word_embeddings=False)
    model.lm_head.requires_grad_(False)
    grads = gradients(model, [batch()], config(head))
    assert "lm_head.weight" not in grads
    assert relative_error(grads, gradients(model, [batch()], config("full"))) <= 1e-5


@pytest.mark.parametrize("head", ["full", *HEADS])
def test_upstream_scalar_and_accumulation(tiny_llama, head):
    model = tiny_llama(dtype=torch.float64)
    once = gradients(model, [batch()], config(head))
    (micro_batch_loss(model, batch(), config(head)) * -3.0).backward()
    micro_batch_loss(model, batch(), config(head)).backward()
    summed = {name: p.grad / -2.0 for name, p in model.named_parameters()}
    assert relative_error(summed, once) <= 1e-6  # transformers norms compute in fp32


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of the largest floating-point tensor any op returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("head", HEADS)
def test_whole_logits_never_exist(tiny_llama, head):
    vocab_size, chunk = 2048, 4
    model = tiny_llama(vocab_size=vocab_size, hidden_size=8)
    mb = batch(vocab_size=vocab_size)
    sizes = {}
    for kind in ("full", head):
        with LargestTensor() as counter:
            micro_batch_loss(model, mb, GrpoConfig(head=kind, chunk_tokens=chunk)).backward()
        sizes[kind] = counter.largest
    assert sizes["full"] == mb.loss_tokens * vocab_size
    assert sizes[head] == vocab_size * 8  # the weight's gradient; a chunk of logits is half of it


def test_projects_only_loss_tokens_and_only_once(tiny_llama):
    """Matmuls with the head's weight: full 1 + 2, chunked 1 + 3 a chunk, one-pass 3 a chunk."""
    model = tiny_llama(vocab_size=501)
    mb = batch(vocab_size=501)
    tokens = mb.loss_tokens
    chunks = -(-tokens // 7)
    counts = {}
    for head in ("full", *HEADS):
        with HeadMatmuls(501) as counter:
            micro_batch_loss(model, mb, config(head)).backward()
        counts[head] = counter.rows
    assert counts["full"] == 3 * tokens
    assert counts["chunked"] == 4 * tokens
    assert counts["one-pass"] == 3 * tokens
    assert chunks > 1


class HeadMatmuls(torch.utils._python_dispatch.TorchDispatchMode):
    """Sums, over all matmuls that touch the vocabulary axis, the number of token rows."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = vocab_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            (m, k), n = left.shape, right.shape[1]
            if self.vocab_size in (m, k, n):
                self.rows += next(size for size in (m, k, n) if size not in (self.vocab_size, 32))
        return func(*args, **(kwargs or {}))


def test_actor_update_is_a_trainers_step(tiny_llama):
    """Against a plain loop: sum of whole-logits losses, clip, AdamW."""
    cfg = GrpoConfig(learning_rate=1e-3, max_grad_norm=0.05, weight_decay=0.1)
    ours, plain = tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    mbs = [batch(seed=1), batch(seed=2)]
    mbs = [replace(mb, loss=TrlLoss(num_items_in_batch=sum(m.loss_tokens for m in mbs))) for mb in mbs]
    optimizer = make_optimizer(ours, cfg)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        grad_norm = actor_update(ours, optimizer, mbs, cfg)
        for mb in mbs:
            trainers_loss(plain, mb).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), cfg.max_grad_norm)
        reference.step()
        reference.zero_grad()
        assert grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert norm > cfg.max_grad_norm
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7), name
        assert a.grad is not None
        assert not a.grad.any()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_other_normalisers_divide_by_the_steps(tiny_llama, loss_type):
    model = tiny_llama(dtype=torch.float64)
    one, four = (micro_batch_loss(model, batch(old=True, loss=TrlLoss(loss_type=loss_type, current_gradient_accumulation_steps=n)), config("chunked")).item() for n in (1, 4))
    assert four == pytest.approx(one / 4)


def test_gradients_of_several_micro_batches_add_up(tiny_llama):
    """Each is announced right before its forward; one without gradient adds nothing."""
    model = tiny_llama(dtype=torch.float64)
    flat = batch(seed=3)
    flat = replace(flat, advantages=flat.advantages * 0)
    update, told = [batch(seed=1), flat, batch(seed=2)], []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda *_: told.append("forward"))
    together = gradients(model, update, config("chunked"), before=told.append)
    hook.remove()
    assert [told.index(mb) for mb in update] == [0, 2, 4]
    assert told[1::2] == ["forward"] * 3
    parts = [gradients(model, [mb], config("chunked")) for mb in update]
    assert not any(grad.any() for grad in parts[1].values())
    assert relative_error(together, {name: sum(part[name] for part in parts) for name in together}) <= 1e-15


def test_gradients_leave_the_model_as_it_was(tiny_llama):
    model = tiny_llama()
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    first = gradients(model, [batch()], GrpoConfig())
    assert model.lm_head.weight.grad is kept
    assert model.model.norm.weight.grad is None
    second = gradients(model, [batch()], GrpoConfig())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_relative_error():
    a = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([0.0])}
    assert relative_error(a, a) == 0
    assert relative_error({"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([0.5])}, a) == pytest.approx(0.1)
    with pytest.raises(ProfileError, match="one set only"):
        relative_error({"x": a["x"]}, a)
    with pytest.raises(ProfileError, match="zero"):
        relative_error(a, {k: v * 0 for k, v in a.items()})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": "fused"}, "fused"),
        ({"chunk_tokens": 0}, "at least 1"),
    ],
)
def test_bad_config(changes, words):
    with pytest.raises(UsageError, match=words):
        GrpoConfig(**changes)


def test_a_head_that_is_not_linear_is_refused(tiny_llama):
    model = tiny_llama()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UsageError, match="LM head"):
        micro_batch_loss(model, batch(), GrpoConfig())


def test_norms_take_no_copy_in_float64() -> None:
    """In parts, contiguous or not, and exact to float64's rounding whatever the dtype."""
    one, other = (torch.randn(3000, 2500, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16) for seed in (0, 1))
    assert squared_norm(one.t()) == pytest.approx(float(one.double().square().sum()), rel=1e-12)
    assert squared_distance(one, other) == pytest.approx(float((one.double() - other.double()).square().sum()), rel=1e-12)
    with patch("hilore_cli.norms.PART_NUMEL", 2**16):
        assert squared_distance(one, other) == pytest.approx(float((one.double() - other.double()).square().sum()), rel=1e-12)
        assert trace_memory(lambda: squared_distance(one, other)).peak_bytes < 8 * 4 * 2**16
