"""The actor update: heads against each other and against a loss written on the whole logits, and the update itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.grpo import GrpoConfig, actor_update, gradients, make_optimizer, micro_batch_loss, relative_error

HEADS = ("chunked", "one-pass")


def batch(*, old: bool = False, seed: int = 1, vocab_size: int = 97):
    mb = synthetic_micro_batch(
        vocab_size=vocab_size, rows=8, prompt_tokens=7, completion_tokens=11, group_size=4, seed=seed
    )
    if not old:
        return mb
    rng = torch.Generator().manual_seed(seed)
    # the models are random, so log-probabilities are near -log(V); ratios land on both sides of the clip range
    noise = torch.randn(mb.completion_mask.shape, generator=rng) * 0.4
    return replace(mb, old_logps=(-torch.log(torch.tensor(float(vocab_size))) + noise) * mb.completion_mask)


def config(head: str, **changes) -> GrpoConfig:
    return GrpoConfig(head=head, chunk_tokens=7, **changes)


def whole_logits_loss(model, mb, cfg):
    """Independent: the model's own forward, all logits, masks by multiplication."""
    logits = model(input_ids=mb.input_ids, attention_mask=mb.attention_mask, use_cache=False).logits
    logits = logits[:, mb.prompt_ids.shape[1] - 1 : -1] / cfg.temperature
    logps = torch.log_softmax(logits, -1).gather(2, mb.completion_ids[..., None]).squeeze(2)
    old = logps.detach() if mb.old_logps is None else mb.old_logps
    ratio = torch.exp(logps - old)
    advantages = mb.advantages[:, None]
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - cfg.epsilon_low, 1 + cfg.epsilon_high) * advantages)
    return (per_token * mb.completion_mask).sum() / mb.loss_tokens


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
    mb, cfg = batch(old=old), config(head, temperature=0.8)
    loss = whole_logits_loss(model, mb, cfg)
    loss.backward()
    reference = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    ours = micro_batch_loss(model, mb, cfg)
    # bounds of fp32: transformers computes softcaps and norms partly in fp32 even in a float64 model
    assert abs(ours.item() - loss.item()) <= 3e-6
    assert relative_error(gradients(model, mb, cfg), reference) <= 3e-6


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("dtype", "loss_bound", "bound"), [(torch.float64, 1e-14, 1e-12), (torch.float32, 1e-6, 1e-5)])
def test_heads_agree(tiny_llama, head, tied, old, dtype, loss_bound, bound):
    model = tiny_llama(dtype=dtype, tie_word_embeddings=tied)
    mb = batch(old=old)
    full, other = (micro_batch_loss(model, mb, config(h)).item() for h in ("full", head))
    assert abs(full - other) <= loss_bound
    error = relative_error(gradients(model, mb, config(head)), gradients(model, mb, config("full")))
    assert error <= bound


@pytest.mark.parametrize("head", HEADS)
def test_heads_agree_in_bf16(tiny_llama, head):
    """No further from float64 than the full head, but for the rounding of the weight gradient between chunks."""
    exact = gradients(tiny_llama(dtype=torch.float64), batch(), config("full"))
    model = tiny_llama(dtype=torch.bfloat16)
    full = relative_error(gradients(model, batch(), config("full")), exact)
    assert full > 1e-3
    assert relative_error(gradients(model, batch(), config(head)), exact) <= 1.5 * full


@pytest.mark.parametrize("head", ["full", *HEADS])
def test_frozen_head(tiny_llama, head):
    model = tiny_llama(tie_word_embeddings=False)
    model.lm_head.requires_grad_(False)
    grads = gradients(model, batch(), config(head))
    assert "lm_head.weight" not in grads
    assert relative_error(grads, gradients(model, batch(), config("full"))) <= 1e-5


@pytest.mark.parametrize("head", ["full", *HEADS])
def test_upstream_scalar_and_accumulation(tiny_llama, head):
    model = tiny_llama(dtype=torch.float64)
    once = gradients(model, batch(), config(head))
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
    assert sizes["full"] == int(mb.completion_mask.sum()) * vocab_size
    assert sizes[head] == vocab_size * 8  # the weight's gradient; a chunk of logits is half of it


def test_projects_only_loss_tokens_and_only_once(tiny_llama):
    """Matmuls with the head's weight: full 1 + 2, chunked 1 + 3 a chunk, one-pass 3 a chunk."""
    model = tiny_llama(vocab_size=501)
    mb = batch(vocab_size=501)
    tokens = int(mb.completion_mask.sum())
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
    mbs = [replace(mb, loss_tokens=sum(int(m.completion_mask.sum()) for m in mbs)) for mb in mbs]
    optimizer = make_optimizer(ours, cfg)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        result = actor_update(ours, optimizer, mbs, cfg)
        for mb in mbs:
            whole_logits_loss(plain, mb, cfg).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), cfg.max_grad_norm)
        reference.step()
        reference.zero_grad()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert norm > cfg.max_grad_norm
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7), name
        assert a.grad is not None
        assert not a.grad.any()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_other_normalisers_divide_by_the_steps(tiny_llama, loss_type):
    model = tiny_llama(dtype=torch.float64)
    mb = batch(old=True)
    cfg = config("chunked", loss_type=loss_type)
    one, four = (micro_batch_loss(model, mb, cfg, accumulation_steps=n).item() for n in (1, 4))
    assert four == pytest.approx(one / 4)


def test_gradients_leave_the_model_as_it_was(tiny_llama):
    model = tiny_llama()
    kept = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = kept
    first = gradients(model, batch(), GrpoConfig())
    assert model.lm_head.weight.grad is kept
    assert model.model.norm.weight.grad is None
    second = gradients(model, batch(), GrpoConfig())
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
        ({"loss_type": "ppo"}, "ppo"),
        ({"temperature": 0.0}, "above 0"),
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
