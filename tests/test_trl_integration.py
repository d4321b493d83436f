"""Plans inside TRL's own GRPOTrainer, on a CPU: the same training to the last bit, the planned work counted, and refusals.

Each case trains twice, without and with a plan: four updates of two micro-batches, whose lengths change at every generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import build_tiny
from safetensors.torch import load_file
from steps_for_tests import frozen_plan
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl_for_tests import (
    CAPS,
    GROUP,
    Run,
    differing_parameters,
    run,
    trainer_in,
    vary_lengths,
    watch_inputs,
    watch_logps,
)

from hilore_cli.errors import PlanMismatchError, ProfileError
from hilore_cli.integrations.trl import micro_batch_of, use_plan
from hilore_cli.models import decoder_layers
from hilore_cli.runtime import Handle, attach
from hilore_cli.schema import Pattern, Variant

pytestmark = pytest.mark.filterwarnings("ignore")

UPDATES, LAYERS = len(CAPS), 2
PATTERNS = {
    "store": Pattern(default="store"),
    "recompute": Pattern(),
    "mixed": Pattern(actions={"mlp.gate_proj.mm": "store", "self_attn.v_proj.mm": "store", "add": "store"}),
    "int4": Pattern(actions={"mlp.gate_proj.mm": "compress:int4", "self_attn.v_proj.mm": "compress:int4", "add": "store"}),
}
TRAINED = {"max_steps": UPDATES, "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train, and what its plan does: `replayed` matrix products in each micro-batch's backward, all layers together."""

    layers: list[str]
    replayed: int
    family: str = "llama"
    lora: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    # mixed replays query, key and up of a layer; recompute replays all but down, whose result nobody reads
    "llama": Case(layers=["mixed", "recompute"], replayed=3 + 6, options={"save_strategy": "steps", "save_steps": 2}),
    "qwen3-evaluated": Case(family="qwen3", layers=["mixed", "mixed"], replayed=2 * 3, options={"eval_strategy": "steps", "eval_steps": 1}),
    "off-policy": Case(layers=["mixed", "mixed"], replayed=2 * 3, options={"num_iterations": 2, "beta": 0.1, "loss_type": "grpo"}),
    "bf16": Case(layers=["mixed", "mixed"], replayed=2 * 3, options={"bf16": True}),
    # of seven linears a layer the weight, A and B, but for down's weight and B
    "lora-off-policy": Case(family="qwen3", lora=True, layers=["store", "recompute"], replayed=7 * 3 - 2, options={"num_iterations": 2, "beta": 0.1}),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One case trained without and with its plan; `noted` of the second run holds the handle's counters after each micro-batch."""

    plain: Run
    planned: Run
    plain_folder: Path
    folder: Path
    trainer: Any
    handle: Handle


def new_trainer(folder: Path, *, family: str = "llama", lora: bool = False, **options: Any) -> Any:
    """Four updates, logged one by one; LoRA on all linears with dropout."""
    peft_config = None
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
        peft_config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trainer_in(folder, model=build_tiny(family), peft_config=peft_config, **{**TRAINED, **options})
    vary_lengths(trainer)
    return trainer


def plan_for(trainer: Any, layers: list[str], **options: Any):
    return frozen_plan(trainer.model, {name: PATTERNS[name] for name in set(layers)}, layers, max_tokens=10**6, **options)


def planned_run(trainer: Any, plan: Any, **arguments: Any) -> tuple[Run, Handle]:
    handle = use_plan(trainer, plan)
    return run(trainer, note=lambda: (Counter(handle.calls), Counter(handle.graphs), Counter(handle.microbatches)), **arguments), handle


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory) -> Callable[[str], Pair]:
    """Trains a case at its first use."""

    @cache
    def train(name: str) -> Pair:
        case = CASES[name]
        plain_folder, folder = (tmp_path_factory.mktemp(name) for _ in range(2))
        trainers = [new_trainer(each, family=case.family, lora=case.lora, **case.options) for each in (plain_folder, folder)]
        plain = run(trainers[0])
        planned, handle = planned_run(trainers[1], plan_for(trainers[1], case.layers))
        return Pair(plain=plain, planned=planned, plain_folder=plain_folder, folder=folder, trainer=trainers[1], handle=handle)

    return train


