"""One GRPO actor update, as a trainer does it: micro-batches, the recorded loss, backward, clipping, AdamW.

    optimizer = make_optimizer(model, config)
    grad_norm = actor_update(model, optimizer, micro_batches, config)

Whatever the loss, its gradient is that of sum c * logp with the exposure c = dL/dlogp held fixed (exposure/): so that is what
backward is called on, and every loss of every trainer is the same step here.

The LM head is a part of the step with its own memory, so it comes in three kinds, equal in gradients
(N loss tokens, V vocabulary, n = `chunk_tokens`):

    full       logits [N,V] and their gradient, plain autograd
    chunked    logits [n,V] at a time, computed again in backward
    one-pass   logits [n,V] at a time, once: where a token's exposure needs only its own log-probability, the gradients of
               the hidden states and of the head's weight are taken during forward and scaled in backward

Only positions that predict a loss token are projected. Not here: entropy bonus and router auxiliary terms, whose gradient
does not come through log-probabilities.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hilore_cli import exposure as losses
from hilore_cli.batches import MicroBatch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import LossInputs, Readiness
from hilore_cli.models import text_decoder
from hilore_cli.norms import squared_distance, squared_norm

HEADS = ("full", "chunked", "one-pass")
REPEATABLE_CUBLAS = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG under which torch's deterministic mode takes matrix products."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The step but for the loss, which a micro-batch brings along."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    head: str = "chunked"
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise UsageError(f"head {self.head!r}: unknown; use one of {', '.join(HEADS)}")
        if self.chunk_tokens < 1:
            raise UsageError(f"chunk_tokens {self.chunk_tokens}: must be at least 1")


def micro_batch_loss(model: nn.Module, micro_batch: MicroBatch, config: GrpoConfig) -> torch.Tensor:
    """Return a scalar whose gradient is that of the micro-batch's loss; its value is sum c * logp, not the loss's."""
    mb = micro_batch.to(next(model.parameters()).device)
    head, hidden, ids = _predictions(model, mb, config)
    if config.head == "one-pass":
        exposure_of = _exposure_by_token(mb, torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        return _OnePassLoss.apply(hidden, head.weight, head.bias, head, ids, exposure_of)
    logps = _logps(head, hidden, ids, config)
    with torch.no_grad():
        entropies = head.entropies(hidden) if losses.needs_entropies(mb.loss) else None
        c = mb.exposure(logps=logps.detach(), entropies=entropies)[mb.loss_mask.bool()]
    return (c * logps).sum()


def token_logps(model: nn.Module, micro_batch: MicroBatch, config: GrpoConfig) -> torch.Tensor:
    """(N,) log-probabilities of the loss tokens, in row-major order, with gradient unless that is off."""
    return _logps(*_predictions(model, micro_batch.to(next(model.parameters()).device), config), config)


def _predictions(model: nn.Module, mb: MicroBatch, config: GrpoConfig) -> tuple[LmHead, torch.Tensor, torch.Tensor]:
    """The head, the hidden states (N,H) that predict the loss tokens, and the tokens (N,)."""
    hidden = text_decoder(model)(**mb.model_inputs(), use_cache=False).last_hidden_state  # (B,S,H), or (1,N,H) packed
    return _lm_head(model, config, temperature=mb.loss.temperature), hidden.flatten(0, 1).index_select(0, mb.predicting_positions()), mb.input_ids[mb.loss_mask.bool()]


def _logps(head: LmHead, hidden: torch.Tensor, ids: torch.Tensor, config: GrpoConfig) -> torch.Tensor:
    if config.head == "full":
        return _token_logps(head.logits(hidden), ids)
    return _ChunkedLogps.apply(hidden, head.weight, head.bias, head, ids)


def make_optimizer(model: nn.Module, config: GrpoConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused: the Hugging Face trainers' default, and it makes no copies."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


BeforeForward = Callable[[MicroBatch], object]
"""Called with each micro-batch before its forward: where a trainer tells an attached plan what is coming."""


def actor_update(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch], config: GrpoConfig, *, before: BeforeForward | None = None) -> float:
    """One optimizer step over all micro-batches; returns the gradient's norm before clipping.

    Gradients are zeroed, not freed: they are there during the next update from its first micro-batch on, as they are
    in every micro-batch but the first of an accumulated update. So the peak is that of the steady state.
    """
    _accumulate(model, micro_batches, config, before)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return float(grad_norm)


def gradients(model: nn.Module, micro_batches: Sequence[MicroBatch], config: GrpoConfig, *, before: BeforeForward | None = None, deterministic: bool = False) -> dict[str, torch.Tensor]:
    """The gradient of all micro-batches together, by parameter name; the `.grad` of every parameter is left as it was.

    A trainable parameter that the loss does not reach (an expert without tokens) has a gradient of zeros. Dropout drops the same values
    each time, so that gradients of two methods can be compared. `deterministic`: backward
    runs in torch's deterministic mode. Forward does not: the mode is guarded, so that compiled layers would be compiled once more.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name: parameter.grad for name, parameter in trainable.items()}
    try:
        for parameter in trainable.values():
            parameter.grad = None
        with _same_dropout(next(model.parameters()).device):
            _accumulate(model, micro_batches, config, before, deterministic=deterministic)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable.items()}
    finally:
        for name, parameter in trainable.items():
            parameter.grad = kept[name]


