"""SmolLM2-135M on recorded rollouts: what random weights cannot show (outliers, real attention) and sizes at which bytes matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from steps_for_tests import LIMIT, differing
from torch import Tensor, nn

from hilore_cli.batches import MicroBatch, load_micro_batch
from hilore_cli.grpo import GrpoConfig, micro_batch_loss, relative_error
from hilore_cli.malloc import steady_malloc
from hilore_cli.models import load_model
from hilore_cli.peak import trace_memory
from hilore_cli.runtime import Handle, attach_patterns
from hilore_cli.schema import Pattern, Variant
from hilore_cli.workbench import checkpointing

pytestmark = [pytest.mark.realmodel, pytest.mark.slow]

PROFILES = Path(__file__).parents[1] / "profiles"
CONFIG = GrpoConfig()
CALM = ("mlp.gate_proj.mm", "mlp.up_proj.mm", "self_attn.v_proj.mm", "self_attn.sdpa.out", "add")
"""All but query and key, which are ten times as risky (design section 4)."""
KEPT = ("self_attn.sdpa.lse", "self_attn.add", "self_attn.add.1")
PATTERNS = {
    "store": Pattern(default="store"),
    "recompute": Pattern(),
    "int8": Pattern(actions=dict.fromkeys(CALM, "compress:fbgemm-int8") | dict.fromkeys(KEPT, "store")),
}


@dataclass(frozen=True, kw_only=True)
class Real:
    model: nn.Module
    handle: Handle
    batch: MicroBatch

    def use(self, name: str) -> Handle:
        self.handle.program.choice.variants = [Variant(max_tokens=LIMIT, layers=[name] * 30)]
        return self.handle

    def step(self, batch: MicroBatch) -> dict[str, Tensor]:
        """One backward into the gradient buffers that are there, as in every micro-batch but an update's first."""
        self.model.zero_grad(set_to_none=False)
        micro_batch_loss(self.model, batch, CONFIG).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}

    def exact(self, batch: MicroBatch) -> dict[str, Tensor]:
        return {name: g.clone() for name, g in self.step(batch).items()}


@pytest.fixture(scope="module")
def real(real_model_dir):
    """The model and a detached handle."""
    steady_malloc()  # else every step pays for its large blocks in page faults again: the first took 30 s for 2 s of work
    model = load_model(real_model_dir)
    handle = attach_patterns(model, patterns=PATTERNS, variants=[Variant(max_tokens=LIMIT, layers=["store"] * 30)], name="test")
    handle.detach()
    batch = first_groups(load_micro_batch(PROFILES / "smollm2-math.parquet"), rows=4)
    return Real(model=model, handle=handle, batch=batch)


def first_groups(batch: MicroBatch, *, rows: int) -> MicroBatch:
    """The first rows that have a gradient: a part of a file is enough for every statement here."""
    return batch.take_rows(batch.advantages.any(1).nonzero().flatten()[:rows])


def test_exact_plans_are_bitwise_equal_and_recompute_all_is_not_above_checkpointing(real: Real) -> None:
    """One traced step each: gradients and peak bytes at once.

    Both peaks are two copies of the tied embedding's gradient, with next to nothing of the layers: measured equal but for
    528 bytes of 228 MB (scalars that one holds and the other does not), hence the page of tolerance.
    """
    with real.use("recompute"):
        real.step(real.batch)  # compiles
    exact = real.exact(real.batch)
    peaks = {}
    for name in ("checkpointing", "recompute"):
        with checkpointing(real.model) if name == "checkpointing" else real.use(name):
            peaks[name] = trace_memory(lambda: real.step(real.batch)).peak_bytes
        assert differing({n: p.grad for n, p in real.model.named_parameters()}, exact) == []
    print(f"peak above weights and gradients: {peaks}: {peaks['recompute'] / peaks['checkpointing'] - 1:+.4%}")
    with real.use("store"):
        assert differing(real.step(real.batch), exact) == []
    assert peaks["recompute"] <= peaks["checkpointing"] + 4096


def test_int8_error_on_rollouts_that_no_profile_saw(real: Real) -> None:
    heldout = first_groups(load_micro_batch(PROFILES / "smollm2-math-heldout.parquet"), rows=8)
    exact = real.exact(heldout)
    with real.use("int8"):
        error = relative_error(real.step(heldout), exact)
    print(f"int8 on {', '.join(CALM)}: relative gradient error {error:.4g}")
    assert 0 < error < 0.02
