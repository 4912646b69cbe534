"""Unfusing: replacing a fused layer by its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whet.composites import decompose_layer
from whet.network import Layer, Network, Tensor, copy_into
from whet.ops._origin import express


def unfuse(net: Network, layer: Layer) -> list[Layer]:
    """Replaces a Fused layer of `net` by the layers of its body, in place; returns them. They keep its sources.

    A Concat that several fused layers share is inserted once.
    """
    body = decompose_layer(layer)
    at = net.layers.index(layer)
    seen: dict[Tensor, Tensor] = {inner: outer for inner, outer in zip(body.inputs, layer.inputs, strict=True) if outer is not None}
    for t in body.constants.values():
        seen[t] = net.constant(t.constant(), t.name)
    parts: list[Layer] = []
    for inner in body.layers:
        regions = {k: copy_into(r, Network(r.name, net.stage), seen) for k, r in inner.regions.items()}
        inputs = [None if t is None else seen[t] for t in inner.inputs]
        if inner.op == "DequantizeLinear" and all(t is None or t.is_constant for t in inputs):
            # quantized weights that no kernel reads are dequantized at build time, not in every run
            folded = express(inner.op, *[None if t is None else t.weight for t in inputs], **inner.attrs)
            seen[inner.output] = net.constant(folded, inner.output.name)
            continue
        if (shared := _find_concat(net, inner, inputs)) is not None:
            seen[inner.output] = shared
            continue
        new = net.add_layer(
            inner.op,
            inputs,
            inner.attrs,
            name=f"{layer.name}.{inner.name}",
            regions=regions,
            sources=inner.sources or layer.sources,
            at=at + len(parts),
        )
        parts.append(new)
        seen.update(zip(inner.outputs, new.outputs, strict=True))
    for old, inner_out in zip(layer.outputs, body.outputs, strict=True):
        net.replace(old, seen[inner_out])
    net.remove(layer)
    net.sort()
    return parts


@dataclass(frozen=True)
class Parts:
    """The layers of a fused layer's body in a network of their own; `inputs`: the index of the fused layer's input for each input tensor."""

    layers: list[Layer]
    inputs: Mapping[Tensor, int]


def list_parts(layer: Layer) -> Parts:
    """A fused layer's parts; the layer stays as it is."""
    net, seen, index = Network("parts", "lowered"), {}, {}
    for i, t in enumerate(layer.inputs):
        if t is not None and t not in seen:
            seen[t] = net.constant(t.weight, t.name) if t.weight is not None else net.add_input(t.name, t.type)
            index[seen[t]] = i
    whole = net.add_layer("Fused", [seen[t] for t in layer.inputs if t is not None], layer.attrs, name="whole", regions=layer.regions)
    for t in whole.outputs:
        net.mark_output(t)
    return Parts(unfuse(net, whole), index)


def _find_concat(net: Network, inner: Layer, inputs: list[Tensor | None]) -> Tensor | None:
    """The output of a Concat of `net` with the same inputs and axis as `inner`, if that is a Concat; else None."""
    if inner.op != "Concat":
        return None
    return next((x.output for x in net.layers if x.op == "Concat" and list(x.inputs) == inputs and x.attrs == inner.attrs), None)
