"""hilore doctor: what it says of this machine, of models, plans and trainers' settings, and that it says what the runtime then does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from conftest import build_tiny
from torch import nn

from hilore_cli import doctor, ilp
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.check_model import fingerprint_check
from hilore_cli.errors import SolverError, UsageError
from hilore_cli.files import load_frozen_plan, save_json
from hilore_cli.findings import problems
from hilore_cli.grpo import GrpoConfig
from hilore_cli.integrations.clashes import REFUSED, TRL
from hilore_cli.profiler import record_step
from hilore_cli.provenance import Lora
from hilore_cli.trainer_settings import examine_settings, read_settings
from hilore_cli.workbench import Workbench

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "plans" / "smollm2-135m-math.json"


def by_name(findings) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


# -------------------------------------------------------------------------------------------------------------- machine


def test_this_machine(here):
    code, out, err = here("doctor", "--json", "-q")
    document = json.loads(out)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert (code, err, document["format"], document["problems"]) == (0, "", "hilore-doctor", 0)
    assert f"torch {torch.__version__}" in found["versions"]["detail"]
    assert (found["solver"]["status"], found["solver"]["detail"]) == ("ok", f"{ilp.solver_version()}, solves")
    assert found["device"]["status"] == "ok"


def test_a_solver_that_is_missing_or_lies(monkeypatch):
    monkeypatch.setattr(ilp.pulp.PULP_CBC_CMD, "available", lambda self: False)
    assert (finding := doctor.solver_finding()).status == "problem"
    assert "pip install --force-reinstall" in finding.detail
    monkeypatch.undo()

    def lie(problem, *_):
        problem.status, problem.sol_status = 1, 1
        for variable in problem.variables():
            variable.varValue = 1.0

    monkeypatch.setattr(ilp, "call_solver", lie)
    with pytest.raises(SolverError, match=r"least whole number from 1\.5 on is 1\.0"):
        ilp.try_solver()


def test_a_device_that_is_not_there(here):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, err = here("doctor", "--device", "cuda", "-q")
    assert code == 9
    assert "sees no GPU" in " ".join(out.split())
    assert err == "hilore: 1 problem: machine: device\n"


def test_triton_on_a_gpu_that_does_not_answer(monkeypatch):
    """Kernels that are interpreted are a warning on a GPU; kernels that do not run there are a problem, with the reason."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor.triton_finding(torch.device("cuda")).status == "warning"
    monkeypatch.delenv("TRITON_INTERPRET")
    finding = doctor.triton_finding(torch.device("cuda"))
    assert (finding.status, "its kernels do not run (" in finding.detail, "--risk 0" in finding.detail) == ("problem", True, True)
    assert doctor.triton_finding(torch.device("cpu")).status == "ok"


@pytest.mark.parametrize("codec", ["int8", "int4-asym-g32", "e4m3", "bf16", "mask", "fbgemm-int4"])
def test_codecs_run_here(codec):
    plan = load_frozen_plan(REFERENCE)
    plan = plan.model_copy(update={"patterns": {"p": next(iter(plan.patterns.values())).model_copy(update={"actions": {"a": f"compress:{codec}"}})}})
    finding = doctor.codec_finding(partial(doctor.Finding, subject="p"), plan, device="cpu")
    assert (finding.status, finding.detail) == ("ok", f"{codec} run on cpu")


@pytest.mark.parametrize(("version", "status"), [("1.16.0", "ok"), ("1.16", "ok"), ("1.17.0", "warning"), ("1.160", "warning"), (None, "skipped")])
def test_versions_of_trainers(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "version_of", lambda name: version if name == "trl" else None)
    assert by_name(doctor.trainer_findings())["trl"].status == status


def test_variables():
    found = by_name(doctor.variable_findings({"HILORE_DEVICE": "cpu", "HILORE_DEVISE": "cpu", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "0", "HOME": "/"}))
    assert {name: finding.status for name, finding in found.items()} == {"HILORE_DEVICE": "ok", "HILORE_DEVISE": "warning", "TORCHDYNAMO_DISABLE": "problem"}
    assert "HILORE_CACHE" in found["HILORE_DEVISE"].detail


# ---------------------------------------------------------------------------------------------------------------- model


