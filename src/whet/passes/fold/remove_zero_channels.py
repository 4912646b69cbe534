"""Channels that are wholly zero go, together with the weights that read them: what is left computes the same.

A convolution's or product's output channel is zero when its weights and its bias are; it stays zero through activations, pools,
sums and concatenations until other weights read it. Exact for finite activations (0 times infinity is no zero). What is left
stays a multiple of 8 where it was one: odd counts run slower than they save.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import infer_layer
from whet.ops._origin import express, literal
from whet.passes._channels import BINARY, Units, count, is_depthwise, vector_axis, zeros
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass

_STEP = 8
_MAKERS = ("Conv", "Gemm", "MatMul")


@network_pass(phase=Phase.FOLD, after=["fold_batch_norm", "fold_pads", "fold_scale_shift", "gemm_to_canonical"], level=3)
def remove_zero_channels(g: Graph) -> list[Fired | Skip]:
    zero = zeros(g.net)
    makers = [y for layer in g.layers if layer.op in _MAKERS for y in layer.outputs if y in zero and zero[y].any()]
    if not makers:
        return []
    units = Units()
    units.follow(g.net)
    staying = _staying(units, zero)
    for t in zero:
        _leave_some(units, t, staying)
    kept: dict[Tensor, np.ndarray] = {}
    notes: list[Fired | Skip] = []
    for t in zero:
        ids = units.of(t)
        at = np.array([i for i, u in enumerate(ids or ()) if units.root(u) in staying], np.int64)
        if ids is not None and len(at) < len(ids):
            kept[t] = at
    for t in makers:
        name = t.maker.name if t.maker is not None else t.name
        gone = len(zero[t]) - len(kept[t]) if t in kept else 0
        if gone:
            notes.append(Fired(f"{gone} of {len(zero[t])} channels are zero and went", name))
        else:
            why = _reason(units, t, zero)
            notes.append(Skip(f"{int(zero[t].sum())} of {len(zero[t])} channels are zero, but {why}", name))
    if kept:
        _cut(g, kept)
    return notes


def _staying(units: Units, zero: dict[Tensor, np.ndarray]) -> set[int]:
    """Roots of the units that are locked, or not zero somewhere."""
    staying = {units.root(i) for i in units.locked}
    for t, flags in zero.items():
        ids = units.of(t)
        if ids is not None:
            staying.update(units.root(u) for u, z in zip(ids, flags, strict=True) if not z)
    return staying


def _leave_some(units: Units, t: Tensor, staying: set[int]) -> None:
    """Keeps at least one channel of `t`, and a multiple of 8 where there was one."""
    ids = units.of(t) or range(0)
    free = [u for u in ids if units.root(u) not in staying]
    left = len(ids) - len(free)
    made = t.maker is not None and t.maker.op in _MAKERS and not is_depthwise(t.maker)
    wanted = max(1, -(-left // _STEP) * _STEP if made and len(ids) % _STEP == 0 else left)
    for u in free[: wanted - left]:
        staying.add(units.root(u))


def _reason(units: Units, t: Tensor, zero: dict[Tensor, np.ndarray]) -> str:
    ids = units.of(t)
    if zero[t].all():
        return "one must be left"
    locked = {units.root(i) for i in units.locked}
    mine = [units.root(u) for u, z in zip(ids or (), zero[t], strict=True) if z]
    if all(r in locked for r in mine):
        return "what reads them needs all channels"
    alone = [r for r in mine if r not in locked]
    for other, flags in zero.items():
        where = {units.root(u): z for u, z in zip(units.of(other) or (), flags, strict=True)}
        if other is not t and all(r in where and not where[r] for r in alone):
            return f"not in %{other.name}, which shares its channels"
    return f"fewer would not be a multiple of {_STEP}"


def _cut(g: Graph, kept: dict[Tensor, np.ndarray]) -> None:
    """Takes the channels that are not kept out of weights, attributes and types."""
    made: dict[tuple[Tensor, int, bytes], Tensor] = {}

    def cut(t: Tensor | None, axis: int, at: np.ndarray | None) -> Tensor | None:
        if t is None or at is None or t.weight is None:
            return t
        key = (t, axis, at.tobytes())
        if key not in made:
            weight = express("Gather", t.weight, literal(at), axis=axis, assumes=(f"{int(t.shape[axis]) - len(at)} channels are zero",))
            made[key] = g.constant(weight, t.name + ".cut")
        return made[key]

    for layer in g.layers:
        new = _inputs(layer, kept, cut)
        if new != list(layer.inputs):
            layer.inputs = tuple(new)
        if is_cut_depthwise(layer, kept):
            layer.attrs["group"] = len(kept[layer.output])
    for layer in g.layers:
        types, _ = infer_layer(layer)
        for t, type_ in zip(layer.outputs, types, strict=True):
            t.type = type_
    g.reindex()
    for name, t in list(g.net.constants.items()):
        if not g.readers(t) and not g.is_output(t):
            del g.net.constants[name]


def is_cut_depthwise(layer: Layer, kept: dict[Tensor, np.ndarray]) -> bool:
    """Whether the layer is a depthwise convolution whose weights were just cut."""
    w = layer.inputs[1] if layer.op == "Conv" else None
    return layer.op == "Conv" and w is not None and w.shape[1] == 1 and layer.attrs["group"] > 1 and layer.output in kept


def _inputs(layer: Layer, kept: dict[Tensor, np.ndarray], cut) -> list[Tensor | None]:
    """The layer's inputs with constants cut as its activations are."""
    if not layer.inputs or not layer.outputs:
        return list(layer.inputs)
    x, y = layer.inputs[0], layer.outputs[0]
    ins, outs = kept.get(x) if x is not None else None, kept.get(y)
    rest = list(layer.inputs[1:])
    match layer.op:
        case "Conv":
            w = cut(rest[0], 0, outs)
            w = w if is_depthwise(layer) else cut(w, 1, ins)
            return [x, w, *(cut(b, 0, outs) for b in rest[1:])]
        case "Gemm" | "MatMul":
            flipped = bool(layer.attrs.get("transB"))
            w = cut(cut(rest[0], 0 if flipped else 1, outs), 1 if flipped else 0, ins)
            return [
                x,
                w,
                *(b if b is None or b.weight is None or b.weight.array.size == 1 else cut(b, b.type.rank - 1, outs) for b in rest[1:]),
            ]
        case "BatchNormalization":
            return [x, *(cut(t, 0, outs) for t in rest)]
    if outs is None or count(y) is None:
        return list(layer.inputs)
    operands = layer.inputs if layer.op in BINARY else (x, *rest)
    return [t if t is None or t.weight is None or not vector_axis(t, y) else cut(t, t.type.rank + 1 - y.type.rank, outs) for t in operands]
