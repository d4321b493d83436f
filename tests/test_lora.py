"""LoRA that hilore puts on: as PEFT would, read off a model again, and profiled with its dropout."""

from __future__ import annotations

import pytest
import torch
from conftest import build_tiny
from torch import nn

from hilore_cli import malloc
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import dry_run
from hilore_cli.capture import model_identity
from hilore_cli.commands.inputs import load_planned_model
from hilore_cli.errors import UsageError
from hilore_cli.grpo import GrpoConfig, gradients
from hilore_cli.lora import find_lora
from hilore_cli.models import decoder_layers, load_model
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.provenance import Lora, ModelId
from hilore_cli.records import digest_of
from hilore_cli.schema import MASK_CODEC
from hilore_cli.sizes import parse_cap

peft = pytest.importorskip("peft", reason="peft is not installed (extra lora)")

SHAPE = {"vocab_size": 97, "rows": 4, "prompt_tokens": 10, "completion_tokens": 14, "group_size": 2}
BATCHES = [(name, synthetic_micro_batch(**SHAPE, seed=seed)) for seed, name in enumerate("abc")]
WIDE = Lora(rank=4)
NARROW = Lora(rank=4, alpha=4.0, dropout=0.1, targets=("down_proj", "q_proj"))


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny("llama", hidden_size=64, intermediate_size=96).save_pretrained(path)
    return path


@pytest.mark.parametrize("lora", [WIDE, NARROW, Lora(rank=2, dropout=0.5)], ids=str)
def test_what_is_put_on_is_found_again(folder, lora: Lora) -> None:
    model = load_model(folder, lora=lora)
    layers = decoder_layers(model)
    wrapped = {name.rsplit(".", 1)[-1]: module for name, module in layers[0][1].named_modules() if hasattr(module, "lora_A")}  # PEFT's mark of an adapted layer
    assert set(wrapped) == set(lora.targets or ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
    assert {module.scaling["default"] for module in wrapped.values()} == {alpha / lora.rank}
    assert {getattr(module.lora_dropout["default"], "p", 0.0) for module in wrapped.values()} == {lora.dropout}
    found = find_lora(model, layers)
    assert (found.rank, found.alpha, found.dropout, found.targets) == (lora.rank, alpha, lora.dropout, lora.targets)
    assert model_identity(model, source="tiny").lora == found


def test_what_peft_puts_on_is_found(folder) -> None:
    """By default peft's own choice of linears; without adapters there is nothing."""
    model = load_model(folder)
    assert find_lora(model, decoder_layers(model)) is None
    config = peft.LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    assert find_lora(model, decoder_layers(model)) == Lora(rank=8, alpha=32.0, dropout=0.05, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (peft.LoHaConfig(r=3, target_modules=["q_proj"]), Lora(rank=3)),
        (peft.LoraConfig(r=3, lora_alpha=0, lora_dropout=1.0, target_modules=["q_proj"]), Lora(rank=3, alpha=0.0, dropout=1.0, targets=("q_proj",))),
        (peft.LoraConfig(r=3, target_modules=["lm_head"]), Lora(rank=3, alpha=8.0, targets=())),
        (peft.LoraConfig(r=3, use_dora=True, target_modules="all-linear"), Lora(rank=3, alpha=8.0)),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), None),
    ],
    ids=["LoHa", "odd values", "LM head", "DoRA", "IA3"],
)
def test_whatever_a_trainer_puts_on_has_an_identity(folder, config, found: Lora | None) -> None:
    """Refused is nothing: that is for who would make such adapters."""
    assert model_identity(peft.get_peft_model(load_model(folder), config), source="tiny").lora == found


