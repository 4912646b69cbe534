"""Resizes one lowered layer without cutting its network, so that its latency can be measured at widths that are never built."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, Network, Tensor, Weight
from whet.ops import get_op

Slot = tuple[str, int, int]  # "in" or "out", index, axis


def shrink_layer(layer: Layer, sizes: Mapping[Slot, int]) -> Layer:
    """The layer (static shapes) with some axes shortened. Constants lose their last entries; attributes follow from the op's `recut`.

    Raises NetworkError if the op does not accept these sizes, or its output sizes differ from `sizes`.
    """
    net = Network("probe", "lowered")
    twins: dict[Tensor, Tensor] = {}
    for i, t in enumerate(layer.inputs):
        if t is None or t in twins:
            continue
        cut = {axis: n for (side, k, axis), n in sizes.items() if side == "in" and k == i}
        if t.weight is not None:
            at = tuple(slice(0, cut.get(a, d)) for a, d in enumerate(t.weight.array.shape))
            twins[t] = net.constant(Weight(np.ascontiguousarray(t.weight.array[at]), t.weight.origin) if cut else t.weight, t.name)
        else:
            twins[t] = net.add_input(t.name, t.type.with_shape(cut.get(a, d) for a, d in enumerate(t.shape)))
    outs = {(layer.outputs[k], axis): np.arange(n) for (side, k, axis), n in sizes.items() if side == "out"}
    if layer.op == "Fused":
        body = _shrink_body(layer, twins)
        new = net.add_layer("Fused", [None if t is None else twins[t] for t in layer.inputs], layer.attrs, name=layer.name, regions={"body": body})
    else:
        new = _add_resized(layer, net, twins, outs)
    for (side, k, axis), n in sizes.items():
        if side == "out" and new.outputs[k].shape[axis] != n:
            raise NetworkError(f"'{layer.name}' has the output {new.outputs[k].type} at these sizes, not {n} along axis {axis}")
    return new


def _shrink_body(layer: Layer, twins: Mapping[Tensor, Tensor]) -> Network:
    """The region of a fused layer with its shortened inputs."""
    old = layer.regions["body"]
    new = Network(old.name, old.stage)
    seen: dict[Tensor, Tensor] = {}
    for inner, outer in zip(old.inputs, layer.inputs, strict=True):
        if outer is not None:
            seen[inner] = new.add_input(inner.name, twins[outer].type)
    for t in old.constants.values():
        seen[t] = new.constant(t.constant(), t.name)
    for x in old.layers:
        added = _add_resized(x, new, seen, {})
        seen.update(zip(x.outputs, added.outputs, strict=True))
    new.outputs = [seen[t] for t in old.outputs]
    return new


def _add_resized(layer: Layer, net: Network, twins: Mapping[Tensor, Tensor], outs: Mapping[tuple[Tensor, int], np.ndarray]) -> Layer:
    """Adds the layer on its resized inputs, with the attributes and constants that the op's `recut` changes."""
    kept = dict(outs)
    for t in layer.inputs:
        if t is not None:
            kept.update({(t, i): np.arange(n) for i, (n, d) in enumerate(zip(twins[t].shape, t.shape, strict=True)) if n != d})
    recut = get_op(layer.op).recut
    change = recut(layer, kept) if recut is not None and kept else {}
    attrs = {**layer.attrs, **{k: v for k, v in change.items() if isinstance(k, str)}}
    inputs: list[Tensor | None] = [None if t is None else twins[t] for t in layer.inputs]
    for i, value in change.items():
        if isinstance(i, int):
            inputs += [None] * (i + 1 - len(inputs))
            inputs[i] = None if value is None else net.constant(np.asarray(value), f"{layer.name}.{i}")
    while inputs and inputs[-1] is None:
        inputs.pop()
    return net.add_layer(layer.op, inputs, attrs, name=layer.name, outputs=[t.name for t in layer.outputs])