# ------------------------------------------------------------------------------------------------- the same training, planned


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_that_without_a_plan(pair_of, name: str) -> None:
    """Every figure that TRL logs, and every parameter at the end; lengths did change, and the model did."""
    pair = pair_of(name)
    assert pair.planned.log == pair.plain.log
    assert differing_parameters(pair.planned, pair.plain) == []
    updates = [entry for entry in pair.plain.log if "grad_norm" in entry]
    assert len({entry["grad_norm"] for entry in updates}) == len({entry["loss"] for entry in updates}) == UPDATES
    generations = 2 if "num_iterations" in CASES[name].options else UPDATES
    assert len(set(pair.plain.shapes)) == generations
    start = build_tiny(CASES[name].family)
    trained = pair.trainer.model.state_dict()
    assert CASES[name].lora or any(not torch.equal(value, trained[key]) for key, value in start.state_dict().items())


def test_attached_before_the_trainer_is_built(pair_of, tmp_path) -> None:
    """As in a loop of one's own: TRL takes the model as it is, and nothing announces exposures."""
    model = build_tiny("llama")
    layers = CASES["llama"].layers
    plan = frozen_plan(model, {name: PATTERNS[name] for name in layers}, layers, max_tokens=10**6)
    with attach(model, plan) as handle:
        trainer = trainer_in(tmp_path, model=model, **TRAINED)
        vary_lengths(trainer)
        planned = run(trainer)
    assert handle.calls == Counter(layers * 2 * UPDATES)
    assert planned.log == pair_of("llama").plain.log
    assert differing_parameters(planned, pair_of("llama").plain) == []


@pytest.mark.parametrize("name", CASES)
def test_planned_actions_are_carried_out_in_every_micro_batch(pair_of, name: str) -> None:
    """One call for each layer and micro-batch, none for generation, reference and evaluation; and the replayed products."""
    pair, case = pair_of(name), CASES[name]
    assert len(pair.planned.noted) == 2 * UPDATES
    for count, (calls, _, microbatches) in enumerate(pair.planned.noted, start=1):
        assert calls == Counter(case.layers * count)
        assert microbatches == Counter({f"up to {10**6} tokens": count})
    assert pair.handle.calls == pair.planned.noted[-1][0]
    assert {planned - plain for planned, plain in zip(pair.planned.products, pair.plain.products, strict=True)} == {case.replayed}


@pytest.mark.parametrize("name", CASES)
def test_no_recompiles_after_the_first_micro_batch(pair_of, name: str) -> None:
    """One graph for each pattern, split at the first micro-batch, serves all lengths after it: 17, 12, 21 and 10 columns here.

    A pattern on the first layer of a LoRA model and on later ones would have two: the first layer's input has no gradient.
    """
    pair = pair_of(name)
    graphs = [graphs for _, graphs, _ in pair.planned.noted]
    assert graphs[0] == Counter(set(CASES[name].layers))
    assert graphs == [graphs[0]] * len(graphs)


def test_evaluation_and_generation_run_unplanned(pair_of) -> None:
    pair = pair_of("qwen3-evaluated")
    assert sum("eval_loss" in entry for entry in pair.planned.log) == UPDATES
    before = Counter(pair.handle.calls)
    pair.trainer.evaluate()
    pair.trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    assert pair.handle.calls == before


@pytest.mark.slow
def test_compression_changes_gradients_and_nothing_else(pair_of, tmp_path) -> None:
    """Of the first update the forward is that without a plan, so its losses are too; backward reads 4-bit values."""
    trainer = new_trainer(tmp_path, max_steps=1)
    found, handle = planned_run(trainer, plan_for(trainer, ["int4", "int4"]))
    first, exact = found.log[0], pair_of("llama").plain.log[0]
    assert handle.calls == Counter({"int4": 2 * LAYERS})
    assert {name: first[name] for name in first if name not in ("grad_norm", "learning_rate")} == {name: exact[name] for name in first if name not in ("grad_norm", "learning_rate")}
    assert 1e-5 < abs(first["grad_norm"] / exact["grad_norm"] - 1) < 0.2


# --------------------------------------------------------------------------------------------------------- save and resume


