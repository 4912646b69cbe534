"""Moves elementwise layers before the Transpose that they read, so that it meets the Transpose after them and both cancel or become one.

TensorFlow's exporters write such pairs around activations and sums: NHWC -> NCHW, Relu, NCHW -> NHWC.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import get_op
from whet.ops._origin import express
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape
from whet.rewrite.rules import Phase, Skip, rule

_MAX_LAYERS = 8  # elementwise layers between two transposes


@rule("Transpose", phase=Phase.CLEAN, after=["cancel_transposes", "fold_shapes", "drop_no_ops"])
def move_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    perm = _transpose_above(g, x)
    maker = g.maker(x)
    if x is None or perm is None or maker is None or maker.op == "Transpose":
        return None
    members: dict[Layer, None] = {}
    if reason := _collect(g, x, perm, members) or find_interior_escape(g, layer, list(members)):
        return Skip(reason)
    moved: dict[Tensor, Tensor] = {}
    for member in sorted(members, key=g.position):
        inputs = [_find_untransposed(g, t, perm, moved) for t in member.inputs]
        moved[member.output] = g.add(member.op, *inputs, name=member.name, sources=member.sources, **member.attrs)
    combined = tuple(perm[p] for p in layer.attrs["perm"])
    y = moved[x]
    return y if combined == tuple(range(len(combined))) else g.add("Transpose", y, perm=combined, sources=layer.sources)


def _transpose_above(g: Graph, t: Tensor | None) -> tuple[int, ...] | None:
    """The permutation of the nearest Transpose above `t`, through elementwise layers; None when there is none."""
    for _ in range(_MAX_LAYERS):
        layer = g.maker(t)
        if layer is None:
            return None
        if layer.op == "Transpose":
            return tuple(layer.attrs["perm"])
        if not _is_elementwise(layer):
            return None
        t = next((i for i in layer.inputs if i is not None and not i.is_constant), None)
    return None


def _is_elementwise(layer: Layer) -> bool:
    return get_op(layer.op).pointwise and len(layer.outputs) == 1 and not layer.regions


def _collect(g: Graph, t: Tensor, perm: Sequence[int], members: dict[Layer, None]) -> str | None:
    """Collects the elementwise layers between `t` and Transposes by `perm` into `members`. Returns why they cannot be moved, or None."""
    layer = g.maker(t)
    if layer is None or (layer.op != "Transpose" and not _is_elementwise(layer)):
        return f"%{t.name} is not the result of a Transpose"
    if layer in members:
        return None
    if layer.op == "Transpose":
        return None if tuple(layer.attrs["perm"]) == tuple(perm) else f"'{layer.name}' has another permutation"
    members[layer] = None
    if len(members) > _MAX_LAYERS:
        return f"more than {_MAX_LAYERS} layers are between the transposes"
    for i in layer.inputs:
        if i is None or (i.weight is not None and i.type.rank <= len(perm)):
            continue
        if i.weight is not None or i.type.rank != len(perm):
            return f"%{i.name}: {i.type} has another rank than the transposed values"
        if reason := _collect(g, i, perm, members):
            return reason
    return None


def _find_untransposed(g: Graph, t: Tensor | None, perm: Sequence[int], moved: dict[Tensor, Tensor]) -> Tensor | None:
    """The tensor that `t` is the transpose of: a moved layer's output, a Transpose's input, or a constant with the inverse permutation."""
    if t is None or t in moved:
        return None if t is None else moved[t]
    if t.weight is None:
        return t.maker.inputs[0] if t.maker is not None else None
    if t.weight.array.size == 1:
        return t
    full = reshape_weight(t.weight, (1,) * (len(perm) - t.type.rank) + t.weight.array.shape)
    back = tuple(int(i) for i in np.argsort(perm))
    return g.constant(express("Transpose", full, perm=back), t.name)