def _accumulate(model: nn.Module, micro_batches: Sequence[MicroBatch], config: GrpoConfig, before: BeforeForward | None, *, deterministic: bool = False) -> None:
    for micro_batch in micro_batches:
        if before is not None:
            before(micro_batch)
        loss = micro_batch_loss(model, micro_batch, config)
        with kernel_mode(deterministic=True) if deterministic else nullcontext():
            loss.backward()
        del loss  # else its graph, and with it any input that requires a gradient, lives through the next forward


@contextmanager
def _same_dropout(device: torch.device) -> Iterator[None]:
    """Context in which random operators draw what they draw each time; the generators are left as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def can_repeat(device: torch.device) -> bool:
    """Whether `deterministic` makes gradients on a GPU the same each time: torch asks for CUBLAS_WORKSPACE_CONFIG, which the command line sets."""
    return device.type == "cuda" and (torch.version.hip is not None or os.environ.get("CUBLAS_WORKSPACE_CONFIG") in REPEATABLE_CUBLAS)


@contextmanager
def kernel_mode(*, deterministic: bool) -> Iterator[None]:
    """Context with torch's deterministic mode on or off. On, a GPU adds up in the same order each time, which the backward of attention and of
    indexing does not by itself; and torch chooses among attention's kernels anew, so that what is recomputed needs the mode of the forward.
    """
    mode, warn_only, fill = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def relative_error(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """||g - ref|| / ||ref|| over all parameters together, in float64. NaN in `grads` gives NaN."""
    if differing := sorted(set(grads) ^ set(reference)):
        raise ProfileError(f"gradients: {differing[0]} is in one set only; compare two gradients of the same model")
    difference = sum(squared_distance(grads[name], ref) for name, ref in reference.items())
    norm = sum(map(squared_norm, reference.values()))
    if norm == 0:
        raise ProfileError(
            "gradients: the reference is zero, so no relative error exists; use a batch with mixed rewards"
        )
    return (difference / norm) ** 0.5


# --- exposure where the head has one chunk of tokens at a time


ExposureOf = Callable[[slice, torch.Tensor], torch.Tensor]
"""(span of the N loss tokens, their log-probabilities (n,)) -> c (n,)."""


def _exposure_by_token(mb: MicroBatch, dtype: torch.dtype) -> ExposureOf:
    """c of any span of loss tokens from their own log-probabilities. Raises UsageError where c needs whole rows."""
    inputs = mb.loss_inputs(dtype=dtype)
    counted = mb.loss_mask.bool()
    if losses.readiness(mb.loss, inputs) is Readiness.EXACT_BEFORE_FORWARD:
        known = losses.exposure(mb.loss, inputs, xp=torch)[counted]
        return lambda span, _: known[span]
    if not losses.is_token_local(mb.loss):
        raise UsageError(f"head one-pass: the {mb.loss.trainer} loss weighs a token by others of its row or micro-batch, so its gradient is not known token by token; use --head chunked")
    z = losses.normaliser(mb.loss, inputs, xp=torch)
    flat = {f.name: None if (x := getattr(inputs, f.name)) is None else x.expand_as(z)[counted] for f in fields(inputs)} | {"normaliser": z[counted]}

    def exposure_of(span: slice, logps: torch.Tensor) -> torch.Tensor:
        part = {name: None if x is None else x[span][None] for name, x in flat.items()}
        try:
            return losses.exposure(mb.loss, LossInputs(**part | {"logps": logps[None]}), xp=torch)[0]
        except UsageError as error:
            raise UsageError(f"head one-pass: {error}; use --head chunked") from error

    return exposure_of


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

    def entropies(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N,H) -> (N,) entropy of each position's distribution, a chunk of logits at a time."""
        logps = (torch.log_softmax(self.logits(hidden[span]), 1) for span in self.chunks(len(hidden)))
        return torch.cat([-(lp.exp() * lp).sum(1) for lp in logps])

    def chunks(self, count: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, count)) for start in range(0, count, self.chunk_tokens)]


def _lm_head(model: nn.Module, config: GrpoConfig, *, temperature: float) -> LmHead:
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
        temperature=temperature / scale,
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
            gradient.add(span, _raw_gradient_(raw, ids[span], lambda _, span=span: exposure[span], ctx.head)[2])
        return gradient.hidden, gradient.weight, gradient.bias, None, None


class _OnePassLoss(torch.autograd.Function):
    """sum c * logp; gradients are complete when forward returns, backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head: LmHead, ids, exposure_of: ExposureOf):
        gradient = _HeadGradient(head, hidden, ctx.needs_input_grad)
        loss = torch.zeros((), device=hidden.device)
        for span in head.chunks(len(ids)):
            logps, c, raw_gradient = _raw_gradient_(head.raw(hidden[span]), ids[span], lambda logps, span=span: exposure_of(span, logps), head)
            loss = loss + (c * logps).sum()
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
        return (*parts, None, None, None)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (n,), their exposure (n,) and the loss's gradient (n,V) with respect to `raw`, whose memory is taken over.

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
    c = exposure_of(logps)
    gradient = logits.sub_(total).exp_().mul_(-c[:, None])
    gradient.scatter_add_(1, ids[:, None], c[:, None].to(gradient.dtype))
    return logps, c, gradient.mul_(slope)
