"""A profile at another size of micro-batch: what it would have measured with fewer (or more) tokens.

Bytes are exact: every storage is a polynomial of rows and length (schema.GraphNode). The account outside the layers is linear in
the tokens, between two measured sizes. Times are taken in proportion to the tokens, payloads to their units' bytes. Risk is relative
to the micro-batch's own gradient and stays as it is.
"""

from __future__ import annotations

import math
from fractions import Fraction

from hilore_cli.errors import ProfileError
from hilore_cli.schema import Account, GraphNode, Profile, StepPeaks, StepTimes

SCALED_FIELDS = ("shared_bytes", "head_bytes", "tail_bytes", "update_bytes")


def profile_at(profile: Profile, *, tokens: int, length: int) -> Profile:
    """The profile at `tokens` = rows x padded length, in rows of `length`. Raises ProfileError where only one size was measured."""
    if (tokens, length) == (profile.batch.tokens, profile.batch.length):
        return profile
    ratio = tokens / profile.batch.tokens
    nodes = {c.name: [scaled_node(node, tokens=tokens, length=length, ratio=ratio) for node in c.nodes] for c in profile.classes}
    bytes_of = {(name, node.unit): node.nbytes for name, rows in nodes.items() for node in rows if node.unit}
    class_of = [row.layer_class for row in profile.layers]
    units = []
    for unit in profile.units:
        nbytes = bytes_of[class_of[unit.layer], unit.unit]
        payload = unit.payload_bytes if nbytes == unit.nbytes else min(nbytes, math.ceil(unit.payload_bytes * nbytes / max(unit.nbytes, 1)) + 256)
        units.append(unit.model_copy(update={"nbytes": nbytes, "payload_bytes": payload, "compress_us": unit.compress_us * ratio, "decompress_us": unit.decompress_us * ratio}))
    account = account_at(profile, tokens)
    longer = max(1.0, length / profile.batch.length)  # masks are quadratic in the length
    account = account.model_copy(update={"shared_bytes": math.ceil(account.shared_bytes * longer)})
    static = account.static_bytes
    times, peaks = profile.times, profile.peaks
    return profile.model_copy(
        update={
            "batch": profile.batch.model_copy(update={"tokens": tokens, "length": length, "rows": max(1, tokens // length)}),
            "account": account,
            "classes": [c.model_copy(update={"nodes": nodes[c.name]}) for c in profile.classes],
            "units": units,
            "times": StepTimes(none_us=times.none_us * ratio, gc_us=times.gc_us * ratio, recompute_us=times.recompute_us * ratio, repeats=times.repeats, threads=times.threads),
            "peaks": StepPeaks(none_bytes=static + round((peaks.none_bytes - static) * ratio), gc_bytes=static + round((peaks.gc_bytes - static) * ratio)),
        }
    )


def scaled_node(node: GraphNode, *, tokens: int, length: int, ratio: float) -> GraphNode:
    """A node's bytes by its polynomial, its time in proportion."""
    nbytes = evaluate_terms(node.nbytes_terms, batch=Fraction(tokens, length), length=length)
    return node.model_copy(update={"nbytes": nbytes if node.nbytes else 0, "time_us": node.time_us * ratio})


def evaluate_terms(terms: dict[str, int], *, batch: int | Fraction, length: int) -> int:
    """Value of a byte polynomial, rounded up: keys are monomials such as '1', 's', 'bs', 'bss'."""
    return math.ceil(sum(factor * batch ** key.count("b") * length ** key.count("s") for key, factor in terms.items()))


def account_at(profile: Profile, tokens: int) -> Account:
    """The account at so many tokens: on the line through the two measured sizes, and below the smaller one as there."""
    large, smaller = profile.account, profile.smaller
    if tokens == profile.batch.tokens:
        return large
    if smaller is None:
        raise ProfileError(f"profile {profile.name}: its account was measured at one size only; profile a micro-batch of more rows")
    share = max(0.0, (tokens - smaller.tokens) / (profile.batch.tokens - smaller.tokens))
    low, high = smaller.account.model_dump(), large.model_dump()
    line = {name: max(0, math.ceil(low[name] + share * (high[name] - low[name]))) for name in SCALED_FIELDS}
    return large.model_copy(update=line)
