"""A plan inside verl's own FSDPEngine (FSDP2, gloo) on a CPU; skipped where verl is not installed, and it is in no extra of ours:

    pip install --no-deps verl==0.9.1 && pip install tensordict ray codetiming omegaconf orjson msgpack protobuf pyvers cloudpickle

What is not verl's own: the platform, which says "cpu". Without Ray's workers, rollouts and a GPU.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import differing
from test_captured import verl_inputs
from test_verl_openrlhf import HIGH, LOW, SCALES, plan_for, scaled_rows
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from hilore_cli.errors import PlanMismatchError
from hilore_cli.integrations.verl import use_plan

pytest.importorskip("verl", reason="verl, or something that it imports, is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROWS = 4  # of each micro-batch


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Factory of initialized engines, in a process group of one."""
    from verl.models.transformers import monkey_patch
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(**vars(torch.cpu), **{f"{prefix}memory_{kind}": lambda *_: 0 for prefix in ("", "max_") for kind in ("allocated", "reserved")}, mem_get_info=lambda *_: (0, 1))

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None: ...

        def synchronize(self, *_: Any) -> None: ...

    set_platform(Cpu())
    monkey_patch.is_trl_available = lambda: False  # it looks for a class that TRL no longer has
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    folder = tmp_path_factory.mktemp("verl")
    build_tiny("llama").save_pretrained(folder)

    def build(*, packed: bool, low: bool, checkpointing: bool = False) -> Any:
        exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineWithLMHead(
            model_config=HFModelConfig(path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, use_remove_padding=packed, enable_gradient_checkpointing=checkpointing),
            engine_config=FSDPEngineConfig(strategy="fsdp2", mixed_precision=None if low else exact, use_torch_compile=False, use_dynamic_bsz=False),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
        return engine

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield build
    dist.destroy_process_group()


def mini_batch(seed: int, *, packed: bool) -> Any:
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    inputs = verl_inputs([row for i, scale in enumerate(SCALES) for row in scaled_rows(seed + i, scale)[:ROWS]])
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items() if isinstance(value, Tensor)}
    settings = {"temperature": 1.0, "global_batch_size": ROWS * len(SCALES), "micro_batch_size_per_gpu": ROWS, "use_dynamic_bsz": False, "use_remove_padding": packed, "use_fused_kernels": False, "calculate_entropy": False}
    return left_right_2_no_padding(tu.get_tensordict(tensors | {"loss_mask": tensors["response_mask"]}, settings))


def trained(engine: Any, *, packed: bool) -> dict[str, Tensor]:
    """Weights after two updates of four micro-batches by verl's own loss, and a forward of old log-probabilities."""
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
    from verl.workers.utils.losses import ppo_loss

    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=ROWS, ppo_mini_batch_size=ROWS * len(SCALES), fsdp_config=FSDPEngineConfig(strategy="fsdp2"))
    loss = functools.partial(ppo_loss, config=actor)
    with engine.train_mode(disable_auto_offload=True):
        for seed in (30, 34):
            engine.train_batch(mini_batch(seed, packed=packed), loss_function=loss)
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(mini_batch(50, packed=packed), loss_function=loss)
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize(("packed", "low"), [(True, False), (False, False), (True, True)], ids=["packed", "padded", "packed, bf16 policy and autocast"])
def test_two_updates_are_bitwise_those_without_a_plan(engine_of, packed: bool, low: bool) -> None:
    expected = trained(engine_of(packed=packed, low=low), packed=packed)
    engine = engine_of(packed=packed, low=low)
    handle = use_plan(engine, plan_for(build_tiny("llama")))
    found = trained(engine, packed=packed)
    assert differing(found, expected) == []
    assert set(handle.microbatches) == {LOW.label, HIGH.label}
    assert handle.microbatches.total() == 2 * len(SCALES)
    handle.detach()


def test_verls_default_checkpointing_is_refused(engine_of) -> None:
    with pytest.raises(PlanMismatchError, match="enable_gradient_checkpointing=False"):
        use_plan(engine_of(packed=True, low=False, checkpointing=True), plan_for(build_tiny("llama")))
