"""Plans inside verl's engine and OpenRLHF's actor: fakes with the real ones' calls on a tiny model, and the real ones' signatures where they are installed."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import sys
import textwrap
import types
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import build_tiny
from losses_for_tests import gradient, openrlhf_loss, verl_loss
from steps_for_tests import differing, frozen_plan
from test_captured import known_rows, namespace, openrlhf_inputs, verl_jagged_inputs, verl_worker_inputs
from torch import Tensor, nn
from torch.nn.functional import log_softmax, pad

from hilore_cli.errors import PlanMismatchError, ProfileError
from hilore_cli.files import save_json
from hilore_cli.integrations import openrlhf, verl
from hilore_cli.models import decoder_layers
from hilore_cli.runtime import Handle
from hilore_cli.schema import Pattern, Variant

PATTERNS = {"store": Pattern(default="store"), "mixed": Pattern(actions={"mlp.gate_proj.mm": "store", "add": "store"})}
LOW = Variant(max_tokens=400, max_exposure=0.5, layers=["store", "store"])
HIGH = Variant(max_tokens=400, layers=["mixed", "mixed"])
SCALES = (1.0, 1.0, 0.1, 3.0)  # of the advantages of an update's micro-batches


def plan_for(model: nn.Module, variants=(HIGH, LOW)):
    return frozen_plan(model, PATTERNS, HIGH.layers, max_tokens=400, variants=variants, micro_batches=2)


def scaled_rows(seed: int, scale: float) -> list[dict]:
    return [row | {"advantages": [scale * a for a in row["advantages"]]} for row in known_rows(seed)]


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """[N,V] and [N] of one row -> [N]: of each token, at the position that predicts it; the last one is of no use."""
    return log_softmax(logits.float(), -1).gather(1, ids.roll(-1)[:, None])[:, 0]


def served(weights: list[float]) -> Counter[str]:
    """Variants by hand: each weight against the mean of the last two, the most careful one before there are two."""
    relative = [None] + [weight / max((weight + last) / 2, 1e-300) for last, weight in pairwise(weights)]
    return Counter(LOW.label if found is not None and found <= LOW.max_exposure else HIGH.label for found in relative)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_tiny("llama")


@pytest.fixture
def told(monkeypatch) -> list[float]:
    """The weights that handles are told."""
    found, microbatch = [], Handle.microbatch

    def listen(self, **given: Any) -> None:
        found.append(given["exposure"])
        microbatch(self, **given)

    monkeypatch.setattr(Handle, "microbatch", listen)
    return found


def gradients_of(model: nn.Module, run) -> dict[str, Tensor]:
    model.zero_grad()
    run()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


# ------------------------------------------------------------------------------------------------------------------- verl

POLICY = {"loss_mode": "vanilla", "kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1, "dro_beta": None}
ACTOR = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean", "loss_scale_factor": None, "entropy_coeff": 0.0, "tau_pos": 1.0, "tau_neg": 1.05, "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}  # fmt: skip
UPDATE = {"batch_num_tokens": 200, "global_batch_size": 40, "dp_size": 1, "use_remove_padding": True, "temperature": 1.0}


def actor_config(**policy: Any) -> SimpleNamespace:
    return namespace(**ACTOR, policy_loss=POLICY | policy)


def ppo_loss(config, model_output, data, dp_group=None):
    width, logps = data["responses"].shape[1], []
    for row, mask in zip(model_output["log_probs"].unbind(), data["attention_mask"], strict=True):
        count = int(mask[-width:].sum())
        logps.append(pad(row[len(row) - count - 1 : -1], (0, width - count)))
    settings = SimpleNamespace(**vars(config), **vars(config.policy_loss), **{name: data[name] for name in ("batch_num_tokens", "global_batch_size", "dp_size")})
    return verl_loss(torch.stack(logps), settings, mask=data["response_mask"], advantages=data["advantages"], old=data["old_log_probs"], weights=data["rollout_is_weights"]), {}


class FakeEngine:
    """FSDPEngineWithLMHead, initialized and unsharded: what is trained, the settings that a plan asks for, and the calls down to the model."""

    def __init__(self, module: nn.Module, *, model: dict | None = None, engine: dict | None = None, sequence_parallel: int = 1) -> None:
        self.module = module
        self.model_config = namespace(**{"enable_gradient_checkpointing": False, "enable_activation_offload": False} | (model or {}))
        self.engine_config = namespace(**{"forward_only": False, "strategy": "fsdp2"} | (engine or {}))
        self.ulysses_sequence_parallel_size = sequence_parallel

    def get_data_parallel_group(self):
        return None

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        for micro_batch in data:
            with torch.set_grad_enabled(not forward_only):
                loss, _ = self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
            if not forward_only:
                loss.backward()

    def forward_step(self, micro_batch, loss_function, forward_only):
        ids, positions = (torch.cat(micro_batch[name].unbind()) for name in ("input_ids", "position_ids"))
        logits = self.module(input_ids=ids[None], attention_mask=None, position_ids=positions[None], use_cache=False).logits[0]
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(token_logps(logits, ids), micro_batch["input_ids"].offsets())}
        return loss_function(model_output=output, data=micro_batch, dp_group=self.get_data_parallel_group())


def verl_update(first_seed: int = 30) -> list[dict]:
    return [verl_worker_inputs(scaled_rows(first_seed + i, scale)) | UPDATE for i, scale in enumerate(SCALES)]


def test_verl_trains_by_the_plan(model, told, tmp_path) -> None:
    """Each micro-batch's variant is that of its exposure, and the gradients are bit for bit those without a plan."""
    loss, update = functools.partial(ppo_loss, config=actor_config()), verl_update()
    expected = gradients_of(model, lambda: FakeEngine(model).forward_backward_batch(update, loss))
    engine = FakeEngine(model)
    save_json(plan_for(model), tmp_path / "plan.json")
    with verl.use_plan(engine, tmp_path / "plan.json") as handle:
        engine.forward_backward_batch(update, loss, forward_only=True)
        assert told == []
        assert handle.calls == Counter()
        found = gradients_of(model, lambda: engine.forward_backward_batch(update, loss))
        assert differing(found, expected) == []
        assert handle.microbatches == served(told)
        assert set(handle.microbatches) == {LOW.label, HIGH.label}
        assert handle.calls.total() == len(update) * len(decoder_layers(model))


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg"])
def test_verl_is_told_the_weight_of_its_own_loss(model, told, mode) -> None:
    """sum c^2 by autograd through verl's formula where the policy is the one that sampled, of tensors in either form."""
    rows = scaled_rows(40, 1.0)
    data, config = verl_worker_inputs(rows) | UPDATE, actor_config(loss_mode=mode)
    settings = SimpleNamespace(**vars(config), **vars(config.policy_loss), **UPDATE)
    c = gradient(verl_loss, data["old_log_probs"].double(), settings, mask=data["response_mask"], advantages=data["advantages"].double(), old=data["old_log_probs"].double(), weights=data["rollout_is_weights"].double())
    with verl.use_plan(FakeEngine(model), plan_for(model)) as handle:
        for form in (data, verl_jagged_inputs(rows) | UPDATE):
            assert verl.weight_of(form, functools.partial(ppo_loss, config=config), handle) == pytest.approx(float(c.square().sum()), rel=1e-5)


