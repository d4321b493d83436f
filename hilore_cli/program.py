"""A layer class's rows -> the layer's program that ilp.py solves: values, operators, phases, codecs.

Views are folded into the storage they alias; values and phases that can never matter are pruned, which is where most of the
solver's speed comes from. What it does NOT do: choose anything (planner.py does), or simulate bytes exactly (timeline.py does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hilore_cli.ilp import CodecModel, LayerModel, OperatorModel, PhaseModel, ValueModel
from hilore_cli.schema import MASK_CODEC, GraphNode, LayerClass, UnitRow

Actions = tuple[tuple[str, str], ...]
"""A pattern's actions, sorted: what candidates are told apart by."""


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """A layer's program and what its indices mean."""

    model: LayerModel
    units: tuple[str, ...]
    """unit key of each value"""
    masks: frozenset[str]
    """units that are stored as bits"""


def build_layer_program(layer_class: LayerClass, units: Iterable[UnitRow], *, codecs: Sequence[str], scale: float, risk_budget: float, negligible_ns: int = 0) -> LayerProgram:
    """The rows of a layer class as values, operators and phases. Views are folded into the storage they alias.

    Left out: what no backward operator can need; codecs that alone are over the risk budget; storing a value that
    backward does not read when storing its only consumer's output is no worse (fewer bytes, less work); and storing what
    an operator without inputs makes in less than `negligible_ns` (constants: each would only double the patterns).
    Masks take the bytes of their bits: they are packed in every pattern, which is exact.
    """
    rows = layer_class.nodes
    reads = _backward_reads(rows)
    owners = [row.index for row in rows if row.unit is not None and row.side == "forward"]
    producer_row = {t: _producer(rows, t) for t in owners}
    inputs_of = {p: _input_storages(rows, p, owners) for p in sorted({p for p in producer_row.values() if p is not None})}
    useful = _useful(owners, producer_row, inputs_of, reads)
    owners = [t for t in owners if t in useful]
    operators = sorted({producer_row[t] for t in owners if producer_row[t] is not None})
    value_index = {t: i for i, t in enumerate(owners)}
    measured = {(u.unit, u.codec): u for u in units}
    held = _held_until(rows, owners, producer_row, inputs_of, reads)
    values = []
    bits = {row.unit: measured[row.unit, MASK_CODEC].payload_bytes for row in rows if row.mask and (row.unit, MASK_CODEC) in measured}
    for t in owners:
        row = rows[t]
        allowed = {}
        for k, codec in enumerate(codecs if risk_budget > 0 else ()):
            unit = measured.get((row.unit, codec))
            if unit is None or not row.compressible or row.pinned or unit.payload_bytes >= row.nbytes:
                continue
            if unit.rho2 <= risk_budget:
                allowed[k] = CodecModel(payload_bytes=unit.payload_bytes, time_ns=round((unit.compress_us + unit.decompress_us) * 1000), rho2=unit.rho2, replayed_rho2=unit.replayed_rho2)
        first, last = reads.get(t, (None, None))
        producer = producer_row[t]
        constant = producer is not None and not inputs_of[producer] and not rows[producer].pinned and rows[producer].time_us * scale * 1000 < negligible_ns
        values.append(ValueModel(nbytes=bits.get(row.unit, row.nbytes), producer=-1 if producer is None else operators.index(producer), first_read=first, last_read=last, held_until=held[t], storable=not constant, codecs=allowed))
    models = [OperatorModel(time_ns=round(rows[o].time_us * scale * 1000), inputs=tuple(value_index[u] for u in inputs_of[o]), pinned=rows[o].pinned, matmul=rows[o].matmul) for o in operators]
    model = LayerModel(values=tuple(values), operators=tuple(models), phases=_phases(layer_class))
    return LayerProgram(model=prune_phases(prune_values(model)), units=tuple(rows[t].unit for t in owners), masks=frozenset(bits))


