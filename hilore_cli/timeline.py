"""Memory of a planned step as a timeline, in integer bytes: which values of a layer are live at each operator.

A layer's rows (`schema.LayerClass`) are enough: this file emulates, node by node, what partition.py and torch's
`default_partition` make of them, and counts live storages. The rules, each held against real graphs by tests/test_timeline.py:

* saved: what the pattern stores or compresses and what is pinned, as far as backward reads it; and the layer's input.
* order: torch's `reordering_to_mimic_autograd_engine`. The walk starts at the first user of a tangent; a recomputed node
  lands just before its first use; `decompress` lands just before the first use of what it restores.
* life: an argument dies after its last use; a storage after the last use of its last alias; gradients live to the end of
  the layer's backward; a payload until `decompress` has run. All outputs of an operator come alive when it runs.

What it does NOT count: an operator's own scratch memory, the codecs' temporaries, and allocator rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hilore_cli.errors import PlanMismatchError, ProfileError
from hilore_cli.schema import GraphNode, LayerClass, Pattern, Profile

PayloadBytes = Callable[[str, str], int]
"""(unit, codec) -> bytes of the payload."""


@dataclass(frozen=True, kw_only=True)
class LayerTimeline:
    """One layer under one pattern. Peaks include the layer's own saved bytes; parameters and shared inputs are not counted."""

    stored_bytes: int
    compressed_bytes: int
    """payload bytes within stored_bytes"""
    forward_peak_bytes: int
    backward_peak_bytes: int
    recomputed: tuple[int, ...]
    """indices of forward nodes that run again in backward, in the order they run"""
    recompute_us: float
    saved: tuple[str, ...]
    """names of the nodes that forward hands to backward, in graph order"""
    backward_order: tuple[str, ...]
    """operators of the backward graph in execution order; 'decompress:<node>' for a restored value"""


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One line of the account."""

    label: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StepMoment:
    """What is live at one moment of a step: `account` sums to the bytes of that moment."""

    name: str
    account: tuple[AccountRow, ...]
    kept_bytes: int
    """stored by the layers below the one at work; at the loss head by all of them"""
    compressed_bytes: int
    """payload bytes within kept_bytes"""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.account)


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """A whole step: the most bytes live at once, when, and what they are."""

    peak_bytes: int
    binding_moment: str
    account: tuple[AccountRow, ...]
    stored_bytes: int
    compressed_bytes: int
    recompute_us: float


def simulate_layer(layer_class: LayerClass, pattern: Pattern, *, payload_bytes: PayloadBytes) -> LayerTimeline:
    """Exact liveness of one layer's forward and backward graph under a pattern. Raises PlanMismatchError for an unknown unit."""
    rows = layer_class.nodes
    split = split_nodes(layer_class, pattern)
    sizes = {row.storage: 0 for row in rows} | {row.index: row.nbytes for row in rows if _is_counted(row)}
    payloads = {index: payload_bytes(rows[index].unit, codec) for index, codec in split.codec_of.items()}
    forward_peak = _forward_peak(layer_class, split, sizes, payloads)
    backward_peak = _backward_peak(layer_class, split, sizes, payloads)
    plain = {rows[i].storage for i in split.saved if i not in payloads}
    recomputed = tuple(i for i in split.backward if i >= 0 and rows[i].side == "forward")
    return LayerTimeline(
        stored_bytes=sum(sizes[s] for s in plain) + sum(payloads.values()),
        compressed_bytes=sum(payloads.values()),
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        recomputed=recomputed,
        recompute_us=sum(rows[i].time_us for i in recomputed),
        saved=tuple(rows[i].name for i in split.saved),
        backward_order=tuple(rows[i].name if i >= 0 else f"decompress:{rows[~i].name}" for i in split.backward),
    )


def simulate_step(profile: Profile, patterns_of_layers: Sequence[Pattern]) -> StepTimeline:
    """The peak of the whole update with one pattern for each layer. Raises ProfileError, PlanMismatchError."""
    payloads = {(u.layer, u.unit, u.codec): u.payload_bytes for u in profile.units}
    known: dict[tuple[str, str, tuple[int, ...]], LayerTimeline] = {}
    layers = []
    for row, pattern in zip(profile.layers, patterns_of_layers, strict=True):
        layer_class = class_of_layer(profile, row.index)
        if layer_class is None:
            layers.append(fallback_timeline(profile, row.index))
            continue

        def payload_bytes(unit: str, codec: str, layer: int = row.index) -> int:
            if (layer, unit, codec) not in payloads:
                raise PlanMismatchError(f"profile {profile.name}: unit {unit!r} of layer {layer} was not measured under codec {codec!r}")
            return payloads[layer, unit, codec]

        used = tuple(payload_bytes(u, a.removeprefix("compress:")) for u, a in sorted(pattern.actions.items()) if a.startswith("compress:"))
        key = (layer_class.name, pattern.model_dump_json(), used)
        if key not in known:
            known[key] = simulate_layer(layer_class, pattern, payload_bytes=payload_bytes)
        layers.append(known[key])
    return combine_layers(profile, layers)