def test_the_linears_of_gpt2(tmp_path) -> None:
    """Which are Conv1D."""
    build_tiny("gpt2", n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    model = load_model(tmp_path, lora=Lora(rank=2, targets=("c_attn",)))
    assert {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, p in model.named_parameters() if "lora_A" in name} == {"c_attn"}
    assert find_lora(model, decoder_layers(model)).targets == ("c_attn",)
    model = load_model(tmp_path, lora=Lora(rank=2))
    assert len([name for name, p in model.named_parameters() if p.requires_grad]) == 2 * 4 * 2
    assert find_lora(model, decoder_layers(model)).targets is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "lora rank 0: must be at least 1"),
        ({"rank": 4, "alpha": 0.0}, "lora alpha 0: must be above 0, and finite"),
        ({"rank": 4, "alpha": float("inf")}, "lora alpha inf: must be above 0, and finite"),
        ({"rank": 4, "dropout": 1.0}, "lora dropout 1: must be from 0 to under 1"),
        ({"rank": 4, "dropout": float("nan")}, "lora dropout nan: must be from 0 to under 1"),
        ({"rank": 4, "targets": ()}, "lora targets: none is named"),
    ],
)
def test_values_outside_pefts_are_refused(folder, settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(folder, lora=Lora(**settings))


@pytest.mark.parametrize("command", [["profile", "--model"], ["doctor"]], ids=["profile", "doctor"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-alpha", "8"], "--lora-alpha is of adapters; give their rank with --lora, too"),
        (["--lora-dropout", "0"], "--lora-dropout is of adapters; give their rank with --lora, too"),
        (["--lora", "4", "--lora-targets", " , "], "lora targets: none is named"),
        (["--lora", "4", "--lora-dropout", "1"], "lora dropout 1: must be from 0 to under 1"),
        (["--lora", "4", "--lora-targets", "all-linear"], "lora target 'all-linear': no linear of the decoder layers; there are down_proj"),
    ],
)
def test_options_that_cannot_be(here, folder, tmp_path, monkeypatch, command: list[str], options: list[str], words: str) -> None:
    monkeypatch.setattr(malloc, "steady_malloc", lambda: True)
    code, out, err = here(*command, str(folder), *options, "-q")
    assert (code, out) == (2, "")
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_not_there_is_named_with_those_that_are(folder) -> None:
    with pytest.raises(UsageError, match=r"lora target 'c_attn': no linear of the decoder layers; there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        load_model(folder, lora=Lora(rank=2, targets=("q_proj", "c_attn")))


def test_digests_of_older_files_hold(folder) -> None:
    """Files without the later fields have the digest that they had; of others each field counts."""
    identity = model_identity(load_model(folder, lora=NARROW), source="tiny")
    document = identity.model_dump(mode="json")
    older = ModelId(**{key: value for key, value in document.items() if key not in ModelId.LATER})
    assert older.lora == Lora(rank=4)
    assert digest_of(older) == digest_of(older.model_copy(update={"lora_dropout": 0.0}))
    assert len({digest_of(identity), digest_of(older), *(digest_of(identity.model_copy(update={name: ModelId.model_fields[name].default})) for name in ModelId.LATER)}) == 5


def test_dropout_drops_the_same_each_time(folder) -> None:
    model = load_model(folder, lora=Lora(rank=2, dropout=0.5))
    state = torch.get_rng_state()
    first, second = (gradients(model, [BATCHES[0][1]], GrpoConfig()) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    without = gradients(model, [BATCHES[0][1]], GrpoConfig())
    assert any(not torch.equal(first[name], without[name]) for name in first)


def test_a_profile_with_dropout_makes_plans_that_hold(folder, tmp_path) -> None:
    """Whole plans bring the errors that were predicted, the exact one none, and the model is built again from the plan alone."""
    model = load_model(folder, lora=NARROW)
    with torch.no_grad():  # B starts at zero, where A has no gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    request = ProfileRequest(name="dropped", source=str(folder), task="none", sources=["a", "b", "c"], codecs=["int8"], config=GrpoConfig(head="chunked"), repeats=1)
    profile = profile_update(model, BATCHES, request, folder=tmp_path / "profile", progress=silent)
    assert profile.model.lora == NARROW
    assert any(unit.codec == MASK_CODEC for unit in profile.units)
    ratios = [pair.measured_rel_error / pair.predicted_rho2**0.5 for pair in profile.calibration]
    assert len(ratios) >= 4
    assert 0.3 < min(ratios) <= max(ratios) < 3
    plan = solve_plan(profile, cap=parse_cap("0.7x-none"), risk=0.0, codecs=["int8"], name="dropped")
    measured, _ = dry_run(model, plan, [batch for _, batch in BATCHES], progress=silent)
    assert measured.rel_error == 0
    assert measured.peak_bytes <= plan.budgets.cap_bytes
    again = load_planned_model(str(folder), plan, device="cpu")
    assert model_identity(again, source=str(folder)) == profile.model