def prune_values(model: LayerModel) -> LayerModel:
    """Drop keeping t where keeping the output u of t's only consumer is no worse in bytes, time and risk.

    u is then available at no later time, from no more bytes, and the consumer need not run again.
    """
    consumers: dict[int, list[int]] = {}
    for o, operator in enumerate(model.operators):
        for t in operator.inputs:
            consumers.setdefault(t, []).append(o)
    outputs: dict[int, list[int]] = {}
    for t, value in enumerate(model.values):
        outputs.setdefault(value.producer, []).append(t)
    values = list(model.values)
    for t, value in enumerate(values):
        users = consumers.get(t, [])
        if value.producer < 0 or value.first_read is not None or len(users) != 1 or len(outputs[users[0]]) != 1:
            continue
        other = values[outputs[users[0]][0]]
        if model.operators[value.producer].pinned or not other.storable or other.nbytes > value.nbytes:
            continue
        codecs = {k: c for k, c in value.codecs.items() if not _dominates(other.codecs.get(k), c)}
        values[t] = replace(value, storable=False, codecs=codecs)
    return replace(model, values=tuple(values))


def replayed_units(layer_class: LayerClass, recomputed: Iterable[int], actions: Actions) -> frozenset[str]:
    """Compressed units that a recomputed matmul-like operator reads, directly or through other recomputed values."""
    rows = layer_class.nodes
    index = {row.unit: row.index for row in rows if row.unit is not None}
    order = sorted(recomputed)
    found = set()
    for unit, action in actions:
        if not action.startswith("compress:"):
            continue
        reached = {index[unit]}
        for i in order:
            if reached.intersection(rows[i].inputs):
                reached.add(i)
        if any(rows[i].matmul for i in reached if i != index[unit]):
            found.add(unit)
    return frozenset(found)


def actions_of_choices(program: LayerProgram, choices: Sequence[int], codecs: Sequence[str]) -> Actions:
    """A pattern's named actions: the layer's input is stored by default, and what is kept for nobody is left out."""
    model = program.model
    wanted = _wanted(model, choices)
    named = {}
    for t, choice in enumerate(choices):
        if choice > 0 and (t in wanted or model.values[t].producer < 0):
            named[program.units[t]] = f"compress:{codecs[choice - 1]}"
        elif choice == 0 and t in wanted and model.values[t].producer >= 0:
            named[program.units[t]] = f"compress:{MASK_CODEC}" if program.units[t] in program.masks else "store"
    return tuple(sorted(named.items()))


def _wanted(model: LayerModel, choices: Sequence[int]) -> set[int]:
    """Values that backward reads, or that operators which run again read."""
    wanted: set[int] = set()
    stack = [t for t, value in enumerate(model.values) if value.first_read is not None]
    while stack:
        t = stack.pop()
        if t in wanted:
            continue
        wanted.add(t)
        if choices[t] < 0 and model.values[t].producer >= 0:
            stack.extend(model.operators[model.values[t].producer].inputs)
    return wanted


def _dominates(other: CodecModel | None, codec: CodecModel) -> bool:
    return other is not None and other.payload_bytes <= codec.payload_bytes and other.time_ns <= codec.time_ns and other.rho2 <= codec.rho2 and other.replayed_rho2 <= codec.replayed_rho2


def _backward_reads(rows: Sequence[GraphNode]) -> dict[int, tuple[int, int]]:
    """Storage -> first and last position at which a backward operator reads it, through views too."""
    reads: dict[int, tuple[int, int]] = {}
    for row in rows:
        if row.side != "backward":
            continue
        for i in row.inputs:
            storage = rows[i].storage
            if storage >= 0 and rows[storage].side == "forward":
                first, _ = reads.get(storage, (row.index, row.index))
                reads[storage] = (first, row.index)
    return reads


def _producer(rows: Sequence[GraphNode], owner: int) -> int | None:
    """The operator that makes a storage; None for the layer's input."""
    row = rows[owner]
    if row.target == "placeholder":
        return None
    return row.inputs[0] if row.target == "<built-in function getitem>" else owner