def combine_layers(profile: Profile, layers: Sequence[LayerTimeline]) -> StepTimeline:
    """Put simulated layers one after the other, and take the moment at which most is live."""
    peak = max(step_moments(profile, layers), key=lambda moment: moment.nbytes)
    return StepTimeline(
        peak_bytes=peak.nbytes,
        binding_moment=peak.name,
        account=peak.account,
        stored_bytes=sum(layer.stored_bytes for layer in layers),
        compressed_bytes=sum(layer.compressed_bytes for layer in layers),
        recompute_us=sum(layer.recompute_us for layer in layers),
    )


def step_moments(profile: Profile, layers: Sequence[LayerTimeline]) -> list[StepMoment]:
    """A step in the order in which it runs: forward of each layer, the loss head, backward of each layer, the embedding, the update."""
    account = profile.account
    base = (AccountRow(label="weights", nbytes=account.weights_bytes), AccountRow(label="gradients", nbytes=account.gradients_bytes), AccountRow(label="optimizer state", nbytes=account.optimizer_bytes), AccountRow(label="workspaces", nbytes=account.workspace_bytes))
    shared = (*base, AccountRow(label="shared inputs", nbytes=account.shared_bytes))
    before, packed = [0], [0]
    for layer in layers:
        before.append(before[-1] + layer.stored_bytes)
        packed.append(packed[-1] + layer.compressed_bytes)

    def of_layer(i: int, kind: str, peak_bytes: int) -> StepMoment:
        rows = (*shared, AccountRow(label=f"stored by layers below {i}", nbytes=before[i]), AccountRow(label=f"layer {i} in {kind}", nbytes=peak_bytes))
        return StepMoment(name=f"{kind} of layer {i}", account=rows, kept_bytes=before[i], compressed_bytes=packed[i])

    forward = [of_layer(i, "forward", layer.forward_peak_bytes) for i, layer in enumerate(layers)]
    backward = [of_layer(i, "backward", layer.backward_peak_bytes) for i, layer in enumerate(layers)]
    head = (*shared, AccountRow(label="stored by all layers", nbytes=before[-1]), AccountRow(label="loss head", nbytes=account.head_bytes))
    tail = (*shared, AccountRow(label="embedding gradient", nbytes=account.tail_bytes))
    update = (*base, AccountRow(label="clipping and update", nbytes=account.update_bytes))
    return [
        *forward,
        StepMoment(name="loss head", account=head, kept_bytes=before[-1], compressed_bytes=packed[-1]),
        *reversed(backward),
        StepMoment(name="embedding backward", account=tail, kept_bytes=0, compressed_bytes=0),
        StepMoment(name="optimizer step", account=update, kept_bytes=0, compressed_bytes=0),
    ]


def class_of_layer(profile: Profile, layer: int) -> LayerClass | None:
    """The captured class of a layer; None for a layer that is left to torch's checkpoint. Raises ProfileError."""
    return _class_of(profile, layer) if profile.layers[layer].fallback is None else None


def fallback_timeline(profile: Profile, layer: int) -> LayerTimeline:
    """A layer that could not be captured, run by torch's checkpoint: its class holds what was measured of it (uncaptured.py)."""
    return simulate_layer(_class_of(profile, layer), Pattern(), payload_bytes=_no_payload)


def _class_of(profile: Profile, layer: int) -> LayerClass:
    row = profile.layers[layer]
    for layer_class in profile.classes:
        if layer_class.name == row.layer_class:
            return layer_class
    raise ProfileError(f"profile {profile.name}: layer {row.fqn} belongs to class {row.layer_class!r}, which the profile does not hold; measure it again with `hilore profile`")


# ------------------------------------------------------------------------------------------------- emulated partitioner


