"""attach / detach: carrying a frozen plan out inside the user's own trainer.

    from hilore_cli import attach, load_plan
    with attach(model, load_plan("plans/smollm2-math.json")):
        train()

A plan with several variants takes one for each micro-batch, before its first layer: by its size, and by its exposure where the
trainer tells it (`handle.microbatch`). All ranks take the same.

What it does NOT do: profile, plan, change the forward pass, touch generation or evaluation without gradients, or a pass in which nothing
trains (there the layer's own forward runs), or keep a model alive. A copied, pickled or loaded model carries an inert handle.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.utils import PushToHubMixin

from hilore_cli.adapters import parameter_names, refuse_other_parameters, traceable_adapters
from hilore_cli.capture import JointGraph, graph_digest, model_identity, sharded_modules, unit_keys
from hilore_cli.capture_failures import explain, ran_uncompiled
from hilore_cli.choice import RECOMPUTE_ALL, VariantChoice
from hilore_cli.codecs import seeded
from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.files import load_frozen_plan
from hilore_cli.gradient_error import LayerCall
from hilore_cli.guard import Guard, GuardRecord, compresses
from hilore_cli.models import decoder_layers, unwrapped
from hilore_cli.output_capture import OutputCapture
from hilore_cli.partition import compile_layer, compiler_settings
from hilore_cli.provenance import ModelId
from hilore_cli.replay import hidden_states_of
from hilore_cli.schema import ExposureRule, FrozenPlan, Pattern, Variant

LOG = logging.getLogger("hilore")

Runner = Callable[[fx.GraphModule, str], Callable[[list[Any]], Any]]


def load_plan(path: Path | str) -> FrozenPlan:
    """Read and check a frozen plan. Raises PlanMismatchError that names the file and the remedy."""
    return load_frozen_plan(path)


def attach(model: nn.Module, plan: FrozenPlan, *, group: dist.ProcessGroup | None = None) -> Handle:
    """Install a frozen plan on the model it was made for; returns a handle that is a context manager.

    `group`: the ranks that must take the same variant (their micro-batches go through the model together); by default all of
    torch.distributed, where it is initialised.

    Raises PlanMismatchError when model, dtype, attention implementation, layer count or trainable parameters are not those of
    the plan, or when a plan is attached already.
    """
    model = unwrapped(model)
    if not isinstance(model, (PreTrainedModel, PushToHubMixin)):
        remedies = {
            "FullyShardedDataParallel": "shard with FSDP2 (fully_shard), which keeps the parameters that a plan is bound to",
            "DataParallel": "use DistributedDataParallel: DataParallel's copies would run the first GPU's layers",
        }
        remedy = remedies.get(type(model).__name__, "attach to the model itself, before or after wrapping")
        raise PlanMismatchError(f"plan {plan.name}: {type(model).__name__} is not a transformers or PEFT model; {remedy}")
    for module in sharded_modules(model):
        module.reshard()  # after a forward its parameters may still be whole, and in the dtype of a mixed-precision policy
    check_identity(model_identity(model, source=plan.model.source), plan.model, name=plan.name)
    fqns = [fqn for fqn, _ in decoder_layers(model)]
    if len(fqns) != len(plan.layer_fqns):
        raise PlanMismatchError(f"plan {plan.name}: made for {len(plan.layer_fqns)} decoder layers, the model has {len(fqns)}")
    return attach_patterns(model, patterns=plan.patterns, variants=plan.variants, name=plan.name, fallback=plan.fallback, graph_digests=plan.graph_digests, micro_batches=plan.micro_batches, exposure_rule=plan.budgets.exposure_rule, group=group, risk=plan.budgets.risk, predicted=plan.update.rel_error)


def check_identity(found: ModelId, expected: ModelId, *, name: str) -> None:
    """Raise PlanMismatchError that names the first difference between the model at hand and the one a file was made for."""
    labels = {
        "architecture": "architecture",
        "layers": "number of decoder layers",
        "dtype": "dtype",
        "attn_implementation": "attention implementation",
        "lora_rank": "LoRA rank",
        "parameters": "number of parameters",
        "config_digest": "configuration digest",
        "trainable_digest": "digest of parameter names, shapes and which are trainable",
    }
    for field, label in labels.items():
        mine, theirs = getattr(found, field), getattr(expected, field)
        if mine != theirs:
            raise PlanMismatchError(f"plan {name}: made for {label} {theirs}, this model has {mine}; profile and plan this model, or load the one the plan was made for")


def attach_patterns(
    model: nn.Module,
    *,
    patterns: Mapping[str, Pattern],
    variants: Sequence[Variant],
    name: str,
    fallback: Sequence[str] = (),
    graph_digests: Sequence[str] = (),
    micro_batches: int = 1,
    exposure_rule: ExposureRule = "squared",
    group: dist.ProcessGroup | None = None,
    risk: float | None = None,
    predicted: float | None = None,
    run: Runner | None = None,
    on_split: Callable[[JointGraph], None] | None = None,
) -> Handle:
    """Install patterns without a fingerprint check: `attach` and the profiler build on it.

    `risk` and `predicted`: the update's relative gradient error, as budgeted and as predicted (for a guard).
    `run` wraps the generated graphs and `on_split` sees each joint graph (profiler only).
    """
    layers = decoder_layers(model)
    for variant in variants:
        if len(variant.layers) != len(layers):
            raise PlanMismatchError(f"plan {name}: made for {len(variant.layers)} decoder layers, the model has {len(layers)}")
    choice = VariantChoice(name=name, variants=variants, micro_batches=micro_batches, rule=exposure_rule, group=group)
    program = Program(name=name, patterns=patterns, choice=choice, capture=OutputCapture(model), graph_digests=graph_digests, run=run, on_split=on_split)
    handle = Handle(program=program, model=model, layers=layers, fallback=fallback, risk=risk, predicted=predicted)
    handle.install()
    return handle


class Handle:
    """An attached plan: a context manager, or call `detach()`. Holds no reference that keeps the model alive.

    A detached handle can be installed again (by `with` or `install()`) and keeps its compiled graphs.
    """

    def __init__(self, *, program: Program, model: nn.Module, layers: Sequence[tuple[str, nn.Module]], fallback: Sequence[str], risk: float | None, predicted: float | None) -> None:
        self.program = program
        self._model = weakref.ref(model)
        self._risk, self._predicted = risk, predicted
        self._layers = [(fqn, weakref.ref(layer)) for fqn, layer in layers]
        self._parameters = {fqn: parameter_names(layer) for fqn, layer in layers}
        self._fallback = frozenset(fallback)
        program.layers = self._layers

    def __enter__(self) -> Handle:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def install(self) -> None:
        """Put the plan on the layers; nothing happens when it is there. Raises PlanMismatchError when another one is."""
        layers = [(fqn, layer) for fqn, reference in self._layers if (layer := reference()) is not None]
        for fqn, layer in layers:
            held = vars(layer).get("_hilore")
            if held is not None and held.program not in (None, self.program):
                raise PlanMismatchError(f"{fqn}: another plan is attached; detach it first")
            if held is None and "forward" in vars(layer):
                raise PlanMismatchError(f"{fqn}: its forward was replaced on the instance by other code; attach the plan before that")
        for index, (fqn, layer) in enumerate(layers):
            layer._hilore = LayerHandle(program=self.program, index=index, fqn=fqn, checkpointed=fqn in self._fallback, parameters=self._parameters[fqn])
            layer.forward = types.MethodType(forward, layer)

    def expect(self, weights: Sequence[float]) -> None:
        """Tell the weights (exposure.weight_of) of all micro-batches of the coming update, in any order: what each is compared with.

        Without it a micro-batch is compared with the last that were told, as many as the profiled update had; until then it
        gets the variant for the highest exposure.
        """
        self.program.choice.expect(weights)

    def microbatch(self, *, exposure: Tensor | float | None = None, logps: Tensor | None = None, tokens: int | None = None, length: int | None = None) -> None:
        """Tell of the micro-batch that comes next.

        `exposure`: c = dL/dlogp of its tokens, any shape, as known before the forward (hilore_cli.exposure), or its weight as a
        number (exposure.weight_of); `logps`: log-probabilities of the same tokens when they were sampled, for a plan whose rule
        is "logits"; `tokens`: rows x padded length, `length`: padded tokens of a row. What is not told is seen at the first
        layer. With torch.distributed every rank must call it.
        """
        self.program.choice.tell(exposure=exposure, logps=logps, tokens=tokens, length=length)

    def guard(self, *, every: int, budget: float | None = None, fallback: bool = True, on_measure: Callable[[GuardRecord], object] | None = None) -> Guard:
        """Measure the true gradient error of one of every so many micro-batches, and leave the plan when it is over the budget (guard.py).

        `budget`: relative gradient error of an update; by default the plan's risk. `fallback` False: only warn. `on_measure` gets each
        GuardRecord. With torch.distributed every rank sets the same guard. Raises UsageError where a guard is set already.
        """
        if self.program.guard is not None:
            raise UsageError("guard: this plan has a guard already; handle.unguard() takes it off")
        layers = [(fqn, layer) for fqn, reference in self._layers if (layer := reference()) is not None]
        self.program.guard = Guard(self._model(), layers=layers, choice=self.program.choice, every=every, budget=self._risk if budget is None else budget, predicted=self._predicted, fallback=fallback, on_measure=on_measure)
        return self.program.guard

    def unguard(self) -> None:
        """Take the guard off; the plan goes on, also where the guard had left it. Calling it twice is harmless."""
        if self.program.guard is not None:
            self.program.guard.drop()
            self.program.guard.reset()
        self.program.guard = None

    def detach(self) -> None:
        """Give every layer its own forward back. Calling it twice is harmless."""
        if self.program.guard is not None:
            self.program.guard.drop()
        for _, reference in self._layers:
            layer = reference()
            if layer is not None and "_hilore" in vars(layer) and vars(layer)["_hilore"].program is self.program:
                del layer._hilore
                del layer.forward

    def leave_to_checkpoint(self, fqn: str) -> None:
        """Run a layer by torch's checkpoint from now on, whatever its pattern: torch cannot capture it whole (profiler only)."""
        self._fallback |= {fqn}
        for name, reference in self._layers:
            layer = reference()
            if name == fqn and layer is not None and "_hilore" in vars(layer) and layer._hilore.program is self.program:
                layer._hilore.checkpointed = True

    @property
    def attached(self) -> bool:
        """Whether the plan is on its layers now."""
        layers = (reference() for _, reference in self._layers)
        return any(layer is not None and "_hilore" in vars(layer) and layer._hilore.program is self.program for layer in layers)

    @property
    def calls(self) -> Counter[str]:
        """How many training calls each pattern has served."""
        return self.program.calls

    @property
    def exposure_rule(self) -> ExposureRule:
        """What `microbatch` makes of a tensor of exposures."""
        return self.program.choice.rule

    @property
    def microbatches(self) -> Counter[str]:
        """How many micro-batches each variant has served, by its label."""
        return self.program.choice.served

    @property
    def graphs(self) -> Counter[str]:
        """How many joint graphs were split for each pattern: more than a few means recompiles."""
        return self.program.splits