def test_saved_files_are_those_without_a_plan(pair_of, tmp_path) -> None:
    """Checkpoints of the run itself, and `save_model`: the same keys and tensors, loaded by transformers into a plain model."""
    pair = pair_of("llama")
    pair.trainer.save_model(tmp_path / "saved")
    for mine, theirs in ((pair.folder / "checkpoint-2", pair.plain_folder / "checkpoint-2"), (tmp_path / "saved", pair.plain_folder / "checkpoint-4")):
        found, expected = (load_file(folder / "model.safetensors") for folder in (mine, theirs))
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert (mine / "config.json").read_text() == (theirs / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not any("_hilore" in vars(layer) or "forward" in vars(layer) for _, layer in decoder_layers(loaded))
    assert all(torch.equal(parameter, pair.plain.parameters[name]) for name, parameter in loaded.named_parameters())


def test_saved_adapters_are_those_without_a_plan(pair_of, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    pair = pair_of("lora-off-policy")
    pair.trainer.save_model(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    trained = {name.replace(".default.", "."): value for name, value in pair.plain.parameters.items() if ".lora_" in name}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    loaded = peft.PeftModel.from_pretrained(build_tiny("qwen3"), tmp_path)
    assert all(torch.equal(value, pair.plain.parameters[name]) for name, value in loaded.named_parameters())


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(pair_of, tmp_path) -> None:
    """From the planned run's own checkpoint, under another exact plan: the last two updates bit for bit."""
    pair = pair_of("llama")
    trainer = new_trainer(tmp_path)
    resumed, handle = planned_run(trainer, plan_for(trainer, ["recompute", "recompute"]), resume_from_checkpoint=str(pair.folder / "checkpoint-2"))
    assert handle.calls == Counter({"recompute": 2 * 2 * LAYERS})
    assert differing_parameters(resumed, pair.plain) == []
    assert [entry for entry in resumed.log if "loss" in entry] == [entry for entry in pair.plain.log if "loss" in entry]


# --------------------------------------------------------------------------------------------------------------- exposure

LOW, HIGH = Variant(max_tokens=10**6, max_exposure=0.95, layers=["recompute"] * LAYERS), Variant(max_tokens=10**6, layers=["mixed"] * LAYERS)


def one_pattern(trainer: Any, **options: Any):
    """A plan of both classes of exposure under one pattern, for what is announced and not what is done."""
    return plan_for(trainer, LOW.layers, variants=[LOW, HIGH.model_copy(update={"layers": LOW.layers})], **options)


def served(weights: list[float], *, together: int) -> list[str]:
    """The variant of each micro-batch, of as many `together` as are announced at once: by its share of their mean weight."""
    labels = []
    for start in range(0, len(weights), together):
        group = weights[start : start + together]
        mean = sum(group) / len(group)
        labels += [LOW.label if weight <= LOW.max_exposure * mean else HIGH.label for weight in group]
    return labels


@pytest.mark.slow
def test_variants_are_chosen_by_each_micro_batchs_exposure(tmp_path) -> None:
    """The exposure that is announced before the forward is the one that autograd then finds, and its class is what runs."""
    options = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 4, "max_steps": 3}
    plain = run(new_trainer(tmp_path / "plain", **options))
    trainer = new_trainer(tmp_path / "planned", **options)
    _, gradients = watch_logps(trainer)
    found, handle = planned_run(trainer, plan_for(trainer, ["mixed", "recompute"], variants=[LOW, HIGH], micro_batches=4))
    expected = served([float(gradient.double().square().sum()) for gradient in gradients], together=4)
    assert Counter(expected).keys() == {LOW.label, HIGH.label}
    assert handle.microbatches == Counter(expected)
    layers = {LOW.label: LOW.layers, HIGH.label: HIGH.layers}
    for count, (calls, _, microbatches) in enumerate(found.noted, start=1):
        assert microbatches == Counter(expected[:count])
        assert calls == Counter(name for label in expected[:count] for name in layers[label])
    assert differing_parameters(found, plain) == []
    assert found.log == plain.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "generated", "updates"),
    [
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}, 8, [2, 2, 2, 2]),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 2, [3, 3, 3, 3, 3, 1, 3]),
    ],
    ids=["two updates of one generation, twice", "updates across generations, the epoch's last one short"],
)
def test_announced_is_what_is_generated_of_the_update(tmp_path, options: dict[str, int], generated: int, updates: list[int]) -> None:
    """What `expect` and `microbatch` are told, weighed by hand (dapo at ratios near 1): every token has its row's advantage, times one factor.

    `generated`: micro-batches between two generations; `updates`: micro-batches of each update.
    """
    trainer = new_trainer(tmp_path, per_device_train_batch_size=GROUP, max_steps=len(updates), **options)
    seen = watch_inputs(trainer)
    handle = use_plan(trainer, one_pattern(trainer, micro_batches=100))
    announced, told, expect, microbatch = [], [], handle.expect, handle.microbatch
    handle.expect = lambda weights: (announced.append(weights), expect(weights))
    handle.microbatch = lambda **known: (told.append(known), microbatch(**known))
    trainer.train()
    shares = [1 / count for count in updates for _ in range(count)]
    weights = [float((each["completion_mask"].sum(1) * each["advantages"].double() ** 2).sum() * (options["steps_per_generation"] * share / float(each["num_items_in_batch"])) ** 2) for each, share in zip(seen, shares, strict=True)]
    chunks = chunks_of(updates, generated=generated)
    assert [len(chunk) for chunk in announced] == [len(chunk) for chunk in chunks]
    assert [weight for chunk in announced for weight in chunk] == pytest.approx(weights, rel=1e-5)
    assert [known["exposure"] for known in told] == pytest.approx(weights, rel=1e-5)
    assert [(known["tokens"], known["length"]) for known in told] == [(GROUP * columns, columns) for columns in (each["prompt_ids"].shape[1] + each["completion_ids"].shape[1] for each in seen)]
    assert handle.microbatches == Counter(label for chunk in chunks for label in served(weights[chunk.start : chunk.stop], together=len(chunk)))
    assert len(handle.microbatches) == 2