class Nosy:
    """A layer's forward that asks for a value: torch cannot capture it whole."""

    def __init__(self, layer: nn.Module) -> None:
        kind = type(layer)

        def forward(self, hidden_states, *args, **kwargs):
            if float(hidden_states.detach().abs().sum()) < 0:
                raise ValueError
            return kind.forward(self, hidden_states, *args, **kwargs)

        self.type = type("NosyLayer", (kind,), {"forward": forward})


def test_a_model_whose_layers_are_captured(tmp_path):
    build_tiny("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    found = by_name(doctor.examine_model(str(tmp_path), dtype="float32", attn_implementation="eager", lora=None))
    assert found["layers"].detail == "3 of 3 captured whole, as 1 class (3)"
    assert found["attention"].detail.startswith("eager")
    assert not problems(list(found.values()))


DENSE_THEN_SPARSE = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}


def test_a_model_of_two_classes(tmp_path):
    build_tiny("deepseek_v3", **DENSE_THEN_SPARSE).save_pretrained(tmp_path)
    found = by_name(doctor.examine_model(str(tmp_path), dtype="bfloat16", attn_implementation="sdpa", lora=None))
    assert (found["layers"].status, found["layers"].detail) == ("ok", "3 of 3 captured whole, as 2 classes (1 + 2)")


