"""A model on fake tensors: identity, graphs, account and peaks are to the byte those of the real one.

The tracer sees each operator's result. What a kernel takes and gives back within an operator only the allocator's events show, and one
thing more on a CPU: torch's checkpoint keeps the random state of the host for each layer.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tiny
from transformers import AutoModelForCausalLM

from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.capture import describe_joint, graph_digest, model_identity
from hilore_cli.errors import UsageError
from hilore_cli.fake import FakeTracer, FakeWorkbench, build_fake_model, capture_layers
from hilore_cli.grpo import GrpoConfig
from hilore_cli.models import load_config, prepare_to_train
from hilore_cli.profiler import record_step
from hilore_cli.provenance import Lora
from hilore_cli.whole_step import measure_account, measure_smaller_account
from hilore_cli.workbench import Workbench

BATCH = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=24, completion_tokens=40, group_size=4, seed=0)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
CASES = {
    "llama": ("llama", {}, "float32", None),
    "tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 4001}, "float32", None),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, "bfloat16", None),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, "float32", None),
    "qwen3_moe": ("qwen3_moe", EXPERTS, "float32", None),
    "lora": ("llama", {}, "bfloat16", 4),
}
RANDOM_STATE_BYTES = torch.get_rng_state().numel()
SCRATCH = {"llama": 0.0, "tied": 0.0, "qwen3": 0.1, "gemma3": 0.0, "qwen3_moe": 0.1, "lora": 0.1}
"""Share of the peak that kernels take beside what operators return: in bf16 and in grouped products a CPU's do."""


