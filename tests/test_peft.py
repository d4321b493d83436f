"""Plans on PEFT models: LoRA and its variants are carried out exactly, and what a plan was not made for is refused in words."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import LIMIT, differing, frozen_plan, make_ids, step_gradients, step_loss

from hilore_cli import attach
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.capture import graph_digest, model_identity
from hilore_cli.errors import PlanMismatchError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.models import decoder_layers
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import FrozenPlan, Pattern, Variant, freeze
from hilore_cli.workbench import Workbench

peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")

RECOMPUTE = Pattern()
MIXED = Pattern(actions={"mlp.gate_proj.base_layer.mm": "store", "mlp.gate_proj.lora_A.default.mm": "store", "add": "store"})
BATCH = make_ids(2, 14, padded=True)
LINEARS = 7  # of a layer


def config(**options: Any):
    """LoRA on all linears, with dropout, and B not zero (else A has no gradient)."""
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **options})


def tiny(*, layers: int = 1):
    """A llama that names its architecture, as one does that was loaded."""
    model = build_tiny("llama", num_hidden_layers=layers)
    model.config.architectures = [type(model).__name__]
    return model


def with_adapters(*, layers: int = 1, embeddings: bool = False, base: torch.nn.Module | None = None, **options: Any):
    """A tiny llama with adapters, of the same values each time; `embeddings`: they are trained too, where PEFT froze them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(base or tiny(layers=layers), config(**options)).train()
    if embeddings:
        model.get_input_embeddings().requires_grad_(True)
    return model


def plan_of(model, pattern: Pattern = MIXED, *, graph_digests: list[str] | None = None) -> FrozenPlan:
    plan = frozen_plan(model, {"A": pattern}, ["A"] * len(decoder_layers(model)), max_tokens=64)
    return freeze(plan.model_copy(update={"graph_digests": graph_digests or []}))


def digests_of(model) -> list[str]:
    """Of the graphs that a step's layers trace to."""
    found: list[str] = []
    names = ["A"] * len(decoder_layers(model))
    with attach_patterns(model, patterns={"A": RECOMPUTE}, variants=[Variant(max_tokens=LIMIT, layers=names)], name="traced", on_split=lambda joint: found.append(graph_digest(joint))):
        step_loss(model, *BATCH)
    return found