def test_verl_advantages_of_gae_are_masked_as_its_loss_does(model) -> None:
    data = verl_worker_inputs(scaled_rows(41, 1.0)) | UPDATE
    everywhere = data | {"advantages": torch.where(data["response_mask"] == 1, data["advantages"], 7.0)}
    loss = functools.partial(ppo_loss, config=actor_config())
    with verl.use_plan(FakeEngine(model), plan_for(model)) as handle:
        assert verl.weight_of(everywhere, loss, handle) == verl.weight_of(data, loss, handle) > 0


def test_verl_micro_batch_without_loss_tokens_weighs_nothing(model) -> None:
    data = verl_worker_inputs(scaled_rows(42, 1.0)) | UPDATE
    with verl.use_plan(FakeEngine(model), plan_for(model)) as handle:
        assert verl.weight_of(data | {"response_mask": data["response_mask"] * 0}, functools.partial(ppo_loss, config=actor_config()), handle) == 0.0


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({}, ppo_loss, r"plan hand-made: verl micro-batch: the loss function is not functools.partial\(ppo_loss, config=...\).*--one-variant"),
        ({}, functools.partial(ppo_loss, config=actor_config(), distillation_config=None), "loss function is not functools.partial"),
        ({}, functools.partial(ppo_loss, config=actor_config(loss_mode="clip_cov")), "loss_mode clip_cov is not supported.*--one-variant"),
        ({"old_log_probs": torch.zeros(2, 2)}, functools.partial(ppo_loss, config=actor_config()), "old_log_probs has shape"),
    ],
)
def test_verl_micro_batches_that_cannot_be_weighed_end_in_one_line(model, change, loss, message) -> None:
    with verl.use_plan(FakeEngine(model), plan_for(model)) as handle, pytest.raises(ProfileError, match=message) as caught:
        verl.weight_of(verl_worker_inputs(scaled_rows(43, 1.0)) | UPDATE | change, loss, handle)
    assert "\n" not in str(caught.value)