@dataclass(frozen=True, kw_only=True)
class Split:
    """The two graphs of a layer as node indices. `~i` in an order stands for the codec op on node i."""

    saved: tuple[int, ...]
    codec_of: dict[int, str]
    """saved node -> codec, for those that backward reads"""
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def split_nodes(layer_class: LayerClass, pattern: Pattern) -> Split:
    """Emulate `partition.split_joint` on rows. Raises PlanMismatchError for a unit that the class lacks."""
    rows = layer_class.nodes
    missing = set(pattern.actions) - {row.unit for row in rows if row.unit is not None}
    if missing:
        raise PlanMismatchError(f"the plan names unit {sorted(missing)[0]!r}, which layer class {layer_class.name!r} does not have; profile the model as it is run now")
    users: list[list[int]] = [[] for _ in rows]
    for row in rows:
        for i in row.inputs:
            users[i].append(row.index)
    tagged = {row.index: _is_tagged_saved(row, rows, pattern) for row in rows if _is_forward_op(row)}
    reorders = not all(tagged.values())
    available = {row.index for row in rows if row.side == "tangent"}
    available |= {row.index for row in rows if _is_saved(row, rows, users, tagged, reorders)}
    needed = _ancestors(layer_class.outputs, rows, available)
    read = {i for n in needed for i in rows[n].inputs} | set(layer_class.outputs)
    saved = tuple(row.index for row in rows if row.index in available and row.index in read and row.side != "tangent")
    codec_of = {}
    for i in saved:
        action = pattern.actions.get(rows[i].unit or "", pattern.default)
        if action.startswith("compress:") and rows[i].storage == i:
            codec_of[i] = action.removeprefix("compress:")
    backward = _autograd_order(needed, rows, set(saved)) if reorders else sorted(needed)
    forward = _ancestors([*layer_class.forward_outputs, *saved], rows, {row.index for row in rows if row.target == "placeholder"})
    return Split(
        saved=saved,
        codec_of=codec_of,
        forward=tuple(_with_compress(_raise_getitems(sorted(forward), rows), codec_of, rows)),
        backward=tuple(_with_decompress(_raise_getitems(backward, rows), codec_of, rows)),
    )


def _is_forward_op(row: GraphNode) -> bool:
    return row.side == "forward" and row.target != "placeholder"


def _is_getitem(row: GraphNode) -> bool:
    return row.target == "<built-in function getitem>"


def _is_tagged_saved(row: GraphNode, rows: Sequence[GraphNode], pattern: Pattern) -> bool:
    """The rule of partition.tag_joint: views of a unit that is treated specially are taken again from what is saved."""
    owner = row.storage if row.storage >= 0 else row.index
    action = pattern.actions.get(rows[owner].unit or "", pattern.default)
    if owner != row.index and action != pattern.default:
        return row.pinned
    return row.pinned or action != "recompute"


def _is_saved(row: GraphNode, rows: Sequence[GraphNode], users: list[list[int]], tagged: dict[int, bool], reorders: bool) -> bool:
    """True for what torch's default partitioner would hand to backward, if backward reads it."""
    if row.side != "forward":
        return False
    if row.target == "placeholder":
        return any(rows[u].side == "backward" or (reorders and not tagged.get(u, True)) for u in users[row.index])
    if row.storage < 0 and users[row.index] and all(_is_getitem(rows[u]) for u in users[row.index]):
        return False
    return tagged[row.index]


def _ancestors(targets: Iterable[int], rows: Sequence[GraphNode], available: set[int]) -> set[int]:
    found: set[int] = set()
    stack = [t for t in targets if t not in available]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(i for i in rows[node].inputs if i not in available and i not in found)
    return found


def _autograd_order(needed: set[int], rows: Sequence[GraphNode], saved: set[int]) -> list[int]:
    """torch's reordering_to_mimic_autograd_engine: joint order from the first user of a tangent on, ancestors just in time."""
    ordered = sorted(needed)
    tangents = {row.index for row in rows if row.side == "tangent"}
    first = next((i for i in ordered if tangents.intersection(rows[i].inputs)), None)
    if first is None:
        return ordered
    placed = set(saved) | tangents
    result: list[int] = []
    for node in ordered[ordered.index(first) :]:
        if node not in placed:
            block = sorted(_ancestors([node], rows, placed))
            placed.update(block)
            result.extend(block)
    return result


def _raise_getitems(order: list[int], rows: Sequence[GraphNode]) -> list[int]:
    """Move getitem nodes right behind the operator whose output they take."""
    behind: dict[int, list[int]] = {}
    for node in order:
        if _is_getitem(rows[node]):
            behind.setdefault(rows[node].inputs[0], []).append(node)
    result: list[int] = []
    present = set(order)
    for node in order:
        if not _is_getitem(rows[node]) or rows[node].inputs[0] not in present:
            result.append(node)
            result.extend(behind.get(node, ()))
    return result


def _with_compress(order: list[int], codec_of: dict[int, str], rows: Sequence[GraphNode]) -> list[int]:
    inputs = [~i for i in codec_of if rows[i].target == "placeholder"]
    result = inputs[::-1]
    for node in order:
        result.append(node)
        if node in codec_of:
            result.append(~node)
    return result


