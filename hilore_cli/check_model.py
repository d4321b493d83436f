"""The checks of a committed plan that need the model: its fingerprint as it is installed here, and a dry run like that of `hilore apply`.

A fingerprint is taken without weights: the model is built on torch's meta device from the configuration that lies here. Nothing is
downloaded. What it does NOT compare: the layers' graphs, which only a run traces; attach and a dry run do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hilore_cli.batches import MicroBatch
from hilore_cli.bench import dry_run
from hilore_cli.capture import model_identity
from hilore_cli.check import failed, growth_check, passed, skipped
from hilore_cli.check_records import Check, Limits
from hilore_cli.errors import HiloreError, UsageError, first_line
from hilore_cli.models import (
    DTYPES,
    is_random,
    load_config,
    prepare_to_train,
    resolve_model,
)
from hilore_cli.presets import PRESETS
from hilore_cli.provenance import ModelId
from hilore_cli.runtime import check_identity
from hilore_cli.schema import FrozenPlan, Measurement, Plan
from hilore_cli.sizes import format_bytes
from hilore_cli.wheel_models import wheel_model_ready
from hilore_cli.workbench import Progress


def fingerprint_check(plan: Plan | FrozenPlan, *, source: str | None = None) -> Check:
    """The model that a plan is for, as transformers builds it here. `source`: another place of it than the plan names.

    An estimated plan was made from the preset's configuration that comes with hilore: where the model is not here, that one is built again.
    """
    source = source or plan.model.source
    try:
        config, where = config_here(source), "its configuration here"
    except UsageError as error:
        if plan.estimate is None or source not in PRESETS:
            return skipped("model", str(error))
        config, where = load_config(source), "the configuration that comes with hilore"
    except HiloreError as error:
        return failed("model", str(error))
    try:
        check_identity(model_identity(build_on_meta(config, plan.model), source=source), plan.model, name=plan.name)
    except HiloreError as error:
        return failed("model", str(error))
    return passed("model", f"{source}, built from {where}: {plan.model.architecture}, {plan.model.layers} layers, {plan.model.parameters} parameters, {plan.model.dtype}")


def config_here(source: str) -> PreTrainedConfig:
    """A model's configuration as it lies on this machine: in its folder, or in the hub's cache.

    Raises UsageError where it does not, HiloreError where it cannot be read.
    """
    if is_random(source):
        return load_config(source)
    preset = PRESETS.get(source)
    if preset is not None and preset.distribution is not None and not wheel_model_ready(source):
        raise UsageError(f"model {source} is not unpacked here; `hilore profile --model {source}` does it once")
    found = resolve_model(source)
    try:
        return AutoConfig.from_pretrained(found, local_files_only=True)
    except (OSError, ValueError) as error:
        if isinstance(found, str):
            raise UsageError(f"model {source}: {found} is not in the hub's cache on this machine") from error
        raise HiloreError(f"model {source}: its configuration cannot be read by the transformers that is installed ({first_line(error)})") from error


def build_on_meta(config: PreTrainedConfig, identity: ModelId) -> nn.Module:
    """The model without weights, of the dtype, attention and adapters that a plan was made for. Raises UsageError."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[identity.dtype], attn_implementation=identity.attn_implementation)
            return prepare_to_train(model, lora=identity.lora, seed=0)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"{type(config).__name__}: cannot be built by the transformers that is installed ({first_line(error)})") from error


def run_checks(model: nn.Module, plan: Plan | FrozenPlan, batches: Sequence[MicroBatch], *, heldout: Sequence[MicroBatch], limits: Limits, progress: Progress) -> list[Check]:
    """A dry run on this machine, against the committed one; against the prediction where none was committed."""
    try:
        check_identity(model_identity(model, source=plan.model.source), plan.model, name=plan.name)
        measured, _ = dry_run(model, plan, batches, heldout=heldout, progress=progress)
    except HiloreError as error:
        return [failed("measured peak", str(error))]
    return [measured_peak_check(measured, plan, limits), measured_risk_check(measured, plan, limits)]


def measured_peak_check(measured: Measurement, plan: Plan | FrozenPlan, limits: Limits) -> Check:
    committed = plan.measured if isinstance(plan, FrozenPlan) else None
    if (over := measured.peak_bytes - plan.budgets.cap_bytes) > 0:
        return failed("measured peak", f"{measured.peak_bytes} bytes, {over} over the cap of {format_bytes(plan.budgets.cap_bytes)}; plan again with a lower --mem-cap")
    then = committed.peak_bytes if committed else plan.predicted.peak_bytes
    return growth_check("measured peak", [(measured.peak_bytes, then)], limit=limits.peak_growth, words=format_bytes, what="measured")


def measured_risk_check(measured: Measurement, plan: Plan | FrozenPlan, limits: Limits) -> Check:
    """Against the committed error of the same micro-batches; where none was committed, against the risk budget."""
    committed = plan.measured if isinstance(plan, FrozenPlan) else None
    if committed is None:
        verdict = passed if measured.rel_error <= plan.budgets.risk else failed
        return verdict("measured risk", f"measured {measured.rel_error:.3g}, the risk budget is {plan.budgets.risk:g}")
    if committed.batch_digest != measured.batch_digest:
        return skipped("measured risk", "the committed gradient error was judged on other micro-batches; name them with --heldout")
    return growth_check("measured risk", [(measured.rel_error, committed.rel_error)], limit=limits.risk_growth, words=lambda error: f"{error:.3g}", what="measured")
