"""Risk of a model that was not measured, from the measured profile of a smaller relative.

Layers correspond by relative depth (0 below, 1 above; linear between two of the relative's). A layer's share in the whole gradient
falls with the number of layers, so each unit's squared risk is scaled until its sum over all layers is the relative's. Units have the
relative's risk by their key; a unit that the relative lacks (the norms of q and k, experts, adapters) is taken for the riskiest one of
its kind there (matmul-like or not; attention, feed-forward or residual stream), so that it is never thought calmer than anything measured. kappa and
round-trip errors are taken over as they are.

What this does NOT know: whether the larger model has other outliers, trains other parameters, or sees other exposures. That is why
everything that comes from it is marked `estimated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hilore_cli.errors import ProfileError
from hilore_cli.schema import Kappa, LayerClass, Profile, UnitRow

Place = Literal["attention", "mlp", "residual"]


class Kind(NamedTuple):
    """What a unit is like: made by a matmul-like operator or not, and where it stands; norms and the layer input are on the residual stream."""

    matmul: bool
    place: Place


@dataclass(frozen=True, kw_only=True)
class Risk:
    """What relative.UnitRow has of one unit of one layer under one codec."""

    rho2: float
    replayed_rho2: float
    rel_error: float
    exposure_error: float


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """What LayerRow has of one layer, scaled."""

    grad_norm: float
    input_grad_norm: float
    noise_transfer: float


def kind_of(layer_class: LayerClass, unit: str) -> Kind:
    """Raises ProfileError for a unit that the class lacks."""
    rows = layer_class.nodes
    row = next((row for row in rows if row.unit == unit), None)
    if row is None:
        raise ProfileError(f"layer class {layer_class.name!r} has no unit {unit!r}")
    made_by = rows[row.inputs[0]] if "getitem" in row.target and row.inputs else row
    top = unit.partition(".")[0]
    place: Place = "attention" if "attn" in top or ("attention" in top and "norm" not in top) else "mlp" if any(word in top for word in ("mlp", "expert", "feed_forward", "ffn", "moe")) else "residual"
    return Kind(matmul=row.matmul or made_by.matmul, place=place)


def check_codecs(relative: Profile, codecs: Sequence[str]) -> None:
    """Raise ProfileError for a codec whose risk the relative does not tell."""
    known = {row.codec for row in relative.kappas} & {row.codec for row in relative.units}
    missing = [codec for codec in codecs if codec not in known]
    if missing:
        there = f"--codecs {','.join(c for c in relative.codecs if c in known)}" if known else "--codecs ''"
        raise ProfileError(f"profile {relative.name}: codec {missing[0]} was not measured there, so its risk is not known; take {there}, name another profile with --relative, or measure: hilore profile --model {relative.model.source} --task {relative.batch.task} --codecs {','.join(codecs)} --name {relative.model.source.rstrip('/').rsplit('/', 1)[-1]}-{'-'.join(codecs)}, and name that with --relative")


def kappas_of(relative: Profile, codecs: Sequence[str]) -> list[Kappa]:
    return [row for row in relative.kappas if row.codec in codecs]


def scale_risk(relative: Profile, layers: Sequence[Mapping[str, Kind]], *, codecs: Sequence[str]) -> dict[tuple[int, str, str], Risk]:
    """(layer, unit, codec) -> risk of a model whose layers, lowest first, hold these units of these kinds. Raises ProfileError."""
    check_codecs(relative, codecs)
    by_key: dict[tuple[str, str], dict[int, UnitRow]] = {}
    for row in relative.units:
        by_key.setdefault((_plain(row.unit), row.codec), {})[row.layer] = row
    stand_in = _riskiest(relative, by_key)
    members: dict[str, list[int]] = {}
    kinds: dict[str, Kind] = {}
    for index, units in enumerate(layers):
        for unit, kind in units.items():
            members.setdefault(unit, []).append(index)
            kinds[unit] = kind
    result = {}
    for unit, indices in members.items():
        for codec in codecs:
            rows = by_key.get((_plain(unit), codec)) or by_key[stand_in[kinds[unit], codec]]
            for index, risk in zip(indices, _spread(rows, indices, of=len(layers), relative_layers=len(relative.layers)), strict=True):
                result[index, unit, codec] = risk
    return result


def scale_layers(relative: Profile, count: int) -> list[LayerFigures]:
    """Figures of so many layers: squared gradient norms add up to the relative's, gains by relative depth."""
    there = relative.layers
    rows = [LayerFigures(**{name: _between([getattr(row, name) ** 2 for row in there], i, count) ** 0.5 for name in ("grad_norm", "input_grad_norm")}, noise_transfer=_between([row.noise_transfer for row in there], i, count)) for i in range(count)]
    total = sum(row.grad_norm**2 for row in rows)
    scale = (sum(row.grad_norm**2 for row in there) / total) ** 0.5 if total > 0 else 1.0
    return [LayerFigures(grad_norm=row.grad_norm * scale, input_grad_norm=row.input_grad_norm, noise_transfer=row.noise_transfer) for row in rows]