def test_verl_needs_no_exposure_where_the_plan_has_none(model) -> None:
    engine = FakeEngine(model)
    with verl.use_plan(engine, plan_for(model, [HIGH])):
        assert "forward_step" not in vars(engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"enable_gradient_checkpointing": True}}, "enable_gradient_checkpointing=False"),
        ({"model": {"enable_activation_offload": True}}, "enable_activation_offload=False"),
        ({"engine": {"forward_only": True}}, "use_plan on the actor's engine"),
        ({"sequence_parallel": 2}, "ulysses_sequence_parallel_size=1"),
    ],
)
def test_verl_settings_that_clash_are_refused(model, settings, message) -> None:
    with pytest.raises(PlanMismatchError, match=f"plan hand-made: .*{message}"):
        verl.use_plan(FakeEngine(model, **settings), plan_for(model))
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))


def test_verl_engines_that_have_no_such_model_are_refused(model, monkeypatch) -> None:
    engine = FakeEngine(model)
    del engine.module
    with pytest.raises(PlanMismatchError, match=r"after engine.initialize\(\)"):
        verl.use_plan(engine, plan_for(model))
    monkeypatch.setattr(verl, "FullyShardedDataParallel", nn.ModuleList)  # building a real one needs a process group
    with pytest.raises(PlanMismatchError, match=r"actor\.strategy=fsdp2"):
        verl.use_plan(FakeEngine(nn.ModuleList([model])), plan_for(model))
    with pytest.raises(PlanMismatchError, match=r"made for .*parameters"):
        verl.use_plan(FakeEngine(build_tiny("llama", tie_word_embeddings=True)), plan_for(model))


def test_verl_loads_models_with_an_option_that_no_graph_depends_on(model) -> None:
    """It hands attn_implementation to AutoConfig, which keeps it beside its own."""
    loaded = build_tiny("llama")
    loaded.config.attn_implementation = "sdpa"
    assert "attn_implementation" in loaded.config.to_dict()
    verl.use_plan(FakeEngine(loaded), plan_for(model)).detach()


def test_verl_lines_of_the_docstring(model, monkeypatch, tmp_path) -> None:
    """As printed: the actor's worker takes the plan when it builds its model."""
    workers = types.ModuleType("verl.workers.engine_workers")

    class TrainingWorker:
        def reset(self) -> None:
            self.engine = FakeEngine(model)

    workers.TrainingWorker, workers.ActorRolloutRefWorker = TrainingWorker, type("ActorRolloutRefWorker", (), {"actor_worker_cls": TrainingWorker})
    package = types.ModuleType("verl.workers")
    package.engine_workers = workers
    for name, made in {"verl": types.ModuleType("verl"), "verl.workers": package, "verl.workers.engine_workers": workers}.items():
        monkeypatch.setitem(sys.modules, name, made)
    save_json(plan_for(model), tmp_path / "math.json")
    lines = textwrap.dedent(verl.__doc__.split("\n\n", 1)[1].split("\n\nand start training")[0])
    exec(lines.replace("/plans/", f"{tmp_path}/"), {})
    worker = workers.ActorRolloutRefWorker.actor_worker_cls()
    worker.reset()
    assert isinstance(worker, TrainingWorker)
    handle = worker.engine.forward_step._handle
    assert all(vars(layer)["_hilore"].program is handle.program for _, layer in decoder_layers(model))
    handle.detach()


# --------------------------------------------------------------------------------------------------------------- OpenRLHF


class FakeDeepSpeedEngine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class FakeActor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, **_: Any):
        positions = attention_mask.long().cumsum(-1) - 1
        positions.masked_fill_(attention_mask == 0, 1)
        output = self.model(sequences, attention_mask=attention_mask, position_ids=positions)
        logps = torch.stack([token_logps(logits, ids) for logits, ids in zip(output.logits, sequences, strict=True)])[:, :-1]
        return logps[:, -action_mask.shape[1] :] * action_mask.float(), output


