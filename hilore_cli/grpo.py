"""One GRPO actor update, as a trainer does it: micro-batches, clipped surrogate, backward, clipping, AdamW.

    optimizer = make_optimizer(model, config)
    result = actor_update(model, optimizer, [micro_batch], config)

The LM head is a part of the step with its own memory, so it comes in three kinds, equal in loss and gradients
(N loss tokens, V vocabulary, n = `chunk_tokens`):

    full       logits [N,V] and their gradient, plain autograd
    chunked    logits [n,V] at a time, computed again in backward
    one-pass   logits [n,V] at a time, once: a token's exposure needs only its own log-probability, so the gradients of
               the hidden states and of the head's weight are taken during forward and scaled in backward

Only positions that predict a loss token are projected. Not here: KL, entropy and auxiliary terms, sequence-level ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hilore_cli.batches import MicroBatch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import LOSS_TYPES, normaliser, surrogate, surrogate_slope
from hilore_cli.models import text_decoder

HEADS = ("full", "chunked", "one-pass")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """What the step computes. The defaults are TRL's, but for the head (TRL's own is like `chunked`)."""

    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    temperature: float = 1.0  # logits are divided by it, as they were when the completions were sampled
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    head: str = "chunked"
    chunk_tokens: int = 256
    max_completion_tokens: int | None = None  # dr_grpo's constant; None: the padded completion width

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise UsageError(f"loss type {self.loss_type!r}: unknown; use one of {', '.join(LOSS_TYPES)}")
        if self.head not in HEADS:
            raise UsageError(f"head {self.head!r}: unknown; use one of {', '.join(HEADS)}")
        if not self.temperature > 0:
            raise UsageError(f"temperature {self.temperature}: must be above 0")
        if self.chunk_tokens < 1:
            raise UsageError(f"chunk_tokens {self.chunk_tokens}: must be at least 1")


def config_of(micro_batch: MicroBatch, *, head: str) -> GrpoConfig:
    """The step that a recorded micro-batch belongs to: the temperature its completions were sampled at, and a loss head."""
    return GrpoConfig(head=head, temperature=float(micro_batch.meta.get("temperature", 1.0)))


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """`loss`: summed over the micro-batches (about 0 on-policy, by construction). `grad_norm`: before clipping."""

    loss: float
    grad_norm: float


def micro_batch_loss(
    model: nn.Module, micro_batch: MicroBatch, config: GrpoConfig, *, accumulation_steps: int = 1
) -> torch.Tensor:
    """Return the loss of one micro-batch, a scalar to call backward on.

    `accumulation_steps`: micro-batches per update; only dapo does without it (its normaliser is `loss_tokens`).
    As in TRL no position ids are passed: positions count the left padding.
    """
    head = _lm_head(model, config)
    mb = micro_batch.to(head.weight.device)
    hidden = text_decoder(model)(
        input_ids=mb.input_ids, attention_mask=mb.attention_mask, use_cache=False
    ).last_hidden_state  # (B,P+T,H)
    width = hidden.shape[1]
    prompt_tokens = mb.prompt_ids.shape[1]
    row, column = mb.completion_mask.nonzero(as_tuple=True)  # N loss tokens
    # the hidden state at position p predicts the token at p + 1
    hidden = hidden.flatten(0, 1).index_select(0, row * width + prompt_tokens + column - 1)  # (N,H)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    z = normaliser(
        mb.completion_mask.to(exact),
        loss_type=config.loss_type,
        loss_tokens=mb.loss_tokens,
        accumulation_steps=accumulation_steps,
        max_completion_tokens=config.max_completion_tokens,
    )[row, column]
    tokens = LossTokens(
        ids=mb.completion_ids[row, column],
        z=z,
        advantages=mb.advantages.to(exact)[row],
        old_logps=None if mb.old_logps is None else mb.old_logps.to(exact)[row, column],
        epsilon_low=config.epsilon_low,
        epsilon_high=config.epsilon_high,
    )
    if config.head == "one-pass":
        return _OnePassLoss.apply(hidden, head.weight, head.bias, head, tokens)
    if config.head == "chunked":
        return tokens.loss(_ChunkedLogps.apply(hidden, head.weight, head.bias, head, tokens.ids))
    return tokens.loss(_token_logps(head.logits(hidden), tokens.ids))


def make_optimizer(model: nn.Module, config: GrpoConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused: the Hugging Face trainers' default, and it makes no copies."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def actor_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch], config: GrpoConfig
) -> UpdateResult:
    """One optimizer step over all micro-batches.

    Gradients are zeroed, not freed: they are there during the next update from its first micro-batch on, as they are
    in every micro-batch but the first of an accumulated update. So the peak is that of the steady state.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for micro_batch in micro_batches:
        part = micro_batch_loss(model, micro_batch, config, accumulation_steps=len(micro_batches))
        part.backward()
        loss += part.detach().to("cpu", torch.float64)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return UpdateResult(loss=float(loss), grad_norm=float(grad_norm))