# --------------------------------------------------------------------------------------------------------------- helpers


def _plain(unit: str) -> str:
    """The key without what PEFT puts around a linear: `self_attn.q_proj.base_layer.mm` is `self_attn.q_proj.mm`."""
    return unit.replace(".base_layer.", ".")


def _riskiest(relative: Profile, by_key: Mapping[tuple[str, str], Mapping[int, UnitRow]]) -> dict[tuple[Kind, str], tuple[str, str]]:
    """(kind, codec) -> key of the unit with the largest risk over all layers: of that kind, else of the same place, else of any."""
    kinds = {_plain(row.unit): kind_of(layer_class, row.unit) for layer_class in relative.classes for row in layer_class.nodes if row.unit}
    found: dict[tuple[Kind, str], tuple[str, str]] = {}
    for codec in {codec for _, codec in by_key}:
        sums = {key: sum(row.replayed_rho2 for row in rows.values()) for key, rows in by_key.items() if key[1] == codec}
        for kind in itertools.starmap(Kind, itertools.product((False, True), get_args(Place))):
            same = [key for key in sums if kinds.get(key[0]) == kind] or [key for key in sums if (k := kinds.get(key[0])) is not None and k.place == kind.place]
            found[kind, codec] = max(same or sums, key=lambda key: (sums[key], key))
    return found


def _spread(rows: Mapping[int, UnitRow], indices: Sequence[int], *, of: int, relative_layers: int) -> list[Risk]:
    """One unit's risks on layers `indices` of `of`: by depth, its mean over the layers that have it times their share kept.

    The sum over a unit that all layers have is that of the relative; one that every second layer has keeps half of it.
    """
    have = sorted(rows)
    share = len(indices) / of * relative_layers / len(have)

    def values(name: str) -> list[float]:
        series = [getattr(rows[layer], name) for layer in have]
        return [_between(series, position, len(indices)) for position in range(len(indices))]

    scaled = {}
    for name in ("rho2", "replayed_rho2"):
        there, here = sum(getattr(row, name) for row in rows.values()), values(name)
        factor = there * share / sum(here) if sum(here) > 0 else 0.0
        scaled[name] = [value * factor for value in here]
    errors = {name: values(name) for name in ("rel_error", "exposure_error")}
    return [Risk(rho2=rho2, replayed_rho2=max(rho2, replayed), rel_error=error, exposure_error=weighted) for rho2, replayed, error, weighted in zip(scaled["rho2"], scaled["replayed_rho2"], errors["rel_error"], errors["exposure_error"], strict=True)]


def _between(series: Sequence[float], position: int, count: int) -> float:
    """The series, taken at the middle of `count` equal parts, read at the middle of the part `position`; linear, ends held."""
    x = (position + 0.5) / count * len(series) - 0.5
    low = min(max(int(x), 0), len(series) - 1)
    high = min(low + 1, len(series) - 1)
    return series[low] + min(max(x - low, 0.0), 1.0) * (series[high] - series[low])