def products(model) -> int:
    """Matrix products in a step's backward; the model is left without gradients."""
    loss = step_loss(model, *BATCH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(event.name in ("aten::mm", "aten::addmm") for event in recorder.events())


@contextmanager
def warned() -> Iterator[list[str]]:
    """What the plan warns of in here."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(w.message) for w in caught if str(w.message).startswith("plan "))


@pytest.fixture(scope="module")
def lora():
    """One layer with adapters and trained embeddings, its exact gradients, and a handle bound to its graph (detached between tests)."""
    torch.set_num_threads(1)
    model = with_adapters(embeddings=True)
    handle = attach(model, plan_of(model, graph_digests=digests_of(model)))
    handle.detach()
    return model, step_gradients(model, *BATCH), handle


# ------------------------------------------------------------------------------------------------------- exact gradients


@pytest.mark.slow
def test_lora_on_all_linears() -> None:
    """Only adapters train: the first layer's input has no gradient, so that its graph is another one. Both serve two lengths."""
    model = with_adapters(layers=2)
    batches = [BATCH, make_ids(3, 7, padded=True, seed=1)]
    exact, eager = [step_gradients(model, *batch) for batch in batches], products(model)
    assert all(".lora_" in name and gradient.any() for name, gradient in exact[0].items())
    assert len(exact[0]) == 2 * LINEARS * 2
    with attach(model, plan_of(model)) as handle:
        assert [differing(step_gradients(model, *batch), gradients) for batch, gradients in zip(batches, exact, strict=True)] == [[], []]
        replayed = products(model) - eager
    assert handle.graphs == Counter({"A": 2})
    assert handle.calls == Counter({"A": 3 * 2})
    assert replayed == 2 * (3 * LINEARS - 6), "weight, A and B of each linear, but gate's two that are stored, and the weight's and B's of o and down, whose sums nobody reads again"


KINDS = {
    # B A of each weight is a product of A and B with the identity; the magnitude's gradient reads down's result too
    "dora": ({"use_dora": True, "lora_dropout": 0.0}, 5 * LINEARS),
    # and the result of the weight is taken of the dropped-out input once more
    "dora with dropout": ({"use_dora": True}, 6 * LINEARS - 1),
    "trained whole beside": ({"modules_to_save": ["post_attention_layernorm", "embed_tokens", "lm_head"]}, 3 * LINEARS - 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_variants_of_lora(kind: str) -> None:
    options, replayed = KINDS[kind]
    model = with_adapters(**options)
    exact, eager = step_gradients(model, *BATCH), products(model)
    assert sum("magnitude" in name for name in exact) == (LINEARS if "use_dora" in options else 0)
    assert sum("modules_to_save" in name for name in exact) == len(options.get("modules_to_save", []))
    with attach(model, plan_of(model, RECOMPUTE)) as handle:
        assert differing(step_gradients(model, *BATCH), exact) == []
        assert products(model) - eager == replayed
    assert handle.graphs == Counter({"A": 1})


def test_checkpointing_leaves_no_input_gradient_behind() -> None:
    """transformers switches it on with checkpointing, for good: what runs afterwards peaked higher than the same before, and than its prediction."""
    model = with_adapters(layers=2)
    batches = [synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=6, completion_tokens=6, group_size=4, seed=seed) for seed in range(2)]
    bench = Workbench(model, batches, GrpoConfig(head="chunked"))
    bench.compile("store")
    assert not model.get_input_embeddings()(batches[0].input_ids).requires_grad
    bench.static()  # runs checkpointing, too
    before = bench.peak_bytes("store")
    model.enable_input_require_grads()
    assert bench.peak_bytes("store") > before
    model.disable_input_require_grads()
    assert not model.get_input_embeddings()(batches[0].input_ids).requires_grad
    model.enable_input_require_grads()  # where the user's trainer had it on, it stays
    bench.gradients_by("gc")
    assert model.get_input_embeddings()(batches[0].input_ids).requires_grad


def test_nothing_of_peft_stays_patched(lora) -> None:
    from peft.tuners.lora import dora
    from peft.utils.integrations import dequantize_module_weight

    model, exact, handle = lora
    seen = []
    hook = model.get_submodule("base_model.model.model.norm").register_forward_pre_hook(lambda *_: seen.append(dora.dequantize_module_weight))
    with handle, warned() as texts:
        assert differing(step_gradients(model, *BATCH), exact) == []
    hook.remove()
    assert texts == []
    assert seen == [dequantize_module_weight]


@pytest.mark.slow
def test_rslora_has_the_fingerprint_of_lora_and_another_graph(lora) -> None:
    """The factor of the adapters is a constant of the graph: a plan made for another one is carried out, exactly, with one warning."""
    _, _, handle = lora
    model = with_adapters(embeddings=True, use_rslora=True)
    exact = step_gradients(model, *BATCH)
    with warned() as texts, attach(model, plan_of(model, graph_digests=sorted(handle.program._graph_digests))) as other:
        for _ in range(2):
            assert differing(step_gradients(model, *BATCH), exact) == []
    assert other.calls == Counter({"A": 2})
    assert len(texts) == 1
    assert "a layer's graph is not one that was profiled" in texts[0]


# ------------------------------------------------------------------------------------------------- adapters switched off


def test_adapters_off_without_gradients_run_unplanned(lora) -> None:
    """TRL's reference pass. The plan and its graph are the same afterwards."""
    model, exact, handle = lora
    with model.disable_adapter(), torch.no_grad():
        expected = step_loss(model, *BATCH)
    with handle:
        step_gradients(model, *BATCH)
        calls, graphs = Counter(handle.calls), Counter(handle.graphs)
        with model.disable_adapter(), torch.no_grad():
            assert torch.equal(step_loss(model, *BATCH), expected)
        assert handle.calls == calls
        assert differing(step_gradients(model, *BATCH), exact) == []
        assert handle.graphs == graphs


def test_adapters_off_with_gradients_on_and_nothing_to_train_run_unplanned(lora) -> None:
    """A reference pass that forgot `no_grad`: no gradient can come of it, and what was told of the next micro-batch is kept."""
    model, exact, handle = lora
    with handle:
        calls = Counter(handle.calls)
        handle.microbatch(tokens=28, length=14)
        model.get_input_embeddings().requires_grad_(False)
        with model.disable_adapter():
            assert not step_loss(model, *BATCH).requires_grad
        model.get_input_embeddings().requires_grad_(True)
        assert handle.calls == calls
        assert handle.program.choice._told == (28, 14, None)
        assert differing(step_gradients(model, *BATCH), exact) == []


@pytest.mark.slow
def test_adapters_off_with_gradients_that_reach_the_embeddings(lora) -> None:
    """Another graph, which was not profiled and lacks the adapters' units: recomputed whole, exactly, with one warning; the plan is right again after it."""
    model, exact, handle = lora
    with model.disable_adapter():
        expected = step_gradients(model, *BATCH)
    assert len(expected) == 1
    with handle, warned() as texts:
        with model.disable_adapter():
            for _ in range(2):
                assert differing(step_gradients(model, *BATCH), expected) == []
        assert differing(step_gradients(model, *BATCH), exact) == []
    assert len(texts) == 1
    assert "has no unit 'mlp.gate_proj.lora_A.default.mm'; such layers are recomputed whole, exactly" in texts[0]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_plans_of_other_trainings_are_refused_by_fingerprint() -> None:
    """Full fine-tune and LoRA both ways, another rank, other targets, DoRA, modules trained whole, and other frozen weights."""
    full, lora = tiny(), with_adapters()
    plan, full_plan = plan_of(lora), plan_of(full)
    others = {
        "LoRA rank 4, this model has None": (plan, full),
        "LoRA rank None, this model has 4": (full_plan, lora),
        "LoRA rank 4, this model has 8": (plan, with_adapters(r=8)),
        "number of parameters": (plan, with_adapters(target_modules=["q_proj", "v_proj"])),
        r"number of parameters ": (plan, with_adapters(use_dora=True)),
        r"number of parameters \d+": (plan, with_adapters(modules_to_save=["lm_head"])),
        "digest of parameter names, shapes and which are trainable": (plan, with_adapters(embeddings=True)),
        "digest of parameter names, shapes and which are trainable ": (full_plan, tiny().requires_grad_(False)),
    }
    for reason, (made, model) in others.items():
        with pytest.raises(PlanMismatchError, match=f"plan hand-made: made for {reason}.*; profile and plan this model, or load the one the plan was made for"):
            attach(model, made)
        assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))


