"""A trainer in which things go wrong: after each of them the next step's gradients are exact, or the refusal is clear; nothing is off without a word, nothing leaks."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import attach_each, attach_one, differing, frozen_plan, make_ids, step_gradients, step_loss
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from hilore_cli import attach
from hilore_cli.errors import CaptureError, PlanMismatchError
from hilore_cli.models import decoder_layers
from hilore_cli.partition import compiler_settings
from hilore_cli.peak import MemoryTrace, mark, trace_memory
from hilore_cli.runtime import Handle
from hilore_cli.schema import Pattern

STORE, RECOMPUTE = Pattern(default="store"), Pattern()
MIXED = Pattern(actions={"mlp.gate_proj.mm": "store", "self_attn.v_proj.mm": "store", "add": "store"})
LOSSY = Pattern(actions={"mlp.gate_proj.mm": "compress:int8", "add": "store"})
BATCH = make_ids(2, 14, padded=True)


@pytest.fixture(scope="module")
def stepped() -> Iterator[tuple[nn.Module, Handle, dict[str, Tensor]]]:
    """A model with a plan of one stored and one recomputed layer, and its exact gradients."""
    model = build_tiny("llama")
    expected = step_gradients(model, *BATCH)
    with attach_each(model, [STORE, RECOMPUTE]) as handle:
        yield model, handle, expected


@pytest.fixture(scope="module")
def lossy() -> Iterator[tuple[nn.Module, Handle, dict[str, Tensor]]]:
    """A model whose layers compress, store and recompute, and the gradients that it has then."""
    model = build_tiny("llama")
    plain = step_gradients(model, *BATCH)
    with attach_one(model, LOSSY) as handle:
        expected = step_gradients(model, *BATCH)
        assert differing(expected, plain), "the codec does something"
        yield model, handle, expected


def assert_exact(model: nn.Module, expected: dict[str, Tensor]) -> None:
    assert differing(step_gradients(model, *BATCH), expected) == []


def trace_uncollected(step: Callable[[], object]) -> MemoryTrace:
    """Live bytes over something that ran before already, wherever they are held: by Python, or by autograd's nodes in C++. Without garbage
    collection, which may come late: values must not sit in cycles.
    """
    gc.collect()
    gc.disable()
    try:
        return trace_memory(step)
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------- failed steps


class OutOfRoomError(RuntimeError):
    """In place of another library's."""


class FailOnce:
    """A hook that raises when it is first called, and does nothing from then on."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error
        self.failed = False

    def __call__(self, *_: object) -> None:
        if not self.failed:
            self.failed = True
            raise self.error("no room")


def fail_step(model: nn.Module, error: type[Exception]) -> None:
    """The trainer drops such a step: the error, the loss, and the gradients that are there."""
    with pytest.raises(error, match="no room"):
        step_loss(model, *BATCH).backward()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("error", [OutOfRoomError, torch.OutOfMemoryError])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failure_in_the_middle_of_backward(stepped, layer: int, error: type[Exception]) -> None:
    """Behind a recomputed layer, and behind a stored one. What torch's engine still has in its queue then goes with the next backward."""
    model, handle, expected = stepped
    assert_exact(model, expected)
    before, graphs = Counter(handle.calls), Counter(handle.graphs)
    hook = decoder_layers(model)[layer][1].mlp.gate_proj.weight.register_hook(FailOnce(error))

    def fail_and_go_on() -> None:
        fail_step(model, error)
        assert_exact(model, expected)

    assert trace_uncollected(fail_and_go_on).live_bytes[-1] == 0
    hook.remove()
    assert handle.calls - before == {"p0": 2, "p1": 2}
    assert handle.graphs == graphs


@pytest.mark.parametrize(("place", "calls"), [("model.layers.0", {"p0": 2, "p1": 1}), ("model.norm", {"p0": 2, "p1": 2})])
def test_a_failure_in_the_forward_of_a_compiled_model(stepped, place: str, calls: dict[str, int]) -> None:
    """Between two layers, and behind the last: the step after it runs under the plan, by the graphs that are there."""
    model, handle, expected = stepped
    assert_exact(model, expected)
    before, graphs = Counter(handle.calls), Counter(handle.graphs)
    hook = model.get_submodule(place).register_forward_hook(FailOnce(OutOfRoomError))
    assert trace_uncollected(lambda: fail_step(model, OutOfRoomError)).live_bytes[-1] == 0
    assert_exact(model, expected)
    hook.remove()
    assert handle.calls - before == calls
    assert handle.graphs == graphs


