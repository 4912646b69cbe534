"""Removes channels that are zero for every input, and the weights that read them; the network computes the same.

An output channel of a convolution or product with zero weights and bias is zero; it stays zero through activations, pools, sums and
concatenations until other weights read it. Exact for finite activations (0 times infinity is not 0). A multiple of 8 channels stays a multiple of
8: other counts run slower than the removed work saves. Where 2:4 weights read the channels, only aligned groups of four are removed, so that the
weights stay 2:4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import infer_layer
from whet.ops._origin import express, make_literal
from whet.passes._channels import BINARY, Units, count_channels, find_zero_channels, is_depthwise, is_per_channel
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass
from whet.sparsity import find_reduction_axis, is_two_four

_MULTIPLE = 8
Cut = Callable[[Tensor | None, int, np.ndarray | None], Tensor | None]
_PRODUCTS = ("Conv", "Gemm", "MatMul")


@network_pass(phase=Phase.FOLD, after=["fold_batch_norm", "fold_pads", "fold_scale_shift", "gemm_to_canonical"], level=3)
def remove_zero_channels(g: Graph) -> list[Fired | Skip]:
    zero = find_zero_channels(g.net)
    makers = [y for layer in g.layers if layer.op in _PRODUCTS for y in layer.outputs if y in zero and zero[y].any()]
    if not makers:
        return []
    units = Units()
    units.couple(g.net)
    kept_units = _select_units_to_keep(units, zero)
    patterned = _read_by_two_four(g, zero)
    before = -1
    while len(kept_units) != before:  # keeping a unit for one tensor may split a group of four of another one
        before = len(kept_units)
        for t in zero:
            _keep_multiple(units, t, kept_units)
        for t in patterned:
            _keep_fours(units, t, kept_units)
    kept: dict[Tensor, np.ndarray] = {}
    notes: list[Fired | Skip] = []
    for t in zero:
        ids = units.unit_ids(t)
        at = np.array([i for i, u in enumerate(ids or ()) if units.root(u) in kept_units], np.int64)
        if ids is not None and len(at) < len(ids):
            kept[t] = at
    for t in makers:
        name = t.maker.name if t.maker is not None else t.name
        removed = len(zero[t]) - len(kept[t]) if t in kept else 0
        if removed:
            notes.append(Fired(f"{removed} of {len(zero[t])} channels are zero and were removed", name))
        else:
            why = _why_kept(units, t, zero, patterned)
            notes.append(Skip(f"{int(zero[t].sum())} of {len(zero[t])} channels are zero, but {why}", name))
    if kept:
        _cut(g, kept)
    return notes


def _select_units_to_keep(units: Units, zero: dict[Tensor, np.ndarray]) -> set[int]:
    """Roots of the units that are locked, or not zero in some tensor."""
    kept_units = {units.root(i) for i in units.locked}
    for t, flags in zero.items():
        ids = units.unit_ids(t)
        if ids is not None:
            kept_units.update(units.root(u) for u, z in zip(ids, flags, strict=True) if not z)
    return kept_units


def _keep_multiple(units: Units, t: Tensor, kept_units: set[int]) -> None:
    """Keeps at least one channel of `t`, and a multiple of 8 if it has a multiple of 8."""
    ids = units.unit_ids(t) or range(0)
    free = [u for u in ids if units.root(u) not in kept_units]
    left = len(ids) - len(free)
    is_product = t.maker is not None and t.maker.op in _PRODUCTS and not is_depthwise(t.maker)
    wanted = max(1, -(-left // _MULTIPLE) * _MULTIPLE if is_product and len(ids) % _MULTIPLE == 0 else left)
    for u in free[: wanted - left]:
        kept_units.add(units.root(u))


def _read_by_two_four(g: Graph, zero: dict[Tensor, np.ndarray]) -> list[Tensor]:
    """The tensors that 2:4 weights read along their channels."""
    tensors: dict[Tensor, None] = {}
    for layer in g.layers:
        place = find_reduction_axis(layer) if layer.op in _PRODUCTS and layer.input(0) in zero else None
        if place is not None and place[0].shape[place[1]] == len(zero[layer.needs(0)]) and is_two_four(place[0].array(), place[1]):
            tensors[layer.needs(0)] = None
    return list(tensors)


def _keep_fours(units: Units, t: Tensor, kept_units: set[int]) -> None:
    """Keeps all channels of each aligned group of four of which one is kept."""
    ids = list(units.unit_ids(t) or ())
    for start in range(0, len(ids), 4):
        four = [units.root(u) for u in ids[start : start + 4]]
        if not kept_units.isdisjoint(four):
            kept_units.update(four)


def _why_kept(units: Units, t: Tensor, zero: dict[Tensor, np.ndarray], patterned: list[Tensor]) -> str:
    ids = units.unit_ids(t)
    if zero[t].all():
        return "one must be kept"
    locked = {units.root(i) for i in units.locked}
    mine = [units.root(u) for u, z in zip(ids or (), zero[t], strict=True) if z]
    if all(r in locked for r in mine):
        return "their readers need all channels"
    alone = [r for r in mine if r not in locked]
    for other, flags in zero.items():
        where = {units.root(u): z for u, z in zip(units.unit_ids(other) or (), flags, strict=True)}
        if other is not t and all(r in where and not where[r] for r in alone):
            return f"not in %{other.name}, which shares its channels"
    if any(set(alone) & {units.root(u) for u in units.unit_ids(other) or ()} for other in patterned):
        return "2:4 weights read them, which keep their pattern only if aligned groups of four are zero"
    return f"fewer would not be a multiple of {_MULTIPLE}"


def _cut(g: Graph, kept_channels: dict[Tensor, np.ndarray]) -> None:
    """Removes the other channels from weights, attributes and types."""
    cut_constants: dict[tuple[Tensor, int, bytes], Tensor] = {}

    def cut(t: Tensor | None, axis: int, at: np.ndarray | None) -> Tensor | None:
        if t is None or at is None or t.weight is None:
            return t
        key = (t, axis, at.tobytes())
        if key not in cut_constants:
            weight = express("Gather", t.weight, make_literal(at), axis=axis, assumes=(f"{int(t.shape[axis]) - len(at)} channels are zero",))
            cut_constants[key] = g.constant(weight, t.name + ".cut")
        return cut_constants[key]

    for layer in g.layers:
        new = _cut_inputs(layer, kept_channels, cut)
        if new != list(layer.inputs):
            layer.inputs = tuple(new)
        if is_cut_depthwise(layer, kept_channels):
            layer.attrs["group"] = len(kept_channels[layer.output])
    for layer in g.layers:
        types, _ = infer_layer(layer)
        for t, type_ in zip(layer.outputs, types, strict=True):
            t.type = type_
    g.reindex()
    for name, t in list(g.net.constants.items()):
        if not g.readers(t) and not g.is_output(t):
            del g.net.constants[name]


def is_cut_depthwise(layer: Layer, kept_channels: dict[Tensor, np.ndarray]) -> bool:
    """True if the layer is a depthwise convolution whose weights were just cut."""
    w = layer.inputs[1] if layer.op == "Conv" else None
    return layer.op == "Conv" and w is not None and w.shape[1] == 1 and layer.attrs["group"] > 1 and layer.output in kept_channels


def _cut_inputs(layer: Layer, kept_channels: dict[Tensor, np.ndarray], cut: Cut) -> list[Tensor | None]:
    """The layer's inputs, with constants cut along the channels of its activations."""
    if not layer.inputs or not layer.outputs:
        return list(layer.inputs)
    x, y = layer.inputs[0], layer.outputs[0]
    ins, outs = kept_channels.get(x) if x is not None else None, kept_channels.get(y)
    rest = list(layer.inputs[1:])
    match layer.op:
        case "Conv":
            w = cut(rest[0], 0, outs)
            w = w if is_depthwise(layer) else cut(w, 1, ins)
            return [x, w, *(cut(b, 0, outs) for b in rest[1:])]
        case "Gemm" | "MatMul":
            transposed = bool(layer.attrs.get("transB"))
            w = cut(cut(rest[0], 0 if transposed else 1, outs), 1 if transposed else 0, ins)
            return [
                x,
                w,
                *(b if b is None or b.weight is None or b.weight.array.size == 1 else cut(b, b.type.rank - 1, outs) for b in rest[1:]),
            ]
        case "BatchNormalization":
            return [x, *(cut(t, 0, outs) for t in rest)]
    if outs is None or count_channels(y) is None:
        return list(layer.inputs)
    operands = layer.inputs if layer.op in BINARY else (x, *rest)
    return [t if t is None or t.weight is None or not is_per_channel(t, y) else cut(t, t.type.rank + 1 - y.type.rank, outs) for t in operands]