class FakeTrainer:
    """ActorPPOTrainer of one process: what is trained, the options that a plan asks for, and a training step."""

    def __init__(self, model: nn.Module, *, stage: int = 2, checkpointing: bool = False, deepcompile: bool = False, ring: int = 1, tensor_parallel: int = 1, dynamic: bool = False) -> None:
        self.actor = FakeActor(FakeDeepSpeedEngine(model))
        mesh = {"dp": SimpleNamespace(size=lambda: 1)}
        self.strategy = SimpleNamespace(stage=stage, deepcompile=deepcompile, ring_attn_size=ring, ds_tensor_parallel_size=tensor_parallel, ds_device_mesh=mesh)
        self.replay_buffer = namespace(dynamic_batch_num_tokens=[50.0] * len(SCALES), dynamic_global_batch_size=[10.0] * len(SCALES))
        self.actor_loss_fn = namespace(token_level_loss=True)
        self.args = namespace(
            actor={"gradient_checkpointing_enable": checkpointing, "policy_loss_type": "ppo", "eps_clip_low_high": (0.2, 0.27), "dual_clip": 10.0, "entropy_coef": None, "aux_loss_coef": 0},
            algo={"advantage": {"is_correction_enable": False, "is_correction_type": "tis", "is_correction_threshold": [0.5, 5.0]}, "kl": {"use_loss": False, "init_coef": 0.01, "estimator": "k3"}},
            train={"dynamic_batch_enable": dynamic},
            ds={"packing_samples": False},
        )  # fmt: skip

    def training_step(self, experience, kl_ctl, step, loss_batch_info=None):
        logps, _ = self.actor(experience.sequences, experience.action_mask, attention_mask=experience.attention_mask, return_output=True)
        settings = namespace(**openrlhf.loss_options(self, kl_ctl, loss_batch_info or INFO))
        loss = openrlhf_loss(logps, settings, mask=experience.action_mask, advantages=experience.advantages, old=experience.action_log_probs)
        self.actor.model.backward(loss)
        return step


INFO = {"dp_size": 1, "batch_num_tokens": torch.tensor(50.0), "global_batch_size": torch.tensor(10.0)}


def experiences(first_seed: int = 50) -> list[SimpleNamespace]:
    absent = dict.fromkeys(["values", "returns", "kl", "rewards"])
    return [SimpleNamespace(**absent | openrlhf_inputs(scaled_rows(first_seed + i, scale))) for i, scale in enumerate(SCALES)]


def train(trainer: FakeTrainer, update: list[SimpleNamespace]) -> None:
    for step, experience in enumerate(update):
        assert trainer.training_step(experience, 0.01, step, None if trainer.args.train.dynamic_batch_enable else INFO) == step


@pytest.mark.parametrize("dynamic", [False, True])
def test_openrlhf_trains_by_the_plan(model, told, dynamic) -> None:
    update = experiences()
    expected = gradients_of(model, lambda: train(FakeTrainer(model, dynamic=dynamic), update))
    trainer = FakeTrainer(model, dynamic=dynamic)
    with openrlhf.use_plan(trainer, plan_for(model)) as handle:
        found = gradients_of(model, lambda: train(trainer, update))
        assert differing(found, expected) == []
        assert handle.microbatches == served(told)
        assert set(handle.microbatches) == {LOW.label, HIGH.label}
        assert handle.calls.total() == len(update) * len(decoder_layers(model))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_openrlhf_is_told_the_weight_of_its_own_loss(model, told, kind) -> None:
    """sum c^2 by autograd through OpenRLHF's formula where the policy is the one that sampled."""
    [experience, *_], trainer = experiences(), FakeTrainer(model)
    trainer.args.actor.policy_loss_type = kind
    old = experience.action_log_probs.double()
    c = gradient(openrlhf_loss, old, namespace(**openrlhf.loss_options(trainer, 0.01, INFO)), mask=experience.action_mask, advantages=experience.advantages.double(), old=old)
    with openrlhf.use_plan(trainer, plan_for(model)):
        trainer.training_step(experience, 0.01, 0, INFO)
    model.zero_grad()
    assert told == [pytest.approx(float(c.square().sum()), rel=1e-5)]


def test_openrlhf_micro_batch_without_loss_tokens_weighs_nothing(model) -> None:
    [experience, *_] = experiences()
    experience.action_mask = torch.zeros_like(experience.action_mask)
    trainer = FakeTrainer(model)
    with openrlhf.use_plan(trainer, plan_for(model)) as handle:
        assert openrlhf.weight_of(experience, openrlhf.loss_options(trainer, 0.01, INFO), handle, packed=False) == 0.0


def test_openrlhf_micro_batch_that_cannot_be_weighed_ends_in_one_line(model) -> None:
    [experience, *_] = experiences()
    experience.advantages = experience.advantages[:, 1:]
    trainer = FakeTrainer(model)
    with openrlhf.use_plan(trainer, plan_for(model)), pytest.raises(ProfileError, match=r"plan hand-made: OpenRLHF micro-batch: advantages have shape .*--one-variant"):
        trainer.training_step(experience, 0.01, 0, INFO)