def test_adapters_that_are_not_active_take_no_part() -> None:
    """TRL keeps a frozen copy of a trained adapter beside it, as its reference: the plan is still the model's."""
    model = with_adapters()
    plan = plan_of(model)
    model.add_adapter("ref", config(r=8))
    assert model_identity(model, source="tiny") == plan.model
    attach(model, plan).detach()
    model.set_adapter("ref")
    with pytest.raises(PlanMismatchError, match="LoRA rank 4, this model has 8"):
        attach(model, plan)


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "after it"])
def test_adapters_added_after_attach_are_refused_in_words(stepped: bool) -> None:
    """A full fine-tune plan would be carried out on a model that it was not made for. Detached, the model trains."""
    base = tiny()
    handle = attach(base, plan_of(base, RECOMPUTE))
    if stepped:
        step_gradients(base, *BATCH)
    model = with_adapters(base=base)
    calls = Counter(handle.calls)
    with pytest.raises(PlanMismatchError, match=r"^model\.layers\.0: parameters came or went after the plan was attached \(mlp\.down_proj\.base_layer\.weight, \d+ in all\): adapters were added, removed or merged; do that first, then attach a plan"):
        step_loss(model, *BATCH)
    assert handle.calls == calls
    handle.detach()
    assert len(step_gradients(model, *BATCH)) == 2 * LINEARS


def test_an_adapter_added_beside_after_attach_changes_nothing(lora) -> None:
    model, exact, handle = lora
    with handle, warned() as texts:
        model.add_adapter("beside", config(r=8))
        try:
            model.get_input_embeddings().requires_grad_(True)  # PEFT freezes all but the active adapter
            assert differing(step_gradients(model, *BATCH), exact) == []
        finally:
            model.delete_adapter("beside")
    assert texts == []


def test_adapters_merged_after_attach_are_refused_in_words() -> None:
    model = with_adapters()
    attach(model, plan_of(model, RECOMPUTE))
    merged = model.merge_and_unload()
    merged.requires_grad_(True)
    with pytest.raises(PlanMismatchError, match=r"layers\.0: parameters came or went after the plan was attached"):
        step_loss(merged, *BATCH)