def gradients(model: nn.Module, micro_batch: MicroBatch, config: GrpoConfig) -> dict[str, torch.Tensor]:
    """The gradient of one micro-batch, by parameter name; the `.grad` of every parameter is left as it was.

    A trainable parameter that the loss does not reach (an expert without tokens) has a gradient of zeros.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.grad for name, parameter in trainable.items()}
    try:
        for parameter in trainable.values():
            parameter.grad = None
        micro_batch_loss(model, micro_batch, config).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable.items()}
    finally:
        for name, parameter in trainable.items():
            parameter.grad = before[name]


def relative_error(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """||g - ref|| / ||ref|| over all parameters together, in float64. NaN in `grads` gives NaN."""
    if differing := sorted(set(grads) ^ set(reference)):
        raise ProfileError(f"gradients: {differing[0]} is in one set only; compare two gradients of the same model")
    difference = sum(float((grads[name].double() - ref.double()).square().sum()) for name, ref in reference.items())
    norm = sum(float(ref.double().square().sum()) for ref in reference.values())
    if norm == 0:
        raise ProfileError(
            "gradients: the reference is zero, so no relative error exists; use a batch with mixed rewards"
        )
    return (difference / norm) ** 0.5


# --- the loss over N selected tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTokens:
    """The N tokens that the loss counts, flat: id, normaliser and advantage of each. `old_logps` None: on-policy."""

    ids: torch.Tensor
    z: torch.Tensor
    advantages: torch.Tensor
    old_logps: torch.Tensor | None
    epsilon_low: float
    epsilon_high: float

    def chunk(self, span: slice) -> LossTokens:
        return LossTokens(
            ids=self.ids[span],
            z=self.z[span],
            advantages=self.advantages[span],
            old_logps=None if self.old_logps is None else self.old_logps[span],
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )

    def ratio(self, logps: torch.Tensor) -> torch.Tensor:
        return torch.exp(logps - (logps.detach() if self.old_logps is None else self.old_logps))

    def loss(self, logps: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens of normaliser times clipped surrogate; differentiable in `logps` (N,)."""
        clip = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return (self.z * surrogate(self.ratio(logps), self.advantages, xp=torch, **clip)).sum()

    def exposure(self, logps: torch.Tensor) -> torch.Tensor:
        """c = dL/dlogp (N,)."""
        clip = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return self.z * surrogate_slope(self.ratio(logps), self.advantages, **clip)


# --- the head


@dataclass(frozen=True, kw_only=True, eq=False)
class LmHead:
    """logits = softcap * tanh(raw / softcap) / temperature, raw = hidden @ weight.T + bias, in fp32 from `raw` on."""

    weight: torch.Tensor  # (V,H)
    bias: torch.Tensor | None  # (V,)
    softcap: float | None
    temperature: float
    chunk_tokens: int

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n,H) -> (n,V), projected in the weight's dtype as the model does, then at least fp32."""
        raw = F.linear(hidden, self.weight, self.bias)
        return raw if raw.dtype == torch.float64 else raw.float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raw = self.raw(hidden)
        return (raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)) / self.temperature

    def chunks(self, count: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, count)) for start in range(0, count, self.chunk_tokens)]