def chunks_of(updates: list[int], *, generated: int) -> list[range]:
    """Numbers of the micro-batches that are announced at once: those of an update, up to the next generation."""
    chunks, at = [], 0
    for count in updates:
        end = at + count
        while at < end:
            stop = min(end, (at // generated + 1) * generated)
            chunks.append(range(at, stop))
            at = stop
    return chunks


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A trained trainer whose every completion was cut off and masked, its handle, its run, the inputs, and the weights it began with."""
    options = {"mask_truncated_completions": True, "max_steps": 2, "generation_kwargs": {"suppress_tokens": [0, 1, 2]}}
    trainer = new_trainer(tmp_path_factory.mktemp("masked"), **options)
    seen, before = watch_inputs(trainer), {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    found, handle = planned_run(trainer, one_pattern(trainer, micro_batches=2))
    return trainer, handle, found, seen, before


@pytest.mark.slow
def test_micro_batches_without_a_loss_token(masked) -> None:
    """Nothing is exposed, the least careful variant serves, and nothing is divided by zero."""
    trainer, _, found, seen, before = masked
    assert not any(each["completion_mask"].any() for each in seen)
    assert found.noted[-1][2] == Counter({LOW.label: 4})
    assert [entry["grad_norm"] for entry in found.log if "grad_norm" in entry] == [0.0, 0.0]
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_micro_batches_that_cannot_be_read_run_carefully_with_one_warning(masked) -> None:
    """A completion without a prompt: no position predicts its first token. Training goes on."""
    trainer, handle, *_ = masked
    inputs = {
        "prompt_ids": torch.tensor([[0], [5]]), "prompt_mask": torch.tensor([[0], [1]]), "completion_ids": torch.tensor([[6, 7], [8, 9]]),
        "completion_mask": torch.ones(2, 2, dtype=torch.int64), "advantages": torch.tensor([1.0, -1.0]), "num_items_in_batch": torch.tensor(4),
    }  # fmt: skip
    with pytest.raises(ProfileError, match="TRL micro-batch: row 0, column 1: the first token of a row is a loss token"):
        micro_batch_of(trainer, inputs)
    trainer._buffered_inputs = [inputs, inputs]  # as if train() were called again
    trainer.model.train()
    before = Counter(handle.microbatches)
    with pytest.warns(UserWarning, match=r"plan hand-made: TRL micro-batch: row 0, column 1: .*; micro-batches like it run under the variant for the highest exposure"):
        trainer.compute_loss(trainer.model, inputs).backward()
    assert handle.microbatches - before == Counter({HIGH.label: 1})


def test_detached_announces_nothing(tmp_path) -> None:
    trainer = new_trainer(tmp_path, max_steps=1)
    handle = use_plan(trainer, one_pattern(trainer))
    handle.detach()
    assert not handle.attached
    trainer.train()
    assert not handle.calls
    assert not handle.microbatches
    assert handle.program.choice._seen.maxlen == 1
    assert not handle.program.choice._seen


def test_a_rule_that_needs_log_probabilities_that_trl_does_not_record(tmp_path) -> None:
    trainer = new_trainer(tmp_path, max_steps=1)
    plan = one_pattern(trainer)
    plan = plan.model_copy(update={"budgets": plan.budgets.model_copy(update={"exposure_rule": "logits"})})
    use_plan(trainer, plan)
    with pytest.raises(PlanMismatchError, match=r"plan hand-made: weighs micro-batches by logits, which needs log-probabilities from sampling, and TRL has none .*; plan with --weigh squared"):
        trainer.train()


def test_exposure_of_another_trainer_is_refused(tmp_path) -> None:
    other = Trainer(model=build_tiny("llama"), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    plan = frozen_plan(other.model, {"recompute": Pattern(), "mixed": PATTERNS["mixed"]}, ["mixed"] * LAYERS, max_tokens=10**6, variants=[LOW, HIGH])
    with pytest.raises(PlanMismatchError, match=r"plan hand-made: has variants by exposure, which are read from GRPOTrainer's micro-batches, and this is a Trainer; attach\(trainer.model, plan\)"):
        use_plan(other, plan)
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(other.model))


# ----------------------------------------------------------------------------------------------- checkpointing, other clashes


@pytest.fixture
def fresh(tmp_path):
    """A trainer of one update, and an exact plan for it."""
    trainer = new_trainer(tmp_path, max_steps=1)
    return trainer, plan_for(trainer, ["recompute"] * LAYERS)


def test_trls_default_checkpointing_is_refused(tmp_path) -> None:
    trainer = new_trainer(tmp_path, gradient_checkpointing=True)
    with pytest.raises(PlanMismatchError, match=r"^plan hand-made: the trainer has gradient_checkpointing=True \(TRL's default\).*pass GRPOConfig\(gradient_checkpointing=False\)$"):
        use_plan(trainer, plan_for(trainer, ["recompute"] * LAYERS))
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(trainer.model))


def test_checkpointing_that_is_on_in_the_model_is_refused(fresh) -> None:
    trainer, plan = fresh
    trainer.model.gradient_checkpointing_enable()
    with pytest.raises(PlanMismatchError, match=r"^plan hand-made: gradient checkpointing is on in the model; call model.gradient_checkpointing_disable\(\) first$"):
        use_plan(trainer, plan)


@pytest.mark.parametrize("when", ["by the trainer as it starts", "in the model, so that generation switches it off and on"])
def test_checkpointing_switched_on_after_attach_is_an_error(fresh, when: str) -> None:
    trainer, plan = fresh
    handle = use_plan(trainer, plan)
    if when.startswith("by"):
        trainer.args.activation_checkpointing = True
    else:
        trainer.model.gradient_checkpointing_enable()
    with pytest.raises(PlanMismatchError, match=r"model\.layers\.0: gradient checkpointing is on, which would recompute what the plan stores; set gradient_checkpointing=False"):
        trainer.train()
    assert trainer._buffered_inputs is not None, "it was generated before"
    assert not handle.calls


@pytest.mark.parametrize(
    ("setting", "plugin", "reason"),
    [
        ("is_fsdp_enabled", {"fsdp_plugin": SimpleNamespace(activation_checkpointing=True)}, "FSDP's activation_checkpointing is on"),
        ("is_deepspeed_enabled", {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "DeepSpeed ZeRO-3 empties the weights"),
    ],
    ids=["fsdp", "zero-3"],
)
def test_settings_of_launchers_that_clash(fresh, monkeypatch, setting: str, plugin: dict[str, Any], reason: str) -> None:
    """Neither can be started on one CPU; the plugin is what accelerate would hold."""
    trainer, plan = fresh
    monkeypatch.setattr(trainer, setting, True)
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(state=SimpleNamespace(**plugin)))
    with pytest.raises(PlanMismatchError, match=f"^plan hand-made: {reason}"):
        use_plan(trainer, plan)


def test_plans_of_other_models_are_refused(fresh, tmp_path) -> None:
    trainer, plan = fresh
    other = new_trainer(tmp_path / "other", family="qwen3")
    with pytest.raises(PlanMismatchError, match="plan hand-made: made for architecture LlamaForCausalLM, this model has Qwen3ForCausalLM"):
        use_plan(other, plan)
    use_plan(trainer, plan)
    with pytest.raises(PlanMismatchError, match="another plan is attached; detach it first"):
        use_plan(trainer, plan)