@pytest.mark.parametrize(("operation", "calls"), [("compress", 2), ("decompress", 4)])
def test_out_of_memory_within_a_compiled_layer(lossy, operation: str, calls: int) -> None:
    """In the middle of its forward graph, and of its backward graph."""
    model, handle, expected = lossy
    assert_exact(model, expected)
    before, graphs = Counter(handle.calls), Counter(handle.graphs)

    def fail_and_go_on() -> None:
        with codec_without_room(operation):
            fail_step(model, torch.OutOfMemoryError)
        assert_exact(model, expected)
        gc.collect()

    assert trace_uncollected(fail_and_go_on).live_bytes[-1] == 0
    assert handle.calls - before == {"p": calls}
    assert handle.graphs == graphs


def test_the_error_of_a_compiled_layer_is_in_no_cycle(lossy) -> None:
    """Whoever tries again with a smaller micro-batch needs the room at once: the error must not hold what all layers before it saved."""
    model, _, expected = lossy
    assert_exact(model, expected)

    def fail() -> None:
        with codec_without_room("compress"):
            fail_step(model, torch.OutOfMemoryError)

    assert trace_uncollected(fail).live_bytes[-1] == 0


@contextmanager
def codec_without_room(operation: str) -> Iterator[None]:
    """Not by a Mock, which would keep what it was called with."""

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with patch(f"hilore_cli.codecs.cpu.{operation}", fail):
        yield


@pytest.mark.parametrize("planned", ["stepped", "lossy"])
def test_a_skipped_backward_leaves_nothing_behind(request: pytest.FixtureRequest, planned: str) -> None:
    """Neither what is stored nor payloads."""
    model, _, expected = request.getfixturevalue(planned)
    assert_exact(model, expected)

    def skip() -> None:
        loss = step_loss(model, *BATCH)
        mark("held")
        del loss

    trace = trace_uncollected(skip)
    assert trace.live_at("held") > 20_000
    assert trace.live_bytes[-1] == 0
    assert_exact(model, expected)


def test_what_a_layer_raises_is_in_the_message() -> None:
    model = build_tiny("llama")

    def fail(*_: object) -> None:
        raise ValueError("no such expert")

    with attach_one(model, RECOMPUTE):
        hook = model.model.layers[0].mlp.register_forward_hook(fail)
        with pytest.raises(CaptureError, match=r"layers\.0 cannot be captured whole: .*no such expert"):
            step_loss(model, *BATCH)
        hook.remove()
        expected = step_gradients(build_tiny("llama"), *BATCH)
        assert_exact(model, expected)


def test_out_of_memory_while_compiling_is_told_as_such() -> None:
    """Whoever handles it (a smaller micro-batch) must see its type."""
    model = build_tiny("llama")
    with attach_one(model, RECOMPUTE):
        with patch("hilore_cli.partition.split_joint", side_effect=torch.OutOfMemoryError("full")), pytest.raises(torch.OutOfMemoryError, match="full"):
            step_loss(model, *BATCH)
        assert_exact(model, step_gradients(build_tiny("llama"), *BATCH))


DYNAMO = {"skip_nnmodule_hook_guards": True, "specialize_float": False, "optimize_ddp": True, "skip_fsdp_guards": True, "recompile_limit": 11, "accumulated_recompile_limit": 111}
"""A caller's own settings, none of them as a layer's call has it; two more are in the test."""


@pytest.mark.parametrize(("moment", "error"), [("capture", CaptureError), ("split", torch.OutOfMemoryError), ("run", torch.OutOfMemoryError)])
def test_a_failed_layer_leaves_the_settings_of_torchs_compiler_as_they_were(lossy, moment: str, error: type[Exception]) -> None:
    model, _, expected = lossy
    with torch._dynamo.config.patch(DYNAMO), torch._functorch.config.patch(donated_buffer=True), torch.fx.experimental._config.patch(use_duck_shape=True):
        before = settings_of_torch()
        with compiler_settings():
            changed = before.items() - settings_of_torch().items()
        assert dict(changed) == DYNAMO | {"donated_buffer": True, "use_duck_shape": True}
        with failing(model.model.layers[0].mlp, moment), pytest.raises(error, match="no room"):
            step_loss(model, *BATCH)
        assert settings_of_torch() == before
    assert_exact(model, expected)


@contextmanager
def failing(module: nn.Module, moment: str) -> Iterator[None]:
    """While torch captures a layer anew, which another hook in it brings about; while the layer's graph is split; when it runs."""

    def fail(*_: object) -> None:
        raise ValueError("no room")

    if moment == "run":
        with codec_without_room("compress"):
            yield
        return
    hook = module.register_forward_hook(fail if moment == "capture" else lambda *_: None)
    with nullcontext() if moment == "capture" else patch("hilore_cli.partition.split_joint", side_effect=torch.OutOfMemoryError("no room")):
        yield
    hook.remove()


