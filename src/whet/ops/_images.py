"""Propagates the batch axis of tensors through a network, using the ops' couples.

An op's couples declare which axes of its inputs and outputs correspond (ops/_base.py). If every layer maps an axis one to one from
the inputs to the outputs, entries along it are independent: the first sample's result does not depend on the second's.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._base import get_op

Axes = dict[Tensor, int]
"""Batch axis by tensor, for tensors that have one."""


class NotPerImage(Exception):
    """A layer mixes samples, or its op does not declare them independent."""


def follow(layer: Layer, axes: Axes, batch: int) -> Axes:
    """Batch axes of a layer's outputs, and of further inputs with one entry per sample. Raises NotPerImage."""
    inputs, outputs = {t for t in layer.inputs if t is not None}, set(layer.outputs)
    if not any(t in axes for t in inputs):
        return {}
    if layer.op == "Shape":
        return {}  # sizes of the whole batch, updated by recut
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
        raise NotPerImage(f"{layer.op} does not declare which axes are independent")
    coupled = couples(layer)
    if any(c.summed and (axes.get(c.a) == c.a_axis or axes.get(c.b) == c.b_axis) for c in coupled):
        raise NotPerImage(f"{layer.op} '{layer.name}' sums over samples")
    ties = [tie for c in coupled for tie in ((c.a, c.a_axis, c.b, c.b_axis, c), (c.b, c.b_axis, c.a, c.a_axis, c))]
    ties = [tie for tie in ties if tie[0] in inputs and tie[2] in outputs]
    made: Axes = {}
    for t, i, y, j, c in ties:
        if axes.get(t) == i:
            whole = c.a_at == c.b_at == 0 and c.a_block == c.b_block == 1 and c.count in (None, batch)
            if not whole or t.shape[i] != batch or y.shape[j] != batch or made.setdefault(y, j) != j:
                raise NotPerImage(f"{layer.op} '{layer.name}' regroups samples")
    if outputs - set(made) or any(t in axes and not any(u is t and i == axes[t] for u, i, *_ in ties) for t in inputs):
        raise NotPerImage(f"{layer.op} '{layer.name}' mixes samples")
    return made | {t: i for t, i, y, j, _ in ties if t not in axes and made[y] == j and t.shape[i] == batch}


def fused_layers(layer: Layer) -> list[Layer]:
    """The layers of a fused body, with the fused layer's inputs substituted."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    layers = []
    for x in body.layers:
        copy = Layer(x.op, x.name, [outer.get(t, t) if t is not None else None for t in x.inputs], x.attrs, x.regions, x.sources)
        copy.outputs = x.outputs
        layers.append(copy)
    return layers


def fused_results(layer: Layer) -> list[Tensor]:
    """The tensors that produce a fused body's outputs."""
    body = layer.regions["body"]
    outer = {b: t for b, t in zip(body.inputs, layer.inputs, strict=True) if t is not None}
    return [outer.get(t, t) for t in body.outputs]