def test_adapters(tmp_path):
    """They are what trains. The lowest layer's input has no gradient, so that its graph is another."""
    pytest.importorskip("peft")
    build_tiny("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    found = by_name(doctor.examine_model(str(tmp_path), dtype="float32", attn_implementation="sdpa", lora=Lora(rank=2)))
    assert found["trained"].detail.startswith("LoRA of rank 2 on all linears: ")
    assert found["layers"].detail == "3 of 3 captured whole, as 2 classes (1 + 2)"


def test_the_reason_is_that_of_a_profile():
    """On fakes the same layers fail as in a real step of the real model, with the same words."""
    real = build_tiny("llama", num_hidden_layers=3)
    fake = doctor.build_fake_model(real.config, dtype="float32")
    for model in (real, fake):
        model.model.layers[1].__class__ = Nosy(model.model.layers[1]).type
    batch = synthetic_micro_batch(vocab_size=97, rows=2, prompt_tokens=4, completion_tokens=8, group_size=2, seed=0)
    bench = Workbench(real, [batch], GrpoConfig())
    record_step(bench)
    tried = doctor.try_layers(fake)
    assert list(bench.uncaptured) == list(tried.reasons) == ["model.layers.1"]
    assert tried.reasons == bench.uncaptured
    assert list(tried.digests) == ["model.layers.0", "model.layers.2"]
    finding = doctor.layer_findings(partial(doctor.Finding, subject="m"), tried)[1]
    assert (finding.status, finding.detail.startswith("model.layers.1: torch cannot capture them whole (")) == ("warning", True)


def test_a_model_none_of_whose_layers_is_captured(tmp_path, here):
    build_tiny("llama").save_pretrained(tmp_path / "tiny")
    with torch._dynamo.config.patch(disable=True):
        code, out, err = here("doctor", "./tiny", "-q")
    assert code == 9
    assert "there is nothing to plan" in " ".join(out.split())
    assert err == "hilore: 1 problem: model ./tiny: layers\n"


@pytest.mark.parametrize(("arguments", "words"), [(("smollm2-135",), "did you mean smollm2-135m"), (("./none",), "no such folder"), (("plans/none.json",), "no such file"), (("smollm2-135m", "--dtype", "int3"), "float32")])
def test_what_is_not_there(here, arguments, words):
    code, out, err = here("doctor", *arguments, "-q")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


# ----------------------------------------------------------------------------------------------------------------- plan


def test_the_reference_plan(here):
    """It fits where the model's configuration is; where it is not, that is said, and nothing blocks."""
    code, out, _ = here("doctor", str(REFERENCE), "--json", "-q")
    document = json.loads(out)
    found = {finding["name"]: finding for finding in document["findings"]}
    plan = load_frozen_plan(REFERENCE)
    assert code == 0
    assert found["fingerprint"]["status"] == {"passed": "ok", "skipped": "warning"}[fingerprint_check(plan).status]
    assert found["layers"]["detail"] == "30 of 30 captured whole, as 1 class (30)"
    assert found["codecs"]["detail"] == "fbgemm-int8 run on cpu" if not torch.cuda.is_available() else "run on cuda"
    assert (found["file"]["status"], found["measured"]["status"]) == ("ok", "ok")


def test_a_plan_of_another_model_and_an_unknown_codec(here, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "examine_model", lambda *_, **__: [])
    plan = load_frozen_plan(REFERENCE)
    build_tiny("llama").save_pretrained(tmp_path / "tiny")
    foreign = plan.model_copy(update={"model": plan.model.model_copy(update={"source": str(tmp_path / "tiny")})})
    found = by_name(doctor.examine_plan(foreign, device="cpu"))
    assert (found["fingerprint"].status, found["codecs"].status) == ("problem", "ok")
    assert "made for" in found["fingerprint"].detail
    pattern = next(iter(plan.patterns.values()))
    unknown = plan.model_copy(update={"patterns": {"p": pattern.model_copy(update={"actions": {"a": "compress:int3"}})}})
    assert "int3" in by_name(doctor.examine_plan(unknown, device="cpu"))["codecs"].detail
    assert by_name(doctor.examine_plan(unknown, device="cpu"))["codecs"].status == "problem"


def test_a_damaged_plan(here, tmp_path):
    save_json(load_frozen_plan(REFERENCE).model_copy(update={"digest": "0" * 16}), tmp_path / "p.json")
    code, out, err = here("doctor", "p.json", "-q")
    assert (code, out) == (6, "")
    assert "p.json" in err


# ------------------------------------------------------------------------------------------------------------- settings

QUIET = {"gradient_checkpointing": False, "bf16": False}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (QUIET, {"settings": "ok"}),
        ({"bf16": False}, {"gradient_checkpointing": "problem"}),
        ({"bf16": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"gradient_checkpointing": "problem", "use_reentrant": "problem"}),
        (QUIET | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"settings": "ok"}),
        (QUIET | {"torch_compile": True}, {"torch_compile": "warning"}),
        (QUIET | {"bf16": True}, {"bf16": "warning"}),
        ({"gradient_checkpointing": False}, {"bf16": "warning"}),
        (QUIET | {"fsdp": "full_shard", "fsdp_config": {"version": 1}}, {"fsdp_version": "problem"}),
        (QUIET | {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}, {"activation_checkpointing": "problem"}),
        (QUIET | {"fsdp_config": {"version": 1, "activation_checkpointing": True}}, {"settings": "ok"}),
        (QUIET | {"deepspeed": {"zero_optimization": {"stage": 3}}}, {"ZeRO-3": "problem"}),
        (QUIET | {"deepspeed": {"zero_optimization": {"stage": 2}}}, {"settings": "ok"}),
        (QUIET | {"model_init_kwargs": {"use_cache": True}}, {"use_cache": "warning"}),
        (QUIET | {"use_liger_kernel": True}, {"kernels": "warning"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, {"settings": "ok"}),
        ({"distributed_type": "FSDP", "fsdp_config": {}}, {"fsdp_version": "problem"}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"ZeRO-3": "problem", "torch_compile": "warning"}),
    ],
)
def test_settings(settings, expected):
    found = by_name(examine_settings(settings, where="s"))
    assert {name: finding.status for name, finding in found.items()} == expected


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, "attn_implementation"), ({"model_init_kwargs": {"dtype": "torch.bfloat16"}}, "dtype"), ({"use_peft": True, "lora_r": 8}, "use_peft")],
)
def test_settings_that_the_plans_fingerprint_refuses(settings, name):
    plan = load_frozen_plan(REFERENCE)
    assert by_name(examine_settings(QUIET | settings, where="s", plan=plan))[name].status == "problem"
    assert not problems(examine_settings(QUIET | settings, where="s"))
    fitting = QUIET | {"model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"}, "use_peft": False}
    assert not problems(examine_settings(fitting, where="s", plan=plan))


