"""Which axis of a tensor counts the images of a batch: followed from layer to layer by what the ops say of their axes.

An op says by its couples which axes of its inputs and outputs are cut together (ops/_base.py): what is cut from one axis takes nothing
away elsewhere but along the axes that it is tied to. An axis that every layer ties one to one, from the inputs to the outputs, counts
things that never meet: the first image's result does not depend on the second's.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._base import get_op

Axes = dict[Tensor, int]
"""The axis that counts images, of each tensor that has one."""


class NotPerImage(Exception):
    """A layer mixes images, or its op does not say that it keeps them apart."""


def follow(layer: Layer, axes: Axes, batch: int) -> Axes:
    """The image axes of a layer's outputs, and of other inputs that hold a part for each image. Raises NotPerImage."""
    inputs, outputs = {t for t in layer.inputs if t is not None}, set(layer.outputs)
    if not any(t in axes for t in inputs):
        return {}
    if layer.op == "Shape":
        return {}  # sizes of the whole batch: what is cut by them is recut
    if layer.op == "Reformat":
        return {layer.outputs[0]: axes[layer.needs(0)]}
    if layer.op == "Fused":
        inner = dict(axes)
        for x in fused_layers(layer):
            inner |= follow(x, inner, batch)
        ends = zip(layer.outputs, fused_results(layer), strict=True)
        return {t: i for t, i in inner.items() if t in inputs and t not in axes} | {t: inner[b] for t, b in ends if b in inner}
    couples = get_op(layer.op).couples
    if couples is None or layer.regions:
        raise NotPerImage(f"{layer.op} does not say which axes stay apart")
    coupled = couples(layer)
    if any(c.summed and (axes.get(c.a) == c.a_axis or axes.get(c.b) == c.b_axis) for c in coupled):
        raise NotPerImage(f"{layer.op} '{layer.name}' adds up over images")
    ties = [tie for c in coupled for tie in ((c.a, c.a_axis, c.b, c.b_axis, c), (c.b, c.b_axis, c.a, c.a_axis, c))]
    ties = [tie for tie in ties if tie[0] in inputs and tie[2] in outputs]
    made: Axes = {}
    for t, i, y, j, c in ties:
        if axes.get(t) == i:
            whole = c.a_at == c.b_at == 0 and c.a_block == c.b_block == 1 and c.count in (None, batch)
            if not whole or t.shape[i] != batch or y.shape[j] != batch or made.setdefault(y, j) != j:
                raise NotPerImage(f"{layer.op} '{layer.name}' regroups images")
    if outputs - set(made) or any(t in axes and not any(u is t and i == axes[t] for u, i, *_ in ties) for t in inputs):
        raise NotPerImage(f"{layer.op} '{layer.name}' mixes images")
    return made | {t: i for t, i, y, j, _ in ties if t not in axes and made[y] == j and t.shape[i] == batch}


def fused_layers(layer: Layer) -> list[Layer]:
    """The layers of a fused body, reading the fused layer's own inputs."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    found = []
    for x in body.layers:
        copy = Layer(x.op, x.name, [outer.get(t, t) if t is not None else None for t in x.inputs], x.attrs, x.regions, x.sources)
        copy.outputs = x.outputs
        found.append(copy)
    return found


def fused_results(layer: Layer) -> list[Tensor]:
    """Where a fused body's results come from."""
    body = layer.regions["body"]
    outer = {b: t for b, t in zip(body.inputs, layer.inputs, strict=True) if t is not None}
    return [outer.get(t, t) for t in body.outputs]