class Program:
    """The patterns of one attached plan, compiled on first use and shared by the layers."""

    def __init__(self, *, name: str, patterns: Mapping[str, Pattern], choice: VariantChoice, capture: OutputCapture, graph_digests: Sequence[str], run: Runner | None, on_split: Callable[[JointGraph], None] | None) -> None:
        self.name = name
        self.patterns = {**patterns, RECOMPUTE_ALL: Pattern()}
        self.choice = choice
        self.calls: Counter[str] = Counter()
        self.splits: Counter[str] = Counter()
        self.runs = 0
        self.layers: Sequence[tuple[str, Callable[[], nn.Module | None]]] = ()
        self.current_layer = -1
        self.guard: Guard | None = None
        self._layer: Callable[[], nn.Module | None] | None = None
        self._capture = capture
        self._run = run
        self._on_split = on_split
        self._graph_digests = frozenset(graph_digests)
        self._compiled: dict[tuple[str, type], Callable[..., Any]] = {}

    def watch(self, layer: nn.Module, handle: LayerHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
        """Tell the guard, if there is one, of a training forward that comes."""
        return None if self.guard is None else self.guard.watch(layer, fqn=handle.fqn, index=handle.index, args=args, kwargs=kwargs)

    def call(self, layer: nn.Module, handle: LayerHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer's training forward under its pattern."""
        watched = self.watch(layer, handle, args, kwargs)
        hidden = hidden_states_of(args, kwargs)
        if handle.index <= self.current_layer:
            self._warn_of_replaced()
        variant = self.choice.at_layer(handle.index, rows=hidden.shape[0], length=hidden.shape[1])
        name = RECOMPUTE_ALL if variant is None else variant.layers[handle.index]
        compiled, runs = self._compiled_for(name, type(layer)), self.runs
        self.current_layer = handle.index
        self._layer = weakref.ref(layer)
        try:
            with compiler_settings(), seeded(self._seed()), self._capture.handed_over(layer), traceable_adapters():
                output = compiled(layer, *args, **kwargs)
        except Exception as error:  # torch raises many types while it captures; what is not ours to explain goes on unchanged
            explained = explain(error, plan=self.name, fqn=handle.fqn)
            if explained is error:
                raise
            raise explained from error
        finally:
            explained = None  # its traceback holds this frame, and so all that the layers before have saved
        self.calls[name] += 1
        if self.runs == runs and _requires_grad(output):
            raise ran_uncompiled(plan=self.name, fqn=handle.fqn)
        if watched is not None:
            watched.returned(output, compresses=compresses(self.patterns[name]))
        _refuse_double_backward(output, plan=self.name, fqn=handle.fqn)
        return output

    def call_uncaptured(self, layer: nn.Module, handle: LayerHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer's training forward by torch's checkpoint."""
        watched = self.watch(layer, handle, args, kwargs)
        output = checkpoint(types.MethodType(type(layer).forward, layer), *args, use_reentrant=False, **kwargs)
        if watched is not None:
            watched.returned(output, compresses=False, captured=False)
        return output

    def _warn_of_replaced(self) -> None:
        """A layer that is gone was replaced or taken out after the plan was attached; what stands there now runs without it."""
        gone = [fqn for fqn, reference in self.layers if reference() is None]
        if gone:
            self.choice.warn_once("gone", f"{gone[0]} is not the layer any more that the plan was attached to, and what stands there runs without it; detach, and attach again")

    def _seed(self) -> int:
        """Another one for every layer, micro-batch and rank: what ranks round must differ, or averaging their gradients would not average it out."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return rank << 32 | self.calls.total() % 2**32

    def _compiled_for(self, name: str, layer_type: type) -> Callable[..., Any]:
        key = (name, layer_type)
        if key not in self._compiled:
            self._compiled[key] = compile_layer(layer_type.forward, pattern=self.patterns[name], on_split=lambda joint: self._count(name, joint), on_run=self._note_run, run=self._run)
        return self._compiled[key]

    def _note_run(self) -> None:
        self.runs += 1

    def _count(self, name: str, joint: JointGraph) -> Pattern | None:
        """Note a split; a graph that was not profiled and lacks units of the pattern is recomputed whole instead."""
        self.splits[name] += 1
        LOG.debug("compiled: pattern %s, graph %d of it", name, self.splits[name])
        known = graph_digest(joint) in self._graph_digests
        if not known:
            layer = self._layer()
            refuse_other_parameters(layer, attached_to=layer._hilore.parameters)
        if self._graph_digests and not known:
            foreign = "a layer's graph is not one that was profiled (no padding where there was some, another precision, mode or version)"
            missing = set(self.patterns[name].actions) - set(unit_keys(joint).values())
            if missing:
                self.choice.warn_once("units", f"{foreign} and has no unit {sorted(missing)[0]!r}; such layers are recomputed whole, exactly. Profile the model as it is run")
                return Pattern()
            self.choice.warn_once("graph", f"{foreign}; the plan is carried out by unit names, its peak and gradient error hold for the profiled graph only. Profile the model as it is run")
        if self._on_split is not None:
            self._on_split(joint)
        return None


class LayerHandle:
    """What an attached layer carries. Copies and unpickles as inert, so that a copy runs its own weights and its own forward."""

    def __init__(self, program: Program | None = None, index: int = -1, fqn: str = "", checkpointed: bool = False, parameters: frozenset[str] = frozenset()) -> None:
        self.program = program
        self.index = index
        self.fqn = fqn
        self.checkpointed = checkpointed
        self.parameters = parameters

    @property
    def inert(self) -> bool:
        return self.program is None

    def __copy__(self) -> LayerHandle:
        return LayerHandle()

    def __deepcopy__(self, _memo: dict[int, Any]) -> LayerHandle:
        return LayerHandle()

    def __reduce__(self) -> tuple[type[LayerHandle], tuple[()]]:
        return (LayerHandle, ())


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Installed as a bound method of this name on each layer (a closure would run the original's weights in a deep copy)."""
    handle: LayerHandle = self._hilore
    if handle.inert or not torch.is_grad_enabled() or not _needs_backward(self, args, kwargs):
        return type(self).forward(self, *args, **kwargs)
    if self.training and vars(self).get("gradient_checkpointing", False):
        raise PlanMismatchError(f"{handle.fqn}: gradient checkpointing is on, which would recompute what the plan stores; set gradient_checkpointing=False (model.gradient_checkpointing_disable())")
    if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        raise PlanMismatchError(f"{handle.fqn}: is given a KV cache in a training forward, which makes another graph of every layer and keeps what backward does not need; pass use_cache=False, or set model.config.use_cache = False")
    if _inside_checkpoint():
        raise PlanMismatchError(f"{handle.fqn}: runs inside torch's checkpoint, which would recompute what the plan stores; take the checkpointing around the layers or the model away")
    if handle.checkpointed:
        return handle.program.call_uncaptured(self, handle, args, kwargs)
    return handle.program.call(self, handle, args, kwargs)


def _needs_backward(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False where gradients are on but nothing trains: frozen layers with their adapters switched off (a reference pass)."""
    return any(p.requires_grad for p in layer.parameters()) or any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs)))


def _inside_checkpoint() -> bool:
    """Whether somebody's torch.utils.checkpoint is running this forward: the kind with hooks by its name, the reentrant kind because it runs within backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch._C._current_graph_task_id() != -1 or (hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook"))


def _requires_grad(output: Any) -> bool:
    return next(_differentiable(output), None) is not None


def _differentiable(output: Any) -> Iterator[Tensor]:
    """What gradients come back through."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    return (value for value in values if isinstance(value, Tensor) and value.requires_grad)


def _refuse_double_backward(output: Any, *, plan: str, fqn: str) -> None:
    """Have a backward that is to be differentiated itself (create_graph=True) end in our words before it begins; torch's compiled graphs have none."""

    def refuse(_gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UsageError(f"plan {plan}: backward with create_graph=True through {fqn}, and a compiled layer has no second derivative; detach the plan for that step")

    for value in _differentiable(output):
        value.register_hook(refuse)