def test_adapters_that_make_another_graph_than_the_plans():
    plan = load_frozen_plan(REFERENCE)
    adapters = {"lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.05}

    def found(settings=None, **changed):
        of_plan = plan.model_copy(update={"model": plan.model.model_copy(update=adapters | changed)})
        given = QUIET | {"use_peft": True, "lora_target_modules": ["all-linear"]} | (settings or {})
        return {name: (finding.status, finding.detail) for name, finding in by_name(examine_settings(given, where="s", plan=of_plan)).items() if name not in ("settings", "bf16")}

    assert found() == found(lora_alpha=None) == found({"lora_dropout": "5e-2", "lora_alpha": None}) == {}
    assert found({"lora_target_modules": None}, lora_targets=["q_proj", "v_proj"]) == {}
    another = "another graph, treated as planned where its units are the same"
    assert found(lora_alpha=16.0, lora_dropout=0.0) == {
        "lora_alpha": ("warning", f"32, the plan was made with 16: {another}; profile with --lora-alpha 32"),
        "lora_dropout": ("warning", f"0.05, which is the default of TRL; the plan was made with 0: {another}; profile with --lora-dropout 0.05"),
    }
    assert found({"lora_target_modules": None}) == {
        "lora_target_modules": ("problem", "q_proj, v_proj (what PEFT takes of most models), the plan has adapters on all linears; set all-linear, or profile with --lora-targets q_proj,v_proj"),
    }
    assert found(lora_targets=["q_proj", "v_proj"]) == {
        "lora_target_modules": ("problem", "all-linear, the plan has adapters on q_proj, v_proj; set q_proj v_proj, or profile without --lora-targets"),
    }
    assert {name: status for name, (status, _) in found({"use_dora": True, "use_rslora": True, "lora_modules_to_save": ["lm_head"]}).items()} == {"use_dora": "problem", "use_rslora": "warning", "lora_modules_to_save": "problem"}
    with pytest.raises(UsageError, match="lora_alpha: 'much' is no number"):
        found({"lora_alpha": "much"})


def test_the_words_are_those_of_the_integration(here, tmp_path):
    """And defaults are TRL's own: an empty file of settings is refused as the trainer would be."""
    (tmp_path / "grpo.yaml").write_text("learning_rate: 1e-6\nbf16: false\n")
    code, out, err = here("doctor", "--trainer-args", "grpo.yaml", "--json", "-q")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert (code, findings["gradient_checkpointing"]["detail"]) == (9, TRL["gradient_checkpointing"])
    assert err == "hilore: 1 problem: settings grpo.yaml: gradient_checkpointing\n"


def test_defaults_are_trls():
    trl = pytest.importorskip("trl")
    defaults = {name: field.default for name, field in trl.GRPOConfig.__dataclass_fields__.items()}
    assert defaults["gradient_checkpointing"] is True
    assert defaults["bf16"] is None, "None: on unless fp16 is"
    model = {name: field.default for name, field in trl.ModelConfig.__dataclass_fields__.items()}
    assert (model["lora_r"], model["lora_alpha"], model["lora_dropout"]) == (16, 32, 0.05)
    assert trl.ModelConfig.__dataclass_fields__["lora_r"].default == 16


def test_without_settings_the_refusals_are_named(here):
    code, out, _ = here("doctor", "-q")
    assert code == 0
    for name, clashes in REFUSED.items():
        if doctor.version_of(name):
            assert all(clash in " ".join(out.split()) for clash in clashes)


def test_settings_in_files_beside(tmp_path, monkeypatch):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (tmp_path / "args.json").write_text(json.dumps(QUIET | {"deepspeed": "zero.json", "fsdp_config": '{"version": 1}'}))
    settings = read_settings(tmp_path / "args.json")
    assert settings["deepspeed"]["zero_optimization"]["stage"] == 3
    assert settings["fsdp_config"] == {"version": 1}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(QUIET | {"deepspeed": "gone.json"}))
    with pytest.raises(UsageError, match=r"args\.yaml: deepspeed names gone\.json: no such file"):
        read_settings(tmp_path / "args.yaml")


@pytest.mark.parametrize(("content", "words"), [("[1, 2]", "holds no settings by name"), ("a: [", "neither JSON nor YAML"), ("", "holds no settings by name"), (None, "no such file")])
def test_files_that_hold_no_settings(here, tmp_path, content, words):
    if content is not None:
        (tmp_path / "args.yaml").write_text(content)
    code, out, err = here("doctor", "--trainer-args", "args.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert "args.yaml" in err