def _lm_head(model: nn.Module, config: GrpoConfig) -> LmHead:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UsageError(
            f"{type(model).__name__}: its LM head is a {type(head).__name__}, not a plain Linear; leave the head out of LoRA and quantisation"
        )
    text = model.config.get_text_config().to_dict()
    # Cohere multiplies its logits, Granite divides them: both are a temperature
    scale = (text.get("logit_scale") or 1.0) / (text.get("logits_scaling") or 1.0)
    return LmHead(
        weight=head.weight,
        bias=head.bias,
        softcap=text.get("final_logit_softcapping"),
        temperature=config.temperature / scale,
        chunk_tokens=config.chunk_tokens,
    )


def _token_logps(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """(n,V), (n,) -> (n,)"""
    return logits.gather(1, ids[:, None]).squeeze(1) - logits.logsumexp(1)


class _ChunkedLogps(torch.autograd.Function):
    """Log-probability of each token; at most [chunk_tokens,V] logits at once, in forward and in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head: LmHead, ids):
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, ids)
        spans = head.chunks(len(ids))
        return torch.cat([_token_logps(head.logits(hidden[span]), ids[span]) for span in spans])

    @staticmethod
    @once_differentiable
    def backward(ctx, exposure):
        hidden, _, _, ids = ctx.saved_tensors
        gradient = _HeadGradient(ctx.head, hidden, ctx.needs_input_grad)
        for span in ctx.head.chunks(len(ids)):
            raw = ctx.head.raw(hidden[span])
            gradient.add(span, _raw_gradient_(raw, ids[span], lambda _, span=span: exposure[span], ctx.head)[1])
        return gradient.hidden, gradient.weight, gradient.bias, None, None


class _OnePassLoss(torch.autograd.Function):
    """The loss itself; gradients are complete when forward returns, backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head: LmHead, tokens: LossTokens):
        gradient = _HeadGradient(head, hidden, ctx.needs_input_grad)
        loss = torch.zeros((), dtype=tokens.z.dtype, device=hidden.device)
        for span in head.chunks(len(tokens.ids)):
            chunk = tokens.chunk(span)
            logps, raw_gradient = _raw_gradient_(head.raw(hidden[span]), chunk.ids, chunk.exposure, head)
            loss += chunk.loss(logps)
            gradient.add(span, raw_gradient)
        ctx.gradient = gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("one-pass head: backward twice through one forward; use --head chunked for that")
        parts = (gradient.hidden, gradient.weight, gradient.bias)
        if float(upstream) != 1.0:
            parts = tuple(None if part is None else part.mul_(upstream) for part in parts)
        return (*parts, None, None)


class _HeadGradient:
    """Gradients of hidden states, weight and bias, summed in place over chunks; None where not asked for."""

    def __init__(self, head: LmHead, hidden: torch.Tensor, needs: Sequence[bool]) -> None:
        self._head, self._input = head, hidden
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(head.weight) if needs[1] else None
        self.bias = torch.zeros_like(head.bias) if head.bias is not None and needs[2] else None

    def add(self, span: slice, raw_gradient: torch.Tensor) -> None:
        raw_gradient = raw_gradient.to(self._head.weight.dtype)  # (n,V)
        if self.hidden is not None:
            torch.mm(raw_gradient, self._head.weight, out=self.hidden[span])
        if self.weight is not None:
            self.weight.addmm_(raw_gradient.T, self._input[span])
        if self.bias is not None:
            self.bias += raw_gradient.sum(0)


def _raw_gradient_(
    raw: torch.Tensor, ids: torch.Tensor, exposure_of, head: LmHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (n,) and the loss's gradient (n,V) with respect to `raw`, whose memory is taken over.

    d logp[target] / d logits = onehot(target) - softmax(logits).
    """
    slope = 1.0 / head.temperature
    if head.softcap is not None:
        raw = raw.div_(head.softcap).tanh_()
        slope = (1 - raw.square()).div_(head.temperature)
        raw = raw.mul_(head.softcap)
    logits = raw.div_(head.temperature)
    target = logits.gather(1, ids[:, None])
    total = logits.logsumexp(1, keepdim=True)
    logps = (target - total).squeeze(1)
    c = exposure_of(logps)[:, None]
    gradient = logits.sub_(total).exp_().mul_(-c)
    gradient.scatter_add_(1, ids[:, None], c.to(gradient.dtype))
    return logps, gradient.mul_(slope)