def test_openrlhf_needs_no_exposure_where_the_plan_has_none(model) -> None:
    trainer = FakeTrainer(model)
    with openrlhf.use_plan(trainer, plan_for(model, [HIGH])):
        assert "training_step" not in vars(trainer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpointing": True}, "leave out --actor.gradient_checkpointing_enable"),
        ({"stage": 3}, "ZeRO-3 empties the weights .* --ds.zero_stage 2"),
        ({"deepcompile": True}, "leave out --ds.deepcompile"),
        ({"ring": 2}, "--ds.ring_attn_size 1"),
        ({"tensor_parallel": 2}, "--ds.tensor_parallel_size 1"),
    ],
)
def test_openrlhf_settings_that_clash_are_refused(model, settings, message) -> None:
    with pytest.raises(PlanMismatchError, match=f"plan hand-made: .*{message}"):
        openrlhf.use_plan(FakeTrainer(model, **settings), plan_for(model))
    assert not any("_hilore" in vars(layer) for _, layer in decoder_layers(model))


# ------------------------------------------------------------------------------------------------- what the real ones look like

SIGNATURES = {
    ("verl", "verl/workers/engine/fsdp/transformer_impl.py"): {
        "FSDPEngine.forward_backward_batch": (FakeEngine.forward_backward_batch, ["self", "data", "loss_function", "forward_only"]),
        "FSDPEngine.get_data_parallel_group": (FakeEngine.get_data_parallel_group, ["self"]),
        "FSDPEngineWithLMHead.forward_step": (FakeEngine.forward_step, ["self", "micro_batch", "loss_function", "forward_only"]),
    },
    ("verl", "verl/workers/utils/losses.py"): {"ppo_loss": (ppo_loss, ["config", "model_output", "data", "dp_group"])},
    ("openrlhf", "openrlhf/trainer/ray/ppo_actor.py"): {"ActorPPOTrainer.training_step": (FakeTrainer.training_step, ["self", "experience", "kl_ctl", "step", "loss_batch_info"])},
}
NAMES = {
    ("verl", "verl/workers/engine/fsdp/transformer_impl.py"): ["self.module = module", "self.ulysses_sequence_parallel_size", "self.forward_step(micro_batch, loss_function="],
    ("verl", "verl/workers/config/model.py"): ["enable_gradient_checkpointing: bool = True", "enable_activation_offload: bool"],
    ("verl", "verl/workers/engine_workers.py"): ["actor_worker_cls = TrainingWorker", "self.actor.reset()", "partial(ppo_loss, config="],
    ("openrlhf", "openrlhf/trainer/ray/ppo_actor.py"): ["self.trainer = ActorPPOTrainer(", "self.training_step(experience, kl_ctl, step, loss_batch_info)"],
    ("openrlhf", "openrlhf/utils/deepspeed/deepspeed.py"): ["self.stage = zero_stage", "self.deepcompile =", "self.ring_attn_size =", "self.ds_tensor_parallel_size =", "model.model = engine"],
    ("openrlhf", "openrlhf/trainer/ppo_utils/replay_buffer.py"): ["self.dynamic_batch_num_tokens", "self.dynamic_global_batch_size"],
}


def test_the_fakes_are_called_as_the_real_ones() -> None:
    for functions in SIGNATURES.values():
        for name, (fake, parameters) in functions.items():
            assert list(inspect.signature(fake).parameters) == parameters, name


@pytest.mark.parametrize("trainer", ["verl", "openrlhf"])
def test_the_real_ones_are_as_the_fakes(trainer) -> None:
    """Read as text: importing them takes a dozen packages (test_verl_engine.py does, for verl)."""
    try:
        installed = importlib.metadata.distribution(trainer)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{trainer} is not installed")
    for (owner, path), functions in SIGNATURES.items():
        tree = ast.parse(installed.locate_file(path).read_text(encoding="utf-8")) if owner == trainer else ast.parse("")
        found = {f"{prefix}{node.name}": [a.arg for a in node.args.args] for prefix, body in scopes(tree) for node in body if isinstance(node, ast.FunctionDef)}
        assert owner != trainer or {name: found.get(name) for name in functions} == {name: parameters for name, (_, parameters) in functions.items()}
    for (owner, path), needles in NAMES.items():
        text = installed.locate_file(path).read_text(encoding="utf-8") if owner == trainer else ""
        assert owner != trainer or [needle for needle in needles if needle not in text] == []


def scopes(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    return [("", tree.body), *((f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef))]
