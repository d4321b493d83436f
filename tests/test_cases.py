"""The failures that users of others' checkpointing and compression reported, each with its id, inside a decoder layer under a plan.

A toy module takes the place of the first layer's MLP; gradients are compared with the plain run's, bitwise. Ids that are not here are
tests of the part that owns them: nu01 test_risk.py and test_codecs.py; nu02, nu05 test_codecs.py; hk04, mm03 test_codec_ops.py; hk08, lc03, ag01, mm02 test_runtime.py; mm01 test_timeline.py; mm05,
sv03 test_planner.py; sv05 test_ilp.py; sh01 also test_distributed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from conftest import TINY, build_tiny
from steps_for_tests import attach_each, attach_one, capture, differing, make_ids, step_gradients, step_loss
from torch import Tensor, nn

from hilore_cli.batches import group_advantages, require_gradient, synthetic_micro_batch
from hilore_cli.errors import CaptureError, ProfileError, UsageError
from hilore_cli.schema import Pattern

HIDDEN = TINY["hidden_size"]
STORE, RECOMPUTE = Pattern(default="store"), Pattern()
EXACT = pytest.mark.parametrize("pattern", [STORE, RECOMPUTE], ids=["store", "recompute"])
BATCH = make_ids(2, 12, padded=True)


class Linear2(nn.Module):
    """Two products around what a case does between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x @ self.a) @ self.b


def model_with(mlp: nn.Module, *, family: str = "llama", **overrides: object) -> nn.Module:
    """A tiny model whose first layer's MLP is the case's module; the second layer is as ever, and stands behind it in backward."""
    model = build_tiny(family, **overrides)
    model.model.layers[0].mlp = mlp
    return model.train()