@cache
def benches(case: str, head: str = "chunked") -> SimpleNamespace:
    """The same update on a real model, and on a fake one of its configuration."""
    torch.set_num_threads(1)
    kind, overrides, dtype, rank = CASES[case]
    config = GrpoConfig(head=head, chunk_tokens=32)
    base = build_tiny(kind, **overrides).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as transformers loads one: weights of a dtype, buffers as they are
        model = AutoModelForCausalLM.from_config(base, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    lora = None if rank is None else Lora(rank=rank)
    model = prepare_to_train(model, lora=lora, seed=0)
    return SimpleNamespace(real=Workbench(model, [BATCH], config), fake=FakeWorkbench(build_fake_model(base, dtype=dtype, lora=lora), [BATCH], config))


def by_tracer(bench: Workbench) -> Workbench:
    """The bench with our tracer of storages in place of the allocator's events."""
    twin = Workbench(bench.model, bench.batches, bench.config)
    twin.tracer = FakeTracer
    return twin


@pytest.mark.parametrize("case", CASES)
def test_identity_and_graphs_are_those_of_the_real_model(case):
    found = benches(case)
    assert model_identity(found.fake.model, source="x") == model_identity(found.real.model, source="x")
    record = record_step(found.real)
    classes, of_layer = capture_layers(found.fake)
    joints = {graph_digest(joint): joint for joint in record.joints}
    assert {c.layer_class.graph_digest for c in classes} == set(joints)
    for captured in classes:
        assert describe_joint(joints[captured.layer_class.graph_digest], name=captured.layer_class.name) == captured.layer_class
    digest_of = {c.layer_class.name: c.layer_class.graph_digest for c in classes}
    assert [digest_of[name] for name in of_layer] == [graph_digest(record.joints[record.calls[i].graph]) for i in range(len(of_layer))]
    for captured in classes:
        assert all(captured.works[row.name].flops > 0 for row in captured.layer_class.nodes if row.matmul and row.side == "forward")


@pytest.mark.parametrize(("case", "head"), [*((case, "chunked") for case in CASES), *((case, head) for case in ("llama", "tied") for head in ("full", "one-pass"))])
def test_every_storage_is_there_and_no_other(case, head):
    """Static part, account, smaller account and peaks, by one tracer: equal to the byte."""
    found = benches(case, head)
    real, fake = by_tracer(found.real), found.fake
    assert fake.static() == real.static()
    assert measure_account(fake, fake.static()) == measure_account(real, real.static())
    assert measure_smaller_account(fake) == measure_smaller_account(real)
    assert fake.peak_bytes("none") == real.peak_bytes("none")


@pytest.mark.parametrize(("case", "head"), [*((case, "chunked") for case in CASES), ("tied", "full"), ("tied", "one-pass")])
def test_the_allocator_shows_kernels_scratch_beside_it(case, head):
    """Allocator's events against the fake: the random states under checkpointing, and kernels' own memory where they take some.

    The gradient of a tied embedding is summed in place, or not (a full head's is a view), as the engine does without a tracer.
    """
    found = benches(case, head)
    (real, real_gc), (fake, fake_gc) = (measure_account(bench, bench.static()) for bench in (found.real, found.fake))
    states = RANDOM_STATE_BYTES * len(found.real.layers)
    room = SCRATCH[case] * real_gc + (8 if head == "full" else 0)  # two scalars of the loss
    assert 0 <= real_gc - fake_gc <= states + room
    assert 0 <= real["head_bytes"] - fake["head_bytes"] <= states + room
    assert real["shared_bytes"] == fake["shared_bytes"]
    assert 0 <= real["tail_bytes"] - fake["tail_bytes"] <= room
    assert 0 <= real["update_bytes"] - fake["update_bytes"] <= 16, "scalars within the norm of a gradient"
    none = found.real.peak_bytes("none") - found.fake.peak_bytes("none")
    assert abs(none) <= room


def test_dropout_of_a_gpu_keeps_bools():
    """A CPU keeps noise of the values' dtype: four bytes in fp32, for each linear with adapters whose input has a gradient."""
    pytest.importorskip("peft")
    lora = Lora(rank=2, dropout=0.1)

    def peak(*, fused: bool) -> int:
        model = build_fake_model(build_tiny("llama").config, dtype="float32", lora=lora)
        return FakeWorkbench(model, [BATCH], GrpoConfig(head="chunked", chunk_tokens=32), fused_dropout=fused).peak_bytes("none")

    config = build_tiny("llama").config
    inputs = 6 * config.hidden_size + config.intermediate_size  # of a layer's seven linears
    without = 3 * config.hidden_size  # q, k and v of the first: below it nothing trains
    assert peak(fused=False) - peak(fused=True) == 3 * BATCH.tokens * (config.num_hidden_layers * inputs - without)


def test_a_large_model_takes_no_memory_and_its_bytes_are_known():
    """Llama 3.1 8B in bf16: weights to the byte, nothing allocated."""
    model = build_fake_model(load_config("llama-8b"), dtype="bfloat16")
    bench = FakeWorkbench(model, [BATCH], GrpoConfig(), workspace_bytes=7)
    static = bench.static()
    trained = 2 * 8_030_261_248
    assert static["gradients_bytes"] == trained
    assert static["weights_bytes"] - trained == sum(b.untyped_storage().nbytes() for b in model.buffers())
    assert static["optimizer_bytes"] == 2 * trained + 4 * len(list(model.parameters()))
    assert static["workspace_bytes"] == 7


def test_works_add_up_to_the_known_count():
    """Matrix products of an update without checkpointing: 6 operations a weight and token, of the layers; checkpointing adds 2."""
    found = benches("llama")
    found.fake.static()
    weights = sum(p.numel() for _, layer in found.fake.layers for p in layer.parameters() if p.dim() == 2)
    head = found.fake.model.lm_head.weight.numel()
    tokens, loss_tokens = BATCH.tokens, BATCH.loss_tokens

    def matmuls(method: str) -> int:
        return sum(work.flops for work in found.fake.work_of_update(method) if work.kind == "matmul")

    once = 2 * loss_tokens * head  # forward, again in backward, and two gradients
    assert matmuls("none") == 6 * tokens * weights + 4 * once
    down = sum(layer.mlp.down_proj.weight.numel() for _, layer in found.fake.layers)
    assert matmuls("gc") == 6 * tokens * weights + 2 * tokens * (weights - down) + 4 * once, "torch stops early: the last product is not replayed"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UsageError, match="dtype 'int3': unknown"):
        build_fake_model(load_config("llama-1b"), dtype="int3")


@pytest.mark.parametrize("name", ["gemma3-4b", "smollm2-135m"])
def test_presets_are_built_with_what_they_share(name):
    """gemma3's vision tower takes truncated normals: torch draws those until none is outside, which a fake never says."""
    model = build_fake_model(load_config(name), dtype="bfloat16")
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(load_config(name))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in real.parameters())