def settings_of_torch() -> dict[str, str | int | bool | None]:
    """Of the three parts of torch whose settings a layer's call changes; tables and functions are left out."""
    modules = (torch._functorch.config, torch._dynamo.config, torch.fx.experimental._config)
    return {name: value for module in modules for name, value in module.get_config_copy().items() if value is None or isinstance(value, (str, int))}


# ------------------------------------------------------------------------------------------------------ other ways to run


def test_in_a_worker_thread(stepped) -> None:
    model, _, expected = stepped
    found: list[dict[str, Tensor]] = []
    worker = threading.Thread(target=lambda: found.append(step_gradients(model, *BATCH)))
    worker.start()
    worker.join()
    assert differing(found[0], expected) == []


def test_inference_mode_and_evaluation_in_between(stepped) -> None:
    model, handle, expected = stepped
    served = handle.calls.total()
    with torch.inference_mode():
        model(input_ids=BATCH[0], attention_mask=BATCH[1])
    model.eval()
    with torch.no_grad():
        model(input_ids=BATCH[0], attention_mask=BATCH[1])
    model.train()
    assert handle.calls.total() == served
    assert_exact(model, expected)


def test_retained_graph(stepped) -> None:
    model, _, expected = stepped
    loss = step_loss(model, *BATCH)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert differing(found, expected) == []


def test_retained_gradients_of_hidden_states(stepped) -> None:
    """What torch alone gives them: those before, between and behind the layers; the plan runs."""
    model, handle, expected = stepped
    plain, served = build_tiny("llama"), handle.calls.total()
    found, exact = (retained_gradients(one) for one in (model, plain))
    assert len(exact.keys() - expected.keys()) == 4
    assert differing(found, exact) == []
    assert handle.calls.total() == served + 2
    assert_exact(model, expected)