def gradients_under(model: nn.Module, pattern: Pattern, *, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    with attach_one(model, pattern) as handle:
        found = step_gradients(model, *BATCH, autocast=autocast)
        assert handle.calls["p"] == 2, "the plan really ran"
    return found


# ------------------------------------------------------------------------------------------------------------ in-place changes


class ChangedAfterUse(Linear2):
    """exp keeps its result for backward, which is then changed in place."""

    def between(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 1
        y.mul_(2)
        return z


@EXACT
def test_hk01_a_saved_value_that_is_changed_in_place_is_an_error_that_names_the_layer(pattern: Pattern) -> None:
    model = model_with(ChangedAfterUse())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_gradients(model, *BATCH)
    with attach_one(model, pattern), pytest.raises(CaptureError, match=r"layers\.0 .*modified by an inplace operation.*or detach the plan"):
        step_gradients(model, *BATCH)


class TimesBuffer(Linear2):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rollout", torch.full((HIDDEN,), 2.0))

    def between(self, x: Tensor) -> Tensor:
        return x * self.rollout


@pytest.mark.parametrize("pattern", [STORE, RECOMPUTE, Pattern(default="store", actions={"mlp.mm": "compress:bf16"})], ids=["store", "recompute", "compress"])
def test_hk01_a_buffer_reused_before_backward_is_an_error(pattern: Pattern) -> None:
    model = model_with(TimesBuffer())
    with attach_each(model, [pattern, STORE]):
        loss = step_loss(model, *BATCH)
        model.model.layers[0].mlp.rollout.add_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Transposed(Linear2):
    """One square value and its transpose, in the same memory, are both read by backward."""

    def between(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return y @ (y.transpose(-1, -2) @ y)


@pytest.mark.parametrize(("codec", "limit"), [("bf16", 0.004), ("int8-g32", 0.01)])
def test_hk04_a_compressed_value_and_its_transpose_are_not_mixed_up(codec: str, limit: float) -> None:
    model, square = model_with(Transposed()), make_ids(1, HIDDEN)
    expected = step_gradients(model, *square)
    with attach_each(model, [Pattern(default="store", actions={"mlp.tanh": f"compress:{codec}"}), STORE]):
        found = step_gradients(model, *square)
    changed = differing(found, expected)
    assert "model.layers.0.mlp.a" in changed
    assert all((found[name] - expected[name]).norm() <= limit * expected[name].norm() for name in changed)


class InPlaceInside(Linear2):
    """A stored product is overwritten, a dropout works in place, a residual is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3, inplace=True)

    def between(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.selu_(x) ** 2)
        y += x
        return y


@EXACT
def test_sp02_in_place_changes_inside_a_layer(pattern: Pattern) -> None:
    model = model_with(InPlaceInside())
    assert differing(gradients_under(model, pattern), step_gradients(model, *BATCH)) == []


# ------------------------------------------------------------------------------------------------------------------------ state


class Counter(Linear2):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(HIDDEN, dtype=torch.int64))

    def between(self, x: Tensor) -> Tensor:
        self.load += torch.bincount(x.argmax(-1).flatten(), minlength=HIDDEN)
        return x.tanh()


class Normed(Linear2):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2).tanh()


class FirstTime(Linear2):
    """An attribute that is None until the first forward."""

    seen: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.ones(())
        return x.tanh()


@EXACT
@pytest.mark.parametrize("module", [Counter, Normed])
def test_st01_a_layer_that_writes_into_buffers_is_refused_by_name(module: type[Linear2], pattern: Pattern) -> None:
    model = model_with(module())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with attach_one(model, pattern), pytest.raises(CaptureError, match=r"layers\.0.*writes into a buffer.*train this model without a plan"):
        step_loss(model, *BATCH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was counted"


@EXACT
def test_st01_an_attribute_set_at_the_first_forward_is_set_once(pattern: Pattern) -> None:
    plain, model = model_with(FirstTime()), model_with(FirstTime())
    expected = step_gradients(plain, *BATCH)
    assert differing(gradients_under(model, pattern), expected) == []
    assert torch.equal(model.model.layers[0].mlp.seen, plain.model.layers[0].mlp.seen)


# ---------------------------------------------------------------------------------------------------------------------- capture


class Branching(Linear2):
    def between(self, x: Tensor) -> Tensor:
        return x.tanh() if bool((x > -1e9).all()) else x


def test_tr01_a_branch_on_values_is_one_message_that_names_the_layer() -> None:
    model = model_with(Branching())
    with attach_one(model, RECOMPUTE), pytest.raises(CaptureError, match=r"layers\.0 cannot be captured whole: .+") as caught:
        step_loss(model, *BATCH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tr01_current_models_are_captured(family: str) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model = build_tiny(family, **(moe if family == "qwen3_moe" else {}))
    assert any(row.matmul for row in capture(model, *BATCH).layer_class.nodes)


# ------------------------------------------------------------------------------------------------------- functions of the user's own


class TwoReads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (_, y), (x, _) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (1 - y * y) + 0 * x


class OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.x = x.clone()
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class Applied(Linear2):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def between(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@EXACT
@pytest.mark.parametrize("function", [pytest.param(TwoReads, id="hk06_saved_tensors_read_twice"), pytest.param(OnContext, id="hk10_tensor_kept_on_ctx")])
def test_functions_of_the_users_own(function: type[torch.autograd.Function], pattern: Pattern) -> None:
    model = model_with(Applied(function))
    assert differing(gradients_under(model, pattern), step_gradients(model, *BATCH)) == []


@pytest.mark.parametrize("function", [TwoReads, OnContext], ids=["hk06", "hk10"])
def test_hk06_hk10_what_they_keep_is_seen_and_can_be_compressed(function: type[torch.autograd.Function]) -> None:
    """Kept values are nodes of the graph, on ctx or not: nothing is saved that the profile cannot see."""
    model = model_with(Applied(function))
    layer_class = capture(model, *BATCH).layer_class
    product = next(row for row in layer_class.nodes if row.unit and row.unit.startswith("mlp.") and row.matmul)
    with attach_each(model, [Pattern(actions={product.unit: "compress:int8-g32"}), RECOMPUTE]):
        found = step_gradients(model, *BATCH)
    expected = step_gradients(model, *BATCH)
    assert differing(found, expected)
    assert all((found[name] - exact).norm() <= 0.05 * exact.norm() + 1e-6 for name, exact in expected.items())


class GradientInForward(torch.autograd.Function):
    """A loss that is fused with its own gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            ctx.save_for_backward(*torch.autograd.grad(y.tanh().square().sum(), y))
        return x.tanh().square()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return gradient * kept


def test_ag01_a_gradient_taken_in_forward_is_refused_or_left_to_checkpointing() -> None:
    model = model_with(Applied(GradientInForward))
    expected = step_gradients(model, *BATCH)
    with attach_one(model, STORE), pytest.raises(CaptureError, match=r"layers\.0 cannot be captured whole.*torch\.autograd\.grad.*profile this model as it is now.*or detach"):
        step_gradients(model, *BATCH)
    with attach_one(model, STORE) as handle:
        handle.leave_to_checkpoint("model.layers.0")
        assert differing(step_gradients(model, *BATCH), expected) == []


@pytest.mark.parametrize("pattern", [STORE, RECOMPUTE, Pattern(default="store", actions={"mlp.up_proj.mm": "compress:int8"})], ids=["store", "recompute", "compress"])
def test_ag01_a_backward_that_is_to_be_differentiated_is_refused_before_it_begins(pattern: Pattern) -> None:
    model = build_tiny("llama")
    with attach_one(model, pattern):
        expected = step_gradients(model, *BATCH)
        with pytest.raises(UsageError, match=r"create_graph=True through model\.layers\.1.*detach the plan"):
            torch.autograd.grad(step_loss(model, *BATCH), list(model.parameters()), create_graph=True)
        assert differing(step_gradients(model, *BATCH), expected) == []
        found = torch.autograd.grad(step_loss(model, *BATCH), list(model.parameters()))
    assert differing(dict(zip(expected, found, strict=True)), expected) == []


# ---------------------------------------------------------------------------------------------------------------------- routing


@EXACT
def test_mo01_tied_routers_keep_their_choice(pattern: Pattern) -> None:
    """All scores equal: whatever breaks the tie, a replay must not break it again."""
    moe = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model = build_tiny("qwen3_moe", **moe)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    assert differing(gradients_under(model, pattern), step_gradients(model, *BATCH)) == []


REPLAYS = torch.zeros(1, dtype=torch.int64)


@torch.library.custom_op("hilore_cases::unsteady_scores", mutates_args=())
def unsteady_scores(x: Tensor) -> Tensor:
    """Router logits that come out differently at every call: a product that is not deterministic."""
    REPLAYS.add_(1)
    return (x.detach() * 0).sum(-1, keepdim=True) + torch.arange(4.0) * (1 if REPLAYS.item() % 2 else -1)


@unsteady_scores.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 4))


class Routed(Linear2):
    """Top-1 of four experts (scales), chosen by scores that flip when they are computed again: the shapes do not."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def between(self, x: Tensor) -> Tensor:
        chosen = unsteady_scores(x).topk(1, dim=-1).indices[..., 0]
        return x.tanh() * self.scales[chosen][..., None]


@EXACT
def test_mo01_a_router_that_would_choose_otherwise_when_replayed(pattern: Pattern) -> None:
    model = model_with(Routed())
    REPLAYS.zero_()
    expected = step_gradients(model, *BATCH)
    with attach_one(model, pattern):
        step_loss(model, *BATCH)  # compiled
        REPLAYS.zero_()
        found = step_gradients(model, *BATCH)
    assert REPLAYS.item() == 1, "the scores were not computed again"
    assert differing(found, expected) == []


# -------------------------------------------------------------------------------------------------------------------- autocast


class Shared(Linear2):
    """One weight in two products of one autocast region."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).tanh() @ self.b + (x.sin() @ self.a).tanh() @ self.b


class NestedOff(Linear2):
    """A norm outside the autocast that surrounds it."""

    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = nn.functional.layer_norm(x.float(), (HIDDEN,))
        return y


@contextmanager
def reference_pass(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A pass without gradients in the same autocast block has its weights cast and kept."""
    with torch.autocast("cpu", dtype=dtype):
        with torch.no_grad():
            model(input_ids=BATCH[0], attention_mask=BATCH[1])
        yield


CASTS = pytest.mark.parametrize(("dtype", "warm"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bf16-cold", "fp16-after_a_reference_pass"])


def autocast_gradients(model: nn.Module, dtype: torch.dtype, *, warm: bool) -> dict[str, Tensor]:
    """Backward runs outside the forward's autocast; `warm`: inside a block of the same dtype that has cast the weights already."""
    with reference_pass(model, dtype) if warm else nullcontext():
        return step_gradients(model, *BATCH, autocast=dtype)


@CASTS
def test_ac02_the_dtype_of_autocast_is_that_of_the_forward(dtype: torch.dtype, warm: bool) -> None:
    model = model_with(NestedOff())
    with torch.no_grad():
        model.model.layers[0].mlp.b.mul_(1e-3)  # else fp16 overflows in backward
    expected = autocast_gradients(model, dtype, warm=warm)
    assert all(gradient.isfinite().all() for gradient in expected.values())
    for pattern in (STORE, RECOMPUTE):
        with attach_one(model, pattern):
            assert differing(autocast_gradients(model, dtype, warm=warm), expected) == []


@CASTS
def test_ac01_a_weight_used_twice_under_autocast(dtype: torch.dtype, warm: bool) -> None:
    """Store and recompute are the same bits. Eager autocast casts the weight once and rounds the sum of its two gradients to the low
    dtype; the plan's graph casts it twice and adds in fp32, so that it is not the same bits as eager, but nearer to fp32's gradient.
    """
    model = model_with(Shared())
    exact, plain = step_gradients(model, *BATCH), autocast_gradients(model, dtype, warm=warm)
    found = []
    for pattern in (STORE, RECOMPUTE):
        with attach_one(model, pattern):
            found.append(autocast_gradients(model, dtype, warm=warm))
    assert differing(*found) == []
    shared = ["model.layers.0.mlp.a", "model.layers.0.mlp.b"]
    assert differing(found[0], plain) == shared
    for name in shared:
        assert (found[0][name] - plain[name]).norm() <= torch.finfo(dtype).eps * plain[name].norm()
        assert (found[0][name] - exact[name]).norm() < (plain[name] - exact[name]).norm()


# ------------------------------------------------------------------------------------------------------- adapters, shards, compile


def test_lo01_adapters_get_gradients_though_the_embeddings_are_frozen() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build_tiny("qwen3"), config).train()
    expected = step_gradients(model, *BATCH)
    assert len(expected) == 8
    assert differing(gradients_under(model, RECOMPUTE), expected) == []


@EXACT
def test_sh01_weights_that_are_empty_outside_their_module(pattern: Pattern) -> None:
    """Hooks fill a frozen weight before its module and empty it after: such a layer is refused by name, as one that cannot be captured."""
    model = model_with(Linear2())
    projection = model.model.layers[1].mlp.gate_proj
    projection.weight.requires_grad_(False)
    full = projection.weight.data.clone()

    def gather(module: nn.Module, _args: object) -> None:
        module.weight.data = full

    def release(module: nn.Module, _args: object, _output: object) -> None:
        module.weight.data = full.new_empty(0)

    hooks = [projection.register_forward_pre_hook(gather), projection.register_forward_hook(release)]
    try:
        with attach_one(model, pattern), pytest.raises(CaptureError, match=r"layers\.1 cannot be captured whole.*or detach the plan"):
            step_gradients(model, *BATCH)
    finally:
        for hook in hooks:
            hook.remove()
        projection.weight.data = full


@pytest.mark.parametrize("order", ["attached_first", "compiled_first"])
def test_cm01_a_model_that_is_compiled_as_a_whole(order: str) -> None:
    """With compression: the gradients are those of the plan without compiling, so that what is packed and restored is the same."""
    model, plan = build_tiny("llama"), Pattern(actions={"mlp.up_proj.mm": "compress:int8"})
    exact = step_gradients(model, *BATCH)
    with attach_one(model, plan):
        expected = step_gradients(model, *BATCH)
    assert differing(expected, exact)
    if order == "compiled_first":
        compiled = torch.compile(model, backend="aot_eager")
        handle = attach_one(model, plan)
    else:
        handle = attach_one(model, plan)
        compiled = torch.compile(model, backend="aot_eager")
    with handle:
        loss = step_loss(compiled, *BATCH)
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert handle.calls["p"] == 2, "the plan ran inside the compiled model"
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6, name


# --------------------------------------------------------------------------------------------------------------------------- GRPO


SHAPE = {"vocab_size": 97, "rows": 4, "prompt_tokens": 6, "completion_tokens": 8, "group_size": 2, "seed": 0}


def test_gr01_micro_batches_without_a_gradient_are_told_apart() -> None:
    """No loss token, all advantages zero, a NaN, groups of one: each ends in one line, and none is taken for a micro-batch without risk."""
    from dataclasses import replace

    batch = synthetic_micro_batch(**SHAPE)
    with pytest.raises(ProfileError, match="all completions are masked"):
        replace(batch, loss_mask=torch.zeros_like(batch.loss_mask), advantages=torch.zeros_like(batch.advantages)).validate()
    with pytest.raises(ProfileError, match="the gradient is zero"):
        require_gradient([replace(batch, advantages=torch.zeros_like(batch.advantages))])
    nan = batch.advantages.clone()
    nan[batch.loss_mask.bool().nonzero()[0].unbind()] = torch.nan
    with pytest.raises(ProfileError, match="advantages"):
        replace(batch, advantages=nan).validate()
    alone = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), group_size=1)
    with pytest.raises(ProfileError, match="advantages"):  # a group's deviation from itself, over the deviation of one: not a number
        replace(batch, advantages=alone[:, None] * batch.loss_mask).validate()
    with pytest.raises(ProfileError, match="whole groups of 1"):
        synthetic_micro_batch(**SHAPE | {"group_size": 1})
