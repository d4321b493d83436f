"""Exposure against autograd through TRL's own GRPOTrainer._compute_loss, called on a stub that carries what it reads."""

from __future__ import annotations

import collections
import itertools
from types import SimpleNamespace

import pytest
import torch
from losses_for_tests import TRL_CONSTANTS, TRL_TYPES, TRL_VARIANTS, draw, gradient

from hilore_cli.exposure import LossInputs, TrlLoss, exposure

trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0): its own loss is not compared")
GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="this TRL has no GRPOTrainer").GRPOTrainer

pytestmark = pytest.mark.skipif(
    not trl.__version__.startswith("1.16."), reason=f"written for TRL 1.16, found {trl.__version__}"
)

TOLERANCE = 1e-6  # TRL's sapo and vespo constants are float32 tensors: 2e-8 is lost there


class OneProcess:
    """The parts of accelerate's Accelerator that the loss calls."""

    num_processes = TRL_CONSTANTS["num_processes"]

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def pad_across_processes(self, tensor, **_):
        return tensor

    def reduce(self, tensor, **_):
        return tensor


def trainer_stub(loss: TrlLoss, *, logps, entropies, weights):
    """What _compute_loss reads of a GRPOTrainer; the model's answer is the leaf `logps`."""
    stub = SimpleNamespace(
        args=loss,  # has every option the loss reads from GRPOConfig, under the same name
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        epsilon_low=loss.epsilon,
        epsilon_high=loss.high,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    stub.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(stub, *args)
    for name in ("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold"):
        setattr(stub, name, getattr(loss, name))
    for name in ("current_gradient_accumulation_steps", "max_completion_length"):
        setattr(stub, name, getattr(loss, name))
    return stub


def trl_gradient(loss: TrlLoss, data, *, advantages, on_policy, arrays):
    """dL/dlogp from TRL."""
    prompt = torch.ones(data.mask.shape[0], 2, dtype=torch.long)
    weights = next((getattr(data, name) for name in arrays if name.endswith("weights")), None)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones_like(data.mask),
        "completion_mask": torch.ones_like(data.mask),
        "tool_mask": data.mask,
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(loss.num_items_in_batch),
        "old_per_token_logps": None if on_policy else data.old_logps,
    }
    inputs |= {"ref_per_token_logps": data.ref_logps} if "ref_logps" in arrays else {}
    inputs |= {"sampling_per_token_logps": data.sampling_logps} if "sampling_logps" in arrays else {}
    inputs |= {} if weights is None else {"importance_sampling_ratio": weights}

    def own_loss(logps):
        stub = trainer_stub(loss, logps=logps, entropies=data.entropies, weights=weights)
        return GRPOTrainer._compute_loss(stub, None, inputs)

    return gradient(own_loss, data.logps)


@pytest.mark.parametrize("loss_type", TRL_TYPES)
def test_trl_agrees(loss_type):
    data = draw()
    both = ("token", "sequence"), TRL_VARIANTS, (True, False), ("advantages", "token_advantages")
    for level, variant, on_policy, shape in itertools.product(*both):
        settings, arrays = TRL_VARIANTS[variant]
        loss = TrlLoss(loss_type=loss_type, importance_sampling_level=level, **TRL_CONSTANTS, **settings)
        advantages = getattr(data, shape)
        expected = trl_gradient(loss, data, advantages=advantages, on_policy=on_policy, arrays=arrays)
        fields = {"is_weights" if name.endswith("weights") else name: getattr(data, name) for name in arrays}
        fields |= {} if on_policy else {"old_logps": data.old_logps}
        c = exposure(loss, LossInputs(mask=data.mask, advantages=advantages, logps=data.logps, **fields), xp=torch)
        error = float(((c - expected).abs() / (expected.abs() + 1e-6 * expected.abs().max())).max())
        assert error <= TOLERANCE, f"{loss_type} {level} {variant} on_policy={on_policy} {shape}: {error}"
        assert expected.abs().max() > 0


def test_trl_defaults_are_ours():
    """The settings that both name have TRL's defaults (steps_per_generation is derived there, the router's None)."""
    config = trl.GRPOConfig.__dataclass_fields__
    ours = TrlLoss.__dataclass_fields__
    shared = set(ours) & set(config) - {"steps_per_generation", "router_aux_loss_coef"}
    assert len(shared) >= 18
    assert {name: ours[name].default for name in shared} == {name: config[name].default for name in shared}
