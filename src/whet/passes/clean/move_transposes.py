"""Two Transposes with elementwise layers between them meet: the layers are computed in the order of axes before the first one.

What TensorFlow's exporters leave around activations and sums: NHWC -> NCHW, Relu, NCHW -> NHWC. It fires where all transposes
between go, or become one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import get_op
from whet.ops._origin import express
from whet.rewrite.constants import reshaped
from whet.rewrite.graph import Graph
from whet.rewrite.matching import interior_escapes
from whet.rewrite.rules import Phase, Skip, rule

LONGEST = 8  # elementwise layers between two transposes


@rule("Transpose", phase=Phase.CLEAN, after=["cancel_transposes", "fold_shapes", "drop_no_ops"])
def move_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    perm = _first(g, x)
    if x is None or perm is None or g.maker(x) is None or g.maker(x).op == "Transpose":
        return None
    members: dict[Layer, None] = {}
    if reason := _between(g, x, perm, members) or interior_escapes(g, layer, list(members)):
        return Skip(reason)
    made: dict[Tensor, Tensor] = {}
    for member in sorted(members, key=g.position):
        inputs = [_before(g, t, perm, made) for t in member.inputs]
        made[member.output] = g.add(member.op, *inputs, name=member.name, sources=member.sources, **member.attrs)
    joined = tuple(perm[p] for p in layer.attrs["perm"])
    y = made[x]
    return y if joined == tuple(range(len(joined))) else g.add("Transpose", y, perm=joined, sources=layer.sources)


def _first(g: Graph, t: Tensor | None) -> tuple[int, ...] | None:
    """The order of the nearest Transpose above `t` through elementwise layers; None when there is none."""
    for _ in range(LONGEST):
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


def _between(g: Graph, t: Tensor, perm: Sequence[int], members: dict[Layer, None]) -> str | None:
    """Collects the elementwise layers that make `t`, up to Transposes by `perm`; or why that does not go."""
    layer = g.maker(t)
    if layer is None or (layer.op != "Transpose" and not _is_elementwise(layer)):
        return f"%{t.name} is not transposed before"
    if layer in members:
        return None
    if layer.op == "Transpose":
        return None if tuple(layer.attrs["perm"]) == tuple(perm) else f"'{layer.name}' orders the axes otherwise"
    members[layer] = None
    if len(members) > LONGEST:
        return f"more than {LONGEST} layers stand between the transposes"
    for i in layer.inputs:
        if i is None or (i.weight is not None and i.type.rank <= len(perm)):
            continue
        if i.weight is not None or i.type.rank != len(perm):
            return f"%{i.name}: {i.type} has not the rank of what is transposed"
        if reason := _between(g, i, perm, members):
            return reason
    return None


def _before(g: Graph, t: Tensor | None, perm: Sequence[int], made: dict[Tensor, Tensor]) -> Tensor | None:
    """What `t` was before the axes were ordered by `perm`; constants are ordered back."""
    if t is None or t in made:
        return None if t is None else made[t]
    if t.weight is None:
        return t.maker.inputs[0] if t.maker is not None else None
    if t.weight.array.size == 1:
        return t
    full = reshaped(t.weight, (1,) * (len(perm) - t.type.rank) + t.weight.array.shape)
    back = tuple(int(i) for i in np.argsort(perm))
    return g.constant(express("Transpose", full, perm=back), t.name)
