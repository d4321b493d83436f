"""What a plan cannot run beside, in words: the one source for the integrations, which refuse it, and for `hilore doctor`, which looks before.

Each trainer's settings by a short name, with the fact and the remedy. `WRITTEN_FOR`: the versions whose sources the integrations follow.
"""

from __future__ import annotations

WRITTEN_FOR = {"trl": "1.16", "verl": "0.9", "openrlhf": "0.11"}
"""Distribution -> major.minor."""

ON_LAYERS = "gradient checkpointing is on in the model; call model.gradient_checkpointing_disable() first"

TRL = {
    "gradient_checkpointing": "the trainer has gradient_checkpointing=True (TRL's default), which would recompute what the plan stores; pass GRPOConfig(gradient_checkpointing=False)",
    "activation_checkpointing": "FSDP's activation_checkpointing is on, which would recompute what the plan stores; turn it off in fsdp_config",
    "ZeRO-3": "DeepSpeed ZeRO-3 empties the weights that a recomputation needs; use FSDP2 or ZeRO-2, or train without the plan",
}
VERL = {
    "enable_gradient_checkpointing": "gradient checkpointing is on (verl's default), which would recompute what the plan stores; set actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "enable_activation_offload": "activation offload is on, which moves what the plan stores; set actor_rollout_ref.model.enable_activation_offload=False",
    "FSDP1": "the engine shards with FSDP1, which replaces the parameters that a plan is bound to; set actor_rollout_ref.actor.strategy=fsdp2",
    "Ulysses": "Ulysses sequence parallelism puts collectives into the attention, and recomputing those was never tried; set ulysses_sequence_parallel_size=1, or train without the plan",
}
OPENRLHF = {
    "gradient_checkpointing_enable": "gradient checkpointing is on, which would recompute what the plan stores; leave out --actor.gradient_checkpointing_enable",
    "ZeRO-3": "DeepSpeed ZeRO-3 empties the weights that a recomputation needs; use --ds.zero_stage 2, or train without the plan",
    "DeepCompile": "DeepCompile compiles the model with a partition of its own; leave out --ds.deepcompile",
    "ring attention, tensor parallelism": "ring attention and tensor parallelism put collectives into the layers, and recomputing those was never tried; use --ds.ring_attn_size 1 --ds.tensor_parallel_size 1",
}
REFUSED = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF}
