"""Plans that a solver made from synthetic profiles, and frozen plans as apply makes them, without a dry run."""

from __future__ import annotations

from profiles_for_tests import MIB, chain_class, make_profile, scaling

from hilore_cli.planner import solve_plan
from hilore_cli.records import digest_of
from hilore_cli.schema import FrozenPlan, Plan, Profile, Variant, freeze
from hilore_cli.sizes import parse_cap


def small_profile(**rest: object) -> Profile:
    """Three layers that take a blink to plan, at any size of micro-batch."""
    return make_profile(layers=3, layer_class=scaling(chain_class()), head_bytes=8 * MIB, static_bytes=16 * MIB, **rest)


def solved(profile: Profile, *, variants: bool = True) -> Plan:
    """The plan named p, which compresses something."""
    return solve_plan(profile, cap=parse_cap("1.2x-gc"), risk=0.01, codecs=["int8"], name="p", variants=variants)


def frozen_of(plan: Plan) -> FrozenPlan:
    same = ("name", "model", "batch", "sources", "graph_digests", "head", "budgets", "patterns", "predicted", "update")
    variants = [Variant(**variant.model_dump(include=set(Variant.model_fields))) for variant in plan.variants]
    return freeze(FrozenPlan(plan_digest=digest_of(plan), layer_fqns=[f"model.layers.{i}" for i in range(len(plan.layers))], variants=variants, micro_batches=1, measured=None, **{key: getattr(plan, key) for key in same}))