def _input_storages(rows: Sequence[GraphNode], operator: int, owners: Sequence[int]) -> list[int]:
    """Storages that an operator reads, without parameters and what all layers share."""
    known = set(owners)
    return list(dict.fromkeys(s for s in (rows[i].storage for i in rows[operator].inputs) if s in known))


def _useful(owners: Sequence[int], producer_row: dict[int, int | None], inputs_of: dict[int, list[int]], reads: dict[int, tuple[int, int]]) -> set[int]:
    """Storages that backward reads, their ancestors, and the layer's input."""
    useful = {t for t in owners if producer_row[t] is None}
    stack = [t for t in owners if t in reads]
    while stack:
        t = stack.pop()
        if t not in useful or t in reads:
            useful.add(t)
            for u in inputs_of.get(producer_row[t], ()) if producer_row[t] is not None else ():
                if u not in useful:
                    stack.append(u)
    return useful


def _held_until(rows: Sequence[GraphNode], owners: Sequence[int], producer_row: dict[int, int | None], inputs_of: dict[int, list[int]], reads: dict[int, tuple[int, int]]) -> dict[int, int]:
    """First position at which backward reads the value, or for one it never reads, anything computed from it."""
    first = {t: reads[t][0] if t in reads else len(rows) for t in owners}
    earliest = dict(first)
    for t in reversed(owners):
        if producer_row[t] is not None:
            for u in inputs_of[producer_row[t]]:
                if u in earliest:
                    earliest[u] = min(earliest[u], earliest[t])
    return {t: first[t] if t in reads else earliest[t] for t in owners}


def _phases(layer_class: LayerClass) -> tuple[PhaseModel, ...]:
    """Backward's operators with what backward itself holds while they run: tangent, temporaries, gradients."""
    rows = layer_class.nodes
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for row in rows:
        if row.side == "forward":
            continue
        if row.storage == row.index:
            first[row.index] = -1 if row.side == "tangent" else row.inputs[0] if row.target == "<built-in function getitem>" else row.index
            last.setdefault(row.index, row.index)
        for i in row.inputs:
            if rows[i].storage >= 0:
                last[rows[i].storage] = row.index
    for i in layer_class.outputs:
        last[rows[i].storage] = len(rows)
    own = [(first[s], last[s], rows[s].nbytes) for s in first] + [(row.index, row.index, row.nbytes) for row in rows if row.side == "backward" and row.storage < 0]
    positions = [row.index for row in rows if row.side == "backward" and row.storage in (row.index, -1)]
    return tuple(PhaseModel(position=p, fixed_bytes=sum(n for a, b, n in own if a <= p <= b)) for p in positions)


def prune_phases(model: LayerModel) -> LayerModel:
    """Drop phases at which no choice can need more memory than at some other phase. Mostly matrix products remain."""
    live = [[_live_options(value, phase.position) for value in model.values] for phase in model.phases]

    def excess(p: int, q: int) -> int:
        """Most bytes by which phase p can be above phase q."""
        over = sum(max(a - b for a, b in zip(x, y, strict=True)) for x, y in zip(live[p], live[q], strict=True))
        return model.phases[p].fixed_bytes + over - model.phases[q].fixed_bytes

    kept: list[int] = []
    for p in range(len(model.phases)):
        if any(excess(p, q) <= 0 for q in kept):
            continue
        kept = [q for q in kept if excess(q, p) > 0] + [p]
    return replace(model, phases=tuple(model.phases[p] for p in sorted(kept)))


def _live_options(value: ValueModel, position: int) -> list[int]:
    """Bytes live at a position for: not kept, stored, each codec."""
    if value.first_read is not None and value.first_read <= position <= value.last_read:
        return [value.nbytes] * (2 + len(value.codecs))
    held = position < value.held_until
    return [0, value.nbytes * held, *(codec.payload_bytes * held for codec in value.codecs.values())]