def _with_decompress(order: list[int], codec_of: dict[int, str], rows: Sequence[GraphNode]) -> list[int]:
    waiting = dict.fromkeys(codec_of)
    result: list[int] = []
    for node in order:
        due = [i for i in waiting if i in rows[node].inputs]
        for i in due:
            result.append(~i)
            del waiting[i]
        result.append(node)
    return result


# ------------------------------------------------------------------------------------------------------------- liveness


def _is_counted(row: GraphNode) -> bool:
    """Parameters and inputs shared by all layers are rows of the account, not of a layer."""
    return row.storage == row.index and row.kind not in ("parameter", "shared")


def _forward_peak(layer_class: LayerClass, split: Split, sizes: dict[int, int], payloads: dict[int, int]) -> int:
    rows = layer_class.nodes
    spans = _Spans(rows, split.forward, sizes)
    held = [row.index for row in rows if row.kind == "activation"]
    spans.run({i: [i] for i in payloads})
    for i in held:
        spans.start(i, at=-1)
        spans.use(i, at=spans.end)
    for i in layer_class.forward_outputs:
        spans.use(i, at=spans.end)
    for i in split.saved:
        if i not in payloads:
            spans.use(i, at=spans.end)
    extra = [(spans.position[~i], spans.end, nbytes) for i, nbytes in payloads.items()]
    return spans.peak(extra)


def _backward_peak(layer_class: LayerClass, split: Split, sizes: dict[int, int], payloads: dict[int, int]) -> int:
    rows = layer_class.nodes
    spans = _Spans(rows, split.backward, sizes)
    for i in (*split.saved, *(row.index for row in rows if row.side == "tangent")):
        if i not in payloads:
            spans.start(i, at=-1)
    spans.run({})
    for i in payloads:
        spans.start(i, at=spans.position[~i])
    for i in layer_class.outputs:
        spans.use(i, at=spans.end)
    extra = [(-1, spans.position[~i], nbytes) for i, nbytes in payloads.items()]
    return spans.peak(extra)


class _Spans:
    """First and last position at which each storage is live, over one order of nodes."""

    def __init__(self, rows: Sequence[GraphNode], order: Sequence[int], sizes: dict[int, int]) -> None:
        self.rows = rows
        self.order = order
        self.sizes = sizes
        self.position = {node: p for p, node in enumerate(order)}
        self.end = len(order)
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._unnamed: list[tuple[int, int, int]] = []

    def start(self, node: int, *, at: int) -> None:
        storage = self.rows[node].storage
        if storage >= 0:
            self._first[storage] = min(at, self._first.get(storage, at))
            self._last.setdefault(storage, at)

    def use(self, node: int, *, at: int) -> None:
        storage = self.rows[node].storage
        if storage >= 0:
            self._last[storage] = max(at, self._last.get(storage, at))
        else:
            for output in self._outputs(node):
                if output in self.position:
                    self.use(output, at=at)

    def run(self, codec_inputs: dict[int, list[int]]) -> None:
        """Walk the order: what each node makes comes alive, what it reads lives at least until then."""
        for p, node in enumerate(self.order):
            if node < 0:
                for i in codec_inputs.get(~node, ()):
                    self.use(i, at=p)
                continue
            row = self.rows[node]
            for i in row.inputs:
                self.use(i, at=p)
            if row.storage == node and not (_is_getitem(row) and row.inputs[0] in self.position):
                self.start(node, at=p)
            elif row.storage < 0:
                self._start_outputs(node, at=p)

    def peak(self, extra: Iterable[tuple[int, int, int]]) -> int:
        """Most bytes live at once; `extra` are (first, last, bytes) of payloads."""
        steps = [0] * (self.end + 3)
        spans = [(first, self._last[s], self.sizes.get(s, 0)) for s, first in self._first.items()]
        for first, last, nbytes in (*spans, *self._unnamed, *extra):
            steps[first + 1] += nbytes
            steps[last + 2] -= nbytes
        live = most = 0
        for step in steps:
            live += step
            most = max(most, live)
        return most

    def _start_outputs(self, node: int, *, at: int) -> None:
        """All outputs come alive together; those that this graph does not take live until the last one is taken."""
        outputs = self._outputs(node)
        taken = [self.position[i] for i in outputs if i in self.position]
        self._unnamed.append((at, max(taken, default=at), self.rows[node].nbytes))
        for i in outputs:
            if i in self.position:
                self.start(i, at=at)
            else:
                self._unnamed.append((at, max(taken, default=at), self.sizes.get(i, 0)))

    def _outputs(self, node: int) -> list[int]:
        """getitem nodes of an operator with several outputs, whether or not they are in this order."""
        return [row.index for row in self.rows[node + 1 :] if _is_getitem(row) and row.inputs == [node]]


def _no_payload(unit: str, codec: str) -> int:
    raise ProfileError(f"unit {unit!r} has no payload under {codec!r}")