def retained_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the hidden states that these modules return and, with the names of parameters, of the parameters."""
    retained: dict[str, Tensor] = {}

    def retain(name: str, hidden: Tensor) -> None:
        hidden.retain_grad()
        retained[name] = hidden

    names = ("model.embed_tokens", *(fqn for fqn, _ in decoder_layers(model)), "model.norm")
    hooks = [model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: retain(name, output)) for name in names]
    gradients = step_gradients(model, *BATCH)
    for hook in hooks:
        hook.remove()
    return gradients | {name: hidden.grad for name, hidden in retained.items()}


@pytest.mark.parametrize("layer", [0, 1])
def test_retained_gradients_within_a_layer_are_refused(stepped, layer: int) -> None:
    """Torch alone would run such a layer uncompiled, and so without its plan."""
    model, _, expected = stepped
    hook = model.model.layers[layer].mlp.register_forward_hook(lambda _, __, output: output.retain_grad())
    with pytest.raises(CaptureError, match=rf"layers\.{layer} cannot be captured whole: .*retain_grad"):
        step_loss(model, *BATCH)
    hook.remove()
    assert_exact(model, expected)


def test_two_models_with_two_plans_in_turn(stepped) -> None:
    model, handle, expected = stepped
    other = build_tiny("qwen3")
    others = step_gradients(other, *BATCH)
    with attach_one(other, MIXED) as second:
        for _ in range(2):
            assert_exact(model, expected)
            assert differing(step_gradients(other, *BATCH), others) == []
        assert second.calls == {"p": 2 * len(decoder_layers(other))}
    assert handle.attached
    assert not second.attached


def test_detached_in_the_middle_of_accumulation() -> None:
    model = build_tiny("llama")
    for _ in range(2):
        step_loss(model, *BATCH).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    handle = attach_each(model, [STORE, RECOMPUTE])
    step_loss(model, *BATCH).backward()
    pending = step_loss(model, *BATCH)
    handle.detach()
    pending.backward()
    assert differing({name: p.grad for name, p in model.named_parameters()}, expected) == []
    assert all("forward" not in vars(layer) and "_hilore" not in vars(layer) for _, layer in decoder_layers(model))


# -------------------------------------------------------------------------------------------- never off without a word


def test_a_stance_that_switches_compiling_off_is_noticed(stepped) -> None:
    """The graphs are there from earlier steps: that they ran once proves nothing."""
    model, _, expected = stepped
    assert_exact(model, expected)
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match=r"ran without its plan .*set_stance"):
        step_loss(model, *BATCH)
    assert_exact(model, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_model_is_refused(stepped, reentrant: bool) -> None:
    model, _, expected = stepped

    def run(embeddings: Tensor) -> Tensor:
        return model(inputs_embeds=embeddings, attention_mask=BATCH[1]).logits

    embeddings = model.get_input_embeddings()(BATCH[0])
    with pytest.raises(PlanMismatchError, match=r"layers\.0: runs inside torch's checkpoint"):
        checkpoint(run, embeddings, use_reentrant=reentrant).sum().backward()
    model.zero_grad(set_to_none=True)
    assert_exact(model, expected)


def test_checkpoint_wrappers_around_the_layers_are_refused() -> None:
    model = build_tiny("llama")
    with attach_one(model, STORE):
        apply_activation_checkpointing(model, check_fn=lambda module: module is model.model.layers[1])
        with pytest.raises(PlanMismatchError, match=r"layers\.1: runs inside torch's checkpoint"):
            step_loss(model, *BATCH)


def test_a_key_value_cache_in_training_is_refused() -> None:
    model = build_tiny("llama", num_hidden_layers=3)
    expected = step_gradients(model, *BATCH)
    with attach_one(model, MIXED) as handle:
        with pytest.raises(PlanMismatchError, match=r"layers\.0: is given a KV cache .* pass use_cache=False"):
            model(input_ids=BATCH[0], attention_mask=BATCH[1], use_cache=True)
        assert_exact(model, expected)
        with torch.no_grad():
            assert model(input_ids=BATCH[0], attention_mask=BATCH[1], use_cache=True).past_key_values is not None
        assert handle.graphs.total() == 1


def test_a_layer_that_was_replaced_is_told_of() -> None:
    model = build_tiny("llama", num_hidden_layers=3)
    with attach_one(model, MIXED):
        step_gradients(model, *BATCH)
        model.model.layers[1] = copy.deepcopy(model.model.layers[1])
        gc.collect()
        with pytest.warns(UserWarning, match=r"layers\.1 is not the layer any more .* attach again"):
            step_gradients(model, *BATCH)


def test_more_ways_to_call_than_torch_keeps_by_itself() -> None:
    """Modes, masks, single rows and precisions: more than eight graphs of one pattern, torch's own limit, each exact."""
    model, plain = (build_tiny("llama", num_hidden_layers=1) for _ in range(2))
    kinds = itertools.product((True, False), (True, False), (1, 2), (None, torch.bfloat16))
    with attach_one(model, MIXED) as handle:
        for training, padded, rows, autocast in kinds:
            batch = make_ids(rows, 9, padded=padded)
            found, expected = (step_gradients(one.train(training), *batch, autocast=autocast) for one in (model, plain))
            assert differing(found, expected) == [], (training, padded, rows, autocast)
        assert handle.graphs.total() > 8


def test_data_parallel_is_refused_with_what_to_use() -> None:
    model = build_tiny("llama")
    plan = frozen_plan(model, {"all": STORE}, ["all", "all"], max_tokens=64)
    with pytest.raises(PlanMismatchError, match="use DistributedDataParallel"):
        attach(nn.DataParallel(model), plan)


# ------------------------------------------------------------------------------------------------------------------ soak


def test_three_hundred_steps_of_random_lengths(lossy) -> None:
    """Bytes live after 20 steps and after every 28 more are the same, no further graph is made, and steps that are run again at the end have
    the same bits, lossy as they are.
    """
    model, handle, _ = lossy
    lengths = torch.randint(3, 40, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    kept: dict[int, str] = {}

    def bits_of_step(step: int) -> str:
        gradients = step_gradients(model, *make_ids(2, lengths[step], padded=True, seed=step))
        return hashlib.sha256(b"".join(gradients[name].numpy().tobytes() for name in sorted(gradients))).hexdigest()

    def run(steps: range) -> None:
        with allocations_only():
            kept.update({step: bits_of_step(step) for step in steps})

    def grown_bytes(steps: range) -> int:
        return int(trace_uncollected(lambda: run(steps)).live_bytes[-1])

    run(range(20))
    graphs = Counter(handle.graphs)
    assert [grown_bytes(range(first, first + 28)) for first in range(20, 300, 28)] == [0] * 10
    assert handle.graphs == graphs
    again = {step: bits_of_step(step) for step in range(7, 300, 30)}
    assert again == {step: kept[step] for step in again}


@contextmanager
def allocations_only() -> Iterator[None]:
    """Leave operators out of what torch's profiler records, which are most of its time and memory."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
